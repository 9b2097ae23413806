"""A session over workers, with the interface of `DecodeSession`: requests in, text out. The parent is client and
router.

prefill worker ─ first token ─┐
decode worker  ─ the others ──┴─► one list of tokens per request, in order ─► text
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.algorithm.registry import is_known_everywhere
from ...core.contract.request import FinishReason, Request
from ...core.errors import ConfigError, ForedraftError
from ...core.handoff import HandoffTiming
from ...core.handoff.messages import request_to_json
from ...core.handoff.placement import LeastLoaded, Placement, Placements, Verdict
from ...core.prompt import Prompt
from ...core.scheduler.config import EngineRole
from ...core.scheduler.spec import EngineSpec
from ...observe.engine_lines import active_level
from ..session.plan import ARGUMENTS, SessionOptions, SessionPlan, has_states, plan_session
from ..session.session import check_vocabulary
from ..session.text import Tokenizer
from ..session.text_session import FINISH, REFUSED, SessionStats, TextDelta, TextSession
from .processes import Disaggregation, WorkerProcess, Workers
from .worker import SessionOrder, spec_for

SECOND_NS = 1_000_000_000
TIMING = HandoffTiming(lease_ns=60 * SECOND_NS, hold_ns=180 * SECOND_NS, fence_ns=5 * SECOND_NS)
"""Between real processes: a worker answers between two rounds or chunks, which may take long;
a death is found at once, without them."""
LISTEN_S = 0.1  # how often `interrupted` is asked
DRAIN_S = 300.0  # longer than any lease, hold and fence: what is still held then will never be released


class NotDrained(ForedraftError):
    """Workers still hold something although every request is over."""


class DisaggregatedSession(TextSession):
    """See `open`. Not thread-safe. `plan` is the decode workers'."""

    def __init__(self, workers: Workers, plan: SessionPlan, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.workers = workers
        self.plan = plan
        self._session = workers.num_sessions
        by_role = {role: [w.name for w in workers.living() if w.place.role is role] for role in EngineRole}
        self._placements = Placements(
            LeastLoaded(by_role[EngineRole.PREFILL], lambda request: request.prefill_len),
            LeastLoaded(by_role[EngineRole.DECODE], lambda request: 1),
            lambda request_id: Prompt.of_tokens(self._tokens[request_id]),
        )
        self._tokens: dict[str, list[int]] = {}  # of each request, in order, without a gap
        # Of each request by the place in its output: what overtook others, as tokens and user outputs.
        self._early: dict[str, dict[int, tuple[list[int], dict[str, list[Any]]]]] = {}
        self._reports: dict[str, dict[str, Any]] = {}
        self._is_open = True
        self._kept: list[TextDelta] = []  # they came while a report was awaited

    @classmethod
    def open(
        cls,
        plan: SessionPlan,
        workers: Workers,
        *,
        tokenizer: Tokenizer | None = None,
        timing: HandoffTiming = TIMING,
        faults: Mapping[str, Mapping[str, Any]] | None = None,
        logs: Mapping[str, Path] | None = None,
        run: Mapping[str, Any] | None = None,
    ) -> DisaggregatedSession:
        """Have every worker load the models of `plan` and make its engine (see `plan_disaggregated`).

        `faults` are injected on the links, `logs` are the event logs to write, both by worker. Raises WorkerFailed.
        """
        options = plan.options
        tokenizer = tokenizer or Tokenizer.load(options.model)
        check_vocabulary(tokenizer, plan)
        workers.num_sessions += 1
        for worker in workers.living():
            order = SessionOrder(
                session=workers.num_sessions,
                options=replace(options, device=worker.device),
                engine=spec_for(worker.place.role, plan.spec),
                dtype=str(plan.dtype).removeprefix("torch."),
                device=worker.device,
                weight_bytes=plan.weight_bytes,
                kv_bytes=plan.kv_bytes,
                timing=timing,
                log=str(logs[worker.name]) if logs is not None else None,
                run=run,
                faults=dict((faults or {}).get(worker.name, {})),
                log_level=active_level(),
            )
            worker.say({"do": "open", "order": order.to_json()})
        opened = workers.answers("opened")
        for worker in workers.living():
            if worker.place.role is EngineRole.DECODE:
                described = EngineSpec.from_json(opened[worker.name]["engine"], f"the engine of {worker.name}")
                plan = replace(plan, spec=described)
                break
        return cls(workers, plan, tokenizer)

    def __enter__(self) -> DisaggregatedSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            # after an error the state of the workers is unknown: they end, or the next session resets them
            self.close()

    # -- serving ------------------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        """Give a request up, wherever it is; an id that is not live changes nothing."""
        if (placement := self._placements.abort(request_id)) is not None:
            for name in (placement.prefill, placement.decode):
                self.workers[name].say({"do": "abort", "request_id": request_id})

    # -- numbers ------------------------------------------------------------------------------------------------------

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return the held rows and slots of each living worker, and its work so far. Requests go on meanwhile, and
        their deltas are kept."""
        self._reports = {}
        for worker in self.workers.living():
            worker.say({"do": "report"})
        while any(worker.name not in self._reports for worker in self.workers.living()):
            self._kept += self._hear(LISTEN_S)
        return self._reports

    def drain(self) -> dict[str, dict[str, Any]]:
        """Wait until no worker holds anything for a request, and report. NotDrained after five minutes."""
        deadline_s = time.monotonic() + DRAIN_S
        while not all(report["is_idle"] for report in self.reports().values()):
            if time.monotonic() > deadline_s:
                raise NotDrained(f"after {DRAIN_S:.0f} s without a request workers still hold: {self._reports}")
            time.sleep(LISTEN_S)
        return self._reports

    def stats(self) -> SessionStats:
        """Return the numbers since the session was opened, of the workers that live."""
        reports = self.reports() if self._is_open else self._reports
        totals = {
            key: sum(report[key] for report in reports.values())
            for key in ("rounds", "verified_rows", "drafted", "correct_drafts", "switches")
        }
        phases = {
            f"{name}_{phase}": seconds
            for name, report in reports.items()
            for phase, seconds in report["phase_seconds"].items()
        }
        return self._stats(
            phase_seconds=phases,
            ema_accept_len={
                name: {int(bound): ema for bound, ema in report["ema_accept_len"].items()}
                for name, report in reports.items()
                if report["ema_accept_len"] and self.workers[name].place.role is EngineRole.DECODE
            },
            **totals,
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, complete: bool = False) -> None:
        """End the session; the workers stay, for another one. `complete`: the logs say that the run came to its end."""
        if not self._is_open:
            return
        self.reports()
        self._is_open = False
        self.workers.ask_all("closed", {"do": "close", "complete": complete})

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> str:
        request_id = request.request_id
        if request_id in self._receiving:
            return "duplicate id: a live request has it"
        placement = self._placements.place(request)
        if placement is None:
            return "no worker is left"
        self._tokens[request_id], self._early[request_id] = [], {}
        self._dispatch(placement)
        return ""

    @property
    def _is_serving(self) -> bool:
        return bool(self._receiving or self._kept)

    def _serve(self) -> list[TextDelta]:
        kept, self._kept = self._kept, []
        return kept or self._hear(LISTEN_S)

    def _dispatch(self, placement: Placement) -> None:
        request = request_to_json(placement.request)
        self.workers[placement.prefill].say({"do": "submit", "request": request, "peer": placement.decode})

    def _abort_all(self) -> None:
        for request_id in self._placements.request_ids:
            self.abort(request_id)

    def _hear(self, wait_s: float) -> list[TextDelta]:
        """Return the messages about requests that workers send within `wait_s`."""
        deltas: list[TextDelta] = []
        for worker, said in self.workers.hear(wait_s):
            if said is None:
                deltas += self._lost(worker)
            elif said["session"] != self._session:
                continue
            elif said["say"] == "news":
                deltas += self._news(worker, said)
            elif said["say"] == "lost":
                deltas += self._judged(self._placements.acknowledge_loss(worker.name, said["peer"]))
            elif said["say"] == "link broken":
                # One of the two is dead or dying. Should it be alive, it can serve no more.
                self.workers[said["peer"]].kill()
            elif said["say"] == "report":
                self._reports[worker.name] = said["report"]
        return deltas

    def _lost(self, worker: WorkerProcess) -> list[TextDelta]:
        for other in self.workers.living():
            other.say({"do": "lose", "peer": worker.name})
        return self._judged(self._placements.lose(worker.name, f"worker {worker.name} {worker.death}"))

    def _judged(self, verdicts: Sequence[Verdict]) -> list[TextDelta]:
        deltas = []
        for verdict in verdicts:
            if verdict.placement is not None:
                self._early[verdict.request_id].clear()  # from behind a gap: they are computed again
                self._dispatch(verdict.placement)
            else:
                reason = FinishReason.ERROR if verdict.failure else FinishReason.ABORT
                deltas.append(self._end(verdict.request_id, FINISH[reason], verdict.failure))
        return deltas

    def _news(self, worker: WorkerProcess, news: Mapping[str, Any]) -> list[TextDelta]:
        deltas: list[TextDelta] = []
        for request_id in news["joined"]:
            if request_id in self._placements:
                self._placements.joined(request_id)
        for request_id, offset, tokens, outputs in news["tokens"]:
            if request_id in self._placements:
                deltas += self._take(request_id, offset, tokens, outputs)
        for request_id, reason, num_output, message in news["ended"]:
            if request_id in self._placements:
                deltas += self._ended(worker, request_id, reason, num_output, message)
        return deltas

    def _take(self, request_id: str, offset: int, tokens: list[int], outputs: dict[str, list[Any]]) -> list[TextDelta]:
        """Take tokens from `offset` of a request's output on. Two workers report one request, and its tokens must stay
        in order."""
        said, early = self._tokens[request_id], self._early[request_id]
        early[offset] = (tokens, outputs)
        deltas = []
        while (found := early.pop(len(said), None)) is not None:
            tokens, outputs = found
            said += tokens
            logprobs = tuple(outputs.get("logprobs", ()))
            deltas.append(TextDelta(request_id, self._text_of(request_id, tokens), tuple(tokens), logprobs))
        return deltas

    def _ended(
        self, worker: WorkerProcess, request_id: str, reason: str, num_output: int, message: str
    ) -> list[TextDelta]:
        if reason in (FinishReason.TRANSFERRED.value, FinishReason.MOVED.value):
            self._placements.handed_over(request_id)  # or given back: the verdict comes when all workers have answered
            return []
        finished = FinishReason(reason) if reason != REFUSED else None
        told = len(self._tokens[request_id])
        if finished is None:
            return [self._end(request_id, REFUSED if not told else FINISH[FinishReason.ERROR], message)]
        if finished in (FinishReason.STOP, FinishReason.LENGTH) and told != num_output:
            message = f"worker {worker.name} delivered {num_output} tokens, {told} of them were told"
            finished = FinishReason.ERROR
        return [self._end(request_id, FINISH[finished], message)]

    def _end(self, request_id: str, finish: str, message: str) -> TextDelta:
        if request_id in self._placements:
            self._placements.end(request_id)
        del self._tokens[request_id], self._early[request_id]
        return TextDelta(request_id, self._last_text_of(request_id, finish), (), (), finish, message)


def plan_disaggregated(
    options: SessionOptions, topology: Disaggregation, longest_request: int | None = None
) -> SessionPlan:
    """Return the plan of each worker: all of them have the same sizes, so that whatever one has computed fits into
    another.

    Workers on one device share its memory, and on a CPU its cores. Raises as `plan_session` does.
    """
    if options.tensor_parallel > 1:
        message = (
            f"{options.tensor_parallel}; workers hand whole KV on, and ranks have parts of it: leave disaggregate out"
        )
        raise ConfigError.of(ARGUMENTS, "tensor_parallel", message)
    devices = topology.devices(options.device)
    sharing = max(devices.count(device) for device in devices)
    threads = options.threads
    if devices[0] == "cpu" and threads is None:
        threads = max(1, (os.cpu_count() or 1) // sharing)
    fraction = options.memory_fraction / sharing
    plan = plan_session(replace(options, device=devices[0], threads=threads, memory_fraction=fraction), longest_request)
    if has_states(plan.target, plan.draft):
        message = "a handoff carries KV and no recurrent state; a model with recurrent layers decodes where it prefills"
        raise ConfigError.of(ARGUMENTS, "disaggregate", message)
    if not is_known_everywhere(plan.algorithm.name):
        message = (
            f"{plan.algorithm.name} was registered in this process alone; workers are processes of their own and know the entry "
            "points of group foredraft.algorithms"
        )
        raise ConfigError.of(ARGUMENTS, "algorithm", message)
    return plan
