"""What a rank launches, exchanges and keeps, counted without a GPU, beside what the simulator prices for the same shape
and number of devices, and beside what a rank does that decodes on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from foredraft.core.model_shape import read_model_shape
from foredraft.gpu.batch.pools import bytes_per_slot
from foredraft.gpu.kernels.layers.flash import DeviceTraits
from foredraft.gpu.measure.plan import BenchOptions, plan_bench
from foredraft.gpu.measure.ranks import options_to_json
from foredraft.gpu.models.checkpoint import required_bytes
from foredraft.gpu.models.config import ModelConfig
from foredraft.gpu.models.divided import sharded
from foredraft.gpu.parallel import processes
from foredraft.gpu.types.shards import EXCHANGES, Shard
from foredraft.sim.cost.efficiency import default_efficiency
from foredraft.sim.cost.hardware import lookup_gpu
from foredraft.sim.cost.passes.forward import ForwardCost
from foredraft.twin.estimate import estimates
from foredraft.twin.launches import EXCHANGED, LM_HEAD, PROJECTIONS, TARGET, count_launches

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 200,
    "max_position_embeddings": 4096,
}
GQA = DENSE | {"num_key_value_heads": 4, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
HYBRID = DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
GPU, TRAITS = lookup_gpu("H100"), DeviceTraits(132, 90, 227 << 10)


def cost_of(shape: dict, ranks: int) -> ForwardCost:
    return ForwardCost(read_model_shape(shape, "config.json", "test"), GPU, default_efficiency(GPU), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [DENSE, GQA, HYBRID], ids=["two KV heads", "four KV heads", "recurrent layers"])
def test_a_rank_launches_the_products_and_exchanges_that_the_simulator_prices(shape, ranks, tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    options = BenchOptions(random_weights=str(path), batch_sizes="2", context_lengths="40", dtype="bfloat16")
    plan = plan_bench(replace(options, algorithm="NONE", tensor_parallel=ranks), on_meta=True)
    before = EXCHANGES.begun
    found = count_launches(plan, plan.cells[0].arms[0], 40, TRAITS)
    exchanges = (EXCHANGES.begun - before) / 2  # the round is replayed twice, to make its constants first
    launched = Counter(launch.product[2:] for launch in found if launch.group in (PROJECTIONS, LM_HEAD))

    cost = cost_of(shape, ranks)
    priced = Counter({(cost.shape.hidden, cost.shape.vocab // ranks): 1})
    for part, count in (*cost.shape.mixers, *cost.shape.mlps):
        for product in part.products(cost.shape.hidden, ranks):
            priced[product.inner, product.columns] += count * int(product.groups)
    assert launched == priced
    # The simulator has no exchange of embeddings, and counts the gathered logits with the LM head.
    assert exchanges == (0 if ranks == 1 else cost.collectives + 2)


def counted_by_ranks(options: BenchOptions) -> list[dict]:
    """What each of the ranks of a benchmark counts, as processes over gloo on this CPU."""
    store, port = processes._loopback_store()
    script = Path(__file__).with_name("counting_rank.py")
    words = [sys.executable, "-P", str(script)]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(port), json.dumps(options_to_json(options))],
            stdout=subprocess.PIPE,
            env=processes._environment(),
        )
        for rank in range(options.tensor_parallel)
    ]
    try:
        return [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        del store


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("plain", {"algorithm": "NONE"}),
        ("EAGLE3", {"algorithm": "EAGLE3", "steps": "2"}),
        pytest.param("EAGLE", {"algorithm": "EAGLE", "steps": "2"}, marks=pytest.mark.slow),
        pytest.param("STANDALONE", {"algorithm": "STANDALONE", "steps": "2"}, marks=pytest.mark.slow),
        pytest.param("joint norms", {"algorithm": "NONE"}, marks=pytest.mark.slow),
    ],
)
def test_an_estimate_has_the_exchanges_and_weights_of_a_rank_that_decodes(name, draft, tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "config.json"
    joint = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"} if name == "joint norms" else {}
    path.write_text(json.dumps(DENSE | joint))
    options = BenchOptions(random_weights=str(path), batch_sizes="2", context_lengths="40", dtype="bfloat16")
    options = replace(options, output_tokens=20, tensor_parallel=2, device="cpu", prompts=2, **draft)
    if draft["algorithm"] != "NONE":
        options = replace(options, acceptance="1.5")
    plan = plan_bench(options, on_meta=True)
    found = count_launches(plan, plan.cells[0].arms[-1], 40, TRAITS)
    real = counted_by_ranks(options)
    assert real[0]["exchanged"] == real[1]["exchanged"] and len(real[0]["exchanged"]) > 4

    sent = Counter((launch.name, launch.num_bytes) for launch in found if launch.group in EXCHANGED.values())
    # Of two ranks each sends one half of what it sums and half of the sums, or its half of what is gathered.
    ways = {"sum": 1.0, "gather": 0.5}
    assert sent == Counter((kind, ways[kind] * num_bytes) for kind, num_bytes in real[0]["exchanged"])
    products = [x.product for x in found if x.model == TARGET and x.group in (PROJECTIONS, LM_HEAD)]
    assert sum(2 * inner * columns for _, _, inner, columns in products) == real[0]["matrices"]

    (*_, estimate) = estimates(plan, "H100")
    priced = {part.name: part for part in estimate.parts if part.name in EXCHANGED.values()}
    sums, logits = priced[EXCHANGED["sum"]], priced[EXCHANGED["gather"]]
    assert (sums.launches, logits.launches) == tuple(
        sum(kind == wanted for kind, _ in real[0]["exchanged"]) for wanted in ways
    )
    latency, bandwidth = GPU.interconnect.latency_ns / 1e3, GPU.interconnect.bandwidth_bytes_per_s / 1e6
    for part in (sums, logits):
        assert part.floor_us == pytest.approx(part.num_bytes / bandwidth)
        assert part.us == pytest.approx(part.launches * latency + part.floor_us)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [DENSE, GQA], ids=["two KV heads", "four KV heads"])
def test_a_rank_keeps_the_bytes_that_the_simulator_plans_for(shape, ranks):
    config, cost = ModelConfig.from_dict(shape), cost_of(shape, ranks)
    part = Shard(0, ranks)
    assert bytes_per_slot(sharded(config, part).kv_shapes, torch.bfloat16) == cost.shape.token_bytes(ranks)
    weights = sum(required_bytes(config, torch.bfloat16, part).values())
    assert weights == cost.shape.weight_bytes_per_device(ranks, ranks, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_divide_the_states_that_the_simulator_plans_for(ranks):
    states = sharded(ModelConfig.from_dict(HYBRID), Shard(0, ranks)).state_shapes
    assert len(states) == 2
    assert (
        sum(state.num_bytes(torch.bfloat16) for state in states) * ranks
        == cost_of(HYBRID, ranks).shape.recurrent_state_bytes
    )
