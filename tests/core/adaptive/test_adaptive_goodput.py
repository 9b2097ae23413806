"""The goodput policy: its estimate, its choices, and what both are worth in a closed loop (A8, A11, STEPS-04 … 08)."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from foredraft.core.acceptance.tree import tree_survival
from foredraft.core.adaptive import CostTable, GoodputPolicy, build_controller
from foredraft.core.adaptive.acceptance_estimate import AcceptanceEstimate, AcceptLengths
from foredraft.core.adaptive.cost_table import UnknownStepCost
from foredraft.core.adaptive.policy import (
    GATE_TRANSITIONS,
    SWITCHES_PER_WINDOW,
    WINDOW_ROUNDS,
    GateEvent,
    GateState,
    SwitchGate,
)
from foredraft.core.adaptive.slot import NEVER
from foredraft.core.contract.step import PLAIN_ROUND, RoundShape
from foredraft.core.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st

CANDIDATES = (0, 1, 2, 3, 5, 7)
DEPTH = 8


def round_ns(batch_size: int, steps: int, kv_tokens: int) -> int:
    """The published fit of a round on one H100 (arXiv 2601.11580), with a draft of 0.7 ms per step."""
    return int(5.886e6 + 21_010 * batch_size * (steps + 1) + 39.3 * kv_tokens + 0.7e6 * steps + 1.2e6)


COSTS = CostTable.from_function(round_ns, CANDIDATES, (1, 2, 4, 8, 16, 32, 64, 128, 256))
COSTS_OF_SOME = CostTable.from_function(round_ns, (0, 1, 3, 7), (1, 4, 16, 32))

PROCESSES = {
    "chat": (0.605, 0.596, 0.647, 0.695, 0.729),
    "code": (0.608, 0.641, 0.692, 0.749, 0.769),
    "look-up": (0.305, 0.9),
    "poor": (0.15, 0.2),
    "useless": (0.0,),
    "shallow": (0.95, 0.1),
    "excellent": (0.9,),
}


def longest_runs(process: str, batch_size: int, rounds: int, seed: int, spread: float = 0.5) -> np.ndarray:
    """[rounds, batch_size] acceptable draft tokens; requests of 100 rounds differ by `spread` in the log odds."""
    rng = np.random.default_rng(seed)
    given_p = PROCESSES[process]
    p = np.clip(np.array([given_p[min(j, len(given_p) - 1)] for j in range(DEPTH)]), 1e-9, 1 - 1e-9)
    request = (np.arange(rounds)[:, None] + rng.integers(0, 100, batch_size)) // 100
    effect = np.take_along_axis(rng.normal(0, spread, (rounds // 100 + 2, batch_size)), request, 0)
    conditional = 1 / (1 + np.exp(-(np.log(p / (1 - p)) + effect[..., None])))
    return np.cumprod(rng.random((rounds, batch_size, DEPTH)) < conditional, axis=2).sum(axis=2).astype(np.int32)


def closed_loop(controller, runs: np.ndarray, kv_per_row: int = 500, late: int = 0) -> tuple[float, list[int]]:
    """Tokens per ns, and the steps of each round; feedback comes `late` rounds late."""
    rounds, batch_size = runs.shape
    tokens = time_ns = 0
    waiting: list[tuple[np.ndarray, int]] = []
    history = []
    for t in range(rounds):
        steps = controller.activate_step_by_batch(batch_size, kv_per_row * batch_size)
        history.append(steps)
        correct = np.minimum(runs[t], steps)
        tokens += batch_size + int(correct.sum())
        time_ns += round_ns(batch_size, steps, kv_per_row * batch_size)
        waiting.append((correct, steps))
        if len(waiting) > late:
            controller.on_verify_complete(waiting[0][0], batch_size, waiting[0][1])
            del waiting[0]
    return tokens / time_ns, history


def best_fixed(runs: np.ndarray, candidates=CANDIDATES, kv_per_row: int = 500) -> float:
    rounds, batch_size = runs.shape
    return max(
        (batch_size * rounds + int(np.minimum(runs, steps).sum()))
        / (rounds * round_ns(batch_size, steps, kv_per_row * batch_size))
        for steps in candidates
    )


def make(candidates=CANDIDATES, initial=None, **knobs):
    return build_controller(
        "goodput", {**knobs, "1": {"candidate_steps": list(candidates)}}, cost_table=COSTS, initial_steps=initial
    )


def switches(history: list[int]) -> int:
    return sum(a != b for a, b in itertools.pairwise(history))


def test_rows_that_pad_a_batch_have_no_kv():
    """Four rows of 20,000 tokens in a graph of 32: the KV of 32 would hide what three draft steps cost."""
    controller = make((0, 3), warmup_batches=0, update_interval=1)
    controller.policy.set_cuda_graph_bs((32,))
    runs = longest_runs("poor", 4, 3000, seed=4)
    rate, history = closed_loop(controller, runs, kv_per_row=20_000)
    assert history[-1] == 0 and history.count(0) > 2000
    assert rate > 0.98 * best_fixed(runs, (0, 3), kv_per_row=20_000)


def test_a_longer_chain_is_expected_to_yield_no_less():
    """Also where acceptance was poor when it was last used, and a shorter one has been used since."""
    estimate = AcceptLengths(list(map(RoundShape.chain, (2, 5, 7))))
    for now in range(1, 40):
        estimate.add(RoundShape.chain(5), [60, 3, 1, 0, 0, 0])
        estimate.fold(now, 1)
    for now in range(40, 80):
        estimate.add(RoundShape.chain(2), [40, 14, 10])
        estimate.fold(now, 1)
    of_two, of_five, of_seven = (estimate.expected(RoundShape.chain(steps)) for steps in (2, 5, 7))
    assert 1 < of_two <= of_five <= of_seven
    assert of_two == pytest.approx(1 + 24 / 64 + 10 / 64, rel=0.2)


def test_zero_is_not_absorbing_and_probes_are_bounded():
    controller = make(initial=0)
    rounds = 9000
    rate, history = closed_loop(controller, longest_runs("useless", 8, rounds, seed=2))
    assert history[-1] == 0
    assert 1 <= controller.policy.probes.num_begun <= 5
    assert rate > 0.99 * 8 / round_ns(8, 0, 4000)  # what the probes cost
    history = closed_loop(controller, longest_runs("excellent", 8, 6000, seed=2))[1]
    first = next(t for t, steps in enumerate(history) if steps > 0)
    assert first < 4500 and history[-1] == 7


def test_a_probe_is_not_charged_with_the_rounds_of_other_batch_sizes():
    """The probing batch size goes away; others run on with some steps for hundreds of rounds, and
    lose nothing by it."""
    controller = build_controller(
        "goodput", {"1": {"candidate_steps": [0, 7]}, "16": {"candidate_steps": [1, 3]}}, cost_table=COSTS_OF_SOME
    )
    policy = controller.policy
    useless = longest_runs("useless", 4, 700, seed=2)
    t = 0
    while policy.probes.current is None:
        closed_loop(controller, useless[t : t + 1])
        t += 1
    closed_loop(controller, longest_runs("useless", 17, 600, seed=2))
    assert policy.probes.current is None or policy.probes.current.cell.batch_size != 4
    assert policy.probes.next_round - policy._round <= 4096


def test_no_wait_for_a_probe_is_longer_than_a_window():
    """Where seven steps take three times as long, a probe of one row is dear;
    without a bound it costs tens of thousands of rounds."""
    dear = CostTable.from_function(lambda bs, steps, kv: 7_000_000 + 2_000_000 * steps, (0, 7), (1, 4))
    controller = build_controller("goodput", {"1": {"candidate_steps": [0, 7]}}, cost_table=dear)
    policy, waits = controller.policy, []
    for seed in range(3):
        for run in longest_runs("poor", 1, 3000, seed=seed):
            steps = controller.activate_step_by_batch(1, 0)
            controller.on_verify_complete(np.minimum(run, steps), 1, steps)
            waits.append(policy.probes.next_round - policy._round)
    assert policy.probes.num_begun >= 1 and max(waits) <= WINDOW_ROUNDS


def test_zero_alone_is_absorbing():
    controller = make((0,))
    assert set(closed_loop(controller, longest_runs("excellent", 2, 300, seed=1))[1]) == {0}
    assert controller.rounds_to_next_decision(2) == NEVER


def test_a_change_of_acceptance_is_followed():
    controller = make()
    for process, deepest in (("excellent", 7), ("shallow", 1), ("excellent", 7)):
        runs = longest_runs(process, 32, 1500, seed=9)
        rate, history = closed_loop(controller, runs)
        assert history[-1] == deepest
        assert rate >= 0.95 * best_fixed(runs)
    assert 2 <= controller.policy.estimate.changes <= 4


def test_another_shape_notices_a_change():
    """Rounds of one step accepted nothing; the first rounds of two steps accept, as those before would not have."""
    for accepts, expected in ((0.6, True), (0.0, False)):
        estimate = AcceptLengths([RoundShape.chain(1), RoundShape.chain(2)])
        for now in range(1, 101):
            estimate.add(RoundShape.chain(1), [16, 0])
            assert not estimate.fold(now, 1)
        found = []
        for now in range(101, 117):
            some = round(4 * accepts)
            estimate.add(RoundShape.chain(2), [4 - some, some, 0])
            found.append(estimate.fold(now, 1))
        assert any(found) is expected
        assert (estimate.probabilities[0] > 0.2) is expected


def test_drafts_return_after_a_batch_size_at_which_they_were_useless():
    table = {"1": {"candidate_steps": [0, 2]}, "16": {"candidate_steps": [1]}}
    controller = build_controller("goodput", table, cost_table=COSTS)
    closed_loop(controller, np.zeros((4000, 16), np.int64))
    _, history = closed_loop(controller, longest_runs("chat", 4, 6000, seed=1))
    assert history[-1] == 2 and history.count(2) > 4000, history.count(2)


def test_a_restless_input_is_not_followed_at_every_turn():
    runs = np.concatenate([longest_runs(("poor", "excellent")[t % 2], 32, 100, seed=t) for t in range(30)])
    assert switches(closed_loop(make(), runs)[1]) <= 25  # there are 29 changes


def test_warm_up_keeps_the_initial_steps():
    history = closed_loop(make(initial=2, warmup_batches=40), longest_runs("useless", 4, 60, seed=1))[1]
    assert set(history[:40]) == {2} and history[-1] != 2


def test_captured_sizes_make_the_cells():
    controller = make(initial=3)
    controller.init_states([1, 64])
    closed_loop(controller, longest_runs("chat", 3, 200, seed=1))
    assert list(controller.snapshot()["cells"]) == ["0:64"]


def test_construction_is_checked():
    with pytest.raises(UnknownStepCost, match="no cost for 4 steps"):
        GoodputPolicy({"1": {"candidate_steps": [0, 4]}}, COSTS)
    with pytest.raises(ConfigError):
        GoodputPolicy({"1": {"candidate_steps": []}}, COSTS)


# --- the model ---
CHAINS = AcceptLengths([RoundShape.chain(steps) for steps in CANDIDATES])


def test_expected_accept_lengths_of_chains():
    assert CHAINS.expected(PLAIN_ROUND, [0.5] * 7) == 1
    assert CHAINS.expected(RoundShape.chain(2), [0.5, 0.5, 0, 0, 0, 0, 0]) == 1.75


# --- trees ---

TREES = {1: 5, 2: 16, 3: 16, 5: 16, 7: 16}


def tree_runs(first_choice: tuple[float, ...], rank_ratio: float, topk: int, nodes: dict, batch_size: int, rounds: int):
    """For each step count int [rounds, batch_size]: how deep the accepted path of its own tree goes;
    a toy of independent rounds."""
    runs = {0: np.zeros((rounds, batch_size), np.int32)}
    quality = np.random.default_rng(4).random((rounds, batch_size))
    for steps, count in nodes.items():
        survival = tree_survival(
            lambda depth: first_choice[min(depth, len(first_choice)) - 1], RoundShape(steps, topk, count), rank_ratio
        )
        runs[steps] = (quality[..., None] < survival).sum(axis=2).astype(np.int32)
    return runs


@pytest.mark.fast(  # every choice, and in `make check` every pair of choices
    *("32-5 nodes-steady-0.6", "4-5 nodes-poor-1.0", "32-own nodes-falling-0.0"),
    ci=(
        *("4-own nodes-steady-0.0", "32-own nodes-steady-1.0", "32-5 nodes-poor-0.0", "4-own nodes-poor-0.6"),
        *("4-5 nodes-falling-0.6", "4-5 nodes-falling-1.0", "4-5 nodes-steady-0.0"),
    ),
)
@pytest.mark.parametrize("rank_ratio", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "first_choice", [(0.6, 0.65, 0.7), (0.35, 0.3), (0.85, 0.2)], ids=["steady", "poor", "falling"]
)
@pytest.mark.parametrize("nodes", [TREES, dict.fromkeys(TREES, 5)], ids=["own nodes", "5 nodes"])
@pytest.mark.parametrize("batch_size", [4, 32])
def test_trees_reach_what_the_best_fixed_tree_does(rank_ratio, first_choice, nodes, batch_size):
    """STEPS-08 on trees, whatever the acceptance by rank.
    A deep tree of few nodes accepts less at every depth than a shallow one."""
    rounds, kv = 4000, 500 * batch_size
    runs = tree_runs(first_choice, rank_ratio, 4, nodes, batch_size, rounds)

    def tree_ns(size: int, steps: int, kv_tokens: int) -> int:
        return int(5.9e6 + 60_000 * size * (nodes[steps] if steps else 1) + 39.3 * kv_tokens + 0.7e6 * steps)

    costs = CostTable.from_function(tree_ns, CANDIDATES, (1, 2, 4, 8, 16, 32))
    controller = build_controller(
        "goodput", {"1": {"candidate_steps": list(CANDIDATES)}}, cost_table=costs, topk=4, num_draft_tokens=nodes
    )
    rates = {
        steps: (batch_size + run[rounds // 2 :].sum(axis=1).mean()) / tree_ns(batch_size, steps, kv)
        for steps, run in runs.items()
    }
    tokens = time_ns = 0
    for t in range(rounds):
        steps = controller.activate_step_by_batch(batch_size, kv)
        correct = runs[steps][t]
        if t >= rounds // 2:
            tokens += batch_size + int(correct.sum())
            time_ns += tree_ns(batch_size, steps, kv)
        controller.on_verify_complete(correct, batch_size, steps)
    assert tokens / time_ns >= 0.97 * max(rates.values())


def test_what_one_tree_shows_is_foretold_for_the_others():
    """Told of trees of 7 steps alone, with acceptance by the assumed ranks, the model knows those of 1 and
    3 steps exactly."""
    first_choice, topk = (0.7, 0.6, 0.5), 4
    lengths = AcceptLengths([RoundShape(steps, topk, nodes) for steps, nodes in TREES.items()])
    runs = tree_runs(first_choice, 0.6, topk, TREES, 64, 400)
    for t in range(400):
        lengths.add(RoundShape(7, topk, 16), np.bincount(runs[7][t], minlength=8).tolist())
        lengths.fold(t + 1, 1)
    for steps in (1, 2, 3, 5, 7):
        assert lengths.expected(RoundShape(steps, topk, TREES[steps])) == pytest.approx(
            1 + runs[steps].mean(), rel=0.02
        )


# --- the estimate ---


class TestAcceptanceEstimate:
    def test_rows_inform_about_the_positions_they_tried(self):
        lengths = AcceptLengths([RoundShape.chain(2), RoundShape.chain(4)])
        lengths.add(RoundShape.chain(2), [2, 1, 3])  # two drafts: 2 rejected at once, 1 at position 2, 3 accepted both
        lengths.fold(1, 1)
        assert [lengths.trials(position) for position in (1, 2, 3)] == [6, 4, 0]
        assert [lengths.last_tried(position) for position in (1, 2, 3, 4)] == [1, 1, -1, -1]
        p = lengths.probabilities
        assert p[0] == pytest.approx((4 + 8 * 0.6) / 14) and p[1] == pytest.approx((3 + 8 * p[0]) / 12)
        assert p[2] == p[3] == p[1]  # unknown positions extrapolate the one before

    def test_runs_beyond_the_depth_count_as_accepted(self):
        estimate = AcceptanceEstimate(2)
        estimate.add([0, 0, 1, 0, 5])
        estimate.fold(1, 1)
        assert [estimate.trials(1), estimate.trials(2)] == [6, 6] == [estimate.accepts(1), estimate.accepts(2)]

    def test_untried_positions_lose_weight_but_not_their_ratio(self):
        estimate = AcceptanceEstimate(2)
        estimate.add([0, 70, 30])
        estimate.fold(1, 1)
        for t in range(100):
            estimate.add([0, 10])
            estimate.fold(100 * t, 100)
        assert estimate.trials(2) == pytest.approx(16)
        assert estimate.accepts(2) / estimate.trials(2) == pytest.approx(0.3)

    def test_a_change_replaces_the_memory_and_forgets_the_depths(self):
        lengths = AcceptLengths([RoundShape.chain(1), RoundShape.chain(3)])
        for t in range(200):
            lengths.add(RoundShape.chain(3), [0, 0, 0, 32])
            assert not lengths.fold(t, 1)
        changed = []
        for t in range(200, 300):
            lengths.add(RoundShape.chain(3), [32, 0, 0, 0])
            changed.append(lengths.fold(t, 1))
        assert True in changed[:60] and lengths.changes == sum(changed)
        assert lengths.probabilities[0] < 0.4  # all 300 rounds alike would say two thirds

    def test_stationary_requests_are_no_change(self):
        for seed in range(5):
            estimate = AcceptanceEstimate(3)
            for t, run in enumerate(longest_runs("chat", 8, 3000, seed)):
                estimate.add(np.bincount(np.minimum(run, 3), minlength=4).tolist())
                assert not estimate.fold(t, 1)


# --- the gate ---


class TestSwitchGate:
    def test_dwell_doubles_at_reversals_and_falls_back_after_quiet(self):
        gate = SwitchGate(10)
        assert gate.earliest(0) == 0
        gate.record(0, 1, 3)
        assert gate.earliest(1) == 10
        gate.record(10, 3, 5)
        assert gate.earliest(11) == 20  # the same direction
        gate.record(20, 5, 3)
        assert gate.earliest(21) == 40
        gate.record(40, 3, 5)
        assert gate.earliest(41) == 80 and gate.earliest(41, certain=True) == 50
        gate.record(40 + 8 * 40, 5, 3)  # quiet for eight dwells: this reversal is the first again
        assert gate.earliest(361) == 360 + 20

    def test_the_dwell_has_a_bound(self):
        """Every probe that fails is two reversals: doubled for each without end, probing would stop for days."""
        gate = SwitchGate(64)
        now = 0
        for number in range(40):
            now = gate.earliest(now)
            gate.record(now, number % 2, (number + 1) % 2)
        assert gate.earliest(now) - now <= WINDOW_ROUNDS and gate.dwell(now) == 2048
        assert SwitchGate(5000).dwell(0) == 5000

    @given(st.integers(1, 100), st.lists(st.integers(0, 800), max_size=80), st.randoms(use_true_random=False))
    def test_no_window_holds_more_than_ten(self, dwell, waits, random):
        gate = SwitchGate(dwell)
        now, steps, recorded = 0, 1, []
        for wait in waits:
            now += wait
            pair = random.random() < 0.5
            if gate.earliest(now, switches=2 if pair else 1, certain=random.random() < 0.5) > now:
                continue
            for _ in range(2 if pair else 1):
                new = random.choice([s for s in range(4) if s != steps])
                gate.record(now, steps, new)
                steps = new
                recorded.append(now)
        for first, last in zip(recorded, recorded[SWITCHES_PER_WINDOW:], strict=False):
            assert last - first >= WINDOW_ROUNDS

    def test_every_transition_of_the_table_is_walked_and_no_other(self):
        walked = set()

        def take(state, event):
            walked.add((state, event))
            return GATE_TRANSITIONS[state][event]  # KeyError: an event that the table does not have

        def pass_rounds(gate, state, now):
            if gate.state(now) is state:
                return state
            if state is GateState.CROWDED:
                return take(state, GateEvent.CLEARED)
            return take(state, GateEvent.DWELT if gate.state(now) is GateState.OPEN else GateEvent.FILLED)

        for seed in range(20):
            random, gate = Random(seed), SwitchGate(random_dwell := 1 + seed * 7)
            state, steps, doubtful = GateState.OPEN, 1, 0
            for now in range(0, 40_000, random_dwell):
                state = pass_rounds(gate, state, now)
                assert gate.state(now) is state
                if random.random() < 0.002:
                    gate.forget_switches()
                    state = pass_rounds(gate, take(state, GateEvent.FORGET), now)
                elif doubtful or gate.earliest(now, switches=2) <= now:  # a probe, and its return within the dwell
                    doubtful, new = not doubtful, (steps + 1) % 3
                    gate.record(now, steps, new)
                    state, steps = take(state, GateEvent.SWITCH), new
                elif gate.earliest(now, certain=random.random() < 0.5) <= now and not gate.is_crowded(now):
                    gate.record(now, steps, steps + 1)
                    state, steps = take(state, GateEvent.SWITCH), steps + 1
                assert gate.state(now) is state
        assert walked == {(state, event) for state, events in GATE_TRANSITIONS.items() for event in events}
