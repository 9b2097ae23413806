"""The suite of simulated acceptance: what it compares ours with is right."""

import pytest
from foredraft.checks.acceptance import model
from foredraft.checks.acceptance.contract import ProcessConfig
from foredraft.checks.registry import suite_of

SUITE = suite_of("acceptance-process")


def test_rounds_walk_over_runs():
    runs = [2, 0, 5, 1, 0, 0, 3]
    assert model.walked(runs, 3, 3, 7) == [3, 2, 1] and model.walked(runs, 1, None, 7) == [2, 2, 1, 1, 2]
    assert model.walked(runs, 0, None, 3) == [1, 1, 1] and model.walked(runs, 5, None, 1) == [3]


def test_what_is_due_by_hand():
    plain = ProcessConfig(percent=(50, 80))
    assert model.reaches(plain, 3, 100) == pytest.approx(0.5 * 0.8 * 0.8)
    shifted = ProcessConfig(percent=(50,), drift_tenths=20)
    assert model.reaches(shifted, 1, 500) == pytest.approx(0.841345, abs=1e-6), (
        "one standard deviation above the threshold"
    )
    stretches = ProcessConfig(percent=(50,), stretch_len=4)
    assert model.reaches(stretches, 1, 0) == pytest.approx((0.066807 + 2 * 0.841345 + 5 * 0.5) / 8, abs=1e-6)


def test_how_runs_of_one_request_go_together():
    alike = ProcessConfig(percent=(50,), request_percent=100)
    assert model.both_reach(alike, 0, 900) == pytest.approx(0.5)
    field = ProcessConfig(percent=(50,), field_percent=100, correlation_len=8)
    assert model.correlation(field, 0, 0) == pytest.approx(1.0) and model.correlation(field, 0, 16) == 0.0
    assert model.both_reach(field, 0, 16) == pytest.approx(0.25, abs=1e-6)
    # Two halves of the plane: a quarter plus the arcsine of the correlation over a whole turn.
    half = ProcessConfig(percent=(50,), request_percent=50)
    assert model.both_reach(half, 0, 3) == pytest.approx(0.25 + 1 / 12, abs=1e-5)


def test_survival_in_a_small_tree():
    config = ProcessConfig(percent=(50,))
    assert model.tree_survival(config, 1, 3, 4, 0.6) == pytest.approx([0.5, 0.25, 0.125])
    assert model.tree_survival(config, 2, 1, 3, 0.6) == pytest.approx([0.5 + 0.5 * 0.6 * 0.5])
