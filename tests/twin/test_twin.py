"""The comparison's arithmetic, and the twin from its arms to its table."""

import json
from dataclasses import replace

import numpy as np
import pytest
from foredraft.core.acceptance.process import FixedMeanAcceptance
from foredraft.core.contract.request import Request
from foredraft.core.draws import request_key
from foredraft.core.errors import ConfigError
from foredraft.core.prompt import Prompt
from foredraft.gpu.measure.cells import MeasuringPlan
from foredraft.gpu.measure.clock import CpuClock, make_clock
from foredraft.gpu.measure.served import TimedOrder, metrics_of
from foredraft.sim.cost.calibration import Calibration, profile_document, read_profile
from foredraft.sim.scenario_file import scenario_with
from foredraft.twin import run as twin_run
from foredraft.twin.acceptance import (
    MIN_CALIBRATION,
    MOST_CALIBRATION,
    AcceptLength,
    ReplayedAcceptance,
    Rounds,
    accept_length_of,
    draft_of,
    joined,
    num_calibration,
    num_more,
    rounds_of,
)
from foredraft.twin.arms import TwinArm
from foredraft.twin.comparison import ComparedNumber, compare, sensitivity, simulate
from foredraft.twin.measuring import ArmPace, measure_steps
from foredraft.twin.run import TwinPlan, default_scenario, requests_of, run_twin
from made_steps import made_steps


def asked(count=6, output=5):
    return [
        TimedOrder(Request(f"r{i}", Prompt.of_tokens(np.arange(8) + i), output), i * 2_000_000) for i in range(count)
    ]


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
    assert ComparedNumber(11.0, 10.0, 0.0, 0.0).error == pytest.approx(0.1)
    assert ComparedNumber(1.0, 0.0, 0.0, 0.0).error is None
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
    served = arm.serve(asked(), make_clock("cpu", "cpu"))
    metrics = served.metrics().summary()
    assert metrics["completed"] == 6 and metrics["total_output_tokens"] == 30
    last = served.laps[-1].ended_ns
    assert metrics["duration"] == pytest.approx((last - 0) / 1e9)
    for lap in served.laps:
        assert min(lap.plan_ns, lap.launch_ns, lap.run_ns, lap.commit_ns) > 0
    closed = arm.serve([TimedOrder(one.request, None) for one in asked()], CpuClock(), 2).metrics().summary()
    assert closed["max_running"] <= 2 and closed["completed"] == 6


def test_rounds_are_read_with_their_positions(make_arms):
    (arm,) = make_arms(chain={"draft": "EAGLE3", "steps": 2, "max_running": 2, "context_len": 64})
    served = arm.serve(asked(4, 7), CpuClock())
    found = rounds_of(served.events)
    assert found.ids == ("r0", "r1", "r2", "r3")
    for request in range(4):
        own = found.requests == request
        assert found.positions[own][0] == 1  # the prompt gave the first token
        assert (np.diff(found.positions[own]) == found.correct[own][:-1] + 1).all()
    assert set(found.steps.tolist()) == {2}


def test_a_measured_run_is_simulated_again_with_its_own_rounds(make_arms):
    """Then accept lengths and rounds are equal, and the times alone can be wrong."""
    (arm,) = make_arms(chain={"draft": "EAGLE3", "steps": 2, "max_running": 2, "context_len": 64})
    served = arm.serve(asked(6, 9), CpuClock())
    measured = rounds_of(served.events)
    cost = made_steps("EAGLE3").cost(arm.spec, "profile")
    events = simulate(arm.simulated_spec, cost, made_steps("EAGLE3").host, ReplayedAcceptance(measured), asked(6, 9))
    again = rounds_of(events)
    for request in range(6):
        rows = [one.requests == one.ids.index(f"r{request}") for one in (measured, again)]
        assert measured.positions[rows[0]].tolist() == again.positions[rows[1]].tolist()
        assert measured.correct[rows[0]].tolist() == again.correct[rows[1]].tolist()
    lengths = [metrics_of(events).summary()["accept_length"], served.metrics().summary()["accept_length"]]
    assert lengths[0] == pytest.approx(lengths[1])


def of_rounds(*requests):
    """Rounds of requests, each a list of correct drafts."""
    columns = [(i, 0, 3, correct) for i, request in enumerate(requests) for correct in request]
    return Rounds(tuple(f"r{i}" for i in range(len(requests))), *np.array(columns, np.int64).reshape(-1, 4).T)


def test_a_round_that_was_not_measured_accepts_as_the_one_before_it():
    rounds = Rounds(("r0",), *np.array([(0, 1, 3, 2), (0, 4, 3, 0), (0, 5, 3, 1)], np.int64).T)
    replayed = ReplayedAcceptance(rounds)
    keys = np.array([request_key("r0"), request_key("another")], np.uint64)
    assert replayed.run_windows(keys, np.zeros(2, np.int64), 8).tolist() == [[2, 2, 2, 2, 0, 1, 1, 1], [0] * 8]


