import numpy as np
import pytest
from foredraft.observe.measuring.histogram import RELATIVE_ERROR, LogHistogram


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).integers(1, 10**9, 5000),
        np.random.default_rng(1).lognormal(15, 3, 5000).astype(np.int64),
        np.arange(1, 4000),
        np.full(100, 12_345_678),
        np.array([0, 0, 0, 5, 2**62]),
        np.array([7]),
    ],
    ids=["uniform", "lognormal", "small", "constant", "zeros", "one"],
)
def test_quantiles_are_within_the_stated_error(values):
    histogram = LogHistogram()
    for part in np.array_split(values, 3):
        histogram.add(part)
    for share in (0.0, 0.01, 0.25, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0):
        assert histogram.quantile(share) == pytest.approx(np.percentile(values, 100 * share), rel=RELATIVE_ERROR)
    assert histogram.count == len(values)
    assert histogram.mean == int(values.astype(object).sum()) / len(values)
    assert histogram.std == pytest.approx(values.std(), rel=1e-9, abs=1e-6)
    assert (histogram.minimum, histogram.maximum) == (values.min(), values.max())


def test_moments_do_not_depend_on_how_values_are_grouped():
    values = np.random.default_rng(3).lognormal(16, 4, 3000).astype(np.int64)
    assert values.max() > 1 << 33, "squares beyond 64 bits are among them"
    seen = set()
    for size in (1, 7, 3000):
        histogram = LogHistogram()
        for begin in range(0, len(values), size):
            histogram.add(values[begin : begin + size])
        seen.add((histogram.mean, histogram.std))
    assert len(seen) == 1


def test_the_error_is_not_far_from_its_bound():
    # A bucket holds values 0.2 % apart at most: two that are further apart must not be told as one.
    histogram = LogHistogram()
    histogram.add(np.array([1_000_000, 1_003_000, 5_000_000]))
    assert histogram.quantile(0.0) < 1_001_500 < histogram.quantile(0.5)


def test_empty_and_wrong_values():
    histogram = LogHistogram()
    histogram.add(np.empty(0, dtype=np.int64))
    assert (histogram.mean, histogram.std, histogram.quantile(0.5), histogram.count) == (None, None, None, 0)
    with pytest.raises(ValueError, match="-3"):
        histogram.add(np.array([4, -3]))
    with pytest.raises(ValueError, match=r"1\.5"):
        histogram.quantile(1.5)
    assert histogram.count == 0
