"""Kernels of a CPU for a few tokens, compiled by Numba where it is installed, each for one thread.

Decoding multiplies a few rows with every matrix, which takes as long as the matrices take to be read; what is lost
beside is the overhead of calls. So a layer is six calls of these kernels: norm and product, rotation, attention,
product and sum, norm and product, gate and product. Weights lie as they are stored, [out, in]; bfloat16 and 8-bit
integers are widened in registers.

Numba keeps what it has compiled in `__pycache__` beside this file, or in the user's cache if that is read-only. Sums
may be in another order than written; nothing else of IEEE arithmetic is relaxed, so NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

try:
    import numba
    from numba.extending import overload
except ImportError:  # a machine that only uses its GPU may lack it
    numba = None

HAS_NUMBA = numba is not None
MAX_TOKENS = 32
"""Of a pass that runs in these kernels. More rows are multiplied faster by a library of matrix products."""

FORMULAS = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}


def compiled(function: Callable[..., Any], formulas: Mapping[str, Any] = FORMULAS) -> Callable[..., Any]:
    """Compile a kernel when it is called first. Without Numba it stays a function that no path calls."""
    if numba is None:
        return function
    kernel: Callable[..., Any] = numba.njit(function, cache=True, nogil=True, **formulas)
    return kernel


def _exponential(x):
    raise AssertionError("only called from kernels")


def _wide(value):
    raise AssertionError("only called from kernels")


def _of_bfloat16(value):
    return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


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


if numba is not None:

    @overload(_wide, jit_options=FORMULAS, inline="always")
    def _wide_of(value):
        if value == numba.types.uint16:
            return _of_bfloat16
        if value == numba.types.int8:
            return lambda value: np.float32(value)
        return lambda value: value

    @overload(_exponential, jit_options=FORMULAS, inline="always")
    def _exponential_of(x):
        if x == numba.types.float32:
            return _single_exponential
        return lambda x: math.exp(x)


@compiled
def multiply(x, w, scales, bias, adds, out):
    """Set out [n, O], or with `adds` increase it by, x [n, I] · (w · scales)ᵀ + bias.

    w [O, I] floats, bfloat16 as uint16, or int8; scales and bias [O] or empty. Four outputs of one or two rows or three
    of four are summed at once, in as many registers as there are, so that a weight is read once for all of these rows.
    The outputs lie far apart: memory is read faster in several streams. Past the last row or output the last one is
    summed again. No function with arrays is called in a loop, since each call passes thirty arguments for them.
    """
    n, num_outputs = out.shape
    totals = np.empty_like(out) if adds else out
    if n == 1:
        one_row(x, w, totals)
    elif n == 2:
        two_rows(x, w, totals)
    else:
        four_rows(x, w, totals)
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
def one_row(x, w, out):
    """Set out [1, O] to x [1, I] · wᵀ."""
    last = w.shape[0] - 1
    apart = last // 4 + 1
    for o in range(apart):
        o2, o3, o4 = min(o + apart, last), min(o + 2 * apart, last), min(o + 3 * apart, last)
        a = b = c = d = x.dtype.type(0)
        for i in range(x.shape[1]):
            value = x[0, i]
            a += _wide(w[o, i]) * value
            b += _wide(w[o2, i]) * value
            c += _wide(w[o3, i]) * value
            d += _wide(w[o4, i]) * value
        out[0, o], out[0, o2], out[0, o3], out[0, o4] = a, b, c, d


@compiled
def two_rows(x, w, out):
    """Set out [2, O] to x [2, I] · wᵀ."""
    last = w.shape[0] - 1
    apart = last // 4 + 1
    for o in range(apart):
        o2, o3, o4 = min(o + apart, last), min(o + 2 * apart, last), min(o + 3 * apart, last)
        a1 = a2 = b1 = b2 = c1 = c2 = d1 = d2 = x.dtype.type(0)
        for i in range(x.shape[1]):
            x1, x2 = x[0, i], x[1, i]
            a, b, c, d = _wide(w[o, i]), _wide(w[o2, i]), _wide(w[o3, i]), _wide(w[o4, i])
            a1 += a * x1
            a2 += a * x2
            b1 += b * x1
            b2 += b * x2
            c1 += c * x1
            c2 += c * x2
            d1 += d * x1
            d2 += d * x2
        out[0, o], out[0, o2], out[0, o3], out[0, o4] = a1, b1, c1, d1
        out[1, o], out[1, o2], out[1, o3], out[1, o4] = a2, b2, c2, d2


@compiled
def four_rows(x, w, out):
    """Set out [n, O] to x [n, I] · wᵀ, four rows after four."""
    end, last = x.shape[0] - 1, w.shape[0] - 1
    apart = last // 3 + 1
    for o in range(apart):
        o2, o3 = min(o + apart, last), min(o + 2 * apart, last)
        for r in range(0, end + 1, 4):
            r2, r3, r4 = min(r + 1, end), min(r + 2, end), min(r + 3, end)
            a1 = a2 = a3 = a4 = b1 = b2 = b3 = b4 = c1 = c2 = c3 = c4 = x.dtype.type(0)
            for i in range(x.shape[1]):
                a, b, c = _wide(w[o, i]), _wide(w[o2, i]), _wide(w[o3, i])
                x1, x2, x3, x4 = x[r, i], x[r2, i], x[r3, i], x[r4, i]
                a1 += a * x1
                b1 += b * x1
                c1 += c * x1
                a2 += a * x2
                b2 += b * x2
                c2 += c * x2
                a3 += a * x3
                b3 += b * x3
                c3 += c * x3
                a4 += a * x4
                b4 += b * x4
                c4 += c * x4
            out[r, o], out[r, o2], out[r, o3] = a1, b1, c1
            out[r2, o], out[r2, o2], out[r2, o3] = a2, b2, c2
            out[r3, o], out[r3, o2], out[r3, o3] = a3, b3, c3
            out[r4, o], out[r4, o2], out[r4, o3] = a4, b4, c4


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


BUCKETS, BUCKETS_PER_UNIT = 2048, 64  # of logits, by how far they are below the greatest
SORTED = 4096  # tokens of a row, at most


@compiled
def keep_front(logits, masses, limits, shares, totals):
    """Set masses [n, V] to 0 behind the last token that top-k and top-p keep, in the order of `target_probs`.

    limits int64 [n]: the most tokens of a row; shares float64 [n]: of their mass, what is kept at least; totals float64
    [n]: the mass of all tokens. Of many kept tokens none is sorted but those of the bucket with the last one.
    """
    vocab, of = logits.shape[1], logits.dtype.type
    buckets = np.empty(vocab, np.int32)
    for r in range(len(limits)):
        row, mass, greatest = logits[r], masses[r], of(-np.inf)
        for i in range(vocab):
            greatest = max(greatest, row[i])
        for i in range(vocab):
            buckets[i] = np.int32(min((greatest - row[i]) * of(BUCKETS_PER_UNIT), of(BUCKETS - 1)))
        counts, sums, front = np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS, np.float64), totals[r]
        for i in range(vocab):
            counts[buckets[i]] += 1
            sums[buckets[i]] += mass[i]
        least, last = of(-np.inf), vocab
        if limits[r] < vocab:
            least, last, front = last_of_front(row, mass, buckets, counts, sums, limits[r], np.inf)
        if shares[r] < 1.0:
            wanted = shares[r] * front
            least, last, front = last_of_front(row, mass, buckets, counts, sums, limits[r], wanted)
        for i in range(vocab):
            mass[i] = mass[i] if row[i] >= least else of(0)
        for i in range(last + 1, vocab):
            mass[i] = of(0) if row[i] == least else mass[i]


@partial(compiled, formulas={"fastmath": False, "error_model": "numpy"})  # not its caller's: sums as written
def last_of_front(logits, masses, buckets, counts, sums, limit, wanted):
    """Return logit and id of the last token that is kept, and the mass up to it: the one with which there are `limit`,
    or the mass `wanted`, or no more mass. Up to `SORTED` tokens are added up one after another, as a sort would."""
    bucket, later, rank, front = 0, 0, 0, 0.0
    for later in range(1, BUCKETS):
        if counts[later]:
            if rank + counts[bucket] >= limit or front + sums[bucket] >= wanted:
                break
            rank, front, bucket = rank + counts[bucket], front + sums[bucket], later
    first, end = bucket, bucket
    if rank + counts[bucket] + counts[later] <= SORTED:  # with one bucket more, since sums are rounded
        first, end, rank, front = 0, later, 0, 0.0
    members = np.flatnonzero((buckets >= first) & (buckets <= end) & (masses > 0))
    order = np.argsort(-logits[members], kind="mergesort")  # equal ones stay in the order of their ids
    least, last = logits.dtype.type(-np.inf), len(logits)
    for place in order:
        mass = np.float64(masses[members[place]])
        if rank and (rank >= limit or front + mass - mass >= wanted):
            break
        last = members[place]
        least, rank, front = logits[last], rank + 1, front + mass
    return least, last, front
