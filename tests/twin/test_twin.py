"""The comparison's arithmetic, and the twin from its arms to its table."""

import json
from dataclasses import replace

import numpy as np
import pytest
from foredraft.core.acceptance.process import FixedMeanAcceptance
from foredraft.core.contract.request import Request
from foredraft.core.errors import ConfigError
from foredraft.core.prompt import Prompt
from foredraft.sim.cost.steps_file import read_executor_steps
from foredraft.sim.scenario_file import scenario_with
from foredraft.twin.comparison import Compared, compare, simulate
from foredraft.twin.measuring import MeasuringPlan, Pace, measure_steps
from foredraft.twin.run import TwinPlan, _draft_of, default_scenario, rounds_of, run_twin
from foredraft.twin.served import Asked, CpuClock, make_clock, metrics_of, serve
from made_steps import made_steps


def asked(count=6, output=5):
    return [Asked(Request(f"r{i}", Prompt.of_tokens(np.arange(8) + i), output), i * 2_000_000) for i in range(count)]


def simulated(arm, steps, speed=1.0):
    cost = steps.cost(arm.spec, "profile")
    return metrics_of(simulate(arm.simulated_spec, cost, steps.host, FixedMeanAcceptance(1.0), asked()))


def test_errors_and_noise(make_arms):
    (arm,) = make_arms(plain={"max_running": 4, "context_len": 64})
    one = simulated(arm, made_steps("NONE"))
    found = compare("plain", "light", 6, [one], [one, one])
    assert {compared.error for compared in found.metrics.values()} == {0.0}
    assert {compared.noise for compared in found.metrics.values()} == {0.0}
    assert found.steps == {0: (1.0, 1.0)} and found.batch[0] == found.batch[1]
    assert len(found.batch[0]) == 10
    # Each tenth is a mean over time, so their mean is that of the whole run.
    assert np.mean(found.batch[0]) == pytest.approx(one.summary()["mean_running"], rel=1e-6)
    assert Compared(11.0, 10.0, 0.0, 0.0).error == pytest.approx(0.1)
    assert Compared(1.0, 0.0, 0.0, 0.0).error is None
    assert json.loads(json.dumps(found.to_json()))["metrics"]["mean_tpot_ms"]["error"] == 0.0


def test_noise_is_half_the_range(make_arms):
    (arm,) = make_arms(plain={"max_running": 4, "context_len": 64})
    steps = made_steps("NONE")
    slow = replace(steps, host=replace(steps.host, plan_base_ns=2_000_000))
    runs = [simulated(arm, steps), simulated(arm, slow)]
    tpots = [metrics.summary()["mean_tpot_ms"] for metrics in runs]
    found = compare("plain", "light", 6, runs[:1], runs).metrics["mean_tpot_ms"]
    assert found.measured == pytest.approx(np.mean(tpots))
    assert found.noise == pytest.approx((tpots[1] - tpots[0]) / 2 / np.mean(tpots))
    assert found.error == pytest.approx(tpots[0] / np.mean(tpots) - 1)


def test_a_served_run_counts_from_the_arrival_and_to_the_commit(make_arms):
    (arm,) = make_arms(plain={"max_running": 2, "context_len": 64})
    served = serve(arm, asked(), make_clock("cpu", "cpu"))
    metrics = served.metrics().summary()
    assert metrics["completed"] == 6 and metrics["total_output_tokens"] == 30
    last = served.laps[-1].ended_ns
    assert metrics["duration"] == pytest.approx((last - 0) / 1e9)
    for lap in served.laps:
        assert min(lap.plan_ns, lap.launch_ns, lap.run_ns, lap.commit_ns) > 0
    closed = serve(arm, [Asked(one.request, None) for one in asked()], CpuClock(), 2).metrics().summary()
    assert closed["max_running"] <= 2 and closed["completed"] == 6


