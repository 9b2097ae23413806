"""Prefill and decode engines with hardware of their own: times, memory, transfers, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.core.scheduler.config import EngineRole
from foredraft.observe.log import EventLog
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.observe.replay import replay
from foredraft.sim.actors.clock import Environment
from foredraft.sim.assembly import assemble
from foredraft.sim.assembly.confidence import factors, rests_on
from foredraft.sim.assembly.explaining import derived_rows, timing_line
from foredraft.sim.assembly.pools import Pool, gpus_by_name, pools_of, pools_on
from foredraft.sim.cost.calibration import Calibration, FittedParameters, MeasuredClients
from foredraft.sim.cost.memory import InsufficientMemory
from foredraft.sim.disaggregation.network import Network
from foredraft.sim.effects.notices import notices_of
from foredraft.sim.faults.plan import swarm_plan
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import scenario_from_dict
from foredraft.sim.summary.summary import summarize_run

SMALL: dict[str, Any] = {
    "model": {"context_len": 4096},
    "engine": {"page_size": 16},
    "workload": {"num_requests": 40, "rate": 20.0, "prompt": {"mean": 500.0, "high": 3000}, "output": {"mean": 60.0}},
    "disaggregation": {"prefill": 1, "decode": 1},
}
ONE = {"num_requests": 1, "prompt": {"value": 2048}, "output": {"value": 20}}


def scenario_of(hardware: dict[str, Any], **tables: Any) -> Scenario:
    return scenario_from_dict({**SMALL, "hardware": hardware, **tables}, "test")


class Durations:
    """A `SpanSink` that keeps the durations of device steps by engine."""

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = {}

    def span(self, replica: int, track: str, name: str, start_ns: int, duration_ns: int, args: dict[str, int]) -> None:
        if track != "scheduler":
            self.of.setdefault(replica, []).append(duration_ns)


def run(scenario: Scenario, path=None, spans=None, faults=None):
    """Return the simulation, and the summary of its run; its log is at `path`."""
    metrics, log = (
        RunMetrics(None),
        None if path is None else EventLog(path, {"scenario": scenario.model_dump(mode="json")}),
    )
    sinks = lambda replica: [metrics.sink(replica)] + ([] if log is None else [log.sink(replica)])  # noqa: E731
    simulation = Simulation(scenario, sinks=sinks, spans=spans, faults=faults)
    report = simulation.run()
    if log is not None:
        log.close(report.complete)
    return simulation, summarize_run(scenario, report, metrics)


# -- the same as one hardware ------------------------------------------------------------------------------------------


@pytest.mark.fast("one, by another name", ci="*")
@pytest.mark.parametrize(
    "pools",
    [
        {"prefill": {"gpu": "H200"}, "decode": {"gpu": "H200", "tensor_parallel": 1}},
        {"gpu": "H200", "prefill": {"gpu": "h200"}},
        {"gpu": "H200", "prefill": {}, "decode": {"bandwidth_gbps": 400.0}},
    ],
    ids=["both", "one, by another name", "nothing of their own"],
)
def test_equal_pools_are_the_common_hardware(tmp_path, pools):
    logs, summaries = [], []
    for place, hardware in enumerate(({"gpu": "H200"}, pools)):
        path = tmp_path / f"{place}.jsonl"
        simulation, summary = run(scenario_of(hardware), path)
        assert simulation.assembly.prefill is None
        logs.append(path.read_bytes().partition(b"\n")[2])
        summaries.append(summary)
    assert logs[0] == logs[1] and summaries[0] == summaries[1]


def test_the_header_of_a_log_without_pools_has_no_new_keys():
    assert not {"prefill", "decode"} & scenario_of({}).model_dump(mode="json")["hardware"].keys()
    own = {"gpu": "H200", "tensor_parallel": 2}
    tables = scenario_of({"prefill": own}).model_dump(mode="json")
    assert own.items() <= tables["hardware"]["prefill"].items() and "decode" not in tables["hardware"]
    assert scenario_from_dict(tables, "test") == scenario_of({"prefill": own})


# -- times, memory and load --------------------------------------------------------------------------------------------


def test_a_faster_gpu_for_prompts_leaves_decode_passes_as_they_are():
    """One request alone, whose decode batches do not depend on when its prompt is done."""
    found = {}
    for gpu in ("H100", "B200"):
        spans = Durations()
        _, summary = run(scenario_of({"prefill": {"gpu": gpu}}, workload=ONE), spans=spans)
        found[gpu] = spans.of, summary
    (slow, slow_summary), (fast, fast_summary) = found.values()
    assert fast_summary["mean_ttft_ms"] < 0.6 * slow_summary["mean_ttft_ms"]
    assert fast[0] != slow[0] and fast[1] == slow[1] and sum(fast[1]) > 1e7


def test_each_pool_has_the_memory_and_the_limits_of_its_gpu():
    hardware = {"server": "sglang-0.5", "prefill": {"gpu": "L40S"}, "decode": {"gpu": "B200", "tensor_parallel": 2}}
    simulation, summary = run(scenario_of(hardware))
    alone = [assemble(scenario_of({"server": "sglang-0.5", **hardware[pool]})) for pool in ("prefill", "decode")]
    engines = [actor.engine.config for actor in simulation.replicas]
    for engine, other in zip(engines, alone, strict=True):
        assert engine.num_pages * 16 == other.memory.slots
        assert engine.chunk_size == other.spec.config.chunk_size
    assert summary["kv_capacity_slots"] == sum(other.memory.slots for other in alone)
    assert engines[0].chunk_size < engines[1].chunk_size and alone[0].memory.slots * 5 < alone[1].memory.slots


def test_the_saturation_is_that_of_the_fuller_pool():
    """Long prompts: what decodes them does not matter."""
    load = {"num_requests": 40, "rate": 5.0, "prompt": {"value": 2000}, "output": {"value": 4}}
    kinds = {"H100": {}, "H100, L40S": {"decode": {"gpu": "L40S"}}, "L40S": {"gpu": "L40S"}}
    full = {kind: run(scenario_of(hardware, workload=load))[1]["saturation"] for kind, hardware in kinds.items()}
    assert full["H100, L40S"] == pytest.approx(full["H100"]) and full["L40S"] > 2 * full["H100"]


def test_a_run_is_replayed_and_keeps_its_promises_under_faults(tmp_path):
    hardware = {"prefill": {"gpu": "B200", "tensor_parallel": 2}, "decode": {"gpu": "L40S"}}
    scenario = scenario_of(hardware, speculation={"policy": "goodput"})
    _, summary = run(scenario, tmp_path / "log.jsonl")
    assert summary["transfers_completed"] == summary["completed"] == 40
    found = replay(
        tmp_path / "log.jsonl",
        lambda header, replica, events: assemble(scenario_from_dict(header["scenario"], "log")).make_engine(
            events, replica
        ),
    )
    assert found.identical and found.num_replicas == 2, found.difference
    _, summary = run(scenario, faults=swarm_plan(3, transfers=True))
    assert summary["promises_broken"] == [] and summary["faults_injected"]


def test_errors_of_the_first_token_are_those_of_the_prefill_gpu():
    hardware = {"server": "sglang-0.5", "prefill": {"gpu": "L40S"}}
    summary = {"mean_ttft_ms": 100.0, "mean_tpot_ms": 10.0, "mean_output_tokens": 60.0, "mean_running": 8.0}
    unlike = assemble(scenario_of(hardware))
    like = {gpu: assemble(scenario_of({"server": "sglang-0.5", "gpu": gpu})) for gpu in ("L40S", "H100")}
    found, alone = factors(unlike, summary), {gpu: factors(one, summary) for gpu, one in like.items()}
    assert (found["ttft"], found["tpot"]) == (alone["L40S"]["ttft"], alone["H100"]["tpot"])
    assert found["ttft"] != alone["H100"]["ttft"]
    if like["L40S"].evidence.about != like["H100"].evidence.about:
        assert rests_on(unlike) == "; ".join(
            f"{role}: {rests_on(one)}" for role, one in zip(("prefill", "decode"), like.values(), strict=True)
        )


def test_a_fitted_profile_must_be_of_the_gpu_of_both_pools():
    fitted = FittedParameters("foredraft", "roofline", {}, MeasuredClients(1.0, 1.0, 1.0), 7, 0.0, 0.0)
    profile = Calibration("made", "a test", "H100", "llama-3.1-8b", (1,), fitted)
    found = assemble(scenario_of({"prefill": {"tensor_parallel": 2}}), profile)
    told = [notice for notice in notices_of(found, {}) if "hardware.profile" in notice]
    assert len(told) == 1 and told[0].endswith("may be worse for 2"), "which is that of prefill engines"
    with pytest.raises(ConfigError, match="measured for H100, but the run uses H200"):
        assemble(scenario_of({"prefill": {"gpu": "H200"}}), profile)


# -- transfers ---------------------------------------------------------------------------------------------------------


def test_pages_move_at_the_slower_port():
    """Two devices send to one: the receiver's port is busy for the whole transfer, the sender's for half of it."""
    apart = {"layerwise": False, "bandwidth_gbps": 8.0, "prefill": 1, "decode": 1}
    hardware = {"prefill": {"tensor_parallel": 2}}
    simulation, _ = run(scenario_of(hardware, workload=ONE, disaggregation=apart))
    network = simulation.cluster.network
    kv_bytes = 2048 * (131_072 + 4096)  # of 2048 tokens in both pools
    assert network.in_busy_ns == [0, int(kv_bytes / 1e9 * 1e9)] and network.out_busy_ns == [
        int(kv_bytes / 2e9 * 1e9),
        0,
    ]


def test_a_fast_port_serves_two_slow_ones_at_once():
    env, ends = Environment(), []
    network = Network(env, 0, [2e9, 1e9, 1e9])
    for target in (1, 2, 1):
        network.send(0, target, 1000, lambda: ends.append(env.now))
    env.run()
    # The second begins when the sender's port has its first 1000 bytes behind it, the third when the receiver is free.
    assert ends == [1000, 1500, 2000] and network.last_busy_ns == 2000


@pytest.mark.parametrize(
    ("prefill", "decode", "copies"), [(1, 1, 1), (8, 4, 1), (4, 8, 2), (8, 8, 1)], ids=lambda value: str(value)
)
def test_every_device_is_sent_what_it_holds(prefill, decode, copies):
    """Of four KV heads eight devices hold each twice. Engines that are alike send it once."""
    hardware = {"prefill": {"tensor_parallel": prefill}, "decode": {"tensor_parallel": decode}}
    own = assemble(
        scenario_of(hardware, model={"target": "qwen3-30b-a3b", "context_len": 4096}, speculation={"algorithm": "NONE"})
    )
    assert own.target.kv_heads == 4
    assert own.sent_kv_bytes == copies * own.target.kv_bytes_per_token


def test_explain_has_both_pools_and_the_link():
    hardware = {"prefill": {"gpu": "H200", "tensor_parallel": 2}, "decode": {"bandwidth_gbps": 100.0}}
    found = assemble(scenario_of(hardware))
    rows = {name: (value, unit, source) for name, value, unit, source in derived_rows(found)}
    assert rows["prefill: KV slots"][0] == found.prefill.memory.slots
    assert rows["decode: KV slots"][0] == found.memory.slots != found.prefill.memory.slots
    assert rows["prefill: H200 memory bandwidth"][0] == 4800 and rows["decode: H100 memory bandwidth"][0] == 3350
    assert rows["KV transfer"][:2] == (12.5, "GB/s") and "prefill engine (100 GB/s)" in rows["KV transfer"][2]
    assert "KV slots" not in rows and "llama-3.1-8b weights" in rows
    assert "; prefill on 2 × H200: batches" in timing_line(found) and "; decode on H100: batches" in timing_line(found)


# -- counts and refusals -----------------------------------------------------------------------------------------------


def test_devices_are_counted_by_pool():
    hardware = {"prefill": {"gpu": "h200", "tensor_parallel": 4}, "decode": {"attention_data_parallel": 2}}
    scenario = scenario_of(hardware, disaggregation={"prefill": 1, "decode": 3})
    pools = pools_on(scenario.hardware, pools_of(scenario))
    assert pools == (Pool(EngineRole.PREFILL, 1, "H200", 4), Pool(EngineRole.DECODE, 3, "H100", 2))
    assert gpus_by_name(pools) == {"H200": 4, "H100": 6}
    together = scenario_of({**hardware, "replicas": 2}, disaggregation={})
    assert gpus_by_name(pools_on(together.hardware, pools_of(together))) == {"H100": 2}


@pytest.mark.parametrize(
    ("hardware", "tables", "error", "words"),
    [
        ({"prefill": {"gpu": "H10"}}, {}, ConfigError, "hardware.prefill.gpu: unknown GPU 'H10'"),
        ({"decode": {"gpus": 2}}, {}, ConfigError, "hardware.decode.gpus: unknown key (did you mean 'gpu'?)"),
        ({"decode": {"tensor_parallel": 0}}, {}, ConfigError, "hardware.decode.tensor_parallel"),
        ({"decode": {"bandwidth_gbps": 0.0}}, {}, ConfigError, "hardware.decode.bandwidth_gbps"),
        ({"decode": "H100"}, {}, ConfigError, "hardware.decode: 'H100' is no table; give its keys, such as hardware.decode.gpu"),
        ({"decode": {"tensor_parallel": 3}}, {}, ForedraftError, "hardware.decode: "),
        ({"prefill": {"expert_parallel": 2}}, {}, ForedraftError, "hardware.prefill: expert parallelism 2"),
        ({"prefill": {"gpu": "L4"}}, {"model": {"target": "qwen3-14b"}}, InsufficientMemory, "hardware.prefill: qwen3-14b"),
        ({"prefill": {"gpu": "H200"}}, {"disaggregation": {"prefill": 1, "decode": 1, "rebalance_s": 1.0}}, ConfigError,
         "disaggregation.rebalance_s: lets engines change their role, and the pools have unlike hardware"),
        ({}, {"disaggregation": {"prefill": {"gpu": "H200"}}}, ConfigError,
         "disaggregation.prefill: has no keys of its own (did you mean 'hardware.prefill.gpu'?)"),
    ],
)  # fmt: skip
def test_pools_that_cannot_be_are_one_error_with_the_key(hardware, tables, error, words):
    with pytest.raises(error) as caught:
        assemble(scenario_of(hardware, **tables))
    assert words in str(caught.value)
