"""What stands around the products with chosen experts: their choice from a router's scores, and the weighted sum of
what they give, beside that of an MLP that all tokens share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...types.experts import Router
from ..jit import cdiv, jit, next_power_of_2, tl

SUM_BLOCK = 512  # channels of a program that sums


def route_torch(logits: Tensor, router: Router, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Do what `Ops.route` says, in 32 bits at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid() if router.is_sigmoid else wide.softmax(-1)
    choice = scores if bias is None else scores + bias
    if router.num_groups > 1:
        grouped = choice.unflatten(-1, (router.num_groups, -1))
        best = grouped.topk(1 if bias is None else 2, -1).values.sum(-1)
        chosen = best.topk(router.top_groups, -1).indices
        inside = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
        choice = grouped.masked_fill(~inside.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choice.topk(router.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if router.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + router.epsilon)
    return (weights * router.scale).to(dtype), experts


def combine_torch(
    out: Tensor, weights: Tensor, shared: Tensor | None = None, x: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Do what `Ops.combine` says."""
    total = (weights.unsqueeze(1) @ out).squeeze(1)
    if shared is None:
        return total
    return total + (shared if x is None or gate is None else shared * F.linear(x, gate).sigmoid())


@jit
def route_kernel(
    logits,
    bias,
    weights,
    experts,
    logits_stride,
    epsilon,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """Choose the experts of one token: the best one by one, the lowest number first among equals."""
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_TOP)
    inside = expert < EXPERTS
    x = tl.load(logits + token * logits_stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(x)
    else:
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    if NUM_GROUPS > 1:
        group, number = expert // (EXPERTS // NUM_GROUPS), tl.arange(0, BLOCK_GROUPS)
        best = tl.full((BLOCK_GROUPS,), float("-inf"), tl.float32)
        for i in range(NUM_GROUPS):
            own = tl.where((group == i) & inside, choice, float("-inf"))
            value = tl.max(own, 0)
            if bias is not None:
                value += tl.max(tl.where(expert == tl.argmax(own, 0), float("-inf"), own), 0)
            best = tl.where(number == i, value, best)
        kept = expert < 0
        for _ in range(TOP_GROUPS):
            chosen = tl.argmax(best, 0)
            kept = kept | (group == chosen)
            best = tl.where(number == chosen, float("-inf"), best)
        choice = tl.where(kept, choice, float("-inf"))
    found, numbers = tl.zeros((BLOCK_TOP,), tl.float32), tl.zeros((BLOCK_TOP,), tl.int64)
    for i in range(TOP_K):
        chosen = tl.argmax(choice, 0)
        found = tl.where(place == i, tl.sum(tl.where(expert == chosen, scores, 0.0), 0), found)
        numbers = tl.where(place == i, chosen.to(tl.int64), numbers)
        choice = tl.where(expert == chosen, float("-inf"), choice)
    if NORMALIZED:
        found = found / (tl.sum(found, 0) + epsilon)
    target = token * TOP_K + place
    tl.store(weights + target, (found * scale).to(weights.dtype.element_ty), mask=place < TOP_K)
    tl.store(experts + target, numbers, mask=place < TOP_K)


@jit
def combine_kernel(
    out,
    weights,
    shared,
    x,
    gate,
    total,
    channels,
    x_stride,
    hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Sum a block of channels of one token's experts, with the shared MLP's output, which a gate may scale."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP_K):
        weight = tl.load(weights + token * TOP_K + i).to(tl.float32)
        source = out + (token * TOP_K + i) * channels + channel
        acc += weight * tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        beside = tl.load(shared + token * channels + channel, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            dot = tl.zeros((BLOCK_HIDDEN,), tl.float32)
            for begin in range(0, hidden, BLOCK_HIDDEN):
                place = begin + tl.arange(0, BLOCK_HIDDEN)
                part = tl.load(x + token * x_stride + place, mask=place < hidden, other=0.0).to(tl.float32)
                dot += part * tl.load(gate + place, mask=place < hidden, other=0.0).to(tl.float32)
            beside *= tl.sigmoid(tl.sum(dot, 0))
        acc += beside
    tl.store(total + token * channels + channel, acc.to(total.dtype.element_ty), mask=inside)


def route_triton(logits: Tensor, router: Router, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute `route_torch` of logits [n, E] as one launch; the last axis is contiguous."""
    n, num_experts = logits.shape
    weights = torch.empty((n, router.top_k), dtype=dtype, device=logits.device)
    experts = torch.empty((n, router.top_k), dtype=torch.int64, device=logits.device)
    if n:
        route_kernel[(n,)](
            logits, bias, weights, experts, logits.stride(0), router.epsilon, router.scale, EXPERTS=num_experts,
            BLOCK=next_power_of_2(num_experts), TOP_K=router.top_k, BLOCK_TOP=next_power_of_2(router.top_k),
            SIGMOID=router.is_sigmoid, NUM_GROUPS=router.num_groups, BLOCK_GROUPS=next_power_of_2(router.num_groups),
            TOP_GROUPS=router.top_groups, NORMALIZED=router.normalized, num_warps=4,
        )  # fmt: skip
    return weights, experts


def combine_triton(
    out: Tensor, weights: Tensor, shared: Tensor | None = None, x: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Compute `combine_torch` as one launch, summed in float32; x with a contiguous last axis, the others
    contiguous."""
    n, top_k, channels = out.shape
    total = torch.empty((n, channels), dtype=out.dtype, device=out.device)
    if n:
        hidden = 0 if x is None else x.shape[1]
        combine_kernel[(n, cdiv(channels, SUM_BLOCK))](
            out, weights, shared, x, gate, total, channels, 0 if x is None else x.stride(0), hidden, TOP_K=top_k,
            BLOCK=SUM_BLOCK, BLOCK_HIDDEN=1024, SHARED=shared is not None, GATED=gate is not None, num_warps=4,
        )  # fmt: skip
    return total
