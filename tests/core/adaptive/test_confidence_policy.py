"""The policy `confidence`: its curve, its choice of steps and budget, and what it remembers of rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from foredraft.core.acceptance.confidence import CONFIDENCE_BIAS, CONFIDENCE_SLOPE
from foredraft.core.acceptance.process import FixedMeanAcceptance, GaussianAcceptance
from foredraft.core.adaptive.controller import build_controller
from foredraft.core.adaptive.lengths.confidence import (
    FIRST_REST,
    ROUNDS_PER_LOOK,
    ROUNDS_TO_KNOW,
    AcceptanceCurve,
    ConfidencePolicy,
)
from foredraft.core.adaptive.lengths.pass_costs import PassCosts, costs_from_json
from foredraft.core.adaptive.lengths.survival import acceptance_of
from foredraft.core.contract.step import DecodeResult, DecodeStep, MultiStepEnd, RoundShape
from foredraft.core.errors import ConfigError

TABLE = {"1": {"candidate_steps": [0, 1, 3]}}
COSTS = PassCosts((0, 1, 3), (1, 64), ((0, 0), (10, 20), (30, 60)), (1, 2, 4, 8), (100, 100, 150, 200), (0, 0, 0), 4)
ROWS, EPOCHS = np.array([1, 2]), np.array([7, 8])


def policy_of(costs: PassCosts = COSTS) -> ConfidencePolicy:
    return ConfidencePolicy(TABLE, costs, None)


def taught(
    policy: ConfidencePolicy,
    confidence: list[list[float]],
    present: tuple[bool, ...] = (True, True),
    accepted: int = 0,
) -> None:
    """Give the policy the result of a round of two rows that verified all their drafts and accepted so many."""
    values = np.array([confidence], np.float32)
    steps = values.shape[2]
    step = DecodeStep(ROWS.astype(np.int32), EPOCHS, EPOCHS, EPOCHS, RoundShape.chain(steps), 1)
    nodes = np.full((1, 2), steps + 1, np.int32)
    ones, ended = np.ones((1, 2), np.int32), np.zeros(2, bool)
    end = MultiStepEnd.MAX_ROUNDS
    result = DecodeResult(1, ones * (1 + accepted), None, ended, end, row_nodes=nodes, confidence=values)
    policy.take(step, result, np.array(present))


def test_the_curve_finds_the_calibration_of_simulated_confidences():
    process = GaussianAcceptance((0.8, 0.7, 0.6), seed=5)
    curve, keys = AcceptanceCurve(3), np.arange(64, dtype=np.uint64) + np.uint64(99)
    for number in range(1500):
        where = np.full(64, number * 4)
        confidence = process.confidence(keys, where, 3)
        lens = np.minimum(process.longest_run(keys, where), 3) + 1
        curve.add(confidence, np.full(64, 4), lens)
    assert curve.num_updates == 15
    assert curve.slope == pytest.approx(CONFIDENCE_SLOPE, abs=0.05)
    assert curve.biases == pytest.approx([CONFIDENCE_BIAS] * 3, abs=0.1)


def test_confidences_follow_acceptance_by_the_stated_curve():
    process = GaussianAcceptance((0.7,), seed=1)
    keys = np.arange(20_000, dtype=np.uint64)
    confidence = process.confidence(keys, np.zeros(20_000, np.int64), 1)
    accepted = process.longest_run(keys, np.zeros(20_000, np.int64)) >= 1
    p = acceptance_of(confidence, CONFIDENCE_SLOPE, (CONFIDENCE_BIAS,))[:, 0]
    for low, high in itertools.pairwise((0.0, 0.4, 0.6, 0.75, 0.9, 1.0)):
        inside = (p >= low) & (p < high)
        assert accepted[inside].mean() == pytest.approx(p[inside].mean(), abs=0.04)
    assert (FixedMeanAcceptance(3.0).confidence(keys[:3], np.zeros(3), 2) == 0.5).all()


def test_labels_end_with_the_first_rejection_and_with_the_verified_drafts():
    curve = AcceptanceCurve(3)
    sure = np.full((3, 3), 0.9, np.float32)
    curve.add(sure, np.array([4, 2, 1]), np.array([2, 2, 1]))
    assert curve._labels.tolist() == [2, 1, 0]


def test_a_batch_without_confidences_verifies_all_it_may():
    policy = policy_of(replace(COSTS, verify_ns=(100, 100, 101, 102)))
    policy.look(ROWS, EPOCHS, 0)
    assert policy.steps_for(2, 0) == 3
    budget = policy.budget_for(RoundShape.chain(3))
    assert budget is not None and budget.drafts == 6


def test_the_budget_is_the_best_of_all():
    policy = policy_of()
    taught(policy, [[0.9, 0.8, 0.3], [0.6, 0.5, 0.1]])
    policy.look(ROWS, EPOCHS, 0)
    curve = policy.curve
    survival = np.cumprod(
        acceptance_of(np.array([[0.9, 0.8, 0.3], [0.6, 0.5, 0.1]], np.float32), curve.slope, curve.biases), axis=1
    )
    rates = {
        (steps, count): (2 + np.sort(survival[:, :steps].ravel())[::-1][:count].sum())
        / float(COSTS.draft_time(steps, 2) + COSTS.verify_times(np.array([2 + count]))[0])
        for steps in (0, 1, 3)
        for count in range(2 * steps + 1)
    }
    steps, count = max(rates, key=rates.__getitem__)
    assert policy.steps_for(2, 0) == steps
    budget = policy.budget_for(RoundShape.chain(steps))
    assert (budget.drafts if budget else 0) == count


def test_drafts_past_the_end_of_a_row_are_left_out():
    policy = policy_of(replace(COSTS, verify_ns=(100, 100, 101, 102)))
    taught(policy, [[0.99] * 3] * 2)
    for most, drafts in ((None, 6), (np.array([0, 2]), 2)):
        policy.look(ROWS, EPOCHS, 0, most)
        budget = policy.budget_for(RoundShape.chain(3))
        assert budget is not None and budget.drafts == drafts


def test_a_row_of_another_request_has_no_confidences():
    policy = policy_of()
    taught(policy, [[0.01] * 3] * 2)
    policy.look(ROWS, EPOCHS, 0)
    first = policy._survival(ROWS, EPOCHS)
    assert first.max() < 0.5
    assert policy._survival(ROWS, np.array([7, 9]))[1].tolist() == [1.0] * 3
    other = policy_of()
    taught(other, [[0.01] * 3] * 2, (True, False))  # the second request has left while the round ran
    assert other._survival(ROWS, EPOCHS)[1].tolist() == [1.0] * 3


def test_rows_without_probabilities_are_counted_and_certain():
    policy = policy_of()
    taught(policy, [[0.5] * 3, [0.5, np.nan, 0.5]])
    assert policy.num_invalid == 1 and policy.snapshot()["invalid"] == 1
    assert policy._survival(ROWS, EPOCHS)[1].tolist() == [1.0] * 3


def test_positions_that_were_not_drafted_are_measured_again():
    policy = policy_of(replace(COSTS, draft_ns=((0, 0), (10, 20), (9_000, 9_000))))
    for _ in range(ROUNDS_PER_LOOK - 1):
        taught(policy, [[0.9]] * 2)
        policy.look(ROWS, EPOCHS, 0)
        assert policy.steps_for(2, 0) < 3
    policy.look(ROWS, EPOCHS, 0)
    assert policy.steps_for(2, 0) == 3


def observed(policy: ConfidencePolicy, counts: list[int], rounds: int) -> None:
    """Give the policy rounds that verified all drafts, of so many rows with 0, 1, … of them accepted."""
    for _ in range(rounds):
        policy.observe(counts, 0.0, sum(counts), sum(counts), len(counts) - 1)


def resting(costs: PassCosts) -> ConfidencePolicy:
    """Return a policy that has seen enough of a budget's cost, with all drafts accepted, to choose."""
    policy = policy_of(replace(costs, budget_ns=50))
    while policy._is_new:
        policy.look(ROWS, EPOCHS, 0)
        assert policy.steps_for(2, 0) == 3, "the most steps are measured first"
        taught(policy, [[0.9] * 3] * 2, accepted=3)
    policy.look(ROWS, EPOCHS, 0)
    return policy


