"""Rounds and steps: one formula for scalars and blocks, parts that add up, and each mechanism where it belongs."""

import random
import timeit
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from foretoken.core.errors import ConfigError
from foretoken.core.model_shape import lookup_model
from foretoken.sim.cost.calibration import VLLM_H100_LLAMA_8B
from foretoken.sim.cost.curve import Curve, Line, Pass, TimeOverflow
from foretoken.sim.cost.draft import eagle3_head, eagle_head, host_draft, multi_layer_eagle, standalone
from foretoken.sim.cost.forward import ForwardCost, UnsupportedParallelism
from foretoken.sim.cost.hardware import lookup_gpu
from foretoken.sim.cost.launch import PIECEWISE, UnknownPreset, launch_preset, padded_tokens
from foretoken.sim.cost.round import DecodeWork, InvalidRound, RoundCost
from foretoken.sim.cost.work import EXPERT_INDEPENDENCE, Routing

H100 = lookup_gpu("H100")
LLAMA = lookup_model("llama-3.1-8b")
LLAMA_70B = lookup_model("llama-3.1-70b")
SMALL = lookup_model("llama-3.2-1b")
SPARSE = lookup_model("qwen3-30b-a3b")
((ATTENTION, _),) = LLAMA.mixers
WINDOWED = replace(LLAMA, mixers=((ATTENTION, 16), (replace(ATTENTION, window=4096), 16)))

COSTS = {
    "plain": RoundCost(LLAMA, H100),
    "eagle": RoundCost(LLAMA, H100, draft=eagle_head(LLAMA)),
    "eagle3": RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA)),
    "piecewise": RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA), launch=PIECEWISE),
    "eager": RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA), graph_sizes=None),
    "standalone": RoundCost(LLAMA, H100, draft=standalone(SMALL, LLAMA)),
    "multi": RoundCost(LLAMA, H100, draft=multi_layer_eagle(LLAMA, 4)),
    "ngram": RoundCost(LLAMA, H100, draft=host_draft("NGRAM", 0.006)),
    "windowed": RoundCost(WINDOWED, H100, draft=eagle_head(LLAMA)),
    "sparse": RoundCost(SPARSE, H100, draft=eagle_head(SPARSE)),
    "tp4": RoundCost(LLAMA_70B, H100, 4, draft=eagle3_head(LLAMA_70B)),
    "calibrated": RoundCost(LLAMA, H100, draft=eagle_head(LLAMA), calibration=VLLM_H100_LLAMA_8B),
}


def shape_of(name, steps):
    return (0, 1, 1) if name == "plain" else (steps, 1, steps + 1)


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 13, 600])
def test_a_block_costs_bit_for_bit_what_its_rounds_cost(name, steps, batch_size):
    cost = COSTS[name]
    generator = random.Random(f"{name}{steps}{batch_size}")
    edges = [0, 1, batch_size * 4096 - 1, batch_size * 4096, batch_size * 4096 + 1, (1 << 32) - 1]
    kv = np.array(edges + [generator.randrange(1 << 27) for _ in range(200)], dtype=np.int64)
    block = cost.decode_ns(batch_size, *shape_of(name, steps), kv)
    single = [cost.decode_ns(batch_size, *shape_of(name, steps), int(tokens)) for tokens in kv]
    assert block.dtype == np.int64
    assert all(type(value) is int for value in single)
    assert block.tolist() == single


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("kv_tokens", [0, 777, 123_457, 9_999_999])
def test_parts_add_up_to_the_nanosecond(name, kv_tokens):
    shape = shape_of(name, 3)
    decode = DecodeWork(13, *shape, kv_tokens)
    parts = COSTS[name].decode_parts(*decode)
    assert sum(parts.values()) == COSTS[name].decode_ns(*decode)
    assert min(parts.values()) >= 0
    mixed = COSTS[name].step_parts([(700, 300), (24, 0)], decode)
    assert sum(mixed.values()) == COSTS[name].step_ns([(700, 300), (24, 0)], decode)


