"""What the attention kernels share: the online softmax over one block of keys, and how long rows are cut into parts.

The queries of a tile are the rows of one matrix: the row's new tokens times the query heads that share a key head. So
every key is loaded once for all of them. A long row is cut into parts that run side by side. Each part leaves its own
softmax and the base-2 logarithm of its sum (flash-decoding, Dao et al., 2023). An atomic counter tells the program that
stores a row's last part. It joins all of them in the order of the keys, so the result does not depend on which program
it is. The parts of a tall tile would be much for one program: a second kernel joins these. All sums are float32.

Which parts there are follows from each row's own length, which only the device knows, so the work is a list that
programs share:

    lengths    700  90  0  3000        parts of 1024 keys or more, 8 at most
    parts        1   1  1     3
    items        0   1  2  3 4 5       program p of n takes items p, p + n, p + 2n, …
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ...types.attention import Softmax
from ..jit import cdiv, jit, next_power_of_2, tl
from .e4m3 import from_e4m3_bytes

LOG2_E = 1.4426950408889634
MAX_PARTS = 128
PARTS_BYTES = 128 << 20  # at most, of one batch's parts
LISTED_ROWS = 256  # of a work list; more are rounded up to a power of two, each of which is compiled
# of the 200 registers or so that a verify kernel takes: one's loads run behind the other's sums
PROGRAMS_PER_PROCESSOR = 2
ADA, HOPPER = 89, 90
WIDE_HEAD = 256  # channels; the values of wider heads are summed in halves


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What the host must know of a GPU to choose sizes."""

    processors: int  # streaming multiprocessors
    capability: int  # ten times the major number, and the minor one; 0 of a GPU that is not NVIDIA's
    shared_bytes: int  # that a block may have

    @property
    def has_wide_products(self) -> bool:
        """Whether one instruction multiplies 64 rows (`wgmma`, `tcgen05`). Hopper and the Blackwell of data centres
        have it, with the shared memory that its operands take; cards for desks multiply as Ampere does."""
        return self.capability >= HOPPER and self.shared_bytes >= 200 << 10

    @property
    def converts(self) -> bool:
        """Whether an instruction reads 8-bit floats."""
        return self.capability >= ADA


INTERPRETED = DeviceTraits(4, HOPPER, 227 << 10)  # on a CPU: a Hopper's sizes with few processors
assumed_traits: ContextVar[DeviceTraits] = ContextVar("assumed_traits", default=INTERPRETED)  # where there is no GPU


def device_of(device: torch.device) -> DeviceTraits:
    """Return the GPU behind a torch device, or the one that is assumed for it."""
    return _traits_of(device) if device.type == "cuda" else assumed_traits.get()


@lru_cache(maxsize=16)
def _traits_of(device: torch.device) -> DeviceTraits:
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor if torch.version.hip is None else 0
    # AMD's have no more than the usual.
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return DeviceTraits(properties.multi_processor_count, capability, shared_bytes)


@dataclass(frozen=True, slots=True)
class Channels:
    """How the channels of a head are divided: of wide heads two programs compute the same scores, and each sums half of
    the values' channels, because sums of all would not fit the registers."""

    dim: int  # of keys
    block: int  # those that are multiplied first, padded
    rest: int  # behind these, padded: latent keys have 512 and 64
    halves: int
    skipped: int  # of each half, which the values lack (`Softmax.key_only`)

    @classmethod
    def of(cls, d: int, key_only: int = 0) -> Channels:
        if d <= WIDE_HEAD:
            return cls(d, max(16, next_power_of_2(d)), 0, 1, 0)
        block = next_power_of_2(d + 1) // 2
        rest = 0 if block == d else max(16, next_power_of_2(d - block))
        return cls(d, block, rest, 2, key_only)

    @property
    def value_dim(self) -> int:
        """Channels that a program sums."""
        return self.dim // self.halves - self.skipped

    def constants(self) -> dict[str, int]:
        """Return the kernels' constants."""
        values = {"HALVES": self.halves, "SKIPPED": self.skipped, "BLOCK_V": max(16, next_power_of_2(self.value_dim))}
        return {"HEAD_DIM": self.dim, "BLOCK_D": self.block, "REST": self.rest, **values}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of an attention kernel's blocks, chosen by the host from shapes alone."""

    block_m: int  # query rows, padded; 64 and more use Hopper's wide matrix instructions
    block_n: int  # keys
    channels: Channels
    num_warps: int
    num_stages: int
    converts: bool  # 8-bit floats by an instruction

    def constants(self) -> dict[str, int]:
        """Return the size as the kernels' constants."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "CONVERTS": self.converts,
            **self.channels.constants(),
        }

    def options(self) -> dict[str, int]:
        """Return the size as a launch's options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def reading_tiles(
    num_rows: int,
    channels: Channels,
    dtype: torch.dtype,
    device: DeviceTraits,
    group: int = 1,
    has_bytes: bool = False,
) -> Tiles:
    """Return the blocks for decode and verify with `group` query heads per key head, which are bound by reading the
    pool; `has_bytes`: one of bytes.

    The pipeline has five stages because a key's address is itself loaded, from the table. With five, two blocks of keys
    are on their way at any time. With three or four there is one, and its latency shows.
    """
    # Without wide products a 64-row tile does not fit the registers. In float32, where no tensor core serves, beside
    # wide heads of bytes, and on desktop Blackwell beside any wide heads, 16 rows are what fits.
    d, wide = channels.dim, dtype.itemsize > 2
    wide_bytes = has_bytes and d > 128
    takes_more = wide_bytes or d > WIDE_HEAD or (d > 128 and device.capability > HOPPER)
    few_rows = wide or (takes_more and not device.has_wide_products)
    most_rows = 16 if few_rows else 64 if device.has_wide_products else 32
    block_m = min(most_rows, max(16, next_power_of_2(num_rows)))
    if d > WIDE_HEAD and block_m > 16:
        block_m = 64  # whose queries stay in shared memory; 32 rows spill
    # Four warps spill a tile of 32 rows, and one of 64 whose heads are wide, whose rows are divided by no power of two,
    # or behind Hopper.
    is_large = block_m == 64 and (d > 128 or group != next_power_of_2(group) or device.capability > HOPPER)
    num_warps = 8 if wide or block_m == 32 or is_large or d > WIDE_HEAD else 4
    num_stages = 2 if wide else 5 if d <= WIDE_HEAD else 3
    few_keys = wide_bytes or (d > WIDE_HEAD and device.capability != HOPPER)
    block_n = 16 if few_keys else _keys(d, wide)
    return Tiles(block_m, block_n, channels, num_warps, num_stages, device.converts)


