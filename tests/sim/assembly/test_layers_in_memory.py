"""What layers with a window and recurrent layers take of a device's memory, by the rule of each server."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
from foredraft.core.errors import ForedraftError
from foredraft.core.kv.groups import KVGroup
from foredraft.observe.log import EventLog
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.observe.replay import replay
from foredraft.sim.assembly import Assembly, assemble
from foredraft.sim.assembly.explaining import derived_rows
from foredraft.sim.effects.notices import notices_of
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import scenario_from_dict, scenario_with
from foredraft.sim.summary.summary import summarize_run
from hypothesis import given
from hypothesis import settings as bounds
from hypothesis import strategies as st

SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "head_dim": 128,
    "num_hidden_layers": 24,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "windowed": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
    },
    "hybrid": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "bfloat16",
    },
}
HARDWARE = {"gpu": "H100", "kernels": "roofline"}
EAGLE3 = {"algorithm": "EAGLE3", "policy": "fixed", "steps": 3}
CASES = {
    "vllm, dense": ("dense", "vllm-0.18", {}),
    "vllm, windowed": ("windowed", "vllm-0.18", {}),
    "vllm, hybrid": ("hybrid", "vllm-0.18", {}),
    "vllm, hybrid with a draft": ("hybrid", "vllm-0.18", {"speculation": EAGLE3}),
    "vllm, windowed with a draft, two devices": (
        "windowed", "vllm-0.18", {"speculation": EAGLE3, "hardware": {"tensor_parallel": 2}},
    ),
    "sglang, windowed": ("windowed", "sglang-0.5", {}),
    "sglang, hybrid": ("hybrid", "sglang-0.5", {}),
    "sglang, hybrid on two devices": ("hybrid", "sglang-0.5", {"hardware": {"tensor_parallel": 2}}),
    "trtllm, windowed": ("windowed", "trtllm-1.x", {}),
    "ours, windowed": ("windowed", "foredraft", {}),
}  # fmt: skip


def fixed(length: int) -> dict[str, Any]:
    return {"kind": "fixed", "value": length}


@cache
def model(kind: str) -> str:
    """Write the config.json of a model of this kind."""
    folder = Path(mkdtemp(prefix="foredraft-")) / kind
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES | MODELS[kind]))
    return str(folder)


def scenario_of(kind: str, server: str, **tables: Any) -> Scenario:
    given: dict[str, Any] = {
        "model": {"target": model(kind)},
        "hardware": HARDWARE | {"server": server},
        "engine": {"page_size": 16},
        "speculation": {"algorithm": "NONE"},
        "workload": {
            "concurrency": 8, "num_requests": 24, "prompt": fixed(9000), "output": fixed(60),
        },
    }  # fmt: skip
    for name, table in tables.items():
        given[name] = given.get(name, {}) | table if isinstance(table, dict) else table
    return scenario_from_dict(given, "test")


def plan_of(kind: str, server: str, **tables: Any) -> Assembly:
    return assemble(scenario_of(kind, server, **tables))


def run(scenario: Scenario, path: Path | None = None) -> dict[str, Any]:
    """Return the summary of a run; its log is at `path`."""
    metrics = RunMetrics(None)
    log = None if path is None else EventLog(path, {"scenario": scenario.model_dump(mode="json")})
    sinks = lambda replica: [metrics.sink(replica)] + ([] if log is None else [log.sink(replica)])  # noqa: E731
    report = Simulation(scenario, sinks=sinks).run()
    if log is not None:
        log.close(report.complete)
    return summarize_run(scenario, report, metrics)


def unequal_keys(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return the keys in which runs differ, without how the rounds were cut into steps, and shares of the pool."""
    return {key for key in one if one[key] != other[key] and "kv_" not in key} - {"committed_steps"}


# -- a limit that is not reached ---------------------------------------------------------------------------------------


@pytest.mark.fast("vllm, hybrid", "sglang, windowed")
@pytest.mark.parametrize("case", CASES)
def test_a_limit_that_a_run_never_reaches_changes_nothing_in_it(case):
    kind, server, tables = CASES[case]
    runs = [run(scenario_of(kind, server, **tables, engine=limit)) for limit in ({"max_running": 12}, {})]
    assert runs[0]["max_running"] == 8
    assert unequal_keys(*runs) <= {"timing", "notices", "saturation"}


