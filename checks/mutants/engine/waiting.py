"""Planted defects of engines: who waits for what, what happens after a step that has failed, and what is left for those
that run."""

import numpy as np

from ....core.kv.request_table import ceil_to_page
from ....core.kv.store import KVStore
from ....core.scheduler.admission import Admission
from ....core.scheduler.preemption import Preemption
from ....core.scheduler.recovery import Recovery, StepLimits
from ....core.scheduler.requests import Requests
from ....core.scheduler.rounds import DecodeRounds
from ....core.scheduler.rules.admission_state import AdmissionPause, BatchWait
from ....core.scheduler.rules.room import Room
from ....core.scheduler.waiting import WaitingQueue, giving_way
from ...adapters.core_engine import CoreEngine, _end
from ..planting import Defects

WAITING = Defects("engine", CoreEngine)


@WAITING.breaks("ACCEPT-11")
class TakesARoundOffTheContext(Admission):
    """The nodes of a round are taken off the context that prompt and output may fill."""

    def max_tokens(self, request):
        room = self.config.context_len - self.sizes.alloc_len - request.prompt.length
        return min(super().max_tokens(request), max(room, 1))


@WAITING.breaks("ENGINE-08")
class RefusesWithAWord(Admission):
    """The reason of a refusal is left out."""

    def refusal(self, request):
        return super().refusal(request) and "refused"


@WAITING.breaks("ENGINE-08")
class FillsTheQueueByOneMore(Admission):
    """The bound of the queue is compared with < where <= is meant."""

    def refusal(self, request):
        reason = super().refusal(request)
        is_last = reason.startswith("queue full") and len(self.requests.waiting) == self.config.max_queue
        return "" if is_last else reason


@WAITING.breaks("ENGINE-07", "ENGINE-10")
class PushesOutTheAged(Requests):
    """A request that runs at last, after it was overtaken too often, gives way to a greater priority."""

    def lower_than(self, head):
        return giving_way(head, self.running.values(), 1 << 30)


@WAITING.breaks("ENGINE-07")
class TakesAVictimMore(Preemption):
    """A preemption takes one request more than it needs."""

    def _num_victims(self, head, lower):
        number = super()._num_victims(head, lower)
        return number and number + 1


@WAITING.breaks("ENGINE-07")
class GivesWayInVain(Room):
    """A request gives way to a greater priority, which must leave more slots free than there are then."""

    def to_leave(self, num_decoding, entering=(), held=None):
        return 0 if held is not None else super().to_leave(num_decoding, entering)


@WAITING.breaks("ENGINE-07")
class ForgetsThatTheOthersGrow(Preemption):
    """A preemption makes room beside the slots that the others have now, and they take more until then."""

    def _growth_to(self, held):
        return 0


@WAITING.breaks("ENGINE-07")
class CountsWhatItWillLock(Preemption):
    """A preemption counts slots as free that the cache has for the request which enters."""

    def _num_victims(self, head, lower):
        entrance = self.room.measure(head, self.admission.limits.prefill_budget, len(self.requests.rounds.rows))
        fits = [self._fits_without(lower, entrance, number) for number in range(len(lower) + 1)]
        return fits.index(True) if any(fits) else 0


@WAITING.breaks("ENGINE-07")
class PushesOutUnderAFence(Preemption):
    """A preemption does not wait for the slots of an earlier victim, which are fenced, and takes a second one."""

    def preempt(self):
        requests, head, limits = self.requests, self.requests.waiting.head, self.admission.limits
        if head is None or limits.are_reduced or requests.in_progress is not None or requests.is_admission_paused:
            return
        if not requests.leaving:
            lower = requests.lower_than(head)
            for victim in lower[: self._num_victims(head, lower)]:
                requests.retract(victim, for_priority=True)


@WAITING.breaks("ACCEPT-12", "ENGINE-18", "ENGINE-04")
class LosesWhatABlockHadDelivered(DecodeRounds):
    """A request that is aborted while a multi-step runs gets nothing of its rounds."""

    def _presence(self, rows, num_departed_at_plan, leaving):
        return super()._presence(rows, num_departed_at_plan, ())


@WAITING.breaks("ENGINE-07")
class ForgetsThatPagesAreWhole(DecodeRounds):
    """A block reserves by the slots that are free, though its rows take them in whole pages."""

    def _rounds_in_free_slots(self, kv_tokens, allocated):
        slack = self._multi_step_slack
        self._multi_step_slack -= len(allocated) * (self.config.page_size - 1)
        rounds = super()._rounds_in_free_slots(kv_tokens, allocated)
        self._multi_step_slack = slack
        return rounds


@WAITING.breaks("ENGINE-07")
class NeverGivesWay(Preemption):
    """No request of smaller priority gives way."""

    def preempt(self):
        pass


@WAITING.breaks("ENGINE-07")
class LetsBlocksGoOn(CoreEngine):
    """A newcomer waits until the multi-step that runs has come to its end."""

    def submit(self, wish):
        interrupted = self.newest_interrupted
        most = super().submit(wish)
        self.newest_interrupted = interrupted
        return most


