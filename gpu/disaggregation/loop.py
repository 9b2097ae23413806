"""Serves requests with the workers of one session: it places them, keeps their tokens in order, and acts on losses.

prefill worker ─ first token ─┐
decode worker  ─ the others ──┴─► one list of tokens per request, in order
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.contract.text import PromptScores
from ...core.handoff.messages import request_to_json
from ...core.handoff.placement import LeastLoaded, Placement, Placements, Verdict
from ...core.prompt import Prompt
from ...core.scheduler.config import EngineRole
from ..parallel.processes import WorkerProcess
from ..session.loop import RequestDelta
from ..session.text_session import REFUSED
from .scores import PromptsToScore
from .workers import Workers

LISTEN_S = 0.1
"""How long a turn waits for news."""


class WorkerLoop:
    """Serves the requests of the present session of `workers`, with the interface of `DecodeLoop`. Not thread-safe.

    On the way it calls `on_admit(worker, request id, cached tokens, ns)` when a prefill worker begins a prompt,
    `on_join(worker, request id)` when a decode worker has its KV, `on_gauges(worker, answer)`, and `on_loss(worker)`
    when a worker has died.
    """

    def __init__(self, workers: Workers) -> None:
        self.workers: Workers = workers
        self.refused: set[str] = set()  # requests that workers refused, of which no delta was returned yet
        self.reports: dict[str, dict[str, Any]] = {}  # by worker: what it holds, and its work so far
        self.on_admit: Callable[[WorkerProcess, str, int, int], None] = lambda worker, request_id, cached, ns: None
        self.on_join: Callable[[WorkerProcess, str], None] = lambda worker, request_id: None
        self.on_gauges: Callable[[WorkerProcess, Mapping[str, Any]], None] = lambda worker, said: None
        self.on_loss: Callable[[WorkerProcess], None] = lambda worker: None
        self._session = workers.num_sessions
        by_role = {role: [w.name for w in workers.living() if w.place.role is role] for role in EngineRole}
        self._placements = Placements(
            LeastLoaded(by_role[EngineRole.PREFILL], lambda request: request.prefill_len),
            LeastLoaded(by_role[EngineRole.DECODE], lambda request: 1),
            lambda request_id: Prompt.of_tokens(self._tokens[request_id]),
        )
        self._tokens: dict[str, list[int]] = {}  # of each live request, in order, without a gap
        # Of each request by the place in its output: what overtook others, as tokens and user outputs.
        self._early: dict[str, dict[int, tuple[list[int], dict[str, list[Any]]]]] = {}
        self._kept: list[RequestDelta] = []  # they came while a report was awaited
        self._scores = PromptsToScore(workers)

    @property
    def is_idle(self) -> bool:
        """Whether no request is live and no delta is left to return."""
        return not self._tokens and not self._kept

    def submit(self, request: Request) -> str:
        """Place a request; returns why it was refused, or an empty text. A worker may still refuse it later."""
        if request.request_id in self._tokens:
            return "duplicate id: a live request has it"
        placement = self._placements.place(request)
        if placement is None:
            return "no worker is left"
        self._tokens[request.request_id], self._early[request.request_id] = [], {}
        self._dispatch(placement)
        return ""

    def abort(self, request_id: str) -> None:
        """Give a request up, wherever it is; an id that is not live changes nothing."""
        if (placement := self._placements.abort(request_id)) is not None:
            for name in (placement.prefill, placement.decode):
                self.workers[str(name)].say({"do": "abort", "request_id": request_id})

    def abort_all(self) -> None:
        for request_id in self._placements.request_ids:
            self.abort(str(request_id))

    def turn(self, wait_s: float = LISTEN_S) -> list[RequestDelta]:
        """Return what requests got; waits up to `wait_s` for news if there is nothing yet."""
        kept, self._kept = self._kept, []
        return kept or self._hear(wait_s)

    def ask_gauges(self) -> None:
        """Ask every living worker how full it is; the next turns call `on_gauges` with the answers."""
        for worker in self.workers.living():
            worker.say({"do": "gauges"})

    def await_reports(self) -> dict[str, dict[str, Any]]:
        """Return a report of each living worker. Requests go on meanwhile, and their deltas are kept."""
        self.reports = {}
        for worker in self.workers.living():
            worker.say({"do": "report"})
        while any(worker.name not in self.reports for worker in self.workers.living()):
            self._kept += self._hear(LISTEN_S)
        return self.reports

    def tell_decoders(self, message: Mapping[str, Any]) -> None:
        """Send a message to each living decode worker."""
        for worker in self.workers.living():
            if worker.place.role is EngineRole.DECODE:
                worker.say(message)

    def score(self, prompt: np.ndarray, num_top: int) -> Future[PromptScores]:
        """Have a prefill worker compute how likely a prompt's tokens are; the turns bring the result."""
        return self._scores.begin(prompt, num_top)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _dispatch(self, placement: Placement) -> None:
        request = request_to_json(placement.request)
        self.workers[str(placement.prefill)].say({"do": "submit", "request": request, "peer": placement.decode})

    def _hear(self, wait_s: float) -> list[RequestDelta]:
        """Return what workers tell of requests within `wait_s`."""
        deltas: list[RequestDelta] = []
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
                self.reports[worker.name] = said["report"]
            elif said["say"] == "scored":
                self._scores.end(said["number"], said["scores"], said["message"])
            elif said["say"] == "gauges":
                self.on_gauges(worker, said)
        return deltas

    def _lost(self, worker: WorkerProcess) -> list[RequestDelta]:
        self.on_loss(worker)
        self._scores.lose(worker)
        for other in self.workers.living():
            other.say({"do": "lose", "peer": worker.name})
        return self._judged(self._placements.lose(worker.name, f"worker {worker.name} {worker.death}"))

    def _judged(self, verdicts: Sequence[Verdict]) -> list[RequestDelta]:
        deltas = []
        for verdict in verdicts:
            if verdict.placement is not None:
                self._early[verdict.request_id].clear()  # from behind a gap: they are computed again
                self._dispatch(verdict.placement)
            else:
                reason = FinishReason.ERROR if verdict.failure else FinishReason.ABORT
                deltas.append(self._end(verdict.request_id, reason, verdict.failure))
        return deltas

    def _news(self, worker: WorkerProcess, news: Mapping[str, Any]) -> list[RequestDelta]:
        deltas: list[RequestDelta] = []
        for request_id, num_cached, at_ns in news["admitted"]:
            if request_id in self._placements:
                self.on_admit(worker, request_id, num_cached, at_ns)
        for request_id in news["joined"]:
            if request_id in self._placements:
                self._placements.joined(request_id)
                self.on_join(worker, request_id)
        for request_id, offset, tokens, outputs in news["tokens"]:
            if request_id in self._placements:
                deltas += self._take(request_id, offset, tokens, outputs)
        for request_id, reason, num_output, message in news["ended"]:
            if request_id in self._placements:
                deltas += self._ended(worker, request_id, reason, num_output, message)
        return deltas

    def _take(
        self, request_id: str, offset: int, tokens: list[int], outputs: dict[str, list[Any]]
    ) -> list[RequestDelta]:
        """Take tokens from `offset` of a request's output on. Two workers report one request, and its tokens must stay
        in order."""
        said, early = self._tokens[request_id], self._early[request_id]
        early[offset] = (tokens, outputs)
        deltas = []
        while (found := early.pop(len(said), None)) is not None:
            tokens, outputs = found
            said += tokens
            arrays = {name: [np.asarray(entry) for entry in entries] for name, entries in outputs.items()}
            deltas.append(RequestDelta(request_id, np.array(tokens, dtype=np.int64), arrays))
        return deltas

    def _ended(
        self, worker: WorkerProcess, request_id: str, reason: int | str, num_output: int, message: str
    ) -> list[RequestDelta]:
        """Take the end of a request at a worker; `reason` is the value of a `FinishReason`, or REFUSED."""
        if reason in (FinishReason.TRANSFERRED.value, FinishReason.MOVED.value):
            self._placements.handed_over(request_id)  # or given back: the verdict comes when all workers have answered
            return []
        num_seen = len(self._tokens[request_id])
        if reason == REFUSED:
            if not num_seen:
                self.refused.add(request_id)
            return [self._end(request_id, FinishReason.ERROR, message)]
        finished = FinishReason(int(reason))
        if finished in (FinishReason.STOP, FinishReason.LENGTH) and num_seen != num_output:
            message = f"worker {worker.name} delivered {num_output} tokens, {num_seen} of them arrived here"
            finished = FinishReason.ERROR
        return [self._end(request_id, finished, message)]

    def _end(self, request_id: str, reason: FinishReason, message: str) -> RequestDelta:
        if request_id in self._placements:
            self._placements.end(request_id)
        del self._early[request_id]
        num_output = len(self._tokens.pop(request_id))
        end = FinishedRequest(request_id, reason, num_output, message=message)
        return RequestDelta(request_id, np.empty(0, dtype=np.int64), finished=end)