def test_scalars_and_arrays_round_down_at_the_very_edge():
    # One unit of the fixed point short of 1 ns per token: rounding up or to nearest would show at once.
    curve = Curve([Pass({"verify": Line(0.0, 1.0 - 2.0**-16)})])
    tokens = np.arange(1, 1000)
    assert curve(tokens).tolist() == [curve(int(kv)) for kv in tokens] == (tokens - 1).tolist()


def test_a_second_model_of_the_same_kind_gives_the_same_times():
    again = RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA))
    for steps in (0, 1, 5):
        assert again.decode_ns(7, steps, 1, steps + 1, 9999) == COSTS["eagle3"].decode_ns(7, steps, 1, steps + 1, 9999)


def test_a_call_is_a_look_up():
    cost = COSTS["piecewise"]
    cost.decode_ns(8, 3, 1, 4, 1)
    best = min(timeit.repeat(lambda: cost.decode_ns(8, 3, 1, 4, 5000), number=2000, repeat=7)) / 2000
    # Measured 0.6 us; twenty times that is a bound that a busy machine keeps and a recomputation (1 ms) does not.
    assert best < 12e-6


def test_idle_batches_cost_nothing():
    assert COSTS["eagle3"].decode_ns(0, 3, 1, 4, 0) == 0
    assert COSTS["eagle3"].decode_ns(0, 3, 1, 4, np.zeros(2, np.int64)).tolist() == [0, 0]
    assert COSTS["eagle3"].step_ns([], None) == 0


def test_a_step_without_prefill_is_the_round():
    assert COSTS["eagle3"].step_ns([], (8, 3, 1, 4, 5000)) == COSTS["eagle3"].decode_ns(8, 3, 1, 4, 5000)


def test_padding_to_captured_sizes():
    cost = COSTS["plain"]
    assert padded_tokens(3, 5, (1, 2, 4)) == 20
    assert padded_tokens(5, 1, (1, 2, 4)) is None
    assert padded_tokens(5, 1, None) is None
    assert padded_tokens(3, 5, (1, 2, 4), "tokens") is None
    assert padded_tokens(3, 5, (8, 16), "tokens") == 16
    gemms = [cost.decode_parts(batch_size, 0, 1, 1, 0)["verify"] for batch_size in (9, 15, 16, 17)]
    # Parts are rounded so that they add up, which may move one nanosecond between them.
    assert gemms[0] == pytest.approx(gemms[2], abs=1)
    assert gemms[1] == pytest.approx(gemms[2], abs=1)
    assert gemms[3] > gemms[2] + 1_000


def test_without_a_graph_the_host_sets_the_pace_of_small_models():
    tiny = lookup_model("qwen3-0.6b")
    captured = RoundCost(tiny, H100)
    eager = RoundCost(tiny, H100, graph_sizes=None)
    floor_ns = ForwardCost(tiny, H100, eager.efficiency, 1).kernels * eager.launch.eager_kernel_ns
    parts = eager.decode_parts(1, 0, 1, 1, 500)
    assert parts["dispatch"] > 0
    assert sum(parts.values()) - parts["sampling"] == pytest.approx(floor_ns, abs=2)
    assert eager.decode_ns(1, 0, 1, 1, 500) > 1.3 * captured.decode_ns(1, 0, 1, 1, 500)
    # An 8B model keeps the device busier than the host needs.
    assert "dispatch" not in RoundCost(LLAMA, H100, graph_sizes=None).decode_parts(1, 0, 1, 1, 500)
    # Beyond the largest captured size nothing is captured.
    assert "dispatch" in RoundCost(tiny, H100, graph_sizes=(1, 2)).decode_parts(3, 0, 1, 1, 500)


