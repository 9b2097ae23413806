"""Simulated acceptance, for any configuration: answers are functions of (seed, request, position), however they are
asked for, and shares of many requests are those that the configuration says. What is due is computed from the
configuration alone. Below, eleven planted defects that these two tests must find.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, pi, sqrt
from statistics import NormalDist

import numpy as np
import pytest
from foredraft.checks.mutants.planting import Defects
from foredraft.core.acceptance.presets import TraceAcceptance
from foredraft.core.acceptance.process import (
    AcceptanceProcess,
    DayCurve,
    FixedMeanAcceptance,
    GaussianAcceptance,
    RegimeAcceptance,
    walk_to_end,
)
from foredraft.core.contract.step import RoundShape
from foredraft.core.draws import Purpose, hash64
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

NORMAL = NormalDist()
GRAIN = 1 / 4096
"""By so much a probability may be off: the fresh part of a quality may come from a table of that many."""
SHIFTS, WEIGHTS = (-1.5, 1.0, 0.0), (1.0, 2.0, 5.0)
MANY, WIDTH = 6_000, 60
HOUR_NS = 3_600_000_000_000


@dataclass(frozen=True)
class Law:
    """A process. What its kind does not name is not looked at; shares and probabilities are in percent."""

    kind: str = "gaussian"
    seed: int = 0
    percent: tuple[int, ...] = (70,)
    variances: tuple[int, int] = (0, 0)  # of a request, and of the field along its positions; the rest is drawn anew
    correlation_len: int = 8
    drift_tenths: int = 0
    stretch_len: int = 0
    mean_percent: int = 140
    recordings: tuple[tuple[int, ...], ...] = ((2, 0, 1),)
    max_depth: int = 8

    @property
    def conditional(self) -> tuple[float, ...]:
        return tuple(percent / 100 for percent in self.percent)


recordings = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4)
laws = st.builds(
    Law,
    kind=st.sampled_from(("gaussian", "gaussian", "gaussian", "fixed", "recorded")),
    seed=st.integers(0, 2**32),
    percent=st.lists(st.integers(0, 100), min_size=1, max_size=4).map(tuple),
    variances=st.sampled_from(((0, 0), (50, 0), (0, 60), (0, 100), (100, 0)))
    | st.tuples(st.integers(0, 50), st.integers(0, 50)),
    correlation_len=st.integers(1, 16),
    drift_tenths=st.just(0) | st.integers(-8, 8),
    stretch_len=st.just(0) | st.integers(1, 40),
    mean_percent=st.integers(0, 400),
    recordings=recordings.filter(lambda drawn: len({(row * 60)[:60] for row in drawn}) == len(drawn)).map(tuple),
)


def build(law: Law) -> AcceptanceProcess:
    if law.kind == "fixed":
        return FixedMeanAcceptance(law.mean_percent / 100 + 1, law.seed)
    if law.kind == "recorded":
        return TraceAcceptance.of_runs({f"recording {at}": runs for at, runs in enumerate(law.recordings)}, law.seed)
    regimes = RegimeAcceptance(law.stretch_len, SHIFTS, WEIGHTS) if law.stretch_len else None
    of_request, of_field = law.variances
    return GaussianAcceptance(
        *(law.conditional, law.seed, of_request / 100, of_field / 100),
        *(law.correlation_len, law.drift_tenths / 10, regimes, law.max_depth),
    )


class Process:
    """One process of `core.acceptance`, with a method for each question; the defects are planted here."""

    def __init__(self, law: Law) -> None:
        self.law, self.process = law, build(law)

    def longest_run(self, requests: np.ndarray, positions: np.ndarray, shifts: np.ndarray) -> np.ndarray:
        return self.process.longest_run(requests, positions, shifts)

    def accept_lens(self, requests: np.ndarray, starts: np.ndarray, steps: int, rounds: int) -> np.ndarray:
        return self.process.accept_lens(requests, starts, steps, rounds)

    def tree_survival(self, topk: int, steps: int, num_nodes: int, rank_ratio: float) -> np.ndarray:
        return np.array(self.process.for_tree(RoundShape(steps, topk, num_nodes), rank_ratio).survival)

    def day_shift(self, amplitude: float, best_hour: float, hour: float) -> float:
        return DayCurve(amplitude, best_hour).shift(int(hour * HOUR_NS))

    def runs(self, requests: np.ndarray, positions: np.ndarray, shift: float = 0.0) -> np.ndarray:
        """Return the longest runs of requests [n] at positions [m]: [n, m]."""
        return self.longest_run(requests[:, None], positions[None, :], np.full((len(requests), 1), shift))


# -- what is due -------------------------------------------------------------------------------------------------------


def walked(runs: Sequence[int], steps: int, rounds: int | None, length: int) -> list[int]:
    """Return what successive rounds emit that start before `length`, at most `rounds` of them; `runs` by position."""
    lens: list[int] = []
    at = 0
    while at < length and (rounds is None or len(lens) < rounds):
        lens.append(min(runs[at], steps) + 1)
        at += lens[-1]
    return lens


def reaches(law: Law, depth: int, position: int, shift: float = 0.0) -> float:
    """Return the probability of reaching a depth at a position, over all requests."""
    tail = float(np.prod([law.conditional[min(at, len(law.percent) - 1)] for at in range(depth)]))
    if tail <= 0.0 or tail >= 1.0:
        return tail
    threshold = NORMAL.inv_cdf(1 - tail)
    moved = shift + law.drift_tenths / 10 * position / 1000
    if not law.stretch_len:
        return NORMAL.cdf(moved - threshold)
    total = sum(WEIGHTS)
    return sum(w / total * NORMAL.cdf(moved + s - threshold) for s, w in zip(SHIFTS, WEIGHTS, strict=True))


def correlation(law: Law, one: int, other: int) -> float:
    """Return the correlation of a request's qualities at two positions, one < other."""
    length = law.correlation_len
    knots, phases = zip(*(divmod(position, length) for position in (one, other)), strict=True)
    first, second = ((phase + 0.5) / length * pi / 2 for phase in phases)
    # Between knots k and k + 1 the field is cos · k + sin · (k + 1).
    weights = {knots[0]: np.cos(first), knots[0] + 1: np.sin(first)}
    others = {knots[1]: np.cos(second), knots[1] + 1: np.sin(second)}
    field_part = sum(weight * others.get(knot, 0.0) for knot, weight in weights.items())
    of_request, of_field = law.variances
    return (of_request + of_field * float(field_part)) / 100