def computing_tiles(
    num_rows: int, channels: Channels, dtype: torch.dtype, device: DeviceTraits, has_bytes: bool = False
) -> Tiles:
    """Choose blocks for prefill, which is bound by arithmetic: a tall tile reads the keys less often. `has_bytes`: keys
    and values are bytes."""
    d, wide = channels.dim, dtype.itemsize > 2
    if d > WIDE_HEAD:
        # With the queries of a tile, three stages of latent keys are more shared memory than there is.
        return replace(reading_tiles(num_rows, channels, dtype, device, 1, has_bytes), num_stages=2)
    tall = device.has_wide_products and d <= 128 and not wide
    # Three stages of wide heads are more shared memory than GPUs without wide products have.
    few_stages = wide or (d > 128 and not device.has_wide_products)
    few_rows = wide or (has_bytes and few_stages)
    block_m = min(128 if tall else 32 if few_rows else 64, max(16, next_power_of_2(num_rows)))
    # While bytes are converted, four warps spill a tile of 32 rows of wide heads, and one of 16 rows of others.
    needs_more = has_bytes and (block_m == 16 if d <= 128 else block_m > 16)
    num_warps = 8 if wide or block_m == 128 or (block_m == 64 and not tall) or needs_more else 4
    return Tiles(block_m, _keys(d, wide), channels, num_warps, 2 if few_stages else 3, device.converts)


def _keys(d: int, wide: bool) -> int:
    """Return the keys of a block."""
    return 16 if wide else 32 if d > 128 else 64