def test_a_pass_beyond_the_captured_tokens_is_launched_by_the_host():
    """Sizes by tokens: a wide verify falls off the cliff with few rows, and the narrow passes of its draft do not."""
    tiny = lookup_model("qwen3-0.6b")
    cost = RoundCost(tiny, H100, draft=eagle3_head(tiny), graph_sizes=(1, 2, 4, *range(8, 65, 8)), graph_unit="tokens")
    floor_ns = ForwardCost(tiny, H100, cost.efficiency, 1).kernels * cost.launch.eager_kernel_ns
    for steps, last in ((3, 16), (7, 8), (15, 4)):
        inside, outside = (cost.decode_parts(rows, steps, 1, steps + 1, 0) for rows in (last, last + 1))
        assert cost.is_captured(last, steps + 1) and not cost.is_captured(last + 1, steps + 1)
        assert "dispatch" not in inside and outside["dispatch"] > 0
        assert sum(outside.values()) - sum(inside.values()) > outside["dispatch"] > 0.2 * floor_ns
    # Plain rounds of as many rows are captured, and padded to tokens: 10 rows of 4 are 40 tokens, by rows they are 16 rows.
    assert cost.is_captured(64, 1) and not cost.is_captured(65, 1)
    by_rows = RoundCost(tiny, H100, draft=eagle3_head(tiny))
    assert by_rows.is_captured(129, 4)
    fewer, more = (c.decode_parts(10, 3, 1, 4, 0)["sampling"] for c in (cost, by_rows))
    assert fewer < more == by_rows.decode_parts(16, 3, 1, 4, 0)["sampling"]


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_only_captured_tokens_decide_what_is_padded(unit):
    cost = RoundCost(SPARSE, H100, draft=eagle_head(SPARSE), graph_sizes=(8, 64, 512), graph_unit=unit)
    by_rows = [cost.decode_ns(rows, 3, 1, 4, 0) for rows in range(1, 120)]
    assert all(later >= earlier * 0.998 for earlier, later in pairwise(by_rows))


def test_a_draft_reads_more_as_the_context_grows():
    """One layer of an EAGLE head beside 32 of its target, in each of its passes; branches read it once each."""

    def slopes(topk):
        near, far = (COSTS["eagle3"].decode_parts(4, 3, topk, 4, kv) for kv in (10_000, 1_010_000))
        return far["draft_attention"] - near["draft_attention"], far["attention"] - near["attention"]

    own, target = slopes(1)
    assert own == pytest.approx(3 * target / LLAMA.layers, rel=0.02)  # two draft passes and the catch-up
    assert slopes(4)[0] == pytest.approx(9 * target / LLAMA.layers, rel=0.02)


def test_a_host_driven_drafting_loop_has_a_floor_per_pass():
    captured, driven = COSTS["eagle3"], COSTS["piecewise"]
    assert "dispatch" not in captured.decode_parts(1, 3, 1, 4, 500)
    per_step = [driven.decode_ns(1, steps, 1, steps + 1, 500) for steps in (2, 3, 4)]
    for less, more in pairwise(per_step):
        assert more - less >= PIECEWISE.draft_pass_floor_ns
    # With a long enough context the device takes longer than the host, and the floor no longer binds.
    assert "dispatch" not in driven.decode_parts(1, 3, 1, 4, 4_000_000)


def test_more_work_never_takes_less_time():
    cost = COSTS["eagle3"]
    by_steps = [cost.decode_ns(8, steps, 1, steps + 1, 5000) for steps in range(8)]
    by_rows = [cost.decode_ns(rows, 3, 1, 4, 5000) for rows in range(1, 513, 7)]
    by_nodes = [cost.decode_ns(8, 4, 4, nodes, 5000) for nodes in range(2, 53)]
    for times in (by_steps, by_rows, by_nodes):
        assert all(later >= earlier for earlier, later in pairwise(times))


def test_verifying_is_nearly_free_for_one_request_and_dear_for_many():
    def ratio(rows):
        return COSTS["ngram"].decode_ns(rows, 7, 1, 8, rows * 100) / COSTS["ngram"].decode_ns(rows, 0, 1, 1, rows * 100)

    assert ratio(1) < 1.05
    assert ratio(128) > 2.0