@cache
def both_exceed(threshold: float, rho: float) -> float:
    """Return the probability that two standard normal numbers of this correlation, at least 0, both exceed a
    threshold."""
    if rho > 1 - 1e-9:
        return NORMAL.cdf(-threshold)
    steps, reach = 2000, 8.0
    total = 0.0
    for at in range(steps):
        u = -reach + 2 * reach * (at + 0.5) / steps
        total += exp(-u * u / 2) * NORMAL.cdf((sqrt(rho) * u - threshold) / sqrt(1 - rho)) ** 2
    return total * 2 * reach / steps / sqrt(2 * pi)


def survival_in_tree(law: Law, topk: int, steps: int, num_nodes: int, rank_ratio: float) -> list[float]:
    """Return the probability of reaching depth 1 … steps: the sum over the kept nodes of a depth, of which one path at
    most is right."""
    beam, nodes = [1.0], []
    for depth in range(1, steps + 1):
        p = law.conditional[min(depth, len(law.percent)) - 1]
        level = [value * p * (rank_ratio * (1 - p)) ** rank for value in beam for rank in range(topk)]
        nodes += [(-value, len(nodes) + at, depth) for at, value in enumerate(level)]
        beam = sorted(level, reverse=True)[:topk]
    found = [0.0] * steps
    for value, _, depth in sorted(nodes)[: num_nodes - 1]:
        found[depth - 1] -= value
    return found


def test_what_is_due_by_hand():
    runs = [2, 0, 5, 1, 0, 0, 3]
    assert walked(runs, 3, 3, 7) == [3, 2, 1] and walked(runs, 1, None, 7) == [2, 2, 1, 1, 2]
    assert reaches(Law(percent=(50, 80)), 3, 100) == pytest.approx(0.5 * 0.8 * 0.8)
    assert reaches(Law(percent=(50,), drift_tenths=20), 1, 500) == pytest.approx(0.841345, abs=1e-6)
    stretches = Law(percent=(50,), stretch_len=4)
    assert reaches(stretches, 1, 0) == pytest.approx((0.066807 + 2 * 0.841345 + 5 * 0.5) / 8, abs=1e-6)
    field = Law(percent=(50,), variances=(0, 100), correlation_len=8)
    assert correlation(field, 0, 0) == pytest.approx(1.0) and correlation(field, 0, 16) == 0.0
    # Two halves of the plane: a quarter plus the arcsine of the correlation over a whole turn.
    assert both_exceed(0.0, 0.5) == pytest.approx(0.25 + 1 / 12, abs=1e-5)
    assert survival_in_tree(Law(percent=(50,)), 1, 3, 4, 0.6) == pytest.approx([0.5, 0.25, 0.125])
    assert survival_in_tree(Law(percent=(50,)), 2, 1, 3, 0.6) == pytest.approx([0.5 + 0.5 * 0.6 * 0.5])


# -- the two tests -----------------------------------------------------------------------------------------------------


