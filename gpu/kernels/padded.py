"""Pads a ragged batch for the torch versions of kernels: each row to the bound that the host knows, with positions past
its end masked.

Padding reads slot 0, whose content is harmless as long as it is finite: a masked key gets weight 0, and 0 · NaN would
be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types.attention import Softmax

VERSION = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class PaddedKeys:
    """Which keys the queries of each row read."""

    slots: Tensor  # int32 [bs · max_len], pool slots of the prefix, 0 past its end
    bias: Tensor  # [bs, 1, queries, keys] in the queries' dtype: 0 where a query sees a key, −inf where it does not
    begin: int | None = None  # the first slot of a batch of one row with consecutive slots, which are read in place


class LastValue:
    """Keeps the value made last, and returns it again while its inputs are the same, unchanged tensors.

    The layers of a forward pass call with the same arguments, and the result does not depend on the layer. A change of
    a tensor's content is noticed by its version counter, which every in-place operation of torch raises. Tensors made
    in inference mode have none: nothing is kept for them.
    """

    __slots__ = ("_options", "_tensors", "_value", "_versions")

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._options: tuple[Any, ...] = ()
        self._value: Any = None

    def of(self, make: Callable[..., Any], tensors: tuple[Tensor, ...], options: tuple[Any, ...]) -> Any:
        """Return make(*tensors, *options), or its result from the last call."""
        try:
            versions = tuple(map(VERSION, tensors))
        except RuntimeError:  # an inference tensor
            return make(*tensors, *options)
        if not (versions == self._versions and options == self._options and all(map(is_, tensors, self._tensors))):
            self._value = make(*tensors, *options)
            self._tensors, self._versions, self._options = tensors, versions, options
        return self._value


def prefix_slots(table: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """Return slots [bs · max_len] of the rows' first columns, 0 where `visible` [bs, max_len] is false."""
    return table[rows, : visible.shape[1]].mul_(visible).view(-1)


def window_slots(table: Tensor, rows: Tensor, columns: Tensor, visible: Tensor) -> Tensor:
    """Return slots [bs · width] at `columns` int64 [bs, width] of the rows, 0 where `visible` is false."""
    places = (columns * visible).add_((rows * table.shape[1]).unsqueeze(1))
    return table.view(-1).index_select(0, places.view(-1)).mul_(visible.view(-1))


def gather(pool: Tensor, slots: Tensor, bs: int) -> Tensor:
    """Gather pool [slots, Hk, d] at slots [bs · max_len] → [bs, max_len, Hk, d]."""
    return pool.index_select(0, slots).view(bs, -1, *pool.shape[1:])


def begin_of(slots: Tensor, bs: int) -> int | None:
    """Return the first slot of a single row if its slots ascend by one; else None.
    None on a GPU: reading slots would wait for it."""
    if bs != 1 or slots.device.type != "cpu" or not slots.numel():
        return None
    found = slots.numpy()
    return int(found[0]) if (found[1:] - found[:-1] == 1).all() else None


def keys_of(pool: Tensor, keys: PaddedKeys, bs: int) -> Tensor:
    """Return the entries of pool [slots, Hk, d] that `keys` names, as [bs, max_len, Hk, d];
    a view if `keys.begin` is known."""
    if keys.begin is not None:
        return pool.narrow(0, keys.begin, keys.slots.shape[0]).unsqueeze(0)
    return gather(pool, keys.slots, bs)


@lru_cache(maxsize=64)
def counting(n: int, device: torch.device) -> Tensor:
    """Return 0 … n − 1, int64; shared, so not to be written.
    For lengths of KV, of which there is no end: few are kept."""
    return torch.arange(n, device=device)


@lru_cache(maxsize=16)
def _seen_and_unseen(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros((), dtype=dtype, device=device), torch.full((), float("-inf"), dtype=dtype, device=device)


def bias_of(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where visible, −inf elsewhere."""
    return torch.where(visible, *_seen_and_unseen(dtype, visible.device))


def attend_packed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, softmax: Softmax) -> Tensor:
    """Attend with q [bs · m, Hq, d] over k, v [bs, keys, Hk, d] → [bs · m, Hq, d], 0 where nothing is seen.

    `bias` is [bs, 1, m · Hq / Hk, keys]. The query heads that share a key head, and the row's m queries, are the rows
    of one matrix, so each key is read once. k and v are brought to q's dtype.
    """
    bs, _, heads, d = k.shape
    k, v = k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)
    scale, group = softmax.scale_of(q), q.shape[1] // heads
    if q.shape[0] == bs and softmax.is_plain:
        queries = q.view(bs, heads, -1, d)
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=scale).reshape(q.shape)
        return softmax.result(out)
    queries = q.view(bs, -1, heads, group, d).transpose(1, 2).reshape(bs, heads, -1, d)
    if softmax.is_plain:
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=scale)
    else:
        sinks = softmax.sinks
        if sinks is not None:
            sinks = sinks.view(heads, 1, group).expand(-1, queries.shape[2] // group, -1).reshape(1, heads, -1, 1)
        out = softmax.weights(queries @ k.transpose(2, 3) * scale, bias, sinks) @ v
    return softmax.result(out.view(bs, heads, -1, group, d).transpose(1, 2).reshape(q.shape))
