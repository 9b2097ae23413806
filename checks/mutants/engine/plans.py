"""Planted defects of engines: what they plan, and their slots."""

from dataclasses import replace

import numpy as np

from ....core.contract.outcomes import CommitOutcome
from ....core.contract.request import FinishReason
from ....core.contract.step import WrittenRanges
from ....core.kv.allocator import KVAllocator
from ....core.kv.radix import RadixCache
from ....core.kv.store import KVStore
from ....core.scheduler.admission import Admission
from ....core.scheduler.engine import Engine
from ....core.scheduler.flights import StepsInFlight
from ....core.scheduler.requests import Requests
from ....core.scheduler.rounds import DecodeRounds
from ....core.scheduler.rules.room import Room
from ....core.scheduler.waiting import WaitingQueue
from ...adapters.core_engine import CoreEngine
from ..planting import Defects

PLANS = Defects("engine", CoreEngine)


@PLANS.breaks("ENGINE-05")
class ForgetsTheVerifyTokens(Admission):
    """The token budget of a step counts its prefill alone."""

    def plan_prefill(self, num_verify_tokens):
        return super().plan_prefill(0)


@PLANS.breaks("ENGINE-07")
class BatchesStatically(Admission):
    """No request enters while another decodes."""

    def next_chunks(self, budget, num_decoding, may_admit):
        return super().next_chunks(budget, num_decoding, may_admit and not num_decoding)


@PLANS.breaks("ENGINE-09")
class NeverAges(WaitingQueue):
    """A greater priority always goes first."""

    def __init__(self, ageing_bound):
        super().__init__(1 << 30)


@PLANS.breaks("ENGINE-07", "ENGINE-10", "ENGINE-11")
class PushesEqualsOut(Requests):
    """A request that waits pushes out every request that is not greater."""

    def lower_than(self, head):
        lower = [r for r in self.running.values() if r.request.priority <= head.request.priority]
        return sorted(lower, key=lambda record: (record.request.priority, -record.arrival_number))


@PLANS.breaks("ENGINE-10")
class PushesOutTheFirst(Requests):
    """Under memory pressure the first in the batch goes, whatever its priority is."""

    def retract(self, record, keeps_place=False, for_priority=False):
        first = next(iter(self.running.values()))
        super().retract(record if record is first or self.retraction_demands else first)


@PLANS.breaks("ENGINE-11")
class WaitsWithNothingInFlight(Engine):
    """After a retraction no round is planned until a step is committed, also if none is in flight."""

    def _plan_rounds(self):
        return None if self.requests.pause._has_begun and not self.num_uncommitted else super()._plan_rounds()


@PLANS.breaks("ENGINE-11")
class LetsPromptsGoFirst(Engine):
    """While a prompt is computed in chunks no row decodes, though a step may have both."""

    def _decide(self):
        chunks, joins, planned = super()._decide()
        return chunks, joins, None if chunks and self.requests.in_progress is not None else planned


@PLANS.breaks("ENGINE-14")
class ComputesTheChunkAgain(Admission):
    """The next chunk begins where the last committed one ended, though another is in flight."""

    def _chunk_of(self, record, budget, padding):
        record.prefill_launched = max(record.prefill_committed, record.num_cached)
        return super()._chunk_of(record, budget, padding)


@PLANS.breaks("ENGINE-09", "ENGINE-16")
class QueuesTheRetractedLast(WaitingQueue):
    """A retracted request goes to the end of its class."""

    def push(self, record):
        super().push(record)
        waiting = self._classes[record.request.priority]
        waiting.remove(record)
        waiting.append(record)


@PLANS.breaks("ENGINE-18")
class DividesByWhatWasDrafted(DecodeRounds):
    """The acceptance rate of a round is its accepted over its proposed drafts, also when none were proposed."""

    def teach_controller(self, step, result, present):
        self.rate = int((result.accept_lens - 1).sum()) / ((step.shape.nodes - 1) * len(step.rows))
        super().teach_controller(step, result, present)


@PLANS.breaks("ENGINE-18")
class ExpectsSurvivors(Engine):
    """After a verify the longest row is looked up, also when all requests have ended in it."""

    def _commit_rounds(self, flight, result):
        committed = super()._commit_rounds(flight, result)
        self.longest = max(self.rounds.kv_len[self.rounds.rows].tolist())
        return committed


@PLANS.breaks("RELAY-05")
class TakesTheTailFromTheSample(CoreEngine):
    """The token after every chunk is the sample's placeholder."""

    def view(self, step):
        view = super().view(step)
        prefill = [(request, start, tokens, -1, key) for request, start, tokens, _, key in view["prefill"]]
        return view | {"prefill": prefill}


