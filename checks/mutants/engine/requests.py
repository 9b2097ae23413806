"""Planted defects of engines: requests and their tokens, what only two runs show, and those of a plain engine."""

from dataclasses import replace

import numpy as np

from ....core.contract.outcomes import AbortOutcome
from ....core.contract.request import FinishReason
from ....core.scheduler.admission import Admission
from ....core.scheduler.engine import Engine
from ....core.scheduler.output import OutputLog
from ....core.scheduler.requests import Requests
from ....core.scheduler.rounds import DecodeRounds
from ....properties.engine.language import STOP, stream_of
from ....properties.engine.plain import PlainEngine
from ...adapters.core_engine import CoreEngine
from ..planting import Defects

REQUESTS = Defects("engine", CoreEngine)


@REQUESTS.breaks("ENGINE-01")
class LosesTheRetracted(Requests):
    """A retracted request gives its row back and is in no queue."""

    def retract(self, record, keeps_place=False, for_priority=False):
        super().retract(record)
        self.waiting.remove(record)


@REQUESTS.breaks("ENGINE-02")
class SaysGoodbyeTwice(CoreEngine):
    """A request whose end falls into the last round of a step is reported once by the step and once by the clean-up."""

    def commit(self, answer):
        events = super().commit(answer)
        return events + [event for event in events if event[0] == "end" and event[2] == "stop"]


@REQUESTS.breaks("ENGINE-03")
class ForgetsTheOutputOnReturn(OutputLog):
    """When a retracted request enters again, the log of its row begins with the prompt alone."""

    def open(self, record):
        super().open(record)
        self._tokens[record.row, record.prompt_len : len(record.context)] = 0


@REQUESTS.breaks("ENGINE-04")
class KeepsTheMarksOfTheWholeRun(OutputLog):
    """Per-token outputs are kept for every accepted token, also behind the stop."""

    def log(self, rows, counted, decode, record_in):
        super().log(rows, counted, decode, record_in)
        for i in np.flatnonzero(counted.present.before).tolist() if decode.outputs is not None else ():
            for name, output in record_in(int(rows[i])).outputs.items():
                output.extend(decode.outputs[-1][name][i, counted.kept[-1, i] : decode.accept_lens[-1, i]])


@REQUESTS.breaks("ENGINE-08")
class LetsEverythingIn(Admission):
    """The prompt is not compared with the context and the pool at submission."""

    def refusal(self, request):
        reason = super().refusal(request)
        return "" if reason.startswith("too long") else reason


@REQUESTS.breaks("ENGINE-12")
class ReplacesTheOther(Requests):
    """A second request of the same name takes the first one's place."""

    def refusal(self, request):
        return ""


@REQUESTS.breaks("ENGINE-13")
class LeaksAfterAnAbort(Requests):
    """The clean-up of an aborted request forgets its last page."""

    def _end(self, record):
        row, store = record.row, self.store
        if (
            row
            and record.ending[0] is FinishReason.ABORT
            and store.allocated[row] - store._shared[row] >= store.page_size
        ):
            store.allocated[row] -= store.page_size
        return super()._end(record)


@REQUESTS.breaks("ENGINE-06")
class LeaksAfterARetraction(Requests):
    """The clean-up of a retracted request forgets its last page."""

    def retract(self, record, keeps_place=False, for_priority=False):
        row, store = record.row, self.store
        if store.allocated[row] - store._shared[row] >= store.page_size:
            store.allocated[row] -= store.page_size
        super().retract(record)


@REQUESTS.breaks("ENGINE-13")
class AbortsLater(Engine):
    """An abort is noted, and carried out when the request ends by itself."""

    def abort(self, request_id, now_ns):
        record = self.requests.live.get(request_id)
        if record is not None and record.row and not self.requests.leaving:
            return AbortOutcome(None, False)
        return super().abort(request_id, now_ns)


@REQUESTS.breaks("ACCEPT-11", "ENGINE-02")
class GivesOneTokenMore(DecodeRounds):
    """The length at which a request ends is that of its KV, one short of its text."""

    def add(self, row, kv_len, end_len, has_stop_strings):
        return super().add(row, kv_len, end_len + 1, has_stop_strings)


@REQUESTS.breaks("ACCEPT-10")
class MasksTheStopByTheCap(DecodeRounds):
    """A run that reaches the length cap ends by length, whatever its last token is."""

    def count(self, planned, result, num_departed_at_plan, leaving):
        counted = super().count(planned, result, num_departed_at_plan, leaving)
        at_the_cap = self.kv_len[planned.index] >= self.end_len[planned.index]
        return counted._replace(stopped=counted.stopped & ~at_the_cap)


@REQUESTS.breaks("ACCEPT-12")
class CountsDepartedRows(DecodeRounds):
    """Every row of a verify result is counted, those of departed requests too."""

    def teach_controller(self, step, result, present):
        return super().teach_controller(step, result, present._replace(is_complete=True))


@REQUESTS.breaks("ACCEPT-12")
class ForgetsWhoLeft(DecodeRounds):
    """Rounds of a multi-step that a request had before its client left are counted as delivered, not as verified."""

    def teach_controller(self, step, result, present):
        return super().teach_controller(step, result, present._replace(before=present.last))


