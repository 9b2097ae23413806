"""Certificates: no policy changes its steps earlier than `rounds_to_next_decision` says, and a block
equals its rounds."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from foredraft.core.adaptive import AdaptiveController, CostTable, build_controller
from hypothesis import given
from hypothesis import strategies as st

TABLE = {
    "update_interval": 3,
    "warmup_batches": 4,
    "1": {"candidate_steps": [0, 1, 3, 7], "down_hysteresis": -0.25},
    "4": {"candidate_steps": [1, 3], "ema_alpha": 0.9, "min_dwell_batches": 8},
    "16": {"candidate_steps": [0, 2], "ema_alpha": 0.8, "up_hysteresis": 0.1},
}
COSTS = CostTable.from_function(
    lambda bs, steps, kv: 1000 + 60 * steps + 20 * bs * (steps + 1) + kv // 50, (0, 1, 2, 3, 7), (1, 4, 16, 64)
)
BATCH_SIZES = (1, 2, 4, 9, 16, 40)

# A history is a list of rounds: (batch size, acceptance of each row as a share, lateness of the feedback).
histories = st.lists(st.tuples(st.sampled_from(BATCH_SIZES), st.floats(0, 1), st.booleans()), max_size=60)
policies = st.sampled_from(["ema", "goodput", "fixed"])


def make(policy: str) -> AdaptiveController:
    return build_controller(policy, TABLE, cost_table=COSTS, initial_steps=3)


def accepted(share: float, bs: int, steps: int) -> np.ndarray:
    """Correct drafts of `bs` rows: the same share of the steps, rounded row by row."""
    return np.floor(share * steps + np.arange(bs) / bs).clip(0, steps).astype(np.int32)


def play(controller: AdaptiveController, history) -> list[int]:
    """Run the history; some feedback comes a round late. Returns the steps of each round."""
    steps_of_rounds = []
    late: list[tuple[np.ndarray, int, int]] = []
    for bs, share, is_late in history:
        steps = controller.activate_step_by_batch(bs, 300 * bs)
        steps_of_rounds.append(steps)
        late.append((accepted(share, bs, steps), bs, steps))
        if not is_late:
            for result in late:
                controller.on_verify_complete(*result)
            late.clear()
    return steps_of_rounds


@given(policies, histories, st.sampled_from(BATCH_SIZES), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_fewer_results_than_certified_never_change_the_steps(policy, history, bs, shares):
    controller = make(policy)
    play(controller, history)
    steps = controller.activate_step_by_batch(bs, 300 * bs)
    certified = controller.rounds_to_next_decision(bs)
    assert certified >= 1
    for index in range(min(certified - 1, 200)):
        controller.on_verify_complete(accepted(shares[index % len(shares)], bs, steps), bs, steps)
        assert controller.activate_step_by_batch(bs, 300 * bs) == steps
        assert controller.rounds_to_next_decision(bs) == max(certified - 1 - index, 1) or certified > 200


@pytest.mark.parametrize("policy", ["ema", "goodput"])
def test_certificates_are_not_empty_promises(policy):
    """Some switch happens exactly when it may: the certificate is as long as it can be."""
    controller = make(policy)
    tight = loose = 0
    for t in range(3000):
        share = (t // 400) % 2 * 0.95
        steps = controller.activate_step_by_batch(2, 600)
        certified = controller.rounds_to_next_decision(2)
        controller.on_verify_complete(accepted(share, 2, steps), 2, steps)
        if controller.activate_step_by_batch(2, 600) != steps:
            tight += certified == 1
            loose += certified > 1
    assert tight >= 3 and loose == 0
    assert build_controller(policy, TABLE, cost_table=COSTS).rounds_to_next_decision(2) > 1


@given(policies, histories, st.sampled_from(BATCH_SIZES), st.floats(0, 1))
def test_a_block_equals_its_rounds(policy, history, bs, share):
    """Activation once for a certified block, or before each of its rounds: the same choices afterwards."""
    single = make(policy)
    play(single, history)
    block = copy.deepcopy(single)
    steps = block.activate_step_by_batch(bs, 300 * bs)
    rounds = min(block.rounds_to_next_decision(bs), 50)
    for number in range(rounds):
        assert single.activate_step_by_batch(bs, (300 + number) * bs) == steps
        single.on_verify_complete(accepted(share, bs, steps), bs, steps)
        block.on_verify_complete(accepted(share, bs, steps), bs, steps)
    assert single.snapshot() == block.snapshot()
    for _ in range(30):
        after = block.activate_step_by_batch(bs, 400 * bs)
        assert single.activate_step_by_batch(bs, 400 * bs) == after
        for controller in (single, block):
            controller.on_verify_complete(accepted(share, bs, after), bs, after)
    assert single.snapshot() == block.snapshot()
