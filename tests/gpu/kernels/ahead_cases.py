"""Specialisations of every kernel at realistic shapes, which are compiled for GPUs that are not there."""

from __future__ import annotations

from typing import Any

import torch
from ahead_case import ARCHITECTURES, AotCase, traits_of
from ahead_rounds import ROUND_CASES
from foredraft.gpu.kernels.jit import next_power_of_2
from foredraft.gpu.kernels.layers import (
    decode_attention,
    delta_nodes,
    experts,
    extend_attention,
    parts,
    products,
    rms_norm,
    rope_write,
    silu_mul,
    verify_attention,
)
from foredraft.gpu.kernels.layers.flash import LISTED_ROWS, Channels, Tiles, computing_tiles, reading_tiles
from foredraft.gpu.kernels.layers.parts import JOINED_ROWS

HEAD_LAYOUTS = ((1, 64), (8, 64), (5, 80), (7, 128), (8, 128), (1, 256), (4, 256))
"""Query heads per key head, and channels: the corners of what models have, for compiled cases beside
the usual 4 of 128."""


STRIDES = (
    "q_token_stride q_head_stride k_token_stride k_head_stride v_token_stride v_head_stride"
    " pool_slot_stride pool_head_stride"
)
DECODE_STRIDES = "q_token_stride q_head_stride k_slot_stride k_head_stride v_slot_stride v_head_stride"
ROPE_STRIDES = (
    "q_token_stride q_head_stride k_token_stride k_head_stride v_token_stride v_head_stride table_stride"
    " k_slot_stride k_pool_head_stride v_slot_stride v_pool_head_stride"
)


WIDE_LAYOUTS = ((8, 512), (16, 576))
"""Those of Gemma 4's layers without a window, and of latent attention on a rank of a few."""


def channels_of(d: int) -> Channels:
    return Channels.of(d, 32 if d == 576 else 0)


def tensors_of(names: str, as_bytes: bool) -> str:
    """Return names of tensors, without those of keys and values if these are bytes."""
    return " ".join(name for name in names.split() if not (as_bytes and name in ("k", "v", "k_pool", "v_pool")))


def kind_of(window: int, softcap: float) -> str:
    """Return how the name of a compiled case ends: windows come with a soft cap (Gemma 2) or with sinks (gpt-oss)."""
    return "" if not window else ", window, capped" if softcap else ", window, sinks"


def attention_case(
    name: str,
    kernel: Any,
    size: Tiles,
    arguments: dict[str, str],
    architecture: int,
    group: int,
    d: int,
    *,
    window: int = 0,
    softcap: float = 0.0,
    wide: bool = False,
    strides: str = STRIDES,
    **constants: int | None,
) -> AotCase:
    """Return a case of an attention kernel with `group` query heads of `d` channels per key head; `wide`:
    in float32, as it is compared."""
    return AotCase(
        f"{name}{', float32' * wide}{kind_of(window, softcap)}",
        kernel,
        {**arguments, "*i32": f"table {arguments.get('*i32', '')}", "fp32": "scale_log2 value_factor"},
        {"GROUP": group, **size.constants(), **constants}
        | {"WINDOW": window, "SOFTCAP": softcap, "SINKS": window > 0 and not softcap},
        divisible_by_16=strides,
        **size.options(),
        tensor_cores=not wide,
        may_spill=(wide and (d > 128 or bool(arguments.get("*u8")))) or (d > 256 and name.startswith("verify")),
        architectures=(architecture,),
    )


def decode_case(
    heads: int, kv_heads: int, d: int, rows: int, architecture: int, as_bytes: bool = False, **softmax: float
) -> AotCase:
    group = heads // kv_heads
    return attention_case(
        f"decode_attention {heads}/{kv_heads} heads of {d}{', parts' * (rows > 1)}{', bytes' * as_bytes}",
        decode_attention.decode_attention_kernel,
        size := reading_tiles(group, channels_of(d), torch.bfloat16, traits_of(architecture), has_bytes=as_bytes),
        {
            "*bf16": f"{tensors_of('q k_pool v_pool sinks out', as_bytes)} {'' if rows > 1 else 'partial lse arrived'}",
            "*u8": "k_pool v_pool" if as_bytes else "",
            "*fp32": "partial lse" if rows > 1 else "",
            "*i32": "arrived" if rows > 1 else "",
            "*i64": "rows bases tails lens",
            "i32": f"{DECODE_STRIDES} table_stride num_rows least most",
        },
        architecture,
        group,
        d,
        strides=DECODE_STRIDES,
        ROWS=rows,
        JOIN=rows > 1 and size.block_m <= JOINED_ROWS,
        **softmax,
    )


