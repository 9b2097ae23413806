"""The step controller: graphs by key, late feedback, counters, reload (requirements A4, A7 and A9)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from foredraft.core.adaptive import AdaptiveController, AdaptiveSpeculativeParams, build_controller, fixed_controller
from foredraft.core.adaptive.controller import CONTROLLER_TRANSITIONS, ControllerState
from foredraft.core.adaptive.graphs import GraphKey, GraphTable, MissingGraph
from foredraft.core.adaptive.policy import InvalidGraphSizes
from foredraft.core.adaptive.slot import NEVER, InvalidObservation
from foredraft.core.contract.step import PLAIN_ROUND, RoundShape
from foredraft.core.errors import ConfigError

FAST = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0, "down_hysteresis": 0.0}
RANGES = {**FAST, "1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [0, 1]}}


def adaptive() -> AdaptiveController:
    return AdaptiveController(AdaptiveSpeculativeParams(3, RANGES))


def trees() -> AdaptiveController:
    small, large = ({"candidate_steps": [1], "num_draft_tokens": nodes} for nodes in (5, 3))
    return AdaptiveController(AdaptiveSpeculativeParams(1, {"1": small, "8": large}), topk=4)


def test_keys_are_those_that_routing_reaches_the_largest_batch_first():
    built = []
    adaptive().init_states([1, 4, 8, 16], built.extend)
    sizes = {0: (16, 8), 1: (16, 8, 4, 1), 3: (4, 1)}
    assert built == [GraphKey(RoundShape.chain(steps), size) for steps in sizes for size in sizes[steps]]
    built.clear()
    trees().init_states([4, 16], built.extend)
    assert built == [GraphKey(RoundShape(1, 4, 3), 16), GraphKey(RoundShape(1, 4, 5), 4)]
    adaptive().init_states(None, built.append)
    assert built[-1] == (), "no graphs, no keys"


def test_a_failed_build_leaves_the_routing():
    def fail(keys):
        raise RuntimeError("out of memory")

    controller = trees()
    with pytest.raises(RuntimeError, match="out of memory"):
        controller.init_states([16], fail)  # where 2 rows would run at 16
    assert controller.round_shape(1, 2).nodes == 5
    with pytest.raises(InvalidGraphSizes):
        controller.init_states([-1])
    controller.init_states([16])
    assert controller.round_shape(1, 2).nodes == 3


def test_a_table_is_built_whole_or_not_at_all():
    table = GraphTable()
    one, three = RoundShape.chain(1), RoundShape.chain(3)
    keys = [GraphKey(one, 8), GraphKey(one, 4), GraphKey(three, 4)]
    table.build(keys, str)
    assert table.find(one, 3) == str(keys[1]) and table.find(one, 5) == str(keys[0]) and table.find(three, 9) is None
    with pytest.raises(MissingGraph, match=r"steps=3, topk=1, nodes=4\), batch_size=8"):
        table.find(three, 5)
    with pytest.raises(ZeroDivisionError):
        table.build([*keys, GraphKey(PLAIN_ROUND, 16)], lambda key: 1 // key.shape.steps)
    assert table.find(one, 3) == str(keys[1])
    assert table.find(RoundShape(0, 4, 1), 16) is None


def test_feedback_shows_at_the_next_choice():
    controller = adaptive()
    controller.init_states([1, 8])
    assert controller.activate_step_by_batch(1) == 3
    controller.on_verify_complete(np.zeros(2, np.int32), 1, 3)
    assert controller.metrics().steps == 3
    assert controller.activate_step_by_batch(1) == 1 and controller.metrics().activations == 1


def test_every_transition_of_the_table_is_walked_and_no_other(monkeypatch):
    walked = set()

    class Watched(dict):
        def __init__(self, state, events):
            super().__init__(events)
            self.state = state

        def __getitem__(self, event):
            walked.add((self.state, event))
            return super().__getitem__(event)  # KeyError: an event that the table does not have

    watched = {state: Watched(state, events) for state, events in CONTROLLER_TRANSITIONS.items()}
    monkeypatch.setattr("foredraft.core.adaptive.controller.CONTROLLER_TRANSITIONS", watched)
    controller = adaptive()
    controller.on_verify_complete([1], 1, 1)
    assert controller.state is ControllerState.NEW
    assert [controller.activate_step_by_batch(1) for _ in range(2)] == [3, 3]
    assert controller.state is ControllerState.SWITCHED and controller.metrics().activations == 0
    controller.on_verify_complete([0], 1, 3)
    assert controller.state is ControllerState.STEADY
    controller.activate_step_by_batch(1)  # 1 step now, while the round before is in flight
    assert controller.state is ControllerState.SWITCHED and controller.metrics().activations == 1
    controller.on_verify_complete([0], 1, 3)
    assert controller.state is ControllerState.SWITCHED
    controller.draft_fewest(True)
    assert [controller.activate_step_by_batch(size) for size in (8, 1, 1)] == [0, 1, 1]
    controller.on_verify_rounds(np.zeros((1, 1), np.int32), 1, 1)
    assert controller.state is ControllerState.STEADY and controller.activate_step_by_batch(1) == 1
    controller.on_verify_complete([], 8, 0)
    controller.on_verify_complete([0], 1, 1)
    controller.on_verify_complete([0], 8, 0)
    assert controller.state is ControllerState.STEADY and controller.activate_step_by_batch(8) == 0
    assert controller.state is ControllerState.SWITCHED
    assert walked == {(state, event) for state, events in CONTROLLER_TRANSITIONS.items() for event in events}


def test_a_fixed_controller_hears_of_its_steps_block_by_block():
    controller = fixed_controller(2)
    controller.activate_step_by_batch(4)
    controller.on_verify_rounds(np.ones((3, 4), np.int32), 4, 2)
    assert controller.state is ControllerState.STEADY
    controller = fixed_controller(0)
    controller.activate_step_by_batch(4)
    controller.on_verify_rounds(np.zeros((3, 4), np.int32), 4, 0)
    assert controller.state is ControllerState.STEADY


def test_only_ranges_with_verified_drafts_have_an_average():
    controller = build_controller("ema", RANGES, initial_steps=3)
    assert controller.metrics().ema_accept_len == {}
    controller.on_verify_complete([], 1, 3)
    assert controller.metrics().ema_accept_len == {}
    controller.on_verify_complete([1], 8, 1)
    assert list(controller.metrics().ema_accept_len) == [8]


def test_fixed_controller():
    for steps in (0, 4):
        controller = fixed_controller(steps)
        assert controller.activate_step_by_batch(100, 5) == steps
        assert controller.candidates == (steps,)
        assert controller.max_steps == steps
        assert controller.round_shape(steps, 3) == RoundShape.chain(steps)
        assert controller.rounds_to_next_decision(1) == NEVER
    with pytest.raises(ConfigError):
        fixed_controller(-1)


def test_build_controller_names_its_policies():
    with pytest.raises(ConfigError, match="fixed, ema, goodput"):
        build_controller("magic")
    with pytest.raises(ConfigError, match="cost_table: is missing"):
        build_controller("goodput")
    assert build_controller("fixed").candidates == (3,)
    assert build_controller("ema").candidates == (1, 3, 7)


def test_metrics():
    controller = build_controller("ema", RANGES, initial_steps=3)
    empty = controller.metrics()
    assert (empty.steps, empty.accept_length, empty.accept_rate) == (None, 0.0, 0.0)
    controller.activate_step_by_batch(2)
    controller.on_verify_complete(np.array([3, 1], np.int32), 2, 3)
    controller.on_verify_complete([0, 0, 1], 9, 1)
    controller.on_verify_complete([0], 9, 0)
    metrics = controller.metrics()
    assert (metrics.steps, metrics.num_draft_tokens) == (3, 4)
    assert (metrics.verify_calls, metrics.verified_rows, metrics.correct_drafts) == (3, 6, 5)
    assert metrics.proposed_drafts == 2 * 3 + 3 * 1
    assert metrics.accept_length == 1 + 5 / 6
    assert metrics.accept_rate == 5 / 9
    assert metrics.correct_drafts_histogram == (3, 2, 0, 1)
    assert metrics.ema_accept_len == {1: 2.0, 8: 1 / 3}
    assert metrics.switches == 2  # a mean of a third sends range 8 to plain decoding, whose next result is a probe


def test_accept_rate_uses_the_nodes_of_the_round():
    controller = fixed_controller(2, topk=2, num_draft_tokens=6)
    controller.on_verify_complete([2], 1, 2)
    assert controller.metrics().accept_rate == 2 / 5
    with pytest.raises(InvalidObservation):
        controller.on_verify_complete([3], 1, 2)  # a tree is no deeper than its steps
    look_up = fixed_controller(2, num_draft_tokens=6, depth_limited=False)
    look_up.on_verify_complete([5], 1, 2)
    assert look_up.metrics().accept_rate == 1.0


class TestReload:
    def test_a_new_table_takes_effect_at_the_next_activation(self):
        controller = build_controller("ema", RANGES, initial_steps=3)
        controller.init_states([1, 8])
        assert controller.activate_step_by_batch(1) == 3
        controller.reload({"1": {"candidate_steps": [1]}, "8": {"candidate_steps": [0]}})
        assert controller.metrics().steps == 3
        assert controller.activate_step_by_batch(1) == 1
        assert controller.activate_step_by_batch(8) == 0

    @pytest.mark.parametrize(
        ("table", "words"),
        [
            ('{"1": {"candidate_steps": [1', "is not JSON"),
            ({"1": {"candidate_steps": []}}, "is empty"),
            ({"1": {"candidate_steps": [1, 2]}}, "2 steps with 3 draft tokens were not built"),
            ({"1": {"candidate_steps": [1, 3]}}, r"3 steps have no captured graph for sizes \[8\]"),
        ],
    )
    def test_a_bad_one_leaves_the_running_policy(self, table, words):
        controller = build_controller("ema", RANGES, initial_steps=3)
        controller.init_states([1, 8])
        controller.on_verify_complete([3], 1, 3)
        before = controller.snapshot(), controller.policy.config
        with pytest.raises(ConfigError, match=words):
            controller.reload(table)
        assert (controller.snapshot(), controller.policy.config) == before

    def test_what_was_left_out_may_come_back(self):
        """What counts is what was built and captured, not what the last table used of it."""
        controller = build_controller("ema", RANGES)
        controller.init_states([4, 8])
        controller.reload({**FAST, "1": {"candidate_steps": [1]}, "8": {"candidate_steps": [0]}})
        controller.reload(RANGES)
        assert controller.candidates == (0, 1, 3)
        with pytest.raises(ConfigError, match=r"3 steps have no captured graph for sizes \[8\]"):
            controller.reload({**FAST, "1": {"candidate_steps": [1, 3]}})

    def test_a_policy_without_a_table_says_so(self):
        with pytest.raises(ConfigError, match="fixed policy has no table"):
            fixed_controller(1).reload(RANGES)


def test_snapshots_are_plain_data():
    controller = build_controller("ema", RANGES)
    controller.activate_step_by_batch(1)
    assert json.loads(json.dumps(controller.snapshot()))["active_steps"] == 1
