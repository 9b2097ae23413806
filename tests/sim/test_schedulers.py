"""Our engine with the rules of a release of vLLM against what that release decided (`benchmarks/schedulers`)."""

import sys
from pathlib import Path

import pytest
from foredraft.core.scheduler.rules import OurRules, VLLMRules
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict

ROOT = Path(__file__).resolve().parents[2]
PROFILE = "vllm-0.18"


@pytest.fixture(scope="module")
def schedulers():
    """The package of the comparison."""
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.schedulers import comparison, our_scheduler, records, workloads
    finally:
        sys.path.remove(str(ROOT))
    return {module.__name__.rpartition(".")[2]: module for module in (comparison, our_scheduler, records, workloads)}


def share_of(schedulers, seeds, **changes) -> float:
    """Return the share of recorded steps that our engine repeats on these workloads."""
    records, workloads = schedulers["records"], schedulers["workloads"]
    run = schedulers["our_scheduler"].OurRun
    known = [record for record in records.stored() if record.seed in seeds]
    assert [record.seed for record in known] == list(seeds)
    for record in known:
        assert record.digest == records.digest_of(workloads.draw_workload(record.seed)), "a record of other workloads"
    return records.share_of_steps(known, lambda workload: run(PROFILE, workload, **changes))


def test_our_engine_decides_as_vllm_did(schedulers):
    assert share_of(schedulers, range(5)) == 1.0


@pytest.mark.slow
def test_our_engine_decides_as_vllm_did_on_all_recorded_workloads(schedulers):
    assert share_of(schedulers, schedulers["records"].RECORDED) == 1.0


OF_VLLM = (
    *("pads_lone_tokens", "caches_at_launch", "delivers_late_tokens", "retracts_short_prompts", "frees_at_departure"),
    *("has_launched_slots_alone", "rests_at_sure_end"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_VLLM)
def test_each_rule_of_vllm_is_seen_in_the_records(schedulers, name):
    assert getattr(VLLMRules, name) != getattr(OurRules, name)
    assert share_of(schedulers, schedulers["records"].RECORDED, **{name: getattr(OurRules, name)}) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("setting", [{"reserve_full_isl": False}, {"eviction_policy": "lru"}])
def test_each_setting_of_vllm_is_seen_in_the_records(schedulers, setting):
    assert share_of(schedulers, schedulers["records"].RECORDED, **setting) < 1.0


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
def test_multi_steps_decide_as_single_rounds_with_the_rules_of_vllm(algorithm):
    """Requests give way, their tokens come late, and all are delivered."""
    scenario = {
        "hardware": {"server": PROFILE, "kernels": "roofline"},
        "engine": {"kv_slots": 4000, "page_size": 16, "max_running": 32},
        "speculation": {"algorithm": algorithm, "policy": "fixed", "steps": 3 * (algorithm != "NONE")},
        "workload": {
            "num_requests": 60,
            "rate": 40.0,
            "prompt": {"mean": 300.0, "high": 1000},
            "output": {"mean": 80.0},
        },
    }
    results = []
    for rounds in (32, 1):
        metrics = RunMetrics(None)
        made = scenario_from_dict(scenario | {"engine": {**scenario["engine"], "multi_step_rounds": rounds}}, "test")
        report = Simulation(made, sinks=lambda replica, metrics=metrics: [metrics.sink(replica)]).run()
        results.append(metrics.summary(report.duration_ns))
    for name in ("duration", "retractions", "mean_ttft_ms", "mean_tpot_ms", "delivered_tokens"):
        assert results[0][name] == results[1][name], name
    assert results[0]["retractions"] > 3 and results[0]["completed"] == 60
    assert results[0]["delivered_tokens"] == results[0]["total_output_tokens"]
