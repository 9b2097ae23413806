"""Planted defects of engines: each is one part of ours done wrong, in a way that has happened before."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import numpy as np

from ...core.contract.request import FinishReason
from ...core.kv.allocator import KVAllocator
from ...core.kv.store import KVStore
from ...core.scheduler.admission import Admission
from ...core.scheduler.engine import CommitOutcome, Engine
from ...core.scheduler.output import OutputLog
from ...core.scheduler.requests import Requests
from ...core.scheduler.rounds import DecodeRounds
from ...core.scheduler.waiting import WaitingQueue
from ...properties.engine.contract import Answer, Event, ServingConfig
from ...properties.engine.plain import PlainEngine
from ...properties.harness.mutants import Mutant
from ..adapters.core_engine import CoreEngine
from . import engine_slots as slots

# -- requests ---------------------------------------------------------------------------------------------------------


class LosesTheRetracted(Requests):
    """A retracted request gives its row back and is in no queue."""

    def retract(self, record):
        super().retract(record)
        self.waiting.remove(record)


class SaysGoodbyeTwice(CoreEngine):
    """A request whose end falls into the last round of a step is reported once by the step and once by the clean-up."""

    def commit(self, answer: Answer) -> list[Event]:
        events = super().commit(answer)
        return events + [event for event in events if event[0] == "end" and event[2] == "stop"]


class ForgetsTheOutputOnReturn(OutputLog):
    """When a retracted request enters again, the log of its row begins with the prompt alone."""

    def open(self, record):
        super().open(record)
        self._tokens[record.row, record.prompt_len : len(record.context)] = 0


class KeepsTheMarksOfTheWholeRun(OutputLog):
    """Per-token outputs are kept for every accepted token, also behind the stop."""

    def log(self, rows, counted, decode, record_in):
        super().log(rows, counted, decode, record_in)
        for i in range(len(rows)) if counted.live_before is None else np.flatnonzero(counted.live_before).tolist():
            record, kept = record_in(int(rows[i])), int(counted.kept[-1, i])
            for name in record.request.outputs:
                record.outputs[name].extend(decode.outputs[-1][name][i, kept : decode.accept_lens[-1, i]])


class LetsEverythingIn(Admission):
    """The prompt is not compared with the context and the pool at submission."""

    def refusal(self, request):
        refusal = super().refusal(request)
        return "" if refusal.startswith("too long") else refusal


class ReplacesTheOther(Requests):
    """A second request of the same name takes the first one's place."""

    def refusal(self, request):
        return ""


class LeaksAfterAnAbort(Requests):
    """The clean-up of an aborted request forgets its last page."""

    def _end(self, record):
        if record.row and record.ending[0] is FinishReason.ABORT:
            _forget_a_page(self.store, record.row)
        return super()._end(record)


class LeaksAfterARetraction(Requests):
    """The clean-up of a retracted request forgets its last page."""

    def retract(self, record):
        _forget_a_page(self.store, record.row)
        super().retract(record)


def _forget_a_page(store: KVStore, row: int) -> None:
    if store.allocated[row] - store._shared[row] >= store.page_size:
        store.allocated[row] -= store.page_size


class AbortsLater(Engine):
    """An abort is noted, and carried out when the request ends by itself."""

    def abort(self, request_id, now_ns):
        record = self.requests.live.get(request_id)
        if record is not None and record.row and not self.requests.leaving:
            return super().abort("", now_ns)
        return super().abort(request_id, now_ns)


class GivesOneTokenMore(DecodeRounds):
    """The length at which a request ends is that of its KV, one short of its text."""

    def join(self, row, kv_len, end_len, single_round):
        super().join(row, kv_len, end_len + 1, single_round)


class MasksTheStopByTheCap(DecodeRounds):
    """A run that reaches the length cap ends by length, whatever its last token is."""

    def count(self, launched, result, num_left_at_plan, leaving):
        counted = super().count(launched, result, num_left_at_plan, leaving)
        at_the_cap = self.kv_len[launched.index] >= self.end_len[launched.index]
        return counted._replace(stopped=counted.stopped & ~at_the_cap)


class CountsDepartedRows(DecodeRounds):
    """Every row of a verify result is counted, those of departed requests too."""

    def teach_controller(self, step, result, live, live_before):
        super().teach_controller(step, result, None, None)


# -- plans ------------------------------------------------------------------------------------------------------------


class ForgetsTheVerifyTokens(Admission):
    """The token budget of a step counts its prefill alone."""

    def plan_prefill(self, num_verify_tokens):
        return super().plan_prefill(0)


class BatchesStatically(Admission):
    """No request enters while another decodes."""

    def next_chunks(self, budget, num_decoding, may_admit):
        return super().next_chunks(budget, num_decoding, may_admit and not num_decoding)


class NeverAges(WaitingQueue):
    """A greater priority always goes first."""

    @property
    def head(self):
        self._ageing_bound = 1 << 30
        return super().head


