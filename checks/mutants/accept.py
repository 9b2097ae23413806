"""Planted defects of acceptance and compaction: each is one method of a good component, done wrong as it has been done wrong before."""

from __future__ import annotations

from ...properties.harness.mutants import Mutant
from . import plain_accept as plain
from . import trees

_DEFECTS = (
    (trees.GathersTheBonusByTheLiveWidth, ("ACCEPT-18",)),
    (trees.SizesAcceptIndexByTheLiveSteps, ("ACCEPT-18",)),
    (trees.MovesByTheNumberOfNodes, ("ACCEPT-06", "ACCEPT-16")),
    (trees.ScattersBeforeItGathers, ("ACCEPT-16",)),
    (trees.MovesOneLayer, ("ACCEPT-06", "ACCEPT-16")),
    (trees.MovesNothing, ("ACCEPT-06",)),
    (trees.LooksTheWindowsUpLater, ("ACCEPT-16",)),
    (trees.LeavesTheLastOutput, ("ACCEPT-06",)),
    (trees.CompactsByTheLiveNodes, ("ACCEPT-18",)),
    (trees.CompactsInPlace, ("ACCEPT-06",)),
    (trees.NumbersPositions, ("ACCEPT-07",)),
    (trees.CountsPositionsFromTheBonus, ("ACCEPT-07",)),
    (trees.RunsPastTheContext, ("ACCEPT-07",)),
    (trees.TrustsTheDraft, ("ACCEPT-09",)),
    (trees.RefusesTheLastId, ("ACCEPT-09",)),
    (trees.HangsOrphansBelowTheRoot, ("ACCEPT-09",)),
    (trees.MatchesAnyNode, ("ACCEPT-01",)),
    (trees.SkipsTheRoot, ("ACCEPT-01",)),
    (trees.CountsDraftsOnly, ("ACCEPT-02",)),
    (trees.AcceptsNoDraft, ("ACCEPT-02",)),
    (trees.TakesTheLastOfTies, ("ACCEPT-02",)),
    (trees.DrawsFromTheWholeTarget, ("ACCEPT-05", "ACCEPT-04")),
    (trees.TossesOneCoin, ("ACCEPT-04",)),
    (trees.AcceptsTheLikely, ("ACCEPT-04",)),
    (trees.FlattensTheTarget, ("ACCEPT-04",)),
    (trees.ShowsAFailedTarget, ("ACCEPT-04", "ACCEPT-02")),
    (trees.TossesItsOwnCoins, ("ACCEPT-13",)),
    (trees.BreaksTiesByHistory, ("ACCEPT-13",)),
    (trees.KeepsTheUnlikely, ("ACCEPT-19",)),
    (trees.HidesTheRoot, ("ACCEPT-20",)),
    (trees.WalksTheSiblingsInACircle, ("ACCEPT-20",)),
    (trees.FollowsTheUnlikely, ("ACCEPT-21",)),
    (trees.LeavesOutTheTokenThatReachesP, ("ACCEPT-22",)),
    (trees.TossesTheSameCoinsEveryRound, ("ACCEPT-23",)),
    (trees.SharesACoin, ("ACCEPT-23",)),
    (plain.MasksTheRootOnly, ("ACCEPT-14",)),
    (plain.StaysInTheRootsState, ("ACCEPT-02", "ACCEPT-14")),
    (plain.MasksTheBonusOnly, ("ACCEPT-14",)),
    (plain.ReemitsWithoutADraft, ("ACCEPT-05",)),
    (plain.TrustsBrokenDrafts, ("ACCEPT-05", "ACCEPT-04")),
    (plain.DrawsFromTheTargetAlone, ("ACCEPT-04",)),
    (plain.ComparesWithoutTheDraft, ("ACCEPT-04",)),
    (plain.AcceptsAtACoinOfZero, ("ACCEPT-04",)),
    (plain.PlansBackwards, ("ACCEPT-16",)),
    (plain.MovesDeadLanes, ("ACCEPT-16",)),
    (plain.ForgetsTheRowsOffset, ("ACCEPT-16",)),
    (plain.MovesWholePages, ("ACCEPT-16",)),
    (plain.MovesOneSlotTooMany, ("ACCEPT-16",)),
    (plain.MovesRowsOfTheRoundBefore, ("ACCEPT-16",)),
)
"""(class, the invariants of which one must catch it)."""

MUTANTS = tuple(Mutant(kind.__name__, kind.__doc__, "accept", kind, caught_by) for kind, caught_by in _DEFECTS)
