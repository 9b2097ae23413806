"""The forward pass's operations on the device, at the shapes they are made for, against torch in float64 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ..ops import flashinfer_ops
from ..ops.torch_ops import TorchOps
from ..types.attention import E4M3, PLAIN, KVScales, Softmax
from ..types.coded import Code, CodedWeight
from ..types.experts import Router
from ..types.ops import DecodeBatch, KVTensors, Ops
from .batches import MAX_POSITIONS, PagedBatch, decode_view, make_batch, random_tree_bits, rotary_table, softmaxes
from .steps import Context, SelftestStep, StepFinding, UnavailableHere

FLASHINFER_LIMIT_S = 300.0  # it compiles its kernels when the first call needs them
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Absolute and relative; an error of the kernels' logic is of the size of the values, about 1."""
GPU_LAYOUTS = ((32, 8, 128), (28, 4, 128), (12, 2, 80), (16, 16, 64), (8, 1, 256), (16, 2, 512))
CPU_LAYOUTS = ((4, 2, 16),)
"""Query heads, key heads, channels."""


def forward_steps(context: Context) -> Iterator[SelftestStep]:
    """Yield the steps in the order in which a session needs the operations."""

    def step(name: str, calls_of: Callable[[Context, torch.dtype], Iterable[Call]]) -> SelftestStep:
        return SelftestStep("kernels", name, partial(compared, context, calls_of))

    yield step("norms and gate", norms_and_gate)
    yield step("choice and sum of experts", around_experts)
    for layout in GPU_LAYOUTS if context.on_gpu else CPU_LAYOUTS:
        heads = f"{layout[0]}/{layout[1]} heads of {layout[2]}"
        yield step(f"rope and KV writes, {heads}", partial(rope_write, layout))
        yield step(f"extend attention, {heads}", partial(extend, layout))
        yield step(f"verify attention, {heads}", partial(verify, layout))
        yield step(f"decode attention, {heads}", partial(decode, layout))
    yield step("latent keys of 576", latent_keys)
    yield step("windows, capped scores, sinks", kinds_of_softmax)
    yield step("keys and values in 8 bits", partial(numbers_of_8_bits, None))
    yield step("top-k and top-p", filters)
    for form in STORED_FORMS:
        yield step(f"products of stored numbers, {form}", partial(stored_products, form))
    yield SelftestStep("kernels", "pools of more than 2³¹ elements", partial(large_pool, context), needs_gpu=True)
    yield SelftestStep(
        "kernels", "sampling over large vocabularies", partial(large_vocabularies, context), needs_gpu=True
    )


def flashinfer_steps(context: Context) -> Iterator[SelftestStep]:
    """Yield what FlashInfer computes, beside the same numbers in float64 as the kernels: where a kernel fails and
    FlashInfer does not, the kernel is wrong; where both fail, look at the machine or at what they are compared with."""

    def step(name: str, calls_of: Callable[[Context, torch.dtype], Iterable[Call]]) -> SelftestStep:
        run = partial(compared, context, calls_of, partial(by_flashinfer, context), (torch.bfloat16,))
        return SelftestStep("FlashInfer", name, run, needs_gpu=True, limit_s=FLASHINFER_LIMIT_S)

    for layout in GPU_LAYOUTS:
        if layout[2] in flashinfer_ops.HEAD_DIMS:
            heads = f"{layout[0]}/{layout[1]} heads of {layout[2]}"
            yield step(f"extend attention, {heads}", partial(extend, layout))
            yield step(f"verify attention, {heads}", partial(verify, layout))
            yield step(f"decode attention, {heads}", partial(decode, layout))
    yield step("windows, capped scores, sinks", kinds_of_softmax)
    yield step("keys and values in 8 bits", partial(numbers_of_8_bits, flashinfer_ops.HEAD_DIMS))
    yield step("top-k and top-p", filters)


