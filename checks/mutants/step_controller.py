"""Planted defects of step controllers: each is one method of a good one, done wrong as it has been done wrong before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...core.adaptive import AdaptiveController, AdaptiveSpeculativeParams, AdaptiveStepSlot, load_adaptive_config
from ...core.adaptive.graph_plan import GraphTable, MissingGraph
from ...core.errors import ConfigError, Problem
from ...properties.harness.mutants import Mutant
from ...properties.step_controller.contract import StepsConfig
from ...properties.step_controller.table import read_table
from ..adapters.step_controller import ControllerAdapter, initial_of, make_ema, make_goodput

# -- slots: the rule of one range --------------------------------------------------------------------------------------


class StaysAtZero(AdaptiveStepSlot):
    """0 steps are told nothing, so they stay: there is no probe."""

    def _probe(self):
        pass


class ProbesAtEveryLook(AdaptiveStepSlot):
    """A failed probe is followed by the next one at once."""

    def _probe(self):
        self._wait = 1
        super()._probe()


class ThresholdsOverlap(AdaptiveStepSlot):
    """It rises below the average at which it drops, and so swings."""

    def __init__(self, initial_steps, cfg):
        super().__init__(initial_steps, cfg)
        self.config = replace(self.config, up_hysteresis=-1.0, down_hysteresis=1.0)


class LooksAtEveryRound(AdaptiveStepSlot):
    """The update interval is forgotten: the choice is made again after every result."""

    def observe(self, total, rows):
        self._until_recompute = 1
        super().observe(total, rows)


class StepsFromTheAverage(AdaptiveStepSlot):
    """The steps are the average plus one, not a candidate near it."""

    def observe(self, total, rows):
        super().observe(total, rows)
        self.current_steps = int(self.ema_accept_len) + 1


class ProbesFromBelowNothing(AdaptiveStepSlot):
    """A first probe keeps the average that the range began with, which is negative: it takes twice as long to believe in a draft."""

    def _probe(self):
        average = self.ema_accept_len
        super()._probe()
        self.ema_accept_len = average


class ProbesTheDeepest(AdaptiveStepSlot):
    """A probe drafts as much as there is, not the next candidate."""

    def _probe(self):
        index, self._index = self._index, len(self.candidate_steps) - 2
        super()._probe()
        if self.current_steps == 0:
            self._index = index


class RisesOnATie(AdaptiveStepSlot):
    """An average at the threshold of a rise is enough."""

    def _target_index(self):
        index = super()._target_index()
        members = self.candidate_steps
        is_tie = self.ema_accept_len == members[index] - 0.5 + self.config.up_hysteresis
        return index + 1 if is_tie and index == self._index and index + 1 < len(members) else index


class StaysOnATie(AdaptiveStepSlot):
    """An average at the threshold of a drop is not enough."""

    def _target_index(self):
        below = self.candidate_steps[max(self._index - 1, 0)] or 1
        is_tie = self.ema_accept_len == below - 0.5 + self.config.down_hysteresis
        return self._index if is_tie else super()._target_index()


class MovesOneLevel(AdaptiveStepSlot):
    """It goes one candidate up or down at a look, however far the average is."""

    def _target_index(self):
        return min(max(super()._target_index(), self._index - 1), self._index + 1)


class ForgetsTheWarmUp(AdaptiveStepSlot):
    """The first look comes with the first interval; the warm-up is left out."""

    def __init__(self, initial_steps, cfg):
        super().__init__(initial_steps, cfg)
        self._until_recompute = self.config.update_interval


class CeilingHoldsRisesBack(AdaptiveStepSlot):
    """The ceiling, which is for drops alone, cuts a rise off as well."""

    def _apply_ceiling(self, target):
        if self.config.ceiling_coeff <= 0:
            return target
        while target > 0 and self.candidate_steps[target] > max(1, self.ema_accept_len * self.config.ceiling_coeff):
            target -= 1
        return target


# -- policies: all ranges ----------------------------------------------------------------------------------------------


class RoutesTheUnpadded(AdaptiveSpeculativeParams):
    """A batch is routed by its own size, not by that of the graph it runs in."""

    def set_cuda_graph_bs(self, sizes):
        super().set_cuda_graph_bs(None)


class KeepsStateInTheClass(AdaptiveSpeculativeParams):
    """Where it begins depends on how many there were before: state of the class, as a clock or an address would be."""

    made = 0

    def __init__(self, initial_steps, config):
        table = load_adaptive_config(config)
        KeepsStateInTheClass.made += 1
        super().__init__(table.candidate_steps[KeepsStateInTheClass.made % len(table.candidate_steps)], table)


class CountsEveryStep(AdaptiveSpeculativeParams):
    """A result of other steps than the current ones is averaged like the rest."""

    def observe(self, counts, total, rows, batch_size, executed_steps):
        self.slot_for_batch(batch_size).observe(total, rows)


class CountsTwice(AdaptiveSpeculativeParams):
    """A result is counted when it arrives, and again when its batch is processed."""

    def observe(self, counts, total, rows, batch_size, executed_steps):
        super().observe(counts, total, rows, batch_size, executed_steps)
        super().observe(counts, total, rows, batch_size, executed_steps)


class RoutesByTheRowsLeft(AdaptiveSpeculativeParams):
    """A result goes to the range of the rows that are left, not of those that were launched."""

    def observe(self, counts, total, rows, batch_size, executed_steps):
        super().observe(counts, total, rows, rows, executed_steps)


class ForgetsTheFirstTable(AdaptiveSpeculativeParams):
    """A table is compared with the running one: a candidate that was left out can never come back."""

    def reload(self, config):
        unbuilt = set(config.candidate_steps) - set(self.config.candidate_steps)
        if unbuilt:
            raise ConfigError(config.source, [Problem("candidate_steps", f"{sorted(unbuilt)} were not built")])
        super().reload(config)


# -- adapters: what is around a policy ---------------------------------------------------------------------------------


class TrustsEveryNumber(ControllerAdapter):
    """What is told is averaged as it is: one NaN, and the average is NaN for ever."""

    def observe(self, correct_drafts, batch_size, executed_steps):
        if len(correct_drafts):
            self.policy.observe((), sum(correct_drafts), len(correct_drafts), batch_size, executed_steps)


class CountsNothingAsZero(ControllerAdapter):
    """The mean of no rows is 0, and is averaged."""

    def observe(self, correct_drafts, batch_size, executed_steps):
        if not len(correct_drafts):
            self.policy.observe((1,), 0, 1, batch_size, executed_steps)
        super().observe(correct_drafts, batch_size, executed_steps)


class ResetsBeforeItReads(ControllerAdapter):
    """A new table begins with a fresh state, made before the table is read."""

    captured = None

    def attach(self, build, captured):
        self.captured = captured
        super().attach(build, captured)

    def reload(self, text):
        self.policy.__init__(None, self.policy.config)
        self.policy.set_cuda_graph_bs(self.captured)
        super().reload(text)


class ReadsHalfOfATable(ControllerAdapter):
    """Of a table with a problem, the knobs that can be read are taken."""

    def reload(self, text):
        try:
            super().reload(text)
        except ConfigError:
            for slot in self.policy.slots:
                slot._until_recompute = 1
            raise


class CapturesEverything(ControllerAdapter):
    """Every step count gets graphs for every captured size."""

    def attach(self, build, captured):
        super().attach(build, captured)
        for steps in self.controller.candidates:
            for size in captured or ():
                if (steps, steps + 1, size) not in self.graphs._graphs:
                    build(steps, steps + 1, size)


class BuildsWhatIsMissing(ControllerAdapter):
    """A graph is built when a round first looks for it, while requests wait."""

    def attach(self, build, captured):
        self.build = build
        self.controller.init_states(captured)

    def graph(self, steps, batch_size):
        try:
            return super().graph(steps, batch_size)
        except MissingGraph:
            return self.build(steps, steps + 1, batch_size)


class RebuildsAtFeedback(ControllerAdapter):
    """A result that changes the choice builds the graphs again, under the rounds that are in flight."""

    def attach(self, build, captured):
        super().attach(build, captured)
        self.attached = build, captured

    def observe(self, correct_drafts, batch_size, executed_steps):
        super().observe(correct_drafts, batch_size, executed_steps)
        if self.steps_for(batch_size, 0) != executed_steps:
            super().attach(*self.attached)


class ReservesForTheFewest(ControllerAdapter):
    """What is reserved follows from the smallest candidate: the minimum, where the maximum was meant."""

    def reserved(self):
        return self.controller.candidates[0] + 1


class ExpectsWithoutTheBonus(ControllerAdapter):
    """Only drafts are counted as tokens: plain decoding yields nothing, and drafting always pays."""

    def expected(self, steps, batch_size):
        return super().expected(steps, batch_size) - 1


class ExpectsEveryPositionAlone(ControllerAdapter):
    """A draft counts with its own acceptance, as if those before it need not be accepted."""

    def expected(self, steps, batch_size):
        return 1 + sum(self.policy.estimate.probabilities[:steps])


# -- controllers and tables: graphs by key -----------------------------------------------------------------------------


class CapturesOneTooFew(AdaptiveController):
    """The largest batch size is left out: an off-by-one in the pruning."""

    def init_states(self, captured_sizes=None, build=None):
        super().init_states(
            captured_sizes, lambda keys: build([key for key in keys if key.batch_size < keys[0].batch_size])
        )


class RoutesBeforeItBuilds(AdaptiveController):
    """The captured sizes are taken first, and stay if the building fails."""

    def init_states(self, captured_sizes=None, build=None):
        super().init_states(captured_sizes)
        super().init_states(captured_sizes, build)


class KeepsHalfABuild(GraphTable):
    """Each graph is filed as it is built, also when a later one fails."""

    def build(self, keys, capture):
        self._sizes = tuple(sorted({key.batch_size for key in keys}))
        for key in keys:
            self._graphs[key] = capture(key)


class FilesBySize(GraphTable):
    """Graphs are found by their batch size alone: of several step counts, those of the last one."""

    def find(self, steps, num_draft_tokens, batch_size):
        found = [graph for key, graph in self._graphs.items() if key.batch_size >= batch_size]
        return found[-1] if found else None


# -- of no policy: what knows the cost -----------------------------------------------------------------------------------


class DraftsTheMost:
    """Every draft is taken to be worth its time: the deepest candidate, always."""

    def __init__(self, config: StepsConfig) -> None:
        self.table, self.captured = read_table(config.table), config.captured

    def candidates(self, batch_size):
        return self.table.candidates[self.table.range_of(batch_size, self.captured)]

    def steps_for(self, batch_size, kv_tokens):
        return self.candidates(batch_size)[-1]

    def observe(self, correct_drafts, batch_size, executed_steps):
        return all(0 <= correct <= executed_steps for correct in correct_drafts)


class DraftsTheLeast(DraftsTheMost):
    """Drafting is given up where it did not pay once: the shallowest candidate that drafts, always."""

    def steps_for(self, batch_size, kv_tokens):
        return next((steps for steps in self.candidates(batch_size) if steps), 0)


class DraftsMoreTheLessIsAccepted(DraftsTheMost):
    """Where a row had nothing accepted it drafts the most, to make up for it; where every row had something, the least."""

    def __init__(self, config: StepsConfig) -> None:
        super().__init__(config)
        self.interval = self.table.update_interval + 64 * self.table.min_dwell_batches
        self.results = {}  # candidates -> for each result, whether a row had nothing accepted

    def steps_for(self, batch_size, kv_tokens):
        members = self.candidates(batch_size)
        results = self.results.get(members, ())
        judged = len(results) // self.interval * self.interval
        drafts_most = any(results[max(judged - self.interval, 0) : judged])
        return ([steps for steps in members if steps] or [0])[-1 if drafts_most else 0]

    def observe(self, correct_drafts, batch_size, executed_steps):
        is_possible = super().observe(correct_drafts, batch_size, executed_steps)
        if is_possible and correct_drafts:
            self.results.setdefault(self.candidates(batch_size), []).append(0 in correct_drafts)
        return is_possible


# -- how they are made ------------------------------------------------------------------------------------------------


def _maker(kind: type, capabilities: Sequence[str] = make_ema.capabilities.declared) -> Callable[[StepsConfig], object]:
    """Return what makes our controller with one of its parts replaced, or a controller of no policy."""

    def make(config: StepsConfig) -> object:
        if issubclass(kind, DraftsTheMost):
            return kind(config)
        if "estimates" in capabilities:
            known = make_goodput(config).policy
            known.set_cuda_graph_bs(config.captured or None)
            return kind(known)
        policy = part(AdaptiveSpeculativeParams)(initial_of(config), config.table)
        if issubclass(kind, AdaptiveStepSlot):
            policy._slots = [kind(policy.initial_steps, cfg) for cfg in policy.config.slots]
        if "runtime" not in capabilities:
            policy.set_cuda_graph_bs(config.captured or None)  # it is not attached
        return part(ControllerAdapter)(policy, part(AdaptiveController), part(GraphTable))

    def part(good: type) -> type:
        return kind if issubclass(kind, good) else good

    make.capabilities = capabilities
    return make


_DEFECTS = (
    (StaysAtZero, ("STEPS-04",), ("adaptive", "counters", "probes")),
    (ProbesAtEveryLook, ("STEPS-04",), ("adaptive", "counters", "probes")),
    (ThresholdsOverlap, ("STEPS-05",), ("adaptive", "settles")),
    (LooksAtEveryRound, ("STEPS-05",), ("adaptive", "settles")),
    (ProbesFromBelowNothing, ("STEPS-14",)),
    (ProbesTheDeepest, ("STEPS-14",)),
    (RisesOnATie, ("STEPS-14",)),
    (StaysOnATie, ("STEPS-14",)),
    (MovesOneLevel, ("STEPS-14",)),
    (ForgetsTheWarmUp, ("STEPS-14",)),
    (CeilingHoldsRisesBack, ("STEPS-14",)),
    (StepsFromTheAverage, ("STEPS-01",)),
    (RoutesTheUnpadded, ("STEPS-01", "STEPS-10")),
    (KeepsStateInTheClass, ("STEPS-03", "STEPS-14")),
    (CountsEveryStep, ("STEPS-13",)),
    (CountsTwice, ("STEPS-10",)),
    (RoutesByTheRowsLeft, ("STEPS-10", "STEPS-13")),
    (ForgetsTheFirstTable, ("STEPS-09",)),
    (TrustsEveryNumber, ("STEPS-02",), ("adaptive", "inspection")),
    (CountsNothingAsZero, ("STEPS-10",)),
    (ResetsBeforeItReads, ("STEPS-09",)),
    (ReadsHalfOfATable, ("STEPS-09",)),
    (ReservesForTheFewest, ("STEPS-15",)),
    (ExpectsWithoutTheBonus, ("STEPS-16",), ("adaptive", "estimates")),
    (ExpectsEveryPositionAlone, ("STEPS-16",), ("adaptive", "estimates")),
    (CapturesEverything, ("STEPS-11",)),
    (BuildsWhatIsMissing, ("STEPS-11",)),
    (RebuildsAtFeedback, ("STEPS-12",)),
    (CapturesOneTooFew, ("STEPS-11",)),
    (RoutesBeforeItBuilds, ("STEPS-01", "STEPS-12")),
    (KeepsHalfABuild, ("STEPS-12",)),
    (FilesBySize, ("STEPS-12",)),
    (DraftsTheMost, ("STEPS-08",), ("adaptive", "goodput")),
    (DraftsTheLeast, ("STEPS-08",), ("adaptive", "goodput")),
    (DraftsMoreTheLessIsAccepted, ("STEPS-06",), ("adaptive",)),
)
"""(class, the invariants of which one must catch it, what is declared if not all that the good one has)."""

MUTANTS = tuple(
    Mutant(kind.__name__, kind.__doc__, "step-controller", _maker(kind, *capabilities), caught_by)
    for kind, caught_by, *capabilities in _DEFECTS
)
