"""The distribution that sampling parameters make of logits: temperature, then top-k, then top-p.

Nothing sorts the vocabulary. Both filters keep the front of one order, in which a greater logit comes first, and of
equal ones the lower id. So what they keep follows from the last logit that is kept and from how many tokens with just
that logit are. A CPU puts them into buckets (`kernels.front.keep_front`); without Numba it looks at the greatest few
logits, and at more where these do not suffice. The kernel of a GPU finds the last logit digit by digit: two of its bits
with each pass over the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import host
from ..constants import numbers
from ..front import keep_front
from ..jit import jit, next_power_of_2, tl

FIRST_LOOK = 128  # logits of a row that a CPU looks at first; the top-p of most texts keeps fewer
LOOK_MORE = 8  # times as many with each further look
AT_ONCE = 1 << 20  # logits that a CPU looks at together, to bound the memory that a look takes
BLOCK = 4096  # logits that the kernel looks at together


class _Cuts(NamedTuple):
    """What the filters of each row [n] keep: at most so many tokens, of their mass this share; and all mass."""

    limit: Tensor
    top_p: Tensor
    total: Tensor


def target_probs_torch(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool = True
) -> Tensor:
    """Compute `Ops.target_probs`."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    greatest = logits.amax(1, keepdim=True)
    greedy = temperature <= 0
    scale = torch.where(greedy, 1.0, temperature).to(logits.dtype).unsqueeze(1)
    # A failed row turns into NaN by itself: inf − inf, or NaN − anything; its greatest entry decides for the whole row.
    probs = (logits - greatest).div_(scale).exp_()
    if filtered:
        probs = _filter(logits, probs, top_p, top_k, greedy)
    probs /= probs.sum(1, keepdim=True)
    if greedy.any():
        rows = greedy.nonzero().squeeze(1)
        best = logits[rows].argmax(1, keepdim=True)
        certain = probs[rows].mul_(0.0).scatter_(1, best, 1.0)  # NaN stays NaN
        probs[rows] = torch.where(greatest[rows].isfinite(), certain, torch.nan)
    return probs


