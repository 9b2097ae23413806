"""Planted defects of step controllers: each is a subclass of a part of a good one, done wrong as it has been
done wrong before."""

from __future__ import annotations

from dataclasses import replace

from ....core.adaptive import AdaptiveController, AdaptiveSpeculativeParams, AdaptiveStepSlot
from ....core.adaptive.acceptance_estimate import AcceptanceEstimate
from ....core.adaptive.config import load_adaptive_config
from ....core.adaptive.controller import AdaptiveCounters, FixedPolicy
from ....core.adaptive.goodput import GoodputPolicy
from ....core.adaptive.graphs import GraphKey, GraphTable
from ....core.contract.step import RoundShape
from ....core.errors import ConfigError
from ....properties.step_controller.contract import StepControllerConfig
from ...adapters.step_controller import ControllerAdapter, make_ema, make_fixed, make_goodput
from ..planting import Defects


def make_unattached(config: StepControllerConfig, make=make_ema) -> ControllerAdapter:
    """Make a controller that routes by the captured sizes, though no graphs are built for it."""
    controller = make(config)
    controller.policy.set_cuda_graph_bs(config.captured or None)
    return controller


def make_estimating(config: StepControllerConfig) -> ControllerAdapter:
    return make_unattached(config, make_goodput)


PROBES = Defects("step-controller", make_unattached, ("adaptive", "counters", "probes"))


@PROBES.breaks("STEPS-04")
class StaysAtZero(AdaptiveStepSlot):
    """0 steps learn nothing, so they stay: there is no probe."""

    def _is_probe_due(self):
        return False


@PROBES.breaks("STEPS-04")
class ProbesAtEveryLook(AdaptiveStepSlot):
    """A failed probe is followed by the next one at once."""

    def _is_probe_due(self):
        self._wait = 1
        return super()._is_probe_due()


SETTLES = Defects("step-controller", make_unattached, ("adaptive", "settles"))


@SETTLES.breaks("STEPS-05")
class ThresholdsOverlap(AdaptiveStepSlot):
    """It rises below the average at which it drops, and so swings."""

    def __init__(self, initial_steps, cfg):
        super().__init__(initial_steps, cfg)
        self.config = replace(self.config, up_hysteresis=-1.0, down_hysteresis=1.0)


@SETTLES.breaks("STEPS-05")
class LooksAtEveryRound(AdaptiveStepSlot):
    """The update interval is forgotten: the choice is made again after every result."""

    def observe(self, total, rows):
        self._until_recompute = 1
        super().observe(total, rows)


CONTROLLERS = Defects("step-controller", make_ema)


@CONTROLLERS.breaks("STEPS-01")
class StepsFromTheAverage(AdaptiveStepSlot):
    """The steps are the average plus one, not a candidate near it."""

    def observe(self, total, rows):
        super().observe(total, rows)
        self.current_steps = int(self.ema_accept_len) + 1


@CONTROLLERS.breaks("STEPS-14", "STEPS-10")
class ProbesFromBelowNothing(AdaptiveStepSlot):
    """A first probe keeps the average that the range began with, which is negative: it takes twice as long to believe
    in a draft."""

    def _probe(self):
        before = self.ema_accept_len
        super()._probe()
        self.ema_accept_len = before


@CONTROLLERS.breaks("STEPS-14")
class ProbesTheDeepest(AdaptiveStepSlot):
    """A probe drafts as much as there is, not the next candidate."""

    def _probe(self):
        self._switch(len(self.candidate_steps) - 1)
        if self.ema_accept_len < 0:
            self.ema_accept_len = float(self.current_steps - 1)


@CONTROLLERS.breaks("STEPS-14")
class RisesOnATie(AdaptiveStepSlot):
    """An average at the threshold of a rise is enough."""

    def _target_index(self):
        index, c = super()._target_index(), self.candidate_steps
        while self._index <= index < len(c) - 1 and self.ema_accept_len == c[index] - 0.5 + self.config.up_hysteresis:
            index += 1
        return index


