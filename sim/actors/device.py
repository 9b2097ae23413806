"""The device: an in-order stream that plays the model. Unlike the scheduler, the device knows how long outputs will be.

One column entry per request-table row. `left` counts the tokens until the request ends, by its own stop or by its cap.
It is the only column that a round changes: KV length and output position are their values at the end, less `left`.
Rounds are drawn first and applied later, because a multi-step may be stopped at any of its round boundaries. Draws are
keyed by output position, so surplus draws change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.acceptance.process import AcceptanceProcess
from ...core.adaptive.lengths.survival import acceptance_of, choose_nodes
from ...core.contract.arrays import total_of
from ...core.contract.step import (
    ChosenNodes,
    DecodeResult,
    DecodeStep,
    Join,
    MultiStepEnd,
    PrefillResult,
    RoundShape,
    Step,
)
from ...core.draws import Purpose, normal_at, stream_keys
from ..cost.executor_steps import StepCost
from ..cost.host_link import HostLink
from ..cost.passes.decode_work import PARKED_PROMPTS, DecodeWork, verified_of
from ..cost.round import RoundCost
from .run_cache import RunCache

_WINDOW = 1024
_UNTIMED = np.empty(0, dtype=np.int64)


class Steady:
    """Times as their means say. `Jitter` lets them vary."""

    def time_ns(self, step: int, time_ns: int) -> int:
        return time_ns

    def times_ns(self, first: int, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        return times_ns

    def repeated_ns(self, first: int, time_ns: int, count: int) -> int | NDArray[np.int64]:
        return time_ns


STEADY = Steady()


class Jitter(Steady):
    """The random factors of one kind of time. They are lognormal with mean 1, so means stay as they are and tails grow.

    `spread`: their standard deviation, above 0; `lane` tells kinds of one purpose apart. Factors are keyed by (seed,
    replica, number of the step), where each decode round counts as a step. So runs with other settings see the same
    sequence, and the rounds of a multi-step see the same factors as single rounds.
    """

    def __init__(self, spread: float, seed: int, purpose: Purpose, replica: int, lane: int = 0) -> None:
        assert spread > 0
        variance = math.log1p(spread * spread)
        self._sigma, self._shift = math.sqrt(variance), -variance / 2
        self._key = stream_keys(seed, purpose, replica, lane)
        self._start = 0
        self._window: NDArray[np.float64] = np.empty(0)

    @staticmethod
    def of(spread: float, seed: int, purpose: Purpose, replica: int, lane: int = 0) -> Steady:
        """Return the factors of a spread; 0: there are none."""
        return Jitter(spread, seed, purpose, replica, lane) if spread else STEADY

    def factors(self, first: int, count: int) -> NDArray[np.float64]:
        """Return the factors of steps `first` … `first` + `count` − 1: float64 [count]."""
        offset = first - self._start
        if offset < 0 or offset + count > len(self._window):
            self._start, offset = first, 0
            self._window = np.asarray(normal_at(self._key, np.arange(first, first + max(count, _WINDOW))))
            self._window *= self._sigma
            self._window += self._shift
            np.exp(self._window, out=self._window)
        return self._window[offset : offset + count]

    def time_ns(self, step: int, time_ns: int) -> int:
        """Return the time of one step with the mean `time_ns`."""
        return int(time_ns * self.factors(step, 1)[0])

    def times_ns(self, first: int, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the times of successive steps with the means `times_ns`: int64 [m]."""
        return (times_ns * self.factors(first, len(times_ns))).astype(np.int64)

    def repeated_ns(self, first: int, time_ns: int, count: int) -> int | NDArray[np.int64]:
        """Return the times of `count` successive steps with the mean `time_ns`: int64 [count], or one number if it is
        the same for all."""
        return self.times_ns(first, np.full(count, time_ns, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Truth:
    """Facts about a request that only the model knows: how many tokens it emits before it stops, and the key of its
    draws.

    `stops_at_limit`: its stop stands where the request's limit is, too. Usually it does not: who measures asks for as
    many tokens as there shall be, and ignores the model's own end.
    """

    output_len: int
    key: int
    quality_shift: float = 0.0  # standard deviations
    stops_at_limit: bool = False


class DecodeColumns(NamedTuple):
    """Columns that stay as they are while the same rows decode."""

    rows: np.ndarray  # the steps' own array, shared while the batch stays the same
    indices: np.ndarray  # intp [bs], the same: NumPy indexes by it several times faster
    kv_end: int  # sum of the KV lengths at the end
    keys: np.ndarray  # uint64 [bs]
    position_end: np.ndarray  # int64 [bs]


@dataclass(slots=True)
class DrawnRounds:
    """Rounds of one step as they will happen unless the step is stopped before."""

    rounds: int
    accept_lens: np.ndarray  # int32 [≥ rounds, bs]
    emitted: np.ndarray  # int64 [≥ rounds]: tokens of each round over the batch
    device_ns: np.ndarray  # int64 [rounds]; empty if they are not timed
    left: np.ndarray  # int64 [bs]: tokens until the end, at the start
    chosen: ChosenNodes | None = None  # by the step's budget; then there is one round


class SimulatedDevice:
    """Executes steps in order. Callers enter `truths` before a request is submitted, and remove them at its end."""

    def __init__(
        self,
        cost: RoundCost | StepCost,
        num_rows: int,
        acceptance: AcceptanceProcess,
        for_tree: Callable[[RoundShape], AcceptanceProcess],
        jitter: Steady = STEADY,
        host_link: HostLink | None = None,
    ) -> None:
        self.cost = cost
        self.host_link = host_link
        self.jitter = jitter
        self.num_run: int = 0  # decode rounds, and steps with prefill alone
        self.truths: dict[str, Truth] = {}
        self.busy_ns = 0
        self.slowdown: float = 1.0  # multiplies all device times
        self.forced_drafts = ""  # "right" or "wrong": every draft is; "": as the acceptance process has it
        self._num_rows = num_rows
        self._acceptance = acceptance
        self._for_tree = for_tree
        self._caches: dict[RoundShape, RunCache] = {}
        self._chain = RunCache(acceptance, num_rows)
        self._last_cache: RunCache | None = None  # None: nothing was drafted yet
        self._left = np.zeros(num_rows + 1, dtype=np.int64)
        self._kv_end = np.zeros(num_rows + 1, dtype=np.int64)
        # of output tokens: where the acceptance process stands
        self._position_end = np.zeros(num_rows + 1, dtype=np.int64)
        self._ends_by_stop = np.zeros(num_rows + 1, dtype=bool)
        self._key = np.zeros(num_rows + 1, dtype=np.uint64)
        self._ones = np.ones((64, num_rows + 1), dtype=np.int32)
        self._counting = np.arange(65, dtype=np.int64)
        self._nobody = np.zeros(num_rows + 1, dtype=bool)  # never written
        empty = np.empty(0, dtype=np.intp)
        self._batch = DecodeColumns(empty, empty, 0, empty, empty)

    def open_rows(self, joins: tuple[Join, ...]) -> None:
        """Give rows to the requests of a step that is being launched."""
        for join in joins:
            truth = self.truths[join.request.request_id]
            until_stop = truth.output_len - join.num_emitted
            until_cap = join.max_tokens - join.num_emitted
            row = join.row
            left = min(until_stop, until_cap)
            self._left[row] = left
            self._ends_by_stop[row] = until_stop < until_cap + truth.stops_at_limit
            self._position_end[row] = join.num_emitted + left
            if join.num_received:
                self._kv_end[row] = join.num_received + left
            self._key[row] = truth.key
            if truth.quality_shift:
                self._chain.set_shifts(np.array([row]), truth.quality_shift)

    @property
    def draws_ahead(self) -> bool:
        """Whether `foresee` is useful, which it is once something was drafted."""
        return self._last_cache is not None

    def foresee(self, keys: np.ndarray) -> None:
        """Draw the first windows of requests with these keys, uint64 [n], together:
        that is cheaper, and they will probably come."""
        if self._last_cache is not None:
            self._last_cache.prime(keys)

    def kv_lengths(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return how many tokens of the requests in these rows the KV and the recurrent states have: int64 [n]."""
        return self._kv_end[rows] - self._left[rows]

    # -- prefill ------------------------------------------------------------------------------------------------------

    def prefill(self, step: Step) -> PrefillResult:
        """Compute the chunks of a step; a last chunk emits its row's first token."""
        part = step.prefill
        assert part is not None, "only a step with prompt chunks is given here"
        if step.decode is None:
            self.num_run += 1
        stopped = [False] * len(part.rows)
        chunks = zip(part.rows.tolist(), part.starts.tolist(), part.lens.tolist(), part.is_last.tolist(), strict=True)
        for i, (row, start, length, is_last) in enumerate(chunks):
            if is_last:
                left = int(self._left[row]) - 1
                self._left[row] = left
                stopped[i] = bool(left <= 0 and self._ends_by_stop[row])
            self._kv_end[row] = start + length + int(self._left[row])
        return PrefillResult(None, np.array(stopped) if any(stopped) else None)

    def step_ns(self, step: Step, drawn: DrawnRounds | None = None) -> int:
        """Return the device time of a step with a prefill part, before it is run;
        `drawn` is its round, if that is drawn already."""
        device_ns = self._cost_ns(step, drawn)
        device_ns = self.jitter.time_ns(self.num_run, device_ns)
        if self.slowdown != 1.0:
            device_ns = int(device_ns * self.slowdown)
        loads = [join.num_loaded for join in step.joins if join.num_loaded]
        if not loads:
            return device_ns
        assert self.host_link is not None, "only engines with host memory load from it"
        return self.host_link.step_ns(device_ns, loads)

    def _cost_ns(self, step: Step, drawn: DrawnRounds | None) -> int:
        assert step.prefill is not None, "only a step with prompt chunks is given here"
        chunks = list(zip(step.prefill.lens.tolist(), step.prefill.starts.tolist(), strict=True))
        decode = step.decode
        if decode is None:
            return self.cost.step_ns(chunks, PARKED_PROMPTS if step.prefill.is_parked else None)
        if self.cost.sees_rows:
            drawn = drawn or self.draw(decode, 1, timed=False)
            return self.cost.both_ns(
                chunks, int(self._seen_ns(self.cost, decode, drawn.accept_lens[:1], drawn.left)[0])
            )
        batch, batch_size = self._batch_of(decode), len(decode.rows)
        kv_tokens = batch.kv_end - total_of(self._left[batch.indices])
        return self.cost.step_ns(chunks, DecodeWork(batch_size, decode.shape, kv_tokens, verified_of(decode)))

    # -- decode -------------------------------------------------------------------------------------------------------

    def draw(self, decode: DecodeStep, limit: int, timed: bool = True) -> DrawnRounds:
        """Draw the next rounds of a batch, at most `limit`, up to the first round in which a request ends; only one
        round if a row has ended already."""
        batch, batch_size = self._batch_of(decode), len(decode.rows)
        left = self._left[batch.indices]
        limit = max(1, min(limit, int(left[left.argmin()])))
        chosen = None if decode.budget is None else self._chosen(decode, batch, left)
        if chosen is not None:
            decode, limit = replace(decode, row_nodes=chosen.row_nodes, budget=None), 1
        kv_tokens = batch.kv_end - total_of(left)
        if decode.shape.steps == 0:
            lens, rounds = self._all_ones(limit, batch_size), limit
            grown = self._counting[:limit] * batch_size
            emitted = lens[:, 0] * np.int64(batch_size)
        else:
            lens, rounds = self._draw_lens(decode, batch, left, limit)
            emitted = np.add.reduce(lens, axis=1, dtype=np.int64)
            grown = np.add.accumulate(emitted[:rounds]) - emitted[:rounds]
        device_ns = _UNTIMED
        if timed:
            if self.cost.sees_rows:
                device_ns = self._seen_ns(self.cost, decode, lens[:rounds], left)
            elif rounds == 1:
                one_ns = self.cost.decode_ns(batch_size, decode.shape, kv_tokens, verified_of(decode))
                device_ns = np.array([one_ns])
            else:
                device_ns = self.cost.decode_ns(batch_size, decode.shape, kv_tokens + grown, verified_of(decode))
            device_ns = self.jitter.times_ns(self.num_run, device_ns)
            if self.slowdown != 1.0:
                device_ns = (device_ns * self.slowdown).astype(np.int64)
        return DrawnRounds(rounds, lens, emitted, device_ns, left, chosen)

    def _chosen(self, decode: DecodeStep, batch: DecodeColumns, left: np.ndarray) -> ChosenNodes:
        """Return the nodes that rows verify by the step's budget, from the confidences of their drafts."""
        budget, shape = decode.budget, decode.shape
        assert budget is not None, "only a budget leaves something to choose"
        positions = batch.position_end - left
        confidence = self._cache(decode).confidence(batch.indices, batch.keys, positions, shape.steps)
        survival = np.cumprod(acceptance_of(confidence, budget.slopes, budget.biases), axis=1)
        most = np.full(len(survival), shape.nodes) if decode.row_nodes is None else decode.row_nodes
        return ChosenNodes(choose_nodes(survival, most, budget.drafts), confidence)

    def _seen_ns(self, cost: StepCost, decode: DecodeStep, lens: np.ndarray, left: np.ndarray) -> NDArray[np.int64]:
        """Return the nanoseconds of rounds with these accept lengths [rounds, bs], from a cost that depends on each
        row."""
        index = self._batch_of(decode).indices
        contexts = self._kv_end[index] - left + np.cumsum(lens, axis=0, dtype=np.int64) - lens
        context = contexts.max(axis=1) if cost.padded else contexts.mean(axis=1)
        return cost.rounds_ns(len(index), decode.shape, context, lens.max(axis=1))

    def _draw_lens(
        self, decode: DecodeStep, batch: DecodeColumns, left: np.ndarray, limit: int
    ) -> tuple[np.ndarray, int]:
        """Accept lengths int32 [≥ rounds, bs] and the number of rounds, up to the first in which a request ends."""
        if self.forced_drafts:
            accepted = min(decode.shape.steps + 1, decode.shape.nodes) if self.forced_drafts == "right" else 1
            rounds = min(limit, max(1, -(-int(left.min()) // accepted)))
            forced = np.full((rounds, len(batch.indices)), accepted, dtype=np.int32)
            return forced if decode.row_nodes is None else np.minimum(forced, decode.row_nodes), rounds
        cache = self._last_cache = self._cache(decode)
        positions = batch.position_end - left
        if decode.row_nodes is not None:
            return self._shortened_lens(decode, cache, positions, left, limit)
        if limit == 1:
            return cache.accept_lens(batch.indices, batch.keys, positions, decode.shape.steps)[None, :], 1
        lens = cache.accept_lens_of_rounds(batch.indices, batch.keys, positions, decode.shape.steps, limit, left)
        return lens, len(lens)

    def _shortened_lens(
        self, decode: DecodeStep, cache: RunCache, positions: np.ndarray, left: np.ndarray, limit: int
    ) -> tuple[np.ndarray, int]:
        """Do what `_draw_lens` does, round after round, for rows that verify unequal numbers of nodes."""
        assert decode.row_nodes is not None, "rows of equal length need no such drawing"
        batch = self._batch_of(decode)
        lens: list[np.ndarray] = []
        while len(lens) < limit and (not lens or left.min() > 0):
            drawn = cache.accept_lens(batch.indices, batch.keys, positions, decode.shape.steps)
            lens.append(np.minimum(drawn, decode.row_nodes))
            positions, left = positions + lens[-1], left - lens[-1]
        return np.stack(lens), len(lens)

    def apply(self, decode: DecodeStep, drawn: DrawnRounds, rounds: int, asked: bool) -> DecodeResult:
        """Run the first `rounds` of those drawn. `asked`: the driver stopped the multi-step there."""
        self.num_run += rounds
        rows = self._batch_of(decode).indices
        lens = drawn.accept_lens[:rounds]
        if rounds == 1:
            total = lens[0]
        else:
            total = self._counting[rounds] if decode.shape.steps == 0 else np.add.reduce(lens, axis=0, dtype=np.int64)
        left = drawn.left
        still_left = left - total
        end = MultiStepEnd.ASKED if asked else MultiStepEnd.MAX_ROUNDS
        result = DecodeResult(rounds, lens, None, self._nobody[: len(rows)], end)
        if still_left[still_left.argmin()] <= 0:
            still_left = np.maximum(still_left, 0)
            self._end_rows(result, rows, left, still_left == 0)
        self._left[rows] = still_left
        if drawn.chosen is not None:
            result.row_nodes, result.confidence = drawn.chosen.row_nodes[None], drawn.chosen.confidence[None]
        return result

    def _end_rows(self, result: DecodeResult, rows: np.ndarray, left: np.ndarray, ended: np.ndarray) -> None:
        """Say in `result` which rows end, bool `ended` [bs]. `left` int64 [bs]: tokens before its rounds."""
        result.ended, lens = ended, result.accept_lens
        for i in ended.nonzero()[0].tolist():
            left_before = left.item(i)
            if not left_before:  # it had ended before
                ended[i] = False
                continue
            result.multi_step_end = MultiStepEnd.REQUEST_ENDED
            if self._ends_by_stop[rows[i]]:
                if result.stop_index is None:
                    result.stop_index = np.full(lens.shape, -1, dtype=np.int32)
                result.stop_index[-1, i] = left_before - sum(lens[:-1, i].tolist()) - 1

    def _batch_of(self, decode: DecodeStep) -> DecodeColumns:
        """Return the columns of the step's rows. Steps share one array of rows while the batch stays the same."""
        if decode.rows is not self._batch.rows:
            index = decode.rows.astype(np.intp)
            kv_end = total_of(self._kv_end[index])
            self._batch = DecodeColumns(decode.rows, index, kv_end, self._key[index], self._position_end[index])
        return self._batch

    def _cache(self, decode: DecodeStep) -> RunCache:
        shape = decode.shape
        if shape.topk == 1:
            return self._chain
        if shape not in self._caches:
            self._caches[shape] = RunCache(self._for_tree(shape), self._num_rows)
        return self._caches[shape]

    def _all_ones(self, rounds: int, batch_size: int) -> np.ndarray:
        if rounds > len(self._ones):
            self._ones = np.ones((rounds, self._ones.shape[1]), dtype=np.int32)
            self._counting = np.arange(rounds + 1, dtype=np.int64)
        return self._ones[:rounds, :batch_size]
