"""Planted defects of engines: budgets of drafts, and the confidences by which they are chosen and spent."""

import numpy as np

from ....core.adaptive.controller import AdaptiveController
from ....core.adaptive.lengths.confidence import ConfidencePolicy
from ....core.adaptive.lengths.pass_costs import PassCosts
from ....core.adaptive.lengths.survival import are_valid, choose_nodes
from ...adapters.core_engine import CoreEngineByConfidence
from ..planting import Defects

BUDGETS = Defects("engine", CoreEngineByConfidence)


def _one_less(survival, most_nodes, drafts, choose=choose_nodes):
    return choose(survival, most_nodes, drafts - (drafts > 1))


def _alike(survival, most_nodes, drafts, choose=choose_nodes):
    return choose(np.ones_like(survival), most_nodes, drafts)


def _last_row_first(survival, most_nodes, drafts, choose=choose_nodes):
    return choose(survival[::-1], most_nodes[::-1], drafts)[::-1].copy()


def _as_many_as_the_shape_has(survival, most_nodes, drafts, choose=choose_nodes):
    return choose(survival, np.full_like(most_nodes, survival.shape[1] + 1), drafts)


@BUDGETS.breaks("DRAFT-06", functions={choose_nodes: _one_less})
class SpendsADraftLess(CoreEngineByConfidence):
    """The budget counts one of the roots, so a draft less is verified."""


@BUDGETS.breaks("DRAFT-07", functions={choose_nodes: _alike})
class SpendsTheBudgetAlike(CoreEngineByConfidence):
    """Every row verifies as many drafts as every other one, whatever its confidences are."""


@BUDGETS.breaks("DRAFT-07", functions={choose_nodes: _last_row_first})
class BreaksTiesByTheLastRow(CoreEngineByConfidence):
    """Among drafts of equal survival those of the last row come first."""


@BUDGETS.breaks("DRAFT-06", "RAISES", functions={choose_nodes: _as_many_as_the_shape_has})
class ForgetsTheBoundOfARow(CoreEngineByConfidence):
    """Drafts are chosen over the whole shape of a round, also those that a row may not verify."""


@BUDGETS.breaks("DRAFT-08", "DRAFT-09")
class RemembersByRow(ConfidencePolicy):
    """Confidences are kept by row, and a request that enters gets those of the one before it."""

    def look(self, rows, epochs, kv_tokens, most_drafts=None):
        self._reach(int(rows.max(initial=0)))
        self._epochs[rows] = epochs
        super().look(rows, epochs, kv_tokens, most_drafts)


@BUDGETS.breaks("DRAFT-08")
class LagsARound(ConfidencePolicy):
    """A result is taken when the next one has come."""

    def take(self, step, result, present):
        held, self.held = getattr(self, "held", None), (step, result, present)
        if held is not None:
            super().take(*held)


@BUDGETS.breaks("DRAFT-08")
class KeepsTheLastValid(ConfidencePolicy):
    """A row with a confidence that is no probability keeps those of the round before."""

    def take(self, step, result, present):
        self._reach(int(step.rows.max(initial=0)))
        before = self._epochs[step.rows].copy()
        super().take(step, result, present)
        is_invalid = present & ~are_valid(result.confidence[-1])
        self._epochs[step.rows[is_invalid]] = before[is_invalid]


@BUDGETS.breaks("DRAFT-09")
class DoubtsNewcomers(ConfidencePolicy):
    """A row without confidences counts as half certain."""

    def _survival(self, rows, epochs):
        survival = super()._survival(rows, epochs)
        survival[self._epochs[rows] != epochs] *= 0.5
        return survival


@BUDGETS.breaks("DRAFT-09")
class ForgetsTheRoots(PassCosts):
    """The time of a pass is that of its drafts, without the roots of the rows."""

    def verify_times(self, tokens):
        return super().verify_times(tokens - tokens[0] + 1 if len(tokens) > 2 else tokens)


@BUDGETS.breaks("DRAFT-09")
class CountsDraftsPastTheEnd(ConfidencePolicy):
    """A budget has drafts that a row does not verify, since fewer tokens are left to it."""

    def look(self, rows, epochs, kv_tokens, most_drafts=None):
        super().look(rows, epochs, kv_tokens)


@BUDGETS.breaks("DRAFT-10")
class CountsRowsThatHaveLeft(ConfidencePolicy):
    """Rows whose request has left are counted where a confidence is no probability."""

    def take(self, step, result, present):
        super().take(step, result, present)
        self.num_invalid += int(np.count_nonzero(~present & ~are_valid(result.confidence[-1])))


@BUDGETS.breaks("ACCEPT-12")
class CountsDraftsThatAreNotVerified(AdaptiveController):
    """All drafts of a round count as proposed, not only those that its budget has verified."""

    def on_chosen(self, correct_drafts, row_nodes, executed_steps):
        super().on_chosen(correct_drafts, np.full_like(row_nodes, executed_steps + 1), executed_steps)
