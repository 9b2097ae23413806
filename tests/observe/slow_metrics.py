"""The slow, obviously right metrics: dictionaries, one token at a time. What `RunMetrics` is tested against."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
from foredraft.core.contract.events import Aborted, Committed, Event, Planned, Submitted


class SlowMetrics:
    """Reads whole event streams, one per replica, merged by their order in `events`."""

    def __init__(self, events: list[tuple[int, Event]]) -> None:
        self.requests: list[dict] = []  # ended, in no order that matters
        self.itl: list[int] = []
        self.correct_histogram: Counter[int] = Counter()
        self.correct_at_steps: Counter[tuple[int, int]] = Counter()  # (draft steps, correct drafts)
        self.rounds: list[dict] = []
        self.proposed = self.looked_up = self.cached = self.switches = self.delivered = 0
        self.samples: list[tuple[int, int, int, int]] = []  # now, running, waiting, held
        self.refused = self.retractions = self.left_a_multi_step = 0
        live: dict[tuple[int, str], dict] = {}
        row_owner: dict[tuple[int, int], dict] = {}
        held: dict[int, int] = defaultdict(int)
        planned: dict[int, list[Planned]] = defaultdict(list)
        last_steps: dict[int, int] = {}
        leaving: dict[int, list[tuple[dict, int]]] = defaultdict(list)
        for replica, event in events:
            if isinstance(event, Submitted):
                if event.refusal:
                    self.refused += 1
                else:
                    live[replica, event.request.request_id] = _arrived(replica, event)
            elif isinstance(event, Aborted):
                request = live.pop((replica, event.request_id), None)
                if request is not None and request["running"]:
                    # A running multi-step may have delivered something to it before it left.
                    leaving[replica].append((request, event.now_ns))
                elif request is not None:
                    self._end(request, "abort", event.now_ns)
            elif isinstance(event, Planned):
                for request_id in event.retracted:
                    request = live[replica, request_id]
                    request["retractions"] += 1
                    request["running"] = False
                    self.retractions += 1
                for join in event.step.joins if event.step is not None else ():
                    request = live[replica, join.request.request_id]
                    request["running"] = True
                    if request["scheduled"] is None:
                        request["scheduled"], request["cached"] = event.now_ns, join.num_cached
                    row_owner[replica, join.row] = request
                    if join.request.prompt.content_is_known:
                        self.looked_up += join.request.prompt.length + join.num_emitted
                        self.cached += join.num_cached
                held[replica] = event.num_held_slots
                if event.step is not None:
                    planned[replica].append(event)
            elif isinstance(event, Committed):
                plan = planned[replica].pop(0)
                self._commit(replica, event, plan, live, row_owner, last_steps)
                for request, at in leaving[replica]:
                    self.left_a_multi_step += any(end in event.result.round_end_ns for end, _ in request["emissions"])
                    self._end(request, "abort", at)
                leaving[replica].clear()
            else:
                continue
            running = sum(request["running"] for request in live.values())
            self.samples.append((event.now_ns, running, len(live) - running, sum(held.values())))
        for request, at in (pair for pairs in leaving.values() for pair in pairs):
            self._end(request, "abort", at)
        self.open = len(live)

    def _commit(self, replica, event, plan, live, row_owner, last_steps) -> None:
        ends = event.result.round_end_ns.tolist()
        decode = event.step.decode
        tokens, correct = [0] * len(ends), [0] * len(ends)
        for request_id in event.first_tokens:
            self._emit(live[replica, request_id], ends[0], 1)
            tokens[0] += 1
        if decode is not None:
            self.switches += last_steps.get(replica, decode.shape.steps) != decode.shape.steps
            last_steps[replica] = decode.shape.steps
            for number, end in enumerate(ends):
                for column, row in enumerate(decode.rows.tolist()):
                    kept = int(event.kept[number, column])
                    if kept == 0:
                        continue
                    request = row_owner[replica, row]
                    drafts = int(event.result.decode.accept_lens[number, column]) - 1
                    self._emit(request, end, kept)
                    request["correct"] += drafts
                    request["verified"] += 1
                    self.correct_histogram[drafts] += 1
                    self.correct_at_steps[decode.shape.steps, drafts] += 1
                    self.proposed += decode.shape.nodes - 1
                    tokens[number] += kept
                    correct[number] += drafts
        self.delivered += sum(tokens)
        for number, end in enumerate(ends):
            self.rounds.append(
                {
                    "time_ns": end,
                    "replica": replica,
                    "step_id": event.step.step_id,
                    "prefill_tokens": 0 if event.step.prefill is None else int(event.step.prefill.lens.sum()),
                    "decode_rows": 0 if decode is None else len(decode.rows),
                    "steps": None if decode is None else decode.shape.steps,
                    "num_draft_tokens": None if decode is None else decode.shape.nodes,
                    "tokens": tokens[number],
                    "correct_drafts": correct[number],
                    "held_slots": plan.num_held_slots,
                    "waiting": plan.num_waiting,
                }
            )
        for finished in event.finished:
            request = live.pop((replica, finished.request_id))
            reason = finished.reason.name.lower()
            at = event.now_ns if reason == "error" else request["emissions"][-1][0]
            self._end(request, reason, at, finished.num_output)

    def _emit(self, request: dict, end: int, kept: int) -> None:
        if request["emissions"]:
            self.itl.append(end - request["emissions"][-1][0])
        request["emissions"].append((end, kept))

    def _end(self, request: dict, reason: str, at: int, num_output: int | None = None) -> None:
        emissions = request["emissions"]
        counted = sum(kept for _, kept in emissions)
        assert num_output is None or num_output == counted, "the engine and the emissions disagree"
        request.update(reason=reason, finish=at, tokens=counted, first=emissions[0][0] if emissions else None)
        self.requests.append(request)

    @property
    def completed(self) -> list[dict]:
        return [request for request in self.requests if request["reason"] in ("stop", "length")]

    def means(self, duration_ns: int) -> tuple[float, float, float]:
        """Running, waiting and held, weighted by time."""
        total = np.zeros(3)
        for now, following in pairwise(self.samples):
            total += np.array(now[1:]) * (following[0] - now[0])
        return tuple((total / duration_ns).tolist())

    def maxima(self) -> tuple[int, int, int]:
        lasting = [a[1:] for a, b in pairwise(self.samples) if b[0] > a[0]]
        return tuple(max(column) for column in zip(*lasting, strict=True))


def _arrived(replica: int, event: Submitted) -> dict:
    """Return the record of a request that has just been accepted."""
    return {
        "id": event.request.request_id,
        "replica": replica,
        "arrival": event.now_ns,
        "prompt": event.request.prompt.length,
        "asked": event.request.max_tokens,
        "emissions": [],
        "correct": 0,
        "verified": 0,
        "retractions": 0,
        "scheduled": None,
        "running": False,
    }