@dataclass(frozen=True, slots=True)
class KeyCut:
    """How the keys of a batch's rows are cut into parts, and how many programs share these for each key head and
    block of queries."""

    least: int  # keys of a part
    most: int  # parts of a row
    programs: int

    @classmethod
    def choose(
        cls, planned_rows: int, num_rows: int, max_len: int, tiles: int, size: Tiles, row_bytes: int, processors: int
    ) -> KeyCut:
        """Choose for `planned_rows` of at most `max_len` keys, each with `tiles` pairs of a key head and a block of
        queries.

        A part's result takes `row_bytes` per row. It is written and read again: 8 bytes for every channel of a query,
        against 4 of a key in 16 bits. Rows that fill the device by themselves are cut where that is a 32nd of the keys'
        bytes, fewer rows into shorter parts. A row that runs alone fills the device.
        """
        programs = max(1, PROGRAMS_PER_PROCESSOR * processors // tiles)
        keys = 64 * size.block_m * min(planned_rows, programs) // programs
        least = max(1, cdiv(keys, size.block_n)) * size.block_n
        room = PARTS_BYTES // (max(planned_rows, 1) * row_bytes)
        most = max(1, min(cdiv(max_len, least), programs, room, MAX_PARTS))
        return cls(least, most, num_rows if most == 1 else min(programs, num_rows * most))

    def listed(self, num_rows: int) -> int:
        """Return how many rows the kernels' list has room for."""
        return max(LISTED_ROWS, next_power_of_2(num_rows)) if self.most > 1 else 1


@jit
def as_kept(x, DTYPE: tl.constexpr, CONVERTS: tl.constexpr):
    """Return keys or values as they are, or of bytes the E4M3 numbers, in DTYPE. CONVERTS: there is an instruction."""
    if x.dtype == tl.uint8:
        if CONVERTS:
            x = x.to(tl.float8e4nv, bitcast=True).to(DTYPE)
        else:
            # What is no number must not be taken for one.
            x = tl.where((x & 0x7F) == 0x7F, float("nan"), from_e4m3_bytes(x)).to(DTYPE)
    return x


@jit
def load_queries(rows, live, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr):
    """Return queries that begin at `rows` [M]: their first BLOCK_D channels, and the REST behind these (of 0 any)."""
    channel = tl.arange(0, BLOCK_D)
    first = tl.load(rows[:, None] + channel[None, :], mask=live[:, None] & (channel < HEAD_DIM)[None, :], other=0.0)
    rest = first
    if REST > 0:
        channel = BLOCK_D + tl.arange(0, REST)
        rest = tl.load(rows[:, None] + channel[None, :], mask=live[:, None] & (channel < HEAD_DIM)[None, :], other=0.0)
    return first, rest


@jit
def attend_keys(
    q,
    q_rest,
    keys,
    values,
    half,
    loaded,
    visible,
    acc,
    peak,
    total,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    HALVES: tl.constexpr,
    SKIPPED: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CONVERTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Take one block of N keys into the running softmax: acc [M, V], peak and total [M], all float32, logits in base 2.

    keys and values [N] point at the first channels, of bytes if they are E4M3 numbers; `loaded` [N] may be read,
    `visible` [M, N] is what each query sees of it. Of the values the `half` of the program is summed. SOFTCAP is that
    of logits in base 2; 0 for none.
    """
    channel, value = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    mask = loaded[:, None] & (channel < HEAD_DIM)[None, :]
    k = as_kept(tl.load(keys[:, None] + channel[None, :], mask=mask, other=0), q.dtype, CONVERTS)
    values += half * (HEAD_DIM // HALVES) + SKIPPED
    mask = loaded[:, None] & (value < HEAD_DIM // HALVES - SKIPPED)[None, :]
    v = as_kept(tl.load(values[:, None] + value[None, :], mask=mask, other=0), q.dtype, CONVERTS)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if REST > 0:
        channel = BLOCK_D + tl.arange(0, REST)
        mask = loaded[:, None] & (channel < HEAD_DIM)[None, :]
        k_rest = as_kept(tl.load(keys[:, None] + channel[None, :], mask=mask, other=0), q.dtype, CONVERTS)
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
    scores *= scale_log2
    if SOFTCAP > 0:
        # tanh(x) = 1 − 2 / (e^2x + 1), which an overflow to infinity leaves right.
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634 / SOFTCAP)) + 1.0))
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A query that has seen nothing yet keeps a peak of −inf; −inf − (−inf) would be NaN.
    reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(peak - reference)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, total * shrink + tl.sum(weights, 1)


@jit
def part_of(keys, least, most, BLOCK_N: tl.constexpr):
    """Return the keys of each part of a row of `keys`:
    whole blocks, at least `least`, and so many that `most` parts hold the row."""
    return tl.maximum(least, tl.cdiv(tl.cdiv(keys, BLOCK_N), most) * BLOCK_N)


@jit
def parts_of(keys, least, most, BLOCK_N: tl.constexpr):
    """Count the parts of a row of `keys`; one of a row without any."""
    return tl.maximum(tl.cdiv(keys, part_of(keys, least, most, BLOCK_N)), 1)


@jit
def ends_of(lens, num_rows, least, most, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """Count the items up to and with those of each row, int32 [ROWS]:
    its parts, of which rows behind the last have none."""
    row = tl.arange(0, ROWS)
    keys = tl.load(lens + row, mask=row < num_rows, other=0).to(tl.int32)
    if WINDOW:
        keys = tl.minimum(keys, WINDOW)
    return tl.cumsum(tl.where(row < num_rows, parts_of(keys, least, most, BLOCK_N), 0), 0)


@jit
def row_and_part(ends, item):
    """Return the row of an item of the list, and the number of its part."""
    is_before = ends <= item
    return tl.sum(is_before.to(tl.int32), 0), item - tl.max(tl.where(is_before, ends, 0), 0)


@jit
def begin_softmax(sinks, head, live, part, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, SINKS: tl.constexpr):
    """Return acc, peak and total of a tile before its first key.
    The first part begins with the heads' sinks, where there are any."""
    acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if SINKS:  # noqa: SIM102 - known when the kernel is compiled, the other when it runs
        if part == 0:
            peak = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
    return acc, peak, total


def softmax_constants(softmax: Softmax) -> dict[str, int | float | bool]:
    """Return the kernels' constants of a softmax."""
    return {"WINDOW": softmax.window, "SOFTCAP": softmax.softcap * LOG2_E, "SINKS": softmax.sinks is not None}
