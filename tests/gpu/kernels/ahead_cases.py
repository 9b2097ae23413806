"""Specialisations of every kernel at realistic shapes, which are compiled for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from foredraft.gpu.kernels.jit import next_power_of_2
from foredraft.gpu.kernels.layers import (
    decode_attention,
    extend_attention,
    flash,
    products,
    rms_norm,
    rope_write,
    silu_mul,
    verify_attention,
)
from foredraft.gpu.kernels.layers.flash import LISTED_ROWS, Tiles, computing_tiles, reading_tiles
from foredraft.gpu.kernels.rounds import (
    bonus,
    build_tree,
    coins,
    compact,
    duplicate_tails,
    move_kv,
    relay,
    verify_greedy,
    verify_sampling,
)

CAPABILITIES = (8, 9, 10)
"""Major numbers of the GPUs that cases are compiled for."""
HEAD_LAYOUTS = ((1, 64), (8, 64), (5, 80), (7, 128), (8, 128), (1, 256), (4, 256))
"""Query heads per key head, and channels: the corners of what models have, for compiled cases beside
the usual 4 of 128."""


@dataclass(frozen=True, slots=True)
class AotCase:
    """One specialisation of a kernel, at a realistic shape.

    `types` lists the parameters of each type in Triton's words ("*bf16", "*i64", "i32", "fp32"), `constexprs` has the
    values of the constant ones. Pointers are taken to be 16-byte aligned, as torch allocates them, and so are the
    integers in `divisible_by_16`.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]  # names with spaces between them
    constexprs: Mapping[str, Any]
    divisible_by_16: str = ""
    num_warps: int = 4
    num_stages: int = 3
    tensor_cores: bool = False  # the compiled code must use them
    may_spill: bool = False  # where no choice of blocks and warps fits the registers
    capabilities: tuple[int, ...] = CAPABILITIES  # major numbers of the GPUs that it is launched on
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def signature(self) -> dict[str, str]:
        """Return the type of each parameter that is not constant."""
        return {name: kind for kind, names in self.types.items() for name in names.split()}


STRIDES = (
    "q_token_stride q_head_stride k_token_stride k_head_stride v_token_stride v_head_stride"
    " pool_slot_stride pool_head_stride"
)
DECODE_STRIDES = "q_token_stride q_head_stride k_slot_stride k_head_stride v_slot_stride v_head_stride"
ROPE_STRIDES = (
    "q_token_stride q_head_stride k_token_stride k_head_stride v_token_stride v_head_stride table_stride"
    " k_slot_stride k_pool_head_stride v_slot_stride v_pool_head_stride"
)


def kind_of(window: int, softcap: float) -> str:
    """Return how the name of a compiled case ends: windows come with a soft cap (Gemma 2) or with sinks (gpt-oss)."""
    return "" if not window else ", window, capped" if softcap else ", window, sinks"


def attention_case(
    name: str,
    kernel: Any,
    size: Tiles,
    arguments: dict[str, str],
    capability: int,
    group: int,
    d: int,
    *,
    window: int = 0,
    softcap: float = 0.0,
    wide: bool = False,
    strides: str = STRIDES,
    **constants: int,
) -> AotCase:
    """Return a case of an attention kernel with `group` query heads of `d` channels per key head; `wide`:
    in float32, as it is compared."""
    return AotCase(
        f"{name}{', float32' * wide}{kind_of(window, softcap)}",
        kernel,
        {**arguments, "*i32": "table", "fp32": "scale_log2"},
        {"GROUP": group, "HEAD_DIM": d, **size.constants(), **constants}
        | {"WINDOW": window, "SOFTCAP": softcap, "SINKS": window > 0 and not softcap},
        divisible_by_16=strides,
        **size.options(),
        tensor_cores=not wide,
        may_spill=wide and d > 128,
        capabilities=(capability,),
    )


def decode_case(heads: int, kv_heads: int, d: int, rows: int, capability: int, **softmax: float) -> AotCase:
    group = heads // kv_heads
    return attention_case(
        f"decode_attention {heads}/{kv_heads} heads of {d}{', parts' * (rows > 1)}",
        decode_attention.decode_attention_kernel,
        reading_tiles(group, d, torch.bfloat16, capability),
        {
            "*bf16": f"q k_pool v_pool sinks out {'' if rows > 1 else 'partial lse'}",
            "*fp32": "partial lse" if rows > 1 else "",
            "*i64": "rows bases tails lens",
            "i32": f"{DECODE_STRIDES} table_stride num_rows least most",
        },
        capability,
        group,
        d,
        strides=DECODE_STRIDES,
        ROWS=rows,
        **softmax,
    )


