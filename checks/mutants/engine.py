"""Planted defects of engines: each is one part of ours done wrong, in a way that has happened before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.contract.request import FinishReason
from ...core.kv.allocator import KVAllocator
from ...core.kv.radix import RadixCache
from ...core.kv.store import KVStore
from ...core.scheduler.admission import Admission
from ...core.scheduler.engine import Engine
from ...core.scheduler.output import OutputLog
from ...core.scheduler.requests import Requests
from ...core.scheduler.rounds import DecodeRounds
from ...core.scheduler.rules.room import Room
from ...core.scheduler.waiting import WaitingQueue
from ...properties.engine.language import STOP, stream_of
from ...properties.engine.plain import PlainEngine
from ..adapters.core_engine import CoreEngine
from .engine_waiting import MUTANTS as WAITING
from .planting import defects, lookup

REQUESTS = """
LosesTheRetracted (ENGINE-01): A retracted request gives its row back and is in no queue.
    Requests.retract:
        good(self, record)
        self.waiting.remove(record)

SaysGoodbyeTwice (ENGINE-02): A request whose end falls into the last round of a step is reported once by the step and once by the clean-
up.
    CoreEngine.commit:
        events = good(self, answer)
        return events + [event for event in events if event[0] == "end" and event[2] == "stop"]

ForgetsTheOutputOnReturn (ENGINE-03): When a retracted request enters again, the log of its row begins with the prompt alone.
    OutputLog.open:
        good(self, record)
        self._tokens[record.row, record.prompt_len : len(record.context)] = 0

KeepsTheMarksOfTheWholeRun (ENGINE-04): Per-token outputs are kept for every accepted token, also behind the stop.
    OutputLog.log
        - : kept[number, i]]
        + : decode.accept_lens[number, i]]

LetsEverythingIn (ENGINE-08): The prompt is not compared with the context and the pool at submission.
    Admission.refusal
        - if max_tokens <= request.shown.length:
        + if False:

ReplacesTheOther (ENGINE-12): A second request of the same name takes the first one's place.
    Requests.refusal = ""

LeaksAfterAnAbort (ENGINE-13): The clean-up of an aborted request forgets its last page.
    Requests._end:
        row, store = record.row, self.store
        if row and record.ending[0] is FinishReason.ABORT and store.allocated[row] - store._shared[row] >= store.page_size:
            store.allocated[row] -= store.page_size
        return good(self, record)

LeaksAfterARetraction (ENGINE-06): The clean-up of a retracted request forgets its last page.
    Requests.retract:
        row, store = record.row, self.store
        if store.allocated[row] - store._shared[row] >= store.page_size:
            store.allocated[row] -= store.page_size
        good(self, record)

AbortsLater (ENGINE-13): An abort is noted, and carried out when the request ends by itself.
    Engine.abort
        - or record.state is RequestState.LEAVING
        + or record.state is RequestState.LEAVING or (record.row and not self.requests.leaving)

GivesOneTokenMore (ACCEPT-11, ENGINE-02): The length at which a request ends is that of its KV, one short of its text.
    DecodeRounds.add = good(self, row, kv_len, end_len + 1, has_stop_strings)

MasksTheStopByTheCap (ACCEPT-10): A run that reaches the length cap ends by length, whatever its last token is.
    DecodeRounds.count:
        counted = good(self, planned, result, num_departed_at_plan, leaving)
        at_the_cap = self.kv_len[planned.index] >= self.end_len[planned.index]
        return counted._replace(stopped=counted.stopped & ~at_the_cap)

CountsDepartedRows (ACCEPT-12): Every row of a verify result is counted, those of departed requests too.
    DecodeRounds.teach_controller = good(self, step, result, present._replace(is_complete=True))

ForgetsWhoLeft (ACCEPT-12): Rounds of a block that a request had before its client left are counted as delivered, not as verified.
    DecodeRounds.teach_controller = good(self, step, result, present._replace(before=present.last))

TellsTheLargestBatch (ACCEPT-12): The choice of draft steps is told that every round had as many rows as the batch has places.
    DecodeRounds.teach_controller
        - self.controller.on_verify_complete(counts[rows], len(step.rows), step.steps)
        + self.controller.on_verify_complete(counts[rows], self.config.max_running, step.steps)

