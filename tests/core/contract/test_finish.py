"""The finish rule: the first stop wins, then the cap."""

import itertools

import numpy as np
from foredraft.core.contract.request import cut_runs, first_stop_token


def by_hand(accept_len, stop, remaining):
    """Walk the run token by token: what is delivered, and why it ends."""
    kept = 0
    for i in range(accept_len):
        if kept == remaining:
            return kept, True, False
        kept += 1
        if i == stop:
            return kept, True, True
    return kept, kept == remaining, False


def test_settling_agrees_with_walking_the_run_by_hand():
    cases = [(a, s, r) for a, s, r in itertools.product(range(1, 6), range(-1, 6), range(1, 7)) if s < a]
    accept, stop, remaining = (np.array(column) for column in zip(*cases, strict=True))
    runs = cut_runs(accept, stop, remaining)
    assert runs.stopped.dtype == runs.ended.dtype == bool
    for i, case in enumerate(cases):
        assert (runs.kept[i], runs.ended[i], runs.stopped[i]) == by_hand(*case), case


def test_without_stops_none_are_looked_for():
    accept, remaining = np.array([3, 3, 1]), np.array([2, 3, 9])
    none = cut_runs(accept, None, remaining)
    given = cut_runs(accept, np.full(3, -1), remaining)
    for one, other in zip(none, given, strict=True):
        assert one.tolist() == other.tolist()


def test_the_first_of_several_stop_tokens_counts():
    assert first_stop_token(np.array([4, 7, 9, 7]), (9, 7)) == 1
    assert first_stop_token(np.array([4, 7]), ()) == -1
    assert first_stop_token(np.array([4, 7]), (5,)) == -1
