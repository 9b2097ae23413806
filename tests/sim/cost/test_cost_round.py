"""Rounds and steps: one formula for scalars and multi-steps, parts that add up, and each mechanism where it belongs."""

import random
import timeit
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from foredraft.core.contract.step import PLAIN_ROUND, RoundShape
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import lookup_model
from foredraft.core.model_shape.families import read_model_shape
from foredraft.sim.cost.calibration import Calibration, FittedParameter, FittedParameters, MeasuredClients
from foredraft.sim.cost.draft import eagle3_head, eagle_head, host_draft, multi_layer_eagle, standalone
from foredraft.sim.cost.hardware import lookup_gpu
from foredraft.sim.cost.host import FULL_GRAPH, PIECEWISE, UnknownPreset, launch_preset
from foredraft.sim.cost.passes.curve import Line, Pass, PassCurve, TimeOverflow
from foredraft.sim.cost.passes.decode_work import DecodeWork, InvalidRound
from foredraft.sim.cost.passes.forward import ForwardCost, UnsupportedParallelism
from foredraft.sim.cost.passes.tokens import padded_tokens
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.cost.server import server_profile

H100 = lookup_gpu("H100")
LLAMA = lookup_model("llama-3.1-8b")
LLAMA_70B = lookup_model("llama-3.1-70b")
SMALL = lookup_model("llama-3.2-1b")
SPARSE = lookup_model("qwen3-30b-a3b")
((ATTENTION, _),) = LLAMA.mixers
WINDOWED = replace(LLAMA, mixers=((ATTENTION, 16), (replace(ATTENTION, window=4096), 16)))

CALIBRATION = Calibration(
    "mine",
    "my bench",
    "H100",
    "llama-3.1-8b",
    parameters=FittedParameters(
        "foredraft",
        "roofline",
        {"round_factor": FittedParameter(1.1, 1.0, 1.2)},
        MeasuredClients(1.0, 8.0, 64.0),
        3,
        0.01,
        0.02,
    ),
)
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
    "calibrated": RoundCost(LLAMA, H100, draft=eagle_head(LLAMA), calibration=CALIBRATION),
}


def shape_of(name, steps):
    return PLAIN_ROUND if name == "plain" else RoundShape.chain(steps)


@pytest.mark.parametrize("name", COSTS)
def test_a_multi_step_costs_bit_for_bit_what_its_rounds_cost(name):
    cost = COSTS[name]
    for steps, batch_size in product((0, 1, 3), (1, 13, 600)):
        generator = random.Random(f"{name}{steps}{batch_size}")
        edges = [0, 1, batch_size * 4096 - 1, batch_size * 4096, batch_size * 4096 + 1, (1 << 32) - 1]
        kv = np.array(edges + [generator.randrange(1 << 27) for _ in range(200)], dtype=np.int64)
        several = cost.decode_ns(batch_size, shape_of(name, steps), kv)
        single = [cost.decode_ns(batch_size, shape_of(name, steps), int(tokens)) for tokens in kv]
        assert several.dtype == np.int64
        assert all(type(value) is int for value in single)
        assert several.tolist() == single, (steps, batch_size)


@pytest.mark.parametrize("name", COSTS)
def test_parts_add_up_to_the_nanosecond(name):
    for kv_tokens in (0, 777, 123_457, 9_999_999):
        decode = DecodeWork(13, shape_of(name, 3), kv_tokens)
        parts = COSTS[name].decode_parts(*decode)
        assert sum(parts.values()) == COSTS[name].decode_ns(*decode), kv_tokens
        assert min(parts.values()) >= 0
        mixed = COSTS[name]._step_curve([(700, 300), (24, 0)], decode).parts(kv_tokens)
        assert sum(mixed.values()) == COSTS[name].step_ns([(700, 300), (24, 0)], decode), kv_tokens


def test_scalars_and_arrays_round_down_at_the_very_edge():
    # One unit of the fixed point short of 1 ns per token: rounding up or to nearest would show at once.
    curve = PassCurve([Pass({"verify": Line(0.0, 1.0 - 2.0**-16)})])
    tokens = np.arange(1, 1000)
    assert curve(tokens).tolist() == [curve(int(kv)) for kv in tokens] == (tokens - 1).tolist()


def test_a_call_is_a_look_up():
    cost = COSTS["piecewise"]
    cost.decode_ns(8, RoundShape.chain(3), 1)
    best = min(timeit.repeat(lambda: cost.decode_ns(8, RoundShape.chain(3), 5000), number=2000, repeat=7)) / 2000
    # Measured 0.6 us; twenty times that is a bound that a busy machine keeps and a recomputation (1 ms) does not.
    assert best < 12e-6


