"""The forward pass's operations on the device, at the shapes they are made for, against torch in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.attention import PLAIN, Softmax
from ..ops.port import KVTensors
from ..ops.torch_ops import TorchOps
from .batches import MAX_POSITIONS, Batch, decode_view, make_batch, random_tree_bits, rotary_table, softmaxes
from .steps import Context, Finding, Step

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Absolute and relative; an error of the kernels' logic is of the size of the values, about 1."""
GPU_LAYOUTS = ((32, 8, 128), (28, 4, 128), (12, 2, 80), (16, 16, 64), (8, 1, 256))
CPU_LAYOUTS = ((4, 2, 16),)
"""Query heads, key heads, channels."""


def forward_steps(context: Context) -> Iterator[Step]:
    """Yield the steps in the order in which a session needs the operations."""

    def step(name: str, run: Any, *arguments: Any) -> Step:
        return Step("kernels", name, partial(run, context, *arguments))

    yield step("norms and gate", norms_and_gate)
    for layout in GPU_LAYOUTS if context.on_gpu else CPU_LAYOUTS:
        heads = f"{layout[0]}/{layout[1]} heads of {layout[2]}"
        yield step(f"rope and KV writes, {heads}", rope_write, layout)
        yield step(f"extend attention, {heads}", extend, layout)
        yield step(f"verify attention, {heads}", verify, layout)
        yield step(f"decode attention, {heads}", decode, layout)
    yield step("windows, capped scores, sinks", kinds_of_softmax)
    yield Step("kernels", "pools of more than 2³¹ elements", partial(large_pool, context), needs_gpu=True)


def worst_of(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the greatest error in units of what is allowed. Raises AssertionError if it is more than 1, or if anything is no number."""
    worst = 0.0
    for ours, right in zip(found, expected, strict=True):
        limit = TOLERANCE[ours.dtype]
        torch.testing.assert_close(ours.cpu().double(), right.double(), rtol=limit, atol=limit)
        if ours.numel():
            error = (ours.cpu().double() - right.double()).abs() / (limit + limit * right.double().abs())
            worst = max(worst, float(error.max()))
    return worst


def moved(value: Any, device: str) -> Any:
    """Return a tensor, or a dataclass or tuple with tensors, on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value):
        return type(value)(*(moved(getattr(value, f.name), device) for f in fields(value)))
    return value


def in_float64(batch: Batch) -> Batch:
    return Batch(
        **{n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in vars(batch).items()}
    )


def _found(worst: float, count: int) -> Finding:
    return Finding(f"{count} batches agree; the greatest error is {worst:.0%} of what is allowed")


def _layout(layout: tuple[int, int, int], dtype: torch.dtype, context: Context) -> dict[str, Any]:
    heads, kv_heads, d = layout
    return {"heads": heads, "kv_heads": kv_heads, "d": d, "page": 16 if context.on_gpu else 4, "dtype": dtype}


def norms_and_gate(context: Context) -> Finding:
    sizes = ((1, 4096), (70, 1536), (513, 128)) if context.on_gpu else ((1, 64), (7, 24))
    worst, twins, ops = 0.0, TorchOps(), context.ops
    for dtype in context.dtypes:
        for n, width in sizes:
            generator = torch.Generator().manual_seed(n)
            x, residual, weight = (
                torch.randn(shape, generator=generator).to(dtype) for shape in ((n, width), (n, width), (width,))
            )
            there = [value.to(context.device) for value in (x, residual, weight)]
            normed, total = ops.add_rms_norm(*there, 1e-5)
            found = (
                ops.rms_norm(there[0], there[2], 1e-5),
                total,
                normed,
                ops.silu_mul(there[0]),
                ops.gelu_mul(there[0]),
            )
            exact, factor = x.double(), weight.double()
            rounded = x + residual  # the norm is that of the sum as it is stored
            expected = (
                twins.rms_norm(exact, factor, 1e-5),
                rounded,
                twins.rms_norm(rounded.double(), factor, 1e-5),
                twins.silu_mul(exact),
                twins.gelu_mul(exact),
            )
            worst = max(worst, worst_of(found, expected))
    return _found(worst, len(sizes) * len(context.dtypes))


