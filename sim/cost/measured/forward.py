"""The cost of a pass from tables of measured kernels; it answers what `ForwardCost` answers.

Two rules make prices of measurements, which fluctuate and have errors. More work takes no less time: times are looked
up in the rising table that is nearest to the measured one. And nothing is faster than physics allows, see
`PhysicalLimits`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..passes.curve import Line
from ..passes.forward import ForwardCost
from ..passes.tokens import ExpertRouting
from .limits import PhysicalLimits
from .tables import CHUNKS, CONTEXTS, KNEE, PASTS, QUERIES, ROWS, TOKENS, KernelTables

_LEAST_NS = 1e-3
"""Stands for 0 in a logarithm of a time."""


class MeasuredForward(ForwardCost):
    """Costs of passes of a shape from tables of measured kernels. The roofline prices what the tables lack: wider
    inputs of a draft's layer, and several queries of latent attention."""

    def __init__(self, roofline: ForwardCost, tables: KernelTables) -> None:
        super().__init__(roofline.shape, roofline.gpu, roofline.efficiency, roofline.parallel, roofline.qkv_inputs)
        self.tables = tables
        self.knee = KNEE
        self.priced_by = f"measured kernels of {tables.place}"
        self.source = tables.source
        share = tables.measured_share
        self.about_prices = f" ({share:.0%} of a decode pass measured, the rest estimated by the database)"
        self._roofline = roofline
        self._limits = PhysicalLimits(self.shape, self.gpu, self.parallel)
        self._has_mixers = bool(tables.verify.size)  # the products around plain attention are in the layers
        self._layers, self._comm, self._lm_head, self._experts, self._prefill, self._lines = _looked_up(tables)
        self._expert_token_ns = float((self._experts / TOKENS).min())
        self._least_lines: dict[int, tuple[float, float, float]] = {}

    def explain(self) -> list[tuple[str, float | str, str, str]]:
        source = self.tables.source
        rows: list[tuple[str, float | str, str, str]] = [("kernels of the target", "measured", "", source)]
        rows += [(f"kernel {name}", known, "", source) for name, known in self.tables.provenance.items()]
        if not self.tables.verify.size:
            words = "the roofline's ratio of several queries to one, over the measured decode pass"
            rows.append(("kernel attention of a verify pass", "mixed", "", words))
        words = "bytes over bandwidth, or operations over peak, where a table has less"
        rows += [(f"times raised: {name}", found, "", words) for name, found in self._raised()]
        return rows

    def _raised(self) -> Iterator[tuple[str, str]]:
        """Yield the tables that have times below the limits of physics, and how many."""
        tables, limits = self.tables, self._limits
        layers = [limits.layers_ns(tokens, tokens, has_mixers=self._has_mixers) for tokens in TOKENS]
        decode = np.multiply.outer(ROWS, [limits.attention_ns(1, context) for context in CONTEXTS])
        pairs = {
            "layers": (tables.layers + self._experts, layers),
            "lm_head": (tables.lm_head, [limits.lm_head_ns(rows) for rows in TOKENS]),
            "attention of a decode pass": (tables.decode, decode),
            "attention of a prompt": (
                tables.prefill,
                [[limits.prompt_ns(new, past) for past in PASTS] for new in CHUNKS],
            ),
        }
        for name, (table, least) in pairs.items():
            count = int((table < np.array(least)).sum())
            if count:
                yield name, f"{count} of {table.size}"

    def layers_ns(self, tokens: int, routing: ExpertRouting | None = None) -> float:
        """See `ForwardCost.layers_ns`."""
        routing = routing or ExpertRouting(tokens, tokens)
        key = (tokens, routing) if self.shape.moe_layers else tokens
        if key not in self._layers_cache:
            own, groups = self._own_share(tokens), self.parallel.data
            computed = routing.tokens / groups
            independent = (routing.independent if routing.uneven is None else routing.uneven) / groups
            total = _at(self._layers, TOKENS, own) + self._experts_at(computed, independent)
            if self.qkv_inputs > 1:  # the database has no such layers
                wide, plain = (self._products_ns(own, one.products, one.dtype) for one in self.layers[:2])
                total += wide - plain
            least = self._limits.layers_ns(min(own, computed), independent, has_mixers=self._has_mixers)
            self._layers_cache[key] = max(total, least)
        return self._layers_cache[key]

    def _experts_at(self, tokens: float, independent: float) -> float:
        """Return the time of routed experts for `tokens` tokens that reach as many experts as `independent` ones.

        The tables have independent tokens. Few tokens take the time of reading the experts that they reach, and many
        the time of computing them: each token takes at least what one takes in the table's fastest pass.
        """
        return max(_at(self._experts, TOKENS, independent), tokens * self._expert_token_ns)

    def _logits_ns(self, rows: int) -> float:
        own = self._own_share(rows)
        return max(_at(self._lm_head, TOKENS, own), self._limits.lm_head_ns(own))

    def comm_ns(self, tokens: int) -> float:
        return _at(self._comm, TOKENS, self._own_share(tokens))

    def decode_attention(self, rows: int, queries_per_row: int, own_tokens: int, reads: int = 1) -> Line:
        """See `ForwardCost.decode_attention`; two segments per number of rows, which meet at KNEE tokens of
        context per row."""
        own = self._own_share(rows)
        least = [own * limit for limit in self._least_line(queries_per_row)]
        base, rise, far = self._line(own * reads, queries_per_row)
        base, at_knee, far = max(base, least[0]), max(base + rise, least[1]), max(far, least[2])
        near = (at_knee - base) / KNEE
        if not self.tables.has_states:
            base += self.recurrence_ns(rows, queries_per_row)
        return Line(base, far / rows, (near - far) / rows)

    def _line(self, rows: int, queries: int) -> tuple[float, float, float]:
        """Return, of a pass over `rows` rows, the time without context, the rise to the knee, and the rise per token of
        context beyond it."""
        if queries == 1 or self.tables.verify.size:
            within = min(rows, ROWS[-1])  # beyond the last rows, in proportion
            base, rise, far = (
                rows / within * float(_between(_between(part, 1, QUERIES, queries), 0, ROWS, within))
                for part in self._lines
            )
            return base, rise, far
        # The database prices one query per row only. What does not depend on the context is priced as that of so many
        # rows; the context is read as the roofline says.
        one, several = (self._roofline.decode_attention(1, number, 0) for number in (1, queries))
        read = one.slope_ns + one.window_slope_ns
        ratio = (several.slope_ns + several.window_slope_ns) / read if read else 1.0
        (base, *_), (_, rise, far) = self._line(rows * queries, 1), self._line(rows, 1)
        return base, ratio * rise, ratio * far

    def _least_line(self, queries: int) -> tuple[float, float, float]:
        """Return, of one row, the least time without context, the least at the knee, and the least rise per token
        beyond it, with which no context takes less than physics allows."""
        if queries not in self._least_lines:
            limits = {context: self._limits.attention_ns(queries, context) for context in (*CONTEXTS, 2 * CONTEXTS[-1])}
            knee = limits[KNEE]
            # A window that is full before the knee bends the limit there: a line to the knee must begin above 0.
            bases = [(ns - knee * c / KNEE) / (1 - c / KNEE) for c, ns in limits.items() if c < KNEE]
            rises = [(ns - knee) / (c - KNEE) for c, ns in limits.items() if c > KNEE]
            self._least_lines[queries] = max(0.0, *bases), knee, max(rises)
        return self._least_lines[queries]

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
        between: float = (1 - further) * shorter + further * longer
        return max(between, self._limits.prompt_ns(new, past))