def verify_case(
    num_nodes: int, rows: int, capability: int, wide: bool = False, group: int = 4, d: int = 128, **softmax: float
) -> AotCase:
    dtype, pointer = (torch.float32, "*fp32") if wide else (torch.bfloat16, "*bf16")
    tensors, parts = "q k v k_pool v_pool sinks out", "partial lse"  # parts are summed in float32
    floats = {pointer: f"{tensors} {parts}"} if wide or rows == 1 else {pointer: tensors, "*fp32": parts}
    return attention_case(
        f"verify_attention {8 * group}/8 heads of {d}, {num_nodes} nodes{', parts' * (rows > 1)}",
        verify_attention.verify_attention_kernel,
        reading_tiles(num_nodes * group, d, dtype, capability, group),
        {
            **floats,
            "*i64": "rows prefix_lens ancestor_bits",
            "i32": f"{STRIDES} table_stride num_rows num_nodes least most",
        },
        capability,
        group,
        d,
        wide=wide,
        NEW_BLOCK=max(16, next_power_of_2(num_nodes)),
        ROWS=rows,
        **softmax,
    )


def extend_case(
    new_len: int, capability: int, wide: bool = False, group: int = 4, d: int = 128, **softmax: float
) -> AotCase:
    dtype, pointer = (torch.float32, "*fp32") if wide else (torch.bfloat16, "*bf16")
    return attention_case(
        f"extend_attention {8 * group}/8 heads of {d}, {new_len} tokens",
        extend_attention.extend_attention_kernel,
        computing_tiles(new_len * group, d, dtype, capability),
        {
            pointer: "q k v k_pool v_pool sinks out",
            "*i64": "rows prefix_lens starts",
            "i32": f"{STRIDES} table_stride",
        },
        capability,
        group,
        d,
        wide=wide,
        **softmax,
    )