StopsInsideBlocks (ACCEPT-10, ENGINE-03): Rows with stop strings are put into blocks, though a block's rounds are not searched for them.
    Engine._max_rounds
        - or self.rounds.num_with_stop_strings > 0

ReadsSinceTheLastEntry (ACCEPT-10, ENGINE-03): A stop string that begins before a retraction and ends behind it is not found.
    OutputLog._stop_string_in
        - if text is None:
        + if text is None or text.num_tokens == record.emitted_before > 0:
        - record.prompt_len + text.num_tokens : begin]
        + begin : begin]

ReadsEachRoundAlone (ACCEPT-10, ENGINE-03): A stop string is found if all of it stands in one round.
    OutputLog._stop_string_in
        - if text is None:
        + if True:
        - record.prompt_len + text.num_tokens : begin]
        + begin : begin]
"""

PLANS = """
ForgetsTheVerifyTokens (ENGINE-05): The token budget of a step counts its prefill alone.
    Admission.plan_prefill = good(self, 0)

BatchesStatically (ENGINE-07): No request enters while another decodes.
    Admission.next_chunks = good(self, budget, num_decoding, may_admit and not num_decoding)

NeverAges (ENGINE-09): A greater priority always goes first.
    WaitingQueue.head
        - self._ageing_bound
        + 1 << 30

PushesEqualsOut (ENGINE-07, ENGINE-10, ENGINE-11): A request that waits pushes out every request that is not greater.
    Requests.lower_than:
        lower = [r for r in self.running.values() if r.request.priority <= head.request.priority]
        return sorted(lower, key=lambda record: (record.request.priority, -record.arrival_number))

PushesOutTheFirst (ENGINE-10): Under memory pressure the first in the batch goes, whatever its priority is.
    Requests.retract:
        first = next(iter(self.running.values()))
        good(self, record if record is first or self.retraction_demands else first)

WaitsWithNothingInFlight (ENGINE-11): After a retraction no round is planned until a step is committed, also if none is in flight.
    Engine._plan_rounds = None if self.requests.pause._has_begun and not self.num_uncommitted else good(self)

ComputesTheChunkAgain (ENGINE-14): The next chunk begins where the last committed one ended, though another is in flight.
    Admission._chunk_of
        - start = record.prefill_launched
        + start = record.prefill_launched = max(record.prefill_committed, record.num_cached)

QueuesTheRetractedLast (ENGINE-09, ENGINE-16): A retracted request goes to the end of its class.
    WaitingQueue.push
        - if not waiting or record.arrival_number > waiting[-1].arrival_number:
        + if True:

DividesByWhatWasDrafted (ENGINE-18): The acceptance rate of a round is its accepted over its proposed drafts, also when none were
proposed.
    DecodeRounds.teach_controller
        - correct = result.accept_lens - 1
        + correct = result.accept_lens - 1
        + self.rate = int(correct.sum()) / ((step.num_draft_tokens - 1) * len(step.rows))

ExpectsSurvivors (ENGINE-18): After a verify the longest row is looked up, also when all requests have ended in it.
    Engine._commit_rounds:
        committed = good(self, flight, result)
        self.longest = max(self.rounds.kv_len[self.rounds.rows].tolist())
        return committed

TakesTheTailFromTheSample (RELAY-05): The token after every chunk is the sample's placeholder.
    CoreEngine.view
        - tail, key(row)
        + -1, key(row)

RunsAheadTooFar (RELAY-07): One step more is launched than slots are reserved for.
    CoreEngine.__init__:
        good(self, config)
        self.engine.pipeline_depth += 1

TakesAnyResult (RELAY-07): A result that is not the oldest step's is dropped silently.
    Engine.commit:
        flights = self.requests.in_flight
        is_oldest = flights and flights[0].step.step_id == result.step_id
        return good(self, result, now_ns) if is_oldest else CommitOutcome((), ())

LaunchesBlockAfterBlock (RELAY-08): A second step of several rounds is planned behind a first.
    Engine._max_rounds
        - or any(flight.step.max_rounds > 1 for flight in self.requests.in_flight)

SwitchesWithTheBatch (STEPS-07): New steps are taken over when the number of rows changes, and not before.
    CoreEngine.build:
        activate, seen = controller.activate_step_by_batch, {}
        controller.activate_step_by_batch = lambda size, kv_tokens=0: seen.setdefault(size, activate(size, kv_tokens))
        return good(self, config, algorithm, controller)