def verify_case(
    num_nodes: int,
    rows: int,
    architecture: int,
    wide: bool = False,
    group: int = 4,
    d: int = 128,
    as_bytes: bool = False,
    packed: bool = False,
    **softmax: float,
) -> AotCase:
    dtype, pointer = (torch.float32, "*fp32") if wide else (torch.bfloat16, "*bf16")
    tensors = tensors_of("q k v k_pool v_pool sinks out", as_bytes)
    parts = "partial lse"  # they are summed in float32
    floats = {pointer: tensors, "*fp32": parts} if not wide else {pointer: f"{tensors} {parts}"}
    floats = floats | {"*i32": "arrived"} if rows > 1 else {pointer: f"{tensors} {parts} arrived"}
    return attention_case(
        f"verify_attention {8 * group}/8 heads of {d}, {num_nodes} nodes{', packed' * packed}"
        f"{', parts' * (rows > 1)}{', bytes' * as_bytes}",
        verify_attention.verify_attention_kernel,
        size := reading_tiles(num_nodes * group, channels_of(d), dtype, traits_of(architecture), group, as_bytes),
        {
            **floats,
            "*u8": "k v k_pool v_pool" if as_bytes else "",
            "*i64": "rows prefix_lens ancestor_bits" + " places" * packed,
            "i32": f"{STRIDES} table_stride num_rows num_nodes least most",
        },
        architecture,
        group,
        d,
        wide=wide,
        NEW_BLOCK=max(16, next_power_of_2(num_nodes)),
        ROWS=rows,
        JOIN=rows > 1 and size.block_m <= JOINED_ROWS,
        **({} if packed else {"places": None}),
        **softmax,
    )


def extend_case(
    new_len: int,
    architecture: int,
    wide: bool = False,
    group: int = 4,
    d: int = 128,
    as_bytes: bool = False,
    **softmax: float,
) -> AotCase:
    dtype, pointer = (torch.float32, "*fp32") if wide else (torch.bfloat16, "*bf16")
    return attention_case(
        f"extend_attention {8 * group}/8 heads of {d}, {new_len} tokens{', bytes' * as_bytes}",
        extend_attention.extend_attention_kernel,
        computing_tiles(new_len * group, channels_of(d), dtype, traits_of(architecture), as_bytes),
        {
            pointer: tensors_of("q k v k_pool v_pool sinks out", as_bytes),
            "*u8": "k v k_pool v_pool" if as_bytes else "",
            "*i64": "rows prefix_lens starts",
            "i32": f"{STRIDES} table_stride",
        },
        architecture,
        group,
        d,
        wide=wide,
        **softmax,
    )