ATTENTION = [
    case
    for capability in CAPABILITIES
    for case in (
        *(decode_case(32, 8, 128, rows, capability) for rows in (1, LISTED_ROWS)),
        decode_case(64, 8, 64, 1, capability, window=128),
        decode_case(64, 8, 64, 1, capability, window=4096, softcap=72.0),
        *(decode_case(8 * group, 8, d, LISTED_ROWS, capability) for group, d in HEAD_LAYOUTS),
        # 4 nodes make tiles of 16 and 32 rows, 16 nodes of 16 and 64.
        *(verify_case(nodes, rows, capability) for nodes, rows in ((4, LISTED_ROWS), (16, 1), (64, LISTED_ROWS))),
        verify_case(16, LISTED_ROWS, capability, wide=True),
        verify_case(16, LISTED_ROWS, capability, window=128),
        verify_case(16, LISTED_ROWS, capability, window=4096, softcap=72.0),
        *(
            verify_case(nodes, LISTED_ROWS, capability, group=group, d=d)
            for group, d in HEAD_LAYOUTS
            for nodes in (4, 16)
        ),
        verify_case(16, LISTED_ROWS, capability, wide=True, group=1, d=256),
        *(extend_case(new_len, capability) for new_len in (4, 2048)),
        extend_case(2048, capability, wide=True),
        extend_case(2048, capability, window=128),
        extend_case(2048, capability, window=4096, softcap=72.0),
        *(extend_case(new_len, capability, group=group, d=d) for group, d in HEAD_LAYOUTS for new_len in (4, 2048)),
        extend_case(2048, capability, wide=True, group=1, d=256),
    )
]
JOIN = [
    AotCase(
        f"join_parts, heads of {d}{kind_of(window, 0.0)}",
        flash.join_parts_kernel,
        {"*fp32": "partial lse", "*bf16": "out", "*i64": "lens", "i32": "heads num_nodes least most"},
        flash._join_constants(d, 32 if d > 128 else 64, window),
    )
    for d, window in ((80, 0), (128, 0), (128, 4096), (256, 0))
]
ROPE = [
    AotCase(
        f"rope_write 32/{kv_heads} heads",
        rope_write.rope_write_kernel,
        {
            "*bf16": "q k v q_out k_out k_pool v_pool",
            "*fp32": "cos_sin",
            "*i64": "positions slots",
            "i32": f"heads {'kv_heads ' if kv_heads > 1 else ''}{ROPE_STRIDES}",
        },
        # Triton makes a constant of an integer that is 1.
        {
            "HALF": 64,
            "BLOCK_HALF": 64,
            "HEADS": rope_write.HEADS_PER_PROGRAM,
            **({} if kv_heads > 1 else {"kv_heads": 1}),
        },
        divisible_by_16=ROPE_STRIDES,
        num_warps=2,
    )
    for kv_heads in (8, 1)
]
GATE = [
    AotCase(
        f"{'gelu' if gelu else 'silu'}_mul 14336",
        silu_mul.silu_mul_kernel,
        {"*bf16": "gate_up out", "i32": "channels row_stride"},
        {"BLOCK": silu_mul.BLOCK, "GELU": gelu},
        divisible_by_16="channels row_stride",
    )
    for gelu in (False, True)
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
        f"coded_product {kind}, groups of {group}, {rows} rows",
        products.coded_product_kernel,
        PRODUCT | stored_numbers(kind)[0],
        stored_numbers(kind)[1]
        | {"KIND": kind, "GROUP": group, "ROWS": rows, "BLOCK_N": 32 if rows <= 32 else 64, "BLOCK_K": products.BLOCK_K}
        | {"PRECISION": "tf32"},
        divisible_by_16=PRODUCT_SIZES,
        tensor_cores=True,
    )
    for kind, group in (
        (products.E4M3, 128),
        (products.INT8, 4096),
        (products.UINT4, 128),
        (products.E2M1, 16),
        (products.E2M1, 32),
    )
    for rows in (16, 64)
] + [
    AotCase(
        f"expert_product {kind}, groups of {group}",
        products.expert_product_kernel,
        PRODUCT | {"*i64": "experts"} | stored_numbers(kind)[0],
        stored_numbers(kind)[1]
        | {"TOP_K": 8, "KIND": kind, "GROUP": group, "ROWS": 16, "CHUNK": products.CHUNK}
        | {"BLOCK_N": 32 if kind == products.E2M1 else 64}
        | {"BLOCK_K": products.BLOCK_K, "PRECISION": "tf32"},
        divisible_by_16=PRODUCT_SIZES,
        tensor_cores=True,
    )
    for kind, group in ((products.DENSE, products.BLOCK_K), (products.E4M3, 128), (products.E2M1, 32))
]
SELECT = {"*fp32": "scores", "*i32": "parents node_of kept", "i32": "n nodes"}
LINK = {
    "*i64": "roots candidate_tokens candidate_depths seq_lens tokens positions depths ancestor_bits",
    "*i32": "candidate_parents node_of kept parents next_token next_sibling",
    "i32": "n nodes max_position",
}
CHAIN = {"*i64": "roots drafts seq_lens tokens positions", "i32": "nodes max_position"}
BUILD_TREE_CASES = (
    AotCase("build_chain", build_tree._chain_kernel, CHAIN, {"NODES": 8}, num_warps=1),
    AotCase("select_64_candidates", build_tree._select_kernel, SELECT, {"DEPTH": 4, "N": 64}, num_warps=1),
    AotCase("select_2048_candidates", build_tree._select_kernel, SELECT, {"DEPTH": 7, "N": 2048}, num_warps=8),
    AotCase("link_16_nodes", build_tree._link_kernel, LINK, {"DEPTH": 4, "NODES": 16}, num_warps=1),
    AotCase("link_64_nodes", build_tree._link_kernel, LINK, {"DEPTH": 7, "NODES": 64}, num_warps=4),
)
VERIFY_GREEDY_TYPES = {
    "*i64": "tokens depths ancestor_bits targets",
    "*i32": "parents accept_index accept_lens",
    "*i8": "failed",
    "i32": "nodes width",
}
VERIFY_GREEDY_CASES = (
    AotCase(
        "verify_greedy_8", verify_greedy._greedy_kernel, VERIFY_GREEDY_TYPES, {"NODES": 8, "WIDTH": 8}, num_warps=1
    ),
    AotCase(
        "verify_greedy_64", verify_greedy._greedy_kernel, VERIFY_GREEDY_TYPES, {"NODES": 64, "WIDTH": 64}, num_warps=4
    ),
)
SUM = {"*fp32": "probs greatest", "*fp64": "totals", "*i32": "counts best", "i32": "vocab chunks"}
SAMPLING = {
    "*fp32": "probs greatest",
    "*fp64": "totals accept_coins bonus_coins",
    "*i64": "tokens depths ancestor_bits predict",
    "*i32": "parents next_token next_sibling counts best accept_index accept_lens",
    "*i8": "failed",
    "i32": "width vocab chunks",
}
VERIFY_SAMPLING_CASES = (
    AotCase("sum_probs", verify_sampling._sum_kernel, SUM, {"CHUNK": 4096}, "vocab"),
    *(
        AotCase(
            f"verify_sampling_{nodes}",
            verify_sampling._sampling_kernel,
            SAMPLING,
            {
                "NODE_COUNT": nodes,
                "NODES": nodes,
                "WIDTH": 8,
                "CHUNKS": 64,
                "CHUNK": 4096,
                "BLOCK": verify_sampling.MIN_CHUNK,
                "COLUMNS": verify_sampling.COLUMNS,
            },
            divisible_by_16="vocab",
            num_warps=verify_sampling._warps(nodes),
            options={"maxnreg": verify_sampling.MAX_REGISTERS},
        )
        for nodes in (8, 16, 64)
    ),
)
COINS_TYPES = {"*i64": "keys positions", "*fp64": "coins", "i64": "state", "i32": "n width"}
COINS_CASES = (AotCase("coins", coins._coins_kernel, COINS_TYPES, coins._CONSTANTS),)
COMPACT_TYPES = {"*i64": "values out", "*i32": "accept_index", "i32": "nodes width row_words"}
COMPACT_CASES = (AotCase("compact", compact._compact_kernel, COMPACT_TYPES, {"BLOCK": compact.BLOCK}, "row_words"),)
RELAY_CASES = (
    AotCase(
        "relay_gather", relay._gather_kernel, {"*i64": "buffer rows out", "i32": "row_words"}, {"BLOCK": relay.BLOCK}
    ),
    AotCase(
        "relay_scatter",
        relay._scatter_kernel,
        {"*i64": "buffer rows values", "i32": "row_words"},
        {"BLOCK": relay.BLOCK},
    ),
)
BONUS_TYPES = {"*i64": "predict emitted bonus", "*i32": "accept_index accept_lens", "i32": "width"}
BONUS_CASES = (AotCase("gather_emitted", bonus._gather_kernel, BONUS_TYPES, {"WIDTH": 64}, num_warps=1),)
MOVE = {
    "*i64": "k_pools v_pools node_slots",
    "*i32": "accept_index accept_lens",
    "i32": "num_slots row_words nodes width columns",
}
COPY = {"*i64": "k_from v_from k_to v_to sources targets", "i32": "slots_from slots_to row_words"}
MOVE_KV_CASES = (
    AotCase(
        "move_accepted",
        move_kv._move_accepted_kernel,
        MOVE,
        {"LANES": 8, "BLOCK": move_kv.BLOCK},
        "num_slots row_words",
    ),
    AotCase("gather_slots", move_kv._copy_slots_kernel, COPY, {"GATHER": True, "BLOCK": move_kv.BLOCK}, "row_words"),
    AotCase("scatter_slots", move_kv._copy_slots_kernel, COPY, {"GATHER": False, "BLOCK": move_kv.BLOCK}, "row_words"),
)
DUPLICATE_TAILS_CASES = (
    AotCase(
        "duplicate_tails",
        duplicate_tails._duplicate_kernel,
        {
            "*i64": "k_pools v_pools rows seq_lens",
            "*i32": "table",
            "i32": "num_slots row_words table_width page_size steps",
        },
        {"TOPK": 4, "TAIL": 16, "BLOCK": duplicate_tails.BLOCK},
        divisible_by_16="num_slots row_words page_size",
    ),
)

CASES = (
    *ATTENTION,
    *JOIN,
    *ROPE,
    *GATE,
    *NORM,
    *PRODUCTS,
    *BUILD_TREE_CASES,
    *VERIFY_GREEDY_CASES,
    *VERIFY_SAMPLING_CASES,
    *COINS_CASES,
    *COMPACT_CASES,
    *RELAY_CASES,
    *BONUS_CASES,
    *MOVE_KV_CASES,
    *DUPLICATE_TAILS_CASES,
)
