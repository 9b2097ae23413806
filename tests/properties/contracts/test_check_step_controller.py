"""The step controller's suite on our policies, on a foreign controller and on wrong answers; and its own inputs."""

import json
from dataclasses import replace

import pytest
from foretoken.checks.adapters.step_controller import make_ema, make_fixed, make_goodput
from foretoken.core.adaptive import load_adaptive_config
from foretoken.core.errors import ConfigError
from foretoken.properties.conformance import StepControllerConformance, check, check_step_controller
from foretoken.properties.harness.report import PropertiesBroken
from foretoken.properties.harness.swarm import Swarm
from foretoken.properties.harness.trial import Violation
from foretoken.properties.step_controller.contract import StepsConfig
from foretoken.properties.step_controller.model import BuildFailed, RecordingBuilder
from foretoken.properties.step_controller.processes import CONSTANT, DEPTH, PROCESSES, correct_drafts, longest_runs
from foretoken.properties.step_controller.table import DAMAGES, Table, damages, read_table, reloaded
from foretoken.properties.step_controller.trial import StepControllerTrial, looked_at
from foretoken.properties.suites import suite_of

STEPS = suite_of("step-controller")
ZERO_ONE_THREE = Table((1, 4), ((0, 1, 3), (1, 3)), update_interval=2, warmup_batches=0)
CONFIG = StepsConfig(ZERO_ONE_THREE.text(), captured=(2, 8))


@pytest.mark.parametrize(
    ("make", "operations"),
    [(make_fixed, 4_000), (make_ema, 2_500), (make_goodput, 300)],
    ids=("fixed", "ema", "goodput"),
)
def test_ours_hold(make, operations):
    report = check(STEPS, make, budget=operations)
    assert not report.failures, report.text()
    assert make is make_goodput or report.ok, report.text()
    assert all(report.evaluations[id] for id in report.evaluations if id != "STEPS-06"), report.text()


class Additive:
    """A foreign controller: from time to time a candidate more, or one less where nothing was accepted."""

    def __init__(self, config):
        self.table, self.captured = read_table(config.table), config.captured
        self.at = [0] * len(self.table.bounds)
        self.results = [0] * len(self.table.bounds)

    def steps_for(self, batch_size, kv_tokens):
        where = self.table.range_of(batch_size, self.captured)
        return self.table.candidates[where][self.at[where]]

    def observe(self, correct_drafts, batch_size, executed_steps):
        if not correct_drafts:
            return True
        if not all(0 <= correct <= executed_steps for correct in correct_drafts):
            return False
        where = self.table.range_of(batch_size, self.captured)
        members = self.table.candidates[where]
        self.results[where] += 1
        period = 20 * self.table.update_interval + 2_000 * (self.table.min_dwell_batches > 0)
        if self.results[where] % period == 0:
            worse = executed_steps and not any(correct_drafts)
            self.at[where] = max(self.at[where] - 1, 0) if worse else min(self.at[where] + 1, len(members) - 1)
        return True


def test_a_foreign_controller_holds():
    report = check_step_controller(Additive, capabilities=(), budget=3_000)
    assert report.ok, report.text()
    assert "STEPS-13" in report.skipped and report.evaluations["STEPS-01"] > 1_000


def test_a_failure_tells_what_was_chosen_for_whom():
    class OneTooMany(Additive):
        def steps_for(self, batch_size, kv_tokens):
            return super().steps_for(batch_size, kv_tokens) + (batch_size > 4)

    with pytest.raises(PropertiesBroken, match="STEPS-01") as caught:
        check_step_controller(OneTooMany, capabilities=("adaptive",), budget=3_000)
    (failure,) = caught.value.report.failures
    assert "rows" in failure.finding.was and "one of (" in failure.finding.should and len(failure.case.operations) <= 1


@pytest.mark.parametrize(
    ("method", "answer", "words"),
    [
        ("steps_for", 1.0, "the steps for|steps_for"),
        ("state", {"x": object()}, "numbers, strings, None"),
        ("counted", (1, 2, 3), "four numbers"),
        ("average", "1", "a number"),
    ],
)
def test_an_answer_of_another_type_is_reported_as_that(method, answer, words):
    def make(config):
        subject = make_ema(config)
        setattr(subject, method, lambda *arguments: answer)
        return subject

    capabilities = make_ema.capabilities
    with pytest.raises(Violation, match=words) as caught:
        STEPS.execute(make, CONFIG, capabilities, STEPS.invariants(capabilities), [])
    assert caught.value.id == "TYPE"


# -- what the suite found in ours ---------------------------------------------------------------------------------------


def start(make, config=CONFIG):
    return STEPS.start(make, config, make.capabilities, STEPS.invariants(make.capabilities))


def test_probes_go_on_after_many_that_failed():
    """Every probe is two reversals; doubled for each, the dwell once ended all probing for tens of thousands of rounds."""
    table = Table((1,), ((0, 2),), update_interval=1, warmup_batches=1).text()
    config = StepsConfig(table, captured=(32,), token_ns=5_000)
    trial = start(make_goodput, config)
    assert trial.phase("useless", 4) and trial.phase("always-0", 4) and trial.offer(4)
    assert trial.moment.offered.drafts


