"""The step controller's suite on a foreign controller and on wrong answers."""

import pytest
from foredraft.checks.adapters.step_controller import make_ema, make_goodput
from foredraft.core.errors import ConfigError
from foredraft.properties.conformance import check_step_controller
from foredraft.properties.harness.report import PropertiesBroken
from foredraft.properties.harness.trial import Violation
from foredraft.properties.step_controller.contract import StepControllerConfig
from foredraft.properties.step_controller.rule import DAMAGES, RuleTable, damages, read_table
from foredraft.properties.suites import suite_of

STEPS = suite_of("step-controller")
ZERO_ONE_THREE = RuleTable((1, 4), ((0, 1, 3), (1, 3)), update_interval=2, warmup_batches=0)
CONFIG = StepControllerConfig(ZERO_ONE_THREE.text(), captured=(2, 8))


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

    with pytest.raises(Violation, match=words) as caught:
        STEPS.component(make, make_ema.capabilities).execute(CONFIG, [])
    assert caught.value.id == "TYPE"


# -- what the suite found in ours --------------------------------------------------------------------------------------


def start(make, config=CONFIG):
    component = STEPS.component(make)
    return component.start(config, component.invariants)


def test_probes_go_on_after_many_that_failed():
    """Every probe is two reversals; doubled for each, the dwell once ended all probing for tens of
    thousands of rounds."""
    table = RuleTable((1,), ((0, 2),), update_interval=1, warmup_batches=1).text()
    config = StepControllerConfig(table, captured=(32,), token_ns=5_000)
    trial = start(make_goodput, config)
    assert trial.phase("useless", 4) and trial.phase("always-0", 4) and trial.offer(4)
    assert trial.moment.offered.drafts


# -- tables ------------------------------------------------------------------------------------------------------------


def test_every_damaged_table_is_one_that_ours_refuses():
    for how in DAMAGES:
        subject = make_ema(CONFIG)
        with pytest.raises(ConfigError):
            subject.reload(damages(ZERO_ONE_THREE)[how])
    assert len(set(damages(ZERO_ONE_THREE).values())) == len(DAMAGES)