def test_trees_pay_for_building_moving_and_branches():
    cost = COSTS["eagle3"]
    chain, tree = cost.decode_parts(8, 3, 1, 4, 50_000), cost.decode_parts(8, 3, 4, 4, 50_000)
    assert "tree" not in chain
    assert "kv_move" not in chain
    assert tree["tree"] > 0
    assert tree["kv_move"] > 0
    shared = RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA), shared_draft_prefix=True)
    assert tree["draft_attention"] > shared.decode_parts(8, 3, 4, 4, 50_000)["draft_attention"]


def test_zero_steps_draft_only_when_told_to_stay_warm():
    warm = RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA), keep_draft_warm=True)
    assert COSTS["eagle3"].decode_ns(8, 0, 1, 1, 5000) == COSTS["plain"].decode_ns(8, 0, 1, 1, 5000)
    assert warm.decode_parts(8, 0, 1, 1, 5000)["draft_catch_up"] > 0


def test_the_reduced_vocabulary_makes_the_draft_cheaper():
    whole = RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA, draft_vocab=128256))
    full, reduced = (cost.decode_parts(1, 3, 1, 4, 500)["draft_lm_head"] for cost in (whole, COSTS["eagle3"]))
    assert full > 3 * reduced


def test_drafts_in_order_of_their_weights():
    times = [COSTS[name].decode_ns(1, 3, 1, 4, 500) for name in ("ngram", "eagle3", "eagle", "standalone")]
    assert times == sorted(times)
    assert COSTS["ngram"].decode_parts(1, 3, 1, 4, 500)["draft"] == pytest.approx(
        0.006 * sum(COSTS["ngram"].decode_parts(1, 3, 1, 4, 500)[part] for part in ("verify", "attention", "lm_head")),
        rel=0.01,
    )


def test_each_head_of_a_multi_layer_draft_runs_over_the_accepted_tokens():
    parts = [COSTS["multi"].decode_parts(8, steps, 1, steps + 1, 5000) for steps in (1, 3)]
    assert "draft" not in parts[1]
    assert parts[1]["draft_catch_up"] > 2.9 * parts[0]["draft_catch_up"]


def test_sparse_models_read_more_experts_for_more_tokens():
    forward = ForwardCost(SPARSE, H100, COSTS["sparse"].efficiency, 1)
    assert forward.active_experts(1) == pytest.approx(8)
    assert forward.active_experts(16) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16))
    assert forward.active_experts(10_000) == pytest.approx(128)
    # A dense model verifies 8 tokens in the time of one; this one does not.
    sparse = (
        COSTS["sparse"].decode_parts(1, 7, 1, 8, 500)["verify"]
        / COSTS["sparse"].decode_parts(1, 0, 1, 1, 500)["verify"]
    )
    dense = (
        COSTS["eagle"].decode_parts(1, 7, 1, 8, 500)["verify"] / COSTS["eagle"].decode_parts(1, 0, 1, 1, 500)["verify"]
    )
    assert dense < 1.03
    assert sparse > 1.5


def test_padding_rows_route_as_one_further_token():
    # 25 rows are padded to 32: seven copies of a token that an earlier step left there.
    verify = [COSTS["sparse"].decode_parts(rows, 0, 1, 1, 0)["verify"] for rows in (24, 25, 32)]
    forward = ForwardCost(SPARSE, H100, COSTS["sparse"].efficiency, 1)
    assert verify[1] == pytest.approx(forward.layers_ns(32, Routing(25, 25 + EXPERT_INDEPENDENCE)), abs=3)
    assert verify[1] - verify[0] < 0.4 * (verify[2] - verify[0])
    assert verify[2] == pytest.approx(forward.layers_ns(32), abs=3)