class PushesEqualsOut(Admission):
    """A request that waits pushes out every request that is not greater."""

    def _lower_than_head(self):
        head = self.requests.waiting.head
        lower = [r for r in self.requests.running.values() if r.request.priority <= head.request.priority]
        return sorted(lower, key=lambda record: (record.request.priority, -record.arrival_number))


class PushesOutTheFirst(Requests):
    """Under memory pressure the first in the batch goes, whatever its priority is."""

    def retract(self, record):
        first = next(iter(self.running.values()))
        super().retract(record if record is first or self.retraction_demands else first)


class WaitsWithNothingInFlight(Engine):
    """After a retraction no round is planned until a step is committed, also if none is in flight."""

    def _plan_rounds(self):
        return None if self.requests._retracted_lately and not self.num_uncommitted else super()._plan_rounds()


class ComputesTheChunkAgain(Admission):
    """The next chunk begins where the last committed one ended, though another is in flight."""

    def _chunk_of(self, record, budget):
        record.prefill_launched = max(record.prefill_committed, record.num_cached)
        return super()._chunk_of(record, budget)


class QueuesTheRetractedLast(WaitingQueue):
    """A retracted request goes to the end of its class."""

    def push(self, record):
        super().push(record)
        waiting = self._classes[record.request.priority]
        waiting.remove(record)
        waiting.append(record)


class DividesByWhatWasDrafted(DecodeRounds):
    """The acceptance rate of a round is its accepted over its proposed drafts, also when none were proposed."""

    def teach_controller(self, step, result, live, live_before):
        self.rate = int((result.accept_lens - 1).sum()) / ((step.num_draft_tokens - 1) * len(step.rows))
        super().teach_controller(step, result, live, live_before)


class ExpectsSurvivors(Engine):
    """After a verify the longest row is looked up, also when all requests have ended in it."""

    def _commit_rounds(self, flight, result):
        committed = super()._commit_rounds(flight, result)
        self.longest = max(self.rounds.kv_len[self.rounds.rows].tolist())
        return committed


class TakesTheTailFromTheSample(CoreEngine):
    """The token after every chunk is the sample's placeholder."""

    def view(self, step):
        view = super().view(step)
        view["prefill"] = [(request, start, tokens, -1, key) for request, start, tokens, _, key in view["prefill"]]
        return view


class RunsAheadTooFar(CoreEngine):
    """One step more is launched than slots are reserved for."""

    def build(self, config, algorithm, controller):
        engine = super().build(config, algorithm, controller)
        engine.pipeline_depth += 1
        return engine


class TakesAnyResult(Engine):
    """A result that is not the oldest step's is dropped silently."""

    def commit(self, result, now_ns):
        flights = self.requests.in_flight
        if not flights or flights[0].step.step_id != result.step_id:
            return CommitOutcome((), ())
        return super().commit(result, now_ns)


class LaunchesBlockAfterBlock(Engine):
    """A second step of several rounds is planned behind a first."""

    def _max_rounds(self):
        requests = self.requests
        flights, requests.in_flight = requests.in_flight, type(requests.in_flight)()
        try:
            return super()._max_rounds()
        finally:
            requests.in_flight = flights


class SwitchesWithTheBatch(CoreEngine):
    """New steps are taken over when the number of rows changes, and not before."""

    def build(self, config, algorithm, controller):
        engine = super().build(config, algorithm, controller)
        activate, seen = controller.activate_step_by_batch, {}

        def late(batch_size, kv_tokens=0):
            return seen.setdefault(batch_size, activate(batch_size, kv_tokens))

        controller.activate_step_by_batch = late
        return engine


