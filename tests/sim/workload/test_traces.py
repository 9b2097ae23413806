"""Traces: exact times, honest errors, windows, and the real files where they are at hand."""

import gc
import itertools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.sim.scenario_file import load_scenario
from foredraft.sim.workload import trace_files, trace_layout
from foredraft.sim.workload.trace_inference import TraceError
from foredraft.sim.workload.trace_layout import TraceOptions
from foredraft.sim.workload.traces import TraceSource
from trace_texts import AZURE_HEADER, BURST_HEADER, mooncake_line

TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "traces"
AZURE = TRACES / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = TRACES / "mooncake_conversation_trace.jsonl"
needs_traces = pytest.mark.skipif(not AZURE.exists(), reason="real traces are not at hand")


class TestAzure:
    def test_times_are_exact_to_the_hundred_nanoseconds(self, write):
        path = write(
            AZURE_HEADER
            + "2023-11-16 18:15:46.6805900,374,44\r\n"
            + "2023-11-16 18:15:46.6805901,396,109\r\n"
            + "2023-11-17 00:00:00.0000001,5,6\r\n"
        )
        arrivals = list(TraceSource(path))
        assert [arrival.time_ns for arrival in arrivals] == [0, 100, 20653319410100]
        assert [(arrival.prompt.length, arrival.output_len, arrival.row) for arrival in arrivals] == [
            (374, 44, 0), (396, 109, 1), (5, 6, 2),
        ]  # fmt: skip
        assert arrivals[0].prompt.materialize() is None
        assert (arrivals[0].session, arrivals[0].priority) == (None, 0)

    def test_a_utc_offset_counts(self, write):
        path = write(
            AZURE_HEADER
            + "2024-05-10 00:00:00.009930+00:00,2162,5\n"
            + "2024-05-10 02:00:00.017335+02:00,2399,6\n"
            + "2024-05-10 00:00:01Z,7,8\n"
            + "2024-05-09 22:30:02-0130,7,8\n"
        )
        assert [arrival.time_ns for arrival in TraceSource(path)] == [0, 7405000, 990070000, 1990070000]

    def test_a_uniform_offset_takes_the_fast_way(self, write):
        rows = "".join(f"2024-05-10 00:00:{second:02d}.5-07:30,10,1\n" for second in range(60))
        times = [arrival.time_ns for arrival in TraceSource(write(AZURE_HEADER + rows))]
        assert times == [second * 1_000_000_000 for second in range(60)]

    @pytest.mark.parametrize(
        ("rows", "line", "words"),
        [
            ("2023-11-16 18:15:46,x,44\n", 2, "'ContextTokens': found 'x'"),
            ("2023-11-16 18:15:46,1,2\n2023-11-16 18:15:47,1,nan\n", 3, "'GeneratedTokens': found 'nan'"),
            ("2023-11-16 18:15:46,1,-2\n", 2, "'GeneratedTokens': found '-2'"),
            ("2023-11-16 18:15:46,1,2.5\n", 2, "'GeneratedTokens': found '2.5'"),
            ("2023-11-16 18:15:46,1,99999999999\n", 2, "'GeneratedTokens': found '99999999999'"),
            ("2023-11-16 18:15:46,,2\n", 2, "'ContextTokens': found ''"),
            ("yesterday,1,2\n", 2, "'TIMESTAMP': found 'yesterday'"),
            ("2023-11-16,1,2\n", 2, "'TIMESTAMP': found '2023-11-16'"),
            ("2023-13-16 18:15:46,1,2\n", 2, "TIMESTAMP"),
            ("NaT,1,2\n", 2, "'TIMESTAMP': found 'NaT'"),
            ("9999-11-16 18:15:46,1,2\n", 2, "'TIMESTAMP': found '9999"),
            ("2023-11-16 18:15:46,1,2\n2023-11-16 18:15:47,1\n", 3, "2 fields, expected 3 (a truncated line?)"),
            ("2023-11-16 18:15:46,1,2\n2023-11-1", 3, "1 fields, expected 3 (a truncated line?)"),
            ("2023-11-16 18:15:46,1,2\n2023-11-16 18:15:45.5,1,2\n", 3, "time goes back by 0.5 s"),
            ("2023-11-16 18:15:46,1,2\n2023-11-16 18:15:46+00:00,1,2\n", 3, "same form of time"),
            ("2023-11-16 18:15:46+00:00,1,2\n2023-11-16 18:15:46,1,2\n", 3, "same form of time"),
            ('2023-11-16 18:15:46,1,2\n"2023-11-16 18:15:47,1,2\n', 3, "fields"),
        ],
    )
    def test_a_bad_row_is_named_by_its_line(self, write, rows, line, words):
        source = TraceSource(write(AZURE_HEADER + rows), TraceOptions("azure"))
        for read in (source.scan, lambda: list(source)):
            with pytest.raises(TraceError) as caught:
                read()
            assert words in str(caught.value)
            assert caught.value.line == line
            assert f"line {line}" in str(caught.value)

    def test_blank_lines_are_passed_over_and_lines_still_counted(self, write):
        path = write(AZURE_HEADER + "2023-11-16 18:15:46,1,2\n\n2023-11-16 18:15:47,1,x\n")
        with pytest.raises(TraceError, match="line 4"):
            TraceSource(path).scan()

    def test_a_last_line_without_line_break_counts(self, write):
        assert TraceSource(write(AZURE_HEADER + "2023-11-16 18:15:46,1,2")).scan().num_rows == 1

    def test_time_may_not_go_back_between_chunks_either(self, write, monkeypatch):
        monkeypatch.setattr(trace_files, "CHUNK_ROWS", 2)
        rows = ["2023-11-16 18:15:46,1,2\n", "2023-11-16 18:15:48,1,2\n", "2023-11-16 18:15:47,1,2\n"]
        with pytest.raises(TraceError, match="line 4: time goes back by 1 s"):
            TraceSource(write(AZURE_HEADER + "".join(rows))).scan()


