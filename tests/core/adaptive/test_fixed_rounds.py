"""A block's verify results told at once count as the same results told one by one."""

import numpy as np
import pytest
from foredraft.core.adaptive import InvalidObservation, fixed_controller
from foredraft.core.adaptive.controller import build_controller


@pytest.mark.parametrize("steps", [0, 3])
def test_a_fixed_policy_counts_a_block_as_its_rounds(steps):
    correct = np.random.default_rng(1).integers(0, steps + 1, size=(7, 5))
    at_once, one_by_one = fixed_controller(steps), fixed_controller(steps)
    at_once.on_verify_rounds(correct, 5, steps)
    for counts in correct:
        one_by_one.on_verify_complete(counts, 5, steps)
    assert at_once.metrics() == one_by_one.metrics()
    assert at_once.metrics().verify_calls == 7


def test_a_listening_policy_hears_every_round():
    correct = np.random.default_rng(2).integers(0, 4, size=(60, 5))
    at_once, one_by_one = build_controller("ema", initial_steps=3), build_controller("ema", initial_steps=3)
    at_once.on_verify_rounds(correct, 5, 3)
    for counts in correct:
        one_by_one.on_verify_complete(counts, 5, 3)
    assert at_once.snapshot() == one_by_one.snapshot()
    assert at_once.metrics() == one_by_one.metrics()


@pytest.mark.parametrize("bad", [4, -1])
def test_impossible_counts_are_refused(bad):
    with pytest.raises(InvalidObservation):
        fixed_controller(3).on_verify_rounds(np.array([[1, bad]]), 2, 3)
    with pytest.raises(InvalidObservation):
        fixed_controller(0).on_verify_rounds(np.array([[0, 1]]), 2, 0)
