"""Tables of adaptive steps: what they may say, and that everything wrong is reported at once, under its key."""

from __future__ import annotations

import json

import pytest
from foredraft.core.adaptive.config import PRESETS, InvalidInitialSteps, load_adaptive_config, resolve_initial_steps
from foredraft.core.errors import ConfigError
from foredraft.observe.input_files import read_text
from hypothesis import given
from hypothesis import strategies as st


def problems_of(table, **kwargs) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_adaptive_config(table, **kwargs)
    return {problem.key: problem.message for problem in caught.value.problems}


def test_defaults_of_the_table_apply_to_all_entries_and_entries_win():
    table = {
        "ema_alpha": 0.5,
        "up_hysteresis": 0.1,
        "8": {"candidate_steps": [3, 1, 3], "ema_alpha": 0.25},
        "1": {"candidate_steps": [2]},
    }
    config = load_adaptive_config(table)
    assert config.bounds == (1, 8)
    assert [slot.ema_alpha for slot in config.slots] == [0.5, 0.25]
    assert [slot.up_hysteresis for slot in config.slots] == [0.1, 0.1]
    assert config.slots[1].candidate_steps == (1, 3)  # sorted, without repeats


def test_flat_form_is_one_range_with_a_notice():
    config = load_adaptive_config({"candidate_steps": [1, 5], "update_interval": 7}, source="flat.json")
    assert config.bounds == (1,)
    assert config.slots[0].update_interval == 7
    assert len(config.notices) == 1 and "flat.json" in config.notices[0]


def test_candidate_steps_beside_ranges_is_no_default():
    config = load_adaptive_config({"candidate_steps": [9], "1": {"candidate_steps": [1]}})
    assert config.candidate_steps == (1,)
    assert "no effect" in config.notices[0]
    assert "8.candidate_steps" in problems_of({"candidate_steps": [9], "8": {}})


WRONG_VALUES = {  # key of a range -> values that it must not have
    "candidate_steps": [3, "1,3", [], None],
    "ema_alpha": [0, 1.01, float("nan"), "0.5"],
    "update_interval": [0, True, 1.5],
    "warmup_batches": [-1, "many"],
    "min_dwell_batches": [-1, 0.5],
    "ceiling_coeff": [-0.5, float("inf")],
    "up_hysteresis": [float("inf"), -0.5, None],
}


@given(st.data())
def test_each_wrong_value_is_refused_under_its_key(data):
    keys = data.draw(st.sets(st.sampled_from(sorted(WRONG_VALUES)), min_size=1, max_size=4))
    wrong = {key: data.draw(st.sampled_from(WRONG_VALUES[key])) for key in sorted(keys)}
    assert problems_of({"4": {"candidate_steps": [1, 3], **wrong}}).keys() == {f"4.{key}" for key in keys}


@pytest.mark.parametrize(
    ("table", "key", "words"),
    [
        ({"ema_alpha": 0.5}, "", "neither a batch-size key nor candidate_steps"),
        ({"1": [1, 3]}, "1", "is a list; expected an object"),
        ({"1": {}}, "1.candidate_steps", "is missing"),
        ({"1": {"candidate_steps": [1, True]}}, "1.candidate_steps[1]", "is True"),
        ({"1": {"candidate_steps": [3, -1]}}, "1.candidate_steps[1]", "is -1"),
        ({"down_hysteresis": 0.5, "1": {"candidate_steps": [1]}}, "1.up_hysteresis", "it would oscillate"),
        ({"1": {"candidate_steps": [1], "ema_alfa": 0.5}}, "1.ema_alfa", "did you mean 'ema_alpha'"),
        ({"1": {"candidate_steps": [1]}, "٣": {"candidate_steps": [1]}}, "٣", "is not a known key"),
        ({"1": {"candidate_steps": [1]}, "01": {"candidate_steps": [1]}}, "01", "one key for each number"),
        ({"9" * 5000: {"candidate_steps": [1]}}, "9" * 20, "is too large"),
    ],
)
def test_refusals_name_the_key_and_what_was_expected(table, key, words):
    found = problems_of(table)
    assert key in found, found
    assert words in found[key]


def test_all_problems_are_reported_at_once_with_the_file(tmp_path):
    path = tmp_path / "steps.json"
    path.write_text('{"1": {"candidate_steps": [], "ema_alpha": 2, "ema_alpha2": 1}, "8": 3, "foo": 1}')
    with pytest.raises(ConfigError) as caught:
        load_adaptive_config(str(path), read_file=read_text)
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"1.candidate_steps", "1.ema_alpha", "1.ema_alpha2", "8", "foo"}
    assert all(line.startswith(str(path)) for line in str(caught.value).splitlines())


def test_json_that_is_none_or_repeats_keys(tmp_path):
    assert "is not JSON: Expecting value (column 7)" in problems_of('{"1": ')[""]
    assert "NaN is no JSON number (line 2 column 2)" in problems_of('{"1":\n NaN}')[""]
    assert problems_of('{"1": {"candidate_steps": [1]}, "1": {"candidate_steps": [2]}}').keys() == {"1"}
    assert "1.ema_alpha" in problems_of('{"1": {"candidate_steps": [1], "ema_alpha": 0.1, "ema_alpha": 0.2}}')
    assert "is a list" in problems_of("[1, 3]")[""]
    assert "cannot be read" in problems_of(str(tmp_path / "absent.json"), read_file=read_text)[""]
    assert "did you mean 'default'" in problems_of("defualt", read_file=read_text)[""]
    assert "did you mean 'default'" in problems_of("defualt")[""]


def test_a_file_a_text_and_a_dict_read_alike(tmp_path):
    text = json.dumps(PRESETS["with-zero"])
    path = tmp_path / "steps.json"
    path.write_text(text)
    slots = load_adaptive_config(PRESETS["with-zero"]).slots
    assert load_adaptive_config(text).slots == slots
    assert load_adaptive_config(str(path), read_file=read_text).slots == slots
    config = load_adaptive_config(text)
    assert load_adaptive_config(config) is config


def test_a_ceiling_that_undoes_a_rise_is_noticed():
    def notices(coeff: float) -> tuple[str, ...]:
        return load_adaptive_config({"1": {"candidate_steps": [1, 3], "ceiling_coeff": coeff}}).notices

    assert "oscillate" in notices(1.0)[0]
    assert notices(4.5) == () and notices(0) == ()


def test_initial_steps():
    config = load_adaptive_config("default")
    assert resolve_initial_steps(config) == 3  # the middle of 1, 3, 7
    assert resolve_initial_steps(config, 7) == 7
    with pytest.raises(InvalidInitialSteps, match=r"5 .*\[1, 3, 7\]"):
        resolve_initial_steps(config, 5)


def test_comments_are_passed_over_as_in_sglang_files():
    table = {"_comment": "from a benchmark", "strategy": "ema", "1": {"candidate_steps": [1, 3], "_note": [1, 2]}}
    assert load_adaptive_config(table).slots == load_adaptive_config({"1": {"candidate_steps": [1, 3]}}).slots
    assert "expected 'ema'" in problems_of(table | {"strategy": "throughput_aware"})["strategy"]
    assert "is not a known key" in problems_of({"1": {"candidate_steps": [1], "strategy": "ema"}})["1.strategy"]


def test_no_table_is_the_default_one():
    assert load_adaptive_config(None) == load_adaptive_config("default")
