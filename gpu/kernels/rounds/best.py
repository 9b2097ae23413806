"""The first choice of logits: the lowest id of the greatest one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..jit import cdiv, jit, next_power_of_2, tl
from ..layers.parts import counters

CHUNK = 4096  # logits of one program


def best_tokens_torch(logits: Tensor) -> Tensor:
    """Compute `Ops.best_tokens`."""
    best, tokens = logits.max(dim=-1)
    return torch.where(best.isfinite(), tokens, -1)


def best_drafts_torch(logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Compute `Ops.best_drafts`."""
    tokens = logits.max(dim=-1).indices
    return tokens if ids is None else ids[tokens]


@jit
def best_kernel(
    logits,
    ids,
    greatest,
    best,
    arrived,
    out,
    vocab,
    row_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FINITE: tl.constexpr,
):
    """Find the best of one chunk of a row with each program; the last of a row compares those of all its chunks.

    FINITE: −1 where the greatest is not finite; otherwise NaN counts as infinity.
    """
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf"))
    value = value.to(greatest.dtype.element_ty)
    value = tl.where(value == value, value, float("inf"))
    peak = tl.max(value, 0)
    tl.store(greatest + row * chunks + chunk, peak)
    tl.store(best + row * chunks + chunk, tl.min(tl.where((value == peak) & (token < vocab), token, vocab), 0))
    tl.debug_barrier()  # the atomic is one thread's, and comes behind the stores of all
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == chunks - 1:
        tl.store(arrived + row, 0)
        place = tl.arange(0, CHUNKS)
        inside = place < chunks
        peaks = tl.load(greatest + row * chunks + place, mask=inside, other=float("-inf"), cache_modifier=".cg")
        tokens = tl.load(best + row * chunks + place, mask=inside, other=vocab, cache_modifier=".cg")
        peak = tl.max(peaks, 0)
        found = tl.min(tl.where(peaks == peak, tokens, vocab), 0).to(tl.int64)
        if FINITE:
            found = tl.where((peak < float("inf")) & (peak > float("-inf")), found, -1)
        if ids is not None:
            found = tl.load(ids + found)
        tl.store(out + row, found)


def _launch(logits: Tensor, ids: Tensor | None, is_finite: bool) -> Tensor:
    n, vocab = logits.shape
    chunks = cdiv(vocab, CHUNK)
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    greatest = torch.empty(n, chunks, dtype=wide, device=logits.device)
    best = torch.empty(n, chunks, dtype=torch.int32, device=logits.device)
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        best_kernel[(n, chunks)](
            logits,
            ids,
            greatest,
            best,
            counters(next_power_of_2(n), logits.device),
            out,
            vocab,
            logits.stride(0),
            CHUNK=CHUNK,
            CHUNKS=next_power_of_2(chunks),
            FINITE=is_finite,
        )
    return out


def best_tokens_triton(logits: Tensor) -> Tensor:
    """Compute `Ops.best_tokens` as one launch; the last axis must be contiguous."""
    return _launch(logits, None, True)


def best_drafts_triton(logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Compute `Ops.best_drafts` as one launch; the last axis must be contiguous."""
    return _launch(logits, ids, False)
