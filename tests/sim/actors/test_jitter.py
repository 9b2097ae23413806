"""Fluctuating times: factors are a function of the step's number, multi-steps see those of their rounds, means
stay and tails grow."""

import numpy as np
import pytest
from foredraft.core.draws import Purpose
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.sim.actors.device import Jitter
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict

NAMES = [
    "duration",
    "mean_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "p99_e2el_ms",
    "accept_length",
]


def summary_of(hardware: dict, engine: dict, seed: int = 3, **tables: dict) -> dict:
    work = {"num_requests": 40, "rate": 12.0, "prompt": {"value": 300}, "output": {"value": 120}}
    scenario = {"seed": seed, "hardware": hardware, "engine": engine, "workload": work, **tables}
    metrics = RunMetrics(None)
    simulation = Simulation(scenario_from_dict(scenario, "test"), sinks=lambda replica: [metrics.sink(replica)])
    report = simulation.run()
    summary = metrics.summary(report.duration_ns)
    return {name: summary[name] for name in NAMES}


@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0])
def test_factors_have_mean_one_and_the_spread(spread):
    factors = Jitter(spread, 1, Purpose.DEVICE_TIME, 0).factors(0, 200_000)
    assert factors.min() > 0
    assert factors.mean() == pytest.approx(1, abs=0.005 * (1 + 4 * spread))
    assert np.log(factors).std() == pytest.approx(np.log1p(spread**2) ** 0.5, rel=0.01)


def test_a_factor_depends_on_seed_replica_purpose_and_number_alone():
    def of(seed=1, purpose=Purpose.HOST_TIME, replica=0, lane=0):
        return Jitter(0.2, seed, purpose, replica, lane)

    whole, again = of().factors(0, 5000).copy(), of()
    for first, count in ((4000, 30), (0, 1), (1020, 10), (1023, 2), (4990, 10)):  # in any order, across windows
        assert np.array_equal(again.factors(first, count), whole[first : first + count])
    others = [of(seed=2), of(purpose=Purpose.DEVICE_TIME), of(replica=1), of(lane=1)]
    for other in others:
        assert abs(np.corrcoef(np.log(other.factors(0, 5000)), np.log(whole))[0, 1]) < 0.06
    assert of().times_ns(7, np.array([1000, 2000])).tolist() == [of().time_ns(7, 1000), of().time_ns(8, 2000)]


@pytest.mark.fast("foredraft-overlap")
@pytest.mark.parametrize("mode", ["overlap", "synchronous"])
@pytest.mark.parametrize("host", ["foredraft", "vllm-0.10"])
def test_a_multi_step_fluctuates_as_its_rounds_do(mode, host):
    """Also where the host's time keeps the device waiting."""
    for algorithm, spreads in (("EAGLE3", (0.2, 0.5)), ("EAGLE3", (0.0, 1.0)), ("NGRAM", (0.2, 0.5))):
        hardware = {"device_jitter": spreads[0], "host_jitter": spreads[1], "host": host}
        drafts = {"speculation": {"algorithm": algorithm}}
        multi, single = (summary_of(hardware, {"mode": mode, "multi_step_rounds": n}, **drafts) for n in (32, 1))
        assert multi == single
        assert multi != summary_of({"host": host}, {"mode": mode}, **drafts)


def test_means_stay_and_tails_grow():
    plain = {"speculation": {"algorithm": "NONE"}}
    steady, jittery = (
        summary_of({"device_jitter": spread}, {"mode": "synchronous"}, **plain) for spread in (0.0, 0.15)
    )
    assert jittery["mean_tpot_ms"] == pytest.approx(steady["mean_tpot_ms"], rel=0.02)
    assert jittery["p99_itl_ms"] > 1.1 * steady["p99_itl_ms"]
    assert jittery != summary_of({"device_jitter": 0.15}, {"mode": "synchronous"}, seed=4, **plain)