@WAITING.breaks("ENGINE-16")
class TriesTheGuiltyLast(Recovery):
    """After a failed step those go first that have run before."""

    def _suspects_among(self, records):
        return [record for record in records if not record.has_committed_nothing] or records


@WAITING.breaks("ENGINE-16")
class ForgetsEarlierSuspects(WaitingQueue):
    """A second failure replaces the suspects of the first."""

    def try_first(self, records):
        self._first = list(records)


@WAITING.breaks("ENGINE-05")
class LetsOneMoreIn(Admission):
    """After a failed step one row more runs than may."""

    @property
    def has_row(self):
        limits, row_limit = self.limits, self.limits.row_limit
        limits.row_limit = row_limit and row_limit + 1
        has_row = super().has_row
        limits.row_limit = row_limit
        return has_row


@WAITING.breaks("RADIX-12")
class OffersWhatIsGone(KVStore):
    """On a new device the prefix cache offers what the old one had."""

    def forget(self):
        pass


@WAITING.breaks("ENGINE-02")
class NeverFails(StepLimits):
    """A request that fails every step is tried for ever."""

    def count_failure(self, *failure):
        super().count_failure(*failure)
        return False


@WAITING.breaks("STEPS-07")
class DraftsLessForEver(StepLimits):
    """Good steps do not bring drafts back."""

    def count_success(self):
        are_raised = super().count_success()
        self.fewer_steps = True
        return are_raised


@WAITING.breaks("ENGINE-07")
class ForgetsToLookAgain(Recovery):
    """A request that found no row is not tried again when there may be more of them."""

    def _apply_limits(self):
        self.controller.draft_fewest(self.limits.fewer_steps)


@WAITING.breaks("ENGINE-07")
class ReservesForOne(Room):
    """A request enters beside a reserve for one other, however many run."""

    def to_leave(self, num_decoding, entering=(), held=None):
        return super().to_leave(min(num_decoding, 1))


@WAITING.breaks("ENGINE-07")
class EntersAtOnce(Requests):
    """What was retracted enters again before a round is committed."""

    is_admission_paused = False


@WAITING.breaks("ENGINE-07", "ENGINE-10")
class SparesAllFromThePause(AdmissionPause):
    """After a retraction for a greater priority admission pauses for no request."""

    def spares(self, head):
        return self._has_begun and head is not None


@WAITING.breaks("ENGINE-07")
class AddsUpPages(Room):
    """Context and reserve are rounded to pages one by one, so that a request which fits waits."""

    def _length_to_find(self, record, num_known, budget, padding=0):
        context = record.prompt_len + record.emitted_before
        return ceil_to_page(context, self.config.page_size) + self.slots_for_length(0)


@WAITING.breaks("ENGINE-07")
class StopsBlocksForEver(DecodeRounds):
    """A row with stop strings that has left is counted on, so that nothing runs in blocks any more."""

    def remove(self, row):
        self._has_stop_strings[row] = False
        super().remove(row)


@WAITING.breaks("ACCEPT-08")
class KeepsWhatOverlapNeeds(DecodeRounds):
    """What a multi-step leaves is that of a plan that has seen its last round, in overlap mode too."""

    def release_unused(self, planned, result, kv_before_last, in_later_step):
        super().release_unused(planned, result, kv_before_last, np.ones_like(in_later_step))


@WAITING.breaks("ENGINE-07")
class CutsForWhoWaitsBehind(CoreEngine):
    """A block ends at its next round whenever a request is aborted, also one that waits behind others."""

    def abort(self, request):
        self._interrupt(True)
        return super().abort(request)


@WAITING.breaks("ENGINE-07")
class LetsTheAbortedRun(CoreEngine):
    """A block goes on for its rounds when one of its requests is aborted."""

    def abort(self, request):
        finished = self.engine.abort(request, 0).finished
        return [] if finished is None else [_end(finished)]


@WAITING.breaks("ENGINE-07")
class TakesNoRow(Preemption):
    """No request gives way where only a row is missing."""

    def _fits_without(self, lower, entrance, num_victims):
        return entrance.num_slots <= self._free_without(lower[:num_victims])


@WAITING.breaks("ENGINE-07")
class ForgetsWhatIsVerified(Admission):
    """Newcomers wait for a large batch of prompts, and the tokens that are verified beside them do not count."""

    def _waits_for_more(self, budget, num_verify_tokens):
        return super()._waits_for_more(budget, 0)


@WAITING.breaks("ENGINE-07")
class WaitsForAPlanMore(BatchWait):
    """Newcomers wait for others for one plan more than they may."""

    def goes_on(self, is_small):
        self._most_plans += 1
        goes_on = super().goes_on(is_small)
        self._most_plans -= 1
        return goes_on


@WAITING.breaks("ENGINE-07")
class CountsTheLastWaits(BatchWait):
    """The plans for which the newcomers before have waited count for those that come now."""

    def goes_on(self, is_small):
        before = self._num_plans
        goes_on = super().goes_on(is_small)
        self._num_plans = self._num_plans if goes_on else before
        return goes_on