def answers_are_functions(law, keys, steps, rounds, start, width, tree, day) -> None:
    """Ask in windows, in another order and as successive rounds."""
    process = Process(law)
    requests, positions = hash64(keys, Purpose.SWARM, 6, np.arange(5)), np.arange(start, start + WIDTH)
    runs = process.runs(requests, positions)
    assert runs.min() >= 0 and runs.max() <= law.max_depth
    np.testing.assert_array_equal(process.runs(requests[::-1].copy(), positions[::-1].copy())[::-1, ::-1], runs)
    np.testing.assert_array_equal(process.runs(requests[2:3], positions[9:10]), runs[2:3, 9:10])
    starts = np.full(len(requests), start)
    np.testing.assert_array_equal(process.process.run_windows(requests, starts, width), runs[:, :width])
    lens = process.accept_lens(requests, starts, steps, rounds)
    np.testing.assert_array_equal(lens.T, [walked(row, steps, rounds, WIDTH) for row in runs.tolist()])
    from_zero, lengths = process.runs(requests, np.arange(WIDTH)), np.array([WIDTH, 1, 10, 11, 37])
    lens = walk_to_end(process.process.run_windows(requests, np.zeros(5, np.int64), WIDTH), steps, lengths)
    for given_runs, length, found in zip(from_zero.tolist(), lengths.tolist(), lens.T.tolist(), strict=True):
        due = walked(given_runs, steps, None, length)
        assert found == due + [0] * (len(found) - len(due))
    if law.kind == "gaussian":
        topk, depth, share, percent = tree
        nodes = 2 + share * (topk + (depth - 1) * topk * topk - 1) // 2
        found = process.tree_survival(topk, depth, nodes, percent / 100)
        np.testing.assert_allclose(found, survival_in_tree(law, topk, depth, nodes, percent / 100), rtol=0, atol=1e-9)
    tenths, best_hour, hour = day
    wave = tenths / 10 * (1 - 2 * np.sin((hour - best_hour) / 24 * np.pi) ** 2)
    assert process.day_shift(tenths / 10, best_hour, hour) == pytest.approx(wave, abs=1e-9)
    if np.ptp(from_zero) and (law.kind != "recorded" or len(law.recordings) > 1):
        many = hash64(keys, Purpose.SWARM, 9, np.arange(200))
        other = Process(replace(law, seed=law.seed + 1)).runs(many, np.arange(24))
        assert (process.runs(many, np.arange(24)) != other).any(), "another seed is the same set of requests"


def shares_are_as_configured(law: Law, keys: int, begin: int, tenths: int) -> None:
    """Compare shares of many independent requests with what is due, give or take six standard deviations, which one
    share in 10⁹ exceeds."""
    process, shift = Process(law), tenths / 10

    def compare(what: str, reached: np.ndarray, due: float, count: int = MANY) -> None:
        off = abs(float(reached.mean()) - due)
        assert off <= 6 * sqrt(max(due * (1 - due), 0.01) / count) + GRAIN, f"{reached.mean():.3f} of {what}, due {due}"

    requests = hash64(keys, Purpose.SWARM, 7, np.arange(MANY))
    if law.kind == "recorded":
        runs = process.runs(requests, np.arange(60)).tolist()
        texts = [[text[at % len(text)] for at in range(60)] for text in law.recordings]
        chosen = np.array([texts.index(row) for row in runs])
        for number in range(len(texts)):
            compare(f"requests that replay recording {number}", chosen == number, 1 / len(texts))
        return
    if law.kind == "fixed":
        whole, part = divmod(law.mean_percent, 100)
        runs = process.runs(requests, np.arange(3))
        assert set(np.unique(runs)) <= {whole, whole + 1}
        for position in range(3):
            compare(f"runs of {whole + 1} at {position}", runs[:, position] > whole, part / 100)
        compare("runs of both", (runs[:, 0] > whole) & (runs[:, 1] > whole), (part / 100) ** 2)
        return
    length = law.correlation_len
    positions = np.array(sorted({begin + at for at in (0, 1, length - 1, length, length + 1, 3 * length + 2)}))
    runs = process.runs(requests, positions, shift)
    for column, position in enumerate(positions.tolist()):
        for depth in (1, 2, 3, 5):
            compare(f"runs at {position} of {depth}", runs[:, column] >= depth, reaches(law, depth, position, shift))
    good, tail = runs >= 1, law.conditional[0]
    strangers = good[:-1, 0] & good[1:, 0]
    compare("neighbours that both have a run", strangers, reaches(law, 1, begin, shift) ** 2, MANY // 2)
    if not (law.stretch_len or law.drift_tenths) and 0 < tail < 1:
        good = process.runs(requests, positions) >= 1
        for column, position in enumerate(positions.tolist()[1:], 1):
            due = both_exceed(NORMAL.inv_cdf(1 - tail), correlation(law, begin, position))
            compare(f"requests with runs at {begin} and {position}", good[:, 0] & good[:, column], due)


FUNCTIONS = given(
    law=laws,
    keys=st.integers(0, 2**32),
    steps=st.integers(0, 5),
    rounds=st.integers(1, 7),
    start=st.integers(0, 30),
    width=st.integers(1, WIDTH),
    tree=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2), st.integers(0, 100)),
    day=st.tuples(st.integers(-10, 10), st.integers(0, 23), st.integers(0, 30)),
)
SHARES = given(
    law=laws, keys=st.integers(0, 2**32), begin=st.sampled_from((0, 3_000, 3_000)), tenths=st.sampled_from((0, 8))
)