@pytest.mark.parametrize("tokens", [2, 8, 64, 700])
def test_tokens_of_one_request_share_experts(tokens):
    def verify(independence, batch_size, nodes):
        cost = RoundCost(SPARSE, H100, draft=host_draft("NGRAM", 0.0), expert_independence=independence)
        return cost.decode_parts(batch_size, nodes - 1, 1, nodes, 0)["verify"]

    shared, half, independent = (verify(value, 1, tokens) for value in (0.01, 0.5, 1.0))
    assert shared < half < independent or tokens > 64
    # As many requests as tokens choose independently, whatever one request's tokens do.
    assert verify(0.5, tokens, 1) == verify(1.0, tokens, 1)
    assert shared <= half <= independent <= verify(0.5, tokens, 1) * 1.05
    # A dense model has no experts to share.
    dense = [RoundCost(LLAMA, H100, expert_independence=value).decode_ns(tokens, 0, 1, 1, 0) for value in (0.1, 1.0)]
    assert dense[0] == dense[1]


@pytest.mark.parametrize("independence", [0.05, 0.58, 1.0])
def test_more_rows_and_more_tokens_read_no_fewer_experts(independence):
    cost = RoundCost(SPARSE, H100, draft=host_draft("NGRAM", 0.0), expert_independence=independence)
    by_rows = [cost.decode_ns(rows, 3, 1, 4, 0) for rows in range(1, 260)]
    by_tokens = [cost.decode_ns(6, steps, 1, steps + 1, 0) for steps in range(60)]
    # Of one padded size more experts have fewer rows each, which may take one tile less.
    for times in (by_rows, by_tokens):
        assert all(later >= earlier * 0.998 for earlier, later in pairwise(times))


def test_a_prompt_s_tokens_share_experts_with_each_other_alone():
    def verify(independence, chunks):
        return RoundCost(SPARSE, H100, expert_independence=independence).step_parts(chunks)["verify"]

    assert verify(0.2, [(32, 0)]) < verify(0.2, [(8, 0)] * 4) < verify(1.0, [(32, 0)])
    assert verify(0.2, [(1, 0)] * 32) == verify(1.0, [(32, 0)])


def test_windows_bound_the_attention():
    windowed, full = COSTS["windowed"], COSTS["eagle"]
    assert windowed.decode_ns(2, 0, 1, 1, 8000) == full.decode_ns(2, 0, 1, 1, 8000)
    short = windowed.decode_ns(2, 0, 1, 1, 200_000) - windowed.decode_ns(2, 0, 1, 1, 100_000)
    long = full.decode_ns(2, 0, 1, 1, 200_000) - full.decode_ns(2, 0, 1, 1, 100_000)
    assert short == pytest.approx(long / 2, rel=1e-3)
    assert windowed.step_ns([(16_384, 0)]) < full.step_ns([(16_384, 0)])


def test_tensor_parallelism_divides_the_work_and_pays_for_it():
    one, four = RoundCost(LLAMA_70B, H100), COSTS["tp4"]
    alone, shared = one.decode_parts(8, 0, 1, 1, 8000), four.decode_parts(8, 0, 1, 1, 8000)
    assert "comm" not in alone
    assert shared["comm"] >= 2 * 80 * H100.interconnect.latency_ns
    assert alone["verify"] / 4 < shared["verify"] < alone["verify"] / 3
    assert alone["attention"] > 3 * shared["attention"] - 80 * 4_000 * 3
    # With 8 KV heads on 16 devices each keeps a copy of one head: half as much as on 8, not a quarter.
    slopes = [ForwardCost(LLAMA_70B, H100, four.efficiency, tp).decode_attention(1, 1, 0).slope_ns for tp in (4, 8, 16)]
    assert slopes[0] == pytest.approx(2 * slopes[1], rel=0.05)
    assert slopes[2] == pytest.approx(slopes[1], rel=0.05)