def rope_write(context: Context, layout: tuple[int, int, int]) -> Finding:
    worst, count = 0.0, 33 if context.on_gpu else 5
    for dtype in context.dtypes:
        batch = make_batch(4, [0], [count], **_layout(layout, dtype, context))
        table = rotary_table(layout[2])
        positions = torch.arange(count) * (MAX_POSITIONS // count)
        slots = torch.randperm(batch.k_pool.shape[0] - 1, generator=torch.Generator().manual_seed(1))[:count] + 1
        exact, there = in_float64(batch), batch.to(context.device)
        expected = TorchOps().rope_write(exact.q, exact.k, exact.v, table, positions, slots, exact.kv)
        places = moved((table, positions, slots), context.device)
        found = context.ops.rope_write(there.q, there.k, there.v, *places, there.kv)
        worst = max(worst, worst_of((*found, *there.kv), (*expected, *exact.kv)))
    return _found(worst, len(context.dtypes))


def decode(context: Context, layout: tuple[int, int, int]) -> Finding:
    cases = ([1], [4097], [700, 0, 33, 2048]) if context.on_gpu else ([1], [70, 0, 33])
    worst = 0.0
    for dtype in context.dtypes:
        for lens in cases:
            batch = make_batch(1, lens, [1] * len(lens), **_layout(layout, dtype, context))
            view, exact, there = decode_view(batch, lens), in_float64(batch), batch.to(context.device)
            expected = TorchOps().decode_attention(exact.q, exact.kv, view)
            found = context.ops.decode_attention(there.q, there.kv, moved(view, context.device))
            worst = max(worst, worst_of([found], [expected]))
    return _found(worst, len(cases) * len(context.dtypes))


def _verify(ops: Any, batch: Batch, bits: Tensor, softmax: Softmax = PLAIN) -> Tensor:
    return ops.verify_attention(batch.q, batch.k, batch.v, batch.kv, batch.tree(bits), softmax)


def _extend(ops: Any, batch: Batch, softmax: Softmax = PLAIN) -> Tensor:
    return ops.extend_attention(batch.q, batch.k, batch.v, batch.kv, batch.chunks(), softmax)


def verify(context: Context, layout: tuple[int, int, int]) -> Finding:
    large = (([3000], 4), ([900, 0, 64, 17], 16), ([2000, 5], 64), ([40] * 40, 8), ([300, 1], 1))
    cases = large if context.on_gpu else (([9, 0], 4), ([30], 16))
    worst = 0.0
    for dtype in context.dtypes:
        for prefix_lens, nodes in cases:
            bs = len(prefix_lens)
            batch = make_batch(2, prefix_lens, [nodes] * bs, **_layout(layout, dtype, context))
            bits = random_tree_bits(nodes, bs, nodes, padding=True)
            found = _verify(context.ops, batch.to(context.device), bits.to(context.device))
            worst = max(worst, worst_of([found], [_verify(TorchOps(), in_float64(batch), bits)]))
    return _found(worst, len(cases) * len(context.dtypes))


def extend(context: Context, layout: tuple[int, int, int]) -> Finding:
    large = (([0], [513]), ([1000], [3]), ([300, 0, 77, 12], [64, 129, 0, 1]))
    cases = large if context.on_gpu else (([0], [9]), ([20, 0, 7], [5, 0, 1]))
    worst = 0.0
    for dtype in context.dtypes:
        for prefix_lens, new_lens in cases:
            batch = make_batch(3, prefix_lens, new_lens, **_layout(layout, dtype, context))
            found = _extend(context.ops, batch.to(context.device))
            worst = max(worst, worst_of([found], [_extend(TorchOps(), in_float64(batch))]))
    return _found(worst, len(cases) * len(context.dtypes))


def kinds_of_softmax(context: Context) -> Finding:
    layout, worst, count = (16, 2, 64) if context.on_gpu else CPU_LAYOUTS[0], 0.0, 0
    for dtype in context.dtypes:
        batch = make_batch(9, [40, 2, 0], [7] * 3, **_layout(layout, dtype, context))
        there, exact, bits = batch.to(context.device), in_float64(batch), random_tree_bits(1, 3, 7)
        view = decode_view(batch, [41, 3, 0])
        for softmax in softmaxes(layout[0], dtype):
            wide = softmax if softmax.sinks is None else replace(softmax, sinks=softmax.sinks.double())
            here = softmax if softmax.sinks is None else replace(softmax, sinks=softmax.sinks.to(context.device))
            found = (
                _verify(context.ops, there, bits.to(context.device), here),
                _extend(context.ops, there, here),
                context.ops.decode_attention(there.q[:3], there.kv, moved(view, context.device), here),
            )
            expected = (
                _verify(TorchOps(), exact, bits, wide),
                _extend(TorchOps(), exact, wide),
                TorchOps().decode_attention(exact.q[:3], exact.kv, view, wide),
            )
            worst, count = max(worst, worst_of(found, expected)), count + 3
    return _found(worst, count)


def large_pool(context: Context) -> Finding:
    """Read the last slots of a pool of 4.3 GB: their addresses need 64 bits."""
    heads, d = 8, 128
    num_slots = (1 << 31) // (heads * d) + 64
    pool = torch.zeros(num_slots, heads, d, dtype=torch.bfloat16, device=context.device)
    batch = make_batch(6, [30], [1], heads=32, kv_heads=heads, d=d, page=16, dtype=torch.bfloat16)
    last = num_slots - batch.k_pool.shape[0]
    pool[last:] = batch.k_pool.to(context.device)
    view, exact, there = decode_view(batch, [30]), in_float64(batch), batch.to(context.device)
    expected = TorchOps().decode_attention(exact.q, KVTensors(exact.k_pool, exact.k_pool), view)
    behind = replace(moved(view, context.device), table=there.table + last)
    return _found(worst_of([context.ops.decode_attention(there.q, KVTensors(pool, pool), behind)], [expected]), 1)
