"""Drawing ahead for requests that have not arrived yet is cheaper and changes nothing."""

from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.sim.running.clients import RunClients
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict

SCENARIO = {
    "workload": {"num_requests": 250, "rate": 20.0, "output": {"kind": "uniform", "low": 1, "high": 90}},
    "speculation": {"policy": "fixed", "steps": 3},
    "model": {"context_len": 16384},
}


def run(monkeypatch, foreseen: int):
    """Report and metrics of a run, and how often its acceptance process was asked for windows."""
    calls = []
    draw = GaussianAcceptance.run_windows
    with monkeypatch.context() as patch:
        patch.setattr(GaussianAcceptance, "run_windows", lambda *args: calls.append(1) or draw(*args))
        patch.setattr(RunClients, "REQUESTS_FORESEEN", foreseen)
        metrics = RunMetrics(None)
        simulation = Simulation(scenario_from_dict(SCENARIO, "test"), sinks=lambda replica: [metrics.sink(replica)])
        report = simulation.run()
    return report, metrics.summary(report.duration_ns), len(calls)


def test_foreseen_requests(monkeypatch):
    *plain, plain_calls = run(monkeypatch, 1)
    *foreseen, calls = run(monkeypatch, 64)
    assert foreseen == plain
    assert calls < plain_calls / 3