@PLANS.breaks("RELAY-07")
class RunsAheadTooFar(CoreEngine):
    """One step more is launched than slots are reserved for."""

    def __init__(self, config):
        super().__init__(config)
        self.engine.pipeline_depth += 1


@PLANS.breaks("RELAY-07")
class TakesAnyResult(Engine):
    """A result that is not the oldest step's is dropped silently."""

    def commit(self, result, now_ns):
        flights = self.requests.in_flight
        is_oldest = flights and flights[0].step.step_id == result.step_id
        return super().commit(result, now_ns) if is_oldest else CommitOutcome((), ())


@PLANS.breaks("RELAY-08")
class LaunchesBlockAfterBlock(StepsInFlight):
    """A second step of several rounds is planned behind a first."""

    has_multi_step = False


@PLANS.breaks("STEPS-07")
class SwitchesWithTheBatch(CoreEngine):
    """New steps are taken over when the number of rows changes, and not before."""

    def build(self, config, algorithm, controller):
        activate, seen = controller.activate_step_by_batch, {}
        controller.activate_step_by_batch = lambda size, kv_tokens=0: seen.setdefault(size, activate(size, kv_tokens))
        return super().build(config, algorithm, controller)


@PLANS.breaks("STEPS-07", "RELAY-06")
class NeedsLessAtOnce(CoreEngine):
    """When the steps go down, the need of every row is below zero, and it gives slots back under the step that runs."""

    def set_steps(self, steps):
        super().set_steps(steps)
        store, rounds = self.engine.store, self.engine.rounds
        if len(rounds.rows):
            keep = -(-(rounds.kv_len[rounds.rows] + steps + 1) // store.page_size) * store.page_size
            store.trim(rounds.rows.astype(np.intp), np.maximum(keep, 0))


@PLANS.breaks("RADIX-12")
class FindsDraftKVOfAnotherText(RadixCache):
    """A hit ends at a position whose draft KV looked at another token."""

    def _keys_of(self, tokens):
        keys = super()._keys_of(tokens)
        return keys if self.key_kind == "token" else keys >> 32 << 32


@PLANS.breaks("RELAY-01")
class FreesSlotsUnderAStep(KVStore):
    """The slots of an ended request are free at once, though a step in flight still writes to them."""

    def close_row(self, departure, last_committed):
        return self._release(departure)


@PLANS.breaks("RELAY-06", "RELAY-01")
class ReservesForOneRound(CoreEngine):
    """The reserve of a row is one round, also when two are in flight."""

    def __init__(self, config):
        super().__init__(config)
        sizes = self.engine.sizes
        self.engine.rounds.sizes = replace(sizes, reserve=sizes.alloc_len)


@PLANS.breaks("RELAY-06")
class ReservesByTheStepsInForce(DecodeRounds):
    """Slots are reserved for the steps of now, not for the most that a step in flight may have."""

    def reserve(self, rounds_in_flight, max_rounds):
        sizes = self.sizes
        length = self.controller.round_shape(self.controller.policy.steps_for(1, 0), 1).nodes
        depth = sizes.reserve // sizes.alloc_len
        self.sizes = replace(sizes, alloc_len=min(length, sizes.alloc_len), reserve=min(depth * length, sizes.reserve))
        try:
            return super().reserve(rounds_in_flight, max_rounds)
        finally:
            self.sizes = sizes


@PLANS.breaks("RELAY-01", "ENGINE-14")
class ForgetsWhatItAllocated(KVStore):
    """A row that grows for its prompt does not record its new length."""

    def grow_row(self, row, target):
        before = int(self.allocated[row])
        grown = super().grow_row(row, target)
        self.allocated[row] = max(before, target - self.page_size)
        return grown


@PLANS.breaks("ACCEPT-08")
class NeverGivesBack(DecodeRounds):
    """What a multi-step has reserved and not used stays with its rows."""

    def release_unused(self, planned, result, kv_before_last, in_later_step):
        pass


@PLANS.breaks("RELAY-04")
class StreamsWhatTheDeviceSays(CoreEngine):
    """The tokens of a step go to the request of that name, also if it has left its row since the launch."""

    def commit(self, answer):
        flight = self.steps[answer.step]
        events = super().commit(answer)
        known = {event[1] for event in events}
        for column, request in enumerate(flight.rows):
            if request not in known and request in self.engine.requests.live:
                events.append(("tokens", request, answer.runs[0][column]))
        return events


@PLANS.breaks("ACCEPT-03", "RELAY-01", "RELAY-06")
class KeepsItsCopies(KVStore):
    """Pages that the prefix cache had already are freed, and the row goes on reading its own copies."""

    def share_prefix(self, row, tokens, num_valid, namespace, fence):
        before = self.table.slots[row].copy()
        super().share_prefix(row, tokens, num_valid, namespace, fence)
        self.table.slots[row] = before


@PLANS.breaks("RADIX-09")
class CachesTheLastToken(KVStore):
    """The whole text of an ended request is cached, its last token too, which was never computed."""

    def _release_slots(self, departure):
        if departure.tokens is not None:
            whole = min(len(departure.tokens), int(self.allocated[departure.row]))
            departure = departure._replace(num_valid=whole)
        super()._release_slots(departure)


class _BeginsAtTheFirstLook(Admission):
    def _enter(self, entrance):
        record = self.requests.waiting.head
        super()._enter(entrance)
        first = self.room.first_looks.get(record.request.request_id, record.num_cached)
        if first < record.num_cached:
            record.num_cached = record.prefill_launched = record.prefill_committed = first


@PLANS.breaks("RADIX-12", also=(_BeginsAtTheFirstLook,))
class RemembersItsFirstLook(Room):
    """Where a request's own pages begin is what was found when it was looked up first."""

    def _prefix_of(self, record):
        prefix = super()._prefix_of(record)
        self.first_looks = getattr(self, "first_looks", {})
        self.first_looks.setdefault(record.request.request_id, prefix.length if prefix else 0)
        return prefix


@PLANS.breaks("RADIX-12")
class LoadsAPageTooFew(Admission):
    """The step asks the device to copy a page less from host memory than is there."""

    def next_chunks(self, budget, num_decoding, may_admit):
        chunks, joins = super().next_chunks(budget, num_decoding, may_admit)
        page_size = self.config.page_size
        return chunks, [replace(join, num_loaded=max(join.num_loaded - page_size, 0)) for join in joins]


@PLANS.breaks("RADIX-13")
class FindsHalf(KVStore):
    """A prefix that goes beyond the middle of the text is not found."""

    def match(self, tokens, namespace):
        return self.cache.match(tokens, namespace, max_length=len(tokens) // 2, count=False)


@PLANS.breaks("RELAY-01", "ENGINE-11")
class TakesALossForTheEnd(Engine):
    """A step that has failed is taken to be over: its slots are free at once."""

    def lose_steps(self, failure, now_ns):
        outcome = super().lose_steps(failure, now_ns)
        self.resume(now_ns)
        return outcome


@PLANS.breaks("ENGINE-02")
class FailsThemAll(Engine):
    """All requests of a step that has failed end with it."""

    def lose_steps(self, failure, now_ns):
        requests = self.requests
        records = [record for flight in requests.in_flight for record in requests.records_of(flight)]
        outcome = super().lose_steps(failure, now_ns)
        lost = [record for record in dict.fromkeys(records) if record in requests.waiting]
        ended = [requests.give_up(record, FinishReason.ERROR) for record in lost]
        return outcome._replace(finished=(*outcome.finished, *ended))


@PLANS.breaks("RELAY-06")
class GivesPagesBackwards(KVAllocator):
    """The slots of a page are handed out from the last to the first."""

    def _slots_of(self, pages):
        return super()._slots_of(pages).reshape(-1, self.page_size)[:, ::-1].ravel()

    def _pages_of(self, slots):
        return super()._pages_of(np.sort(slots.reshape(-1, self.page_size), axis=1).ravel())


@PLANS.breaks("RELAY-06")
class TellsOfOneRow(KVStore):
    """Where several rows grow together, the table of the device gets the new slots of the first of them."""

    def _grow(self, rows, targets):
        num_before = len(self._writes)
        has_grown = super()._grow(rows, targets)
        if len(self._writes) > num_before:
            grown = self._writes.pop()
            first = slice(0, 1)
            slots = grown.slots[: grown.counts[0]]
            self._writes.append(WrittenRanges(grown.rows[first], grown.starts[first], grown.counts[first], slots))
        return has_grown


@PLANS.breaks("RELAY-06")
class KeepsTheSlotsToItself(Engine):
    """The slots that a plan without a step has reserved are left out of what the next step tells the device."""

    def plan(self, now_ns):
        step = super().plan(now_ns)
        if step is None:
            self.store.take_writes()
        return step
