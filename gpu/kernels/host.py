"""Kernels of a CPU for a few tokens, compiled by Numba where it is installed, each for one thread.

Decoding multiplies a few rows with every matrix, which takes as long as the matrices take to be read; what is lost
beside is the overhead of calls. So a layer is six calls of these kernels: norm and product, rotation, attention,
product and sum, norm and product, gate and product. Products are made of `tiles`.

Numba keeps what it has compiled in `__pycache__` beside this file, or in the user's cache if that is read-only. Sums
may be in another order than written; nothing else of IEEE arithmetic is relaxed, so NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .tiles import HAS_NUMBA as HAS_NUMBA
from .tiles import OUTPUTS_OF_BLOCK, OUTPUTS_OF_TILE, VECTOR_BYTES, tile

if HAS_NUMBA:
    import numba
    from numba.extending import overload

MAX_TOKENS = 128
"""Of a pass that runs in these kernels. More rows are multiplied faster by a library of matrix products."""

MOST_SUM, LEAST = 2.1e9, np.float32(1e-30)  # of 32 bits, less what rounding adds; below it a row is 0

FORMULAS = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}


def compiled(function: Callable[..., Any], formulas: Mapping[str, Any] = FORMULAS) -> Callable[..., Any]:
    """Compile a kernel when it is called first. Without Numba it stays a function that no path calls."""
    if not HAS_NUMBA:
        return function
    kernel: Callable[..., Any] = numba.njit(function, cache=True, nogil=True, **formulas)
    return kernel


def _exponential(x):
    raise AssertionError("only called from kernels")


def _products(x, w, out):
    raise AssertionError("only called from kernels")


def _single_exponential(x):
    """e^x in float32 to about one unit in the last place, in operations that run on whole vectors; the C library has
    one number at a time. The method of Cephes' expf: e^x = 2^n · e^r with |r| ≤ ln(2) / 2. Beyond what float32 holds,
    the nearest that it holds."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    power = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)  # ln(2) in two parts
    total = np.float32(1.9875691500e-4)
    total = total * r + np.float32(1.3981999507e-3)
    total = total * r + np.float32(8.3334519073e-3)
    total = total * r + np.float32(4.1665795894e-2)
    total = total * r + np.float32(1.6666665459e-1)
    total = total * r + np.float32(5.0000001201e-1)
    total = total * r * r + r + np.float32(1.0)
    exponent = np.int32(min(max(power, np.float32(-126.0)), np.float32(127.0))) + np.int32(127)  # also of NaN
    return total * np.int32(exponent << 23).view(np.float32)


tile_of_one, tile_of_two, tile_of_four = tile(1), tile(2, 2048), tile(4, 2048)

if HAS_NUMBA:

    @overload(_products, jit_options=FORMULAS)
    def _products_of(x, w, out):
        if w.dtype == numba.types.int8:
            return lambda x, w, out: integer_products(x, w, out)
        return lambda x, w, out: float_products(x, w, out)

    @overload(_exponential, jit_options=FORMULAS, inline="always")
    def _exponential_of(x):
        if x == numba.types.float32:
            return _single_exponential
        return lambda x: math.exp(x)


@compiled
def multiply(x, w, scales, bias, adds, out):
    """Set out [n, O], or with `adds` increase it by, x [n, I] · (w · scales)ᵀ + bias.

    w [O, I] of x's dtype, or `packed` int8, for which rows of float32 are rounded to 16 bits; scales and bias [O] or
    empty. No function with arrays is called in a loop, since each call passes thirty arguments for them.
    """
    n, num_outputs = out.shape
    totals = np.empty_like(out) if adds else out
    _products(x, w, totals)
    for r in range(n):
        if scales.size:
            for o in range(num_outputs):
                totals[r, o] *= scales[o]
        if bias.size:
            for o in range(num_outputs):
                totals[r, o] += bias[o]
        if adds:
            for o in range(num_outputs):
                out[r, o] += totals[r, o]


