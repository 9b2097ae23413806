"""Planted defects of simulated acceptance: one of our processes with one method done wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.acceptance.process import GaussianAcceptance
from ...properties.harness.mutants import Mutant
from .core_subject import CoreProcess


class ReplaysOneRecording(CoreProcess):
    """Every request replays the same recording."""

    def replay(self, recorded, seed):
        return super().replay(recorded[:1], seed)


class NeverReplaysTheLast(CoreProcess):
    """An off-by-one in the draw: the last recording is never replayed."""

    def replay(self, recorded, seed):
        return super().replay(recorded[:-1] or recorded, seed)


class BeginsARecordingInTheMiddle(CoreProcess):
    """The second replay of a recording leaves out its first entry."""

    def longest_run(self, requests, positions, shifts):
        runs = super().longest_run(requests, positions, shifts)
        late = super().longest_run(requests, positions + 1, shifts)
        return np.where(np.broadcast_to(positions, runs.shape) > 12, late, runs)


class TurnsTheDriftAround(CoreProcess):
    """The drift has the wrong sign."""

    def __init__(self, config):
        super().__init__(replace(config, drift_tenths=-config.drift_tenths))


class AddsSharesInsteadOfVariances(CoreProcess):
    """A share of the variance is taken for one of the quality: the parts are too small, and good requests too alike."""

    def build(self, config):
        squares = {name: getattr(config, name) ** 2 // 100 for name in ("request_percent", "field_percent")}
        return super().build(replace(config, **squares))


class TakesTheConditionalForTheSurvival(CoreProcess):
    """The probability of reaching a depth is that of its draft alone."""

    def build(self, config):
        process = super().build(config)
        if isinstance(process, GaussianAcceptance):
            object.__setattr__(
                process, "_thresholds", tuple(sorted(process._thresholds[:1] * len(process._thresholds)))
            )
        return process


class ForgetsTheBonusToken(CoreProcess):
    """A round starts behind the accepted drafts of the one before, on its bonus token."""

    def accept_lens(self, requests, starts, steps, rounds):
        lens = []
        for _ in range(rounds):
            lens.append(super().accept_lens(requests, starts, steps, 1)[0])
            starts = starts + np.maximum(lens[-1] - 1, 1)
        return np.array(lens)


class DrawsForThePlaceInTheBatch(CoreProcess):
    """What a request draws depends on its place in the batch."""

    def longest_run(self, requests, positions, shifts):
        return super().longest_run(requests + np.arange(len(requests), dtype=np.uint64)[:, None], positions, shifts)


class PromisesOneBranchMore(CoreProcess):
    """A tree has one node more than it was given."""

    def tree_survival(self, topk, steps, num_nodes, rank_ratio):
        most = topk + (steps - 1) * topk * topk + 1
        return super().tree_survival(topk, steps, min(num_nodes + 1, most), rank_ratio)


class WakesUpLate(CoreProcess):
    """The best hour is subtracted twice."""

    def day_shift(self, amplitude, best_hour, hour):
        return super().day_shift(amplitude, best_hour, hour - best_hour)


class ForgetsItsSeed(CoreProcess):
    """Every seed makes the same requests."""

    def __init__(self, config):
        super().__init__(replace(config, seed=0))


_DEFECTS = (
    (ReplaysOneRecording, ("ACCEPT-25",)),
    (NeverReplaysTheLast, ("ACCEPT-25",)),
    (BeginsARecordingInTheMiddle, ("ACCEPT-24",)),
    (TurnsTheDriftAround, ("ACCEPT-25",)),
    (AddsSharesInsteadOfVariances, ("ACCEPT-25",)),
    (TakesTheConditionalForTheSurvival, ("ACCEPT-25",)),
    (ForgetsTheBonusToken, ("ACCEPT-24",)),
    (DrawsForThePlaceInTheBatch, ("ACCEPT-24",)),
    (PromisesOneBranchMore, ("ACCEPT-24",)),
    (WakesUpLate, ("ACCEPT-24",)),
    (ForgetsItsSeed, ("ACCEPT-26",)),
)
"""(class, the invariants of which one must catch it)."""

MUTANTS = tuple(
    Mutant(kind.__name__, kind.__doc__, "acceptance-process", kind, caught_by) for kind, caught_by in _DEFECTS
)