class TestBurst:
    def test_seconds_are_exact_and_sessions_kept(self, write):
        header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        path = write(
            header
            + "5,s1,1.2,ChatGPT,472,18,490,Conversation log\n"
            + "45.250000001,s2,0.5,GPT-4,1087,230,1317,API log\n"
            + "118.5,,0.5,GPT-4,417,276,693,API log\n"
        )
        arrivals = list(TraceSource(path))
        assert [arrival.time_ns for arrival in arrivals] == [0, 40_250_000_001, 113_500_000_000]
        assert [arrival.session for arrival in arrivals] == ["s1", "s2", None]

    def test_failed_requests_are_skipped_and_counted(self, write):
        rows = "1,GPT-4,10,5,15,API log\n2,GPT-4,7,0,7,API log\n3,GPT-4,0,4,4,API log\n4,GPT-4,20,6,26,API log\n"
        source = TraceSource(write(BURST_HEADER + rows))
        summary = source.scan()
        assert (summary.format, summary.num_rows, summary.num_requests) == ("burstgpt", 4, 2)
        assert [(arrival.row, arrival.time_ns) for arrival in source] == [(0, 0), (3, 3_000_000_000)]

    @pytest.mark.parametrize("time_s", ["-1", "nan", "1e", "", "1.-5", "99999999999"])
    def test_bad_seconds(self, write, time_s):
        path = write(BURST_HEADER + f"0,GPT-4,1,1,2,API log\n{time_s},GPT-4,1,1,2,API log\n")
        with pytest.raises(TraceError, match="line 3: column 'Timestamp': found"):
            TraceSource(path).scan()