ATTENTION = [
    case
    for architecture in ARCHITECTURES
    for case in (
        *(decode_case(32, 8, 128, rows, architecture) for rows in (1, LISTED_ROWS)),
        decode_case(64, 8, 64, 1, architecture, window=128),
        decode_case(64, 8, 64, 1, architecture, window=4096, softcap=72.0),
        *(decode_case(8 * group, 8, d, LISTED_ROWS, architecture) for group, d in HEAD_LAYOUTS),
        # 4 nodes make tiles of 16 and 32 rows, 16 nodes of 16 and 64.
        *(verify_case(nodes, rows, architecture) for nodes, rows in ((4, LISTED_ROWS), (16, 1), (64, LISTED_ROWS))),
        verify_case(16, LISTED_ROWS, architecture, wide=True),
        verify_case(8, LISTED_ROWS, architecture, packed=True),
        verify_case(8, LISTED_ROWS, architecture, packed=True, window=128),
        verify_case(16, LISTED_ROWS, architecture, window=128),
        verify_case(16, LISTED_ROWS, architecture, window=4096, softcap=72.0),
        *(
            verify_case(nodes, LISTED_ROWS, architecture, group=group, d=d)
            for group, d in HEAD_LAYOUTS
            for nodes in (4, 16)
        ),
        verify_case(16, LISTED_ROWS, architecture, wide=True, group=1, d=256),
        *(extend_case(new_len, architecture) for new_len in (4, 2048)),
        extend_case(2048, architecture, wide=True),
        extend_case(2048, architecture, window=128),
        extend_case(2048, architecture, window=4096, softcap=72.0),
        *(extend_case(new_len, architecture, group=group, d=d) for group, d in HEAD_LAYOUTS for new_len in (4, 2048)),
        extend_case(2048, architecture, wide=True, group=1, d=256),
        verify_case(16, LISTED_ROWS, architecture, wide=True, as_bytes=True),
        *(
            case
            for group, d in ((4, 128), *HEAD_LAYOUTS)
            for case in (
                decode_case(8 * group, 8, d, LISTED_ROWS, architecture, as_bytes=True),
                verify_case(4, LISTED_ROWS, architecture, group=group, d=d, as_bytes=True),
                verify_case(16, LISTED_ROWS, architecture, group=group, d=d, as_bytes=True),
                extend_case(4, architecture, group=group, d=d, as_bytes=True),
                extend_case(2048, architecture, group=group, d=d, as_bytes=True),
            )
        ),
        *(
            case
            for group, d in WIDE_LAYOUTS
            for as_bytes in (False, True)
            for case in (
                decode_case(8 * group, 8, d, LISTED_ROWS, architecture, as_bytes=as_bytes),
                verify_case(4, LISTED_ROWS, architecture, group=group, d=d, as_bytes=as_bytes),
                verify_case(64, LISTED_ROWS, architecture, group=group, d=d, as_bytes=as_bytes),
                extend_case(2048, architecture, group=group, d=d, as_bytes=as_bytes),
            )
        ),
    )
]
JOIN = [
    AotCase(
        f"join_parts, heads of {d}{kind_of(window, 0.0)}",
        parts.join_parts_kernel,
        {"*fp32": "partial lse", "*bf16": "out", "*i64": "lens", "fp32": "value_factor"}
        | {"i32": "heads num_nodes least most"},
        parts.join_constants(reading_tiles(64, channels_of(d), torch.bfloat16, traits_of(90)), window),
    )
    for d, window in ((80, 0), (128, 0), (128, 4096), (256, 0), (576, 0))
]
ROPE = [
    AotCase(
        f"rope_write 32/{kv_heads} heads{', bytes' * as_bytes}",
        rope_write.rope_write_kernel,
        {
            "*bf16": f"q k v q_out {'' if as_bytes else 'k_out v_out k_pool v_pool'}",
            "*u8": "k_out v_out k_pool v_pool" if as_bytes else "",
            "*fp32": "cos_sin",
            "fp32": "key_factor value_factor",
            "*i64": "positions slots",
            "i32": f"heads {'kv_heads ' if kv_heads > 1 else ''}{ROPE_STRIDES}",
        },
        # Triton makes a constant of an integer that is 1.
        {
            "HALF": 64,
            "BLOCK_HALF": 64,
            "HEADS": rope_write.HEADS_PER_PROGRAM,
            "VALUES": True,
            **({} if kv_heads > 1 else {"kv_heads": 1}),
        },
        divisible_by_16=ROPE_STRIDES,
        num_warps=2,
    )
    for kv_heads, as_bytes in ((8, False), (1, False), (8, True))
]
GATE = [
    AotCase(
        f"gate_mul 14336, {kind}",
        silu_mul.gate_mul_kernel,
        {"*bf16": "gate up out", "i32": "channels gate_stride up_stride"},
        {"BLOCK": silu_mul.BLOCK, "KIND": kind},
        divisible_by_16="channels gate_stride up_stride",
    )
    for kind in (silu_mul.SILU, silu_mul.GELU, silu_mul.SIGMOID)
]
EXPERTS = [
    AotCase(
        f"route {count} experts",
        experts.route_kernel,
        {"*bf16": "weights", "*fp32": f"logits{' bias' * (groups > 1)}", "*i64": "experts", "fp32": "epsilon scale"}
        | {"i32": "logits_stride"},
        {**({} if groups > 1 else {"bias": None}), "EXPERTS": count, "BLOCK": next_power_of_2(count), "TOP_K": top_k}
        | {"BLOCK_TOP": next_power_of_2(top_k), "SIGMOID": groups > 1, "NUM_GROUPS": groups, "NORMALIZED": True}
        | {"BLOCK_GROUPS": groups, "TOP_GROUPS": min(4, groups)},
    )
    for count, top_k, groups in ((512, 10, 1), (256, 8, 8))
] + [
    AotCase(
        "combine 10 experts",
        experts.combine_kernel,
        {"*bf16": "out weights shared x gate total", "i32": "channels x_stride hidden"},
        {"TOP_K": 10, "BLOCK": experts.SUM_BLOCK, "BLOCK_HIDDEN": 1024, "SHARED": True, "GATED": True},
        divisible_by_16="channels x_stride hidden",
    )
]
OF_HEADS = {"HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_K": 128, "BLOCK_V": 128, "KERNEL": 4}
RECURRENT = [
    AotCase(
        f"delta_nodes of {nodes}",
        delta_nodes.delta_nodes_kernel,
        {"*bf16": "projected history kernel norm out mixed", "*i64": "rows parents", "*u8": "ancestors"}
        | {"*fp32": "matrices log_rate step_bias log_decays path_decays keys updates", "fp32": "eps"}
        | {"i32": "token_stride parents_stride ancestors_stride num_nodes"},
        {**OF_HEADS, "GROUP": 2, "NODES": nodes},
        divisible_by_16="token_stride",
        num_warps=delta_nodes.NUM_WARPS,
    )
    for nodes in (4, 8, 16)
] + [
    AotCase(
        "delta_keep",
        delta_nodes.delta_keep_kernel,
        {"*bf16": "history mixed", "*fp32": "matrices log_decays path_decays keys updates", "*i64": "rows path lens"}
        | {"i32": "num_slots num_nodes width channels"},
        {**OF_HEADS, "BLOCK_C": 256, "BLOCK_H": 4},
        divisible_by_16="channels",
        num_warps=delta_nodes.NUM_WARPS,
    )
]
NORM = [
    AotCase(
        f"rms_norm {width}{' + residual' if add else ''}",
        rms_norm.rms_norm_kernel,
        {
            "*bf16": "x residual weight out total_out",
            "i32": "num_rows heads channels token_stride head_stride",
            "fp32": "eps",
        },
        {"ROWS": max(1, rms_norm.ELEMENTS_PER_PROGRAM // width), "BLOCK": width, "ADD": add},
        divisible_by_16="channels token_stride head_stride",
        num_warps=min(16, max(1, width * max(1, rms_norm.ELEMENTS_PER_PROGRAM // width) // 512)),
    )
    for width, add in ((128, False), (4096, False), (4096, True), (8192, True))
]
PRODUCT = {"*bf16": "x out", "i32": "n out_features in_features groups row_stride"}
PRODUCT_SIZES = "out_features in_features row_stride"


def stored_numbers(kind: int) -> tuple[dict[str, str], dict[str, None]]:
    """Return the types of a weight's tensors, and those that it lacks, which are constants."""
    names = {
        products.DENSE: {"*bf16": "x out codes"},
        products.E4M3: {"*u8": "codes", "*fp32": "scales"},
        products.INT8: {"*u8": "codes", "*bf16": "x out scales"},
        products.UINT4: {"*u8": "codes zeros", "*fp16": "scales"},
        products.E2M1: {"*u8": "codes", "*bf16": "x out scales", "*fp32": "factors"},
    }[kind]
    known = " ".join(names.values()).split()
    return names, {name: None for name in ("scales", "zeros", "factors") if name not in known}


PRODUCTS = [
    AotCase(
        f"coded_product {kind}, groups of {group}, {rows} rows, {tiling.features} features, {tiling.warps} warps",
        products.coded_product_kernel,
        PRODUCT | stored_numbers(kind)[0],
        stored_numbers(kind)[1]
        | {"KIND": kind, "GROUP": group, "ROWS": rows, "BLOCK_N": tiling.features, "BLOCK_K": products.BLOCK_K},
        divisible_by_16=PRODUCT_SIZES,
        tensor_cores=True,
        num_warps=tiling.warps,
    )
    for kind, group in (
        (products.E4M3, 128),
        (products.INT8, 4096),
        (products.UINT4, 128),
        (products.E2M1, 16),
        (products.E2M1, 32),
    )
    for rows in (16, 64, 128)
    for tiling in products.TILINGS
] + [
    AotCase(
        f"expert_product {kind}, groups of {group}",
        products.expert_product_kernel,
        PRODUCT | {"*i64": "experts"} | stored_numbers(kind)[0],
        stored_numbers(kind)[1]
        | {"TOP_K": 8, "KIND": kind, "GROUP": group, "ROWS": 16, "CHUNK": products.CHUNK, "GATED": group != 128}
        | {"BLOCK_N": 32 if kind == products.E2M1 else 64}
        | {"BLOCK_K": products.BLOCK_K},
        divisible_by_16=PRODUCT_SIZES,
        tensor_cores=True,
    )
    for kind, group in ((products.DENSE, products.BLOCK_K), (products.E4M3, 128), (products.E2M1, 32))
]
CASES = (
    *ATTENTION,
    *JOIN,
    *ROPE,
    *GATE,
    *EXPERTS,
    *RECURRENT,
    *NORM,
    *PRODUCTS,
    *ROUND_CASES,
)