@CONTROLLERS.breaks("STEPS-14")
class StaysOnATie(AdaptiveStepSlot):
    """An average at the threshold of a drop is not enough."""

    def _target_index(self):
        target, c = super()._target_index(), self.candidate_steps
        at_tie = target < self._index and self.ema_accept_len == (c[target] or 1) - 0.5 + self.config.down_hysteresis
        return target + at_tie


@CONTROLLERS.breaks("STEPS-14")
class MovesOneLevel(AdaptiveStepSlot):
    """It goes one candidate up or down at a look, however far the average is."""

    def _target_index(self):
        return min(max(super()._target_index(), self._index - 1), self._index + 1)


@CONTROLLERS.breaks("STEPS-14", "STEPS-10")
class ForgetsTheWarmUp(AdaptiveStepSlot):
    """The first look comes with the first interval; the warm-up is left out."""

    def __init__(self, initial_steps, cfg):
        super().__init__(initial_steps, cfg)
        self._until_recompute = self.config.update_interval


@CONTROLLERS.breaks("STEPS-14")
class CeilingHoldsRisesBack(AdaptiveStepSlot):
    """The ceiling, which is for drops alone, cuts a rise off as well."""

    def _apply_ceiling(self, target):
        index, self._index = self._index, max(self._index, target)
        target = super()._apply_ceiling(target)
        self._index = index
        return target


@CONTROLLERS.breaks("STEPS-10", "STEPS-14")
class LearnsTheLastRound(AdaptiveController):
    """Of a block only the last round is learned from."""

    def on_verify_rounds(self, correct_drafts, bs, executed_steps):
        is_fixed = self.policy.name == FixedPolicy.name
        super().on_verify_rounds(correct_drafts if is_fixed else correct_drafts[-1:], bs, executed_steps)


@CONTROLLERS.breaks("STEPS-01", "STEPS-10")
class RoutesTheUnpadded(AdaptiveSpeculativeParams):
    """A batch is routed by its own size, not by that of the graph it runs in."""

    def set_cuda_graph_bs(self, sizes):
        return super().set_cuda_graph_bs(None)


@CONTROLLERS.breaks("STEPS-03", "STEPS-14")
class KeepsStateInTheClass(AdaptiveSpeculativeParams):
    """Where it begins depends on how many there were before: state of the class, as a clock or an address would be."""

    made = 0

    def __init__(self, initial_steps=None, config="default"):
        candidates = load_adaptive_config(config).candidate_steps
        type(self).made += 1
        super().__init__(candidates[self.made % len(candidates)], config)


@CONTROLLERS.breaks("STEPS-13")
class CountsEveryStep(AdaptiveSpeculativeParams):
    """A result of other steps than the current ones is averaged like the rest."""

    def observe(self, counts, total, rows, batch_size, executed_steps):
        return self.slot_for_batch(batch_size).observe(total, rows)


@CONTROLLERS.breaks("STEPS-10")
class CountsTwice(AdaptiveSpeculativeParams):
    """A result is counted when it arrives, and again when its batch is processed."""

    def observe(self, counts, total, rows, batch_size, executed_steps):
        super().observe(counts, total, rows, batch_size, executed_steps)
        super().observe(counts, total, rows, batch_size, executed_steps)


@CONTROLLERS.breaks("STEPS-10", "STEPS-13")
class RoutesByTheRowsLeft(AdaptiveSpeculativeParams):
    """A result goes to the range of the rows that are left, not of those that were launched."""

    def observe(self, counts, total, rows, batch_size, executed_steps):
        return super().observe(counts, total, rows, rows, executed_steps)


@CONTROLLERS.breaks("STEPS-10")
class CountsARowMore(AdaptiveCounters):
    """The histogram counts a row of an odd batch once more, as one without an accepted draft."""

    def add(self, counts, correct, rows, proposed_per_row, calls=1):
        super().add(counts, correct, rows, proposed_per_row, calls)
        self._histogram[0] += rows % 2