class TestMooncake:
    def test_blocks_become_prompts_that_share(self, write):
        path = write(mooncake_line(0, 600, 3, [8, 9]) + mooncake_line(27000, 1030, 4, [8, 9, 10]))
        one, two = TraceSource(path)
        assert (one.time_ns, two.time_ns) == (0, 27_000_000_000)
        np.testing.assert_array_equal(one.prompt.materialize(), two.prompt.materialize()[:600])
        assert two.prompt.length == 1030

    def test_fractions_of_milliseconds(self, write):
        path = write(mooncake_line(0, 5, 3) + mooncake_line(100.25, 5, 3))
        assert [arrival.time_ns for arrival in TraceSource(path)] == [0, 100_250_000]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('{"timestamp": 5000, "input_le', "is not JSON (a truncated line?)"),
            ("[1, 2]\n", "expected an object"),
            ('{"timestamp": 1}\n', "expected an object with the keys"),
            (mooncake_line(-1, 5, 3), "'timestamp': found -1"),
            (mooncake_line(float("nan"), 5, 3), "NaN is no JSON number"),
            (mooncake_line(True, 5, 3), "'timestamp': found True"),
            (mooncake_line("1", 5, 3), "'timestamp': found '1'"),
            (mooncake_line(1000, 5, -3), "'output_length': found -3"),
            (mooncake_line(1000, 5, 3.5), "'output_length': found 3.5"),
            (mooncake_line(1000, 5, "3"), "'output_length': found '3'"),
            (mooncake_line(1000, 600, 3, [1]), "1 hash_ids for 600 tokens: expected 2"),
            (mooncake_line(1000, 5, 3, 7), "expected a list"),
            (mooncake_line(1000, 5, 3, ["x"]), "whole numbers"),
            (mooncake_line(1000, 5, 3, [-1]), "whole numbers"),
        ],
    )
    def test_a_bad_line_is_named(self, write, text, words):
        path = write(mooncake_line(0, 5, 3) + text)
        with pytest.raises(TraceError) as caught:
            TraceSource(path).scan()
        assert words in str(caught.value)
        assert caught.value.line == 2


class TestDelays:
    def test_a_row_of_a_session_comes_its_delay_after_the_row_before(self, write):
        rows = [
            {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
            {"session_id": "a", "delay": 1200, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]},
            {"session_id": "b", "timestamp": 300, "input_length": 600, "output_length": 5, "hash_ids": [1, 4]},
            {"session_id": "a", "delay": 50, "input_length": 800, "output_length": 5, "hash_ids": [1, 5]},
        ]
        source = TraceSource(write("".join(json.dumps(row) + "\n" for row in rows)))
        found = [(one.time_ns // 10**6, one.session, one.prompt.length) for one in source]
        assert found == [(0, "a", 600), (300, "b", 600), (1200, "a", 700), (1250, "a", 800)]
        assert any("'delay' after the row before of their session" in note for note in source.scan().notes)

    def test_in_csv_an_empty_arrival_has_a_delay(self, write):
        text = "session_id,timestamp,delay,prompt_tokens,output_tokens\na,0,,100,9\na,,1.5,120,9\nb,1,,100,9\n"
        assert [one.time_ns / 1e9 for one in TraceSource(write(text))] == [0, 1, 1.5]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("session_id,t,delay,prompt,output\na,0,,9,9\nb,,2,9,9\n", "line 3: neither 't' nor a 'delay' behind an"),
            ("t,delay,prompt,output\n0,,9,9\n,2,9,9\n", "rows have 'delay' and no 't', but no session"),
        ],
    )
    def test_a_delay_needs_a_row_before(self, write, text, words):
        with pytest.raises(TraceError, match=words):
            list(TraceSource(write(text)))