def decisions_of(scenario: Scenario) -> list[str]:
    """Return the lines of a run's log, without the header and the settings of engines."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        run(scenario, path)
        lines = path.read_text().splitlines()
    return [line for line in lines if not line.startswith(('{"t":"header"', '{"t":"engine"'))]


@bounds(max_examples=5, deadline=None)
@given(
    case=st.sampled_from(sorted(CASES)),
    clients=st.integers(1, 10),
    limits=st.tuples(st.integers(0, 6), st.sampled_from([32, 100, 1000])),
    multi_step_rounds=st.sampled_from([1, 32]),
    workload=st.fixed_dictionaries(
        {
            "num_requests": st.integers(4, 16),
            "prompt": st.sampled_from([fixed(700), {"kind": "uniform", "low": 20, "high": 5000}]),
            "output": st.sampled_from([fixed(20), {"kind": "uniform", "low": 1, "high": 90}]),
            "prefixes": st.sampled_from([{"groups": 2, "length": 600}, None]),
        }
    ),
    seed=st.integers(0, 99),
)
def test_a_limit_that_is_not_reached_changes_no_decision(case, clients, limits, multi_step_rounds, workload, seed):
    """Whatever the model's layers, the server and the load are: the logs are equal but for the settings in them. With
    states and a limit of 1,000 a multi-step may be shorter, as the next test shows."""
    kind, server, tables = CASES[case]
    if kind == "hybrid" and limits[1] == 1000:
        multi_step_rounds = 1
    load = {"concurrency": clients, **{key: value for key, value in workload.items() if value is not None}}
    engine = {"multi_step_rounds": multi_step_rounds}
    few, many = (
        decisions_of(
            scenario_of(kind, server, seed=seed, **tables, workload=load, engine=engine | {"max_running": most})
        )
        for most in (clients + limits[0], clients + limits[1])
    )
    assert few == many and few


def test_with_wide_states_a_limit_changes_only_how_rounds_are_cut_into_steps():
    """A multi-step leaves slots for the states of as many newcomers as the limit allows, so it may be shorter."""
    kind, server, tables = CASES["vllm, hybrid"]
    wide = {**tables, "model": {**tables.get("model", {}), "state_dtype": "fp32"}}
    load = {"concurrency": 1, "num_requests": 4, "prompt": fixed(700), "output": fixed(90)}
    few, many = (
        [
            scenario_of(kind, server, **wide, workload=load, engine={"max_running": most, "multi_step_rounds": rounds})
            for rounds in (1, 32)
        ]
        for most in (1, 1001)
    )
    assert decisions_of(few[0]) == decisions_of(many[0])
    assert decisions_of(few[1]) != decisions_of(many[1])
    assert unequal_keys(run(few[1]), run(many[1])) <= {"max_running", "timing", "notices", "saturation"}


def test_default_limits_leave_a_pool_for_every_kind():
    for kind, server, tables in CASES.values():
        usual, few = (plan_of(kind, server, **tables, engine=limit) for limit in ({}, {"max_running": 8}))
        assert usual.memory.kv_pool_bytes > 0.45 * few.memory.kv_pool_bytes > 1e9


# -- one pool of bytes (vLLM) ------------------------------------------------------------------------------------------


def test_one_pool_holds_what_each_request_really_takes():
    found = plan_of("windowed", "vllm-0.18")
    memory, config = found.memory, found.spec.config
    per_layer = 2 * 8 * 128 * 2
    assert memory.target_slot_bytes == 4 * per_layer and config.groups == (KVGroup(window=1024, pages=5.0),)
    rows = {name: value for name, value, *_ in derived_rows(found)}
    chunk = 8192
    # A request of the whole context, while its prompt is computed.
    whole = 65536 * 4 * per_layer + (1023 + chunk) * 20 * per_layer
    assert rows["KV slots"] == pytest.approx(memory.kv_pool_bytes / whole * 65536, rel=1e-3)
    assert rows["KV slots without windows and states"] == memory.slots > 1.4 * rows["KV slots"]
    assert rows["requests of 65,536 tokens that the KV pool holds"] == pytest.approx(rows["KV slots"] / 65536, rel=1e-4)
    draft = plan_of("windowed", "vllm-0.18", speculation=EAGLE3)
    slot = draft.memory.target_slot_bytes + draft.memory.draft_slot_bytes
    (group,) = draft.spec.config.groups
    assert group.window == 1024 and group.pages == pytest.approx(20 * per_layer / slot)


@pytest.mark.fast("windowed-300", "hybrid-300", ci="*")
@pytest.mark.parametrize("length", [300, 9000])
@pytest.mark.parametrize("kind", ["windowed", "hybrid"])
def test_as_many_requests_run_as_the_pool_holds(kind, length):
    """The bytes of the requests that run together fill the pool, whether they are shorter than the window or longer."""
    tight = {"reserved_fraction": {"windowed": 0.75, "hybrid": 0.78}[kind]}
    scenario = scenario_of(kind, "vllm-0.18", hardware=HARDWARE | tight, workload={
        "concurrency": 400, "num_requests": 400, "prompt": fixed(length), "output": fixed(200),
    })  # fmt: skip
    memory, target = assemble(scenario).memory, assemble(scenario).target
    full, in_windows = target.token_bytes(windowed=False), target.token_bytes(windowed=True)
    each = length * full + min(length, 1024) * in_windows + 2 * target.recurrent_state_bytes
    assert run(scenario)["max_running"] == pytest.approx(memory.kv_pool_bytes / each, rel=0.15)


@pytest.mark.parametrize("nodes, states", [(1, 2), (4, 5)])
def test_states_come_from_the_pool_when_a_request_runs(nodes, states):
    speculation = {} if nodes == 1 else {"speculation": EAGLE3}
    for tensor in (1, 2):
        hardware = {"tensor_parallel": tensor}
        cached, other = (
            plan_of("hybrid", "vllm-0.18", **speculation, hardware=hardware, engine={"prefix_cache": has}).memory
            for has in (True, False)
        )
        state = plan_of("hybrid", "vllm-0.18").target.recurrent_state_bytes / tensor
        page = 16 * (cached.target_slot_bytes + cached.draft_slot_bytes)
        assert cached.recurrent_states_bytes == 0 and cached.most_running is None
        (kept,), (alone,) = cached.groups, other.groups
        assert kept == KVGroup(pages=pytest.approx(state / page), states=states)
        assert alone == KVGroup(pages=pytest.approx(state / page), states=states - 1)


# -- pools in proportion (SGLang) --------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings, per_request", [({}, 5), ({"mode": "synchronous"}, 3), ({"prefix_cache": False}, 1)])
def test_states_have_a_pool_in_proportion_that_limits_the_requests(settings, per_request):
    found = plan_of("hybrid", "sglang-0.5", engine=settings)
    memory, state = found.memory, found.target.recurrent_state_bytes
    left = memory.kv_pool_bytes + memory.recurrent_states_bytes
    assert memory.recurrent_states_bytes == pytest.approx(left * 0.9 / 1.9, rel=0.02)
    most = (memory.recurrent_states_bytes // state - 1) // per_request
    assert memory.most_running == found.spec.config.max_running == most
    (group,) = memory.groups
    assert group.capacity >= most * per_request and group.states == {5: 3}.get(per_request, 1)
    (notice,) = [text for text in notices_of(found, {}) if "recurrent states" in text]
    assert f"at most {memory.most_running:,} requests run at once, not 2,048" in notice
    few = plan_of("hybrid", "sglang-0.5", engine={**settings, "max_running": memory.most_running})
    assert few.memory == memory and not any("recurrent states" in text for text in notices_of(few, {}))


def test_states_for_drafts_are_set_aside_for_the_requests_that_may_run():
    found = plan_of("hybrid", "sglang-0.5", speculation=EAGLE3)
    memory, state = found.memory, found.target.recurrent_state_bytes
    most = found.spec.config.max_running
    assert most <= 48, "SGLang's default with a draft"
    left = memory.kv_pool_bytes + memory.recurrent_states_bytes
    # K states and for each of K / 5 requests 4 nodes, and one slot more of each, fill the share.
    count = int((left * 0.9 / 1.9 - state * 5) / (state * (1 + 4 / 5)))
    assert most == min(48, count // 5)
    assert memory.recurrent_states_bytes == pytest.approx(state * (count + 1 + (most + 1) * 4), rel=0.02)


def test_the_proportions_of_the_pools_may_be_given():
    usual, other = (plan_of("windowed", "sglang-0.5", hardware=given).memory for given in ({}, {"window_ratio": 0.2}))
    assert other.window_slot_bytes == pytest.approx(usual.window_slot_bytes / 4, abs=1) and other.slots > usual.slots
    for ratio in (0.9, 0.3):
        memory = plan_of("hybrid", "sglang-0.5", hardware={"state_ratio": ratio}).memory
        left = memory.kv_pool_bytes + memory.recurrent_states_bytes
        assert memory.recurrent_states_bytes == pytest.approx(left * ratio / (1 + ratio), rel=0.03)


def test_the_number_of_states_may_be_given():
    for settings, drafted in (({}, 0), (EAGLE3, 4)):
        speculation = settings or {"algorithm": "NONE"}
        found = plan_of("hybrid", "sglang-0.5", hardware={"state_slots": 100}, speculation=speculation)
        memory, state = found.memory, found.target.recurrent_state_bytes
        assert memory.most_running == found.spec.config.max_running == 100 // 5
        assert memory.recurrent_states_bytes == state * (101 + 21 * drafted)


def test_states_of_fewer_bits_take_less_of_the_pool():
    plans = [plan_of("hybrid", "vllm-0.18", model={"state_dtype": one}).memory for one in ("bf16", "fp32")]
    narrow, wide = (group.pages for plan in plans for group in plan.groups if group.has_states)
    assert narrow < 0.6 * wide
    next_model = scenario_of("hybrid", "vllm-0.18", model={"target": "qwen3-next-80b-a3b", "weight_dtype": "int4"})
    usual, wide = (
        assemble(scenario_with(next_model.model_dump(mode="json"), given)).target.recurrent_state_bytes
        for given in ({}, {"model.state_dtype": "fp32"})
    )
    assert usual < 0.6 * wide, "where a file does not say it, vLLM keeps states as it keeps activations"
    wide, few = (plan_of("hybrid", "sglang-0.5", model={"state_dtype": one}).memory for one in ("fp32", None))
    assert few.most_running > 1.8 * wide.most_running


def test_layers_with_a_window_have_a_pool_in_proportion():
    found = plan_of("windowed", "sglang-0.5")
    memory, per_layer = found.memory, 2 * 8 * 128 * 2
    assert memory.slot_bytes == 4 * per_layer + 0.8 * 20 * per_layer
    assert memory.slots == memory.kv_pool_bytes // memory.slot_bytes - 16
    # Requests within their windows fill the smaller pool, of 0.8 tokens for each slot.
    config = found.spec.config
    assert config.num_fitting(800) == pytest.approx(0.8 * memory.slots / 800, rel=0.01)
    assert config.num_fitting(60_000) == memory.slots // 60_000
    assert config.groups[0].capacity == int(0.8 * memory.slots) // 16


# -- states set aside for all (our own executor, TensorRT-LLM) ---------------------------------------------------------


@pytest.mark.parametrize("server", ["foredraft", "trtllm-1.x"])
def test_a_default_limit_is_lowered_where_states_for_so_many_do_not_fit(server):
    found = plan_of("hybrid", server, hardware={"reserved_fraction": 0.75} if server == "foredraft" else {})
    memory, state = found.memory, found.target.recurrent_state_bytes
    most = found.spec.config.max_running
    assert memory.recurrent_states_bytes == most * state == pytest.approx(memory.kv_pool_bytes, rel=0.15)
    with pytest.raises(ForedraftError, match="recurrent_states"):
        plan_of("hybrid", server, engine={"max_running": 4096})


# -- the engine that admits by them ------------------------------------------------------------------------------------

RESERVED = {
    ("foredraft", "windowed"): 0.848, ("foredraft", "hybrid"): 0.828,
    ("vllm-0.18", "windowed"): 0.857, ("vllm-0.18", "hybrid"): 0.8,
}  # fmt: skip
TIGHT = {
    "concurrency": 20, "num_requests": 50, "prompt": {"kind": "uniform", "low": 50, "high": 2500},
    "output": {"kind": "uniform", "low": 1, "high": 300},
}  # fmt: skip


@pytest.mark.fast("windowed-vllm-0.18")
@pytest.mark.parametrize("server", ["foredraft", "vllm-0.18"])
@pytest.mark.parametrize("kind", ["windowed", "hybrid"])
def test_multi_steps_decide_as_single_rounds_do_where_memory_is_short(tmp_path, kind, server):
    found = []
    for rounds in (1, 32):
        scenario = scenario_of(
            kind, server,
            model={"context_len": 4096},
            hardware=HARDWARE | {"server": server, "reserved_fraction": RESERVED[server, kind]},
            engine={"max_running": 16, "chunk_size": 1024, "multi_step_rounds": rounds},
            workload=TIGHT | ({"prefixes": {"groups": 4, "length": 200}} if kind == "hybrid" else {}),
        )  # fmt: skip
        path = tmp_path / f"{rounds}.jsonl"
        found.append(run(scenario, path))
        report = replay(path, lambda header, replica, events, of=scenario: assemble(of).make_engine(events, replica))
        assert report.identical
    assert not unequal_keys(*found) and found[0]["completed"] == 50
    single, multi = (one["committed_steps"] for one in found)
    assert found[0]["kv_occupancy_max"] > 0.65 and multi < single


def test_a_request_that_the_pool_cannot_hold_is_refused_and_a_shorter_one_runs_alone():
    scenario = scenario_of("windowed", "vllm-0.18", hardware=HARDWARE | {"reserved_fraction": 0.866}, workload={
        "concurrency": 2, "num_requests": 6, "prompt": {"kind": "empirical", "values": [60_000, 2000]}, "output": fixed(30),
    })  # fmt: skip
    summary = run(scenario)
    assert summary["completed"] + summary["refused"] == 6 and summary["completed"] and summary["refused"]