@pytest.mark.parametrize(("shape", "tp"), [(LLAMA, 5), (LLAMA, 0), (lookup_model("qwen2.5-7b"), 8)])
def test_parallelism_that_does_not_divide_is_refused(shape, tp):
    with pytest.raises(UnsupportedParallelism, match="tensor parallel"):
        RoundCost(shape, H100, tp)


def test_prefill_grows_faster_than_its_tokens():
    cost = COSTS["plain"]
    attention = [cost.step_parts([(new, 0)])["attention"] for new in (8192, 16_384, 32_768)]
    assert attention[1] == pytest.approx(4 * attention[0], rel=0.05)
    assert attention[2] == pytest.approx(4 * attention[1], rel=0.05)
    # Two chunks do the work of the whole prompt: the second one looks back at the first.
    whole = cost.step_parts([(16_384, 0)])["attention"]
    chunks = sum(cost.step_parts([chunk])["attention"] for chunk in ((8192, 0), (8192, 8192)))
    assert chunks == pytest.approx(whole, rel=0.05)


def test_mixed_steps_share_the_weights():
    cost = COSTS["eagle3"]
    decode = (16, 3, 1, 4, 16_000)
    mixed, apart = cost.step_ns([(256, 0)], decode), cost.step_ns([(256, 0)]) + cost.decode_ns(*decode)
    assert max(cost.step_ns([(256, 0)]), cost.decode_ns(*decode)) < mixed < apart


def test_the_draft_prefills_too():
    parts = COSTS["eagle3"].step_parts([(2048, 0)])
    assert parts["draft_catch_up"] > 0
    assert COSTS["eagle3"].step_ns([(2048, 0)]) > COSTS["plain"].step_ns([(2048, 0)])
    assert COSTS["ngram"].step_ns([(2048, 0)]) == COSTS["plain"].step_ns([(2048, 0)])


def test_a_draft_pays_for_the_prompt_s_attention_and_each_head_for_itself():
    quarter, whole = (COSTS["eagle3"].step_parts([(new, 0)])["draft_attention"] for new in (16_384, 32_768))
    assert quarter > 1_000_000
    assert whole == pytest.approx(4 * quarter, rel=0.05)
    one_head = RoundCost(LLAMA, H100, draft=multi_layer_eagle(LLAMA, 1)).step_parts([(2048, 0)])
    assert COSTS["multi"].step_parts([(2048, 0)])["draft_catch_up"] == pytest.approx(4 * one_head["draft_catch_up"])


def test_only_the_last_token_of_a_chunk_needs_logits():
    one, many = (COSTS["plain"].step_parts([(new, 0)])["lm_head"] for new in (1, 4096))
    assert many == pytest.approx(one, abs=2)


def test_three_hidden_states_are_joined_for_tokens_that_the_target_has_seen():
    target_states_ns = 3 * 4096 * 4096 * 2 * 1e9 / (H100.memory_bandwidth_bytes_per_s * 0.88)
    parts = COSTS["eagle3"].decode_parts(1, 2, 1, 3, 500)
    # One later pass and one catch-up pass: the same layer, and before the second one the 3h→h product.
    assert parts["draft_catch_up"] - parts["draft"] == pytest.approx(target_states_ns, rel=0.2)
    # EAGLE joins the embedding and the last state before every pass.
    parts = COSTS["eagle"].decode_parts(1, 2, 1, 3, 500)
    assert parts["draft_catch_up"] == pytest.approx(parts["draft"], rel=0.02)


def test_gathering_the_logits_of_a_group():
    forward = ForwardCost(LLAMA_70B, H100, COSTS["tp4"].efficiency, 4)
    silent = replace(H100, interconnect=replace(H100.interconnect, latency_ns=0))
    without = ForwardCost(LLAMA_70B, silent, COSTS["tp4"].efficiency, 4)
    assert forward.lm_head_ns(8) - without.lm_head_ns(8) == pytest.approx(H100.interconnect.latency_ns)
    sent = 0.75 * 1000 * LLAMA_70B.vocab * 2 * 1e9 / H100.interconnect.bandwidth_bytes_per_s
    assert without.lm_head_ns(1000) > sent