class TestFile:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "empty"),
            ("\n", "first line is blank"),
            (AZURE_HEADER, "no rows"),
            ("2023-11-16 18:15:46.6805900,374,44\n", "no header, object or log line of a known format: '2023"),
            ("TIMESTAMP,ContextTokens,GeneratedTokns\n", "the header of azure traces has 'GeneratedTokens'"),
            ("TIMESTAMP;ContextTokens;GeneratedTokens\n", "separated by semicolons, expected commas"),
            ("Timestamp\tModel\tRequest tokens\n", "separated by tabs, expected commas"),
            ("when,who,what\n", "it lacks arrival, prompt, output; found: 'when', 'who', 'what'"),
            ("arrived,prompt,output\n", "no rows"),
            (
                '{"arrived": 1, "usage": {"prompt": 5}}\n',
                "a JSON object with unknown keys: arrived, usage; known are CSV",
            ),
            (
                '{"timestamp": 1, "input_length": 5}\n',
                "it lacks output (output_length); found: 'timestamp', 'input_length'",
            ),
            (b"\xff\xfe\x00bad", "line 1: is not UTF-8"),
            (AZURE_HEADER.encode() + b"2023-11-16 18:15:46,1,\xff\n", "line 2: is not UTF-8"),
        ],
    )
    def test_what_is_no_trace(self, write, text, words):
        with pytest.raises(ForedraftError) as caught:
            TraceSource(write(text)).scan()
        assert words in str(caught.value)

    def test_a_given_format_has_the_hint_at_separators_too(self, write):
        with pytest.raises(TraceError, match="separated by semicolons, expected commas"):
            TraceSource(write("TIMESTAMP;ContextTokens;GeneratedTokens\n"), TraceOptions("azure")).scan()

    @pytest.mark.parametrize(
        "later",
        [
            b"2023-11-16 18:15:49,1,\xff\n",
            b"2023-11-16 18:15:49,1\n",
            b"later,1,2\n",
            b'"2023-11-16\n18:15:49",1,2\n',
        ],
    )
    @pytest.mark.parametrize(
        ("earlier", "words"),
        [
            ("2023-11-16 18:15:47,1,10.5", "'GeneratedTokens': found '10.5', expected a whole number of tokens"),
            ("2023-11-16 18:15:45,1,2", "time goes back by 1 s"),
            ("2023-11-16 18:15:47,1", "2 fields"),
        ],
    )
    def test_the_first_error_of_a_file_is_raised(self, write, earlier, words, later):
        text = f"{AZURE_HEADER}2023-11-16 18:15:46,1,2\n{earlier}\n2023-11-16 18:15:48,1,2\n"
        with pytest.raises(TraceError) as caught:
            TraceSource(write(text.encode() + later)).scan()
        assert caught.value.line == 3 and words in str(caught.value)

    def test_the_first_error_of_json_lines_is_raised(self, write):
        good, bad = mooncake_line(0, 5, 3), mooncake_line(1000, 5, 3.5)
        for later in ("{", mooncake_line(-1, 5, 3), mooncake_line(2000, 600, 3, [1]), mooncake_line(2000, 5, 3, 7)):
            with pytest.raises(TraceError) as caught:
                TraceSource(write(good + bad + later)).scan()
            assert str(caught.value).endswith(
                "line 2: key 'output_length': found 3.5, expected a whole number of tokens from 0 to 2147483647"
            )

    def test_a_relative_path_is_relative_to_the_working_directory(self, write, tmp_path, monkeypatch):
        write(AZURE_HEADER + "2023-11-16 18:15:46,1,2\n")
        (tmp_path / "below").mkdir()
        (tmp_path / "below" / "scenario.toml").write_text('workload.trace = "trace"\n')
        monkeypatch.chdir(tmp_path)
        path = load_scenario("below/scenario.toml", [])[0].workload.trace
        assert len(list(TraceSource(path))) == 1

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            list(TraceSource(tmp_path / "nothing.csv"))

    def test_window_scale_and_limit(self, write, monkeypatch):
        monkeypatch.setattr(trace_files, "CHUNK_ROWS", 4)
        path = write("".join(mooncake_line(1000 * second, 5, 3) for second in range(20)))

        def rows_and_times(**arguments):
            return [(arrival.row, arrival.time_ns) for arrival in TraceSource(path, **arguments)]

        assert rows_and_times(limit=2) == [(0, 0), (1, 10**9)]
        assert rows_and_times(start_s=6, stop_s=9) == [(6, 0), (7, 10**9), (8, 2 * 10**9)]
        assert rows_and_times(start_s=17.5, rate_scale=4.0) == [(18, 125_000_000), (19, 375_000_000)]
        assert len(rows_and_times()) == 20

    @pytest.mark.ci
    def test_memory_does_not_grow_with_the_file(self, write, monkeypatch):
        monkeypatch.setattr(trace_files, "CHUNK_ROWS", 400)
        peaks = []
        for num_rows in (2_000, 6_000):
            path = write("".join(mooncake_line(100 * row, 5, 3) for row in range(num_rows)))
            gc.collect()
            tracemalloc.start()
            assert sum(1 for _ in TraceSource(path)) == num_rows
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert peaks[1] < 1.2 * peaks[0]


