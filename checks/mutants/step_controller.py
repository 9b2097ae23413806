"""Planted defects of step controllers: each is one method of a good one, done wrong as it has been
done wrong before."""

from __future__ import annotations

from dataclasses import replace

from ...core.adaptive import AdaptiveController, AdaptiveSpeculativeParams, AdaptiveStepSlot
from ...core.adaptive.acceptance_estimate import AcceptanceEstimate
from ...core.adaptive.graphs import GraphTable, MissingGraph
from ...core.errors import ConfigError
from ...properties.step_controller.contract import StepControllerConfig
from ...properties.step_controller.rule import read_table
from ..adapters.step_controller import ControllerAdapter, make_ema, make_fixed, make_goodput
from ..mutant import Mutant
from .planting import defects

CONTROLLERS = """
StepsFromTheAverage (STEPS-01): The steps are the average plus one, not a candidate near it.
    AdaptiveStepSlot.observe:
        good(self, total, rows)
        self.current_steps = int(self.ema_accept_len) + 1

ProbesFromBelowNothing (STEPS-14): A first probe keeps the average that the range began with, which is negative: it takes twice as long to
believe in a draft.
    AdaptiveStepSlot._probe
        - if self.ema_accept_len < 0:
        + if False:

ProbesTheDeepest (STEPS-14): A probe drafts as much as there is, not the next candidate.
    AdaptiveStepSlot._probe
        - self._switch(self._index + 1)
        + self._switch(len(self.candidate_steps) - 1)

RisesOnATie (STEPS-14): An average at the threshold of a rise is enough.
    AdaptiveStepSlot._target_index
        - ema > c[index]
        + ema >= c[index]

StaysOnATie (STEPS-14): An average at the threshold of a drop is not enough.
    AdaptiveStepSlot._target_index
        - ema <= (c[index - 1] or 1)
        + ema < (c[index - 1] or 1)

MovesOneLevel (STEPS-14): It goes one candidate up or down at a look, however far the average is.
    AdaptiveStepSlot._target_index = min(max(good(self), self._index - 1), self._index + 1)

ForgetsTheWarmUp (STEPS-14): The first look comes with the first interval; the warm-up is left out.
    AdaptiveStepSlot.__init__
        - self.config.warmup_batches + self.config.update_interval
        + self.config.update_interval

CeilingHoldsRisesBack (STEPS-14): The ceiling, which is for drops alone, cuts a rise off as well.
    AdaptiveStepSlot._apply_ceiling
        - or target > self._index

LearnsTheLastRound (STEPS-10, STEPS-14): Of a block only the last round is learned from.
    AdaptiveController.on_verify_rounds
        - for counts in correct_drafts:
        + for counts in correct_drafts[-1:]:

RoutesTheUnpadded (STEPS-01, STEPS-10): A batch is routed by its own size, not by that of the graph it runs in.
    AdaptiveSpeculativeParams.set_cuda_graph_bs = good(self, None)

KeepsStateInTheClass (STEPS-03, STEPS-14): Where it begins depends on how many there were before: state of the class, as a clock or an
address would be.
    AdaptiveSpeculativeParams.__init__:
        candidates = load_adaptive_config(config).candidate_steps
        memory["made"] = memory.get("made", 0) + 1
        good(self, candidates[memory["made"] % len(candidates)], config)

CountsEveryStep (STEPS-13): A result of other steps than the current ones is averaged like the rest.
    AdaptiveSpeculativeParams.observe = self.slot_for_batch(batch_size).observe(total, rows)

CountsTwice (STEPS-10): A result is counted when it arrives, and again when its batch is processed.
    AdaptiveSpeculativeParams.observe:
        good(self, counts, total, rows, batch_size, executed_steps)
        good(self, counts, total, rows, batch_size, executed_steps)

RoutesByTheRowsLeft (STEPS-10, STEPS-13): A result goes to the range of the rows that are left, not of those that were launched.
    AdaptiveSpeculativeParams.observe = good(self, counts, total, rows, rows, executed_steps)

ForgetsTheFirstTable (STEPS-09): A table is compared with the running one: a candidate that was left out can never come back.
    AdaptiveSpeculativeParams.reload:
        self._built = frozenset(self.config.candidate_steps)
        good(self, config)

CountsNothingAsZero (STEPS-10): The mean of no rows is 0, and is averaged.
    ControllerAdapter.observe:
        if not len(correct_drafts):
            self.policy.observe((1,), 0, 1, batch_size, executed_steps)
        good(self, correct_drafts, batch_size, executed_steps)

ReadsHalfOfATable (STEPS-09): Of a table with a problem, the knobs that can be read are taken.
    ControllerAdapter.reload:
        try:
            good(self, text)
        except ConfigError:
            for slot in self.policy.slots:
                slot._until_recompute = 1
            raise

CapturesEverything (STEPS-11): Every step count gets graphs for every captured size.
    ControllerAdapter.attach:
        good(self, build, captured)
        for steps in self.controller.candidates:
            for size in captured or ():
                if (steps, steps + 1, size) not in self.graphs._graphs:
                    build(steps, steps + 1, size)

RebuildsAtFeedback (STEPS-12): A result that changes the choice builds the graphs again, under the rounds that are in flight.
    ControllerAdapter.attach:
        good(self, build, captured)
        self.build_again = lambda: good(self, build, captured)
    ControllerAdapter.observe:
        good(self, correct_drafts, batch_size, executed_steps)
        if self.steps_for(batch_size, 0) != executed_steps:
            self.build_again()

ReservesForTheFewest (STEPS-15): What is reserved follows from the smallest candidate: the minimum, where the maximum was meant.
    ControllerAdapter.reserved = self.controller.candidates[0] + 1

CapturesOneTooFew (STEPS-11): The largest batch size is left out: an off-by-one in the pruning.
    AdaptiveController.init_states:
        good(self, captured_sizes, lambda keys: build([key for key in keys if key.batch_size < keys[0].batch_size]))

RoutesBeforeItBuilds (STEPS-01, STEPS-12): The captured sizes are taken first, and stay if the building fails.
    AdaptiveController.init_states:
        good(self, captured_sizes)
        good(self, captured_sizes, build)

KeepsHalfABuild (STEPS-12): Each graph is filed as it is built, also when a later one fails.
    GraphTable.build:
        self._sizes = tuple(sorted({key.batch_size for key in keys}))
        for key in keys:
            self._graphs[key] = capture(key)

FilesBySize (STEPS-12): Graphs are found by their batch size alone: of several step counts, those of the last one.
    GraphTable.find:
        found = [graph for key, graph in self._graphs.items() if key.batch_size >= batch_size]
        return found[-1] if found else None
"""