# -- the world around a controller --------------------------------------------------------------------------------------


def test_results_come_late_and_in_part():
    trial = start(make_ema)
    assert trial.round(3, (1, 0)) and trial.round(5, (9,)) and not trial.round(1, (1,)), "two are in flight"
    assert trial.deliver(1) and trial.deliver(64) and not trial.in_flight
    assert trial.subject.counted()[:2] == (1, 2), "the second result has lost all its rows"


def test_what_makes_no_sense_is_left_out():
    trial = start(make_ema)
    assert not trial.deliver(0) and not trial.round(0, (1,)) and not trial.repeat(1, (1,), 0)
    assert not trial.phase("odd", 1) and not trial.offer(4) and not trial.garbage(1, "odd")
    assert not trial.reload(0, 0) and not trial.reload_broken("odd")
    assert not trial.observe(1, 99, (1,)) and not trial.observe(1, 1, ())
    assert trial.num_operations == 0


def test_graphs_are_found_after_a_build_that_failed_and_one_that_did_not():
    trial = start(make_ema, replace(CONFIG, fail_at=3))
    assert trial.repeat(1, (0,), 30) and trial.repeat(5, (3,), 5)
    assert trial.build.num_builds == 3 + 5 and set(trial.moment.after.graphs) > {None}


def test_the_builder_fails_when_told_to():
    build = RecordingBuilder()
    build.builds_to_failure = 2
    graph = build(1, 2, 4)
    with pytest.raises(BuildFailed, match="3 steps for 8 rows"):
        build(3, 4, 8)
    assert build.built == {(1, 2, 4): graph} and build(1, 2, 4) != graph


# -- tables -------------------------------------------------------------------------------------------------------------


def test_a_table_survives_its_text_and_is_what_ours_reads():
    assert read_table(ZERO_ONE_THREE.text()) == ZERO_ONE_THREE
    ours = load_adaptive_config(CONFIG.table)
    assert ours.bounds == ZERO_ONE_THREE.bounds and ours.candidate_steps == ZERO_ONE_THREE.union
    assert [ZERO_ONE_THREE.range_of(size, (2, 8)) for size in (1, 2, 3, 8, 9)] == [0, 0, 1, 1, 1]
    assert [ZERO_ONE_THREE.range_of(size, ()) for size in (1, 3, 4)] == [0, 0, 1]
    assert looked_at(CONFIG) == (1, 2, 3, 4, 8, 9)


def test_every_damaged_table_is_one_that_ours_refuses():
    for how in DAMAGES:
        subject = make_ema(CONFIG)
        with pytest.raises(ConfigError):
            subject.reload(damages(ZERO_ONE_THREE)[how])
    assert len(set(damages(ZERO_ONE_THREE).values())) == len(DAMAGES)


def test_a_reloaded_table_has_candidates_of_the_first():
    for dropped in range(-1, 3):
        table = reloaded(ZERO_ONE_THREE, dropped, 5)
        assert table.update_interval == 5 and table.bounds == ZERO_ONE_THREE.bounds
        pairs = zip(table.candidates, ZERO_ONE_THREE.candidates, strict=True)
        assert all(set(new) <= set(old) and len(new) == len(old) - (dropped >= 0) for new, old in pairs)


def test_a_twin_has_more_acceptance_or_dearer_rounds():
    twin = StepControllerTrial.twin_config
    kind = "with more acceptance, or dearer verification"
    assert twin("again", CONFIG) == CONFIG and twin(kind, CONFIG) == replace(CONFIG, lift=1)
    assert twin(kind, replace(CONFIG, varied="cost")).token_ns == 4 * CONFIG.token_ns


def test_configurations_cover_what_they_should():
    swarm = Swarm(STEPS, make_goodput, make_goodput.capabilities, seed=2)
    configs = [swarm.drawn(number)[0] for number in range(200)]
    tables = [read_table(config.table) for config in configs]
    assert {len(table.bounds) for table in tables} == {1, 2, 3}
    assert {config.varied for config in configs} == {"acceptance", "cost"}
    assert any(not config.captured for config in configs) and any(config.fail_at for config in configs)
    assert all(json.loads(config.table) for config in configs)


# -- acceptance ---------------------------------------------------------------------------------------------------------


def test_processes_are_what_they_are_called():
    for process in PROCESSES:
        runs = longest_runs(process, 8, 2_000, 0)
        assert runs.shape == (2_000, 8) and runs.min() >= 0 and runs.max() <= DEPTH
        assert (longest_runs(process, 8, 2_000, 1) >= runs).all()
        assert (correct_drafts(process, 8, 2_000, 0, 3) <= 3).all()
        if process in CONSTANT:
            assert (runs == runs[0]).all()
    assert (longest_runs("chat", 8, 2_000, 0) >= 1).mean() == pytest.approx(0.605, abs=0.02)
    means = [longest_runs(process, 8, 2_000, 0).mean() for process in ("useless", "poor", "chat", "code", "excellent")]
    assert means == sorted(means) and means[0] == 0


class TestOurs(StepControllerConformance):
    capabilities = make_fixed.capabilities
    budget = 2_000

    def make(self, config):
        return make_fixed(config)