def _filter(logits: Tensor, probs: Tensor, top_p: Tensor, top_k: Tensor, greedy: Tensor) -> Tensor:
    """Return `probs`, not normalised, with 0 for tokens that top-k and top-p leave out."""
    vocab = logits.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)
    total = probs.sum(1, dtype=torch.float64)
    open_rows = ((limit < vocab) | (top_p < 1.0)) & ~greedy & total.isfinite()
    if host.HAS_NUMBA and logits.device.type == "cpu":
        opened: slice | Tensor = slice(None) if open_rows.all() else open_rows.nonzero().squeeze(1)
        front = probs[opened].contiguous()
        seen, limits, shares, totals = (x[opened].contiguous().numpy() for x in (logits, limit, top_p, total))
        keep_front(seen, front.numpy(), limits, shares, totals)
        probs[opened] = front
        return probs
    kept = torch.where(open_rows.unsqueeze(1), 0.0, probs)
    cuts = _Cuts(limit, top_p, total)
    rows, size = open_rows.nonzero().squeeze(1), min(FIRST_LOOK, vocab)
    while len(rows):
        parts = rows.split(max(1, AT_ONCE // vocab))
        rows = torch.cat([_keep_front(logits, probs, kept, part, size, cuts) for part in parts])
        size = min(size * LOOK_MORE, vocab)
    return kept


def _keep_front(logits: Tensor, probs: Tensor, kept: Tensor, rows: Tensor, size: int, cuts: _Cuts) -> Tensor:
    """Write to `kept` what the filters keep of some rows, if it is among the `size` greatest logits. Return the rows
    where it is not."""
    vocab = logits.shape[1]
    ids, values = _greatest(logits if len(rows) == len(logits) else logits[rows], size)
    mass = probs[rows.unsqueeze(1), ids]
    ranks, most = numbers(size, logits.device), cuts.limit[rows].unsqueeze(1)
    mass.masked_fill_(ranks >= most, 0.0)
    reached = mass.cumsum(1, dtype=torch.float64)
    least = values[:, -1:]
    is_all = (least == -torch.inf) | (size == vocab)  # the others have no mass, if there are any
    in_front = torch.where(is_all | (most <= size), reached[:, -1:], torch.inf)
    share, whole = cuts.top_p[rows].unsqueeze(1), torch.where(most < vocab, in_front, cuts.total[rows].unsqueeze(1))
    keep = (ranks < most) & ((reached - mass < share * whole) | (share >= 1.0) | (ranks == 0))
    # Of the tokens with the least logit that was seen there may be others, with lower ids.
    is_found = is_all.squeeze(1) | (keep.sum(1) <= (values > least).sum(1))
    places = rows.unsqueeze(1) * vocab + ids
    kept.view(-1)[places[is_found]] = mass.masked_fill_(~keep, 0.0)[is_found]
    return rows[~is_found]


def _greatest(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the ids and values [n, size] of the greatest logits, in descending order, equal ones by their ids."""
    if size * LOOK_MORE > logits.shape[1]:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return ids[:, :size], values[:, :size]
    ids = logits.topk(size, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), values


@jit
def _keys_of(values, IS_DOUBLE: tl.constexpr):
    """Return unsigned integers in the order of floats, equal where these are."""
    values = tl.where(values == 0, 0.0, values)  # −0 equals 0
    if IS_DOUBLE:
        bits = values.to(tl.uint64, bitcast=True)
        return bits ^ tl.where(values < 0, 0xFFFFFFFFFFFFFFFF, 0x8000000000000000)
    bits = values.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(values < 0, 0xFFFFFFFF, 0x80000000)


@jit
def _load(logits, first, vocab, IS_DOUBLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the next token ids [BLOCK], and their logits, −inf beyond the vocabulary."""
    token = first + tl.arange(0, BLOCK)
    value = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    return token, value.to(tl.float64 if IS_DOUBLE else tl.float32)


@jit
def _last_kept(
    logits, out, vocab, wanted, least_key, BY_MASS: tl.constexpr, IS_DOUBLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the key of the last token that is kept, and what is before all tokens of this key, which is less than
    `wanted`: tokens, or BY_MASS their masses in `out`; then keys below `least_key` have none."""
    BITS: tl.constexpr = 64 if IS_DOUBLE else 32
    last, before = least_key * 0, tl.cast(0.0, tl.float64)
    for shift in range(BITS - 2, -2, -2):
        one = tl.zeros([BLOCK], tl.float64)  # those with a digit of one or more
        two = tl.zeros([BLOCK], tl.float64)
        three = tl.zeros([BLOCK], tl.float64)
        for first in range(0, vocab, BLOCK):
            token, value = _load(logits, first, vocab, IS_DOUBLE, BLOCK)
            key = _keys_of(value, IS_DOUBLE)
            counted = (token < vocab) & ((key >> shift) >> 2 == last)
            if BY_MASS:
                counted = counted & (key >= least_key)
                weight = tl.load(out + token, mask=counted, other=0.0).to(tl.float64)
            else:
                weight = tl.where(counted, 1.0, 0.0).to(tl.float64)
            digit = ((key >> shift) & 3).to(tl.int32)
            one += tl.where(digit >= 1, weight, 0.0)
            two += tl.where(digit >= 2, weight, 0.0)
            three += tl.where(digit >= 3, weight, 0.0)
        # The least digit before whose tokens less than `wanted` is reached.
        after_0, after_1, after_2 = tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)
        is_0, is_1, is_2 = before + after_0 < wanted, before + after_1 < wanted, before + after_2 < wanted
        digit = tl.where(is_0, 0, tl.where(is_1, 1, tl.where(is_2, 2, 3)))
        before += tl.where(is_0, after_0, tl.where(is_1, after_1, tl.where(is_2, after_2, 0.0)))
        last = (last << 2) | digit.to(last.dtype)
    return last, before


@jit
def _mass_kept(logits, out, vocab, last, most, IS_DOUBLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mass of the tokens behind `last`, of which `most` with just this key are kept, and the mass of one of
    the latter."""
    above = tl.zeros([BLOCK], tl.float64)
    at_last = tl.cast(0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        token, value = _load(logits, first, vocab, IS_DOUBLE, BLOCK)
        key = _keys_of(value, IS_DOUBLE)
        mass = tl.load(out + token, mask=token < vocab, other=0.0).to(tl.float64)
        above += tl.where(key > last, mass, 0.0)
        at_last = tl.maximum(at_last, tl.max(tl.where((key == last) & (token < vocab), mass, 0.0), 0))
    return tl.sum(above, 0) + most * at_last, at_last


@jit
def _target_probs_kernel(
    logits,
    temperatures,
    top_ps,
    top_ks,
    out,
    vocab,
    row_stride,
    FILTERED: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make the distribution of one row with each program. Its masses stand in `out` until they are normalised."""
    row = tl.program_id(0).to(tl.int64)
    logits, out = logits + row * row_stride, out + row * vocab
    kind: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    temperature = tl.load(temperatures + row)
    is_greedy = temperature <= 0

    greatest = tl.full([BLOCK], float("-inf"), kind)
    for first in range(0, vocab, BLOCK):
        _, value = _load(logits, first, vocab, IS_DOUBLE, BLOCK)
        greatest = tl.maximum(greatest, tl.where(value == value, value, float("inf")))
    greatest = tl.max(greatest, 0)
    has_failed = (greatest == float("inf")) | (greatest == float("-inf"))

    scale = tl.where(is_greedy, 1.0, temperature).to(kind)
    best = vocab
    for first in range(0, vocab, BLOCK):
        token, value = _load(logits, first, vocab, IS_DOUBLE, BLOCK)
        if IS_DOUBLE:
            scaled = (value - greatest) / scale
        else:
            scaled = tl.div_rn(value - greatest, tl.zeros([BLOCK], kind) + scale)
        tl.store(out + token, tl.exp(scaled), mask=token < vocab)
        best = tl.minimum(best, tl.min(tl.where(value == greatest, token, vocab), 0))
    tl.debug_barrier()  # what one thread has stored others read

    nothing = _keys_of(greatest, IS_DOUBLE) * 0  # no float has this key
    last, most = nothing, tl.cast(0.0, tl.float64)
    if FILTERED:
        is_plain = is_greedy | has_failed
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < vocab) & (not is_plain):
            last, before = _last_kept(logits, out, vocab, top_k.to(tl.float64), nothing, False, IS_DOUBLE, BLOCK)
            most = top_k - before
        top_p = tl.load(top_ps + row).to(tl.float64)
        if (top_p < 1) & (not is_plain):
            total, _ = _mass_kept(logits, out, vocab, last, most, IS_DOUBLE, BLOCK)
            wanted = tl.maximum(top_p * total, 1e-300)  # the first token is always kept
            key, before = _last_kept(logits, out, vocab, wanted, last, True, IS_DOUBLE, BLOCK)
            _, at_key = _mass_kept(logits, out, vocab, key, most, IS_DOUBLE, BLOCK)
            reached = tl.ceil((wanted - before) / at_key)
            if key > last:
                most = reached
                last = key
            elif key == last:
                most = tl.minimum(most, reached)

    total, _ = _mass_kept(logits, out, vocab, last, most, IS_DOUBLE, BLOCK)
    seen = 0
    for first in range(0, vocab, BLOCK):
        token, value = _load(logits, first, vocab, IS_DOUBLE, BLOCK)
        key = _keys_of(value, IS_DOUBLE)
        mass = tl.load(out + token, mask=token < vocab, other=0.0)
        is_last = ((key == last) & (token < vocab)).to(tl.int32)
        rank = seen + tl.cumsum(is_last, 0) - is_last
        kept = (key > last) | ((is_last > 0) & (rank < most))
        share = tl.where(kept, mass / total.to(kind), 0.0)
        share = tl.where(is_greedy, tl.where(token == best, 1.0, 0.0), share)
        share = tl.where(has_failed, float("nan"), share)
        tl.store(out + token, share, mask=token < vocab)
        seen += tl.sum(is_last, 0)


def target_probs_triton(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool = True
) -> Tensor:
    """Compute `Ops.target_probs` as one launch; the last axis must be contiguous."""
    n, vocab = logits.shape
    is_double = logits.dtype == torch.float64
    out = torch.empty(n, vocab, dtype=torch.float64 if is_double else torch.float32, device=logits.device)
    if n:
        _target_probs_kernel[(n,)](
            logits,
            temperature,
            top_p,
            top_k,
            out,
            vocab,
            logits.stride(0),
            FILTERED=filtered,
            IS_DOUBLE=is_double,
            BLOCK=min(BLOCK, next_power_of_2(vocab)),
            num_warps=16,
        )
    return out