class NeedsLessAtOnce(CoreEngine):
    """When the steps go down, the need of every row is below zero, and it gives slots back under the step that runs."""

    def set_steps(self, steps):
        super().set_steps(steps)
        store, rounds = self.engine.store, self.engine.rounds
        if len(rounds.rows):
            keep = -(-(rounds.kv_len[rounds.rows] + steps + 1) // store.page_size) * store.page_size
            store.trim(rounds.rows.astype(np.intp), np.maximum(keep, 0))


# -- how they are made ------------------------------------------------------------------------------------------------

PARTS = {
    CoreEngine: "",
    PlainEngine: "",
    Engine: "engine",
    Admission: "engine.admission",
    DecodeRounds: "engine.rounds",
    KVStore: "engine.store",
    KVAllocator: "engine.store.allocator",
    OutputLog: "engine.output",
    Requests: "engine.requests",
    WaitingQueue: "engine.requests.waiting",
}
"""The good class of a mutant -> where our adapter has it; "" if it is an engine for the suite itself."""


def _maker(kind: type) -> Callable[[ServingConfig], CoreEngine | PlainEngine]:
    """Return what makes our engine with one part of this kind."""
    place = next(place for base, place in PARTS.items() if issubclass(kind, base))
    if not place:
        return kind

    def make(config: ServingConfig) -> CoreEngine:
        made = CoreEngine(config)
        attrgetter(place)(made).__class__ = kind
        return made

    make.capabilities = CoreEngine.capabilities
    return make


_DEFECTS = (
    (LosesTheRetracted, ("ENGINE-01",)),
    (SaysGoodbyeTwice, ("ENGINE-02",)),
    (ForgetsTheOutputOnReturn, ("ENGINE-03",)),
    (KeepsTheMarksOfTheWholeRun, ("ENGINE-04",)),
    (ForgetsTheVerifyTokens, ("ENGINE-05",)),
    (LeaksAfterARetraction, ("ENGINE-06",)),
    (BatchesStatically, ("ENGINE-07",)),
    (LetsEverythingIn, ("ENGINE-08",)),
    (NeverAges, ("ENGINE-09",)),
    (PushesEqualsOut, ("ENGINE-07", "ENGINE-10", "ENGINE-11")),
    (PushesOutTheFirst, ("ENGINE-10",)),
    (WaitsWithNothingInFlight, ("ENGINE-11",)),
    (ReplacesTheOther, ("ENGINE-12",)),
    (LeaksAfterAnAbort, ("ENGINE-13",)),
    (AbortsLater, ("ENGINE-13",)),
    (ComputesTheChunkAgain, ("ENGINE-14",)),
    (slots.KnowsTheFuture, ("ENGINE-15",)),
    (QueuesTheRetractedLast, ("ENGINE-09", "ENGINE-16")),
    (slots.DrawsByRow, ("ENGINE-17", "RELAY-09")),
    (DividesByWhatWasDrafted, ("ENGINE-18",)),
    (ExpectsSurvivors, ("ENGINE-18",)),
    (slots.GoesByTheProcess, ("ENGINE-19",)),
    (slots.FreesUnderAStep, ("RELAY-01",)),
    (slots.TakesALossForTheEnd, ("RELAY-01", "ENGINE-11")),
    (slots.FailsThemAll, ("ENGINE-02",)),
    (slots.ForgetsWhatItAllocated, ("RELAY-01", "ENGINE-14")),
    (slots.StreamsWhatTheDeviceSays, ("RELAY-04",)),
    (TakesTheTailFromTheSample, ("RELAY-05",)),
    (slots.HandsOverAPlaceholder, ("RELAY-05",)),
    (slots.QueuesThePreemptedLast, ("ENGINE-16",)),
    (slots.ReservesForOneRound, ("RELAY-06", "RELAY-01")),
    (slots.ReservesByTheStepsInForce, ("RELAY-06",)),
    (TakesAnyResult, ("RELAY-07",)),
    (RunsAheadTooFar, ("RELAY-07",)),
    (LaunchesBlockAfterBlock, ("RELAY-08",)),
    (slots.DrawsByFlight, ("RELAY-09",)),
    (slots.StartsOneTooFar, ("ACCEPT-03", "RADIX-09")),
    (slots.KeepsItsCopies, ("ACCEPT-03", "RELAY-01")),
    (slots.NeverGivesBack, ("ACCEPT-08",)),
    (MasksTheStopByTheCap, ("ACCEPT-10",)),
    (GivesOneTokenMore, ("ACCEPT-11",)),
    (CountsDepartedRows, ("ACCEPT-12",)),
    (slots.ReservesForNoDraft, ("ACCEPT-15",)),
    (SwitchesWithTheBatch, ("STEPS-07",)),
    (NeedsLessAtOnce, ("STEPS-07", "RELAY-06")),
    (slots.CachesTheLastToken, ("RADIX-09",)),
    (slots.RemembersItsFirstLook, ("RADIX-12",)),
    (slots.FindsHalf, ("RADIX-13",)),
    (slots.DrawsByHit, ("RADIX-16",)),
    (slots.DrawsByBlock, ("SIM-12",)),
    (slots.GivesPagesBackwards, ("RELAY-06",)),
    (slots.PromisesHalf, ("ACCEPT-11",)),
    (slots.RefusesWithAWord, ("ENGINE-08",)),
    (slots.FillsTheQueueByOneMore, ("ENGINE-08",)),
    (slots.TakesAVictimMore, ("ENGINE-07",)),
    (slots.NeverGivesWay, ("ENGINE-07",)),
    (slots.LetsBlocksGoOn, ("ENGINE-07",)),
    (slots.StopsInsideBlocks, ("ACCEPT-10", "ENGINE-03")),
    (slots.ReadsEachRoundAlone, ("ACCEPT-10", "ENGINE-03")),
)
"""(class, the invariants of which one must catch it)."""

MUTANTS = tuple(Mutant(kind.__name__, kind.__doc__, "engine", _maker(kind), caught_by) for kind, caught_by in _DEFECTS)
