"""The places that a forward pass of one row reads and writes, as arrays for `HostOps`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..batch.paged import PagedAttention
from .port import DecodeBatch, ExtendBatch, VerifyBatch

Slots = slice | np.ndarray
"""Places in a pool: neighbours as a slice, which is read where it lies, others int64 [n]."""


@dataclass(frozen=True, slots=True)
class HostKeys:
    """n new tokens of one row, behind their prefix.

    `read` are the pool slots of all keys, or with `own` those of the prefix, behind which the new tokens' own keys follow.
    `sees` bool [n, n]: which new tokens a new token sees; None: all (n is 1). Every token sees the prefix, `length` tokens, unless a
    window hides its begin.
    """

    read: Slots
    own: bool
    write: Slots
    positions: np.ndarray
    sees: np.ndarray | None
    length: int

    def hidden_by(self, window: int, group: int, dtype: str) -> np.ndarray | None:
        """Return what a window adds to the scores [n · group, keys], 0 or −inf; None where it hides nothing."""
        n = 1 if self.sees is None else len(self.sees)
        if not window or self.length + n <= window:
            return None
        return _outside(window, self.length, b"\1" if self.sees is None else self.sees.tobytes(), group, dtype)


class HostPass(NamedTuple):
    """One pass: its keys, and the keys' and values' pools of every layer, [slots, Hk, d] each."""

    keys: HostKeys
    pools: tuple[tuple[np.ndarray, np.ndarray], ...]


def host_pass_of(attention: PagedAttention) -> HostPass | None:
    """Return the pass if it is one of a single row over pools that NumPy can read, else None."""
    pools = attention.pool.on_host
    if pools is None or isinstance(attention.batch, ExtendBatch):
        return None
    keys_of = view_keys if isinstance(attention.batch, DecodeBatch) else window_keys
    keys = keys_of(attention.batch, attention.positions, attention.slots)
    return None if keys is None else HostPass(keys, pools)


def window_keys(batch: VerifyBatch, positions: Tensor, slots: Tensor) -> HostKeys | None:
    """Return the keys of new tokens behind a row's prefix; None if this is not one row, or a token sees nothing."""
    table, rows, prefix_lens = batch.table, batch.rows, batch.prefix_lens
    if rows.shape[0] != 1:
        return None
    new, bits = slots.numpy(), batch.ancestor_bits.numpy()[0]
    sees, none_blind = _visible(bits.tobytes())
    if not none_blind:
        return None
    length = int(prefix_lens)
    prefix = table.numpy()[int(rows), :length]
    sees = sees if bits.size > 1 else None
    begin = int(new[0]) - length
    if _ascends(new, begin + length) and _ascends(prefix, begin):
        everything = slice(begin, begin + length + new.size)
        return HostKeys(everything, False, slice(begin + length, everything.stop), positions.numpy(), sees, length)
    return HostKeys(_compact(prefix), True, _compact(new), positions.numpy(), sees, length)


def view_keys(batch: DecodeBatch, positions: Tensor, slots: Tensor) -> HostKeys | None:
    """Return the keys of queries of one row without tails, each of which sees one key more than the one before; None for all others."""
    table, rows, lens = batch.table, batch.rows, batch.lens
    m = rows.shape[0]
    if batch.bases is not lens or not 0 < m <= 64:
        return None
    owners, ends = rows.numpy(), lens.numpy()
    if m > 1 and not ((owners == owners[0]).all() and _ascends(ends, int(ends[0]))):
        return None
    if ends[0] < 1:
        return None
    read = _compact(table.numpy()[owners[0], : int(ends[-1])])
    sees = None if m == 1 else _visible(_causal(m))[0]
    return HostKeys(read, False, _compact(slots.numpy()), positions.numpy(), sees, int(ends[0]) - 1)


def _compact(slots: np.ndarray) -> Slots:
    if not slots.size:
        return slice(0, 0)
    begin = int(slots[0])
    return slice(begin, begin + slots.size) if _ascends(slots, begin) else slots


def _ascends(slots: np.ndarray, begin: int) -> bool:
    """Return whether slots are begin, begin + 1, …: as bytes, which are compared in a quarter of the time."""
    end = begin + slots.size
    return begin >= 0 and slots.tobytes() == _numbers(end.bit_length(), slots.dtype)[begin:end].tobytes()


@lru_cache(maxsize=64)
def _numbers(bits: int, dtype: np.dtype) -> np.ndarray:
    return np.arange(1 << bits, dtype=dtype)


@lru_cache(maxsize=16)
def _outside(window: int, length: int, sees: bytes, group: int, dtype: str) -> np.ndarray:
    visible = np.frombuffer(sees, bool)
    n = int(visible.size**0.5)
    # A new token stands behind the prefix by the number of tokens between them that it sees.
    places = length - 1 + visible.reshape(n, n).sum(1)
    distance = places[:, None] - np.concatenate((np.arange(length), places))
    return np.where(distance < window, 0.0, -np.inf).repeat(group, 0).astype(dtype)


@lru_cache(maxsize=64)
def _causal(m: int) -> bytes:
    return np.array([(2 << i) - 1 for i in range(m)], np.uint64).tobytes()


@lru_cache(maxsize=256)
def _visible(packed: bytes) -> tuple[np.ndarray, bool]:
    """Return ancestor bits uint64 [n] as bool [n, n], and whether every token sees one."""
    bits = np.frombuffer(packed, np.uint64)
    sees = ((bits[:, None] >> np.arange(bits.size, dtype=np.uint64)) & np.uint64(1)).astype(bool)
    return sees, bool(sees.any(axis=1).all())