def test_the_interval_of_an_accept_length_is_that_of_prompts():
    """A thousand rounds of two prompts tell as little as two prompts do."""
    alike, split = of_rounds([1] * 500, [1] * 500), of_rounds([0] * 500, [2] * 500)
    assert accept_length_of([alike]).half == 0.0 and accept_length_of([alike]).mean == 2.0
    assert accept_length_of([split]).half > 1.0 and accept_length_of([split]).mean == 2.0
    many = [of_rounds(*([0, 2] for _ in range(100))), of_rounds(*([0, 0], [2, 2]) * 50)]
    assert [one.prompts for one in map(accept_length_of, ([many[0]], [many[1]], many))] == [100, 100, 200]
    assert accept_length_of(many[:1]).half == pytest.approx(0.0, abs=1e-9) and accept_length_of(many[1:]).half > 0.1
    assert accept_length_of([of_rounds([1, 1])]).half is None and accept_length_of([of_rounds()]) is None


def test_calibration_has_enough_rounds_and_is_bounded(make_arms):
    (arm,) = make_arms(chain={"draft": "EAGLE3", "steps": 2, "max_running": 2, "context_len": 64})
    assert num_calibration(arm, 45.0, 96) == 96 and num_calibration(arm, 1000.0, 1) == MIN_CALIBRATION
    assert num_calibration(arm, 5.0, 16) * 4 / 3 >= 200 and num_calibration(arm, 1.0, 2000) == MOST_CALIBRATION


def test_calibration_goes_on_until_the_accept_length_is_sure():
    """Four times the prompts halve the interval; one that is unknown does not grow."""
    assert num_more(AcceptLength(2.0, 64, 0.12), 64) == 192 and num_more(AcceptLength(2.0, 64, 0.06), 64) == 0
    assert num_more(AcceptLength(2.0, 64, 2.0), 64) == 192  # in steps of four times at most
    assert num_more(AcceptLength(2.0, 900, 0.12), 900) == MOST_CALIBRATION - 900
    assert num_more(AcceptLength(2.0, MOST_CALIBRATION, 0.12), MOST_CALIBRATION) == 0
    assert num_more(AcceptLength(2.0, 1, None), 16) == 0 and num_more(None, 16) == 0


def test_runs_are_joined_with_their_own_requests():
    one, other = of_rounds([1, 2], [0]), replace(of_rounds([3]), ids=("c2",))
    both = joined([Rounds.none(), one, other])
    assert both.ids == ("r0", "r1", "c2") and both.requests.tolist() == [0, 0, 1, 2]
    assert both.correct.tolist() == [1, 2, 0, 3]
    assert accept_length_of([both]).mean == pytest.approx(10 / 4) and accept_length_of([both]).prompts == 3


def test_calibration_has_the_lengths_of_the_workload_and_no_text_twice(make_arms, monkeypatch):
    """A second run, asked for by the spread of the first, has prompts of its own."""
    arms = make_arms(chain={"draft": "EAGLE3", "steps": 2, "max_running": 2, "context_len": 192})
    served = []

    def serve(arm, asked):
        served.append(asked)
        return replace(of_rounds(*[[0, 0, 2] for _ in asked]), ids=tuple(one.request.request_id for one in asked))

    more = iter([5, 0])
    monkeypatch.setattr(twin_run, "serve_calibration", serve)
    monkeypatch.setattr(twin_run, "num_more", lambda reached, count: next(more))
    scenario = scenario_with(default_scenario().model_dump(), {"workload.num_requests": 6})
    plan = TwinPlan(scenario, seconds=0.5)
    rounds = twin_run._calibrated(arms[0], arms, plan)
    first, second = ([one.request for one in asked] for asked in served)
    assert len(second) == 5 and len(rounds.ids) == len(first) + 5 == len(set(rounds.ids))
    own = [one.request for one in requests_of(scenario, arms[0], arms, 0, text=False)]
    for number, request in enumerate([*first, *second]):
        assert request.prompt.length == own[number % 6].prompt.length
        assert request.max_tokens == own[number % 6].max_tokens
    texts = [request.prompt.tokens[1:].tobytes() for request in [*first, *second]]
    work = [one.request.prompt.tokens[1:].tobytes() for one in requests_of(scenario, arms[0], arms, 0)]
    assert len({*texts, *work}) == len(texts) + len(work)


