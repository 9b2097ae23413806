"""Products of few rows with weights in the numbers of their checkpoint, and with the weights of chosen experts.

Both read each weight once and keep nothing: a program takes a block of output features, turns the stored numbers of a
tile into the activations' dtype, and multiplies them with all of its rows. With experts there is a program per expert
and block of features. It finds the tokens that have chosen its expert in the list of choices, and ends at once if there
are none. So a round reads the chosen experts alone, no token is sorted, and the host need not know the choices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...types.coded import Code, CodedWeight
from ..jit import cdiv, jit, next_power_of_2, tl
from .e4m3 import from_e4m3_bytes
from .silu_mul import silu_mul_torch


class Tiling(NamedTuple):
    """How a product with stored numbers is divided: a program computes so many output features with so many warps."""

    features: int
    warps: int


TILINGS = (Tiling(32, 4), Tiling(64, 8), Tiling(16, 4))
BLOCK_ROWS = 128  # at most, of a program; more are divided among programs that read the same weights one after another
MAX_ROWS = 2048
"""Of a product with stored numbers that was not timed. For more rows, which only long prompts have, the weights are
unpacked first: then each is used often enough."""
BLOCK_K = 64
DENSE, E4M3, INT8, UINT4, E2M1 = range(5)
KINDS = {Code.E4M3: E4M3, Code.INT8: INT8, Code.UINT4: UINT4, Code.E2M1: E2M1}
CHUNK = 128  # choices that a program looks at together


def coded_product_torch(x: Tensor, weight: CodedWeight) -> Tensor:
    """Compute x [n, in] · weightᵀ [n, out] from unpacked weights."""
    return F.linear(x, weight.dense(x.dtype))


def expert_product_torch(x: Tensor, weight: Tensor | CodedWeight, experts: Tensor, gated: bool = False) -> Tensor:
    """Multiply x with the weights of chosen experts: [n, k, out].

    experts int64 [n, k]; weight [E, out, in]; x [n, in], or [n, k, in] with a row for each choice. `gated`: behind
    `silu_mul_torch`.
    """
    x = silu_mul_torch(x) if gated else x
    dense = weight.dense(x.dtype) if isinstance(weight, CodedWeight) else weight
    rows = x if x.dim() == 3 else x.unsqueeze(1).expand(-1, experts.shape[1], -1)
    return (dense[experts] @ rows.unsqueeze(-1)).squeeze(-1)


@jit
def weight_tile(
    codes,
    scales,
    zeros,
    factors,
    row,
    column,
    row_inside,
    out_features,
    in_features,
    groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return weights [rows, BLOCK_K] in DTYPE. `row` int64 counts rows of all matrices."""
    inside = row_inside[:, None] & (column < in_features)[None, :]
    if KIND == 0:
        tile = tl.load(codes + row[:, None] * in_features + column[None, :], mask=inside, other=0.0).to(DTYPE)
    else:
        if KIND == 1 or KIND == 2:
            code = tl.load(codes + row[:, None] * in_features + column[None, :], mask=inside, other=0).to(tl.int32)
        else:
            place = row[:, None] * (in_features // 2) + (column // 2)[None, :]
            byte = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
            code = (byte >> ((column % 2) * 4)[None, :]) & 15
        if GROUP % BLOCK_K == 0:
            first = tl.min(column, 0) // GROUP
            group = (row * groups + first)[:, None]
            group_inside = row_inside[:, None]
        else:
            group = row[:, None] * groups + (column // GROUP)[None, :]
            group_inside = inside
        if KIND == 1:
            value = from_e4m3_bytes(code).to(tl.float32)
        elif KIND == 2:
            value = (code - ((code & 0x80) << 1)).to(tl.float32)
        elif KIND == 3:
            value = code.to(tl.float32) - tl.load(zeros + group, mask=group_inside, other=0).to(tl.float32)
        else:
            # The bits of a 4-bit float are those of a 16-bit one whose exponent is less by 14.
            half = ((code & 8) << 12) | ((code & 7) << 9)
            value = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        scale = tl.load(scales + group, mask=group_inside, other=0.0).to(tl.float32)
        if factors is not None:
            scale *= tl.load(factors + row, mask=row_inside, other=0.0)[:, None]
        tile = (value * scale).to(DTYPE)
    return tile


@jit
def coded_product_kernel(
    x,
    codes,
    scales,
    zeros,
    factors,
    out,
    n,
    out_features,
    in_features,
    groups,
    row_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute with one program per block of ROWS rows of x (axis 0) and of output features."""
    feature = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token_inside = token < n
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for begin in range(0, in_features, BLOCK_K):
        column = begin + tl.arange(0, BLOCK_K)
        mask = token_inside[:, None] & (column < in_features)[None, :]
        rows = tl.load(x + token[:, None] * row_stride + column[None, :], mask=mask, other=0.0)
        tile = weight_tile(
            codes, scales, zeros, factors, feature, column, feature < out_features, out_features, in_features, groups,
            KIND, GROUP, BLOCK_K, x.dtype.element_ty,
        )  # fmt: skip
        total = tl.dot(rows, tl.trans(tile), total, input_precision="ieee")
    mask = token_inside[:, None] & (feature < out_features)[None, :]
    tl.store(out + token[:, None] * out_features + feature[None, :], total.to(out.dtype.element_ty), mask=mask)


@jit
def expert_product_kernel(
    x,
    codes,
    scales,
    zeros,
    factors,
    experts,
    out,
    n,
    out_features,
    in_features,
    groups,
    row_stride,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute, with one program per expert and block of output features, the n choices of that expert.

    Choice i multiplies row i // TOP_K of x. GATED: its first half, the gate, behind SiLU times the second.
    """
    expert = tl.program_id(0)
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = expert.to(tl.int64) * out_features + feature
    place = tl.arange(0, ROWS)
    first = 0  # of the choices that this program has not multiplied yet
    count = 1
    while first < count:
        # The choices first … first + ROWS − 1 of this expert, in order.
        choice = tl.full((ROWS,), -1, tl.int32)
        count = 0
        for begin in range(0, n, CHUNK):
            index = begin + tl.arange(0, CHUNK)
            mine = tl.load(experts + index, mask=index < n, other=-1) == expert
            rank = count + tl.cumsum(mine.to(tl.int32), 0) - 1 - first
            hit = mine[None, :] & (rank[None, :] == place[:, None])
            choice = tl.maximum(choice, tl.max(tl.where(hit, index[None, :], -1), 1))
            count += tl.sum(mine.to(tl.int32), 0)
        if first < count:
            token = (tl.maximum(choice, 0) // TOP_K).to(tl.int64)
            total = tl.zeros((ROWS, BLOCK_N), tl.float32)
            for begin in range(0, in_features, BLOCK_K):
                column = begin + tl.arange(0, BLOCK_K)
                mask = (choice >= 0)[:, None] & (column < in_features)[None, :]
                source = x + token[:, None] * row_stride + column[None, :]
                rows = tl.load(source, mask=mask, other=0.0)
                if GATED:
                    gate = rows.to(tl.float32)
                    up = tl.load(source + in_features, mask=mask, other=0.0).to(tl.float32)
                    rows = (gate * tl.sigmoid(gate) * up).to(x.dtype.element_ty)
                tile = weight_tile(
                    codes, scales, zeros, factors, weight_row, column, feature < out_features, out_features,
                    in_features, groups, KIND, GROUP, BLOCK_K, x.dtype.element_ty,
                )  # fmt: skip
                total = tl.dot(rows, tl.trans(tile), total, input_precision="ieee")
            mask = (choice >= 0)[:, None] & (feature < out_features)[None, :]
            target = choice.to(tl.int64)[:, None] * out_features + feature[None, :]
            tl.store(out + target, total.to(out.dtype.element_ty), mask=mask)
        first += ROWS


def padded_rows(n: int) -> int:
    """Return the rows that are multiplied if there are n."""
    return max(16, next_power_of_2(n))


def usual_tiling(n: int) -> Tiling | None:
    """Return how a product of n rows is divided if nothing was timed; None: its matrix is unpacked."""
    if n > MAX_ROWS:
        return None
    return TILINGS[0] if n <= 32 else TILINGS[1]


def coded_product_triton(x: Tensor, weight: CodedWeight, tiling: Tiling | None) -> Tensor:
    """Compute `coded_product_torch` of x [n, in] with a contiguous last axis. Without `tiling` the weight is
    unpacked."""
    n, (out_features, in_features) = x.shape[0], weight.shape
    if tiling is None:
        return coded_product_torch(x, weight)
    out = torch.empty((n, out_features), dtype=x.dtype, device=x.device)
    if n:
        rows = min(BLOCK_ROWS, padded_rows(n))
        coded_product_kernel[(cdiv(n, rows), cdiv(out_features, tiling.features))](
            x, *_pointers(weight), out, n, out_features, in_features, weight.scales.shape[-1], x.stride(0),
            KIND=KINDS[weight.code], GROUP=weight.group, ROWS=rows, BLOCK_N=tiling.features,
            BLOCK_K=BLOCK_K, num_warps=tiling.warps,
        )  # fmt: skip
    return out


def expert_product_triton(x: Tensor, weight: Tensor | CodedWeight, experts: Tensor, gated: bool = False) -> Tensor:
    """Compute `expert_product_torch`; the last axis of x is contiguous, and so is a weight that is a tensor."""
    num_experts, out_features, in_features = weight.shape
    (tokens, top_k), rows = experts.shape, x if x.dim() == 2 else x.flatten(0, 1)
    out = torch.empty((tokens, top_k, out_features), dtype=x.dtype, device=x.device)
    if not experts.numel():
        return out
    if isinstance(weight, CodedWeight):
        pointers, kind, group = _pointers(weight), KINDS[weight.code], weight.group
        groups = weight.scales.shape[-1]
    else:
        pointers, kind, group, groups = (weight, None, None, None), DENSE, BLOCK_K, 1
    block = 32 if kind in (UINT4, E2M1) else 64  # unpacking halves of bytes takes registers
    expert_product_kernel[(num_experts, cdiv(out_features, block))](
        rows, *pointers, experts, out, experts.numel(), out_features, in_features, groups, rows.stride(0),
        TOP_K=top_k if x.dim() == 2 else 1, KIND=kind, GROUP=group, ROWS=16, CHUNK=CHUNK, BLOCK_N=block,
        BLOCK_K=BLOCK_K, GATED=gated, num_warps=4,
    )  # fmt: skip
    return out


def _pointers(weight: CodedWeight) -> tuple[Tensor | None, ...]:
    return weight.codes, weight.scales, weight.zeros, weight.factors
