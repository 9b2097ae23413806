"""Planted defects of step controllers of no policy of ours, which do not do what a known cost, or acceptance, says."""

from __future__ import annotations

from ....properties.step_controller.contract import StepControllerConfig
from ....properties.step_controller.rule import read_table
from ...mutant import Mutant


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


def _drafting(kind: type, caught_by: str, *capabilities: str) -> Mutant:
    kind.capabilities = ("adaptive", *capabilities)
    return Mutant(kind.__name__, kind.__doc__, "step-controller", kind, (caught_by,))


OF_NO_POLICY = (
    _drafting(DraftsTheMost, "STEPS-08", "goodput"),
    _drafting(DraftsTheLeast, "STEPS-08", "goodput"),
    _drafting(DraftsMoreTheLessIsAccepted, "STEPS-06"),
)