def test_rounds_that_verify_all_drafts_need_no_budget():
    policy = resting(replace(COSTS, verify_ns=(100, 100, 100, 100)))
    assert policy.budget_for(RoundShape.chain(3)) is None
    rests = []
    for _ in range(3):
        rests.append(policy.rounds_to_next_decision(2))
        observed(policy, [0, 0, 0, 2], rests[-1])
        budget = policy.budget_for(RoundShape.chain(3))
        assert budget is not None, "a round shows whether that is still right"
        taught(policy, [[0.9] * 3] * 2, accepted=3)
        policy.look(ROWS, EPOCHS, 0)
    assert rests == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]
    more = np.arange(1, 5)
    policy.look(more, more + 6, 0)
    assert policy.budget_for(RoundShape.chain(3)) is not None, "with more rows a budget may pay"


def test_steps_follow_what_rounds_without_a_budget_accept():
    policy = resting(replace(COSTS, verify_ns=(100, 100, 100, 100), draft_ns=((0, 0), (10, 10), (60, 60))))
    assert policy.steps_for(2, 0) == 3
    for _ in range(20):
        observed(policy, [0, 2, 0, 0], max(1, policy._rest))
        policy.look(ROWS, EPOCHS, 0)
        taught(policy, [[0.9] * policy.steps_for(2, 0)] * 2, accepted=1)
        policy.look(ROWS, EPOCHS, 0)
    assert policy.steps_for(2, 0) == 1


