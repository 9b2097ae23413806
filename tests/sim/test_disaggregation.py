"""Prefill and decode on engines of their own: what pools, routes, links and logs must keep to."""

from __future__ import annotations

import pytest
from foretoken.observe.log import EventLog
from foretoken.observe.metrics import RunMetrics
from foretoken.observe.replay import replay
from foretoken.sim.assembly import assemble
from foretoken.sim.run import Simulation
from foretoken.sim.scenario_file import scenario_from_dict

SMALL = {
    "model": {"context_len": 4096},
    "engine": {"page_size": 16, "max_running": 16, "kv_slots": 16_384},
    "workload": {"num_requests": 40, "rate": 20.0, "prompt": {"mean": 500.0, "high": 3000}, "output": {"mean": 60.0}},
    "disaggregation": {"prefill": 1, "decode": 1},
}
SPECULATION = (
    {"algorithm": "NONE"},
    {"algorithm": "EAGLE3", "policy": "fixed", "steps": 3},
    {"algorithm": "STANDALONE", "policy": "fixed", "steps": 2},
    {"algorithm": "NGRAM", "policy": "fixed", "steps": 3},
    {"algorithm": "EAGLE", "policy": "fixed", "steps": 3, "topk": 4, "num_draft_tokens": 8},
)


def merged(base: dict, **tables: dict) -> dict:
    return {**base, **{name: {**base.get(name, {}), **table} for name, table in tables.items()}}


def simulate(scenario: dict, path=None):
    """The simulation, its report and its summary; with `path` its log is there."""
    metrics = RunMetrics(None)
    resolved = scenario_from_dict(scenario, "test")
    log = None if path is None else EventLog(path, {"scenario": resolved.model_dump(mode="json")})
    sinks = lambda replica: [metrics.sink(replica)] + ([] if log is None else [log.sink(replica)])  # noqa: E731
    simulation = Simulation(resolved, sinks=sinks)
    report = simulation.run()
    if log is not None:
        log.close(report.complete)
    for replica, busy_ns in enumerate(report.device_busy_ns):
        metrics.observe_device(replica, busy_ns)
    summary = metrics.summary(report.duration_ns)
    if report.disaggregation is not None:
        summary |= report.disaggregation.to_json(report.duration_ns)
    return simulation, report, summary


def assert_drained(simulation: Simulation) -> None:
    for worker in simulation.replicas:
        worker.engine.check()
        worker.side.check()
        assert worker.engine.is_idle and worker.side.is_idle and not worker.device.truths
        worker.engine.store.forget()
        assert worker.engine.store.allocator.num_held_slots == 0
    assert simulation.router.outstanding == [0] * len(simulation.replicas)


def replayed(path):
    return replay(
        path,
        lambda header, replica, events: assemble(scenario_from_dict(header["scenario"], "log")).make_engine(
            events, replica
        ),
    )


@pytest.mark.parametrize("mode", ["overlap", "synchronous"])
@pytest.mark.parametrize("speculation", SPECULATION, ids=lambda s: s["algorithm"])
def test_every_request_is_computed_here_and_decoded_there(tmp_path, speculation, mode):
    scenario = merged(SMALL, speculation=speculation, engine={"mode": mode})
    simulation, report, summary = simulate(scenario, tmp_path / "log.jsonl")
    assert report.complete and summary["submitted"] == summary["completed"] == report.num_ended == 40
    assert summary["transfers_completed"] == 40
    assert summary["transfers_failed"] == summary["transfers_cancelled"] == summary["transfer_retries"] == 0
    assert simulation.replicas[0].rounds == len(simulation.replicas) - 1 or simulation.replicas[1].rounds > 0
    assert_drained(simulation)
    found = replayed(tmp_path / "log.jsonl")
    assert found.identical and found.num_replicas == 2, found.difference
