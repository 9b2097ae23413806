"""Planted defects of acceptance and compaction: each is one method of a good one, done wrong in a way that has been done wrong before."""

from __future__ import annotations

from ...properties.accept.contract import AcceptCapabilities, AcceptConfig
from ...properties.accept.plain import EVERYTHING, PlainAccept
from ...properties.harness.mutants import Mutant
from ..adapters.tree_accept import TreeAccept
from ..adapters.tree_accept import make as make_tree_accept
from . import plain_accept as plain
from . import trees as trees


def of_trees(kind: type[TreeAccept]):
    def make(config: AcceptConfig) -> TreeAccept:
        return kind(config)

    make.capabilities = make_tree_accept.capabilities
    return make


def of_plain(kind: type[PlainAccept], capabilities: AcceptCapabilities = EVERYTHING):
    def make(config: AcceptConfig) -> PlainAccept:
        return kind(config)

    make.capabilities = capabilities
    return make


_DEFECTS = (
    (trees.GathersTheBonusByTheLiveWidth, of_trees, ("ACCEPT-18",)),
    (trees.SizesAcceptIndexByTheLiveSteps, of_trees, ("ACCEPT-18",)),
    (trees.MovesByTheNumberOfNodes, of_trees, ("ACCEPT-16",)),
    (trees.ScattersBeforeItGathers, of_trees, ("ACCEPT-16",)),
    (trees.MovesOneLayer, of_trees, ("ACCEPT-06",)),
    (trees.MovesNothing, of_trees, ("ACCEPT-06",)),
    (trees.LooksTheWindowsUpLater, of_trees, ("ACCEPT-16",)),
    (trees.LeavesTheLastOutput, of_trees, ("ACCEPT-06",)),
    (trees.CompactsByTheLiveNodes, of_trees, ("ACCEPT-18",)),
    (trees.CompactsInPlace, of_trees, ("ACCEPT-06",)),
    (trees.NumbersPositions, of_trees, ("ACCEPT-07",)),
    (trees.CountsPositionsFromTheBonus, of_trees, ("ACCEPT-07",)),
    (trees.RunsPastTheContext, of_trees, ("ACCEPT-07",)),
    (trees.TrustsTheDraft, of_trees, ("ACCEPT-09",)),
    (trees.RefusesTheLastId, of_trees, ("ACCEPT-09",)),
    (trees.HangsOrphansBelowTheRoot, of_trees, ("ACCEPT-09",)),
    (trees.MatchesAnyNode, of_trees, ("ACCEPT-01",)),
    (trees.SkipsTheRoot, of_trees, ("ACCEPT-01",)),
    (trees.CountsDraftsOnly, of_trees, ("ACCEPT-02",)),
    (trees.AcceptsNoDraft, of_trees, ("ACCEPT-02",)),
    (trees.TakesTheLastOfTies, of_trees, ("ACCEPT-02",)),
    (trees.DrawsFromTheWholeTarget, of_trees, ("ACCEPT-05", "ACCEPT-04")),
    (trees.TossesOneCoin, of_trees, ("ACCEPT-04",)),
    (trees.AcceptsTheLikely, of_trees, ("ACCEPT-04",)),
    (trees.FlattensTheTarget, of_trees, ("ACCEPT-04",)),
    (trees.ShowsAFailedTarget, of_trees, ("ACCEPT-04", "ACCEPT-02")),
    (trees.TossesItsOwnCoins, of_trees, ("ACCEPT-13",)),
    (trees.BreaksTiesByHistory, of_trees, ("ACCEPT-13",)),
    (plain.MasksTheRootOnly, of_plain, ("ACCEPT-14",)),
    (plain.StaysInTheRootsState, of_plain, ("ACCEPT-14",)),
    (plain.MasksTheBonusOnly, of_plain, ("ACCEPT-14",)),
    (plain.ReemitsWithoutADraft, of_plain, ("ACCEPT-05",)),
    (plain.TrustsBrokenDrafts, of_plain, ("ACCEPT-05", "ACCEPT-04")),
    (plain.DrawsFromTheTargetAlone, of_plain, ("ACCEPT-04",)),
    (plain.ComparesWithoutTheDraft, of_plain, ("ACCEPT-04",)),
    (plain.AcceptsAtACoinOfZero, of_plain, ("ACCEPT-04",)),
    (plain.PlansBackwards, of_plain, ("ACCEPT-16",)),
    (plain.MovesDeadLanes, of_plain, ("ACCEPT-16",)),
    (plain.ForgetsTheRowsOffset, of_plain, ("ACCEPT-16",)),
    (plain.MovesWholePages, of_plain, ("ACCEPT-16",)),
    (plain.MovesOneSlotTooMany, of_plain, ("ACCEPT-16",)),
    (plain.MovesRowsOfTheRoundBefore, of_plain, ("ACCEPT-16",)),
)
"""(class, how it is made, the invariants of which one must catch it)."""

MUTANTS = tuple(
    Mutant(kind.__name__, kind.__doc__, "accept", how(kind), caught_by) for kind, how, caught_by in _DEFECTS
)
