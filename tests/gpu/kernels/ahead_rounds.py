"""Specialisations of the kernels of a round beside the forward pass (`ahead_cases`)."""

from __future__ import annotations

from ahead_case import AotCase
from foredraft.gpu.kernels.rounds import (
    best,
    bonus,
    build_tree,
    coins,
    compact,
    duplicate_tails,
    move_kv,
    relay,
    shape_logits,
    target_probs,
    verify_greedy,
    verify_sampling,
    window,
)

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
DISTRIBUTION = {"*fp64": "temperatures top_ps", "*i64": "top_ks", "*fp32": "out", "i32": "vocab row_stride"}
TARGET_PROBS_CASES = tuple(
    AotCase(
        f"target_probs {kind}{', filtered' * filtered}",
        target_probs._target_probs_kernel,
        DISTRIBUTION | ({"*fp32": "logits out"} if kind == "fp32" else {"*bf16": "logits"}),
        {"FILTERED": filtered, "IS_DOUBLE": False, "BLOCK": target_probs.BLOCK},
        divisible_by_16="vocab row_stride",
        num_warps=16,
    )
    for kind, filtered in (("bf16", True), ("bf16", False), ("fp32", True))
)
COINS_TYPES = {"*i64": "keys positions", "*fp64": "coins", "i64": "state", "i32": "n width"}
COINS_CASES = (AotCase("coins", coins._coins_kernel, COINS_TYPES, coins._CONSTANTS),)
SHAPE = {
    "*i64": "rows tokens ancestor_bits",
    "*i32": "seen mask_index masks",
    "*fp32": "bias greatest",
    "*fp64": "params",
    "i32": "nodes vocab words",
}
MIN_P = {"*i64": "rows", "*fp64": "params", "*fp32": "greatest", "i32": "nodes vocab blocks"}
SHAPE_LOGITS_CASES = (
    *(
        AotCase(
            f"shape_logits {kind}{', paths' * has_paths}{', masks' * has_masks}",
            shape_logits._shape_kernel,
            SHAPE | {f"*{kind}": "logits out"} | ({"*fp32": "bias greatest logits out"} if kind == "fp32" else {}),
            {"HAS_PATHS": has_paths, "HAS_MASKS": has_masks, "IS_DOUBLE": False, "BLOCK": shape_logits.BLOCK},
            divisible_by_16="vocab words",
            options={"enable_fp_fusion": False},
        )
        for kind, has_paths, has_masks in (("bf16", True, True), ("bf16", False, False), ("fp32", True, True))
    ),
    AotCase(
        "min_p",
        shape_logits._min_p_kernel,
        MIN_P | {"*bf16": "out"},
        {"IS_DOUBLE": False, "BLOCKS": 256, "BLOCK": shape_logits.BLOCK},
        divisible_by_16="vocab",
    ),
    AotCase(
        "count_tokens",
        shape_logits._count_kernel,
        {"*i64": "rows tokens", "*i32": "seen lens", "i32": "vocab width"},
        {"WIDTH": 8},
        divisible_by_16="vocab",
        num_warps=1,
    ),
)
COMPACT_TYPES = {"*i64": "values out", "*i32": "accept_index", "i32": "nodes width row_words"}
COMPACT_CASES = (AotCase("compact", compact._compact_kernel, COMPACT_TYPES, {"BLOCK": compact.BLOCK}, "row_words"),)
COPIED = {
    "*i64": "rows source_0 source_1 target_0 target_1",
    "*i32": "source_2 target_2",
    "i32": "row_words_0 row_words_1 row_words_2",
}
RELAY_CASES = tuple(
    AotCase(f"relay, gather {gather}", relay._copy_kernel, COPIED, {"GATHER": gather, "BLOCK": relay.BLOCK})
    for gather in (True, False)
)
BEST = {"*bf16": "logits", "*fp32": "greatest", "*i32": "best arrived", "*i64": "out", "i32": "vocab row_stride"}
BEST_CASES = tuple(
    AotCase(
        f"best {'token' if finite else 'draft'}",
        best.best_kernel,
        BEST if finite else BEST | {"*i64": "out ids"},
        {"CHUNK": best.CHUNK, "CHUNKS": 32, "FINITE": finite} | ({"ids": None} if finite else {}),
        divisible_by_16="row_stride",
    )
    for finite in (True, False)
)
WINDOW = {"*i32": "table kept", "*i64": "rows lengths places slots", "i32": "n columns table_width"}
WINDOW_CASES = (AotCase("window", window.window_kernel, WINDOW, {"BLOCK": window.BLOCK}),)
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

ROUND_CASES = (
    *BUILD_TREE_CASES,
    *VERIFY_GREEDY_CASES,
    *VERIFY_SAMPLING_CASES,
    *COINS_CASES,
    *SHAPE_LOGITS_CASES,
    *COMPACT_CASES,
    *RELAY_CASES,
    *TARGET_PROBS_CASES,
    *BEST_CASES,
    *WINDOW_CASES,
    *BONUS_CASES,
    *MOVE_KV_CASES,
    *DUPLICATE_TAILS_CASES,
)
