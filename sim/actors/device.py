"""The device: an in-order stream that plays the model. It knows what the scheduler may not know: how long outputs really are.

One column entry per request-table row. `left` counts the tokens until the request ends, by its own stop or by its cap. Rounds are drawn
first and applied later, because a block may be stopped at any of its round boundaries; draws are keyed by output position, so what
was drawn too much is no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...core.acceptance import AcceptanceProcess
from ...core.run_cache import RunCache
from ...core.step import BlockEnd, DecodeResult, DecodeStep, Join, PrefillResult, Step
from ..cost.round import RoundCost


@dataclass(frozen=True, slots=True)
class Truth:
    """What only the model knows of a request: how many tokens it emits before it stops, and the key of its draws."""

    output_len: int
    key: int
    quality_shift: float = 0.0  # standard deviations


@dataclass(slots=True)
class DrawnRounds:
    """Rounds of one step as they will happen unless the step is stopped before."""

    rounds: int
    accept_lens: np.ndarray  # int32 [≥ rounds, bs]
    emitted: np.ndarray  # int64 [≥ rounds]: tokens of each round over the batch
    device_ns: np.ndarray  # int64 [rounds]
    left: np.ndarray  # int64 [bs]: tokens until the end, at the start


class Device:
    """Executes steps in order. `truths` are entered by whoever submits a request and forgotten when it is over."""

    def __init__(
        self,
        cost: RoundCost,
        num_rows: int,
        acceptance: AcceptanceProcess,
        for_tree: Callable[[int, int, int], AcceptanceProcess],
    ) -> None:
        self.cost = cost
        self.truths: dict[str, Truth] = {}
        self.busy_ns = 0
        self._num_rows = num_rows
        self._acceptance = acceptance
        self._for_tree = for_tree
        self._caches: dict[tuple[int, int, int], RunCache] = {}
        self._chain = RunCache(acceptance, num_rows)
        self._kv_len = np.zeros(num_rows + 1, dtype=np.int64)
        self._position = np.zeros(
            num_rows + 1, dtype=np.int64
        )  # output tokens so far: where the acceptance process stands
        self._left = np.zeros(num_rows + 1, dtype=np.int64)
        self._ends_by_stop = np.zeros(num_rows + 1, dtype=bool)
        self._key = np.zeros(num_rows + 1, dtype=np.uint64)
        self._ones = np.ones((64, num_rows + 1), dtype=np.int32)

    def open_rows(self, joins: tuple[Join, ...]) -> None:
        """Requests take their rows with a step that is being launched."""
        for join in joins:
            truth = self.truths[join.request.request_id]
            until_stop = truth.output_len - join.num_emitted
            until_cap = join.max_tokens - join.num_emitted
            row = join.row
            self._left[row] = min(until_stop, until_cap)
            self._ends_by_stop[row] = until_stop <= until_cap
            self._position[row] = join.num_emitted
            self._kv_len[row] = join.num_cached
            self._key[row] = truth.key
            if truth.quality_shift:
                self._chain.set_shifts(np.array([row]), truth.quality_shift)

    # -- prefill ------------------------------------------------------------------------------------------------------

    def prefill(self, step: Step) -> PrefillResult:
        """Compute the chunks of a step; a last chunk emits its row's first token."""
        part = step.prefill
        rows = part.rows
        self._kv_len[rows] = part.starts + part.lens
        last = rows[part.is_last]
        self._left[last] -= 1
        self._position[last] += 1
        over = self._left[rows] <= 0
        stopped = part.is_last & over & self._ends_by_stop[rows]
        return PrefillResult(None, stopped if stopped.any() else None)

    def step_ns(self, step: Step) -> int:
        """Device time of a step with a prefill part, before it is run."""
        chunks = list(zip(step.prefill.lens.tolist(), step.prefill.starts.tolist(), strict=True))
        decode = step.decode
        if decode is None:
            return self.cost.step_ns(chunks)
        kv_tokens = int(self._kv_len[decode.rows].sum())
        topk = decode.topk if decode.steps else 1
        return self.cost.step_ns(chunks, (len(decode.rows), decode.steps, topk, decode.num_draft_tokens, kv_tokens))

    # -- decode -------------------------------------------------------------------------------------------------------

    def draw(self, decode: DecodeStep, limit: int, timed: bool = True) -> DrawnRounds:
        """The next rounds of a batch, up to `limit` and up to the first in which a request ends; a row over already makes it one."""
        rows = decode.rows
        batch_size = len(rows)
        left = self._left[rows]
        fewest = int(np.minimum.reduce(left))
        limit = max(1, min(limit, fewest))
        kv_tokens = int(np.add.reduce(self._kv_len[rows]))
        if decode.steps == 0:
            lens = self._all_ones(limit, batch_size)
            emitted = np.full(limit, batch_size, dtype=np.int64)
            rounds = limit
        else:
            cache = self._cache(decode)
            keys, positions = self._key[rows], self._position[rows]
            if limit == 1:
                lens = cache.accept_lens(rows, keys, positions, decode.steps)[None, :]
                rounds = 1
            else:
                lens = cache.accept_lens_of_rounds(rows, keys, positions, decode.steps, limit)
                over = (lens.cumsum(axis=0) >= left).any(axis=1)
                first = int(over.argmax())
                rounds = first + 1 if over[first] else limit
            emitted = lens.sum(axis=1, dtype=np.int64)
        device_ns = emitted
        if timed:
            topk = decode.topk if decode.steps else 1
            before = kv_tokens if rounds == 1 else kv_tokens + np.cumsum(emitted[:rounds]) - emitted[:rounds]
            device_ns = np.atleast_1d(
                self.cost.decode_ns(batch_size, decode.steps, topk, decode.num_draft_tokens, before)
            )
        return DrawnRounds(rounds, lens, emitted, device_ns, left)

    def apply(self, decode: DecodeStep, drawn: DrawnRounds, rounds: int, asked: bool) -> DecodeResult:
        """Run the first `rounds` of what was drawn. `asked`: the driver stopped the block there."""
        rows = decode.rows
        lens = drawn.accept_lens[:rounds]
        total = lens[0] if rounds == 1 else lens.sum(axis=0, dtype=np.int64)
        left = drawn.left
        kept = np.minimum(total, left)
        self._kv_len[rows] += kept
        self._position[rows] += kept
        self._left[rows] = left - kept
        stop_index, end = None, BlockEnd.ASKED if asked else BlockEnd.MAX_ROUNDS
        ended = kept == left
        ended &= left > 0
        if np.count_nonzero(ended):
            end = BlockEnd.REQUEST_ENDED
            stops = ended & self._ends_by_stop[rows]
            if np.count_nonzero(stops):
                stop_index = np.full(lens.shape, -1, dtype=np.int32)
                before_last = total - lens[-1]
                stop_index[-1] = np.where(stops, left - before_last - 1, -1)
        return DecodeResult(rounds, lens, stop_index, ended, end)

    def _cache(self, decode: DecodeStep) -> RunCache:
        if decode.topk == 1:
            return self._chain
        key = (decode.topk, decode.steps, decode.num_draft_tokens)
        if key not in self._caches:
            self._caches[key] = RunCache(self._for_tree(*key), self._num_rows)
        return self._caches[key]

    def _all_ones(self, rounds: int, batch_size: int) -> np.ndarray:
        if rounds > len(self._ones):
            self._ones = np.ones((rounds, self._ones.shape[1]), dtype=np.int32)
        return self._ones[:rounds, :batch_size]