NeedsLessAtOnce (STEPS-07, RELAY-06): When the steps go down, the need of every row is below zero, and it gives slots back under the step
that runs.
    CoreEngine.set_steps:
        good(self, steps)
        store, rounds = self.engine.store, self.engine.rounds
        if len(rounds.rows):
            keep = -(-(rounds.kv_len[rounds.rows] + steps + 1) // store.page_size) * store.page_size
            store.trim(rounds.rows.astype(np.intp), np.maximum(keep, 0))
"""

SLOTS = """
FindsDraftKVOfAnotherText (RADIX-12): A hit ends at a position whose draft KV looked at another token.
    RadixCache._keys_of
        - (ids[:-1] << 32) | ids[1:]
        + ids[:-1] << 32

FreesUnderAStep (RELAY-01): The slots of an ended request are free at once, though a step in flight still writes to them.
    KVStore.close_row = self._release(departure)

ReservesForOneRound (RELAY-06, RELAY-01): The reserve of a row is one round, also when two are in flight.
    CoreEngine.__init__:
        good(self, config)
        sizes = self.engine.sizes
        self.engine.rounds.sizes = replace(sizes, reserve=sizes.alloc_len)

ReservesByTheStepsInForce (RELAY-06): Slots are reserved for the steps of now, not for the most that a step in flight may have.
    DecodeRounds.reserve:
        sizes = self.sizes
        length = self.controller.num_draft_tokens_for(self.controller.policy.steps_for(1, 0), 1)
        depth = sizes.reserve // sizes.alloc_len
        self.sizes = replace(sizes, alloc_len=min(length, sizes.alloc_len), reserve=min(depth * length, sizes.reserve))
        try:
            return good(self, rounds_in_flight, max_rounds)
        finally:
            self.sizes = sizes

ForgetsWhatItAllocated (RELAY-01, ENGINE-14): A row that grows for its prompt does not record its new length.
    KVStore.grow_row:
        before = int(self.allocated[row])
        grown = good(self, row, target)
        self.allocated[row] = max(before, target - self.page_size)
        return grown

NeverGivesBack (ACCEPT-08): What a block has reserved and not used stays with its rows.
    DecodeRounds.release_unused = None

StreamsWhatTheDeviceSays (RELAY-04): The tokens of a step go to the request of that name, also if it has left its row since the launch.
    CoreEngine.commit:
        flight = self.steps[answer.step]
        events = good(self, answer)
        told = {event[1] for event in events}
        for column, request in enumerate(flight.rows):
            if request not in told and request in self.engine.requests.live:
                events.append(("tokens", request, answer.runs[0][column]))
        return events

KeepsItsCopies (ACCEPT-03, RELAY-01): Pages that the prefix cache had already are freed, and the row goes on reading its own copies.
    KVStore.share_prefix:
        before = self.table.slots[row].copy()
        good(self, row, tokens, num_valid, namespace, fence)
        self.table.slots[row] = before

CachesTheLastToken (RADIX-09): The whole text of an ended request is cached, its last token too, which was never computed.
    KVStore._release_slots
        - departure.num_valid)
        + min(len(tokens), allocated))

RemembersItsFirstLook (RADIX-12): Where a request's own pages begin is what was found when it was looked up first.
    Admission._enter:
        record = self.requests.waiting.head
        good(self, entrance)
        first = self.room.first_looks.get(record.request.request_id, record.num_cached)
        if first < record.num_cached:
            record.num_cached = record.prefill_launched = record.prefill_committed = first
    Room._prefix_of:
        prefix = good(self, record)
        self.first_looks = getattr(self, "first_looks", {})
        self.first_looks.setdefault(record.request.request_id, prefix.length if prefix else 0)
        return prefix

LoadsAPageTooFew (RADIX-12): The device is told to copy a page less from host memory than is there.
    Admission.next_chunks
        - join_of(chunk.record, self.config.track_tokens)
        + replace(join_of(chunk.record, True), num_loaded=max(chunk.record.num_loaded - self.config.page_size, 0))

FindsHalf (RADIX-13): A prefix that goes beyond the middle of the text is not found.
    KVStore.match
        - len(tokens) - 1
        + len(tokens) // 2

TakesALossForTheEnd (RELAY-01, ENGINE-11): A step that has failed is taken to be over: its slots are free at once.
    Engine.lose_steps:
        outcome = good(self, failure, now_ns)
        self.resume(now_ns)
        return outcome

