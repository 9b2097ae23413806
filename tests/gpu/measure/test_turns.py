"""The measuring loop: in which order cells and arms take turns, the record of a stopped run, the clock, the cells."""

from collections import Counter
from itertools import pairwise

import pytest
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.errors import ConfigError
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.spec import SpeculationChoice, resolve_spec
from foredraft.gpu.measure.cells import MeasuringPlan, MixedCell, PromptCell, RoundCell, step_cells
from foredraft.gpu.measure.clock import make_clock
from foredraft.gpu.measure.turns import Timed, TimingRecord, drawn_order, take_turns


def test_each_turn_has_everything_once_in_an_order_of_its_own():
    order = list(drawn_order([20] * 4))
    turns = [tuple(order[begin : begin + 4]) for begin in range(0, 80, 4)]
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in turns)
    # None always finds the caches as one other has left them, and none is always the first.
    assert len({turn[0] for turn in turns}) == 4
    before = Counter(pairwise(order))
    assert len(before) > 12 and max(before.values()) < 15
    assert order == list(drawn_order([20] * 4)) and order != list(drawn_order([20] * 4, seed=1))


def test_what_is_timed_less_often_is_spread_over_the_turns():
    order = list(drawn_order([9, 3, 9, 1]))
    assert Counter(order) == {0: 9, 1: 3, 2: 9, 3: 1}
    turn_of = [order[: i + 1].count(0) + (number != 0) for i, number in enumerate(order) if number == 1]
    assert all(3 * turn - 1 <= place <= 3 * turn + 1 for turn, place in enumerate(turn_of, 1)), turn_of
    assert list(drawn_order([])) == [] == list(drawn_order([0, 0]))


def test_everything_is_warm_before_the_first_turn_and_samples_are_in_order():
    called, shown = [], []

    def timed(name):
        return Timed(
            name, 3, lambda i: (called.append((name, i)), f"{name}{i}")[1], lambda: called.append((name, "warm"))
        )

    samples = take_turns([timed("a"), timed("b")], on_sample=lambda *told: shown.append(told))
    assert samples == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]
    assert called[:2] == [("a", "warm"), ("b", "warm")] and len(called) == 8
    assert [(done, of) for done, of, _ in shown] == [(done, 6) for done in range(6)]
    assert [name for _, _, name in shown] == [name for name, _ in called[2:]]


def test_a_record_of_something_else_is_begun_anew(tmp_path):
    path = tmp_path / "partial"
    record = TimingRecord(path, {"model": "a"})
    assert record.sample("cell", lambda: [1.0]) == record.sample("cell", lambda: [2.0]) == [1.0]
    record.close(finished=False)
    assert TimingRecord(path, {"model": "b"}).values == {}


def test_a_clock_of_processor_time_needs_one_thread():
    with pytest.raises(ConfigError, match="another device does the work"):
        make_clock("cpu", "cuda")
    with pytest.raises(ConfigError, match="neither wall nor cpu"):
        make_clock("sundial", "cpu")


def spec_of(algorithm, **settings):
    config = EngineConfig(max_running=4, num_pages=100, page_size=4, context_len=100, chunk_size=64)
    return resolve_spec(config, get_algorithm(algorithm), SpeculationChoice(policy="fixed", **settings))


def test_arms_of_one_algorithm_share_prompts_and_equal_rounds():
    """Every shape of a round is timed once, with as many repeats as were asked for over all accept lengths."""
    specs = [
        spec_of("NONE"),
        spec_of("EAGLE3", steps=2),
        spec_of("EAGLE3", steps=2),
        spec_of("EAGLE3", steps=3, topk=2),
    ]
    cells = step_cells(specs, MeasuringPlan(repeats=7))
    kinds = {number: {type(cell) for arm, cell in cells if arm == number} for number in range(4)}
    everything = {PromptCell, RoundCell, MixedCell}
    assert kinds == {0: everything, 1: everything, 2: set(), 3: {RoundCell}}
    rounds = Counter()
    for (number, cell), repeats in cells.items():
        if isinstance(cell, RoundCell):
            rounds[number, cell.shape, cell.rows, cell.context] += repeats
            assert 1 <= cell.accepted <= cell.shape.nodes and cell.context + cell.shape.nodes < 100
        elif isinstance(cell, PromptCell):
            assert repeats == 7 and cell.context + cell.tokens // cell.chunks < 100
    assert set(rounds.values()) == {7}
    assert {(shape.steps, rows) for number, shape, rows, _ in rounds if number == 1} == {(2, 1), (2, 2), (2, 4)}
    (mixed,) = [cell for number, cell in cells if number == 1 and isinstance(cell, MixedCell)]
    assert (1, mixed.round) in cells
