"""The cost of a pass from tables of measured kernels; it answers what `ForwardCost` answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..forward import ExpertRouting, ForwardCost, Line
from .tables import CHUNKS, CONTEXTS, KNEE, PASTS, QUERIES, ROWS, TOKENS, KernelTables

_ALONE = 64.0  # exponent of the soft corner with which memory and compute do not delay each other


class MeasuredForward(ForwardCost):
    """Costs of passes of a shape from tables of measured kernels. The roofline prices what the tables lack: wider
    inputs of a draft's layer, and the saving by tokens that share experts."""

    def __init__(self, roofline: ForwardCost, tables: KernelTables) -> None:
        super().__init__(roofline.shape, roofline.gpu, roofline.efficiency, roofline.parallel, roofline.qkv_inputs)
        self.tables = tables
        self._roofline = roofline
        self._layers, self._comm, self._lm_head = map(_rising, (tables.layers, tables.comm, tables.lm_head))
        if tables.verify.size:  # weights of mixers are in the layers
            # Weights that fit the cache (96 MB on an L40S) were measured faster than memory gives them. The first
            # tokens share few experts.
            reading = replace(self.efficiency, compute=1.0, ramp_ns=0.0, small_kernel_ns=0.0, soft_exponent=_ALONE)
            passes, experts = ForwardCost(self.shape, self.gpu, reading, self.parallel), self.shape.experts
            apart = 1 if experts is None else max(1, experts.count // (8 * experts.top_k))
            self._layers = np.maximum(self._layers, [passes.layers_ns(min(tokens, apart)) for tokens in TOKENS])
        self._prefill = _rising(_rising(tables.prefill, 0), 1)
        # One query is the first of several, where the database prices these at all.
        several = tables.decode[:, None, :]
        if tables.verify.size:
            several = np.concatenate([several, tables.verify[:, 1:]], axis=1)
        self._lines = tuple(_rising(_rising(part, 1), 0) for part in _lines(several))

    @property
    def priced_by(self) -> str:
        return f"measured kernels of {self.tables.place}"

    @property
    def source(self) -> str:
        return self.tables.source

    @property
    def about_prices(self) -> str:
        """The words after the times in a report: the share that was measured."""
        return f" ({self.tables.measured_share:.0%} of a decode pass measured, the rest estimated by the database)"

    @property
    def knee(self) -> int:
        return KNEE

    def explain(self) -> list[tuple[str, float | str, str, str]]:
        source = self.tables.source
        rows: list[tuple[str, float | str, str, str]] = [("kernels of the target", "measured", "", source)]
        rows += [(f"kernel {name}", known, "", source) for name, known in self.tables.provenance.items()]
        if not self.tables.verify.size:
            words = "the roofline's ratio of several queries to one, over the measured decode pass"
            rows.append(("kernel attention of a verify pass", "mixed", "", words))
        return rows

    def layers_ns(self, tokens: int, routing: ExpertRouting | None = None) -> float:
        """See `ForwardCost.layers_ns`. The tables have independent tokens; the saving by fewer experts is the
        roofline's share."""
        key = tokens if routing is None or not self.shape.moe_layers else (tokens, routing)
        if key not in self._layers_cache:
            own = self._own_share(tokens)
            total = _at(self._layers, TOKENS, own)
            if self.qkv_inputs > 1:  # the database has no such layers
                plain = ForwardCost(self.shape, self.gpu, self.efficiency, self.parallel)
                for mixer, count in self.shape.mixers:
                    total += count * (self._mixer_ns(own, mixer) - plain._mixer_ns(own, mixer))
            if key != tokens:
                total *= self._roofline.layers_ns(tokens, routing) / self._roofline.layers_ns(tokens)
            self._layers_cache[key] = total
        return self._layers_cache[key]

    def lm_head_ns(self, rows: int) -> float:
        return _at(self._lm_head, TOKENS, self._own_share(rows))

    def comm_ns(self, tokens: int) -> float:
        return _at(self._comm, TOKENS, self._own_share(tokens))

    def decode_attention(self, rows: int, queries_per_row: int, own_tokens: int, reads: int = 1) -> Line:
        """See `ForwardCost.decode_attention`; two segments per number of rows, which meet at KNEE tokens of
        context per row."""
        groups, rows = self.parallel.data, self._own_share(rows)
        if queries_per_row == 1 or self.tables.verify.size:
            within = min(rows, ROWS[-1])  # beyond the last rows, in proportion
            base, at_knee, far = (
                rows / within * float(_between(_between(part, 1, QUERIES, queries_per_row), 0, ROWS, within))
                for part in self._lines
            )
        else:
            base, at_knee, far = map(float, _lines(self._several_queries(rows, queries_per_row)))
        near = (at_knee - base) / KNEE
        if not self.tables.has_states:
            base += self.recurrence_ns(rows * groups, queries_per_row)
        return Line(base, far / rows / groups, (near - far) / rows / groups)

    def _several_queries(self, rows: int, queries_per_row: int) -> NDArray[np.float64]:
        """Return times [CONTEXTS] of a pass that the database prices for one query per row only.

        What does not depend on the context is priced as that of so many rows, reading the context as the roofline says.
        """
        one, several = (self._roofline.decode_attention(1, queries, 0) for queries in (1, queries_per_row))
        read = one.slope_ns + one.window_slope_ns
        ratio = (several.slope_ns + several.window_slope_ns) / read if read else 1.0
        own = _between(self.tables.decode, 0, ROWS, rows)
        fixed = _between(self.tables.decode, 0, ROWS, rows * queries_per_row)[0]
        times: NDArray[np.float64] = fixed + (own - own[0]) * ratio
        return times

    def prefill_attention_ns(self, chunks: Sequence[tuple[int, int]]) -> float:
        total = 0.0
        for new, past in chunks:
            total += self._chunk_ns(new, past)
        states = 0.0 if self.tables.has_states else self.scan_ns(sum(new for new, _ in chunks))
        return total / self.parallel.data + states

    def _chunk_ns(self, new: int, past: int) -> float:
        table = self._prefill
        (i, further), (j, weight) = _segment(CHUNKS, new), _segment(PASTS, past)
        shorter, longer = ((1 - weight) * table.item(k, j - 1) + weight * table.item(k, j) for k in (i - 1, i))
        return (1 - further) * shorter + further * longer


def _rising(table: NDArray[np.float64], axis: int = 0) -> NDArray[np.float64]:
    """Return times that do not fall along `axis`: each is the mean of the greatest up to it and the least from it on.
    More work takes no less time. A measurement that says otherwise is noise, or another kernel that the server could
    choose as well."""
    above = np.maximum.accumulate(table, axis)
    below = np.flip(np.minimum.accumulate(np.flip(table, axis), axis), axis)
    return (above + below) / 2


def _lines(times: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Fit two segments per row of times [..., CONTEXTS] by least squares, which meet at KNEE tokens of context. Return
    the time without context, the time at the knee, and the rise per token beyond it, each [...]."""
    contexts = np.array(CONTEXTS, dtype=float)
    at_knee = times[..., CONTEXTS.index(KNEE)]
    slopes = []
    for part in (contexts <= KNEE, contexts >= KNEE):
        offset = contexts[part] - KNEE
        rise = times[..., part] - at_knee[..., None]
        slopes.append(np.maximum(0.0, rise @ offset / (offset @ offset)))
    return np.maximum(0.0, at_knee - slopes[0] * KNEE), at_knee, slopes[1]


def _at(table: NDArray[np.float64], grid: tuple[int, ...], value: float) -> float:
    """Return a table of one axis at `value`, see `_between`."""
    j, weight = _segment(grid, value)
    return (1 - weight) * table.item(j - 1) + weight * table.item(j)


def _between(table: NDArray[np.float64], axis: int, grid: tuple[int, ...], value: float) -> NDArray[np.float64]:
    """Return the table at `value` along `axis`, linear between the grid's points; the last segment goes on, the first
    value stays. A table of one point there is constant.
    """
    if table.shape[axis] == 1:
        return _take(table, 0, axis)
    j, weight = _segment(grid, value)
    return (1 - weight) * _take(table, j - 1, axis) + weight * _take(table, j, axis)


def _take(table: NDArray[np.float64], index: int, axis: int) -> NDArray[np.float64]:
    return np.asarray(table.take(index, axis))


def _segment(grid: tuple[int, ...], value: float) -> tuple[int, float]:
    """Return the segment of `grid` for `value`, by its upper end, and how far along `value` is:
    1 at that end, beyond it more."""
    j = min(max(bisect_left(grid, value), 1), len(grid) - 1)
    low, high = grid[j - 1], grid[j]
    return j, max(0.0, (value - low) / (high - low))