FailsThemAll (ENGINE-02): All requests of a step that has failed end with it.
    Engine.lose_steps:
        requests = self.requests
        records = [record for flight in requests.in_flight for record in requests.records_of(flight)]
        outcome = good(self, failure, now_ns)
        lost = [record for record in dict.fromkeys(records) if record in requests.waiting]
        ended = [requests.give_up(record, FinishReason.ERROR) for record in lost]
        return outcome._replace(finished=(*outcome.finished, *ended))

GivesPagesBackwards (RELAY-06): The slots of a page are handed out from the last to the first.
    KVAllocator._slots_of = good(self, pages).reshape(-1, self.page_size)[:, ::-1].ravel()
    KVAllocator._pages_of = good(self, np.sort(slots.reshape(-1, self.page_size), axis=1).ravel())
"""

TWINS = """
KnowsTheFuture (ENGINE-15): A block has two rounds while there is a request whose text ends within four tokens, as the device's own model
says.
    CoreEngine.__init__:
        good(self, config)
        self.model = config.model
        self.texts = {}
    CoreEngine.submit:
        most = good(self, wish)
        self.texts[wish.request] = text = stream_of(wish.prompt, wish.seed, self.model)
        text.reach(len(wish.prompt) + 4)
        return most
    CoreEngine.plan:
        config, requests = self.engine.config, self.engine.requests.live.values()
        ends_soon = any(STOP in self.texts[r.request.request_id].tokens[r.prompt_len : r.prompt_len + 4] for r in requests)
        self.engine.config = replace(config, multi_step_rounds=min(config.multi_step_rounds, 2)) if ends_soon else config
        answer = good(self)
        self.engine.config = config
        return answer

DrawsByRow (ENGINE-17, RELAY-09): What a request draws from depends on the row that it got.
    CoreEngine.key = good(self, row) and good(self, row) + row - 1

DrawsByFlight (RELAY-09): What a request draws from depends on whether a step is in flight.
    CoreEngine.key = good(self, row) and good(self, row) + (self.engine.num_uncommitted > 1)

DrawsByHit (RADIX-16): What a request draws from depends on how much of its prompt was cached.
    CoreEngine.key = good(self, row) and good(self, row) + (self.engine.requests.live[self.requests[row]].num_cached > 0)

DrawsByBlock (SIM-12): The rounds of a block draw from the block's seed.
    CoreEngine.view:
        view = good(self, step)
        if view["rounds"] > 1:
            view["decode"] = [(request, length, root, key and key + 1) for request, length, root, key in view["decode"]]
        return view

ReservesForNoDraft (ACCEPT-15): Without drafts one prompt token less is computed per step, since the algorithm could draft.
    CoreEngine.__init__:
        good(self, config)
        engine = self.engine
        engine.admission.spared = int(engine.algorithm.is_speculative and engine.controller.max_steps == 0)
    Admission.next_chunks = good(self, max(budget - self.spared, 1), num_decoding, may_admit)
"""
"""What only two runs show."""

PLAIN = """
HandsOverAPlaceholder (RELAY-05): The input of the first round after a prompt is the placeholder of a token that has not been delivered.
    PlainEngine.plan:
        view = good(self)
        if view is not None:
            first = {row.name for row in self.rows or () if len(row.output) == 1}
            view["decode"] = [(name, at, -1 if name in first else root, key) for name, at, root, key in view["decode"]]
        return view

GoesByTheProcess (ENGINE-19): Free pages are taken from either end, in turns over all engines that the process has made.
    PlainEngine.__init__:
        good(self, config)
        memory["made"] = memory.get("made", 0) + 1
        if memory["made"] % 2:
            self.free.reverse()
"""
"""What is easier to do wrong in a plain engine."""

_PLACES = [
    *(CoreEngine, Engine, Admission, DecodeRounds, KVAllocator, KVStore, OutputLog, Requests, Room, WaitingQueue),
    *(PlainEngine, RadixCache, FinishReason, replace, stream_of),
]
MUTANTS = (
    *defects("engine", CoreEngine, _PLACES, REQUESTS + PLANS + SLOTS, np=np),
    *defects("engine", PlainEngine, _PLACES, PLAIN),
    *defects("engine", CoreEngine, _PLACES, TWINS, STOP=STOP),
    *WAITING,
)
__getattr__ = lookup(MUTANTS)
