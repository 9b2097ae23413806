"""Planted defects of engines: who waits for what, and what happens after a step that has failed."""

from __future__ import annotations

from ...core.scheduler.admission import Admission
from ...core.scheduler.engine import Engine
from ...core.scheduler.preemption import Preemption
from ...core.scheduler.recovery import Recovery, StepLimits
from ...core.scheduler.requests import Requests
from ...core.scheduler.rounds import DecodeRounds
from ...core.scheduler.rules.admission_state import AdmissionPause
from ...core.scheduler.rules.room import Room
from ...core.scheduler.waiting import WaitingQueue, giving_way
from ..adapters.core_engine import CoreEngine, _end
from .planting import defects

WAITING = """
TakesARoundOffTheContext (ACCEPT-11): The nodes of a round are taken off the context that prompt and output may fill.
    Admission.max_tokens = min(good(self, request), max(self.config.context_len - self.sizes.alloc_len - request.prompt.length, 1))

RefusesWithAWord (ENGINE-08): The reason of a refusal is left out.
    Admission.refusal = good(self, request) and "refused"

FillsTheQueueByOneMore (ENGINE-08): The bound of the queue is compared with < where <= is meant.
    Admission.refusal
        - len(self.requests.waiting) >=
        + len(self.requests.waiting) >

PushesOutTheAged (ENGINE-07, ENGINE-10): A request that runs at last, after it was overtaken too often, gives way to a greater priority.
    Requests.lower_than = giving_way(head, self.running.values(), 1 << 30)

TakesAVictimMore (ENGINE-07): A preemption takes one request more than it needs.
    Preemption.preempt
        - lower[:num_victims]
        + lower[: num_victims + 1]

GivesWayInVain (ENGINE-07): A request gives way to a greater priority, which must leave more slots free than there are then.
    Preemption._fits_without
        - num_slots + self.room.to_leave(sum(row in held for row in rows), held=held)
        + num_slots

ForgetsThatTheOthersGrow (ENGINE-07): A preemption makes room beside the slots that the others have now, and they take more until then.
    Preemption._fits_without
        - - grown
        + - 0

CountsWhatItWillLock (ENGINE-07): A preemption counts slots as free that the cache has for the request which enters.
    Preemption.preempt
        - with self.store.locked(entrance.prefix):
        + if True:

PushesOutUnderAFence (ENGINE-07): A preemption does not wait for the slots of an earlier victim, which are fenced, and takes a second one.
    Preemption.preempt
        - if self.store.has_fenced or requests.leaving:
        + if requests.leaving:

LosesWhatABlockHadDelivered (ACCEPT-12, ENGINE-18, ENGINE-04): A request that is aborted while a block runs gets nothing of its rounds.
    DecodeRounds._presence
        - if leaving else last, False
        + if False else last, False

ForgetsThatPagesAreWhole (ENGINE-07): A block reserves by the slots that are free, though its rows take them in whole pages.
    DecodeRounds._rounds_in_free_slots
        - unaligned = batch_size * (page_size - 1)
        + unaligned = 0

NeverGivesWay (ENGINE-07): No request of smaller priority gives way.
    Preemption.preempt = None

LetsBlocksGoOn (ENGINE-07): A newcomer waits until the block that runs has come to its end.
    CoreEngine.submit
        - self._interrupt(outcome.replan)
"""
"""Who waits, and for what."""

FAILURES = """
TriesTheGuiltyLast (ENGINE-16): After a failed step those go first that have run before.
    Recovery.lose_steps
        - record.has_committed_nothing
        + not record.has_committed_nothing

ForgetsEarlierSuspects (ENGINE-16): A second failure replaces the suspects of the first.
    WaitingQueue.try_first = good(self, records) or setattr(self, "_first", list(records))

LetsOneMoreIn (ENGINE-05): After a failed step one row more runs than may.
    Admission.has_row
        - < row_limit
        + <= row_limit

OffersWhatIsGone (RADIX-12): On a new device the prefix cache offers what the old one had.
    Recovery.resume
        - requests.store.forget()
        + pass

NeverFails (ENGINE-02): A request that fails every step is tried for ever.
    StepLimits.count_failure = good(self, num_rows, num_suspects, has_prefill, can_draft_less) and False

DraftsLessForEver (STEPS-07): Good steps do not bring drafts back.
    StepLimits.count_success = (self.fewer_steps, good(self), setattr(self, "fewer_steps", True))[1]

ForgetsToLookAgain (ENGINE-07): A request that found no row is not tried again when there may be more of them.
    Recovery._apply_limits = self.controller.draft_fewest(self.limits.fewer_steps)
"""
"""After a step that has failed."""

RESERVES = """
ReservesForOne (ENGINE-07): A request enters beside a reserve for one other, however many run.
    Room.to_leave = good(self, min(num_decoding, 1))

EntersAtOnce (ENGINE-07): What was retracted enters again before a round is committed.
    Requests.is_admission_paused = False

SparesAllFromThePause (ENGINE-07, ENGINE-10): After a retraction for a greater priority admission pauses for no request.
    AdmissionPause.spares = self._has_begun and head is not None

AddsUpPages (ENGINE-07): Context and reserve are rounded to pages one by one, so that a request which fits waits.
    Room.to_find
        - slots = ceil_to_page(self.rules.tokens_to_find(newcomer), self.config.page_size)
        + slots = ceil_to_page(context, self.config.page_size) + self.slots_for_length(0)

StopsBlocksForEver (ENGINE-07): A row with stop strings that has left is counted on, so that nothing runs in blocks any more.
    DecodeRounds.remove = self._has_stop_strings.__setitem__(row, False) or good(self, row)

KeepsWhatOverlapNeeds (ACCEPT-08): What a block leaves is that of a plan that has seen its last round, in overlap mode too.
    DecodeRounds.release_unused
        - if self.config.overlap:
        + if False:

LetsTheAbortedRun (ENGINE-07): A block goes on for its rounds when one of its requests is aborted.
    CoreEngine.abort = [_end(f) for f in [self.engine.abort(request, 0).finished] if f is not None]

TakesNoRow (ENGINE-07): No request gives way where only a row is missing.
    Preemption._fits_without
        - if not num_victims and not self.admission.has_row:
        + if False:
"""
"""What is left for those that run."""

_PLACES = [CoreEngine, Engine, Admission, AdmissionPause, DecodeRounds, Recovery, Requests, StepLimits, WaitingQueue]
_PLACES += [Preemption, Room, giving_way]
MUTANTS = defects("engine", CoreEngine, _PLACES, WAITING + FAILURES + RESERVES, _end=_end)
