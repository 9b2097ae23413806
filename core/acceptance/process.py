"""Acceptance processes say how many drafts a round would accept, without running a model.

A process answers one question. *If a round of request r starts at output position x, how many drafts in a row would
verification accept?* A round of S steps accepts min(run, S). Every answer is a pure function of (seed, request, output
position). So the answers do not depend on the step count, the batch or the multi-step length.

`GaussianAcceptance` is the general process. One latent quality decides a run:

    quality(r, x) = √request_share · a(r) + √field_share · g(r, x) + √rest · e(r, x) + shift(r, x)
    run(r, x)     = number of depths d with quality > t(d),      t(d) = Φ⁻¹(1 − survival(d))

    a   the request's own effect              survival(d) = p(1) · … · p(d), the product of the conditional
    g   a smooth field over output positions  acceptance by position
    e   fresh at every position               shift = drift over the output, regimes, the hour of the day

a, g and e are standard normal and the shares sum to one, so the quality is standard normal again (a Gaussian copula;
Nelsen, An Introduction to Copulas, 2006, §2.3). The configured acceptance is therefore the *exact* average over output
positions, whatever the correlation. With correlation the average over *rounds* is lower, as in recordings: rounds make
long jumps where acceptance is high and short ones elsewhere. This explains why, in the same requests, the first draft
is accepted less often at 5 steps than at 1. Independent draws cannot show this effect. The process whose *rounds* have
given probabilities is found by `fit.calibrate`.

How sure a draft is of itself follows from the quality, too: `confidence.py`.

The fresh part is read from a table of 4,096 normal quantiles: probabilities are exact to 1/8192.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from ..contract.step import RoundShape
from ..draws import Purpose, hash64, normal, uniform
from ..errors import ConfigError, Problem
from .confidence import confidence_of
from .tree import MAX_DEPTH, tree_survival


@dataclass(frozen=True, slots=True)
class RegimeAcceptance:
    """Acceptance that changes its level for stretches of a request's output (prose, then code, then a table).

    Every `stretch_len` output positions one of `shifts` (standard deviations of quality) is drawn with `weights`.
    """

    stretch_len: int
    shifts: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        problems = []
        if self.stretch_len < 1:
            problems.append(Problem("regimes.stretch_len", f"{self.stretch_len}: expected at least 1"))
        if not self.shifts or len(self.shifts) != len(self.weights):
            problems.append(
                Problem(
                    "regimes.weights", f"{len(self.weights)} weights for {len(self.shifts)} shifts: expected one each"
                )
            )
        if not np.isfinite(np.array(self.shifts + self.weights, float)).all():
            problems.append(Problem("regimes", "not a finite number"))
        elif self.weights and (min(self.weights) < 0 or sum(self.weights) <= 0):
            problems.append(Problem("regimes.weights", f"{self.weights}: expected none negative and one positive"))
        if problems:
            raise ConfigError("<acceptance>", problems)

    def shift_at(self, seed: int, request_keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the shifts, float64 [broadcast of keys and positions]."""
        coins = uniform(seed, Purpose.ACCEPTANCE_REGIME, request_keys, positions // self.stretch_len)
        edges = np.cumsum(self.weights) / sum(self.weights)
        return np.array(self.shifts)[np.minimum(np.searchsorted(edges, coins, side="right"), len(self.shifts) - 1)]


@dataclass(frozen=True, slots=True)
class DayCurve:
    """Acceptance over a day: a sinusoid that the simulator turns into `shifts`, one per request, at its arrival."""

    amplitude: float
    best_hour: float = 3.0

    def shift(self, time_ns: int) -> float:
        """Return the standard deviations of quality for a request that arrives `time_ns` after midnight."""
        hours = time_ns / 3.6e12
        return self.amplitude * float(np.cos((hours - self.best_hour) * 2 * np.pi / 24))


_FRESH_BITS = 12
_QUARTER_TURN = np.pi / 2


class AcceptanceProcess(ABC):
    """The port. A process has `max_depth` and `longest_run`; the rest follows from them.

    `request_keys` are 64-bit keys of requests (`draws.request_key`), `positions` count output tokens from an origin of
    the caller's choice. `shifts` move the latent quality, in standard deviations; processes without one ignore them.
    `alignment`: windows that start at multiples of it are the cheapest.
    """

    max_depth: int

    @property
    def alignment(self) -> int:
        return 1

    @abstractmethod
    def longest_run(
        self, request_keys: np.ndarray, positions: np.ndarray, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Return int32 [broadcast of all arguments], each 0 … `max_depth`."""

    def confidence(
        self, request_keys: np.ndarray, positions: np.ndarray, steps: int, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Return how sure the drafts of rounds at these positions are, float32 [n, steps], each 0 … 1. A process that
        knows nothing of it says 0.5, which tells rows apart in nothing."""
        return np.full((len(np.atleast_1d(request_keys)), steps), 0.5, np.float32)

    def run_windows(
        self, request_keys: np.ndarray, starts: np.ndarray, width: int, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Return the longest runs at `width` successive positions from each start: int32 [n, width]."""
        positions = np.asarray(starts, np.int64)[:, None] + np.arange(width, dtype=np.int64)
        shifts = np.asarray(shifts, np.float64)
        return self.longest_run(
            np.asarray(request_keys, np.uint64)[:, None], positions, shifts[:, None] if shifts.ndim else shifts
        )

    def accept_lens(self, request_keys: np.ndarray, start_positions: np.ndarray, steps: int, rounds: int) -> np.ndarray:
        """Return accept lengths, bonus token included, of `rounds` successive rounds: int32 [rounds, bs], each 1 …
        steps + 1.

        Round i + 1 starts where round i ended. For long sequences of rounds keep a `RunCache` instead.
        """
        keys = np.asarray(request_keys, np.uint64)
        if steps == 0 or len(keys) == 0:
            return np.ones((rounds, len(keys)), np.int32)
        runs = self.run_windows(keys, start_positions, (rounds - 1) * (steps + 1) + 1)
        return walk(runs, steps, rounds)


def walk(runs: np.ndarray, steps: int, rounds: int) -> np.ndarray:
    """Walk rounds through windows of longest runs: int [bs, width] to accept lengths int32 [rounds, bs].

    Every row starts at column 0; the window must reach the start of the last round: width > (rounds − 1) · (steps + 1).
    """
    lens = np.minimum(runs, steps).astype(np.int32)
    lens += 1
    batch, width = lens.shape
    flat = lens.reshape(-1)
    out = np.empty((rounds, batch), np.int32)
    at = np.arange(0, batch * width, width)
    for i in range(rounds):
        flat.take(at, out=out[i])
        at += out[i]
    return out


def walk_to_end(runs: np.ndarray, steps: int, output_lens: np.ndarray | None = None) -> np.ndarray:
    """Walk all rounds that start inside the windows: accept lengths int32 [rounds, bs], 0 once a row has left its
    window.

    output_lens: int [bs], where each row ends; the width of the windows by default.
    """
    batch, width = runs.shape
    padded = np.zeros((batch, width + 1), np.int32)
    np.minimum(runs, steps, out=padded[:, :width])
    padded[:, :width] += 1
    if output_lens is not None:
        padded[np.arange(width + 1) >= np.asarray(output_lens)[:, None]] = 0
    flat = padded.reshape(-1)
    row_ends = np.arange(1, batch + 1) * (width + 1) - 1
    at = np.arange(batch) * (width + 1)
    rounds: list[np.ndarray] = []
    while True:
        lens = flat[at]
        if not lens.any():
            return np.array(rounds, np.int32).reshape(-1, batch)
        rounds.append(lens)
        at = np.minimum(at + lens, row_ends)


def conditional_of(survival: np.ndarray) -> tuple[float, ...]:
    """Return the acceptance of each depth, given that all before were accepted."""
    before = np.concatenate([[1.0], survival[:-1]])
    conditional = np.where(before > 0, survival / np.maximum(before, 1e-300), 0.0)
    return tuple(np.minimum(conditional, 1.0))


@dataclass(frozen=True, slots=True)
class GaussianAcceptance(AcceptanceProcess):
    """The process that this file's docstring describes.

    conditional:            acceptance of the draft at depth 1, 2, … given that all before were accepted, each 0 … 1;
                            deeper drafts have the last value. Averages over output positions.
    seed:                   another seed is another set of requests of the same kind.
    request_share:          share of the quality's variance that is the request's own (0 … 1).
    field_share:            share that is smooth over output positions; request_share + field_share ≤ 1.
    correlation_len:        distance of the field's knots, in output tokens; quality is uncorrelated beyond two of them.
    drift_per_1k_tokens:    added to the quality per 1,000 output positions (negative: acceptance fades).
    regimes:                see `RegimeAcceptance`.
    max_depth:              the longest run that is reported.
    draft_confidence:       trees: the probability that the draft gives its first choice (the median over contexts), by
                            which it chooses nodes; None: the same as the target's, so that every node is well spent.

    Errors: ConfigError with all problems.
    """

    conditional: tuple[float, ...]
    seed: int = 0
    request_share: float = 0.0
    field_share: float = 0.0
    correlation_len: int = 16
    drift_per_1k_tokens: float = 0.0
    regimes: RegimeAcceptance | None = None
    max_depth: int = 16
    draft_confidence: float | None = None
    _thresholds: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "conditional", tuple(map(float, self.conditional)))
        problems = self._problems()
        if problems:
            raise ConfigError("<acceptance>", problems)
        object.__setattr__(self, "_thresholds", tuple(map(_upper_quantile, self.survival)))

    def _problems(self) -> list[Problem]:
        problems = []
        if not self.conditional:
            problems.append(Problem("conditional", "empty: expected the acceptance of at least the first draft"))
        for i, p in enumerate(self.conditional):
            if not 0.0 <= p <= 1.0:
                problems.append(Problem(f"conditional[{i}]", f"{p}: expected a probability, 0 ... 1"))
        for key in ("request_share", "field_share"):
            if not 0.0 <= getattr(self, key) <= 1.0:
                problems.append(Problem(key, f"{getattr(self, key)}: expected 0 ... 1"))
        if self.request_share + self.field_share > 1.0 + 1e-9:
            total = self.request_share + self.field_share
            problems.append(Problem("field_share", f"request_share + field_share is {total}: expected at most 1"))
        if self.correlation_len < 1:
            problems.append(Problem("correlation_len", f"{self.correlation_len}: expected at least 1 token"))
        if not np.isfinite(self.drift_per_1k_tokens):
            problems.append(Problem("drift_per_1k_tokens", f"{self.drift_per_1k_tokens}: expected a finite number"))
        if self.draft_confidence is not None and not 0.0 < self.draft_confidence < 1.0:
            problems.append(Problem("draft_confidence", f"{self.draft_confidence}: expected between 0 and 1"))
        if not 1 <= self.max_depth <= MAX_DEPTH:
            problems.append(Problem("max_depth", f"{self.max_depth}: expected 1 ... {MAX_DEPTH}"))
        return problems

    @property
    def alignment(self) -> int:
        return self.correlation_len if self.field_share else 1

    @property
    def survival(self) -> tuple[float, ...]:
        """The probability that a run reaches depth 1 … `max_depth`, averaged over output positions (shift 0)."""
        deeper = self.max_depth - len(self.conditional)
        per_depth = (*self.conditional, *([self.conditional[-1]] * max(deeper, 0)))[: self.max_depth]
        return tuple(np.cumprod(per_depth).tolist())

    def longest_run(
        self, request_keys: np.ndarray, positions: np.ndarray, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        return self._runs(self._quality(request_keys, positions, shifts))

    def _quality(self, request_keys: np.ndarray, positions: np.ndarray, shifts: np.ndarray | float) -> np.ndarray:
        keys = np.atleast_1d(np.asarray(request_keys, np.uint64))
        where = np.atleast_1d(np.asarray(positions, np.int64))
        quality = _fresh(self.seed, keys, where) * np.float32(self._fresh_weight)
        if self.field_share:
            knot, fraction = np.divmod(where, self.correlation_len)
            cosines, sines = _quarter_waves(self.correlation_len, self.field_share)
            smooth = normal(self.seed, Purpose.ACCEPTANCE_FIELD, keys, knot).astype(np.float32) * cosines[fraction]
            right = normal(self.seed, Purpose.ACCEPTANCE_FIELD, keys, knot + 1).astype(np.float32)
            smooth += right * sines[fraction]
            quality = quality + smooth
        found: np.ndarray = quality + self._offset(keys, where, shifts)
        return found

    def confidence(
        self, request_keys: np.ndarray, positions: np.ndarray, steps: int, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Return confidences that follow from the quality: see `confidence.py`."""
        keys, where = np.asarray(request_keys, np.uint64), np.asarray(positions, np.int64)
        noise = normal(self.seed, Purpose.CONFIDENCE, keys, where)
        return confidence_of(self._quality(keys, where, shifts), noise, self._thresholds, steps)

    def run_windows(
        self, request_keys: np.ndarray, starts: np.ndarray, width: int, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Draw each knot of the field once; fastest from starts that are multiples of `correlation_len`."""
        keys = np.asarray(request_keys, np.uint64)[:, None]
        starts = np.asarray(starts, np.int64)[:, None]
        positions = starts + np.arange(width, dtype=np.int64)
        quality = _fresh(self.seed, keys, positions)
        quality *= np.float32(self._fresh_weight)
        if self.field_share:
            quality += self._field_windows(keys, starts, width)
        shifts = np.asarray(shifts, np.float64)
        quality += self._offset(keys, positions, shifts[:, None] if shifts.ndim else shifts)
        return self._runs(quality)

    def mixed(self, conditional: tuple[float, ...], share: float) -> GaussianAcceptance:
        """Return the process of rounds of which a `share`, 0 … 1, has drafts with the acceptance `conditional`. Which
        rounds have them does not depend on the request or the position."""
        others = replace(self, conditional=conditional)
        survival = share * np.array(others.survival) + (1.0 - share) * np.array(self.survival)
        return replace(self, conditional=conditional_of(survival))

    def for_tree(self, shape: RoundShape, rank_ratio: float = 0.6) -> GaussianAcceptance:
        """Return the process of the deepest accepted node of a draft tree instead of a chain.

        Acceptance by rank is not published, so it is assumed: the target's token is the draft's j-th choice with
        probability p · ρ^(j−1), ρ = rank_ratio · (1 − p). With ratio 1 enough branches always contain the token, with
        ratio 0 only the first choice can be it. The tree is the one that tree drafting builds when every node has these
        probabilities: beams of `topk`, then the best `nodes` − 1. At most one node of a depth lies on
        the target's path, so the survival at a depth is the sum of its nodes' probabilities. With a `draft_confidence`
        c nodes are chosen by the draft's own probabilities instead: c, (1 − c)/2, (1 − c)/4, …, where the log-odds of c
        vary over contexts with standard deviation 1. If the draft gives its first choice too low a probability, the
        tree spreads its nodes over ranks that are seldom right. It then accepts less than a chain with as many nodes.
        Shares and correlation are those of the chain. The default ratio is the one at which a process whose chain of 3
        gives 2.25 tokens per round gives 2.92 for 21 nodes in 3 levels, as reported for Qwen3-8B (arXiv 2601.11580).
        """
        survival = tree_survival(self._conditional_at, shape, rank_ratio, self.draft_confidence)
        return replace(self, conditional=conditional_of(survival), max_depth=len(survival))

    def _conditional_at(self, depth: int) -> float:
        return self.conditional[min(depth, len(self.conditional)) - 1]

    @property
    def _fresh_weight(self) -> float:
        weight: float = max(0.0, 1.0 - self.request_share - self.field_share) ** 0.5
        return weight

    def _field_windows(self, keys: np.ndarray, starts: np.ndarray, width: int) -> np.ndarray:
        """Return the field's part of the quality, float32 [n, width];
        a quarter turn from knot to knot keeps variance 1."""
        length = self.correlation_len
        knot, phase = np.divmod(starts, length)
        aligned = not phase.any()
        num_stretches = -(-width // length) if aligned else (width + length - 2) // length + 1
        which = knot + np.arange(num_stretches + 1)
        knots = normal(self.seed, Purpose.ACCEPTANCE_FIELD, keys, which).astype(np.float32)
        cosines, sines = _quarter_waves(length, self.field_share)
        whole = knots[:, :-1, None] * cosines
        whole += knots[:, 1:, None] * sines
        whole = whole.reshape(len(keys), -1)
        return whole[:, :width] if aligned else np.take_along_axis(whole, phase + np.arange(width), axis=1)

    def _offset(self, keys: np.ndarray, positions: np.ndarray, shifts: np.ndarray | float) -> np.ndarray | np.float32:
        """Return the quality's other parts, float32: request effect, drift, regimes, shifts."""
        offset = np.asarray(shifts, np.float64)
        if self.request_share:
            offset = offset + self.request_share**0.5 * normal(self.seed, Purpose.ACCEPTANCE_REQUEST, keys, 0)
        if self.drift_per_1k_tokens:
            offset = offset + positions * (self.drift_per_1k_tokens / 1000.0)
        if self.regimes is not None:
            offset = offset + self.regimes.shift_at(self.seed, keys, positions)
        return offset.astype(np.float32)

    def _runs(self, quality: np.ndarray) -> np.ndarray:
        """Return the number of thresholds below each quality, int32.

        Searches if there are few elements, as calls dominate then; else compares and adds bytes per depth.
        """
        thresholds = np.array(self._thresholds, np.float32)
        if quality.size < 2048:
            return thresholds.searchsorted(quality, side="left").astype(np.int32)
        runs = np.zeros(quality.shape, np.uint8)
        for threshold in thresholds:
            runs += quality > threshold
        return runs.astype(np.int32)


@dataclass(frozen=True, slots=True)
class FixedMeanAcceptance(AcceptanceProcess):
    """Accept lengths (bonus included) of a given mean, as real engines offer it to time their kernels.

    A mean of 3.4 is 3 tokens in six rounds of ten and 4 in the others, drawn by key; a round of fewer steps than that
    accepts all its drafts. Errors: ConfigError for a mean below 1.
    """

    mean_accept_length: float
    seed: int = 0
    max_depth: int = field(init=False)

    def __post_init__(self) -> None:
        if not 1.0 <= self.mean_accept_length <= MAX_DEPTH + 1:
            message = f"{self.mean_accept_length}: expected 1 (bonus token only) ... {MAX_DEPTH + 1}"
            raise ConfigError.of("<acceptance>", "mean_accept_length", message)
        object.__setattr__(self, "max_depth", max(1, int(np.ceil(self.mean_accept_length)) - 1))

    def longest_run(
        self, request_keys: np.ndarray, positions: np.ndarray, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        keys = np.atleast_1d(np.asarray(request_keys, np.uint64))
        coins = uniform(self.seed, Purpose.ACCEPTANCE, keys, np.atleast_1d(np.asarray(positions, np.int64)))
        whole = int(self.mean_accept_length - 1.0)
        return (coins < self.mean_accept_length - 1.0 - whole).astype(np.int32) + np.int32(whole)


def _fresh(seed: int, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a standard normal number per (request, position), float32 [broadcast], from the upper bits
    of the key's hash."""
    bits = hash64(seed, Purpose.ACCEPTANCE, keys, positions)
    bits >>= np.uint64(64 - _FRESH_BITS)
    return _normal_quantiles().take(bits.view(np.int64))


@lru_cache(maxsize=1)
def _normal_quantiles() -> np.ndarray:
    size = 1 << _FRESH_BITS
    inverse = NormalDist().inv_cdf
    half = np.array([inverse((i + 0.5) / size) for i in range(size // 2)], np.float32)
    table = np.concatenate([half, -half[::-1]])
    table.flags.writeable = False
    return table


@lru_cache(maxsize=16)
def _quarter_waves(length: int, variance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of the left and the right knot at each offset between them, float32 [length]."""
    angle = (np.arange(length) + 0.5) * (_QUARTER_TURN / length)
    scale = variance**0.5
    return (scale * np.cos(angle)).astype(np.float32), (scale * np.sin(angle)).astype(np.float32)


def _upper_quantile(survival: float) -> float:
    """Return the threshold that a standard normal number exceeds with this probability."""
    if survival <= 0.0:
        return np.inf
    return -np.inf if survival >= 1.0 else NormalDist().inv_cdf(1.0 - survival) if survival > 1e-15 else np.inf
