"""The launches of a round that are counted without a GPU: which there are, and the bytes of each part."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from foredraft.core.algorithm.algorithm import Drafter
from foredraft.core.errors import ForedraftError
from foredraft.gpu.kernels import jit
from foredraft.gpu.kernels.layers.flash import DeviceTraits
from foredraft.gpu.measure.floor import round_bytes
from foredraft.gpu.measure.plan import BenchOptions, BenchPlan, plan_bench
from foredraft.gpu.measure.shapes import meta_models
from foredraft.twin.launches import (
    ATTENTION,
    DRAFT,
    EXPERTS,
    LM_HEAD,
    PROJECTIONS,
    RECURRENT,
    TARGET,
    KernelLaunch,
    count_launches,
)

pytest.importorskip("triton")

LAYERS, HIDDEN, VOCAB = 4, 64, 200
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
MOE = SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
GPU = DeviceTraits(132, 90, 227 << 10)


def plan_of(tmp_path, shape=SMALL, **options) -> BenchPlan:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(shape))
    usual = BenchOptions(random_weights=str(path), batch_sizes="2", context_lengths="40", dtype="bfloat16")
    return plan_bench(replace(usual, **options), on_meta=True)


def counted(plan: BenchPlan, arm: int = -1, context_len: int = 40, traits: DeviceTraits = GPU) -> list[KernelLaunch]:
    return count_launches(plan, plan.cells[0].arms[arm], context_len, traits)


def test_a_plain_round_has_the_launches_of_its_layers(tmp_path):
    found = counted(plan_of(tmp_path, algorithm="NONE"))
    kinds = Counter((launch.model, launch.group) for launch in found)
    assert kinds[TARGET, PROJECTIONS] == 4 * LAYERS and kinds[TARGET, LM_HEAD] == 1
    names = Counter(launch.name for launch in found)
    assert names["rms_norm_kernel"] == 2 * LAYERS + 1
    assert names["rope_write_kernel"] == names["gate_mul_kernel"] == names["verify_attention_kernel"] == LAYERS
    assert names["_greedy_kernel"] == names["_chain_kernel"] == 1
    assert not any(launch.model == DRAFT for launch in found)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("NONE", {}),
        ("STANDALONE", {"steps": "3"}),
        ("EAGLE", {"steps": "2"}),
        ("EAGLE3", {"steps": "3"}),
        ("EAGLE3", {"steps": "3", "topk": 4, "num_draft_tokens": 9}),
        ("MULTI_LAYER_EAGLE", {"steps": "3"}),
        ("NGRAM", {"steps": "3"}),
    ],
)
def test_products_read_the_weights_that_the_floor_counts(tmp_path, algorithm, options):
    plan = plan_of(tmp_path, algorithm=algorithm, **options)
    steps, drafter = plan.cells[0].arms[-1].steps, plan.algorithm.drafter
    target, draft = meta_models(plan.target, plan.draft, plan.dtype)
    passes = 1 if drafter is Drafter.HEADS else steps
    vectors = [(target, 1), *([] if draft is None else [(draft, passes)])]  # norms, which no product reads
    norms = sum(times * x.nbytes for model, times in vectors for x in model.parameters() if x.ndim == 1)
    read = sum(2 * groups * inner * columns for groups, _, inner, columns in products(counted(plan)))
    assert read == round_bytes(target, draft, drafter, steps, verified_tokens=2).weights - norms


STORED = {
    "fp8 in blocks": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
}


@pytest.mark.parametrize("shape", [SMALL, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("form", STORED)
def test_products_read_quantized_matrices_as_they_are_stored(tmp_path, form, shape):
    shape = shape | {"quantization_config": STORED[form]}
    plan = plan_of(tmp_path, shape, algorithm="NONE", batch_sizes="1")
    target, _ = meta_models(plan.target, None, plan.dtype)
    vectors = sum(x.nbytes for x in target.parameters() if x.ndim == 1)
    chosen = [x for x in counted(plan) if x.product is not None]
    read = sum(x.weight_bytes * x.product[0] * x.product[2] * x.product[3] for x in chosen)
    assert 0 < read < 2 * sum(groups * inner * columns for groups, _, inner, columns in products(chosen))
    if "num_experts" not in shape:
        assert round(read) == target.weight_bytes - target.embed_weight.nbytes - vectors
    unpacked = plan_of(tmp_path, shape, algorithm="NONE", batch_sizes="1", quantized="unpack")
    assert {x.weight_bytes for x in counted(unpacked)} == {2.0}


def products(found: list[KernelLaunch]) -> list[tuple[int, int, int, int]]:
    return [launch.product for launch in found if launch.product is not None]


@pytest.mark.parametrize(("kv_dtype", "size"), [("auto", 2), ("fp8", 1)])
def test_attention_reads_the_keys_and_values_of_the_context(tmp_path, kv_dtype, size):
    plan = plan_of(tmp_path, algorithm="NONE", kv_dtype=kv_dtype)

    def attended(length: int) -> int:
        return sum(launch.num_bytes for launch in counted(plan, context_len=length) if launch.group == ATTENTION)

    models = meta_models(plan.target, None, plan.dtype, kv_dtype=plan.kv_dtype)
    per_token = round_bytes(*models, Drafter.NONE, 0, 2).kv[0][1]
    assert per_token == plan.cells[0].kv_bytes // (plan.spec.config.num_pages + 1) == LAYERS * 2 * 2 * 16 * size
    table = 4 * LAYERS
    assert attended(4000) - attended(40) == 2 * 3960 * (per_token + table)


def test_sizes_that_the_gpu_decides_are_those_of_the_gpu(tmp_path):
    """Many processors cut long rows into parts, whose results they write and read again; one takes the rows whole.
    Both are one launch per layer."""
    plan = plan_of(tmp_path, algorithm="NONE", context_lengths="2000")
    moved = []
    for traits in (GPU, DeviceTraits(1, 90, 227 << 10)):
        found = [x for x in counted(plan, context_len=2000, traits=traits) if x.group == ATTENTION]
        assert [x.name for x in found] == ["verify_attention_kernel"] * LAYERS
        moved.append(sum(x.num_bytes for x in found))
    assert moved[0] > moved[1]


def test_few_tokens_read_the_experts_that_they_choose_once(tmp_path):
    found = [launch for launch in counted(plan_of(tmp_path, MOE, algorithm="NONE")) if launch.group == EXPERTS]
    inner, choices = MOE["moe_intermediate_size"], 2 * 2  # two tokens, two experts each
    weights = choices * 3 * inner * HIDDEN
    values = (2 * HIDDEN + choices * 2 * inner) + (choices * 2 * inner + choices * HIDDEN)  # in and out of both
    both = [launch.num_bytes for launch in found if launch.name == "expert_product_kernel"]
    assert len(both) == 2 * LAYERS and sum(both) == LAYERS * 2 * (weights + values)
    assert len(found) == 4 * LAYERS, "and their choice, and the sum over a token's experts"


HYBRID = SMALL | {
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def test_a_round_of_a_hybrid_reads_each_state_once_and_writes_it_once(tmp_path):
    plan = plan_of(tmp_path, HYBRID, algorithm="NGRAM", steps="3")
    found = counted(plan)
    states = [launch for launch in found if launch.group == RECURRENT]
    assert Counter(launch.name for launch in states) == {"delta_nodes_kernel": LAYERS // 2, "delta_keep_kernel": 1}
    (keep,) = (launch for launch in states if launch.name == "delta_keep_kernel")
    of_a_row = plan.target.state.num_bytes(plan.dtype) * LAYERS // 2
    nodes, rows = plan.cells[0].arms[-1].num_nodes, 2
    kept = plan.target.state.node_bytes(plan.dtype) + 4 * plan.target.state.heads  # two decays of each head
    assert 0 <= keep.num_bytes - rows * (2 * of_a_row + nodes * kept * LAYERS // 2) < 200, "and the path"
    assert len(found) <= LAYERS * 18 + 30, "14 of a recurrent layer, 18 of one with attention"


def test_without_triton_nothing_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(jit, "triton", None)
    with pytest.raises(ForedraftError, match="Triton"):
        counted(plan_of(tmp_path))