PROBES = """
StaysAtZero (STEPS-04): 0 steps are told nothing, so they stay: there is no probe.
    AdaptiveStepSlot._is_probe_due = False

ProbesAtEveryLook (STEPS-04): A failed probe is followed by the next one at once.
    AdaptiveStepSlot._is_probe_due
        - if self._wait > 1:
        + if False:
"""

SETTLES = """
ThresholdsOverlap (STEPS-05): It rises below the average at which it drops, and so swings.
    AdaptiveStepSlot.__init__:
        good(self, initial_steps, cfg)
        self.config = replace(self.config, up_hysteresis=-1.0, down_hysteresis=1.0)

LooksAtEveryRound (STEPS-05): The update interval is forgotten: the choice is made again after every result.
    AdaptiveStepSlot.observe
        - if self._until_recompute == 0:
        + if True:
"""

READS = """
TrustsEveryNumber (STEPS-02): What is told is averaged as it is: one NaN, and the average is NaN for ever.
    ControllerAdapter.observe:
        if len(correct_drafts):
            self.policy.observe((), sum(correct_drafts), len(correct_drafts), batch_size, executed_steps)
"""

ESTIMATES = """
ExpectsWithoutTheBonus (STEPS-16): Only drafts are counted as tokens: plain decoding yields nothing, and drafting always pays.
    ControllerAdapter.expected = good(self, steps, batch_size) - 1

ExpectsEveryPositionAlone (STEPS-16): A draft counts as the first one does, as if those before it need not be accepted.
    ControllerAdapter.expected = 1 + steps * self.policy.estimate.probabilities[0]
"""

UNORDERED = """
WeighsTheFirstTwice (STEPS-17): The first result after a look counts as two.
    AcceptanceEstimate.add
        - self._pending[len(counts)] = list(counts)
        + self._pending[len(counts)] = [2 * count for count in counts]
"""

BLOCKS = """
CountsABlockOnce (STEPS-10): The rounds of a block count as one result.
    AdaptiveController.on_verify_rounds
        - self._counters.add(counts, total, rounds * rows, proposed, calls=rounds)
        + self._counters.add(counts, total, rounds * rows, proposed)
"""

# -- of no policy: what knows the cost ---------------------------------------------------------------------------------


class DraftsTheMost:
    """Every draft is taken to be worth its time: the deepest candidate, always."""

    def __init__(self, config: StepControllerConfig) -> None:
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
    """Where a row had nothing accepted it drafts the most, to make up for it;
    where every row had something, the least."""

    def __init__(self, config: StepControllerConfig) -> None:
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


def make_unattached(config: StepControllerConfig, make=make_ema) -> ControllerAdapter:
    """Make a controller that routes by the captured sizes, though no graphs are built for it."""
    controller = make(config)
    controller.policy.set_cuda_graph_bs(config.captured or None)
    return controller


def make_estimating(config: StepControllerConfig) -> ControllerAdapter:
    return make_unattached(config, make_goodput)


def _drafting(kind: type, caught_by: str, *capabilities: str) -> Mutant:
    kind.capabilities = ("adaptive", *capabilities)
    return Mutant(kind.__name__, kind.__doc__, "step-controller", kind, (caught_by,))


_PLACES = [
    *(AdaptiveStepSlot, AdaptiveSpeculativeParams, ControllerAdapter, AdaptiveController, GraphTable),
    *(AcceptanceEstimate, replace, ConfigError, MissingGraph),
]
MUTANTS = (
    *defects("step-controller", make_unattached, _PLACES, PROBES, ("adaptive", "counters", "probes")),
    *defects("step-controller", make_unattached, _PLACES, SETTLES, ("adaptive", "settles")),
    *defects("step-controller", make_ema, _PLACES, CONTROLLERS),
    *defects("step-controller", make_unattached, _PLACES, READS, ("adaptive", "inspection", "misuse")),
    *defects("step-controller", make_estimating, _PLACES, ESTIMATES, ("adaptive", "estimates")),
    *defects("step-controller", make_estimating, _PLACES, UNORDERED, ("adaptive", "estimates", "unordered")),
    *defects("step-controller", make_fixed, _PLACES, BLOCKS, ("blocks", "counters")),
    _drafting(DraftsTheMost, "STEPS-08", "goodput"),
    _drafting(DraftsTheLeast, "STEPS-08", "goodput"),
    _drafting(DraftsMoreTheLessIsAccepted, "STEPS-06"),
)