@compiled
def products(x, w, out):
    """Set out to x · wᵀ, tile after tile, as `tiles.tile` says. The columns of a tile lie far apart: memory is read
    faster in several streams."""
    n, apart = x.shape[0], (w.shape[0] - 1) // OUTPUTS_OF_TILE + 1
    for c in range(apart):
        for r in range(0, n, 4):
            if n - r == 1:
                tile_of_one(x, w, out, r, c, apart)
            elif n - r == 2:
                tile_of_two(x, w, out, r, c, apart)
            else:
                tile_of_four(x, w, out, r, c, apart)


@compiled
def float_products(x, w, out):
    """Set out [n, O] to x [n, I] · wᵀ."""
    products(x, w, out)
    size = x.shape[1]
    for i in range(size - size % (VECTOR_BYTES // x.itemsize), size):  # what fills no vector
        for r in range(len(x)):
            for o in range(len(w)):
                out[r, o] += x[r, i] * w[o, i]


@compiled
def integer_products(x, w, out):
    """Set out float32 [n, O] to x float32 [n, I] · wᵀ of `packed` int8, each row of x rounded to 16 bits with a step of
    its own.

    Sums are exact, so that a row does not depend on the rows beside it. A step is so large that no sum leaves 32 bits:
    it is at most the product of both norms. A row that is not finite becomes NaN.
    """
    n, size = x.shape
    rows, steps = np.zeros((n, 2 * w.shape[1]), np.int16), np.empty(n, np.float32)
    bits = x.view(np.int32)
    for r in range(n):
        most_bits, squares = np.int32(0), np.float32(0)
        for i in range(size):  # floats without a sign are in the order of their bits, whose maximum takes vectors
            most_bits = max(most_bits, np.int32(bits[r, i] & np.int32(0x7FFFFFFF)))
        greatest = np.int32(most_bits).view(np.float32)
        unit = np.float32(1) / max(greatest, LEAST)
        for i in range(size):
            squares += (x[r, i] * unit) * (x[r, i] * unit)
        most = np.float32(MOST_SUM / 127) / np.sqrt(squares * np.float32(size) + LEAST)
        most = np.floor(min(np.float32(32767), most))  # the row's greatest number is exact
        if squares <= np.float32(2 * size):  # not of NaN
            steps[r], factor = max(greatest, LEAST) / most, most * unit
            for i in range(size):
                rows[r, i] = np.int16(np.floor(x[r, i] * factor + np.float32(0.5)))
        else:
            steps[r], rows[r] = np.nan, 0
    sums = np.empty((n, len(w) * OUTPUTS_OF_BLOCK), np.int32)
    products(rows.view(np.int32), w, sums)
    for r in range(n):
        for o in range(out.shape[1]):
            out[r, o] = np.float32(sums[r, o]) * steps[r]


@compiled
def norm(x, weight, eps, out):
    """Set out [n, H] to x [n, H] scaled to unit root mean square, times weight (arXiv 1910.07467)."""
    n, size = x.shape
    for r in range(n):
        squares = x.dtype.type(0)
        for i in range(size):
            squares += x[r, i] * x[r, i]
        scale = x.dtype.type(1) / np.sqrt(squares / x.dtype.type(size) + x.dtype.type(eps))
        for i in range(size):
            out[r, i] = x[r, i] * scale * weight[i]


@compiled
def norm_multiply(x, weight, eps, w, scales, bias, out):
    """Set out [n, O] to the product of the normed x [n, H]."""
    normed = np.empty_like(x)
    norm(x, weight, eps, normed)
    multiply(normed, w, scales, bias, False, out)


@compiled
def gate_multiply(gate_up, w, scales, bias, out):
    """Increase out [n, O] by the product of silu(gate) · up; gate_up [n, 2 · I], the gate first."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    one = gate_up.dtype.type(1)
    activated = np.empty((n, width), gate_up.dtype)
    for r in range(n):
        for i in range(width):
            gate = gate_up[r, i]
            activated[r, i] = gate / (one + _exponential(-gate)) * gate_up[r, width + i]
    multiply(activated, w, scales, bias, True, out)


@compiled
def prepare(qkv, hq, hk, q_norm, k_norm, eps, cos_sin, positions, k_pool, v_pool, slots):
    """Norm and rotate queries and keys of qkv [n, hq + 2 · hk, d] in place, and write keys and values to `slots`.

    Norms [d] are empty for a layer that has none; `cos_sin` [positions, d] has no rows for one without a rotation.
    """
    n, _, d = qkv.shape
    half = d // 2
    of = qkv.dtype.type
    for t in range(n):
        for h in range(hq + hk):
            head, weight = qkv[t, h], q_norm if h < hq else k_norm
            if weight.size:
                squares = of(0)
                for i in range(d):
                    squares += head[i] * head[i]
                scale = of(1) / np.sqrt(squares / of(d) + of(eps))
                for i in range(d):
                    head[i] = head[i] * scale * weight[i]
            if cos_sin.shape[0]:
                angles = cos_sin[positions[t]]
                for i in range(half):
                    cos, sin, first, second = of(angles[i]), of(angles[half + i]), head[i], head[half + i]
                    head[i] = first * cos - second * sin
                    head[half + i] = second * cos + first * sin
        k_pool[slots[t]] = qkv[t, hq : hq + hk]
        v_pool[slots[t]] = qkv[t, hq + hk :]


@compiled
def attend(qkv, hq, hk, k_pool, v_pool, table, keys, nodes, window, scale, out):
    """Attend with every query of qkv [n, hq + 2 · hk, d], prepared, to its keys → out [n, hq · d].

    keys int64 [n, 4]: row, base, tail and number of the keys in the pool, as in `DecodeBatch`. nodes int64 [n, 2]: the
    first token of the query's row in this pass, and the bits of those from it on that it sees beside them; 0 and
    `keys[:, 3]` 0 make an output of 0.
    """
    n, _, d = qkv.shape
    of, group = qkv.dtype.type, hq // hk
    scores = np.empty((group, keys[:, 3].max() + 64), qkv.dtype)
    places = np.empty(scores.shape[1], np.int64)  # slots, or −1 − token of this pass
    for t in range(n):
        count = list_keys(table, keys[t], nodes, t, window, places)
        for h in range(hk):
            for j in range(count):
                key = k_pool[places[j], h] if places[j] >= 0 else qkv[-1 - places[j], hq + h]
                for g in range(group):
                    query = qkv[t, h * group + g]
                    total = of(0)
                    for i in range(d):
                        total += query[i] * key[i]
                    scores[g, j] = total * of(scale)
            for g in range(group):
                result = out[t, (h * group + g) * d : (h * group + g + 1) * d]
                result[:] = of(0)
                if not count:
                    continue
                best = scores[g, 0]
                for j in range(1, count):
                    best = max(best, scores[g, j])
                total = of(0)
                for j in range(count):
                    weight = _exponential(scores[g, j] - best)
                    scores[g, j] = weight
                    total += weight
                for j in range(count):
                    weight = scores[g, j] / total
                    value = v_pool[places[j], h] if places[j] >= 0 else qkv[-1 - places[j], hq + hk + h]
                    for i in range(d):
                        result[i] += weight * value[i]


@compiled
def list_keys(table, keys, nodes, t, window, places):
    """Set `places` to the keys that query t sees, and return their number."""
    row, base, tail, end = keys
    first, bits = nodes[t]
    depth = 0
    for node in range(64):
        depth += (bits >> node) & 1
    begin = max(0, end + depth - window) if window else 0
    count = 0
    for j in range(begin, end):
        places[count] = table[row, j if j < base else tail + j - base]
        count += 1
    for node in range(64):
        if (bits >> node) & 1:
            own = 0
            for other in range(64):
                own += (nodes[first + node, 1] >> other) & 1
            if not window or depth - own < window:
                places[count] = -1 - (first + node)
                count += 1
    return count