def test_idle_batches_cost_nothing():
    assert COSTS["eagle3"].decode_ns(0, RoundShape.chain(3), 0) == 0
    assert COSTS["eagle3"].decode_ns(0, RoundShape.chain(3), np.zeros(2, np.int64)).tolist() == [0, 0]
    assert COSTS["eagle3"].step_ns([], None) == 0


def test_padding_to_captured_sizes():
    cost = COSTS["plain"]
    assert padded_tokens(3, 5, (1, 2, 4)) == 20
    assert padded_tokens(5, 1, (1, 2, 4)) is None
    assert padded_tokens(5, 1, None) is None
    assert padded_tokens(3, 5, (1, 2, 4), "tokens") is None
    assert padded_tokens(3, 5, (8, 16), "tokens") == 16
    gemms = [cost.decode_parts(batch_size, PLAIN_ROUND, 0)["verify"] for batch_size in (9, 15, 16, 17)]
    # Parts are rounded so that they add up, which may move one nanosecond between them.
    assert gemms[0] == pytest.approx(gemms[2], abs=1)
    assert gemms[1] == pytest.approx(gemms[2], abs=1)
    assert gemms[3] > gemms[2] + 1_000


def test_without_a_graph_the_host_sets_the_pace_of_small_models():
    tiny = lookup_model("qwen3-0.6b")
    captured = RoundCost(tiny, H100)
    eager = RoundCost(tiny, H100, graph_sizes=None)
    floor_ns = ForwardCost(tiny, H100, eager.efficiency, 1).kernels * eager.launch.eager_kernel_ns
    parts = eager.decode_parts(1, PLAIN_ROUND, 500)
    assert parts["dispatch"] > 0
    assert sum(parts.values()) - parts["sampling"] == pytest.approx(floor_ns, abs=2)
    assert eager.decode_ns(1, PLAIN_ROUND, 500) > 1.3 * captured.decode_ns(1, PLAIN_ROUND, 500)
    # An 8B model keeps the device busier than the host needs.
    assert "dispatch" not in RoundCost(LLAMA, H100, graph_sizes=None).decode_parts(1, PLAIN_ROUND, 500)
    # Beyond the largest captured size nothing is captured.
    assert "dispatch" in RoundCost(tiny, H100, graph_sizes=(1, 2)).decode_parts(3, PLAIN_ROUND, 500)


def test_a_pass_beyond_the_captured_tokens_is_launched_by_the_host():
    """Sizes by tokens: a wide verify falls off the cliff with few rows, and the narrow passes of its draft do not."""
    tiny = lookup_model("qwen3-0.6b")
    cost = RoundCost(tiny, H100, draft=eagle3_head(tiny), graph_sizes=(1, 2, 4, *range(8, 65, 8)), graph_unit="tokens")
    floor_ns = ForwardCost(tiny, H100, cost.efficiency, 1).kernels * cost.launch.eager_kernel_ns
    for steps, last in ((3, 16), (7, 8), (15, 4)):
        inside, outside = (cost.decode_parts(rows, RoundShape.chain(steps), 0) for rows in (last, last + 1))
        assert cost.is_captured(last, steps + 1) and not cost.is_captured(last + 1, steps + 1)
        assert "dispatch" not in inside and outside["dispatch"] > 0
        assert sum(outside.values()) - sum(inside.values()) > outside["dispatch"] > 0.15 * floor_ns
    # Plain rounds are captured up to 64 rows. Sizes in tokens pad 10 rows of 4 tokens to 40 tokens; sizes in rows pad
    # them to 16 rows.
    assert cost.is_captured(64, 1) and not cost.is_captured(65, 1)
    by_rows = RoundCost(tiny, H100, draft=eagle3_head(tiny))
    assert by_rows.is_captured(129, 4)
    fewer, more = (c.decode_parts(10, RoundShape.chain(3), 0)["sampling"] for c in (cost, by_rows))
    assert fewer < more == by_rows.decode_parts(16, RoundShape.chain(3), 0)["sampling"]


def test_trees_pay_for_building_moving_and_branches():
    cost = COSTS["eagle3"]
    chain, tree = cost.decode_parts(8, RoundShape.chain(3), 50_000), cost.decode_parts(8, RoundShape(3, 4, 4), 50_000)
    assert "tree" not in chain
    assert "kv_move" not in chain
    assert tree["tree"] > 0
    assert tree["kv_move"] > 0
    assert tree["draft_attention"] > chain["draft_attention"]


def test_zero_steps_draft_only_when_told_to_stay_warm():
    warm = RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA), keep_draft_warm=True)
    assert COSTS["eagle3"].decode_ns(8, PLAIN_ROUND, 5000) == COSTS["plain"].decode_ns(8, PLAIN_ROUND, 5000)
    assert warm.decode_parts(8, PLAIN_ROUND, 5000)["draft_catch_up"] > 0


