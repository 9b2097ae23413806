"""Tables of steps for and from other servers: nothing is lost silently, and what comes back is what was written."""

import json

import pytest
from foredraft.core.adaptive.config import AdaptiveConfig, SlotConfig, load_adaptive_config
from foredraft.core.adaptive.interchange import export_table, import_table, table_schema, to_json
from foredraft.core.errors import ConfigError
from foredraft.sim.scenario import Scenario
from hypothesis import given
from hypothesis import strategies as st

WITH_ZERO = load_adaptive_config("with-zero")
SCHEDULE = load_adaptive_config(
    {"1": {"candidate_steps": [5]}, "9": {"candidate_steps": [2]}, "33": {"candidate_steps": [0]}}
)

nodes = st.none() | st.integers(2, 64)
slots = st.builds(
    SlotConfig,
    st.sets(st.integers(0, 9), min_size=1, max_size=4).map(lambda steps: tuple(sorted(steps))),
    ema_alpha=st.floats(0.01, 1),
    update_interval=st.integers(1, 50),
    warmup_batches=st.integers(0, 50),
    up_hysteresis=st.floats(0, 2),
    down_hysteresis=st.floats(-2, 0),
    ceiling_coeff=st.floats(0, 5),
    min_dwell_batches=st.integers(0, 99),
    num_draft_tokens=nodes,
)
tables = st.dictionaries(st.integers(1, 500), slots, min_size=1, max_size=4).map(
    lambda ranges: AdaptiveConfig(tuple(sorted(ranges)), tuple(ranges[bound] for bound in sorted(ranges)))
)


def problems_of(action) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        action()
    return {problem.key: problem.message for problem in caught.value.problems}


@given(tables)
def test_our_own_format_comes_back(table):
    read = load_adaptive_config(to_json(table))
    assert (read.bounds, read.slots) == (table.bounds, table.slots)


class TestSGLang:
    def test_every_key_is_written_by_batch_size_even_from_the_flat_form(self):
        config = load_adaptive_config({"candidate_steps": [1, 5], "ema_alpha": 0.3})
        text = export_table(config, "sglang-0.5.23")
        assert list(json.loads(text)) == ["1"]
        assert set(json.loads(text)["1"]) == {
            *("candidate_steps", "ema_alpha", "update_interval", "warmup_batches"),
            *("up_hysteresis", "down_hysteresis", "ceiling_coeff"),
        }
        assert import_table(text).slots == config.slots

    def test_zero_steps_need_the_version_that_reads_them(self):
        assert import_table(export_table(WITH_ZERO, "sglang-v0.5.14.post1")).slots == WITH_ZERO.slots
        found = problems_of(lambda: export_table(WITH_ZERO, "sglang-0.5.13"))
        assert set(found) == {"8.candidate_steps", "32.candidate_steps", "64.candidate_steps"}
        assert "need 0.5.14" in found["8.candidate_steps"]

    def test_before_ranges_there_was_the_flat_form(self):
        flat = json.loads(export_table(load_adaptive_config({"1": {"candidate_steps": [1, 3]}}), "sglang-0.5.12"))
        assert flat["candidate_steps"] == [1, 3]
        assert "need 0.5.13" in problems_of(lambda: export_table(load_adaptive_config("default"), "sglang-0.5.12"))[""]

    def test_what_it_does_not_have_is_refused(self):
        table = {"1": {"candidate_steps": [1], "min_dwell_batches": 50, "num_draft_tokens": 4}}
        found = problems_of(lambda: export_table(load_adaptive_config(table), "sglang-0.5.23"))
        assert set(found) == {"1.min_dwell_batches", "1.num_draft_tokens"}

    def test_its_own_files(self):
        text = json.dumps(
            {"_comment": "x", "ema_alpha": 0.5, "1": {"candidate_steps": [3, 1]}, "16": {"candidate_steps": [0]}}
        )
        table = import_table(text)
        assert table.bounds == (1, 16) and [slot.ema_alpha for slot in table.slots] == [0.5, 0.5]
        measured = json.dumps({"strategy": "throughput_aware", "1": {"candidate_steps": [1]}})
        assert "goodput" in problems_of(lambda: import_table(measured))["strategy"]


