"""Planted defects of simulated acceptance: one of our processes with one method done wrong."""

from dataclasses import replace

from ...core.acceptance.process import GaussianAcceptance
from ..mutants.planting import defects, lookup
from .core_subject import CoreProcess

PROCESSES = """
ReplaysOneRecording (ACCEPT-25): Every request replays the same recording.
    CoreProcess.replay = good(self, recorded[:1], seed)

NeverReplaysTheLast (ACCEPT-25): An off-by-one in the draw: the last recording is never replayed.
    CoreProcess.replay = good(self, recorded[:-1] or recorded, seed)

BeginsARecordingInTheMiddle (ACCEPT-24): The second replay of a recording leaves out its first entry.
    CoreProcess.longest_run:
        runs = good(self, requests, positions, shifts)
        late = good(self, requests, positions + 1, shifts)
        return np.where(np.broadcast_to(positions, runs.shape) > 12, late, runs)

TurnsTheDriftAround (ACCEPT-25): The drift has the wrong sign.
    CoreProcess.__init__ = good(self, replace(config, drift_tenths=-config.drift_tenths))

AddsSharesInsteadOfVariances (ACCEPT-25): A share of the variance is taken for one of the quality: the parts are too small, and good
requests too alike.
    CoreProcess.build:
        squares = {name: getattr(config, name) ** 2 // 100 for name in ("request_percent", "field_percent")}
        return good(self, replace(config, **squares))

TakesTheConditionalForTheSurvival (ACCEPT-25): The probability of reaching a depth is that of its draft alone.
    GaussianAcceptance.__post_init__:
        good(self)
        object.__setattr__(self, "_thresholds", tuple(sorted(self._thresholds[:1] * len(self._thresholds))))

ForgetsTheBonusToken (ACCEPT-24): A round starts behind the accepted drafts of the one before, on its bonus token.
    CoreProcess.accept_lens:
        lens = []
        for _ in range(rounds):
            lens.append(good(self, requests, starts, steps, 1)[0])
            starts = starts + np.maximum(lens[-1] - 1, 1)
        return np.array(lens)

DrawsForThePlaceInTheBatch (ACCEPT-24): What a request draws depends on its place in the batch.
    CoreProcess.longest_run = good(self, requests + np.arange(len(requests), dtype=np.uint64)[:, None], positions, shifts)

PromisesOneBranchMore (ACCEPT-24): A tree has one node more than it was given.
    CoreProcess.tree_survival:
        most = topk + (steps - 1) * topk * topk + 1
        return good(self, topk, steps, min(num_nodes + 1, most), rank_ratio)

WakesUpLate (ACCEPT-24): The best hour is subtracted twice.
    CoreProcess.day_shift = good(self, amplitude, best_hour, hour - best_hour)

ForgetsItsSeed (ACCEPT-26): Every seed makes the same requests.
    CoreProcess.__init__ = good(self, replace(config, seed=0))
"""

MUTANTS = defects("acceptance-process", CoreProcess, [CoreProcess, GaussianAcceptance, replace], PROCESSES)
__getattr__ = lookup(MUTANTS)
