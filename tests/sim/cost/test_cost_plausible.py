"""What no deployment contradicts, over models, GPUs, servers and parallelism:
more work takes no less time, and a better GPU no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from foredraft.core.contract.step import PLAIN_ROUND, RoundShape
from foredraft.core.model_shape import lookup_model
from foredraft.core.scheduler.spec import GRAPH_SIZES
from foredraft.sim.cost.draft import eagle3_head
from foredraft.sim.cost.efficiency import default_efficiency
from foredraft.sim.cost.hardware import lookup_gpu
from foredraft.sim.cost.measured import MeasuredForward
from foredraft.sim.cost.measured.tables import CHUNKS, CONTEXTS, PASTS, QUERIES, ROWS, TOKENS, KernelTables
from foredraft.sim.cost.passes.forward import ForwardCost
from foredraft.sim.cost.passes.launch import LAUNCH
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.cost.server import PROFILES
from hypothesis import example, given, settings
from hypothesis import strategies as st

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b")
BATCHES, STEPS, CONTEXT = (1, 2, 3, 8, 24, 25, 64, 200, 500, 600), (0, 1, 2, 3, 7), (64, 1024, 100_000)
SAME = 1.001
GENERATIONS = ("L40S", "A100", "H100", "H200", "B200", "GB200")


def round_cost(model, gpu, tp, server, **changes) -> RoundCost:
    profile, target = PROFILES[server], lookup_model(model)
    shape = {"launch": profile.launch, "graph_unit": profile.graph_unit, "graph_sizes": GRAPH_SIZES}
    return RoundCost(target, lookup_gpu(gpu), tp, eagle3_head(target), **shape | changes)


def times(cost: RoundCost) -> np.ndarray:
    """Return the nanoseconds of rounds, [BATCHES, STEPS, CONTEXT]."""
    return np.array([
        [[cost.decode_ns(rows, RoundShape.chain(steps), rows * context) for context in CONTEXT] for steps in STEPS]
        for rows in BATCHES
    ])  # fmt: skip


def rises(table: np.ndarray, axis: int) -> bool:
    """Whether no time along `axis` is below the one before."""
    before, after = (
        np.take(table, places, axis) for places in (range(table.shape[axis] - 1), range(1, table.shape[axis]))
    )
    return bool((after * SAME >= before).all())


deployments = st.tuples(
    st.sampled_from(MODELS),
    st.sampled_from(GENERATIONS),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from(list(PROFILES)),
)


@settings(max_examples=20)
@example(("qwen3-30b-a3b", "L40S", 1, "vllm-0.18"))
@given(deployments)
def test_more_rows_steps_or_context_take_no_less(deployment):
    found = times(round_cost(*deployment))
    assert all(rises(found, axis) for axis in range(3)), deployment


@settings(max_examples=15)
@given(deployments)
def test_twice_the_rows_take_no_more_than_twice_and_a_wave_of_tiles(deployment):
    cost = round_cost(*deployment)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        one, two = (cost.decode_ns(n, PLAIN_ROUND, n * 1024) for n in (rows, 2 * rows))
        assert two < 2.15 * one, (deployment, rows)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("worse", range(1, len(GENERATIONS) - 1))
def test_a_later_gpu_is_no_slower(model, worse):
    slow, fast = (times(round_cost(model, GENERATIONS[i], 1, "foredraft")) for i in (worse, worse + 1))
    assert (fast <= slow * SAME).all()


@settings(max_examples=12)
@given(deployments)
def test_fewer_bits_are_no_slower_and_no_device_reads_faster_than_its_memory(deployment):
    model, gpu, tp, _ = deployment
    shape, device = lookup_model(model), lookup_gpu(gpu)
    efficiency = default_efficiency(device)
    passes = {
        dtype: ForwardCost(shape.with_dtypes(dtype, None), device, efficiency, tp) for dtype in ("bf16", "fp8", "nvfp4")
    }
    times = [[cost.layers_ns(tokens) for cost in passes.values()] for tokens in (1, 16, 64, 256, 2048)]
    assert all(max(few) <= SAME * wide for wide, *few in times), deployment
    cached = np.full(len(TOKENS), 1.0)  # as if all weights had been measured in a cache
    attention = np.full((len(ROWS), len(QUERIES), len(CONTEXTS)), 1.0)
    tables = KernelTables(
        "made up", cached, cached, cached, attention[:, 0], attention, np.ones((len(CHUNKS), len(PASTS))), {}
    )
    for dtype, cost in passes.items():
        layers = MeasuredForward(cost, tables).layers_ns(1)
        read = (
            cost.shape.active_parameters - 2 * shape.vocab * shape.hidden
        )  # by one token: without embedding and LM head
        least = read * cost.shape.format_bytes(dtype) / tp / device.memory_bandwidth_bytes_per_s * 1e9
        assert 0.999 * least < layers < cost.layers_ns(1), (deployment, dtype)  # norms apart
        if shape.experts:  # two tokens reach nearly twice as many
            assert 1.25 * layers < MeasuredForward(cost, tables).layers_ns(2) < cost.layers_ns(2), (deployment, dtype)


@settings(max_examples=12)
@given(deployments)
def test_more_devices_are_slower_by_their_collectives_alone(deployment):
    model, gpu, tp, server = deployment
    if tp == 8:
        return
    for rows, steps in ((1, 0), (1, 3), (32, 3), (256, 0)):
        few, many = (
            round_cost(model, gpu, devices, server).decode_parts(rows, RoundShape.chain(steps), rows * 1024)
            for devices in (tp, 2 * tp)
        )
        apart = ("comm", LAUNCH, "draft_lm_head", "lm_head")  # logits are gathered
        assert sum(ns for name, ns in many.items() if name not in apart) <= SAME * sum(
            ns for name, ns in few.items() if name not in apart
        )


def test_experts_cost_between_those_of_one_token_and_all():
    sparse, gpu = lookup_model("qwen3-30b-a3b"), lookup_gpu("H100")
    passes = ForwardCost(sparse, gpu, default_efficiency(gpu), 1)
    experts = sparse.experts
    a_token = sparse.weight_bytes * (
        1 - (experts.count - experts.top_k) / experts.count * 0.95
    )  # most weights are experts
    read_ns = 1e9 / gpu.memory_bandwidth_bytes_per_s
    assert 0.8 * a_token * read_ns < passes.layers_ns(1) < 0.5 * sparse.weight_bytes * read_ns
    assert 0.9 * sparse.weight_bytes * read_ns < passes.layers_ns(512) < 3 * sparse.weight_bytes * read_ns


@settings(max_examples=20)
@example(198)
@given(st.integers(0, 2**32 - 1))
def test_measured_kernels_that_fluctuate_make_no_work_cheaper(seed):
    """A database has rows, queries and contexts measured one by one: more of them were faster here and there."""
    rng = np.random.default_rng(seed)

    def measured(*axes: tuple[int, ...]) -> np.ndarray:
        size = 1.0
        for number, axis in enumerate(axes):
            size = np.multiply.outer(size, np.array(axis, float) + 1) if number else np.array(axis, float) + 1
        return 1e5 + 10 * size * rng.lognormal(0, 0.2, np.shape(size))

    tables = KernelTables(
        "made up", measured(TOKENS), measured(TOKENS), measured(TOKENS), measured(ROWS, CONTEXTS),
        measured(ROWS, QUERIES, CONTEXTS), measured(CHUNKS, PASTS), {},
    )  # fmt: skip
    cost = round_cost("llama-3.1-8b", "H200", 2, "sglang-0.5", tables=tables, draft_tables=tables)
    assert all(rises(times(cost), axis) for axis in range(3))
    shape, gpu = lookup_model("llama-3.1-8b"), lookup_gpu("H200")
    passes = MeasuredForward(ForwardCost(shape, gpu, default_efficiency(gpu), 1), replace(tables))
    prompts = [
        [passes.prefill_attention_ns([(new, past)]) for past in (0, 100, 5_000, 70_000)] for new in (16, 40, 900, 8_192)
    ]
    assert rises(np.array(prompts), 0) and rises(np.array(prompts), 1)