test_answers_are_functions_of_seed_request_and_position = FUNCTIONS(answers_are_functions)
test_shares_of_many_requests_are_as_configured = pytest.mark.ci(SHARES(shares_are_as_configured))


# -- what they must find -----------------------------------------------------------------------------------------------

DEFECTS = Defects("acceptance", None)


@DEFECTS.breaks("SHARES")
class ReplaysOneRecording(Process):
    """Every request replays the same recording."""

    def __init__(self, law):
        super().__init__(replace(law, recordings=law.recordings[:1]))


@DEFECTS.breaks("SHARES")
class NeverReplaysTheLast(Process):
    """An off-by-one in the draw: the last recording is never replayed."""

    def __init__(self, law):
        super().__init__(replace(law, recordings=law.recordings[:-1] or law.recordings))


@DEFECTS.breaks("FUNCTIONS")
class BeginsARecordingInTheMiddle(Process):
    """The second replay of a recording leaves out its first entry."""

    def longest_run(self, requests, positions, shifts):
        runs = super().longest_run(requests, positions, shifts)
        late = super().longest_run(requests, positions + 1, shifts)
        return np.where(np.broadcast_to(positions, runs.shape) > 12, late, runs)


@DEFECTS.breaks("SHARES")
class TurnsTheDriftAround(Process):
    """The drift has the wrong sign."""

    def __init__(self, law):
        super().__init__(replace(law, drift_tenths=-law.drift_tenths))


@DEFECTS.breaks("SHARES")
class AddsSharesInsteadOfVariances(Process):
    """A share of the variance is taken for one of the quality: the parts are too small, and good requests too alike."""

    def __init__(self, law):
        super().__init__(replace(law, variances=tuple(share**2 // 100 for share in law.variances)))


@DEFECTS.breaks("SHARES")
class TakesTheConditionalForTheSurvival(GaussianAcceptance):
    """The probability of reaching a depth is that of its draft alone."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "_thresholds", tuple(sorted(self._thresholds[:1] * len(self._thresholds))))


@DEFECTS.breaks("FUNCTIONS")
class ForgetsTheBonusToken(Process):
    """A round starts behind the accepted drafts of the one before, on its bonus token."""

    def accept_lens(self, requests, starts, steps, rounds):
        lens = []
        for _ in range(rounds):
            lens.append(super().accept_lens(requests, starts, steps, 1)[0])
            starts = starts + np.maximum(lens[-1] - 1, 1)
        return np.array(lens)


@DEFECTS.breaks("FUNCTIONS")
class DrawsForThePlaceInTheBatch(Process):
    """What a request draws depends on its place in the batch."""

    def longest_run(self, requests, positions, shifts):
        return super().longest_run(requests + np.arange(len(requests), dtype=np.uint64)[:, None], positions, shifts)


@DEFECTS.breaks("FUNCTIONS")
class PromisesOneBranchMore(Process):
    """A tree has one node more than it was given."""

    def tree_survival(self, topk, steps, num_nodes, rank_ratio):
        most = topk + (steps - 1) * topk * topk + 1
        return super().tree_survival(topk, steps, min(num_nodes + 1, most), rank_ratio)


@DEFECTS.breaks("FUNCTIONS")
class WakesUpLate(Process):
    """The best hour is subtracted twice."""

    def day_shift(self, amplitude, best_hour, hour):
        return super().day_shift(amplitude, best_hour, hour - best_hour)


@DEFECTS.breaks("FUNCTIONS")
class ForgetsItsSeed(Process):
    """Every seed makes the same requests."""

    def __init__(self, law):
        super().__init__(replace(law, seed=0))


@pytest.mark.fast("ForgetsItsSeed", "AddsSharesInsteadOfVariances", ci="*")
@pytest.mark.parametrize("defect", DEFECTS.mutants, ids=lambda defect: defect.name)
def test_a_planted_defect_is_found(defect):
    test = {"FUNCTIONS": FUNCTIONS(answers_are_functions), "SHARES": SHARES(shares_are_as_configured)}
    found_by = test[defect.caught_by[0]]
    quick = settings(max_examples=100, database=None, derandomize=True, phases=[Phase.generate])
    with defect.make.planted(), pytest.raises((AssertionError, ValueError)):
        quick(found_by)()