@needs_traces
class TestRealFiles:
    def test_azure_hour(self):
        arrivals = list(TraceSource(AZURE))
        assert len(arrivals) == 19366
        assert arrivals[1].time_ns == 4_314_579_000
        assert sum(arrival.output_len for arrival in arrivals) == 4_088_665

    def test_mooncake_hour(self):
        summary = TraceSource(MOONCAKE).scan()
        assert (summary.format, summary.num_rows) == ("mooncake", 12031)
        first = next(iter(TraceSource(MOONCAKE)))
        assert first.prompt.materialize().shape == (6758,)


def test_a_resampled_trace_consists_of_windows_that_the_seed_draws(tmp_path):
    """A minute with a request every second, then one with four: windows keep their order and their gaps."""
    path = tmp_path / "trace.csv"
    rows = [f"2024-01-01 00:00:{i:02},{100 + i},5\n" for i in range(60)]
    rows += [f"2024-01-01 00:01:{i // 4:02}.{25 * (i % 4):02},{1000 + i},5\n" for i in range(240)]
    path.write_text(AZURE_HEADER + "".join(rows))
    as_it_is = list(TraceSource(path))
    made = [list(TraceSource(path, resample_s=10.0, seed=seed)) for seed in range(40)]
    assert made[0] == list(TraceSource(path, resample_s=10.0, seed=0)) != made[1]
    assert np.mean([len(one) for one in made]) == pytest.approx(len(as_it_is), rel=0.1)
    for one in made:
        times = [arrival.time_ns for arrival in one]
        assert (
            times == sorted(times) and times[-1] < 120e9 and [arrival.row for arrival in one] == list(range(len(one)))
        )
        inside = [(a, b) for a, b in itertools.pairwise(one) if a.time_ns // 10**10 == b.time_ns // 10**10]
        lengths = [b.prompt.length - a.prompt.length for a, b in inside]
        assert set(lengths) <= {1, 1000 - 159, 100 - 1239}  # neighbours in the trace, whose end meets its beginning
    fast = list(TraceSource(path, rate_scale=2.0, resample_s=10.0, limit=50))
    assert [one.time_ns for one in fast] == [round(one.time_ns / 2) for one in made[0][:50]]
    whole = list(TraceSource(path, resample_s=1000.0, seed=3))
    assert sorted(one.prompt.length for one in whole) == sorted(one.prompt.length for one in as_it_is)


def test_the_first_lines_are_read_again_only_if_the_file_has_changed(write, monkeypatch):
    read = []
    monkeypatch.setattr(
        trace_layout, "first_line", lambda path, real=trace_layout.first_line: read.append(1) or real(path)
    )
    path = write(AZURE_HEADER + "2023-11-16 18:15:46.6805900,374,44\n")
    assert TraceSource(path).layout() == TraceSource(path, rate_scale=2.0).layout()
    assert TraceSource(path).layout().format == "azure" and len(read) == 1
    with pytest.raises(TraceError):
        TraceSource(path, TraceOptions("burstgpt")).layout()
    write(BURST_HEADER + "1,ChatGPT,374,44,418,Log\n")
    assert TraceSource(path).layout().format == "burstgpt" and len(read) == 3
