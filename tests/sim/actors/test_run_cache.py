"""The cache of runs gives what the process gives, in any order of rows, joins, windows and multi-steps."""

import numpy as np
import pytest
from foredraft.core.acceptance.presets import TraceAcceptance, choose_preset
from foredraft.core.acceptance.process import FixedMeanAcceptance, GaussianAcceptance
from foredraft.sim.actors.run_cache import RunCache

CHAT = choose_preset("chat").preset.process(0)
PROCESSES = [
    CHAT,
    FixedMeanAcceptance(2.6),
    TraceAcceptance.of_runs({"a": [3, 0, 2, 1], "b": [5, 4, 3, 2, 1, 0]}),
    GaussianAcceptance((0.9,), 1, 0.1, 0.2, 13, max_depth=40),
]


def expected(process, keys, positions, steps):
    return 1 + np.minimum(process.longest_run(keys, positions), steps)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: type(process).__name__)
def test_a_random_life_of_rows(process):
    """Rows change owner, batches change, step counts change, single rounds and multi-steps alternate, some
    keys are primed."""
    rng = np.random.default_rng(0)
    num_rows = 12
    cache = RunCache(process, num_rows, window=48)
    keys = rng.integers(0, 2**64, num_rows + 1, dtype=np.uint64)
    keys[:4] = [0, 1, 2, 3]
    positions = np.zeros(num_rows + 1, np.int64)
    for _ in range(250):
        joining = rng.random(num_rows + 1) < 0.04
        keys[joining] = rng.integers(0, 2**64, joining.sum(), dtype=np.uint64)
        if rng.random() < 0.5:
            cache.prime(keys[joining])
        positions[joining] = rng.choice([0, 0, 0, 2**40], joining.sum())
        rows = rng.permutation(np.arange(1, num_rows + 1, dtype=np.int32))[: rng.integers(0, num_rows + 1)]
        steps, rounds = int(rng.integers(0, 8)), int(rng.integers(1, 40))
        if rng.random() < 0.7:
            lens = cache.accept_lens(rows, keys[rows], positions[rows], steps)
            np.testing.assert_array_equal(lens, expected(process, keys[rows], positions[rows], steps))
            positions[rows] += lens
        else:
            rounds_found = cache.accept_lens_of_rounds(rows, keys[rows], positions[rows], steps, rounds)
            np.testing.assert_array_equal(rounds_found, process.accept_lens(keys[rows], positions[rows], steps, rounds))
            positions[rows] += rounds_found.sum(axis=0)
        assert lens.dtype == np.int32


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: type(process).__name__)
@pytest.mark.parametrize("steps", [0, 1, 3, 7])
def test_a_multi_step_ends_with_the_first_round_in_which_a_row_is_done(process, steps):
    """Up to an end in the first look, at its edge, in a later one, or not at all:
    the rounds are those of the whole multi-step."""
    rng = np.random.default_rng(steps)
    rows, keys = np.arange(1, 6), rng.integers(0, 2**64, 5, dtype=np.uint64)
    positions = np.array([0, 3, 250, 17, 1000])
    whole = process.accept_lens(keys, positions, steps, 32)
    emitted = np.add.accumulate(whole, axis=0)
    for last in (0, 1, 6, 7, 8, 9, 20, 31, None):
        left = np.full(5, 10_000)
        if last is not None:
            left[2] = emitted[last, 2]
        cache = RunCache(process, 5)
        rounds_found = cache.accept_lens_of_rounds(rows, keys, positions, steps, 32, left)
        np.testing.assert_array_equal(rounds_found, whole if last is None else whole[: last + 1])


def test_neighbouring_keys_and_positions_are_not_confused():
    """A row that passes from key 5 at position 0 to key 6 at position 0 … 3 must not read the old window."""
    cache = RunCache(CHAT, 1)
    row = np.array([1])
    for key in range(200):
        keys = np.array([key], np.uint64)
        for position in (0, 3, 1):
            where = np.array([position])
            assert cache.accept_lens(row, keys, where, 7) == expected(CHAT, keys, where, 7)


def test_an_untouched_row_has_no_answers_of_its_own():
    keys, where = np.zeros(1, np.uint64), np.zeros(1, np.int64)
    assert RunCache(FixedMeanAcceptance(3.0), 4).accept_lens(np.array([2]), keys, where, 5).tolist() == [3]


def test_no_steps_and_no_rows():
    cache = RunCache(CHAT, 4)
    none = np.empty(0, np.int64)
    assert cache.accept_lens(np.array([1, 2]), np.zeros(2, np.uint64), np.zeros(2, np.int64), 0).tolist() == [1, 1]
    assert cache.accept_lens(none, none.astype(np.uint64), none, 3).tolist() == []
    assert cache.accept_lens_of_rounds(none, none.astype(np.uint64), none, 3, 2).shape == (2, 0)


class Counting(FixedMeanAcceptance):
    """Counts its passes."""

    calls = 0

    def run_windows(self, *arguments):
        Counting.calls += 1
        return super().run_windows(*arguments)


@pytest.fixture
def counting():
    Counting.calls = 0
    return RunCache(Counting(2.5), 64)


def test_windows_are_drawn_rarely_and_primed_ones_not_again(counting):
    rows, keys = np.arange(1, 65), np.arange(64, dtype=np.uint64)
    counting.prime(keys)
    assert Counting.calls == 1
    positions = np.zeros(64, np.int64)
    for _ in range(400):
        positions += counting.accept_lens(rows, keys, positions, 3)
    assert Counting.calls < 20  # 1,000 positions in windows of 256; the rows go together


def test_a_primed_newcomer_draws_nothing_for_rows_that_have_positions_left(counting):
    rows, keys = np.array([1, 2]), np.array([7, 8], np.uint64)
    counting.prime(np.array([7, 8, 9], np.uint64))
    lens = counting.accept_lens(rows, keys, np.array([200, 0]), 3)  # row 1 is past the half of its window
    keys[1] = 9
    with_newcomer = counting.accept_lens(rows, keys, np.array([200, 0]), 3)
    assert Counting.calls == 1
    assert with_newcomer[0] == lens[0]
    assert with_newcomer[1] == expected(FixedMeanAcceptance(2.5), keys[1:], np.array([0]), 3)[0]


def test_no_more_than_the_bound_is_primed():
    cache = RunCache(CHAT, 4, max_primed=10)
    cache.prime(np.arange(25, dtype=np.uint64))
    cache.prime(np.arange(100, 103, dtype=np.uint64))
    assert list(cache._primed) == [*range(18, 25), 100, 101, 102]


def test_shifts_move_their_rows_only():
    cache = RunCache(CHAT, 3)
    rows, keys = np.array([1, 2, 3]), np.array([7, 8, 9], np.uint64)
    shifts = np.array([0.0, -1.5, 0.0])
    cache.prime(keys)
    cache.set_shifts(rows, shifts)
    rounds_found = cache.accept_lens_of_rounds(rows, keys, np.zeros(3, np.int64), 5, 30)
    plain = CHAT.accept_lens(keys, np.zeros(3, np.int64), 5, 30)
    np.testing.assert_array_equal(rounds_found[:, [0, 2]], plain[:, [0, 2]])
    assert rounds_found[:, 1].mean() < plain[:, 1].mean() - 0.3
    position = 0
    for accepted in rounds_found[:, 1]:
        assert accepted == 1 + min(int(CHAT.longest_run(keys[1:2], np.array([position]), -1.5)[0]), 5)
        position += accepted
