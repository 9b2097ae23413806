"""Kernels of a CPU for a few tokens, compiled by Numba where it is installed, each for one thread.

Decoding multiplies a few rows with every matrix, which takes as long as the matrices take to be read; what is lost
beside is the overhead of calls. So a layer is six calls of these kernels: norm and product, rotation, attention,
product and sum, norm and product, gate and product. Weights lie as they are stored, [out, in]; bfloat16 is widened in
registers, 8-bit integers are multiplied as integers.

Numba keeps what it has compiled in `__pycache__` beside this file, or in the user's cache if that is read-only. Sums
may be in another order than written; nothing else of IEEE arithmetic is relaxed, so NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

try:
    import numba
    from numba.core import cgutils
    from numba.core.cgutils import ir
    from numba.core.codegen import get_host_cpu_features
    from numba.extending import overload
except ImportError:  # a machine that only uses its GPU may lack it
    numba = None

HAS_NUMBA = numba is not None
MAX_TOKENS = 128
"""Of a pass that runs in these kernels. More rows are multiplied faster by a library of matrix products."""

GIVEN_FEATURES = numba.config.CPU_FEATURES if HAS_NUMBA else ""  # None: those of this processor; "": of a generic one
FEATURES = (get_host_cpu_features() if GIVEN_FEATURES is None else GIVEN_FEATURES).split(",")
HAS_WIDE_VECTORS = "+avx512bw" in FEATURES
# LLVM's name of the instruction that multiplies vectors of 16-bit integers and adds neighbours; "": there is none.
PAIRS_OF_PRODUCTS = "llvm.x86.avx2.pmadd.wd" if "+avx2" in FEATURES else ""
if HAS_WIDE_VECTORS:
    PAIRS_OF_PRODUCTS = "llvm.x86.avx512.pmaddw.d.512"
VECTOR_BYTES = 64 if HAS_WIDE_VECTORS else 32
OUTPUTS_OF_FOUR = 4 if HAS_WIDE_VECTORS else 3  # of a tile of four rows: as many sums as there are registers for
MOST_SUM, LEAST = 2.1e9, np.float32(1e-30)  # of 32 bits, less what rounding adds; below it a row is 0

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


def _products(x, w, out):
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


class TileBuilder:
    """Writes a tile of products for LLVM: `arrays` of Numba are x [n, I], w [O, I] and out [n, O]."""

    def __init__(self, context, b, kinds, arrays) -> None:
        self.b, self.int32, self.number = b, ir.IntType(32), ir.IntType(64)
        made = [context.make_array(kind)(context, b, array) for kind, array in zip(kinds, arrays, strict=True)]
        self.x, self.w, self.out = (one.data for one in made)
        self.of_x, self.of_w, self.of_out = (context.get_data_type(kind.dtype) for kind in kinds)
        (self.n, self.size), self.num_outputs = (
            cgutils.unpack_tuple(b, made[0].shape),
            b.extract_value(made[1].shape, 0),
        )
        self.lanes = VECTOR_BYTES * 8 // kinds[0].dtype.bitwidth
        self.is_integer = isinstance(self.of_x, ir.IntType)
        self.values = ir.VectorType(self.of_x, self.lanes)
        self.sums = ir.VectorType(self.int32, self.lanes // 2) if self.is_integer else self.values

    def place(self, first, step, index: int, end):
        """Return first + step · index, at most the last before `end`."""
        found, last = self.b.add(first, self.b.mul(step, self.number(index))), self.b.sub(end, self.number(1))
        return self.b.select(self.b.icmp_signed("<", found, last), found, last)

    def row(self, matrix, number, width):
        return self.b.gep(matrix, [self.b.mul(number, width)])

    def read(self, row, i, of):
        pointer = self.b.bitcast(self.b.gep(row, [i]), ir.VectorType(of, self.lanes).as_pointer())
        return self.b.load(pointer, align=1)

    def call(self, name: str, result, *values, **options):
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), values, **options)

    def fetch(self, row, i, ahead: int) -> None:
        """Fetch what lies `ahead` bytes behind element i into the second cache."""
        place = self.b.bitcast(self.b.gep(row, [i]), ir.IntType(8).as_pointer())
        flags = (self.int32(flag) for flag in (0, 2, 1))  # a read, into the second cache, of data
        self.call("llvm.prefetch.p0", ir.VoidType(), self.b.gep(place, [self.number(ahead)]), *flags)

    def weights(self, row, i):
        """Return weights from element i on, as wide as the values that they are multiplied with."""
        found = self.read(row, i, self.of_w)
        if self.is_integer:
            return self.b.sext(found, self.values)
        if self.of_w == self.of_x:
            return found
        wide = ir.VectorType(self.int32, self.lanes)  # of bfloat16
        return self.b.bitcast(self.b.shl(self.b.zext(found, wide), wide([16] * self.lanes)), self.values)

    def added(self, total, weights, values):
        """Return a vector of sums with the products of these."""
        if not self.is_integer:
            fused = {"flags": ("contract",)}
            return self.b.fadd(total, self.b.fmul(weights, values, **fused), **fused)
        if PAIRS_OF_PRODUCTS:
            return self.b.add(total, self.call(PAIRS_OF_PRODUCTS, self.sums, weights, values))
        for odd in range(2):
            places = ir.VectorType(self.int32, self.lanes // 2)(list(range(odd, self.lanes, 2)))
            halves = [self.b.sext(self.b.shuffle_vector(one, one, places), self.sums) for one in (weights, values)]
            total = self.b.add(total, self.b.mul(*halves))
        return total

    def sum_of(self, total):
        """Return the sum of a vector of sums."""
        if self.is_integer:
            return self.call(f"llvm.vector.reduce.add.v{total.type.count}i32", self.int32, total)
        name = f"llvm.vector.reduce.fadd.v{self.lanes}{'f32' if self.of_x == ir.FloatType() else 'f64'}"
        return self.call(name, self.of_out, self.of_out(0.0), total, fastmath=("reassoc",))


def tile(rows: int, outputs: int, ahead: int = 0) -> Callable[..., None]:
    """Return a function of kernels that sums `outputs` outputs of `rows` rows at once, in as many vectors, so that a
    weight is read once for all of these rows: f(x, w, out, r, o, apart) sets out[r + …, o + … · apart] to the products
    of whole vectors of x [n, I] and w [O, I]. Past the last row or output the last one is summed again.

    Integers, x int16 and w int8, are multiplied in pairs (pmaddwd, or vpdpwssd of VNNI); their sums wrap in 32 bits.
    `ahead`: so many bytes further on each weight is fetched into the second cache, since several rows of arithmetic
    leave the processor no room to read ahead.
    """
    if numba is None:
        return _products

    def build(context, b, signature, arguments):
        to = TileBuilder(context, b, signature.args[:3], arguments[:3])
        r, o, apart = arguments[3:]
        row_numbers = [to.place(r, to.number(1), k, to.n) for k in range(rows)]
        places = [to.place(o, apart, j, to.num_outputs) for j in range(outputs)]
        x_rows = [to.row(to.x, k, to.size) for k in row_numbers]
        w_rows = [to.row(to.w, j, to.size) for j in places]
        totals = [[cgutils.alloca_once_value(b, to.sums(None)) for _ in places] for _ in row_numbers]
        end = b.sub(to.size, b.urem(to.size, to.number(to.lanes)))
        with cgutils.for_range_slice(b, to.number(0), end, to.number(to.lanes), to.number) as (i, _):
            values = [to.read(row, i, to.of_x) for row in x_rows]
            for j, row in enumerate(w_rows):
                if ahead:
                    to.fetch(row, i, ahead)
                weights = to.weights(row, i)
                for value, of_row in zip(values, totals, strict=True):
                    b.store(to.added(b.load(of_row[j]), weights, value), of_row[j])
        for k, of_row in zip(row_numbers, totals, strict=True):
            for j, total in zip(places, of_row, strict=True):
                b.store(to.sum_of(b.load(total)), b.gep(to.row(to.out, k, to.num_outputs), [j]))
        return context.get_dummy_value()

    def summed(typing, x, w, out, r, o, apart):
        kinds = (x, w, out)
        assert all(one.layout == "C" for one in kinds), "rows without gaps"
        return numba.types.none(*kinds, *[numba.types.int64] * 3), build

    function: Callable[..., None] = numba.extending.intrinsic(summed)
    return function


tile_of_one, tile_of_two = tile(1, 4), tile(2, 4, 2048)
tile_of_four = tile(4, OUTPUTS_OF_FOUR, 2048)

if numba is not None:

    @overload(_wide, jit_options=FORMULAS, inline="always")
    def _wide_of(value):
        if value == numba.types.uint16:
            return _of_bfloat16
        return lambda value: value

    @overload(_products, jit_options=FORMULAS)
    def _products_of(x, w, out):
        if w.dtype == numba.types.int8:
            return lambda x, w, out: integer_products(x, w, out)
        return lambda x, w, out: products(x, w, out)

    @overload(_exponential, jit_options=FORMULAS, inline="always")
    def _exponential_of(x):
        if x == numba.types.float32:
            return _single_exponential
        return lambda x: math.exp(x)


@compiled
def multiply(x, w, scales, bias, adds, out):
    """Set out [n, O], or with `adds` increase it by, x [n, I] · (w · scales)ᵀ + bias.

    w [O, I] floats, bfloat16 as uint16, or int8, for which rows of float32 are rounded to 16 bits; scales and bias [O]
    or empty. No function with arrays is called in a loop, since each call passes thirty arguments for them.
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
    """Set out [n, O] to x [n, I] · wᵀ, tile after tile. The outputs of a tile lie far apart: memory is read faster in
    several streams."""
    n, num_outputs, size = x.shape[0], w.shape[0], x.shape[1]
    apart = (num_outputs - 1) // 4 + 1
    if n == 1:
        for o in range(apart):
            tile_of_one(x, w, out, 0, o, apart)
    elif n == 2:
        for o in range(apart):
            tile_of_two(x, w, out, 0, o, apart)
    else:
        apart = (num_outputs - 1) // OUTPUTS_OF_FOUR + 1
        for o in range(apart):
            for r in range(0, n, 4):
                tile_of_four(x, w, out, r, o, apart)
    for i in range(size - size % (VECTOR_BYTES // x.itemsize), size):  # what fills no vector
        for r in range(n):
            for o in range(num_outputs):
                out[r, o] += out.dtype.type(x[r, i]) * out.dtype.type(_wide(w[o, i]))


@compiled
def integer_products(x, w, out):
    """Set out float32 [n, O] to x float32 [n, I] · wᵀ of int8, each row of x rounded to 16 bits with a step of its own.

    Sums are exact, so that a row does not depend on the rows beside it. A step is so large that no sum leaves 32 bits:
    it is at most the product of both norms. A row that is not finite becomes NaN.
    """
    n, size = x.shape
    rows, steps = np.empty((n, size), np.int16), np.empty(n, np.float32)
    for r in range(n):
        greatest, squares = np.float32(0), np.float32(0)
        for i in range(size):
            greatest = max(greatest, abs(x[r, i]))
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
    sums = np.empty(out.shape, np.int32)
    products(rows, w, sums)
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