@REQUESTS.breaks("ACCEPT-12")
class TellsTheLargestBatch(DecodeRounds):
    """The choice of draft steps learns that every round had as many rows as the batch has places."""

    def teach_controller(self, step, result, present):
        if present.is_complete:
            return super().teach_controller(step, result, present)
        for accept_lens, rows in zip(result.accept_lens, present.by_round(result.rounds), strict=True):
            self.controller.on_verify_complete(accept_lens[rows] - 1, self.config.max_running, step.shape.steps)
        return None


@REQUESTS.breaks("ACCEPT-10", "ENGINE-03")
class StopsInsideBlocks(Engine):
    """Rows with stop strings are put into multi-steps, though a multi-step's rounds are not searched for them."""

    def _max_rounds(self):
        rounds = self.rounds
        number, rounds.num_with_stop_strings = rounds.num_with_stop_strings, 0
        most = super()._max_rounds()
        rounds.num_with_stop_strings = number
        return most


@REQUESTS.breaks("ACCEPT-10", "ENGINE-03")
class ReadsSinceTheLastEntry(OutputLog):
    """A stop string that begins before a retraction and ends behind it is not found."""

    def _text_before(self, record, begin):
        if record.text is not None and record.text.num_tokens == record.emitted_before > 0:
            record.text = None
        return super()._text_before(record, record.prompt_len)


@REQUESTS.breaks("ACCEPT-10", "ENGINE-03")
class ReadsEachRoundAlone(OutputLog):
    """A stop string is found if all of it stands in one round."""

    def _text_before(self, record, begin):
        record.text = None
        return super()._text_before(record, record.prompt_len)


@REQUESTS.breaks("ENGINE-13")
class KeepsTheLeavingAtALoss(Requests):
    """A request that leaves with its multi-step does not end when that is lost: the step counts as running."""

    def end_leaving(self):
        return [] if self.steps_are_lost else super().end_leaving()


TWINS = Defects("engine", CoreEngine)
"""What only two runs show."""


@TWINS.breaks("ENGINE-15")
class KnowsTheFuture(CoreEngine):
    """A block has two rounds while there is a request whose text ends within four tokens, as the device's own model
    says.
    """

    def __init__(self, config):
        super().__init__(config)
        self.model = config.model
        self.texts = {}

    def submit(self, wish):
        most = super().submit(wish)
        self.texts[wish.request] = text = stream_of(wish.prompt, wish.seed, self.model)
        text.reach(len(wish.prompt) + 4)
        return most

    def plan(self):
        config, requests = self.engine.config, self.engine.requests.live.values()
        ends_soon = any(
            STOP in self.texts[r.request.request_id].tokens[r.prompt_len : r.prompt_len + 4] for r in requests
        )
        self.engine.config = (
            replace(config, multi_step_rounds=min(config.multi_step_rounds, 2)) if ends_soon else config
        )
        answer = super().plan()
        self.engine.config = config
        return answer


@TWINS.breaks("ENGINE-17", "RELAY-09")
class DrawsByRow(CoreEngine):
    """What a request draws from depends on the row that it got."""

    def key(self, row):
        seed = super().key(row)
        return seed and seed + row - 1


@TWINS.breaks("RELAY-09")
class DrawsByFlight(CoreEngine):
    """What a request draws from depends on whether a step is in flight."""

    def key(self, row):
        seed = super().key(row)
        return seed and seed + (self.engine.num_uncommitted > 1)


@TWINS.breaks("RADIX-16")
class DrawsByHit(CoreEngine):
    """What a request draws from depends on how much of its prompt was cached."""

    def key(self, row):
        seed = super().key(row)
        return seed and seed + (self.engine.requests.live[self.requests[row]].num_cached > 0)


@TWINS.breaks("SIM-12")
class DrawsByBlock(CoreEngine):
    """The rounds of a multi-step draw from the multi-step's seed."""

    def view(self, step):
        view = super().view(step)
        if view["rounds"] > 1:
            view["decode"] = [(request, length, root, key and key + 1) for request, length, root, key in view["decode"]]
        return view


class _SparesAToken(CoreEngine):
    def __init__(self, config):
        super().__init__(config)
        engine = self.engine
        engine.admission.spared = int(engine.algorithm.is_speculative and engine.controller.max_steps == 0)


@TWINS.breaks("ACCEPT-15", also=(_SparesAToken,))
class ReservesForNoDraft(Admission):
    """Without drafts one prompt token less is computed per step, since the algorithm could draft."""

    def next_chunks(self, budget, num_decoding, may_admit):
        return super().next_chunks(max(budget - self.spared, 1), num_decoding, may_admit)


PLAIN = Defects("engine", PlainEngine)
"""What is easier to do wrong in a plain engine."""


@PLAIN.breaks("RELAY-05")
class HandsOverAPlaceholder(PlainEngine):
    """The input of the first round after a prompt is the placeholder of a token that has not been delivered."""

    def plan(self):
        view = super().plan()
        if view is not None:
            first = {row.name for row in self.rows or () if len(row.output) == 1}
            view["decode"] = [(name, at, -1 if name in first else root, key) for name, at, root, key in view["decode"]]
        return view


@PLAIN.breaks("ENGINE-19")
class GoesByTheProcess(PlainEngine):
    """Free pages are taken from either end, in turns over all engines that the process has made."""

    num_made = 0

    def __init__(self, config):
        super().__init__(config)
        type(self).num_made += 1
        if self.num_made % 2:
            self.free.reverse()