def test_verify_times_are_stairs_and_then_lines():
    costs = PassCosts((0,), (1,), ((0,),), (1, 4, 8, 16, 24), (100, 90, 200, 300, 400), (5,), 8)
    assert costs.verify_times(np.array([1, 2, 4, 5, 8, 9, 16, 20, 32])).tolist() == [
        100, 100, 100, 200, 200, 300, 300, 350, 500,
    ]  # fmt: skip
    assert costs_from_json(costs.to_json(), "a log") == costs


def test_graphs_that_count_rows_have_stairs_for_each_number_of_steps():
    costs = replace(COSTS, captured_rows=(1, 2, 4))
    assert costs.padded(1, np.array([1, 2, 3, 5, 8, 9])).tolist() == [2, 2, 4, 8, 8, 9]
    assert costs.padded(3, np.array([1, 5, 9, 16, 17])).tolist() == [4, 8, 16, 16, 17]
    assert COSTS.padded(3, np.array([5])).tolist() == [5]
    assert costs_from_json(costs.to_json(), "a log") == costs


def test_a_token_beside_prompts_costs_what_it_does_over_half_of_all_sizes():
    """The last two sizes may be steps of one stair, whose slope says nothing."""
    costs = PassCosts((0,), (1,), ((0,),), (1, 8, 16, 30, 32), (100, 150, 200, 360, 360), (5,), 32)
    assert costs.eager_times(np.array([0, 16, 32])).tolist() == [40, 200, 360]


def test_rows_near_their_end_do_not_keep_the_policy_from_choosing():
    """With `verify = remaining` some row of nearly every round has fewer nodes than the shape."""
    policy = policy_of(replace(COSTS, budget_ns=50))
    step = DecodeStep(ROWS.astype(np.int32), EPOCHS, EPOCHS, EPOCHS, RoundShape.chain(3), 1)
    nodes = np.array([4, 2], np.int32)
    lens, ended, values = np.array([[4, 1]], np.int32), np.zeros(2, bool), np.full((1, 2, 3), 0.9, np.float32)
    end = MultiStepEnd.MAX_ROUNDS
    result = DecodeResult(1, lens, None, ended, end, row_nodes=nodes[None], confidence=values)
    for _ in range(ROUNDS_TO_KNOW):
        policy.look(ROWS, EPOCHS, 0, nodes - 1)
        policy.take(replace(step, row_nodes=nodes), result, np.ones(2, bool))
    assert not policy._is_new
    assert policy._whole._accepted[1] == policy._whole._rows[1], "rows that may not verify all do not count"
    policy.take(replace(step, row_nodes=np.array([4, 4], np.int32)), result, np.ones(2, bool))
    assert policy._whole._deepest[1] == ROUNDS_TO_KNOW, "a round whose budget left drafts out does not count"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("captured_rows", [4, 4], "captured_rows.*ascending"),
        ("tokens", [4, 1], "tokens.*ascending"),
        ("verify_ns", [1], "verify_ns.*4 integers"),
        ("draft_ns", [], "draft_ns.*1 rows"),
        ("kv_token_ps", [-1], "kv_token_ps"),
        ("captured_tokens", "8", "captured_tokens"),
    ],
)
def test_costs_that_contradict_themselves_are_refused(key: str, value: object, message: str):
    costs = PassCosts((0,), (1,), ((0,),), (1, 4, 8, 16), (100, 90, 200, 300), (5,), 8)
    with pytest.raises(ConfigError, match=message):
        PassCosts.from_json(costs.to_json() | {key: value}, "a file")


def test_what_has_no_confidences_is_refused():
    with pytest.raises(ConfigError, match="chains that a model drafts"):
        build_controller("confidence", TABLE, cost_table=COSTS, depth_limited=False)
    with pytest.raises(ConfigError, match="times of passes"):
        build_controller("confidence", TABLE)
    with pytest.raises(ConfigError, match="missing"):
        build_controller("confidence", {"1": {"candidate_steps": [5]}}, cost_table=COSTS)
