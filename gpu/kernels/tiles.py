"""Tiles of matrix products of a CPU, written for LLVM: a few rows with a few outputs, of floats and of integers.

Weights of floats lie as they are stored, [out, in], and a vector of sums becomes one number at the end. Integers are
packed (`packed`), so that each place of a vector sums an output of its own, and nothing is left to add up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

try:
    import numba
    from numba.core import cgutils
    from numba.core.cgutils import ir
    from numba.core.codegen import get_host_cpu_features
except ImportError:  # a machine that only uses its GPU may lack it
    numba = None

HAS_NUMBA = numba is not None
GIVEN_FEATURES = numba.config.CPU_FEATURES if HAS_NUMBA else ""  # None: those of this processor; "": of a generic one
FEATURES = (get_host_cpu_features() if GIVEN_FEATURES is None else GIVEN_FEATURES).split(",")
HAS_WIDE_VECTORS = "+avx512bw" in FEATURES
# LLVM's name of the instruction that multiplies vectors of 16-bit integers and adds neighbours; "": there is none.
PAIRS_OF_PRODUCTS = "llvm.x86.avx2.pmadd.wd" if "+avx2" in FEATURES else ""
if HAS_WIDE_VECTORS:
    PAIRS_OF_PRODUCTS = "llvm.x86.avx512.pmaddw.d.512"
VECTOR_BYTES = 64 if HAS_WIDE_VECTORS else 32
OUTPUTS_OF_TILE = 4 if HAS_WIDE_VECTORS else 3  # as many sums of four rows as there are registers for
OUTPUTS_OF_BLOCK = VECTOR_BYTES // 4  # of packed integers


def packed(integers: np.ndarray) -> np.ndarray:
    """Return int8 [O, I] as `PackedTile` reads it: blocks of outputs, [blocks, pairs, outputs of a block, 2], in each
    of them one pair of inputs after another. What fills the last block, and pairs up to an even number, is 0."""
    num_outputs, size = integers.shape
    width = OUTPUTS_OF_BLOCK
    blocks = np.empty((-(-num_outputs // width), -(-size // 4) * 2, width, 2), np.int8)
    for number, block in enumerate(blocks):
        rows = np.zeros((width, 2 * len(block)), np.int8)
        part = integers[number * width : (number + 1) * width]
        rows[: len(part), :size] = part
        block[:] = rows.reshape(width, -1, 2).swapaxes(0, 1)
    return blocks


def unpacked(blocks: np.ndarray, num_outputs: int, size: int) -> np.ndarray:
    """Return the integers [num_outputs, size] that were `packed`."""
    rows = blocks.swapaxes(1, 2).reshape(len(blocks) * OUTPUTS_OF_BLOCK, -1)
    return rows[:num_outputs, :size]


class FloatTile:
    """Sums of x [n, I] · w [O, I] into out [n, O], all of one dtype: whole vectors of inputs alone, so that the caller
    adds what fills none. Every vector of sums belongs to an output."""

    def __init__(self, context, b, kinds, arrays) -> None:
        self.b, self.int32, self.number = b, ir.IntType(32), ir.IntType(64)
        made = [context.make_array(kind)(context, b, array) for kind, array in zip(kinds, arrays, strict=True)]
        self.x, self.w, self.out = (one.data for one in made)
        self.of_x, self.of_w, self.of_out = (context.get_data_type(kind.dtype) for kind in kinds)
        self.num_rows, self.size = cgutils.unpack_tuple(b, made[0].shape)
        self.num_columns = b.extract_value(made[1].shape, 0)
        self.out_width = b.extract_value(made[2].shape, 1)
        self.lanes = VECTOR_BYTES * 8 // kinds[0].dtype.bitwidth
        self.sums, self.step = ir.VectorType(self.of_x, self.lanes), self.lanes

    def places(self, first, step, count: int, end):
        """Return first + step · k for each of `count` k, at most the last before `end`."""
        found, last = [], self.b.sub(end, self.number(1))
        for k in range(count):
            one = self.b.add(first, self.b.mul(step, self.number(k)))
            found.append(self.b.select(self.b.icmp_signed("<", one, last), one, last))
        return found

    def element(self, matrix, row, width, column=None):
        place = self.b.mul(row, width)
        return self.b.gep(matrix, [place if column is None else self.b.add(place, column)])

    def w_row(self, column):
        """Return a pointer to the weights of an output, or of a block."""
        return self.element(self.w, column, self.size)

    def read(self, row, i, kind):
        return self.b.load(self.b.bitcast(self.b.gep(row, [i]), kind.as_pointer()), align=1)

    def call(self, name: str, result, *values, **options):
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), values, **options)

    def fetch(self, row, i, ahead: int) -> None:
        """Fetch what lies `ahead` bytes behind element i into the second cache."""
        place = self.b.bitcast(self.b.gep(row, [i]), ir.IntType(8).as_pointer())
        flags = (self.int32(flag) for flag in (0, 2, 1))  # a read, into the second cache, of data
        self.call("llvm.prefetch.p0", ir.VoidType(), self.b.gep(place, [self.number(ahead)]), *flags)

    def end(self):
        return self.b.sub(self.size, self.b.urem(self.size, self.number(self.lanes)))

    def add_step(self, i, x_rows, w_rows, totals, ahead: int) -> None:
        """Add the products of a vector of inputs from i on to totals[row][output]."""
        values = [self.read(row, i, self.sums) for row in x_rows]
        for j, row in enumerate(w_rows):
            if ahead:
                self.fetch(row, i, ahead)
            weights = self.read(row, i, self.sums)
            for value, of_row in zip(values, totals, strict=True):
                self.b.store(self.added(self.b.load(of_row[j]), weights, value), of_row[j])

    def added(self, total, weights, values):
        """Return a vector of sums with the products of these."""
        fused = {"flags": ("contract",)}
        return self.b.fadd(total, self.b.fmul(weights, values, **fused), **fused)

    def keep(self, total, row, column) -> None:
        """Store a vector of sums."""
        name = f"llvm.vector.reduce.fadd.v{self.lanes}{'f32' if self.of_x == ir.FloatType() else 'f64'}"
        total = self.call(name, self.of_out, self.of_out(0.0), total, fastmath=("reassoc",))
        self.b.store(total, self.element(self.out, row, self.out_width, column))


class PackedTile(FloatTile):
    """Sums of rows of 16-bit integers with `packed` weights into out int32 [n, outputs of all blocks], in which a
    vector holds the sums of a block; they wrap in 32 bits. x int32 [n, pairs] has two integers in each number.
    Integers are multiplied in pairs (pmaddwd, or vpdpwssd of VNNI)."""

    def __init__(self, context, b, kinds, arrays) -> None:
        super().__init__(context, b, kinds, arrays)
        self.step = 2  # pairs, whose weights are a line of the cache where vectors have 512 bits
        self.sums = ir.VectorType(self.int32, OUTPUTS_OF_BLOCK)
        self.pairs = ir.VectorType(ir.IntType(16), 2 * OUTPUTS_OF_BLOCK)
        self.stored = ir.VectorType(self.of_w, 2 * OUTPUTS_OF_BLOCK)

    def w_row(self, column):
        return self.element(self.w, column, self.b.mul(self.size, self.number(2 * OUTPUTS_OF_BLOCK)))

    def end(self):
        return self.size

    def add_step(self, i, x_rows, w_rows, totals, ahead: int) -> None:
        for part in range(self.step):
            place = self.b.add(i, self.number(part))
            start = self.b.mul(place, self.number(2 * OUTPUTS_OF_BLOCK))
            values = [self.spread(self.b.load(self.b.gep(row, [place]))) for row in x_rows]
            for j, row in enumerate(w_rows):
                if ahead and not part:
                    self.fetch(row, start, ahead)
                weights = self.b.sext(self.read(row, start, self.stored), self.pairs)
                for value, of_row in zip(values, totals, strict=True):
                    self.b.store(self.added(self.b.load(of_row[j]), weights, value), of_row[j])

    def spread(self, pair):
        """Return a vector of as many copies of a pair as a block has outputs."""
        one = self.b.insert_element(self.sums(ir.Undefined), pair, self.int32(0))
        places = ir.VectorType(self.int32, OUTPUTS_OF_BLOCK)([0] * OUTPUTS_OF_BLOCK)
        return self.b.bitcast(self.b.shuffle_vector(one, one, places), self.pairs)

    def added(self, total, weights, values):
        if PAIRS_OF_PRODUCTS:
            return self.b.add(total, self.call(PAIRS_OF_PRODUCTS, self.sums, weights, values))
        for odd in range(2):
            places = ir.VectorType(self.int32, OUTPUTS_OF_BLOCK)(list(range(odd, 2 * OUTPUTS_OF_BLOCK, 2)))
            halves = [self.b.sext(self.b.shuffle_vector(one, one, places), self.sums) for one in (weights, values)]
            total = self.b.add(total, self.b.mul(*halves))
        return total

    def keep(self, total, row, column) -> None:
        column = self.b.mul(column, self.number(OUTPUTS_OF_BLOCK))
        place = self.element(self.out, row, self.out_width, column)
        self.b.store(total, self.b.bitcast(place, self.sums.as_pointer()), align=4)


def _summed(x, w, out, r, c, apart):
    raise AssertionError("only called from kernels")


def tile(rows: int, ahead: int = 0) -> Callable[..., None]:
    """Return a function of kernels that sums `OUTPUTS_OF_TILE` columns, which are outputs or blocks of them, of `rows`
    rows at once, each in a vector, so that a weight is read once for all of these rows: f(x, w, out, r, c, apart) sets
    the sums of rows r + … and columns c + … · apart. Past the last row or column the last one is summed again.

    `ahead`: so many bytes further on each weight is fetched into the second cache, since several rows of arithmetic
    leave the processor no room to read ahead.
    """
    if numba is None:
        return _summed

    def build(context, b, signature, arguments):
        kind = PackedTile if signature.args[1].ndim == 4 else FloatTile
        to = kind(context, b, signature.args[:3], arguments[:3])
        r, c, apart = arguments[3:]
        numbers = to.places(r, to.number(1), rows, to.num_rows)
        columns = to.places(c, apart, OUTPUTS_OF_TILE, to.num_columns)
        x_rows, w_rows = [to.element(to.x, k, to.size) for k in numbers], [to.w_row(j) for j in columns]
        totals = [[cgutils.alloca_once_value(b, to.sums(None)) for _ in columns] for _ in numbers]
        with cgutils.for_range_slice(b, to.number(0), to.end(), to.number(to.step), to.number) as (i, _):
            to.add_step(i, x_rows, w_rows, totals, ahead)
        for k, of_row in zip(numbers, totals, strict=True):
            for j, total in zip(columns, of_row, strict=True):
                to.keep(b.load(total), k, j)
        return context.get_dummy_value()

    def summed(typing, x, w, out, r, c, apart):
        kinds = (x, w, out)
        assert all(one.layout == "C" for one in kinds), "rows without gaps"
        return numba.types.none(*kinds, *[numba.types.int64] * 3), build

    function: Callable[..., None] = numba.extending.intrinsic(summed)
    return function
