"""`foredraft.core.handoff` as the transport contract wants it: two engines whose executors do nothing but count."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ...core.adaptive import fixed_controller
from ...core.algorithm.arrival import DraftPayload
from ...core.algorithm.registry import get_algorithm
from ...core.contract.outcomes import CommitOutcome
from ...core.contract.request import FinishReason, Request
from ...core.contract.step import DecodeResult, FailureCause, MultiStepEnd, PrefillResult, Step, StepFailure, StepResult
from ...core.errors import InvariantViolation
from ...core.handoff import DecodeSide, HandoffTiming, PageFormat, PageSeal, PrefillSide, SendPages, WritePage
from ...core.handoff.messages import Page, encode
from ...core.handoff.messages import decode as decode_frame
from ...core.prompt import Prompt
from ...core.scheduler.config import EngineConfig, EngineRole
from ...core.scheduler.engine import Engine
from ...core.scheduler.rules import OurRules
from ...properties.transport.contract import (
    DECODE,
    PREFILL,
    Ended,
    Message,
    PageContent,
    TransferWish,
    TransportCapabilities,
    TransportConfig,
)

CONTEXT_LEN = 64
MAX_RUNNING = 6
OUTPUT_TOKEN = 999  # of every round: no prompt has it
_HOW = {
    FinishReason.TRANSFERRED: "transferred",
    FinishReason.STOP: "length",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "aborted",
    FinishReason.ERROR: "error",
}


@dataclass(slots=True)
class CountingWorker:
    """An engine, its side of the handoff, and as much of an executor as the engine needs:
    the tokens that each row has left."""

    engine: Engine
    side: Any
    remaining: dict[tuple[int, int], int] = field(default_factory=dict)
    names: dict[tuple[int, int], str] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    limits: dict[str, tuple[tuple[int, int], int]] = field(default_factory=dict)  # request -> its row, its max_tokens

    def run(self, step: Step, first_tokens: dict[str, int]) -> StepResult:
        for join in step.joins:
            self.remaining[join.row, join.epoch] = join.max_tokens - join.num_emitted
            self.names[join.row, join.epoch] = join.request.request_id
            self.limits[join.request.request_id] = ((join.row, join.epoch), join.max_tokens)
        prefill = decode = None
        if step.prefill is not None:
            keys = list(zip(step.prefill.rows.tolist(), step.prefill.epochs.tolist(), strict=True))
            for key, last in zip(keys, step.prefill.is_last.tolist(), strict=True):
                self.remaining[key] -= last
            tokens = [first_tokens.get(self.names[key], 1) for key in keys]
            prefill = PrefillResult(np.array(tokens, dtype=np.int64), None)
        if step.decode is not None:
            keys = list(zip(step.decode.rows.tolist(), step.decode.epochs.tolist(), strict=True))
            ended = np.array([self.remaining[key] == 1 for key in keys])  # not who had ended when this step was planned
            for key in keys:
                self.remaining[key] = max(self.remaining[key] - 1, 0)
            ones = np.ones((1, len(keys)), dtype=np.int32)
            end = MultiStepEnd.REQUEST_ENDED if ended.any() else MultiStepEnd.MAX_ROUNDS
            tokens = np.full((1, len(keys), 1), OUTPUT_TOKEN, dtype=np.int64)
            decode = DecodeResult(1, ones, None, ended, end, tokens)
        return StepResult(step.step_id, prefill, decode, np.zeros(1, dtype=np.int64))

    def note(self, finished) -> None:
        """Report requests that have ended, with the numbers of tokens that this worker has counted,
        as a device would."""
        for end in finished:
            name, how, num_output = end.request_id, _HOW[end.reason], end.num_output
            if name in self.limits:
                key, max_tokens = self.limits.pop(name)
                num_output = max_tokens - self.remaining[key]
            self.ended.append(Ended(int(name), how, num_output, end.message))


class StepUnderWay(NamedTuple):
    """A step of the decode worker that is launched and not committed, and the pages that it may write, by request."""

    step: Step
    result: StepResult
    written: list[tuple[int, int]]


class HandoffTransport:
    """Both sides."""

    capabilities = TransportCapabilities(
        ahead=True, late=True, retraction=True, reserves=True, roles=True, device_loss=True, going_on=True
    )

    def __init__(self, config: TransportConfig) -> None:
        self.config = config
        self.timing = HandoffTiming(config.lease_ns, config.hold_ns, config.fence_ns, config.max_attempts)
        self.algorithm = get_algorithm("EAGLE" if config.hidden else "STANDALONE")
        hidden = 2 if config.hidden else 0
        self.page_format = PageFormat(config.page_size, 8, 8, hidden, "canary")
        self._generation = config.generation
        self._epoch = 1
        self._under_way: deque[StepUnderWay] = deque()
        self._workers = {PREFILL: self._make_prefill(), DECODE: self._make_decode()}
        self._first_tokens: dict[str, int] = {}
        self._drafts: dict[str, tuple[int, ...]] = {}
        self._final: dict[tuple[str, int], int] = {}  # (request, row) -> pages that were reported
        self._joined: list[tuple[int, int, tuple[int, ...]]] = []
        self._unread: deque[tuple[SendPages, int]] = deque()  # (action, which of its pages)
        self._read: list[Message] = []  # pages that are read out
        self._now_ns = 0

    def _make_engine(self, role: EngineRole, num_pages: int, overlap: bool = False) -> Engine:
        config = EngineConfig(
            num_pages=num_pages,
            context_len=CONTEXT_LEN,
            page_size=self.config.page_size,
            overlap=overlap,
            max_running=MAX_RUNNING,
            chunk_size=self.config.chunk_size,
            multi_step_rounds=1,
            rules=OurRules(watermark=0.0),
            track_tokens=True,
            role=role,
        )
        return Engine(config, self.algorithm, fixed_controller(1))

    def _make_prefill(self) -> CountingWorker:
        engine = self._make_engine(EngineRole.PREFILL, self.config.prefill_pages)
        return CountingWorker(engine, PrefillSide(engine, self.page_format, self._generation, self.timing))

    def _make_decode(self) -> CountingWorker:
        engine = self._make_engine(EngineRole.DECODE, self.config.decode_pages, self.config.ahead)
        self._under_way.clear()
        return CountingWorker(engine, DecodeSide(engine, self.page_format, self._epoch, self.timing))

    # -- what is done -------------------------------------------------------------------------------------------------

    def connect(self, read: Callable[[int], PageContent], write: Callable[[int, PageContent], None]) -> None:
        self.read, self.write = read, write

    def submit(self, wish: TransferWish, now_ns: int) -> bool:
        self._first_tokens[str(wish.request)] = wish.first_token
        return self._submit(Request(str(wish.request), Prompt.of_tokens(wish.tokens), wish.num_output), wish, now_ns)

    def go_on(self, wish: TransferWish, num_shown: int, now_ns: int) -> bool:
        text = (*wish.tokens, wish.first_token)
        prompt, shown = Prompt.of_tokens(text[:-num_shown]), Prompt.of_tokens(text[-num_shown:])
        self._first_tokens[str(wish.request)] = OUTPUT_TOKEN  # what the executor would draw
        return self._submit(Request(str(wish.request), prompt, wish.num_output, shown=shown), wish, now_ns)

    def _submit(self, request: Request, wish: TransferWish, now_ns: int) -> bool:
        refusal = self._workers[PREFILL].side.submit(request, DECODE, now_ns).refusal
        if not refusal:
            self._drafts[request.request_id] = tuple(wish.draft)
        return not refusal

    def compute(self, now_ns: int) -> list[tuple[int, int, int]]:
        worker = self._workers[PREFILL]
        step = worker.engine.plan(now_ns)
        if step is None:
            worker.side.committed(CommitOutcome((), ()), now_ns)  # gives up what a retracted request held
            return []
        outcome = worker.engine.commit(worker.run(step, self._first_tokens), now_ns)
        worker.note(outcome.finished)
        payloads = {name: self._payload(name) for name in outcome.computed}
        worker.side.committed(outcome, now_ns, payloads)
        return [
            final
            for progress in worker.engine.transfers.prompts()
            for final in self._newly_final(worker.engine, progress)
        ]

    def _newly_final(self, engine: Engine, progress) -> list[tuple[int, int, int]]:
        size = self.config.page_size
        ready = progress.num_computed // size
        if progress.is_complete:
            ready = self.page_format.num_pages(progress.num_computed)
        key = (progress.request.request_id, progress.row)
        known = self._final.get((*key, progress.epoch), 0)
        self._final[(*key, progress.epoch)] = ready
        pages = engine.store.table.gather(progress.row, 0, ready * size)[::size] // size
        return [(int(key[0]), index, int(pages[index])) for index in range(known, ready)]

    def _payload(self, name: str) -> DraftPayload:
        draft = self._drafts[name]
        values = {"topk_ids": np.array(draft[:1], np.int64), "topk_probabilities": np.array([0.5], np.float32)}
        hidden = np.array(draft[1:3], np.float32) if self.config.hidden else None
        return DraftPayload(values, hidden, self.config.hidden)

    def decode(self, now_ns: int) -> list[tuple[int, int, int]]:
        worker = self._workers[DECODE]
        step = worker.engine.plan(now_ns)
        pages = []
        if step is not None:
            if step.arrivals is not None:
                self._note_arrivals(step)
            result = worker.run(step, {})
            computed = [] if step.prefill is None else step.prefill.rows.tolist()
            names = [int(worker.names[row, int(worker.engine.store.table.epochs[row])]) for row in computed]
            pages = [(name, index, int(page)) for name in names for index, page in enumerate(self.pages(DECODE, name))]
            self._under_way.append(StepUnderWay(step, result, self._written_by(step)))
        if len(self._under_way) > (self.config.ahead and step is not None):
            outcome = worker.engine.commit(self._under_way.popleft().result, now_ns)
            worker.note(outcome.finished)
            worker.side.committed(outcome, now_ns)
        return pages

    def _written_by(self, step: Step) -> list[tuple[int, int]]:
        worker, size, found = self._workers[DECODE], self.config.page_size, []
        if step.decode is not None:
            store, part = worker.engine.store, step.decode
            for row, epoch, first in zip(*(x.tolist() for x in (part.rows, part.epochs, part.seq_lens)), strict=True):
                slots = store.table.gather(row, first, int(store.allocated[row]))
                found += [(int(worker.names[row, epoch]), page) for page in dict.fromkeys((slots // size).tolist())]
        return found

    def written(self) -> list[tuple[int, int]]:
        return [written for step in self._under_way for written in step.written]

    def _note_arrivals(self, step: Step) -> None:
        batch = step.arrivals.batch
        for i, name in enumerate(batch.request_ids):
            draft = [int(batch.token_ids[i, 0])]
            if batch.hidden_states[i] is not None:
                draft += batch.hidden_states[i].astype(np.int64).tolist()
            self._joined.append((int(name), int(step.arrivals.first_tokens[i]), tuple(draft)))

    def collect(self, side: str) -> list[Message]:
        worker = self._workers[side]
        messages = []
        if side == PREFILL:
            messages, self._read = self._read, []
        while actions := worker.side.take_actions():
            for action in actions:
                if isinstance(action, SendPages):
                    self._unread += [(action, at) for at in range(len(action.indices))]
                elif isinstance(action, WritePage):
                    self._write_page(action)
                else:
                    messages.append(_described(action.message))
        worker.note(worker.side.take_finished())
        worker.side.take_outcomes()
        return messages

    def read_out(self, count: int) -> None:
        for _ in range(min(count, len(self._unread))):
            action, at = self._unread.popleft()
            index = action.indices[at]
            target, draft = self.read(int(action.slots[at][0]) // self.config.page_size)
            seal = PageSeal.of(target, draft)
            self._read.append(_described(Page(action.key, action.epoch, index, seal, target, draft)))
            self._workers[PREFILL].side.pages_sent(action.key, {index: seal}, self._now_ns)

    def reading(self) -> list[int]:
        return [int(action.slots[at][0]) // self.config.page_size for action, at in self._unread]

    def _write_page(self, action: WritePage) -> None:
        self.write(int(action.slots[0]) // self.config.page_size, (action.page.target, action.page.draft))

    def deliver(self, side: str, message: Message, now_ns: int) -> None:
        self._now_ns = now_ns
        peer = DECODE if side == PREFILL else PREFILL
        self._workers[side].side.receive(peer, message.body, now_ns)

    def damaged(self, message: Message, how: int) -> Message | None:
        page = message.body
        if not isinstance(page, Page):
            return None
        if how == 3:
            return _described(replace(page, index=page.index + 1))
        changed = {
            0: {"target": bytes([page.target[0] ^ 1]) + page.target[1:]},
            1: {"target": page.target[:-1]},
            2: {"draft": page.draft[:-1] + bytes([page.draft[-1] ^ 1])},
        }
        return _described(replace(page, **changed[how]))

    def cancel(self, side: str, request: int, now_ns: int) -> None:
        worker = self._workers[side]
        outcome = worker.side.abort(str(request), now_ns)
        if outcome.finished is not None and (side == PREFILL or outcome.finished.num_output):
            worker.note([outcome.finished])

    def retract(self, side: str, request: int, now_ns: int) -> None:
        self._workers[side].engine.request_retraction(str(request), now_ns)

    def peer_lost(self, side: str, now_ns: int) -> None:
        self._workers[side].side.peer_lost(DECODE if side == PREFILL else PREFILL, now_ns)

    def restart(self, side: str) -> None:
        if side == PREFILL:
            self._generation += self.config.generation_step
            self._workers[side] = self._make_prefill()
            self._final.clear()
            self._unread.clear()
            self._read.clear()
        else:
            self._epoch += 1
            self._workers[side] = self._make_decode()

    def lose_kv(self, side: str, now_ns: int) -> None:
        worker = self._workers[side]
        if side == PREFILL:
            self._generation += self.config.generation_step
            self._unread.clear()
            self._read.clear()
        else:
            self._epoch += 1
            if self._under_way:
                failure = StepFailure(self._under_way[0].step.step_id, FailureCause.WORKER_LOST, "the device is gone")
                worker.note(worker.engine.lose_steps(failure, now_ns).finished)
                self._under_way.clear()
        worker.side.worker_lost(self._generation if side == PREFILL else self._epoch, now_ns)
        worker.engine.resume(now_ns, restarted=True)

    def tick(self, side: str, now_ns: int) -> None:
        self._now_ns = now_ns
        self._workers[side].side.tick(now_ns)

    def change_role(self, side: str) -> bool:
        engine = self._workers[side].engine
        role = engine.role
        try:
            engine.transfers.change_role(EngineRole.BOTH, self._now_ns)
        except InvariantViolation:
            return False
        engine.transfers.change_role(role, self._now_ns)
        return True

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def free(self, side: str) -> np.ndarray:
        return self._workers[side].engine.store.allocator.free_pages

    def cached(self, side: str) -> np.ndarray:
        size = self.config.page_size
        return self._workers[side].engine.store.cache.cached_slots()[::size] // size

    def pages(self, side: str, request: int) -> np.ndarray:
        engine, size = self._workers[side].engine, self.config.page_size
        progress = engine.transfers.progress_of(str(request))
        if progress is None:
            return np.empty(0, np.int32)
        count = self.page_format.num_pages(progress.request.prefill_len)
        held = min(count * size, int(engine.store.allocated[progress.row]))
        return engine.store.table.gather(progress.row, 0, held)[::size] // size

    def counters(self, side: str) -> tuple[int, ...]:
        handoff = self._workers[side].side
        counts = handoff.counts
        return counts.started, counts.completed, counts.failed, counts.cancelled, handoff.num_in_flight

    def joined(self) -> list[tuple[int, int, tuple[int, ...]]]:
        joined, self._joined = self._joined, []
        return joined

    def ended(self, side: str) -> list[Ended]:
        worker = self._workers[side]
        ended, worker.ended = worker.ended, []
        return ended


def _described(message: Any) -> Message:
    """Return a message as the trial sees it. It travels as bytes, as between processes."""
    # as the contract writes it: CancelAck, cancel_ack
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(message).__name__).lower()
    number = getattr(message, "index", getattr(message, "first_page", getattr(message, "first_attempt", 0)))
    key = message.key
    return Message(kind, int(key.request_id), key.attempt, key.generation, number, decode_frame(encode(message)))


make = HandoffTransport
