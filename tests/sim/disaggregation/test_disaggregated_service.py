"""Prefill and decode on engines of their own: what pools, routes, links and logs must keep to."""

from __future__ import annotations

import pytest
from foredraft.core.errors import ConfigError, InvariantViolation
from foredraft.observe.log import EventLog
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.observe.replay import replay
from foredraft.sim.assembly import assemble
from foredraft.sim.assembly.pools import pools_of
from foredraft.sim.disaggregation.cluster import Roles
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict

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
    for endpoint in simulation.cluster.endpoints:
        endpoint.engine.check()
        endpoint.side.check()
        assert endpoint.engine.is_idle and endpoint.side.is_idle and not endpoint.device.truths
        endpoint.engine.store.forget()
        assert endpoint.engine.store.allocator.num_held_slots == 0
    for balancer in simulation.router.balancers.values():
        assert balancer.outstanding == balancer.waiting_tokens == [0] * len(simulation.replicas)


def replayed(path):
    return replay(
        path,
        lambda header, replica, events: assemble(scenario_from_dict(header["scenario"], "log")).make_engine(
            events, replica
        ),
    )


@pytest.mark.fast("NONE-overlap", "EAGLE3-synchronous", "STANDALONE-overlap", "NGRAM-synchronous", ci="*")
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


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"disaggregation": {"prefill": 1}}, "disaggregation.decode: 0 engines for decode"),
        ({"disaggregation": {"decode": 2}}, "disaggregation.prefill: 0 engines for prefill"),
        ({"disaggregation": {"ratio": "2:1"}}, "disaggregation.ratio: 2:1 does not divide 1 replicas"),
        ({"disaggregation": {"ratio": "2/1"}}, "'2/1' is no P:D"),
        ({"disaggregation": {"ratio": "0:1"}}, "'0:1' is no P:D"),
        ({"disaggregation": {"ratio": "1:1", "prefill": 1}}, "contradicts prefill = 1"),
        (
            {"disaggregation": {"prefill": 1, "decode": 1}, "hardware": {"replicas": 3}},
            "hardware.replicas: 3 contradicts",
        ),
        ({"disaggregation": {"prefill": 1, "decode": 1, "lease_s": 5.0}}, "hold_s: 5 must be more than lease_s"),
        ({"disaggregation": {"prefil": 1}}, "did you mean 'prefill'?"),
        ({"disaggregation": {"prefill_policy": "nearest"}}, "disaggregation.prefill_policy"),
    ],
)
def test_pools_that_cannot_be_are_refused_before_anything_runs(tables, words):
    with pytest.raises(ConfigError) as caught:
        Simulation(scenario_from_dict(tables, "test"))
    assert words in str(caught.value)


@pytest.mark.parametrize(("ratio", "replicas", "pools"), [("1:1", 2, (1, 1)), ("2:1", 6, (4, 2)), ("3:2", 5, (3, 2))])
def test_a_ratio_divides_the_replicas(ratio, replicas, pools):
    tables = {"disaggregation": {"ratio": ratio}, "hardware": {"replicas": replicas}}
    found = pools_of(scenario_from_dict(tables, "test"))
    assert (found.num_prefill, found.num_decode, found.num_both) == (*pools, 0)


ONE = merged(
    SMALL,
    workload={"num_requests": 1, "prompt": {"value": 2048}, "output": {"value": 20}},
    speculation={"algorithm": "EAGLE3", "policy": "fixed", "steps": 3},
)


def test_a_transfer_takes_the_time_of_its_bytes():
    """One request alone, no overlap: latency, the KV of 2048 tokens in both pools, the draft input behind it."""
    simulation, report, summary = simulate(merged(ONE, disaggregation={"layerwise": False, "bandwidth_gbps": 8.0}))
    assembly = simulation.assembly
    kv_bytes = 2048 * (assembly.target.kv_bytes_per_token + assembly.draft.kv_bytes_per_token)
    hidden = 4 * assembly.target.hidden + 8 + (4 + 8)
    assert report.disaggregation.num_bytes == kv_bytes + hidden
    pages_ns = int(kv_bytes / 1e9 * 1e9)
    bytes_ns = pages_ns + int(hidden / 1e9 * 1e9)
    # Offer, accept; then pages and, behind them, the draft input.
    assert summary["mean_transfer_wait_ms"] * 1e6 == pytest.approx(20_000 + bytes_ns + 10_000, abs=10)
    # Messages go beside the pages: they keep no port busy.
    assert report.disaggregation.out_busy_ns == (pages_ns, 0) and report.disaggregation.in_busy_ns == (0, pages_ns)


TIGHT = {
    **SMALL,
    "engine": {"page_size": 1, "max_running": 4, "kv_slots": 2048, "chunk_size": 32},
    "workload": {
        "num_requests": 30,
        "rate": 2000.0,
        "prompt": {"values": [5, 40, 100]},
        "output": {"values": [1, 7, 30]},
    },
    "clients": {"cancel_share": 0.5, "cancel_mean_s": 0.1},
}


