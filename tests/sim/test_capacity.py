"""Saturation and overload: an estimate that agrees with what the simulator serves, and a queue that only grows."""

from __future__ import annotations

import numpy as np
import pytest
from foredraft import simulate
from foredraft.sim.summary.capacity import is_overloaded

FIXED = {"prompt": {"kind": "fixed", "value": 500}, "output": {"kind": "fixed", "value": 200}}
SMALL_BATCH = {"engine": {"max_running": 64}}


def summary_of(workload: dict, **tables) -> dict:
    return simulate({"workload": {**FIXED, **workload}, **SMALL_BATCH, **tables}).summary


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NONE"])
def test_full_batches_are_saturation(algorithm):
    """More clients than the batch holds: what is served is what can be served."""
    full = summary_of({"concurrency": 100, "num_requests": 300}, speculation={"algorithm": algorithm})
    assert full["mean_running"] > 0.9 * 64
    assert full["saturation"] == pytest.approx(1.0, abs=0.1)
    assert full["overloaded"] is None, "clients of a closed loop wait for each other"
    few = summary_of({"concurrency": 4, "num_requests": 100}, speculation={"algorithm": algorithm})
    assert few["saturation"] < 0.5 and few["device_busy_share"] > 0.9, "busy is not full"


def test_the_figure_follows_the_rate_and_says_where_the_queue_begins_to_grow():
    slow, fast = (summary_of({"rate": rate, "num_requests": 300}) for rate in (10.0, 60.0))
    assert slow["saturation"] < 0.5 and slow["overloaded"] is False
    assert fast["saturation"] > 1.2 and fast["overloaded"] is True
    # The rates offered are those asked for, up to chance; accept lengths differ with the batch.
    assert fast["saturation"] / slow["saturation"] == pytest.approx(6, rel=0.25)


def test_two_replicas_serve_twice_as_much():
    one, two = (summary_of({"rate": 20.0, "num_requests": 200}, hardware={"replicas": n}) for n in (1, 2))
    assert two["saturation"] == pytest.approx(one["saturation"] / 2, rel=0.1)


def test_the_narrower_of_two_pools_decides():
    tables = {"engine": {"max_running": 64, "page_size": 16}}
    for prefill, decode, is_over in ((1, 4, False), (4, 1, True)):
        pools = {"prefill": prefill, "decode": decode}
        summary = summary_of({"rate": 60.0, "num_requests": 200}, disaggregation=pools, **tables)
        assert (summary["saturation"] > 1) is is_over


def test_a_queue_that_sheds_is_overloaded():
    summary = summary_of({"rate": 80.0, "num_requests": 300}, engine={"max_running": 64, "max_queue": 10})
    assert summary["refused"] > 50 and summary["overloaded"] is True and summary["saturation"] > 1


def queue(lengths, num_arrivals=400, num_shed=0) -> bool:
    return is_overloaded(list(lengths), 1.0, float(len(lengths)), num_arrivals, num_shed)


def test_what_counts_as_an_overload():
    assert queue(np.linspace(0, 200, 100))
    assert not queue(np.linspace(0, 20, 100)), "as much as chance explains"
    assert not queue(np.linspace(200, 0, 100)), "it shrinks"
    assert not queue([*np.linspace(0, 200, 60), *np.linspace(200, 60, 40)]), "a burst that is worked off"
    assert not queue([0.0] * 100) and not queue([]) and not queue([None, None])
    assert not is_overloaded([1.0, 2.0], 0.0, 0.0, 2, 0)
    assert queue([3.0] * 100, num_shed=21) and not queue([3.0] * 100, num_shed=20)
    tail = [*np.linspace(0, 200, 100), *np.zeros(300)]
    assert is_overloaded(tail, 1.0, 100.0, 400, 0), "the time after the last arrival does not count"
    noise = 30 + 3 * np.random.default_rng(1).standard_normal(100)
    assert not queue(noise)


def test_an_overload_whose_drain_is_much_longer_than_its_arrivals():
    """The arrivals then fill few of the buckets, however many there are."""
    waiting = [36, 106, 163, 215, 279, 347, 368, 365, 360, 340, 300, 250, 200, 150, 100, 50, 0]
    assert is_overloaded(waiting, 8.59, 50.0, 400, 0)
    assert is_overloaded(waiting[3:], 40.0, 50.0, 400, 0) and is_overloaded(waiting[3:], 80.0, 50.0, 400, 0)
    assert is_overloaded([200], 1.0, 1.0, 400, 0), "the last arrival is at the end of the run"
    assert not is_overloaded([36, 38, 41, 44, 47, 49, 50, 30, 0], 8.59, 50.0, 400, 0), "as much as chance explains"
    assert not is_overloaded([36, 30, 20, 0], 40.0, 50.0, 400, 0)
    assert not is_overloaded([163, 215, 279, 200, 100], 8.59, 50.0, 400, 0), "it shrinks at the end"
