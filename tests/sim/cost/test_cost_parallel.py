"""Devices that share a model: who holds what, who waits for whom, and what crosses a network."""

from __future__ import annotations

import pytest
from foredraft.core.contract.step import PLAIN_ROUND
from foredraft.core.model_shape import lookup_model
from foredraft.sim.assembly import assemble
from foredraft.sim.assembly.explaining import derived_rows
from foredraft.sim.cost.efficiency import default_efficiency
from foredraft.sim.cost.hardware import Parallelism, UnsupportedParallelism, lookup_gpu
from foredraft.sim.cost.memory import kv_pool_slots
from foredraft.sim.cost.passes.forward import ForwardCost, reached_experts
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.scenario_file import load_scenario
from hypothesis import given
from hypothesis import strategies as st

H100, SPARSE, DENSE = lookup_gpu("H100"), lookup_model("qwen3-30b-a3b"), lookup_model("llama-3.1-70b")


def forward(shape, *parallel, **nodes):
    return ForwardCost(shape, H100, default_efficiency(H100), Parallelism(*parallel, **nodes))


@given(st.sampled_from([2, 4, 8, 16]), st.integers(1, 256), st.integers(1, 1 << 24))
def test_a_collective_over_nodes_takes_longer_than_inside_one(devices, rows, size):
    inside, outside = (H100.all_reduce_ns(size, devices, nodes) for nodes in (1, 2))
    assert 0 < inside < outside
    near, far = (forward(DENSE, 8, gpus_per_node=n).comm_ns(rows) for n in (8, 4))
    assert near < far
    assert H100.all_reduce_ns(size, 1) == 0


def test_a_share_of_the_bytes_crosses_the_network():
    """Two nodes of eight: each port moves an eighth of the bytes, there and back halved by two nodes;
    the rest stays on NVLink."""
    size = 64 << 20
    link, network = H100.interconnect, H100.network
    inside = link.latency_ns + 2 * 7 / 8 * size / link.bandwidth_bytes_per_s * 1e9
    between = network.latency_ns + size / 8 / network.bandwidth_bytes_per_s * 1e9
    assert H100.all_reduce_ns(size, 16, 2) == pytest.approx(inside + between)


@given(st.integers(1, 512), st.sampled_from([2, 4, 8]))
def test_the_busiest_rank_has_more_than_its_share_and_at_most_all(tokens, ranks):
    cost = forward(SPARSE, 8, 1, ranks)
    active = reached_experts(SPARSE.experts, tokens)
    busiest = cost._busiest(active, SPARSE.experts.count)
    assert active / ranks * (1 - 1e-9) <= busiest <= min(SPARSE.experts.count / ranks, active) * (1 + 1e-9)


def test_the_busiest_rank_is_what_draws_give():
    """Uniform routing drawn at random, against the normal approximation of the greatest rank."""
    import numpy as np

    rng, ranks, experts = np.random.default_rng(0), 8, SPARSE.experts
    cost = forward(SPARSE, 8, 1, ranks)
    for tokens in (8, 64):
        greatest = []
        for _ in range(300):
            chosen = np.array([rng.permutation(experts.count)[: experts.top_k] for _ in range(tokens)])
            distinct = np.unique(chosen)
            greatest.append(np.bincount(distinct * ranks // experts.count, minlength=ranks).max())
        estimate = cost._busiest(reached_experts(SPARSE.experts, tokens), experts.count)
        assert estimate == pytest.approx(np.mean(greatest), rel=0.08), tokens


def test_groups_have_their_own_requests():
    """Eight groups of one device: each has an eighth of the rows in its attention and KV, and all the
    experts see all tokens."""
    groups, one = forward(SPARSE, 1, 8, 8), forward(SPARSE, 1)
    assert groups.decode_attention(64, 1, 64).slope_ns == pytest.approx(one.decode_attention(8, 1, 8).slope_ns / 8)
    pool = kv_pool_slots(SPARSE, H100, Parallelism(1, 8, 8))
    assert pool.slots > 8 * kv_pool_slots(SPARSE, H100, 1).slots, (
        "a device that holds an eighth of the experts has more room"
    )
    assert pool.target_slot_bytes == SPARSE.kv_bytes_per_token, "and keeps whole KV heads"
    costs = [
        RoundCost(SPARSE, H100, parallel).decode_ns(64, PLAIN_ROUND, 64 * 4096)
        for parallel in (1, Parallelism(1, 8, 8))
    ]
    assert costs[1] < costs[0]


@pytest.mark.parametrize("server", ["sglang-0.5", "vllm-0.18", "trtllm-1.x"])
def test_each_attention_data_parallel_group_plans_and_samples_its_own_rows(server):
    """With as many rows for each, eight groups wait for the host and sample as long as one."""
    settings = ["model.target=qwen3-30b-a3b", f"hardware.server={server}", "hardware.kernels=roofline"]
    settings += ["engine.kv_slots=100000", "speculation.algorithm=NONE"]
    groups = ["hardware.attention_data_parallel=8", "hardware.expert_parallel=8"]
    one, eight = (assemble(load_scenario(None, [*settings, *more])[0]) for more in ([], groups))
    parts, shared = (
        run.cost.decode_parts(rows, PLAIN_ROUND, rows * 1000) for run, rows in ((one, 64), (eight, 8 * 64))
    )
    assert shared["sampling"] == pytest.approx(parts["sampling"], rel=1e-6)
    skew_ns = eight.cost.launch.collectives_gap_ns(eight.cost._target.collectives, 8)
    assert shared["launch"] - skew_ns == pytest.approx(parts["launch"], abs=2)
    assert eight.host.plan_ns(8 * 64) == pytest.approx(one.host.plan_ns(64), abs=8 * 64)
    assert eight.host.commit_ns(8 * 64, 8 * 64) == pytest.approx(one.host.commit_ns(64, 64), abs=8 * 64)


def test_a_scenario_gives_the_devices():
    settings = ["model.target=qwen3-30b-a3b", "hardware.tensor_parallel=2", "hardware.attention_data_parallel=4"]
    run = assemble(load_scenario(None, [*settings, "hardware.expert_parallel=8"])[0])
    assert (run.cost.parallel, run.scenario.hardware.devices) == (Parallelism(2, 4, 8), 8)
    assert ("experts: ranks", 8) in [row[:2] for row in derived_rows(run)]
    rack = assemble(
        load_scenario(None, ["hardware.gpu=GB200", "model.target=llama-3.1-70b", "hardware.tensor_parallel=16"])[0]
    )
    assert rack.cost.parallel.nodes(16) == 1 and Parallelism(16).nodes(16) == 2


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ((3, 1, 1), "tensor parallelism 3 does not divide the 32 attention heads of qwen3-30b-a3b"),
        ((2, 1, 4), "expert parallelism 4 does not divide the 2 devices"),
        ((1, 3, 3), "expert parallelism 3 does not divide the 128 experts"),
        ((0, 1, 1), "at least 1"),
    ],
)
def test_contradictions_are_refused(parallel, words):
    with pytest.raises(UnsupportedParallelism, match=words):
        forward(SPARSE, *parallel)