@pytest.mark.parametrize(
    "pools",
    [
        {"bandwidth_gbps": 1.0},
        {"bandwidth_gbps": 0.01},
        {"prefill": 2, "decode": 2, "bandwidth_gbps": 0.1, "rebalance_s": 0.02},
        {"prefill": 3, "bandwidth_gbps": 1.0, "rebalance_s": 0.02, "layerwise": False},
    ],
    ids=["small", "slow link", "roles", "roles at once"],
)
def test_shares_of_a_small_service_are_shares(pools):
    """Slots that are held for peers after the last end, messages beside the pages, and engines that change sides."""
    _, report, summary = simulate(merged(TIGHT, disaggregation=pools))
    summary |= report.disaggregation.to_json(report.duration_ns)
    shares = [name for name in summary if ("share" in name and "per_replica" not in name) or "occupancy" in name]
    values = {name: summary[name] for name in shares if summary[name] is not None}
    assert len(values) >= 7 and all(0 <= value <= 1 for value in values.values()), values


def test_what_a_draft_does_not_need_is_not_sent():
    def num_bytes(algorithm):
        return simulate(merged(ONE, speculation={"algorithm": algorithm}))[1].disaggregation.num_bytes

    alone = num_bytes("NGRAM")
    assert alone == 2048 * 131_072 + 8
    assert num_bytes("EAGLE3") > num_bytes("STANDALONE") - 2048 * 32_768 > alone


def test_layer_by_layer_hides_the_transfer_behind_the_prompt():
    waits = [
        simulate(merged(ONE, disaggregation={"layerwise": layerwise}))[2]["mean_transfer_wait_ms"]
        for layerwise in (True, False)
    ]
    # What is left is the last of 32 layers, and the words.
    assert waits[0] < waits[1] / 10


def test_transfers_wait_for_each_other_on_a_port():
    """Two prefill engines send to one decode engine at once: the second of two transfers takes twice as long."""
    scenario = merged(
        ONE,
        workload={"num_requests": 2, "arrivals": "constant", "rate": 1e6},
        disaggregation={"prefill": 2, "decode": 1, "layerwise": False, "bandwidth_gbps": 8.0},
    )
    _, report, crowded = simulate(scenario)
    _, _, apart = simulate(merged(scenario, disaggregation={"decode": 2}))
    assert report.disaggregation.in_busy_ns[2] == sum(report.disaggregation.out_busy_ns)
    alone_ms = apart["p99_transfer_ms"]
    assert crowded["mean_transfer_wait_ms"] == pytest.approx(1.5 * alone_ms, rel=0.01)


def test_routers_of_both_pools():
    pools = {"prefill": 2, "decode": 3, "prefill_policy": "round_robin", "decode_policy": "round_robin"}
    simulation, _, _ = simulate(merged(SMALL, disaggregation=pools))
    started = [endpoint.side.counts.started for endpoint in simulation.cluster.endpoints]
    assert started == [20, 20, 14, 13, 13]


def test_the_router_of_prefixes_finds_what_was_computed_before():
    load = {"prefixes": {"groups": 6, "length": 1024, "zipf": 0.0}, "prompt": {"value": 1200}, "num_requests": 60}
    rates = {}
    for policy in ("prefix_aware", "random"):
        pools = {"prefill": 3, "prefill_policy": policy, "decode_policy": policy, "decode": 3}
        scenario = merged(SMALL, workload=load, engine={"kv_slots": 40_000}, disaggregation=pools)
        _, report, summary = simulate(scenario)
        rates[policy] = (summary["prefix_cache_hit_rate"], -report.disaggregation.num_bytes)
    assert rates["prefix_aware"] > rates["random"]
    assert rates["prefix_aware"][1] > rates["random"][1], "what a decode engine has in its cache is not sent"


# -- roles -------------------------------------------------------------------------------------------------------------

SWINGING = merged(
    SMALL,
    workload={"num_requests": 220, "rate": 8.0, "prompt": {"value": 3000}, "output": {"value": 4}},
    disaggregation={"prefill": 1, "decode": 3, "rebalance_s": 2.0},
)


def test_engines_of_the_idler_pool_change_sides_when_they_are_empty(tmp_path):
    simulation, _, summary = simulate(SWINGING, tmp_path / "log.jsonl")
    assert summary["role_changes"] >= 1 and summary["prefill_engines"] >= 2
    assert summary["completed"] == 220
    assert_drained(simulation)
    found = replayed(tmp_path / "log.jsonl")
    assert found.identical, found.difference
    _, _, fixed = simulate(merged(SWINGING, disaggregation={"rebalance_s": None}))
    assert fixed["role_changes"] == 0
    assert summary["mean_ttft_ms"] < fixed["mean_ttft_ms"]


def test_an_engine_that_is_not_empty_keeps_its_role(monkeypatch):
    def rash(self, since_ns):
        outstanding = self._cluster.outstanding
        self._change(max(self._cluster.endpoints, key=lambda endpoint: outstanding[endpoint.replica]))

    monkeypatch.setattr(Roles, "_drain_one", rash)
    with pytest.raises(InvariantViolation, match="HANDOFF-10"):
        simulate(SWINGING)
