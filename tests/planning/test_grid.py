"""The texts of --grid: what they mean, and what is wrong with them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from foredraft.core.errors import ConfigError
from foredraft.planning.grid import combinations, parse_grid
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0..3", [0, 1, 2, 3]),
        ("2..2", [2]),
        ("0.5..2:4", [0.5, 1.0, 1.5, 2.0]),
        ("0..1:3", [0, 0.5, 1]),
        ("1..64:log", [1, 2, 4, 8, 16, 32, 64]),
        ("1..50:log", [1, 2, 4, 8, 16, 32, 50]),
        ("1..1000:log4", [1, 10, 100, 1000]),
        ("1000000..4000001:log", [1_000_000, 2_000_000, 4_000_000, 4_000_001]),
        ("1..2000003:3", [1, 1_000_002, 2_000_003]),
        ("0.1..0.4:log", [0.1, 0.2, 0.4]),
        ("H100,H200", ["H100", "H200"]),
        ("[1, 2.5]", [1, 2.5]),
        ("[true, false]", [True, False]),
        ("a/b..c.json", ["a/b..c.json"]),
    ],
)
def test_a_text_stands_for_values(text: str, values: list):
    found = parse_grid([f"key={text}"])["key"]
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["speculation.steps"], "expected key=values"),
        (["a=5..1"], "is empty: 5 is more than 1"),
        (["a=0.5..2"], "needs a number of values"),
        (["a=0..8:log"], "begins above 0"),
        (["a=1..inf:log"], "has no end"),
        (["a=1..2:lin3"], "not understood"),
        (["a=1..5:1"], "not understood"),
        (["a=[1, "], "no TOML array"),
        (["a="], "has no values"),
        (["a=[]"], "has no values"),
        (["a=1,1"], "the same value twice"),
        (["a=1", "a=2"], "is given twice"),
        (["a=0..99999999"], "more than 10,000 values"),
        (["a=0..199", "b=0..199"], "200 × 200 combinations are more than 10,000"),
    ],
)
def test_a_wrong_text_is_refused_with_its_reason(axes: list[str], message: str):
    with pytest.raises(ConfigError, match=r"^--grid: ") as caught:
        parse_grid(axes)
    assert message in str(caught.value)


@given(low=st.floats(1e-3, 1e3), factor=st.floats(1.01, 1e4), count=st.integers(2, 40))
def test_a_logarithmic_range_has_its_bounds_and_one_ratio(low: float, factor: float, count: int):
    low = float(f"{low:.6g}")
    high = float(f"{low * factor:.6g}")
    values = parse_grid([f"key={low!r}..{high!r}:log{count}"])["key"]
    assert values[0] == low and values[-1] == pytest.approx(high, rel=1e-5)
    ratio = (high / low) ** (1 / (count - 1))
    assert all(after / before == pytest.approx(ratio, rel=1e-4) for before, after in pairwise(values))


@given(text=st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str):
    try:
        grid = parse_grid([text])
    except ConfigError:
        return
    assert all(grid.values())


def test_combinations_without_speculation_leave_its_keys_out_and_occur_once():
    grid = {"speculation.algorithm": ["NONE", "EAGLE3"], "speculation.steps": [1, 2], "workload.rate": [4.0]}
    points = combinations(grid, "EAGLE3")
    assert points == [
        {"speculation.algorithm": "NONE", "workload.rate": 4.0},
        {"speculation.algorithm": "EAGLE3", "speculation.steps": 1, "workload.rate": 4.0},
        {"speculation.algorithm": "EAGLE3", "speculation.steps": 2, "workload.rate": 4.0},
    ]
    assert combinations({"speculation.steps": [1, 2]}, "NONE") == [{}]
