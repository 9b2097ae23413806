"""Host memory behind the prefix cache of a simulated engine: hits, their time, the log, and contradictions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from foredraft import simulate
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape.catalogue import lookup_model
from foredraft.observe.log import EventLog
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.observe.replay import replay
from foredraft.properties.audit.log import audit_log
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.hardware import Parallelism, lookup_gpu
from foredraft.sim.cost.host_link import LATENCY_NS, HostLink
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_with

CROWDED: dict[str, Any] = {
    "hardware": {"kernels": "roofline"},
    "speculation": {"algorithm": "NONE"},
    "engine": {"kv_slots": 8192, "page_size": 16},
    "workload": {
        "num_requests": 200,
        "rate": 4.0,
        "prefixes": {"groups": 40, "length": 1024, "zipf": 0.0},
        "prompt": {"kind": "fixed", "value": 1200},
        "output": {"kind": "fixed", "value": 16},
    },
}  # 40 prefixes are five times the pool
H100, LLAMA = lookup_gpu("H100"), lookup_model("llama-3.1-8b")


def summary_of(**settings: Any) -> dict[str, Any]:
    return simulate(CROWDED, overrides={key.replace("__", "."): value for key, value in settings.items()}).summary


def test_a_prefix_that_the_device_evicted_comes_from_host_memory():
    without, ample = summary_of(), summary_of(engine__host_cache_gb=20)
    assert "host_cache_hit_rate" not in without
    assert ample["host_cache_hit_rate"] > 0.4 > without["prefix_cache_hit_rate"]
    # Everything that was computed once is found again.
    assert ample["prefix_cache_hit_rate"] == pytest.approx((200 - 40) / 200 * 1024 / 1200, abs=0.02)
    assert ample["median_ttft_ms"] < 0.7 * without["median_ttft_ms"]
    assert ample["completed"] == without["completed"] == 200


@pytest.mark.ci
def test_the_room_in_host_memory_counts():
    rates = [summary_of(engine__host_cache_ratio=ratio)["prefix_cache_hit_rate"] for ratio in (0.5, 2.0, 8.0)]
    assert rates == sorted(rates) and rates[0] < rates[1] < rates[2]


@pytest.mark.ci
def test_a_slow_link_costs_time():
    fast, slow = (summary_of(engine__host_cache_gb=20, hardware__host_link_gbps=gbps) for gbps in (400, 40))
    assert fast["host_cache_hit_rate"] > 0.4 and slow["host_cache_hit_rate"] > 0.4
    # 1,024 tokens of 131,072 bytes at five gigabytes per second, and at fifty the pass takes longer.
    assert slow["median_ttft_ms"] > 1024 * 131_072 / 5e6 > fast["median_ttft_ms"]


def test_the_copy_runs_beside_the_pass_layer_by_layer():
    link = HostLink.of(H100, Parallelism.of(1), LLAMA, None, given_gbps=400)
    load_ns = LATENCY_NS + 1000 * LLAMA.kv_bytes_per_token / 50
    assert link.step_ns(10**9, [1000]) == 10**9  # hidden behind the pass
    assert link.step_ns(32_000, [1000]) == int(load_ns + 1000)  # the last of 32 layers comes behind the copy
    assert link.step_ns(32_000, [600, 400]) == link.step_ns(32_000, [1000])


def test_each_device_copies_its_own_heads():
    alone, four = (HostLink.of(H100, Parallelism.of(n), LLAMA, None, None) for n in (1, 4))
    assert alone.token_bytes == 4 * four.token_bytes
    assert alone.num_tokens(1e9, 1) == four.num_tokens(1e9, 4) == int(1e9 / LLAMA.kv_bytes_per_token)


def test_groups_of_attention_copy_side_by_side():
    groups = HostLink.of(H100, Parallelism(1, 4, 4, 8), LLAMA, None, 400)
    alone = HostLink.of(H100, Parallelism.of(1), LLAMA, None, 400)
    assert groups.step_ns(0, [100] * 8) == alone.step_ns(0, [200])
    assert groups.step_ns(0, [800, 10]) == alone.step_ns(0, [800])


@pytest.mark.fast("vllm-0.18-settings2", ci="*")
@pytest.mark.parametrize("settings", [{}, {"engine.mode": "synchronous"}, {"speculation.algorithm": "EAGLE3"}])
@pytest.mark.parametrize("server", ["foredraft", "sglang-0.5", "vllm-0.18"])
def test_the_log_says_what_was_loaded_and_holds_the_rules(tmp_path, server, settings):
    path = tmp_path / "events.jsonl"
    values = {"engine.host_cache_ratio": 4.0, "hardware.server": server} | settings
    scenario = scenario_with(CROWDED, values)
    log, metrics = EventLog(path, {"scenario": scenario.model_dump(mode="json")}), RunMetrics(None)
    simulation = Simulation(scenario, sinks=lambda replica: [metrics.sink(replica), log.sink(replica)])
    report = simulation.run()
    log.close(report.complete)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    joins = [join for line in lines if line.get("t") == "plan" for join in line.get("joins", ())]
    loaded = [join[7] for join in joins if len(join) > 7]
    assert loaded and all(join[7] <= join[3] for join in joins if len(join) > 7)
    total = sum(1200 + join[4] for join in joins)
    assert metrics.summary(report.duration_ns)["host_cache_hit_rate"] == pytest.approx(sum(loaded) / total)
    assert not audit_log(path).flaws
    replay(path, lambda header, replica, events: assemble(scenario).make_engine(events, replica))
    for actor in simulation.replicas:
        actor.engine.check()


def test_multi_steps_change_nothing():
    one, many = (
        summary_of(engine__host_cache_ratio=4.0, engine__multi_step_rounds=rounds, workload__rate=40.0)
        for rounds in (1, 32)
    )
    assert one == many


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"engine.host_cache_ratio": 2.0, "engine.host_cache_gb": 1.0}, "engine.host_cache_gb", "expected one of them"),
        ({"engine.host_cache_gb": 1.0, "engine.prefix_cache": False}, "engine.host_cache_gb", "prefix_cache is false"),
        (
            {"engine.host_cache_ratio": 2.0, "disaggregation.prefill": 1, "disaggregation.decode": 1},
            "engine.host_cache_ratio",
            "not modelled with disaggregation",
        ),
        ({"engine.host_cache_gb": -1.0}, "engine.host_cache_gb", "greater than 0"),
    ],
)
def test_contradictions_are_named(settings, key, message):
    with pytest.raises(ConfigError, match=message) as raised:
        simulate(CROWDED, overrides=settings)
    assert key in str(raised.value)