class TestVllm:
    def test_a_schedule_comes_back(self):
        text = export_table(SCHEDULE, "vllm", max_batch_size=256)
        assert json.loads(text) == {
            "num_speculative_tokens": 5,
            "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 32, 2], [33, 256, 0]],
        }
        assert import_table(text).slots == SCHEDULE.slots and import_table(text).bounds == SCHEDULE.bounds

    def test_one_number_of_steps_per_range(self):
        assert set(problems_of(lambda: export_table(WITH_ZERO, "vllm"))) == {
            "1.candidate_steps",
            "8.candidate_steps",
            "32.candidate_steps",
        }
        assert "beyond the largest" in problems_of(lambda: export_table(SCHEDULE, "vllm", max_batch_size=32))["33"]

    def test_the_first_range_begins_at_one_row(self):
        late = load_adaptive_config({"4": {"candidate_steps": [2]}})  # a smaller batch takes the first range here
        assert json.loads(export_table(late, "vllm"))["num_speculative_tokens_per_batch_size"] == [[1, 512, 2]]

    @pytest.mark.parametrize("schedule", [[[1, 16, 3], [64, 128, 9]], {"1-16": 3, "64-128": 9}])
    def test_both_forms_with_a_gap_and_too_many_steps(self, schedule):
        given = {"method": "eagle3", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": schedule}
        table = import_table(json.dumps(given), "c.json")
        assert table.bounds == (1, 64) and [slot.candidate_steps for slot in table.slots] == [(3,), (4,)]
        assert "9 steps are cut" in table.notices[0] and "method" in table.notices[1]

    def test_without_a_schedule_there_is_one_range(self):
        assert import_table('{"num_speculative_tokens": 3}').slots[0].candidate_steps == (3,)

    @pytest.mark.parametrize(
        ("schedule", "place", "words"),
        [
            ([[1, 16]], "[0]", "expected [first batch size, last batch size, steps]"),
            ([[16, 1, 3]], "[0]", "expected [first"),
            ([[1, 16, -1]], "[0]", "expected [first"),
            ([[1, 16, True]], "[0]", "expected [first"),
            ([3], "[0]", "expected [first"),
            ({"16": 3}, ".16", "expected [first"),
            ("x", "", "expected [first"),
            ([], "", "has no range"),
            ([[1, 16, 3], [16, 32, 1]], "", "two ranges with batch size 16"),
            ([[1, 64, 0, 32768, 3]], "[0]", "expected [first"),
        ],
    )
    def test_bad_schedules(self, schedule, place, words):
        given = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": schedule}
        found = problems_of(lambda: import_table(json.dumps(given)))
        assert words in found[f"num_speculative_tokens_per_batch_size{place}"]

    def test_the_greatest_number_of_steps_is_needed(self):
        assert "num_speculative_tokens" in problems_of(lambda: import_table('{"num_speculative_tokens": "4"}'))


schedules = st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any).map(lambda steps: sorted(steps, reverse=True)),
    st.lists(st.integers(2, 500), min_size=4, max_size=4, unique=True).map(sorted),
)


class TestTensorRT:
    @given(schedules, st.booleans())
    def test_a_schedule_comes_back(self, schedule, flow):
        steps, bounds = schedule
        table = {str(bound): {"candidate_steps": [count]} for bound, count in zip([1, *bounds], steps, strict=False)}
        config = load_adaptive_config(table)
        text = export_table(config, "trtllm", 512)
        if flow:
            head, _, keys = text.partition("draft_len_schedule:")
            text = f"{head}draft_len_schedule: {{{', '.join(keys.split(chr(10))[1:])}}}  # of a file\nother: 1\n"
        read = import_table(text)

        def steps_at(table, size):
            return max(
                (bound, slot)
                for bound, slot in zip(table.bounds, [s.candidate_steps for s in table.slots], strict=True)
                if bound <= size
            )[1]

        assert all(steps_at(read, size) == steps_at(config, size) for size in range(1, 513))
        assert steps_at(read, 513) == (0,)

    def test_what_it_does_not_have_is_refused(self):
        rising = load_adaptive_config({"1": {"candidate_steps": [1]}, "8": {"candidate_steps": [3]}})
        assert (
            "no more than the first range" in problems_of(lambda: export_table(rising, "trtllm"))["8.candidate_steps"]
        )
        assert "1.candidate_steps" in problems_of(lambda: export_table(load_adaptive_config("default"), "trtllm"))
        assert (
            "is no schedule"
            in problems_of(lambda: import_table("draft_len_schedule:\n  four: 2\n"))["draft_len_schedule"]
        )

    @pytest.mark.parametrize("text", ["draft_len_schedule: {4: 2, 8: 1, 4: 1}", "draft_len_schedule: {4: 2}\n" * 2])
    def test_what_is_given_twice_is_refused(self, text: str):
        assert "twice" in problems_of(lambda: import_table(text))["draft_len_schedule"]


def test_an_unknown_server():
    assert "sglang-VERSION" in problems_of(lambda: export_table(SCHEDULE, "trt"))[""]
    assert "sglang-VERSION" in problems_of(lambda: export_table(SCHEDULE, "sglang-main"))[""]


def test_the_schema_has_every_key_with_default_and_meaning():
    schema = table_schema()
    entry = schema["patternProperties"]["^[0-9]+$"]
    assert set(entry["properties"]) == set(SlotConfig.__dataclass_fields__)
    assert all(key["description"] for key in entry["properties"].values())
    assert entry["properties"]["down_hysteresis"]["default"] == -0.25
    assert table_schema() in Scenario.model_json_schema()["$defs"]["Speculation"]["properties"]["adaptive"]["anyOf"]