def test_greedy_sampling_is_cheaper():
    greedy = RoundCost(LLAMA, H100, sampling="greedy")
    assert (
        greedy.decode_parts(256, 0, 1, 1, 0)["sampling"] < COSTS["plain"].decode_parts(256, 0, 1, 1, 0)["sampling"] / 3
    )


def test_eight_bit_weights_save_traffic_where_there_is_no_such_rate():
    a100 = lookup_gpu("A100")
    wide, narrow = (
        RoundCost(LLAMA.with_dtypes(weight_dtype=dtype), a100).decode_parts(1, 0, 1, 1, 0) for dtype in ("bf16", "fp8")
    )
    assert narrow["verify"] < 0.65 * wide["verify"]
    assert narrow["lm_head"] == wide["lm_head"]


@pytest.mark.parametrize(
    ("name", "work", "message"),
    [
        ("plain", (1, 3, 1, 4), "needs a draft; this engine has none"),
        ("eagle", (1, 0, 1, 2), "0 steps verifies 1 token"),
        ("eagle", (1, 3, 1, 5), "a chain of 3 steps verifies 4 tokens"),
        ("eagle", (1, 2, 2, 8), "a tree offers at most 6 drafts"),
        ("eagle", (-1, 2, 2, 4), "out of range"),
        ("eagle", (1, 2, 0, 4), "out of range"),
        ("multi", (1, 5, 1, 6), "has 4 heads, one per step"),
    ],
)
def test_rounds_that_cannot_exist_are_refused(name, work, message):
    with pytest.raises(InvalidRound, match=message):
        COSTS[name].decode_ns(*work, 100)
    with pytest.raises(InvalidRound, match=message):
        COSTS[name].step_ns([(10, 0)], (*work, 100))


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1)])
def test_graph_sizes_must_increase(sizes):
    with pytest.raises(InvalidRound, match="graph sizes"):
        RoundCost(LLAMA, H100, graph_sizes=sizes)


def test_calibration_replaces_its_parts_and_no_others():
    parts = COSTS["calibrated"].decode_parts(4, 3, 1, 4, 10_000)
    assert parts["verify"] == pytest.approx(5_886_000 + 21_010 * 16, abs=2)
    assert parts["attention"] == pytest.approx(39.3 * 10_000, abs=2)
    drafted = parts["draft"] + parts["draft_catch_up"]
    assert drafted == pytest.approx(2_135_000 + 280 * (2 * 4 + 16) + 2.4 * 10_000, abs=4)
    assert parts["sampling"] == COSTS["eagle"].decode_parts(4, 3, 1, 4, 10_000)["sampling"]
    # A fit for EAGLE says nothing about another algorithm's draft.
    other = RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA), calibration=VLLM_H100_LLAMA_8B)
    assert "draft_lm_head" in other.decode_parts(4, 3, 1, 4, 10_000)


def test_a_calibration_of_something_else_is_refused():
    with pytest.raises(ConfigError, match=r"profile.gpu: measured for H100, but the run uses H200"):
        RoundCost(LLAMA, lookup_gpu("H200"), calibration=VLLM_H100_LLAMA_8B)
    with pytest.raises(ConfigError, match=r"profile.tp"):
        RoundCost(LLAMA, H100, 2, calibration=VLLM_H100_LLAMA_8B)


def test_everything_is_explained_with_a_source():
    rows = COSTS["calibrated"].explain()
    assert len(rows) > 20
    assert all(name and source for name, _, _, source in rows)


def test_a_time_beyond_64_bits_is_an_error():
    with pytest.raises(TimeOverflow, match="check the units"):
        Curve([Pass({"verify": Line(0.0, 1e9)})])


def test_launch_presets():
    assert launch_preset("piecewise") is PIECEWISE
    with pytest.raises(UnknownPreset, match="did you mean 'piecewise'"):
        launch_preset("piecewize")