def by_flashinfer(context: Context) -> Ops:
    """Return operations by FlashInfer. Raises UnavailableHere where it is not installed, or lacks a call of them."""
    try:
        found = flashinfer_ops.find_flashinfer()
    except ConfigError as error:
        raise UnavailableHere(str(error.problems[0].message)) from None
    missing = flashinfer_ops.lacking(found, (), torch.bfloat16)
    if missing:
        raise UnavailableHere("; ".join(missing))
    return context.once("flashinfer", lambda: cast(Ops, flashinfer_ops.FlashInferOps(context.ops, found)))


def worst_of(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the greatest error in units of the allowed error. Raises AssertionError if it is more than 1, or if
    anything is no number."""
    worst = 0.0
    for ours, right in zip(found, expected, strict=True):
        limit = TOLERANCE[ours.dtype]
        torch.testing.assert_close(ours.cpu().double(), right.double(), rtol=limit, atol=limit)
        if ours.numel():
            error = (ours.cpu().double() - right.double()).abs() / (limit + limit * right.double().abs())
            worst = max(worst, float(error.max()))
    return worst


def mapped(value: Any, of: Callable[[Tensor], Tensor]) -> Any:
    """Return a tensor, or a dataclass or tuple with tensors, with each tensor replaced by `of` it."""
    if isinstance(value, Tensor):
        return of(value)
    if isinstance(value, tuple):
        parts = [mapped(part, of) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(mapped(getattr(value, f.name), of) for f in fields(value)))
    return value


def moved(value: Any, device: str) -> Any:
    return mapped(value, lambda tensor: tensor.to(device))


def in_float64(value: Any) -> Any:
    return mapped(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How a quantized file keeps a matrix: its numbers, the inputs that share a scale, and the scales' dtype."""

    code: Code
    group: int  # 0: all inputs
    scales: torch.dtype
    has_zeros: bool = False
    has_factors: bool = False


STORED_FORMS = {
    "FP8 with a scale for each output": StoredForm(Code.E4M3, 0, torch.float32),
    "FP8 in blocks of 128": StoredForm(Code.E4M3, 128, torch.float32),
    "int8": StoredForm(Code.INT8, 0, torch.float32),
    "int4 in groups of 128": StoredForm(Code.UINT4, 128, torch.float16, has_zeros=True),
    "MXFP4": StoredForm(Code.E2M1, 32, torch.float32),
    "NVFP4": StoredForm(Code.E2M1, 16, torch.bfloat16, has_factors=True),
}


Layout = tuple[int, int, int]
Call = tuple[Any, ...]
"""A function of operations and arguments that returns tensors, and the arguments."""


def compared(
    context: Context,
    calls_of: Callable[[Context, torch.dtype], Iterable[Call]],
    ops_of: Callable[[], Ops] | None = None,
    dtypes: Sequence[torch.dtype] = (),
) -> StepFinding:
    """Make each call, in each dtype, with the tested operations (or those of `ops_of`) and with torch's in float64 on
    the CPU, and compare the results."""
    ops, worst, count = context.ops if ops_of is None else ops_of(), 0.0, 0
    for dtype in dtypes or context.dtypes:
        for run, *arguments in calls_of(context, dtype):
            expected = run(TorchOps(), *in_float64(tuple(arguments)))
            found = run(ops, *moved(tuple(arguments), context.device))
            worst, count = max(worst, worst_of(found, expected)), count + 1
    return StepFinding(f"{count} batches agree; the greatest error is {worst:.0%} of what is allowed")


def _batch(
    seed: int, prefix_lens: list[int], new_lens: list[int], layout: Layout, dtype: torch.dtype, context: Context
) -> PagedBatch:
    heads, kv_heads, d = layout
    page = 16 if context.on_gpu else 4
    return make_batch(seed, prefix_lens, new_lens, heads=heads, kv_heads=kv_heads, d=d, page=page, dtype=dtype)


def _norms_and_gate(ops: Ops, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    return ops.rms_norm(x, weight, 1e-5), total, normed, ops.silu_mul(x), ops.gelu_mul(x)


def _rope_write(ops: Ops, batch: PagedBatch, table: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    return *ops.rope_write(batch.q, batch.k, batch.v, table, positions, slots, batch.kv), *batch.kv


def _decode(ops: Ops, batch: PagedBatch, view: DecodeBatch, softmax: Softmax = PLAIN) -> tuple[Tensor]:
    return (ops.decode_attention(batch.q[: len(view.lens)], batch.kv, view, softmax),)


def _verify(ops: Ops, batch: PagedBatch, bits: Tensor, softmax: Softmax = PLAIN) -> tuple[Tensor]:
    return (ops.verify_attention(batch.q, batch.k, batch.v, batch.kv, batch.tree(bits), softmax),)


def _extend(ops: Ops, batch: PagedBatch, softmax: Softmax = PLAIN) -> tuple[Tensor]:
    return (ops.extend_attention(batch.q, batch.k, batch.v, batch.kv, batch.chunks(), softmax),)


def norms_and_gate(context: Context, dtype: torch.dtype) -> Iterator[Call]:
    for n, width in ((1, 4096), (70, 1536), (513, 128)) if context.on_gpu else ((1, 64), (7, 24)):
        generator = torch.Generator().manual_seed(n)
        shapes = ((n, width), (n, width), (width,))
        yield _norms_and_gate, *(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def rope_write(layout: Layout, context: Context, dtype: torch.dtype) -> Iterator[Call]:
    count = 33 if context.on_gpu else 5
    batch = _batch(4, [0], [count], layout, dtype, context)
    positions = torch.arange(count) * (MAX_POSITIONS // count)
    slots = torch.randperm(batch.k_pool.shape[0] - 1, generator=torch.Generator().manual_seed(1))[:count] + 1
    yield _rope_write, batch, rotary_table(layout[2]), positions, slots


def decode(layout: Layout, context: Context, dtype: torch.dtype) -> Iterator[Call]:
    for lens in ([1], [4097], [700, 0, 33, 2048]) if context.on_gpu else ([1], [70, 0, 33]):
        batch = _batch(1, lens, [1] * len(lens), layout, dtype, context)
        yield _decode, batch, decode_view(batch, lens)


def verify(layout: Layout, context: Context, dtype: torch.dtype) -> Iterator[Call]:
    large = (([3000], 4), ([900, 0, 64, 17], 16), ([2000, 5], 64), ([40] * 40, 8), ([300, 1], 1))
    for prefix_lens, nodes in large if context.on_gpu else (([9, 0], 4), ([30], 16)):
        bs = len(prefix_lens)
        batch = _batch(2, prefix_lens, [nodes] * bs, layout, dtype, context)
        yield _verify, batch, random_tree_bits(nodes, bs, nodes, padding=True)


def extend(layout: Layout, context: Context, dtype: torch.dtype) -> Iterator[Call]:
    large = (([0], [513]), ([1000], [3]), ([300, 0, 77, 12], [64, 129, 0, 1]))
    for prefix_lens, new_lens in large if context.on_gpu else (([0], [9]), ([20, 0, 7], [5, 0, 1])):
        yield _extend, _batch(3, prefix_lens, new_lens, layout, dtype, context)


def latent_keys(context: Context, dtype: torch.dtype) -> Iterator[Call]:
    """Yield attention whose keys are the values, but for some channels."""
    layout, key_only = ((16, 1, 576), 32) if context.on_gpu else ((4, 1, 16), 2)
    batch = _batch(9, [300, 2, 0], [7] * 3, layout, dtype, context)
    yield _latent_keys, batch, random_tree_bits(1, 3, 7), decode_view(batch, [301, 3, 0]), key_only


def _latent_keys(ops: Ops, batch: PagedBatch, bits: Tensor, view: DecodeBatch, key_only: int) -> tuple[Tensor, ...]:
    k, v, kv = batch.k, batch.k[..., :0], KVTensors(batch.k_pool, batch.k_pool[..., :0])
    softmax = Softmax(0.05, key_only=key_only)
    found = (
        ops.verify_attention(batch.q, k, v, kv, batch.tree(bits), softmax),
        ops.extend_attention(batch.q, k, v, kv, batch.chunks(), softmax),
        ops.decode_attention(batch.q[: len(view.lens)], kv, view, softmax),
    )
    return tuple(out.unflatten(-1, (2, -1))[..., key_only:] for out in found)


def around_experts(context: Context, dtype: torch.dtype) -> Iterator[Call]:
    """Yield the choice of experts, and the sum of what they give beside that of a shared MLP."""
    experts, width = (512, 2048) if context.on_gpu else (16, 24)
    generator = torch.Generator().manual_seed(5)
    for router in (Router(8, normalized=True), Router(4, True, 8, 4, True, 1e-20, 2.5)):
        shapes = ((5, experts), (experts,), (5, router.top_k, width), (5, width), (5, width), (1, width))
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        yield _around_experts, router, *tensors


def _around_experts(
    ops: Ops, router: Router, logits: Tensor, bias: Tensor, out: Tensor, shared: Tensor, x: Tensor, gate: Tensor
) -> tuple[Tensor, ...]:
    wide = torch.promote_types(bias.dtype, torch.float32)
    weights, _ = ops.route(logits, router, bias.to(wide) if router.is_sigmoid else None, logits.dtype)
    return weights, ops.combine(out, weights, shared, x, gate / x.shape[1])


def kinds_of_softmax(context: Context, dtype: torch.dtype) -> Iterator[Call]:
    layout = (16, 2, 64) if context.on_gpu else CPU_LAYOUTS[0]
    batch, bits = _batch(9, [40, 2, 0], [7] * 3, layout, dtype, context), random_tree_bits(1, 3, 7)
    view = decode_view(batch, [41, 3, 0])
    for softmax in softmaxes(layout[0], dtype):
        yield _verify, batch, bits, softmax
        yield _extend, batch, softmax
        yield _decode, batch, view, softmax


def numbers_of_8_bits(head_dims: Sequence[int] | None, context: Context, dtype: torch.dtype) -> Iterator[Call]:
    """Yield attention over E4M3 with scales, in all layouts or in those with heads of `head_dims` channels."""
    for layout in GPU_LAYOUTS if context.on_gpu else CPU_LAYOUTS:
        if head_dims is not None and layout[2] not in head_dims:
            continue
        batch, bits = _batch(9, [70, 2, 0], [7] * 3, layout, dtype, context), random_tree_bits(1, 3, 7)
        batch = replace(batch, **{name: getattr(batch, name).to(E4M3) for name in ("k", "v", "k_pool", "v_pool")})
        softmax = PLAIN.over(KVScales(0.6, 1.7), batch.q)
        yield _verify, batch, bits, softmax
        yield _extend, batch, softmax
        yield _decode, batch, decode_view(batch, [71, 3, 0]), softmax


def filters(context: Context, dtype: torch.dtype) -> Iterator[Call]:
    """Yield distributions with top-k, with top-p and with both, over logits of which many are equal."""
    vocab = 151_936 if context.on_gpu else 300
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(3)).mul(3).to(torch.bfloat16).to(dtype)
    for top_k, top_p in ((40, 1.0), (0, 0.9), (1000, 0.5), (1, 0.3)):
        temperature = torch.tensor([0.0, 0.6, 1.0, 1.5], dtype=torch.float64)
        yield _filters, logits, temperature, torch.full((4,), top_p).double(), torch.full((4,), top_k)


def _filters(ops: Ops, logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, ...]:
    """Return the distributions, and how many tokens top-k has kept. How many top-p keeps may depend on a rounding."""
    probs = ops.target_probs(logits, temperature, top_p, top_k)
    return (probs,) if bool((top_p < 1).any()) else (probs, (probs > 0).sum(1).to(probs.dtype))


def stored_products(form: str, context: Context, dtype: torch.dtype) -> Iterator[Call]:
    """Yield products of one row up to a prompt's, and of experts, with numbers as files keep them."""
    out, width, experts = (768, 1024, 8) if context.on_gpu else (24, 128, 3)
    generator = torch.Generator().manual_seed(8)
    weight = stored_weight(STORED_FORMS[form], (out, width), generator)
    for rows in (1, 4, 33, 300) if context.on_gpu else (1, 5):
        yield _coded_product, torch.randn(rows, width, generator=generator).to(dtype), weight
    of_experts = stored_weight(STORED_FORMS[form], (experts, out, width), generator)
    x = torch.randn(5, width, generator=generator).to(dtype)
    yield _expert_product, x, of_experts, torch.randint(experts, (5, 2), generator=generator)


def stored_weight(form: StoredForm, shape: tuple[int, ...], generator: torch.Generator) -> CodedWeight:
    """Draw a matrix, or one for each expert, whose products with normal numbers are of size 1."""
    *rows, width = shape
    group = form.group or width
    codes = torch.randint(256, (*rows, width * form.code.bits // 8), generator=generator, dtype=torch.uint8)
    if form.code is Code.E4M3:
        codes &= 0xBF  # at most 1.875, and no NaN
    groups = (*rows, width // group)
    size = {Code.E4M3: 1.0, Code.INT8: 1 / 74, Code.UINT4: 1 / 5, Code.E2M1: 1 / 3}[form.code] * width**-0.5
    # Powers of two, which every format of scales has.
    scales = 2.0 ** torch.randint(-1, 2, groups, generator=generator) * 2.0 ** round(math.log2(size))
    zeros = torch.randint(5, 11, groups, generator=generator, dtype=torch.uint8) if form.has_zeros else None
    factors = torch.rand(rows, generator=generator) + 0.5 if form.has_factors else None
    return CodedWeight(form.code, codes, scales.to(form.scales), group, zeros, factors)


def _coded_product(ops: Ops, x: Tensor, weight: CodedWeight) -> tuple[Tensor]:
    return (ops.coded_product(x, weight),)


def _expert_product(ops: Ops, x: Tensor, weight: CodedWeight, experts: Tensor) -> tuple[Tensor]:
    return (ops.expert_product(x, weight, experts),)


def large_pool(context: Context) -> StepFinding:
    """Read the last slots of a pool of 4.3 GB: their addresses need 64 bits."""
    heads, d = 8, 128
    num_slots = (1 << 31) // (heads * d) + 64
    pool = torch.zeros(num_slots, heads, d, dtype=torch.bfloat16, device=context.device)
    batch = make_batch(6, [30], [1], heads=32, kv_heads=heads, d=d, page=16, dtype=torch.bfloat16)
    last = num_slots - batch.k_pool.shape[0]
    pool[last:] = batch.k_pool.to(context.device)
    view, exact, there = decode_view(batch, [30]), in_float64(batch), moved(batch, context.device)
    expected = TorchOps().decode_attention(exact.q, KVTensors(exact.k_pool, exact.k_pool), view)
    behind = replace(moved(view, context.device), table=there.table + last)
    found = context.ops.decode_attention(there.q, KVTensors(pool, pool), behind)
    return StepFinding(f"right; the greatest error is {worst_of([found], [expected]):.0%} of what is allowed")


def large_vocabularies(context: Context) -> StepFinding:
    """Sample from chains of drafts over vocabularies that one block of a kernel does not hold; to the last bit."""
    twins, count = TorchOps(), 0
    for vocab in (32_000, 151_936):
        generator = torch.Generator().manual_seed(vocab)
        drafts = torch.randint(vocab, (3, 4), generator=generator)
        tree = twins.build_chain(drafts[:, 0], drafts, torch.full((3,), 9), MAX_POSITIONS)
        for peak in (0.0, 0.7):
            probs = torch.rand(15, vocab, generator=generator, dtype=torch.float64) ** 40
            probs = (1 - peak) * probs / probs.sum(1, keepdim=True)
            probs.view(3, 5, vocab)[:, :4].scatter_add_(2, drafts.unsqueeze(2), torch.full((3, 4, 1), peak).double())
            coins = [torch.rand(3, 5, generator=generator, dtype=torch.float64) for _ in range(2)]
            expected = twins.verify_sampling(tree, probs.float(), *coins)
            found = context.ops.verify_sampling(*moved((tree, probs.float(), *coins), context.device))
            for name in ("accept_index", "accept_lens", "predict", "failed"):
                ours, right = getattr(found, name).cpu(), getattr(expected, name)
                assert torch.equal(ours, right), f"{name} over {vocab:,} tokens: {ours.tolist()}, not {right.tolist()}"
            count += 1
    return StepFinding(f"{count} batches are equal to the last bit")
