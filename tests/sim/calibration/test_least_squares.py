"""Regularised least squares: known truths are recovered, intervals hold them as often as they say, and what is
not told is said."""

import numpy as np
import pytest
from foredraft.sim.calibration.least_squares import (
    INTERVAL,
    Parameter,
    covariance_with,
    fit_parameters,
    left_out_errors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

PARAMETERS = (Parameter("base", "us", 500.0, 200.0), Parameter("row", "us", 20.0, 15.0))
ROWS = np.array([1, 2, 4, 8, 16, 32, 64, 128], dtype=float)


def line(x, rows=ROWS):
    return 1000.0 + x[0] + x[1] * rows


def noisy(truth, seed, noise=0.02, predict=line):
    exact = predict(truth)
    return exact * np.exp(noise * np.random.default_rng(seed).standard_normal(len(exact)))


@settings(max_examples=30)
@given(st.floats(100, 900), st.floats(0, 60))
def test_a_truth_without_noise_is_found(base, row):
    fit = fit_parameters(PARAMETERS, line, line(np.array([base, row])))
    assert fit.values == pytest.approx([base, row], abs=0.1 * 200)
    assert np.abs(fit.errors).max() < 0.015  # the pull of what was expected, two deviations away
    assert (fit.low <= fit.values).all() and (fit.values <= fit.high).all()


def test_intervals_hold_the_truth_as_often_as_they_say():
    held = []
    for seed in range(200):
        draws = np.random.default_rng(1000 + seed)
        truth = np.array([max(0.0, draws.normal(item.value, item.spread)) for item in PARAMETERS])
        fit = fit_parameters(PARAMETERS, line, noisy(truth, seed))
        held += [*((fit.low <= truth) & (truth <= fit.high))]
    assert INTERVAL - 0.06 < np.mean(held) < INTERVAL + 0.07


def test_a_model_that_is_no_line_is_fitted():
    """The greater of two times: host and device, as overlap scheduling has it."""

    def predict(x):
        return np.maximum(800.0 + x[0], 1000.0 + x[1] * ROWS)

    truth = np.array([700.0, 30.0])
    fit = fit_parameters(PARAMETERS, predict, noisy(truth, 3, 0.01, predict))
    assert fit.values == pytest.approx(truth, rel=0.08)


def test_bounds_are_kept():
    truth_below = 1000.0 - 300.0 + 20.0 * ROWS
    fit = fit_parameters(PARAMETERS, line, truth_below)
    assert fit.values[0] == 0.0 == fit.low[0]


def test_what_the_measurements_do_not_tell_is_said_and_more_of_them_would():
    ones = np.ones(4)

    def predict(x):
        return line(x, ones)

    fit = fit_parameters(PARAMETERS, predict, noisy(np.array([400.0, 25.0]), 1, 0.01, predict))
    assert fit.determined[0] > 0.5 > 0.1 > fit.determined[1]
    values, directions = fit.directions()
    assert values[0] > 1 > values[1]
    assert abs(directions[1][1]) > 0.9
    more = covariance_with(fit, np.array([[1.0, 128.0]]) / line(fit.values, np.array([[128.0]])), np.ones(1))
    assert 1 - np.sqrt(more[1, 1]) / PARAMETERS[1].spread > 0.7


def test_without_measurements_the_prior_stays():
    fit = fit_parameters(PARAMETERS, lambda x: np.empty(0), np.empty(0))
    assert fit.values.tolist() == [500.0, 20.0]
    assert fit.determined == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("linearised", [False, True])
def test_errors_of_left_out_groups(linearised):
    measured = noisy(np.array([600.0, 25.0]), 5)
    measured[4] *= 1.4  # a row that contradicts the others
    fit = fit_parameters(PARAMETERS, line, measured)
    errors, scores = left_out_errors(fit, range(len(ROWS)), linearised=linearised)
    assert np.abs(scores).argmax() == 4 and abs(scores[4]) > 4
    assert errors[4] == pytest.approx(1 / 1.4 - 1, abs=0.08)
    others = np.delete(np.arange(len(ROWS)), 4)
    assert np.abs(scores[others]).max() < 2
    exact = fit_parameters(PARAMETERS, lambda x: line(x)[others], measured[others]).values
    assert line(exact)[4] / measured[4] - 1 == pytest.approx(errors[4], abs=0.02)


def test_noisier_measurements_weigh_less():
    weights = np.where(ROWS == 128, 20.0, 1.0)
    measured = line(np.array([600.0, 20.0]))
    measured[-1] *= 1.5
    fit = fit_parameters(PARAMETERS, line, measured, weights)
    assert fit.values == pytest.approx([600.0, 20.0], rel=0.05)


def test_few_predictions_are_made():
    """A prediction may be a simulation."""
    calls = []

    def predict(x):
        calls.append(1)
        return line(x)

    fit_parameters(PARAMETERS, predict, noisy(np.array([300.0, 35.0]), 2))
    assert len(calls) <= 12
