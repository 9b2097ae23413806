"""The simulator's suite: two processes agree; more pages are excused by name alone; what is wrong is said in words."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from foredraft.checks.adapters.simulator import CheckedSimulator, make
from foredraft.checks.mutants.simulator.draws import BreaksTiesByHash
from foredraft.properties.harness.cases import load_case
from foredraft.properties.harness.trial import Violation
from foredraft.properties.simulator.acceptance import shares_at, survival, wrong_acceptance
from foredraft.properties.simulator.contract import SimulatorConfig
from foredraft.properties.simulator.elsewhere import CASES
from foredraft.properties.simulator.invariants.runs import EXCEPTIONS, excuse, more_pages_are_no_worse
from foredraft.properties.simulator.trial import IMPOSSIBLE
from foredraft.properties.suites import suite_of

SIMULATOR = suite_of("simulator")
STORED = Path(__file__).parents[1] / "support" / "cases" / "simulator"
CAPABILITIES = SIMULATOR.capabilities.of(make.capabilities)
PLAIN = SimulatorConfig()
Elsewhere = next(kind for kind in SIMULATOR.operations if kind.tag == "elsewhere")


def started(config=PLAIN, subject=make):
    component = SIMULATOR.component(subject, CAPABILITIES)
    return component.start(config, component.invariants)


@pytest.mark.ci
def test_another_process_has_the_same_answers():
    """Whose strings have other hashes; a router that breaks ties by them is found."""
    trial = started()
    for case in range(len(CASES)):
        assert trial.elsewhere(case)
        trial.check()
    hashing = started(subject=BreaksTiesByHash)
    with pytest.raises(Violation, match="SIM-01"):
        hashing.apply(Elsewhere(0))


def test_a_simulator_without_a_name_is_not_looked_for_elsewhere():
    assert not started(subject=type("Local", (CheckedSimulator,), {})).apply(Elsewhere(0))


@pytest.mark.fast("True")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_service_in_trouble_holds_in_every_way(overlap):
    trial = started(SimulatorConfig(4, 3, overlap))
    trial.load(9, "poisson", 5, (3, 17, 40), (2, 7, 20), 7)
    trial.size(8, 2, 2)
    for kind in ("device.raises", "client.cancels", "client.token_limits", "pool.retraction", "link.late"):
        trial.plan(kind, 30)
        assert trial.twice() and trial.one_more_request()
        assert trial.one_more_fault("device.restarts", 10)
        assert trial.moment.grown is not None
    faulty = trial.moment.runs[0]
    assert trial.calm() and trial.run()
    assert faulty.events != trial.moment.runs[0].events and faulty.summary["retractions"] > 0


def test_a_client_may_leave_between_the_arrival_of_its_kv_and_the_next_step():
    """The metrics took such a request for a waiting one, and had one less than none in the end."""
    trial = started(SimulatorConfig(pools=(1, 1)))
    assert trial.load(2, "even", 1, (40,), (1,), 0) and trial.clients(0, 0, 20)
    assert any(request.reason == "aborted" for request in trial.moment.runs[0].requests)
    trial.check()


def test_no_round_of_a_block_is_planned_ahead_when_the_step_behind_it_got_no_kv():
    """The simulator took the time at which an earlier step had been planned, and the next round began too soon."""
    trial = started(SimulatorConfig(16, 0, overlap=True))
    assert trial.load(8, "even", 46, (1, 64), (29,), 3) and trial.plan("pool.denied", 1) and trial.run()
    trial.check()


@pytest.mark.fast("constant", ci="*")
@pytest.mark.parametrize("services", ["constant", "exponential"])
def test_queues_wait_as_they_must(services):
    trial = started()
    assert trial.queue(services, 5) and trial.moment.queue is not None


def test_a_pipeline_is_no_single_server():
    assert not started(SimulatorConfig(overlap=True)).queue("constant", 1)


@pytest.mark.parametrize("how", list(IMPOSSIBLE))
def test_what_cannot_be_is_refused(how):
    trial = started()
    assert trial.impossible(how) and trial.moment.refusal


# -- SIM-10 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "name"), [("more-pages-serve-more", "serves-more"), ("more-pages-run-more", "runs-more")]
)
def test_an_exception_is_one(case, name):
    """With more pages there are more retractions, and only the exception of that name says why."""
    stored = load_case(STORED / f"{case}.json", suite_of)
    trial = started(stored.config)
    for operation in stored.operations:
        assert trial.apply(operation)
    small, large = trial.moment.enlarged
    assert large.summary["retractions"] > small.summary["retractions"] and excuse(small, large) == name


def test_every_exception_has_a_case():
    assert len(EXCEPTIONS) == len(list(STORED.glob("more-pages-*.json")))


def test_without_an_exception_more_retractions_are_a_finding(monkeypatch):
    stored = load_case(STORED / "more-pages-run-more.json", suite_of)
    trial = started(stored.config)
    for operation in stored.operations:
        trial.apply(operation)
    monkeypatch.setitem(EXCEPTIONS, "runs-more", lambda small, large: False)
    assert "13 retractions" in more_pages_are_no_worse(trial.moment).was


# -- what is wrong is said --------------------------------------------------------------------------------------------


class Changed(CheckedSimulator):
    """Ours, with a changed answer."""

    def __init__(self, change):
        super().__init__(SimulatorConfig())
        self.change = change

    def simulate(self, service, workload):
        answer = json.loads(json.dumps(super().simulate(service, workload)))
        return self.change(answer) or answer


@pytest.mark.parametrize(
    ("change", "id", "words"),
    [
        (lambda answer: 7, "TYPE", "the answer is int 7"),
        (lambda answer: answer.pop("times_ns") and None, "TYPE", "has no times_ns"),
        (lambda answer: answer["times_ns"].pop() and None, "TYPE", "one of each event, has"),
        (lambda answer: answer["events"].append(3), "TYPE", "an event is 3"),
        (lambda answer: answer["arrivals"][0].append(3), "TYPE", "one of the arrivals has 4 entries"),
        (lambda answer: answer["arrivals"].append([0, 1, 1]), "ANSWER", "5 arrivals"),
        (lambda answer: answer["requests"].pop() and None, "ANSWER", r"requests \[0, 1, 2\] have an end"),
        (lambda answer: answer["requests"][0].update(number=9), "ANSWER", "request number 9"),
        (lambda answer: answer["requests"][0].update(reason="gone"), "TYPE", "reason is 'gone'"),
        (lambda answer: answer["summary"].update(completed=None), "TYPE", "completed of the summary is None"),
        (
            lambda answer: answer["summary"].update(p99_ttft_ms=float("nan")),
            "TYPE",
            "p99_ttft_ms of the summary is nan",
        ),
        (lambda answer: answer["summary"].update(completed=3), "SIM-07", "completed is 3"),
        (lambda answer: answer["summary"].update(median_ttft_ms=1e9), "SIM-07", "ttft: median"),
        (lambda answer: answer["summary"].update(mean_concurrency=9), "SIM-09", "9 requests in the system"),
        (lambda answer: answer["times_ns"].reverse(), "SIM-02", "the one before it"),
        (lambda answer: answer["requests"][0]["emissions"].reverse(), "SIM-03", "a gap of -"),
    ],
)
def test_what_is_wrong_is_said(change, id, words):
    trial = started(subject=lambda config: Changed(change))
    trial.load(4, "poisson", 5, (3,), (4, 7), 2)
    with pytest.raises(Violation, match=words) as caught:
        trial.run()
    assert caught.value.id == id


def test_the_depths_of_a_process_by_hand():
    assert survival((0.5, 0.8), 3, 1, 4, 0.6, None) == pytest.approx([0.5, 0.4, 0.32])
    assert survival((0.5,), 1, 2, 3, 0.6, None) == pytest.approx([0.5 + 0.5 * 0.3])
    # A draft that does not believe in its first choice puts its nodes on the second ones.
    assert survival((0.5,), 2, 2, 3, 0.6, 1e-9) == pytest.approx([0.15, 0.15 * 0.15])


def test_the_law_of_longest_runs_by_hand():
    assert shares_at(3, mean=2.75) == pytest.approx([1.0, 0.75])
    assert shares_at(4, recorded=((1, 0), (0, 3, 0))) == pytest.approx([1.0, 0.5, 0.5])
    assert shares_at(9, survival=(0.5,), levels=((1, -9.0), (3, 9.0))) == pytest.approx([0.75])
    assert shares_at(100, survival=(1.0, 0.5), drift=-0.01) == pytest.approx([1.0, 0.158655], abs=1e-6)


def test_what_is_seldom_happens():
    """One request in four thousand is too few to be missed in many, and too many in a few."""
    law = {"survival": (0.00024,)}
    asked = {"windows": (), "law": law, "num_draws": 300_000, "counts": [(0, [300_000])]}
    answer = SimpleNamespace(books={"asked": [asked], "runs": {}})
    assert [was for was, _ in wrong_acceptance(answer)] == [
        "0 of 300000 requests have a run of depth 1 at output position 0"
    ]
    asked |= {"num_draws": 3000, "counts": [(0, [3000])]}
    assert not list(wrong_acceptance(answer))


@pytest.mark.parametrize(
    "damage",
    [
        lambda books: books["process"]["survival"].__setitem__(1, 0.5),
        lambda books: books["process"]["shares"].__setitem__(0, 0.5),
        lambda books: books["rounds"]["counted"]["r1"].__setitem__(0, 9),
        lambda books: books["rounds"]["to_end"]["r1"].append(1),
        lambda books: books["asked"][0]["windows"][2][1].append(1),
        lambda books: books["asked"][0]["counts"][1][1].append(1),
        lambda books: books["asked"][0]["counts"][2][1].__setitem__(slice(2), [100, 1900]),
    ],
)
def test_acceptance_is_recounted(damage):
    trial = started(SimulatorConfig(steps=3, topk=2, text="code", acceptance="stretches"))
    trial.load(4, "even", 5, (3, 17), (7, 20), 7)
    assert trial.run()
    (answer,) = trial.moment.runs
    assert not list(wrong_acceptance(answer))
    damage(answer.books)
    assert len(list(wrong_acceptance(answer))) == 1
