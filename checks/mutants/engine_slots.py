"""Planted defects of engines: who owns which slots, who gives way, what is promised, stop strings, and what only two runs show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.contract.request import FinishReason, first_stop_string
from ...core.kv.allocator import KVAllocator
from ...core.kv.store import KVStore
from ...core.scheduler.admission import Admission
from ...core.scheduler.engine import Engine, LossOutcome
from ...core.scheduler.output import OutputLog
from ...core.scheduler.rounds import DecodeRounds
from ...properties.engine.contract import Answer, Event
from ...properties.engine.language import STOP, stream_of
from ...properties.engine.plain import PlainEngine
from ..adapters.core_engine import CoreEngine

# -- slots ------------------------------------------------------------------------------------------------------------


class FreesUnderAStep(KVStore):
    """The slots of an ended request are free at once, though a step in flight still writes to them."""

    def close_row(self, departure, last_committed):
        self._release(departure)


class ReservesForOneRound(CoreEngine):
    """The reserve of a row is one round, also when two are in flight."""

    def build(self, config, algorithm, controller):
        engine = super().build(config, algorithm, controller)
        engine.rounds.sizes = replace(engine.sizes, reserve=engine.sizes.alloc_len)
        return engine


class ReservesByTheStepsInForce(DecodeRounds):
    """Slots are reserved for the steps of now, not for the most that a step in flight may have."""

    def reserve(self, rounds_unseen, max_rounds):
        sizes = self.sizes
        length = self.controller.num_draft_tokens_for(self.controller.policy.steps_for(1, 0), 1)
        depth = sizes.reserve // sizes.alloc_len
        self.sizes = replace(sizes, alloc_len=min(length, sizes.alloc_len), reserve=min(depth * length, sizes.reserve))
        try:
            return super().reserve(rounds_unseen, max_rounds)
        finally:
            self.sizes = sizes


class ForgetsWhatItAllocated(KVStore):
    """A row that grows for its prompt does not record its new length."""

    def grow_row(self, row, target):
        before = int(self.allocated[row])
        grown = super().grow_row(row, target)
        self.allocated[row] = max(before, target - self.page_size)
        return grown


class NeverGivesBack(DecodeRounds):
    """What a block has reserved and not used stays with its rows."""

    def release_unused(self, launched, result, kv_before_last, in_later_step):
        pass


class StreamsWhatTheDeviceSays(CoreEngine):
    """The tokens of a step go to the request of that name, also if it has left its row since the launch."""

    def commit(self, answer: Answer) -> list[Event]:
        flight = self.steps[answer.step]
        events = super().commit(answer)
        told = {event[1] for event in events}
        for column, request in enumerate(flight.rows):
            if request not in told and request in self.engine.requests.live:
                events.append(("tokens", request, answer.runs[0][column]))
        return events


class StartsOneTooFar(CoreEngine):
    """The positions of a round begin one behind the last token."""

    def view(self, step):
        view = super().view(step)
        view["decode"] = [(request, length + 1, root, key) for request, length, root, key in view["decode"]]
        return view


class KeepsItsCopies(KVStore):
    """Pages that the prefix cache had already are freed, and the row goes on reading its own copies."""

    def share_prefix(self, row, tokens, num_valid, namespace, fence):
        before = self.table.slots[row].copy()
        super().share_prefix(row, tokens, num_valid, namespace, fence)
        self.table.slots[row] = before


class CachesTheLastToken(KVStore):
    """The whole text of an ended request is cached, its last token too, which was never computed."""

    def _release(self, departure):
        if departure.tokens is not None:
            num_valid = min(len(departure.tokens), int(self.allocated[departure.row]))
            departure = departure._replace(num_valid=num_valid)
        super()._release(departure)


class RemembersItsFirstLook(Admission):
    """Where a request's own pages begin is what was found when it was looked up first."""

    def _enter(self, prefix):
        record = super()._enter(prefix)
        first = self.first_looks.get(record.request.request_id, record.num_cached)
        if first < record.num_cached:
            record.num_cached = record.prefill_launched = record.prefill_committed = first
        return record

    def _prefix_of(self, record):
        prefix = super()._prefix_of(record)
        self.first_looks = getattr(self, "first_looks", {})
        self.first_looks.setdefault(record.request.request_id, prefix.length if prefix else 0)
        return prefix