def test_near_the_knee_ttft_grows_faster_than_the_load(make_arms):
    """The same requests at a higher rate wait for rows; in an idle engine they do not."""
    (arm,) = make_arms(plain={"max_running": 1, "context_len": 64})
    steps = made_steps("NONE")
    cost = steps.cost(arm.spec, "profile")

    def ttft(gap_ns):
        load = twin_run.TwinLoad(
            "knee", tuple(replace(one, arrival_ns=i * gap_ns) for i, one in enumerate(asked(40))), None
        )
        runs = [
            metrics_of(simulate(arm.simulated_spec, cost, steps.host, FixedMeanAcceptance(1.0), at.asked))
            for at in (load, load.times(1.04))
        ]
        return sensitivity(runs[:1], runs[1:], 0.04), runs[0].summary()

    long_ns = 10**9
    idle, summary = ttft(long_ns)
    assert idle == pytest.approx(0.0, abs=0.01) and sensitivity([], (), 0.04) is None
    service_ns = int(summary["mean_e2el_ms"] * 1e6)
    assert ttft(service_ns)[0] > 3.0


def test_other_seeds_have_other_texts_and_the_same_lengths(make_arms):
    arms = make_arms(plain={"max_running": 2, "context_len": 192})
    scenario = scenario_with(default_scenario().model_dump(), {"workload.num_requests": 6})
    one, other = (requests_of(scenario, arms[0], arms, seed) for seed in (0, 1))
    assert [each.arrival_ns for each in one] == [each.arrival_ns for each in other]
    for mine, theirs in zip(one, other, strict=True):
        assert mine.request.prompt.length == theirs.request.prompt.length
        assert mine.request.max_tokens == theirs.request.max_tokens
        shifted = [mine.request.prompt.tokens[1:].tolist(), theirs.request.prompt.tokens[:-1].tolist()]
        assert shifted[0] != shifted[1] and mine.request.prompt.tokens.tolist() != theirs.request.prompt.tokens.tolist()


def test_each_repeat_of_a_load_has_texts_of_its_own(make_arms, monkeypatch):
    """So the range of the measured runs is that of texts, too."""
    arms = make_arms(plain={"max_running": 2, "context_len": 192})
    served = []

    def take_turns(timed, *_):
        served.extend(one.time(sample) for one in timed for sample in range(one.repeats))
        raise KeyboardInterrupt

    monkeypatch.setattr(twin_run, "ArmPace", lambda *_: None)
    monkeypatch.setattr(twin_run, "take_turns", take_turns)
    monkeypatch.setattr(TwinArm, "serve", lambda arm, asked, *_: [one.request.prompt.tokens.tobytes() for one in asked])
    plan = TwinPlan(default_scenario(), ("knee",), seconds=0.2, clock="cpu", seed=5)
    with pytest.raises(KeyboardInterrupt):
        list(run_twin(arms, made_steps("NONE"), plan))
    texts = [text for run, _ in served for text in run]
    assert len(served) == 3 and len(set(texts)) == len(texts) >= 18


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
        ("light",), seconds=0.2, repeats=2, draws=2, calibration_requests_per_s=80.0, clock="cpu",
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
    assert found[0].accept_lengths == {} and found[0].metrics["mean_tpot_ms"].replayed is None
    drafted = found[1].to_json()
    assert drafted["metrics"]["mean_tpot_ms"]["replayed_error"] is not None
    measured, forecast = drafted["accept_lengths"]["measured"], drafted["accept_lengths"]["forecast"]
    assert measured["prompts"] == 2 * found[1].requests and forecast["prompts"] >= MIN_CALIBRATION
    assert measured["mean"] == pytest.approx(drafted["metrics"]["accept_length"]["measured"], rel=0.05)


def test_a_profile_of_a_faster_machine_is_seen_in_its_pace(make_arms):
    (arm,) = make_arms(chain={"draft": "EAGLE3", "steps": 2, "max_running": 2, "context_len": 64})
    measured = measure_steps([arm], MeasuringPlan(2, rows=(1, 2), contexts=(4, 30), clock="cpu")).steps
    document = profile_document(Calibration("own", "a test", "a device", "target", steps=measured))
    steps = document["steps"]
    chain = steps["algorithms"]["EAGLE3"]["rounds"]["1"]
    for part in (*chain.values(), steps["algorithms"]["EAGLE3"]["rest"]):
        part["ns"] = (np.array(part["ns"]) / 10).tolist()
    faster = read_profile(document, "faster").steps.cost(arm.spec, "faster")
    assert 10 / 4 < ArmPace(arm, faster, "cpu").now() < 40


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


def test_acceptance_is_shared_by_equal_trees_and_by_chains_of_any_length(make_arms):
    head = {"draft": "EAGLE3", "algorithm": "EAGLE3"}
    tree = {**head, "steps": 3, "topk": 2, "num_draft_tokens": 6}
    arms = make_arms(tree=dict(tree), same=dict(tree), short={**head, "steps": 1}, long={**head, "steps": 3})
    of = [draft_of(arm) for arm in arms]
    assert of[0] == of[1] and of[2] == of[3] and of[0] != of[2]