@CONTROLLERS.breaks("STEPS-10")
class ShowsWhatTheRangeBeganWith(AdaptiveController):
    """The steps that an operator sees are those of the first range, not those that were chosen last."""

    def _gauges(self):
        return super()._gauges() | {"steps": self.policy.config.candidate_steps[0]}


@CONTROLLERS.breaks("STEPS-10")
class ShowsOneAverage(AdaptiveController):
    """The average of each range that an operator sees is that of the first one."""

    def _gauges(self):
        gauges = super()._gauges()
        averages = gauges["ema_accept_len"]
        return gauges | {"ema_accept_len": dict.fromkeys(averages, next(iter(averages.values()), 0.0))}


@CONTROLLERS.breaks("STEPS-10")
class CountsNoProbe(AdaptiveStepSlot):
    """The switch to a probe is left out of the count of switches."""

    def _probe(self):
        switches = self.switches
        super()._probe()
        self.switches = switches


@CONTROLLERS.breaks("STEPS-10")
class ShowsTheWaitOfNow(AdaptiveStepSlot):
    """A snapshot says when the next look is due as if the warm-up were over."""

    def snapshot(self):
        interval = self.config.update_interval
        return super().snapshot() | {"until_recompute": (self._until_recompute - 1) % interval + 1}


@CONTROLLERS.breaks("STEPS-09")
class ForgetsTheFirstTable(AdaptiveSpeculativeParams):
    """A table is compared with the running one: a candidate that was left out can never come back."""

    def reload(self, config):
        self._built = frozenset(self.config.candidate_steps)
        super().reload(config)


@CONTROLLERS.breaks("STEPS-10")
class CountsNothingAsZero(ControllerAdapter):
    """The mean of no rows is 0, and is averaged."""

    def observe(self, correct_drafts, batch_size, executed_steps):
        if not len(correct_drafts):
            self.policy.observe((1,), 0, 1, batch_size, executed_steps)
        super().observe(correct_drafts, batch_size, executed_steps)


@CONTROLLERS.breaks("STEPS-09")
class ReadsHalfOfATable(ControllerAdapter):
    """Of a table with a problem, the knobs that can be read are taken."""

    def reload(self, text):
        try:
            super().reload(text)
        except ConfigError:
            for slot in self.policy.slots:
                slot._until_recompute = 1
            raise


@CONTROLLERS.breaks("STEPS-11")
class CapturesEverything(ControllerAdapter):
    """Every step count gets graphs for every captured size."""

    def attach(self, build, captured):
        super().attach(build, captured)
        for steps in self.controller.candidates:
            for size in captured or ():
                if GraphKey(RoundShape.chain(steps), size) not in self.graphs._graphs:
                    build(steps, steps + 1, size)


@CONTROLLERS.breaks("STEPS-12")
class RebuildsAtFeedback(ControllerAdapter):
    """A result that changes the choice builds the graphs again, under the rounds that are in flight."""

    def attach(self, build, captured):
        attach = super().attach
        attach(build, captured)
        self.build_again = lambda: attach(build, captured)

    def observe(self, correct_drafts, batch_size, executed_steps):
        super().observe(correct_drafts, batch_size, executed_steps)
        if self.steps_for(batch_size, 0) != executed_steps:
            self.build_again()


@CONTROLLERS.breaks("STEPS-15")
class ReservesForTheFewest(ControllerAdapter):
    """What is reserved follows from the smallest candidate: the minimum, where the maximum was meant."""

    def reserved(self):
        return self.controller.candidates[0] + 1


@CONTROLLERS.breaks("STEPS-11")
class CapturesOneTooFew(AdaptiveController):
    """The largest batch size is left out: an off-by-one in the pruning."""

    def init_states(self, captured_sizes=None, build=None):
        def build_fewer(keys):
            build([key for key in keys if key.batch_size < keys[0].batch_size])

        super().init_states(captured_sizes, build_fewer)


