import numpy as np
import pytest
from foredraft.observe.measuring.histogram import FIRST_BUCKET_NS, Timeline


def brute_force(times, values, edges):
    """Integral of a step function over [edges[i], edges[i + 1]), piece by piece."""
    areas = np.zeros(len(edges) - 1)
    for begin, end, value in zip(times[:-1], times[1:], values, strict=True):
        for i in range(len(areas)):
            areas[i] += value * max(0, min(end, edges[i + 1]) - max(begin, edges[i]))
    return areas


@pytest.mark.parametrize("longest_gap", [10_000, 10**6, 10**9])
def test_bucket_means_are_those_of_the_whole_run(longest_gap):
    rng = np.random.default_rng(longest_gap)
    start = 12_345
    times = start + np.concatenate([[0], np.cumsum(rng.integers(0, longest_gap, 300))])
    values = rng.integers(0, 50, (2, 300))
    counts_at = np.sort(rng.integers(start, times[-1] + 1, 200))
    amounts = rng.integers(0, 9, (1, 200))
    timeline = Timeline(start, ("a", "b"), ("n",), num_buckets=16)
    for low, high in ((0, 1), (1, 90), (90, 200), (200, 300)):
        timeline.add_gauges(times[low : high + 1], values[:, low:high])
        inside = (counts_at >= times[low]) & ((counts_at < times[high]) | (high == 300))
        timeline.add_counts(counts_at[inside], amounts[:, inside])
    read = timeline.read()
    used = len(read["a"])
    width = read["bucket_ns"]
    assert width % FIRST_BUCKET_NS == 0 and used <= 16
    assert start + (used - 1) * width < times[-1] <= start + used * width
    if width > FIRST_BUCKET_NS:
        assert used > 8, "buckets grew further than they had to"
    edges = [*(start + i * width for i in range(used)), times[-1]]
    for name, row in zip(("a", "b"), values, strict=True):
        assert np.array(read[name]) * np.diff(edges) == pytest.approx(brute_force(times, row, edges), rel=1e-9)
    expected = np.histogram(counts_at, bins=edges, weights=amounts[0])[0]
    assert read["n"] == pytest.approx(expected)


def test_an_instant_is_one_bucket():
    timeline = Timeline(5, ("a",), ("n",))
    timeline.add_counts(np.empty(0, dtype=np.int64), np.empty((1, 0)))
    assert timeline.read()["n"] == [0.0]
