"""A round's time as a curve over KV tokens, in fixed point.

A round is a sequence of passes. Each pass is linear in the batch's KV tokens, with a second slope that ends where
attention windows are full, and cannot be faster than its dispatch floor. So the whole is piecewise linear:

    time(kv) = Σ repeat · max(floor, base + slope · kv + window_slope · min(kv, cap))

Coefficients are integers in units of 2⁻¹⁶ ns. One integer formula serves Python ints and int64 arrays, so that a round
costs the same to the last bit whether it is evaluated alone or inside a multi-step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ....core.errors import ForedraftError

SHIFT = 16
# Up to this many KV tokens in a batch no product of the formula leaves int64; the constructor checks it.
MAX_KV_TOKENS = 1 << 32

DISPATCH = "dispatch"


class TimeOverflow(ForedraftError):
    """The time of a pass exceeds 64 bits, so a parameter must be wrong (often the unit of a calibration)."""


class Line(NamedTuple):
    """Time that is linear in KV tokens: `base_ns + slope_ns · kv + window_slope_ns · min(kv, rows · window)`."""

    base_ns: float
    slope_ns: float = 0.0
    window_slope_ns: float = 0.0


class _Term(NamedTuple):
    """One pass in fixed point; `repeat` is multiplied in."""

    floor: int
    base: int
    slope: int
    window_slope: int
    cap: int


@dataclass(slots=True)
class Pass:
    """One pass over the device, run `repeat` times: named parts in ns, a dispatch floor in ns, the windows' cap in
    tokens."""

    parts: Mapping[str, Line]
    floor_ns: float = 0.0
    repeat: int = 1
    window_cap_tokens: int = 0
    term: _Term = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        base = slope = window_slope = 0
        for line in self.parts.values():
            base += _fixed(line.base_ns)
            if line.slope_ns or line.window_slope_ns:
                slope += _fixed(line.slope_ns)
                window_slope += _fixed(line.window_slope_ns)
        repeat = self.repeat
        self.term = _Term(
            repeat * _fixed(self.floor_ns), repeat * base, repeat * slope, repeat * window_slope, self.window_cap_tokens
        )

    def times(self, factor: float) -> Pass:
        """Return this pass with its whole time times `factor`, the floor included."""
        parts = {
            name: Line(factor * line.base_ns, factor * line.slope_ns, factor * line.window_slope_ns)
            for name, line in self.parts.items()
        }
        return replace(self, parts=parts, floor_ns=factor * self.floor_ns)


def _fixed(value_ns: float) -> int:
    return round(value_ns * (1 << SHIFT))


class PassCurve:
    """The time of a sequence of passes as a function of KV tokens."""

    __slots__ = ("_base", "_passes", "_slope", "_terms")

    def __init__(self, passes: Sequence[Pass]) -> None:
        self._passes = tuple(passes)
        # Passes without a floor and without windows are one line; the rest keep their own maximum.
        base = slope = highest = steepest = 0
        bent = []
        for single in self._passes:
            term = single.term
            highest += max(term.base, term.floor)
            steepest += term.slope + term.window_slope
            if term.floor or term.window_slope:
                bent.append(term)
            else:
                base += term.base
                slope += term.slope
        self._terms = tuple(bent)
        self._base = base
        self._slope = slope
        if highest + steepest * MAX_KV_TOKENS >= 1 << 63:
            raise TimeOverflow(
                f"a step takes {highest / (1 << SHIFT) / 1e9:.3g} s and {steepest / (1 << SHIFT):.3g} ns per KV token; "
                "check the units of the calibration"
            )

    @overload
    def __call__(self, kv_tokens: int) -> int: ...
    @overload
    def __call__(self, kv_tokens: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def __call__(self, kv_tokens: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        """Return nanoseconds for `kv_tokens`: an int for an int, int64 [m] for an integer array [m]. Rounds down."""
        if isinstance(kv_tokens, np.ndarray):
            return self._array(kv_tokens.astype(np.int64, copy=False))
        total = self._base + self._slope * kv_tokens
        for term in self._terms:
            own = term.base + term.slope * kv_tokens
            if term.window_slope:
                own += term.window_slope * (kv_tokens if kv_tokens < term.cap else term.cap)
            total += own if own > term.floor else term.floor
        return int(total >> SHIFT)

    def _array(self, kv_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        total = self._base + self._slope * kv_tokens
        for term in self._terms:
            own = term.base + term.slope * kv_tokens
            if term.window_slope:
                own += term.window_slope * np.minimum(kv_tokens, term.cap)
            total += np.maximum(own, term.floor)
        return total >> SHIFT

    def parts(self, kv_tokens: int) -> dict[str, int]:
        """Return nanoseconds by part; they sum to the curve's value.
        `dispatch` is what a floor adds to the passes' own time."""
        fixed: dict[str, int] = {}
        for single in self._passes:
            term = single.term
            own = 0
            for name, line in single.parts.items():
                value = _fixed(line.base_ns) + _fixed(line.slope_ns) * kv_tokens
                value += _fixed(line.window_slope_ns) * min(kv_tokens, single.window_cap_tokens)
                fixed[name] = fixed.get(name, 0) + single.repeat * value
                own += single.repeat * value
            if term.floor > own:
                fixed[DISPATCH] = fixed.get(DISPATCH, 0) + term.floor - own
        rounded = {name: value >> SHIFT for name, value in fixed.items()}
        if rounded:
            # The largest part gets what rounding down lost, so that the parts add up to the whole.
            largest = max(rounded, key=rounded.__getitem__)
            rounded[largest] += self(kv_tokens) - sum(rounded.values())
        return rounded
