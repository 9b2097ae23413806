"""Engines of two roles under faults between them:
nothing is lost, each kind does something, and every promise can be broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from foredraft.checks.adapters import core_engine, handoff
from foredraft.core.handoff import DecodeSide, PrefillSide
from foredraft.core.handoff.ended import EndedTransfers
from foredraft.core.handoff.life import (
    DECODE_TRANSITIONS,
    ENDING_EVENTS,
    PREFILL_TRANSITIONS,
    TransferEvent,
    TransferState,
)
from foredraft.core.handoff.transfer import Incoming, Outgoing
from foredraft.core.kv.store import KVStore
from foredraft.core.scheduler.life import TRANSITIONS, RequestEvent, RequestRecord, RequestState
from foredraft.observe.log import EventLog
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.observe.replay import replay
from foredraft.properties.audit.log import audit_log
from foredraft.properties.harness.suite import Component
from foredraft.properties.harness.swarm import Budget, Swarm
from foredraft.properties.simulator.ledger import SimulatorLedger
from foredraft.properties.suites import suite_of
from foredraft.sim.actors.clock import call_at
from foredraft.sim.disaggregation.endpoint import HandoffEndpoint
from foredraft.sim.faults.injector import LOSS
from foredraft.sim.faults.plan import KINDS, FaultPlan, fault_plan
from foredraft.sim.faults.promises import OF_KIND
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict
from service_under_faults import (
    check_sabotage_is_reported,
    engine_of_log,
    everything,
    faults_of,
    logged,
    only,
    serve,
    serve_disaggregated_swarm,
)

BUSY = {
    "model": {"context_len": 4096},
    "engine": {"page_size": 16, "max_running": 16, "kv_slots": 16_384},
    "workload": {"num_requests": 60, "rate": 12.0, "prompt": {"mean": 500.0, "high": 3000}, "output": {"mean": 60.0}},
    "disaggregation": {"prefill": 2, "decode": 2},
}
PROBABILITY = {"packet": 0.1, "transfer": 0.3}
OF_TRANSFERS = [name for name, kind in KINDS.items() if kind.needs_transfers]


def test_a_late_copy_of_a_request_that_has_ended_is_no_new_one():
    """It came back to the engine that had been given the request anew, and the request was computed and
    decoded once more."""
    assert serve_disaggregated_swarm(224).injected["link.duplicated"]


@pytest.mark.ci
def test_five_services_under_the_swarm():
    fired = faults_of(serve_disaggregated_swarm, range(5))
    assert sum(fired[kind] > 0 for kind in OF_TRANSFERS) > len(OF_TRANSFERS) / 2, fired


@pytest.mark.fast(
    "transfer.lost", "transfer.corrupt", "transfer.duplicated", "transfer.peer_dies", "transfer.decoder_lost", ci="*"
)
@pytest.mark.parametrize("kind", OF_TRANSFERS)
def test_each_kind_happens_and_is_borne(kind):
    metrics = RunMetrics(None)
    scenario, plan = BUSY, only(kind, PROBABILITY[KINDS[kind].occasion])
    if kind == LOSS:  # while all decode engines are lost, requests are refused before an engine hears of them
        scenario = {**BUSY, "disaggregation": {"prefill": 2, "decode": 4}}
        plan = only(kind, 0.1, notice_s=0.1, restart_s=0.5)
    simulation, report = serve(scenario, plan, sinks=lambda replica: [metrics.sink(replica)])
    assert report.kept, report.broken
    assert report.injected[kind] > 0 and not report.never_fired
    assert all(report.checked[promise] > 0 for promise in OF_KIND[kind])
    summary = metrics.summary()
    assert summary["submitted"] == 60 and summary["unfinished"] == 0
    ended = summary["completed"] + summary["failed"] + summary["aborted"] + summary["refused"]
    assert ended == 60, "a request is one, however often it was offered"
    if kind in ("transfer.duplicated", "transfer.reordered", "transfer.slow", "transfer.ack_lost"):
        assert summary["completed"] == 60
    if kind in ("transfer.lost", "transfer.short", "transfer.corrupt", "transfer.ack_lost"):
        assert sum(endpoint.side.counts.retries for endpoint in simulation.cluster.endpoints) > 0
    if kind == "transfer.peer_dies":
        assert summary["restarts"] > 0 and 0 < summary["failed"] < summary["completed"]
    if kind == LOSS:
        assert summary["restarts"] > 0 and simulation.cluster.num_moved > summary["failed"]
    if kind == "transfer.cancelled":
        assert {"transfer sending", "decode, handed over"} <= set(report.cancelled_in)


RARELY = {  # each takes a second coincidence; tests/core walks the tables without a service
    (Incoming, TransferState.QUEUED, TransferEvent.RETRY),  # offered again while there is no room yet
    (Outgoing, TransferState.FENCED, TransferEvent.COMPLETE),  # the ack of a retry, while the first attempt is read
    (Outgoing, TransferState.SENDING, TransferEvent.CANCEL),  # the other side cancels between two pages
    (RequestRecord, RequestState.DECODE, RequestEvent.MOVE),  # a client is given up between two rounds of a lost engine
    (
        RequestRecord,
        RequestState.WAITING,
        RequestEvent.FINISH,
    ),  # vLLM's late tokens: tests/core/scheduler/test_rules.py
}


@pytest.mark.slow
def test_requests_and_transfers_walk_every_transition_of_their_tables(monkeypatch):
    walked = set()

    def watch(kind, method, event_of=lambda event: event):
        good = getattr(kind, method)

        def watched(self, given):
            before = self.state
            is_taken = good(self, given)
            if is_taken is not False:
                walked.add((kind, before, event_of(given)))
            return is_taken

        monkeypatch.setattr(kind, method, watched)

    watch(RequestRecord, "advance")
    watch(Outgoing, "try_move")
    watch(Outgoing, "finish", ENDING_EVENTS.get)
    watch(Incoming, "move")
    for contract, adapter in (("engine", core_engine), ("transport", handoff)):
        component = Component(suite_of(contract), adapter.make, adapter.make.capabilities)
        assert Swarm(component, 1).search((), Budget(operations=2000)) is None
    for seed in range(40):
        serve_disaggregated_swarm(seed)
    tables = {RequestRecord: TRANSITIONS, Outgoing: PREFILL_TRANSITIONS, Incoming: DECODE_TRANSITIONS}
    every = {
        (kind, state, event) for kind, table in tables.items() for state, events in table.items() for event in events
    }
    assert walked <= every and every - walked <= RARELY


def serve_and_lose(tmp_path, *losses):
    """Serve on the decode engines 2, 3, 4; each of `losses` is one of them and when it is lost, in seconds.
    Check logs and books."""
    chain = {"algorithm": "EAGLE3", "policy": "fixed", "steps": 3}
    scenario = scenario_from_dict({**BUSY, "speculation": chain, "disaggregation": {"prefill": 2, "decode": 3}}, "test")
    path, metrics = tmp_path / f"{len(losses)}.jsonl", RunMetrics(None)
    never = only(LOSS, 1e-12, notice_s=0.3, restart_s=0.5)
    with EventLog(path, {"scenario": scenario.model_dump(mode="json")}) as log:
        simulation = Simulation(scenario, faults=never, sinks=lambda r: [log.sink(r), metrics.sink(r)])
        for engine, time_s in losses:
            call_at(simulation.env, round(time_s * 1e9), simulation.faults.injectors[engine].die, LOSS)
        report = simulation.run()
        log.close(True)
    assert report.faults.kept, report.faults.broken
    assert report.faults.injected[LOSS] == len(losses)
    assert replay(path, engine_of_log).identical
    assert not audit_log(path).flaws
    summary = metrics.summary()
    assert (summary["submitted"], summary["unfinished"]) == (60, 0)
    return simulation, summary, SimulatorLedger(path.read_text().splitlines()[1:]).lives


@pytest.mark.ci
def test_requests_of_lost_decode_engines_have_the_rounds_that_they_would_have_had(tmp_path):
    """One engine, and two at once: a request moves once, behind what was delivered, and every draw is keyed
    by its position."""
    _, _, undisturbed = serve_and_lose(tmp_path)
    moved = []
    for losses in (((2, 2.0),), ((2, 2.0), (3, 2.0))):
        simulation, summary, lives = serve_and_lose(tmp_path, *losses)
        moved.append(simulation.cluster.num_moved)
        assert summary["completed"] == 60 and summary["restarts"] == len(losses)
        for name, life in undisturbed.items():
            assert (lives[name].end, lives[name].accepted) == (life.end, life.accepted), name
            assert lives[name].tokens == life.tokens
    assert 0 < moved[0] < moved[1]


def test_a_request_that_is_lost_twice_fails_and_nothing_is_left_of_it(tmp_path):
    simulation, summary, _ = serve_and_lose(tmp_path, (2, 2.0), (3, 2.0), (4, 2.7))
    assert list(simulation.clients.refusals) == ["engine 4 was lost; the request was tried 2 times"]
    assert summary["failed"] == sum(simulation.clients.refusals.values()) < summary["completed"]


@pytest.mark.fast("True")
@pytest.mark.parametrize("layerwise", [True, False])
def test_a_plan_of_zeros_is_no_plan(tmp_path, layerwise):
    scenario = {**BUSY, "disaggregation": {"prefill": 1, "decode": 2, "layerwise": layerwise}}
    without = logged(scenario, None, tmp_path / "without.jsonl")
    assert logged(scenario, fault_plan(everything(0.0)), tmp_path / "with.jsonl") == without
    assert without.count(b'"move":"join"') == 60


# -- promises that are broken ------------------------------------------------------------------------------------------


def believe_every_page(monkeypatch):
    receive = HandoffEndpoint.receive_pages
    monkeypatch.setattr(
        HandoffEndpoint,
        "receive_pages",
        lambda self, peer, pages: receive(self, peer, [(page, page.seal) for page, _ in pages]),
    )


def forget_who_has_joined(monkeypatch):
    monkeypatch.setattr(EndedTransfers, "add", lambda self, *arguments: None)


def try_for_ever(monkeypatch):
    retry = PrefillSide._retry

    def again(self, transfer, why, now_ns):
        transfer.attempts = 1
        retry(self, transfer, why, now_ns)

    monkeypatch.setattr(PrefillSide, "_retry", again)


def give_away_what_is_read(monkeypatch):
    def release(self, transfer, now_ns):
        transfer.num_reading = 0
        self._finish(transfer, transfer.end, now_ns)

    monkeypatch.setattr(PrefillSide, "_release_when_read", release)


def keep_every_hold(monkeypatch):
    """One row of each engine, or the service would come to a halt."""
    release = KVStore.release_hold

    def keep(self, row, last_committed):
        if row != 1:
            release(self, row, last_committed)

    monkeypatch.setattr(KVStore, "release_hold", keep)


SLOW = {**BUSY, "disaggregation": {"prefill": 1, "decode": 1, "bandwidth_gbps": 2.0}}
BREAKS: list[tuple[str, Callable, FaultPlan, dict]] = [
    ("fails_closed", believe_every_page, only("transfer.corrupt", 0.3), BUSY),
    ("joins_once", forget_who_has_joined, only("transfer.ack_lost", 0.3), BUSY),
    ("one_retry", try_for_ever, only("transfer.lost", 0.3), BUSY),
    ("pages_kept", give_away_what_is_read, only("transfer.cancelled", 0.6), SLOW),
    ("drained", keep_every_hold, only("transfer.slow", 0.1), BUSY),
]


@pytest.mark.fast("believe_every_page", "give_away_what_is_read", ci="*")
@pytest.mark.parametrize(("promise", "sabotage", "plan", "scenario"), BREAKS, ids=[b[1].__name__ for b in BREAKS])
def test_a_broken_promise_is_reported(monkeypatch, promise, sabotage, plan, scenario):
    check_sabotage_is_reported(scenario, plan, promise, lambda: sabotage(monkeypatch))


def test_engines_that_wait_for_each_other_for_ever_are_reported(monkeypatch):
    """Neither renewals nor deadlines keep a run going in which nothing more will come of a request."""
    monkeypatch.setattr(DecodeSide, "_reserve_waiting", lambda self, now_ns: None)
    _, report = serve(BUSY, fault_plan({"recovery_s": 30.0, "transfer": {"slow": {"probability": 0.01}}}))
    assert ["wait for ever" in str(broken) for broken in report.broken] == [True]
