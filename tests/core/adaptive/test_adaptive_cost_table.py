"""The cost table: exact interpolation, and tables that are refused."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from foredraft.core.adaptive.cost_table import CostTable, UnknownStepCost
from foredraft.core.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st

TABLE = CostTable((0, 2), (1, 4, 16), ((100, 130, 190), (200, 201, 305)), (1500, 2000))


def test_grid_points_and_between():
    assert [TABLE.round_time_ns(0, bs) for bs in (1, 2, 3, 4, 10, 16)] == [100, 110, 120, 130, 160, 190]
    assert TABLE.round_time_ns(2, 2) == 200  # 200 + 1/3, floored
    assert TABLE.round_time_ns(0, 28) == 250  # the last segment goes on


@given(st.integers(1, 100), st.integers(0, 10**9))
def test_interpolation_is_exact(batch_size, kv_tokens):
    left, right, a, b = (1, 4, 200, 201) if batch_size < 4 else (4, 16, 201, 305)
    exact = Fraction(a * (right - batch_size) + b * (batch_size - left), right - left)
    assert TABLE.round_time_ns(2, batch_size, kv_tokens) == exact.__floor__() + 2 * kv_tokens


def test_one_batch_size_and_unknown_steps():
    table = CostTable((3,), (8,), ((50,),), (0,))
    assert table.round_time_ns(3, 1) == table.round_time_ns(3, 99) == 50
    with pytest.raises(UnknownStepCost, match=r"no cost for 1 steps; .*\[3\]"):
        table.round_time_ns(1, 8)


def test_json_round_trip_and_sampling():
    assert CostTable.from_json(TABLE.to_json()) == TABLE
    sampled = CostTable.from_function(lambda bs, steps, kv: 10 * bs + 7 * steps + 5 + kv // 20, [0, 3], [1, 64])
    assert sampled.round_ns == ((15, 645), (36, 666))
    assert sampled.kv_token_ps == (50, 50)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": [2, 0]}, "steps: is .*ascending"),
        ({"steps": []}, "steps: is .*ascending"),
        ({"steps": [False, True]}, "steps: is .*integers"),
        ({"batch_sizes": [0, 4, 16]}, "batch_sizes: is .*>= 1"),
        ({"round_ns": [[1, 2, 3]]}, "round_ns: expected 2 rows"),
        ({"round_ns": [[1, 2, 3], [1, 2]]}, r"round_ns\[1\]: is .*expected 3"),
        ({"round_ns": [[1, 2, 3], [1, 2, 0.5]]}, r"round_ns\[1\]: is .*integers"),
        ({"kv_token_ps": [1]}, "kv_token_ps: is .*expected 2"),
        ({"kv_tokens_ps": [1]}, "expected an object with steps"),
    ],
)
def test_refusals(change, words):
    table = {**TABLE.to_json(), **change}
    with pytest.raises(ConfigError, match=words):
        CostTable.from_json(json.loads(json.dumps(table)))


def test_all_problems_at_once_with_the_source():
    table = {"steps": [1], "batch_sizes": [1], "round_ns": [[-1]], "kv_token_ps": []}
    with pytest.raises(ConfigError) as caught:
        CostTable.from_json(table, "h100.json")
    assert [problem.key for problem in caught.value.problems] == ["kv_token_ps", "round_ns[0]"]
    assert str(caught.value).startswith("h100.json")
    with pytest.raises(ConfigError, match="expected an object"):
        CostTable.from_json(3)