class FindsHalf(KVStore):
    """A prefix that goes beyond the middle of the text is not found."""

    def match(self, tokens, namespace):
        return self.cache.match(tokens, namespace, max_length=len(tokens) // 2, count=False)


class TakesALossForTheEnd(Engine):
    """A step that has failed is taken to be over: its slots are free at once."""

    def lose_steps(self, failure, now_ns):
        outcome = super().lose_steps(failure, now_ns)
        self.resume(now_ns)
        return outcome


class FailsThemAll(Engine):
    """All requests of a step that has failed end with it."""

    def lose_steps(self, failure, now_ns):
        requests = self.requests
        records = [record for flight in requests.in_flight for record in requests.records_of(flight)]
        outcome = super().lose_steps(failure, now_ns)
        ended = []
        for record in dict.fromkeys(records):
            if record in requests.waiting:
                ended.append(requests.give_up(record, FinishReason.ERROR))
        return LossOutcome((*outcome.finished, *ended), outcome.step_ids)


class HandsOverAPlaceholder(PlainEngine):
    """The input of the first round after a prompt is the placeholder of a token that has not been delivered."""

    def plan(self):
        view = super().plan()
        if view is not None:
            first = {row.name for row in self.rows or () if len(row.output) == 1}
            view["decode"] = [(name, at, -1 if name in first else root, key) for name, at, root, key in view["decode"]]
        return view


class QueuesThePreemptedLast(PlainEngine):
    """A preempted request waits behind all others."""

    def plan(self):
        running = set(self.batch)
        view = super().plan()
        returned = [entry for entry in self.queue if entry in running]
        self.queue = [entry for entry in self.queue if entry not in running] + returned
        return view


class GivesPagesBackwards(KVAllocator):
    """The slots of a page are handed out from the last to the first."""

    __slots__ = ()

    def _slots_of(self, pages):
        return super()._slots_of(pages).reshape(-1, self.page_size)[:, ::-1].ravel()

    def _pages_of(self, slots):
        return super()._pages_of(np.sort(slots.reshape(-1, self.page_size), axis=1).ravel())


# -- who waits, and for what ------------------------------------------------------------------------------------------


class PromisesHalf(Admission):
    """Every request gets half of the tokens that it asks for."""

    def max_tokens(self, request):
        return -(-super().max_tokens(request) // 2)


class RefusesWithAWord(Admission):
    """The reason of a refusal is left out."""

    def refusal(self, request):
        return super().refusal(request) and "refused"


class FillsTheQueueByOneMore(Admission):
    """The bound of the queue is compared with < where <= is meant."""

    def refusal(self, request):
        reason = super().refusal(request)
        return "" if len(self.requests.waiting) == self.config.max_queue else reason


class TakesAVictimMore(Admission):
    """A preemption takes one request more than it needs."""

    def preempt(self):
        before = len(self.requests.retracted)
        super().preempt()
        lower = self._lower_than_head() if len(self.requests.retracted) > before else ()
        if lower:
            self.requests.retract(lower[0])


class NeverGivesWay(Admission):
    """No request of smaller priority gives way."""

    def preempt(self):
        pass


class LetsBlocksGoOn(CoreEngine):
    """A newcomer waits until the block that runs has come to its end."""

    def submit(self, wish):
        newest = self.newest_interrupted
        most = super().submit(wish)
        self.newest_interrupted = newest
        return most


class StopsInsideBlocks(Engine):
    """Rows with stop strings are put into blocks, though a block's rounds are not searched for them."""

    def _max_rounds(self):
        rows, self.rounds.single_round_rows = self.rounds.single_round_rows, 0
        try:
            return super()._max_rounds()
        finally:
            self.rounds.single_round_rows = rows


class ReadsEachRoundAlone(OutputLog):
    """A stop string is found if all of it stands in one round."""

    def stop_string_cuts(self, rows, counted, decode, record_in):
        cuts = {}
        for column, length in super().stop_string_cuts(rows, counted, decode, record_in).items():
            run, wanted = decode.tokens[0, column, :length], record_in(int(rows[column])).request.stop_strings
            if first_stop_string(self._decoder, run[:0], run, wanted) >= 0:
                cuts[column] = length
        return cuts


# -- what only two runs show ------------------------------------------------------------------------------------------


class GoesByTheProcess(PlainEngine):
    """Free pages are taken from either end, in turns over all engines that the process has made."""

    num_made = 0

    def __init__(self, config):
        super().__init__(config)
        GoesByTheProcess.num_made += 1
        if GoesByTheProcess.num_made % 2:
            self.free.reverse()


class KnowsTheFuture(CoreEngine):
    """Fewer prompt tokens are computed while there is a request whose text ends at once, as the device's own model says."""

    def __init__(self, config):
        super().__init__(config)
        self.model = config.model
        self.texts = {}

    def submit(self, wish):
        most = super().submit(wish)
        self.texts[wish.request] = text = stream_of(wish.prompt, wish.seed, self.model)
        text.reach(len(wish.prompt) + 1)
        return most

    def plan(self):
        requests, chunk_size = self.engine.requests.live.values(), self.engine.config.chunk_size
        ends_soon = any(self.texts[r.request.request_id].tokens[r.prompt_len] == STOP for r in requests)
        self.engine.admission.limits.prefill_budget = chunk_size - ends_soon
        return super().plan()


class DrawsByRow(CoreEngine):
    """What a request draws from depends on the row that it got."""

    def key(self, row):
        return super().key(row) and super().key(row) + row - 1


class DrawsByFlight(CoreEngine):
    """What a request draws from depends on whether a step is in flight."""

    def key(self, row):
        return super().key(row) and super().key(row) + (self.engine.num_uncommitted > 1)


class DrawsByHit(CoreEngine):
    """What a request draws from depends on how much of its prompt was cached."""

    def key(self, row):
        return super().key(row) and super().key(row) + (self.engine.requests.live[self.requests[row]].num_cached > 0)


class DrawsByBlock(CoreEngine):
    """The rounds of a block draw from the block's seed."""

    def view(self, step):
        view = super().view(step)
        if view["rounds"] > 1:
            view["decode"] = [(request, length, root, key and key + 1) for request, length, root, key in view["decode"]]
        return view


class LeavesRoomForDrafts(Admission):
    """Computes fewer prompt tokens per step."""

    def next_chunks(self, budget, num_decoding, may_admit):
        return super().next_chunks(max(budget - self.spared, 1), num_decoding, may_admit)


class ReservesForNoDraft(CoreEngine):
    """Without drafts one prompt token less is computed per step, since the algorithm could draft."""

    def build(self, config, algorithm, controller):
        engine = super().build(config, algorithm, controller)
        engine.admission.__class__ = LeavesRoomForDrafts
        engine.admission.spared = int(algorithm.is_speculative and controller.max_steps == 0)
        return engine