class _LookedUp(NamedTuple):
    """What times are looked up in: the tables made to rise, and the lines of attention, see `_lines`, each [ROWS,
    QUERIES]."""

    layers: NDArray[np.float64]
    comm: NDArray[np.float64]
    lm_head: NDArray[np.float64]
    experts: NDArray[np.float64]
    prefill: NDArray[np.float64]
    lines: tuple[NDArray[np.float64], ...]


@lru_cache(maxsize=64)
def _looked_up(tables: KernelTables) -> _LookedUp:
    """Return the rising tables, made once for all runs that have `tables`."""
    experts = tables.experts if tables.experts.size else np.zeros(len(TOKENS))
    # One query is the first of several, where the database prices these at all.
    several = tables.decode[:, None, :]
    if tables.verify.size:
        several = np.concatenate([several, tables.verify[:, 1:]], axis=1)
    base, at_knee, far = _lines(_risen(several))
    return _LookedUp(
        layers=_risen(tables.layers),
        comm=_risen(tables.comm),
        lm_head=_risen(tables.lm_head),
        experts=_risen(experts),
        prefill=_risen(tables.prefill),
        lines=tuple(_rising(_rising(part, 1), 0) for part in (base, at_knee - base, far)),
    )


def _risen(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the times nearest to `times`, by least squares of their ratios, that fall along no axis.

    More work takes no less time. A measurement that says otherwise is noise, or another kernel that the server could
    choose as well.
    """
    axes = range(times.ndim)
    if all((np.diff(times, axis=axis) >= 0).all() for axis in axes):
        return times
    logarithms = np.log(np.maximum(times, _LEAST_NS))
    for axis in axes:  # what rises along an axis still does after a regression along another
        logarithms = _rising(logarithms, axis)
    risen: NDArray[np.float64] = np.exp(logarithms)
    return risen


def _rising(values: NDArray[np.float64], axis: int = 0) -> NDArray[np.float64]:
    """Return the values nearest to `values`, by least squares, that do not fall along `axis` (isotonic regression).

    A value is the greatest, over all beginnings at or before it, of the least mean from there to an end at or after it.
    """
    values = np.moveaxis(values, axis, -1)
    count = values.shape[-1]
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(-1)], axis=-1)
    first, last = np.arange(count)[:, None], np.arange(count)
    means = (sums[..., None, 1:] - sums[..., :-1, None]) / np.maximum(last - first + 1, 1)
    means[..., first > last] = np.inf
    least = np.flip(np.minimum.accumulate(np.flip(means, -1), -1), -1)  # [..., beginning, place]
    least[..., first > last] = -np.inf
    # The sums round: what is level could fall by the last bit.
    return np.moveaxis(np.maximum.accumulate(least.max(-2), -1), -1, axis)


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