def test_rounds_are_read_with_their_positions(make_arms):
    (arm,) = make_arms(chain={"draft": "EAGLE3", "steps": 2, "max_running": 2, "context_len": 64})
    served = serve(arm, asked(4, 7), CpuClock())
    requests, positions, steps, correct = rounds_of(served.events)
    for request in range(4):
        own = requests == request
        assert positions[own][0] == 1  # the prompt gave the first token
        assert (np.diff(positions[own]) == correct[own][:-1] + 1).all()
    assert set(steps.tolist()) == {2}


@pytest.mark.slow
def test_from_arms_to_comparisons(make_arms):
    arms = make_arms(
        plain={"max_running": 2, "context_len": 128},
        chain={"draft": "EAGLE3", "steps": 2, "max_running": 2, "context_len": 128},
    )
    steps = measure_steps(arms, MeasuringPlan(repeats=2, clock="cpu")).steps
    plan = TwinPlan(
        scenario_with(
            default_scenario().model_dump(),
            {"workload.prompt": {"kind": "fixed", "value": 12}, "workload.output": {"kind": "fixed", "value": 8}},
        ),
        ("light",), seconds=0.2, repeats=2, draws=2, calibration_requests_per_s=80.0, calibration_output=24, clock="cpu",
    )  # fmt: skip
    found = list(run_twin(arms, steps, plan))
    assert [(one.arm, one.load, one.repeats) for one in found] == [("plain", "light", 2), ("chain", "light", 2)]
    for one in found:
        assert 1 / 4 < one.pace < 4  # the profile is of this machine, a minute ago
        for name in ("output_throughput", "mean_tpot_ms"):
            compared = one.metrics[name]
            # The machine may be busy with anything; a factor of four is no wrong unit and no missing part.
            assert 1 / 4 < compared.predicted / compared.measured < 4, name
    assert found[1].steps == {2: (1.0, 1.0)}


def test_a_profile_of_a_faster_machine_is_seen_in_its_pace(make_arms):
    (arm,) = make_arms(chain={"draft": "EAGLE3", "steps": 2, "max_running": 2, "context_len": 64})
    steps = measure_steps([arm], MeasuringPlan(2, rows=(1, 2), contexts=(4, 30), clock="cpu")).steps.to_json()
    chain = steps["algorithms"]["EAGLE3"]["rounds"]["1"]
    for part in (*chain.values(), steps["algorithms"]["EAGLE3"]["rest"]):
        part["ns"] = (np.array(part["ns"]) / 10).tolist()
    faster = read_executor_steps(steps, "faster").cost(arm.spec, "faster")
    assert 10 / 4 < Pace(arm, faster, "cpu").now() < 40


def test_a_workload_that_does_not_fit_is_refused(make_arms):
    arms = make_arms(plain={"max_running": 2, "context_len": 64})
    steps = made_steps("NONE")
    for settings, key in (
        ({"workload.prompt": {"kind": "fixed", "value": 80}}, "workload"),
        ({"hardware.replicas": 2}, "hardware.replicas"),
        ({"clients.cancel_share": 0.5}, "clients"),
    ):
        scenario = scenario_with(default_scenario().model_dump(), settings)
        with pytest.raises(ConfigError) as refused:
            list(run_twin(arms, steps, TwinPlan(scenario, None, repeats=1)))
        assert refused.value.problems[0].key == key


def test_a_clock_of_processor_time_needs_one_thread():
    with pytest.raises(ConfigError, match="another device does the work"):
        make_clock("cpu", "cuda")
    with pytest.raises(ConfigError, match="neither wall nor cpu"):
        make_clock("sundial", "cpu")


def test_acceptance_is_shared_by_equal_trees_and_by_chains_of_any_length(make_arms):
    head = {"draft": "EAGLE3", "algorithm": "EAGLE3"}
    tree = {**head, "steps": 3, "topk": 2, "num_draft_tokens": 6}
    arms = make_arms(tree=dict(tree), same=dict(tree), short={**head, "steps": 1}, long={**head, "steps": 3})
    of = [_draft_of(arm) for arm in arms]
    assert of[0] == of[1] and of[2] == of[3] and of[0] != of[2]