def test_a_draft_that_rests_computes_no_logits_where_its_server_returns_before_them():
    def rests(**launch):
        draft = eagle3_head(LLAMA)
        return RoundCost(LLAMA, H100, draft=draft, keep_draft_warm=True, launch=replace(FULL_GRAPH, **launch))

    kept, early = rests(), rests(has_resting_logits=False)
    parts, without = (cost.decode_parts(8, PLAIN_ROUND, 5000) for cost in (kept, early))
    assert parts["draft_lm_head"] > 0 == without["draft_lm_head"]
    assert parts["draft_catch_up"] > without["draft_catch_up"] > 0
    assert early.decode_ns(8, RoundShape.chain(3), 5000) == kept.decode_ns(8, RoundShape.chain(3), 5000)


def test_the_device_waits_before_and_after_each_attention_of_a_pass_in_pieces():
    launch = FULL_GRAPH.in_pieces()
    cost = RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA), launch=launch)
    for steps, layers in ((0, LLAMA.layers), (1, LLAMA.layers + 1), (3, LLAMA.layers + 3)):
        more = cost.decode_ns(8, RoundShape.chain(steps), 5000) - COSTS["eagle3"].decode_ns(
            8, RoundShape.chain(steps), 5000
        )
        assert more == pytest.approx(2 * layers * launch.piece_gap_ns, abs=2)
    eager = RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA), launch=launch, graph_sizes=None)
    assert eager.decode_ns(8, RoundShape.chain(3), 5000) == COSTS["eager"].decode_ns(8, RoundShape.chain(3), 5000)


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_the_passes_of_a_head_run_only_where_not_all_rows_draft_by_look_up(batch_size):
    shape, head = RoundShape.chain(3), replace(eagle3_head(LLAMA), verify_share=0.006)

    def parts(**changes):
        cost = RoundCost(LLAMA, H100, draft=replace(head, **changes), graph_sizes=None)
        return cost.decode_parts(batch_size, shape, 5000)

    always, mean = parts(), parts(look_up_share=0.7)
    runs = 1 - 0.7**batch_size
    for name in ("draft_lm_head", "draft_catch_up", "verify", "attention"):
        # The logits are of the two steps and of the catch-up, which is late behind a round without the head.
        shares = {"draft_catch_up": runs * (2 - runs), "verify": 1.0, "attention": 1.0}
        least, most = shares.get(name, runs), shares.get(name, runs * (2 - runs))
        assert least * always[name] - 2 <= mean[name] <= most * always[name] + 2, name
    look_ups = RoundCost(LLAMA, H100, draft=host_draft("SUFFIX", 0.006), graph_sizes=None)
    assert sum(parts(look_up_share=1.0).values()) == look_ups.decode_ns(batch_size, shape, 5000)
    work = DecodeWork(batch_size, shape, 5000)
    with_prompt = [
        RoundCost(LLAMA, H100, draft=replace(head, look_up_share=share)).step_ns([(512, 0)], work)
        for share in (0.0, 0.7, 1.0)
    ]
    assert with_prompt[0] >= with_prompt[1] > with_prompt[2]


@pytest.mark.parametrize("tokens", [2, 8, 64, 700])
def test_tokens_of_one_request_share_experts(tokens):
    def verify(independence, batch_size, nodes):
        cost = RoundCost(SPARSE, H100, draft=host_draft("NGRAM", 0.0), expert_independence=independence)
        return cost.decode_parts(batch_size, RoundShape.chain(nodes - 1), 0)["verify"]

    shared, half, independent = (verify(value, 1, tokens) for value in (0.01, 0.5, 1.0))
    assert shared < half < independent or tokens > 64
    # As many requests as tokens choose independently, whatever one request's tokens do.
    assert verify(0.5, tokens, 1) == verify(1.0, tokens, 1)
    assert shared <= half <= independent <= verify(0.5, tokens, 1) * 1.05
    # A dense model has no experts to share.
    dense = [
        RoundCost(LLAMA, H100, expert_independence=value).decode_ns(tokens, PLAIN_ROUND, 0) for value in (0.1, 1.0)
    ]
    assert dense[0] == dense[1]


def test_a_prompt_s_tokens_share_experts_with_each_other_alone():
    def verify(independence, chunks):
        return RoundCost(SPARSE, H100, expert_independence=independence)._step_curve(chunks, None).parts(0)["verify"]

    assert verify(0.2, [(32, 0)]) < verify(0.2, [(8, 0)] * 4) < verify(1.0, [(32, 0)])
    assert verify(0.2, [(1, 0)] * 32) == verify(1.0, [(32, 0)])