@CONTROLLERS.breaks("STEPS-01", "STEPS-12")
class RoutesBeforeItBuilds(AdaptiveController):
    """The captured sizes are taken first, and stay if the building fails."""

    def init_states(self, captured_sizes=None, build=None):
        super().init_states(captured_sizes)
        super().init_states(captured_sizes, build)


@CONTROLLERS.breaks("STEPS-12")
class KeepsHalfABuild(GraphTable):
    """Each graph is filed as it is built, also when a later one fails."""

    def build(self, keys, capture):
        self._sizes = tuple(sorted({key.batch_size for key in keys}))
        for key in keys:
            self._graphs[key] = capture(key)


@CONTROLLERS.breaks("STEPS-12")
class FilesBySize(GraphTable):
    """Graphs are found by their batch size alone: of several step counts, those of the last one."""

    def find(self, shape, batch_size):
        found = [graph for key, graph in self._graphs.items() if key.batch_size >= batch_size]
        return found[-1] if found else None


READS = Defects("step-controller", make_unattached, ("adaptive", "inspection", "misuse"))


@READS.breaks("STEPS-02")
class TrustsEveryNumber(ControllerAdapter):
    """A result is averaged as it is: one NaN, and the average is NaN for ever."""

    def observe(self, correct_drafts, batch_size, executed_steps):
        if len(correct_drafts):
            self.policy.observe((), sum(correct_drafts), len(correct_drafts), batch_size, executed_steps)


ESTIMATES = Defects("step-controller", make_estimating, ("adaptive", "estimates"))


@ESTIMATES.breaks("STEPS-16")
class ExpectsWithoutTheBonus(ControllerAdapter):
    """Only drafts are counted as tokens: plain decoding yields nothing, and drafting always pays."""

    def expected(self, steps, batch_size):
        return super().expected(steps, batch_size) - 1


@ESTIMATES.breaks("STEPS-16")
class ExpectsEveryPositionAlone(ControllerAdapter):
    """A draft counts as the first one does, as if those before it need not be accepted."""

    def expected(self, steps, batch_size):
        return 1 + steps * self.policy.estimate.probabilities[0]


UNORDERED = Defects("step-controller", make_estimating, ("adaptive", "estimates", "unordered"))


@UNORDERED.breaks("STEPS-17")
class WeighsTheFirstTwice(AcceptanceEstimate):
    """The first result after a look counts as two."""

    def add(self, counts):
        is_first = len(counts) not in self._pending
        super().add([2 * count for count in counts] if is_first else counts)


LOOKS = Defects("step-controller", make_goodput, ("adaptive", "gauges", "goodput"))


@LOOKS.breaks("STEPS-10")
class KeepsWhatWasFolded(AcceptanceEstimate):
    """Results that a look has taken in wait for the next one, too."""

    def fold(self, *arguments):
        waiting = dict(self._pending)
        changed = super().fold(*arguments)
        self._pending.update(waiting)
        return changed


@LOOKS.breaks("STEPS-10")
class CountsDraftingRoundsAlone(GoodputPolicy):
    """A round without drafts is none: in plain decoding the time to the next probe stands still."""

    def observe(self, counts, total, rows, batch_size, executed_steps):
        if executed_steps:
            super().observe(counts, total, rows, batch_size, executed_steps)


BLOCKS = Defects("step-controller", make_fixed, ("multi_steps", "counters"))


@BLOCKS.breaks("STEPS-10")
class CountsABlockOnce(AdaptiveCounters):
    """The rounds of a block count as one result."""

    def add(self, counts, correct, rows, proposed_per_row, calls=1):
        super().add(counts, correct, rows, proposed_per_row)


OF_POLICIES = (PROBES, SETTLES, CONTROLLERS, READS, ESTIMATES, UNORDERED, LOOKS, BLOCKS)
