"""Services under faults: nothing is lost, every kind does something, and every promise is one that can be broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from foredraft.core.adaptive import AdaptiveController
from foredraft.core.contract.events import Aborted
from foredraft.core.contract.outcomes import AbortOutcome, CommitOutcome
from foredraft.core.contract.request import FinishReason
from foredraft.core.kv.store import KVStore
from foredraft.core.scheduler import requests as requests_module
from foredraft.core.scheduler.admission import Admission
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.flights import StepsInFlight
from foredraft.core.scheduler.output import OutputLog
from foredraft.core.scheduler.recovery import StepLimits
from foredraft.core.scheduler.requests import Requests
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.observe.replay import replay
from foredraft.sim.actors.engine import EngineActor
from foredraft.sim.faults.clock import HostClock
from foredraft.sim.faults.injector import FaultInjector
from foredraft.sim.faults.plan import KINDS, FaultPlan, fault_plan, swarm_plan
from foredraft.sim.faults.promises import OF_KIND
from foredraft.sim.faults.transfers import UnreliableLink
from service_under_faults import (
    check_sabotage_is_reported,
    disaggregated_service,
    engine_of_log,
    everything,
    faults_of,
    logged,
    only,
    serve,
    serve_disaggregated_swarm,
    serve_swarm,
    service,
)

BUSY = {
    "model": {"context_len": 1024},
    "engine": {"max_running": 8, "max_queue": 12, "kv_slots": 4000, "chunk_size": 256},
    "speculation": {"algorithm": "EAGLE3", "adaptive": "with-zero"},
    "workload": {
        "num_requests": 40,
        "rate": 12.0,
        "prompt": {"mean": 120.0, "high": 600},
        "output": {"mean": 50.0, "high": 200},
    },
}


OF_ANY_SERVICE = [name for name, kind in KINDS.items() if not kind.needs_transfers]


# -- the soak ----------------------------------------------------------------------------------------------------------


def test_eight_services_under_the_swarm():
    fired = faults_of(serve_swarm, range(8))
    assert sum(map(bool, fired.values())) > len(OF_ANY_SERVICE) / 2, fired


@pytest.mark.fast("sglang-0.5", ci="*")
@pytest.mark.parametrize("server", ["vllm-0.18", "sglang-0.5", "trtllm-1.x"])
def test_the_rules_of_other_servers_keep_the_promises_too(server: str):
    for seed in (0, 2, 5, 28):
        scenario = service(seed)
        scenario |= {"hardware": scenario.get("hardware", {}) | {"server": server, "kernels": "roofline"}}
        scenario["workload"] |= {"num_requests": 60, "rate": 6.0, "stop_s": None}
        del scenario["engine"]["mode"]
        _, report = serve(scenario, swarm_plan(seed))
        assert report is not None and report.kept, f"seed {seed}:\n" + "\n".join(map(str, report.broken))


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
@pytest.mark.parametrize(("serve_seed", "kinds"), [(serve_swarm, OF_ANY_SERVICE), (serve_disaggregated_swarm, KINDS)])
def test_a_thousand_services_under_the_swarm(serve_seed, kinds, hundred):
    fired = faults_of(serve_seed, range(100 * hundred, 100 * hundred + 100))
    assert sorted(fired) == sorted(kinds) and all(fired.values()), fired


# -- no faults, equal faults -------------------------------------------------------------------------------------------


@pytest.mark.fast("change2")
@pytest.mark.parametrize(
    "change", [{}, {"mode": "synchronous", "multi_step_rounds": 1}, {"mixed": False, "preempt": True}]
)
def test_a_plan_of_zeros_is_no_plan(tmp_path, change):
    scenario = {**BUSY, "engine": {**BUSY["engine"], **change}, "clients": {"cancel_share": 0.2}}
    without = logged(scenario, None, tmp_path / "without.jsonl")
    assert logged(scenario, fault_plan(everything(0.0)), tmp_path / "with.jsonl") == without
    assert without.count(b"\n") > 300


@pytest.mark.fast("disaggregated_service-1", ci="*1")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make_scenario", [service, disaggregated_service])
def test_a_log_of_a_run_under_faults_replays(tmp_path, make_scenario, seed):
    """What goes wrong is part of the decision log, so a fresh engine decides the same."""
    path = tmp_path / "log.jsonl"
    transfers = make_scenario is disaggregated_service
    logged(make_scenario(seed), swarm_plan(seed, transfers=transfers), path)
    report = replay(path, engine_of_log)
    assert report.identical, report.difference
    assert report.num_decisions > 100 and report.num_replicas > transfers


# -- each kind ---------------------------------------------------------------------------------------------------------

PROBABILITY = {"step": 0.05, "request": 0.3, "message": 0.3, "run": 1.0}


@pytest.mark.parametrize("kind", OF_ANY_SERVICE)
def test_each_kind_happens_and_is_borne(kind):
    settings = {"within_s": 6.0} if kind == "service.shutdown" else {}
    metrics = RunMetrics(None)
    plan = only(kind, PROBABILITY[KINDS[kind].occasion], **settings)
    _, report = serve(BUSY, plan, sinks=lambda replica: [metrics.sink(replica)])
    assert report.kept, report.broken
    assert report.injected[kind] > 0 and not report.never_fired
    assert all(report.checked[promise] > 0 for promise in OF_KIND[kind])
    summary = metrics.summary()
    assert not summary["incomplete"] and summary["unfinished"] == 0
    assert (summary["lost_steps"] > 0) == (kind.startswith("device.") and kind not in ("device.slow", "device.nan"))
    assert (summary["restarts"] > 0) == (kind in ("device.hangs", "device.restarts"))
    if kind in ("device.poison", "device.nan"):
        assert 0 < summary["failed"] <= 25
    if kind in ("device.out_of_memory", "pool.denied", "pool.retraction"):
        assert summary["retractions"] > 0 and summary["failed"] == 0
    if kind.startswith("clock."):
        assert summary["p99_ttft_ms"] >= summary["median_ttft_ms"] >= 0


def test_every_fault_counts_once(monkeypatch):
    sent: Counter[UnreliableLink] = Counter()
    attempt = UnreliableLink._attempt

    def counted(link: UnreliableLink, *arguments) -> None:
        sent[link] += 1
        attempt(link, *arguments)

    monkeypatch.setattr(UnreliableLink, "_attempt", counted)
    _, report = serve(BUSY, only("link.late", 1.0))
    assert report.injected["link.late"] == sum(sent.values()) > 30


def test_clients_leave_in_every_state():
    client = {"cancels": {"probability": 0.9, "mean_s": 0.3}}
    plan = fault_plan({"client": client, "link": {"late": {"probability": 0.3}}})
    engine = {**BUSY["engine"], "max_queue": None, "chunk_size": 16}
    _, report = serve({**BUSY, "engine": engine, "workload": {**BUSY["workload"], "prompt": {"value": 600}}}, plan)
    assert report.kept, report.broken
    assert {"not here yet", "waiting", "prefill", "decode", "ended"} == set(report.cancelled_in)


def test_an_enabled_kind_that_never_fires_is_named():
    _, report = serve({**BUSY, "workload": {**BUSY["workload"], "num_requests": 3}}, only("device.hangs", 1e-9))
    assert report.kept and report.never_fired == ("device.hangs",)


# -- promises that are broken ------------------------------------------------------------------------------------------


def forget_a_token(monkeypatch):
    close = OutputLog.close

    def wrong(self, record):
        close(self, record)
        record.emitted_before = max(0, record.emitted_before - 1)

    monkeypatch.setattr(OutputLog, "close", wrong)


def give_no_reason(monkeypatch):
    give_up = Requests.give_up
    monkeypatch.setattr(Requests, "give_up", lambda self, record, reason, message="": give_up(self, record, reason))


def tell_no_abort(monkeypatch):
    def silent(self, finished):
        self.hooks.on_finished(finished)
        del self.device.truths[finished.request_id]
        if finished.reason is not FinishReason.ABORT:
            self._on_finished(self.replica, finished)

    monkeypatch.setattr(EngineActor, "report", silent)


def ignore_cancels(monkeypatch):
    def abort(self, request_id, now_ns):
        self._events(Aborted(now_ns, request_id))
        return AbortOutcome(None, False)

    monkeypatch.setattr(Engine, "abort", abort)


def let_everybody_in(monkeypatch):
    for part in (Admission, Requests):
        monkeypatch.setattr(part, "refusal", lambda self, request: "")


def lose_slots(monkeypatch):
    def release(self, departure):
        self.allocated[departure.row] = self._shared[departure.row]  # the slots beyond have no owner now
        original(self, departure)

    original = KVStore._release
    monkeypatch.setattr(KVStore, "_release", release)


def keep_what_is_known(monkeypatch):
    def report(self, finished):
        self.hooks.on_finished(finished)
        self._on_finished(self.replica, finished)

    monkeypatch.setattr(EngineActor, "report", report)


def commit_what_is_lost(monkeypatch):
    """The driver takes a result of a lost step for that of the next."""
    lost = Engine.lose_steps

    def kept(self, failure, now_ns):
        flights = list(self.requests.in_flight)
        outcome = lost(self, failure, now_ns)
        self.requests.in_flight.extend(flights)
        return outcome

    def resume(self, now_ns, *, restarted=False):
        self.requests.steps_are_lost = False

    monkeypatch.setattr(Engine, "lose_steps", kept)
    monkeypatch.setattr(Engine, "resume", resume)


def take_any_result(monkeypatch):
    commit = Engine.commit

    def believing(self, result, now_ns):
        flights = self.requests.in_flight
        if flights and flights[0].step.step_id == result.step_id:
            return commit(self, result, now_ns)
        return CommitOutcome((), ())

    monkeypatch.setattr(Engine, "commit", believing)


def replace(where, attribute, replacement):
    return lambda monkeypatch: monkeypatch.setattr(where, attribute, replacement)


RAISES = only("device.raises", 0.05)
BREAKS: list[tuple[str, Callable, FaultPlan]] = [
    ("nothing_seen", take_any_result, RAISES),
    ("stream_intact", forget_a_token, only("pool.retraction", 0.1)),
    (
        "fenced",
        replace(KVStore, "close_row", lambda self, departure, last_committed: self._release(departure)),
        only("device.raises", 0.05),
    ),
    ("fenced", replace(StepsInFlight, "fence_of", lambda self, row: 0), only("device.restarts", 0.05)),
    ("victim_alone", replace(StepLimits, "count_failure", lambda self, *arguments: True), RAISES),
    ("fails_for_itself", give_no_reason, only("device.nan", 0.05)),
    ("watchdog_speaks", replace(Requests, "describe_in_flight", lambda self: "something"), only("device.hangs", 0.02)),
    ("one_end", tell_no_abort, only("client.cancels", 0.3, mean_s=0.5)),
    ("no_later_token", ignore_cancels, only("client.cancels", 0.3, mean_s=0.5)),
    ("refused_at_the_door", let_everybody_in, only("client.duplicate_id", 0.5)),
    ("bounded_queue", let_everybody_in, only("load.burst", 0.3)),
    (
        "counts_once",
        replace(FaultInjector, "_remember", staticmethod(lambda names, name: None)),
        only("link.duplicated", 0.5),
    ),
    (
        "first_end_wins",
        replace(requests_module, "finish_reason", lambda stopped: FinishReason.LENGTH),
        only("client.stop_edge", 0.3),
    ),
    (
        "steps_valid",
        replace(AdaptiveController, "on_verify_complete", lambda self, correct, bs, steps: None),
        only("draft.nan", 0.1),
    ),
    (
        "last_good_config",
        replace(AdaptiveController, "reload", lambda self, text, source: None),
        only("config.half_written", 0.1),
    ),
    ("time_forward", replace(HostClock, "_hold", lambda self, now_ns, before_ns: None), only("clock.jump", 0.05)),
    ("books_agree", lose_slots, RAISES),
    ("drained", keep_what_is_known, only("client.cancels", 0.3)),
    ("no_crash", commit_what_is_lost, RAISES),
]


@pytest.mark.parametrize(("promise", "sabotage", "plan"), BREAKS, ids=[promise for promise, _, _ in BREAKS])
def test_a_broken_promise_is_reported(monkeypatch, promise, sabotage, plan):
    check_sabotage_is_reported(BUSY, plan, promise, lambda: sabotage(monkeypatch))


def test_recovery_that_never_comes_is_reported(monkeypatch):
    """Without the way back up everybody is served one after the other, long after the last fault."""
    plan = fault_plan({"recovery_s": 10.0, "stop_s": 3.0, "device": {"raises": {"probability": 0.06}}})
    load = {**BUSY["workload"], "num_requests": 60, "rate": 20.0, "output": {"value": 150}}
    scenario = {**BUSY, "engine": {**BUSY["engine"], "max_queue": None}, "workload": load}
    assert serve(scenario, plan)[1].kept
    monkeypatch.setattr(StepLimits, "count_success", lambda self: False)
    broken = serve(scenario, plan)[1].broken
    assert [b.promise for b in broken] == ["recovered"], broken