def test_windows_bound_the_attention():
    windowed, full = COSTS["windowed"], COSTS["eagle"]
    assert windowed.decode_ns(2, PLAIN_ROUND, 8000) == full.decode_ns(2, PLAIN_ROUND, 8000)
    short = windowed.decode_ns(2, PLAIN_ROUND, 200_000) - windowed.decode_ns(2, PLAIN_ROUND, 100_000)
    long = full.decode_ns(2, PLAIN_ROUND, 200_000) - full.decode_ns(2, PLAIN_ROUND, 100_000)
    assert short == pytest.approx(long / 2, rel=1e-3)
    assert windowed.step_ns([(16_384, 0)]) < full.step_ns([(16_384, 0)])


@pytest.mark.parametrize(("shape", "tp"), [(LLAMA, 5), (LLAMA, 0), (lookup_model("qwen2.5-7b"), 8)])
def test_parallelism_that_does_not_divide_is_refused(shape, tp):
    with pytest.raises(UnsupportedParallelism, match="tensor parallel"):
        RoundCost(shape, H100, tp)


def test_greedy_sampling_is_cheaper():
    greedy = RoundCost(LLAMA, H100, sampling="greedy")
    assert (
        greedy.decode_parts(256, PLAIN_ROUND, 0)["sampling"]
        < COSTS["plain"].decode_parts(256, PLAIN_ROUND, 0)["sampling"] / 3
    )


@pytest.mark.parametrize(
    ("name", "rows", "shape", "message"),
    [
        ("plain", 1, (3, 1, 4), "needs a draft; this engine has none"),
        ("eagle", 1, (0, 1, 2), "0 steps verifies 1 token"),
        ("eagle", 1, (3, 1, 5), "a chain of 3 steps verifies 4 tokens"),
        ("eagle", 1, (2, 2, 8), "a tree offers at most 6 drafts"),
        ("eagle", -1, (2, 2, 4), "out of range"),
        ("eagle", 1, (2, 0, 4), "out of range"),
        ("multi", 1, (5, 1, 6), "has 4 heads, one per step"),
    ],
)
def test_rounds_that_cannot_exist_are_refused(name, rows, shape, message):
    with pytest.raises(InvalidRound, match=message):
        COSTS[name].decode_ns(rows, RoundShape(*shape), 100)
    with pytest.raises(InvalidRound, match=message):
        COSTS[name].step_ns([(10, 0)], DecodeWork(rows, RoundShape(*shape), 100))


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1)])
def test_graph_sizes_must_increase(sizes):
    with pytest.raises(InvalidRound, match="graph sizes"):
        RoundCost(LLAMA, H100, graph_sizes=sizes)


def test_a_calibration_of_something_else_is_refused():
    with pytest.raises(ConfigError, match=r"profile.gpu: measured for H100, but the run uses H200"):
        RoundCost(LLAMA, lookup_gpu("H200"), calibration=CALIBRATION)


def test_a_time_beyond_64_bits_is_an_error():
    with pytest.raises(TimeOverflow, match="check the units"):
        PassCurve([Pass({"verify": Line(0.0, 1e9)})])


def test_launch_presets():
    assert launch_preset("piecewise") is PIECEWISE
    with pytest.raises(UnknownPreset, match="did you mean 'piecewise'"):
        launch_preset("piecewize")


def test_a_round_of_sparse_attention_beyond_the_graphs_waits_for_their_launch():
    """vLLM drives indexers from Python. Steps with prompts, models without indexers and captured rounds do not wait."""
    launch = replace(FULL_GRAPH, eager_index_ns=100e3)
    config = {
        "model_type": "glm_moe_dsa", "num_hidden_layers": 2, "hidden_size": 1024, "vocab_size": 32_000,
        "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "intermediate_size": 2048,
        "index_n_heads": 4, "index_head_dim": 64, "index_topk": 256, "first_k_dense_replace": 2,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "n_shared_experts": 1,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    indexed = read_model_shape(config, "config.json", "indexed")
    cost = RoundCost(indexed, H100, launch=launch, graph_sizes=(8, 64), graph_unit="tokens")
    kernels = ForwardCost(indexed, H100, cost.efficiency, 1).kernels
    beyond, captured = (cost.decode_ns(rows, PLAIN_ROUND, rows * 512) for rows in (65, 64))
    assert beyond >= kernels * 100e3 > 3 * captured
    assert cost.step_ns([(65, 0)]) < kernels * 100e3 / 3
    dense = RoundCost(LLAMA, H100, launch=launch, graph_sizes=(8, 64), graph_unit="tokens")
    assert dense.decode_ns(65, PLAIN_ROUND, 65 * 512) < 2 * dense.decode_ns(64, PLAIN_ROUND, 64 * 512)


def test_vllm_captures_wider_passes_on_the_blackwell_of_data_centers():
    vllm = server_profile("vllm")
    assert [vllm.token_graph_sizes(lookup_gpu(name))[-1] for name in ("H100", "B200", "RTX 5090")] == [512, 1024, 512]
