"""Attention of a single row on a CPU whose keys lie one behind the other in the pool, the new tokens' among them: read where they are.

A round's cost at batch 1 is its number of tensor calls and the memory they touch. Here nothing is gathered, copied or padded: two products
and a softmax over views of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

RUN_DTYPES = (torch.float32, torch.float64)
"""Narrower ones would round the scores between the products."""


@dataclass(frozen=True, slots=True)
class KeyRun:
    """`length` pool slots from `begin` on; `bias` [queries, length] or [], 0 where a query sees a key and −inf where it does not."""

    begin: int
    length: int
    bias: Tensor
    beta: int  # 0: everything is seen, and the bias is not read


def run_of(
    table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    ancestor_bits: Tensor,
    new_slots: Tensor,
    group: int,
    dtype: torch.dtype,
) -> KeyRun | None:
    """Prefix and new tokens of `verify_attention` as a run, where `new_slots` [nd] are the new tokens'; None if they are none."""
    if rows.shape[0] != 1 or rows.device.type != "cpu" or dtype not in RUN_DTYPES:
        return None
    new, bits = new_slots.numpy(), ancestor_bits.numpy()[0]
    length = int(prefix_lens)
    nodes = bits.shape[0]
    if new.shape[0] != nodes:
        return None
    prefix = table.numpy()[int(rows), :length]
    begin = int(new[0]) - length
    if not (_ascends(new, begin + length) and _ascends(prefix, begin)):
        return None
    if nodes == 1:
        return KeyRun(begin, length + 1, *_everything(dtype)) if bits[0] else None
    own = _own_bias(bits.tobytes(), group, dtype)
    if own is None:
        return None
    return KeyRun(begin, length + nodes, F.pad(own, (length, 0)), 1)


def run_of_view(
    table: Tensor, rows: Tensor, bases: Tensor, lens: Tensor, group: int, dtype: torch.dtype
) -> KeyRun | None:
    """What a `KVView` without tails shows to queries of one row, each one key more than the query before; None if it is no run."""
    m = rows.shape[0]
    if bases is not lens or rows.device.type != "cpu" or dtype not in RUN_DTYPES or not 0 < m <= 64:
        return None
    owners, ends = rows.numpy(), lens.numpy()
    first, length = int(ends[0]), int(ends[-1])
    if first < 1 or (m > 1 and not ((owners == owners[0]).all() and _ascends(ends, first))):
        return None
    slots = table.numpy()[owners[0], :length]
    begin = int(slots[0])
    if not _ascends(slots, begin):
        return None
    if m == 1:
        return KeyRun(begin, length, *_everything(dtype))
    return KeyRun(begin, length, F.pad(_causal_bias(m, group, dtype), (first - 1, 0)), 1)


def _ascends(slots: np.ndarray, begin: int) -> bool:
    """Whether slots are begin, begin + 1, …"""
    return not slots.size or (slots[0] == begin and bool((slots[1:] - slots[:-1] == 1).all()))


@lru_cache(maxsize=8)
def _everything(dtype: torch.dtype) -> tuple[Tensor, int]:
    return torch.zeros((), dtype=dtype), 0


@lru_cache(maxsize=64)
def _causal_bias(m: int, group: int, dtype: torch.dtype) -> Tensor:
    return torch.full((m, m), -torch.inf, dtype=dtype).triu_(1).repeat_interleave(group, 0)


@lru_cache(maxsize=64)
def _own_bias(packed: bytes, group: int, dtype: torch.dtype) -> Tensor | None:
    """The bias [nd · group, nd] among the new tokens with these ancestor bits; None if a node is padding, which sees nothing at all."""
    bits = np.frombuffer(packed, np.int64)
    if not bits.all():
        return None
    sees = (bits[:, None] >> np.arange(bits.size)) & 1
    bias = torch.from_numpy(np.where(sees, 0.0, -np.inf).repeat(group, 0))
    return bias.to(dtype)


def attend_run(q: Tensor, k_pool: Tensor, v_pool: Tensor, run: KeyRun, scale: float) -> Tensor:
    """q [m, Hq, d] over the run's keys in pools [slots, Hk, d] → [m, Hq, d]."""
    _, heads, d = k_pool.shape
    slot, head, channel = k_pool.stride()
    keys = k_pool.as_strided((heads, d, run.length), (head, channel, slot), k_pool.storage_offset() + run.begin * slot)
    slot, head, channel = v_pool.stride()
    values = v_pool.as_strided(
        (heads, run.length, d), (head, slot, channel), v_pool.storage_offset() + run.begin * slot
    )
    if q.shape[0] == 1:
        scores = torch.baddbmm(run.bias, q.view(heads, -1, d), keys, beta=run.beta, alpha=scale)
        return torch.bmm(scores.softmax(-1), values).view(q.shape)
    group = q.shape[1] // heads
    # The query heads that share a key head, and the row's queries, are the rows of one matrix.
    queries = q.view(-1, heads, group, d).transpose(0, 1).reshape(heads, -1, d)
    scores = torch.baddbmm(run.bias, queries, keys, beta=run.beta, alpha=scale)
    out = torch.bmm(scores.softmax(-1), values)
    return out.view(heads, -1, group, d).transpose(0, 1).reshape(q.shape)
