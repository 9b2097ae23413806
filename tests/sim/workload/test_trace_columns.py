"""Columns of traces: the units of times, and names that are usual or given."""

import json

import pytest
from foredraft.sim.workload.trace_inference import TraceError
from foredraft.sim.workload.trace_layout import TraceOptions
from foredraft.sim.workload.traces import TraceSource
from trace_texts import AZURE_HEADER, mooncake_line, seconds


class TestUnits:
    @pytest.mark.parametrize(("gap", "rates"), [(0.2, "5,000 requests/s, in seconds 5"), (2, "500 .* in seconds 0.5")])
    def test_mooncake_lines_that_may_be_seconds_are_asked_about(self, write, gap, rates):
        """guidellm's Mooncake traces are in seconds, Mooncake's own in milliseconds."""
        path = write("".join(mooncake_line(gap * row, 600, 20, [0, row + 1]) for row in range(20)))
        with pytest.raises(TraceError, match=f"in milliseconds .*{rates}. Set workload.time_unit=ms or .*=s"):
            TraceSource(path).scan()
        assert seconds(path, time_unit="s")[-1] == pytest.approx(19 * gap)
        assert seconds(path, time_unit="ms")[-1] == pytest.approx(19 * gap / 1000)

    def test_mooncake_lines_in_milliseconds_are_not(self, write):
        path = write("".join(mooncake_line(3000 * (row // 9), 600, 20) for row in range(30)))
        assert seconds(path)[-1] == 9.0 and TraceSource(path).scan().notes == ()
        assert seconds(write(mooncake_line(7, 5, 3) * 40)) == [0.0] * 40, "all at once have no rate"

    @pytest.mark.parametrize(
        ("first", "unit"),
        [(1.7e9, "seconds"), (1.7e12, "milliseconds"), (1.7e15, "microseconds"), (1.7e18, "nanoseconds")],
    )
    def test_times_since_1970_tell_their_unit(self, write, first, unit):
        scale = 1.7e9 / first
        lines = [mooncake_line(int(first + row / scale), 5, 3) for row in range(9)]
        header = "timestamp,prompt_tokens,output_tokens\n"
        rows = [f"{int(first + row / scale)},5,3\n" for row in range(9)]
        for path in (write("".join(lines), "json"), write(header + "".join(rows), "csv")):
            assert seconds(path) == pytest.approx(range(9))
            assert f"times in {unit} since 1970, by their size" in TraceSource(path).scan().notes

    def test_csv_in_milliseconds_without_saying_so_is_asked_about(self, write):
        path = write("timestamp,input_tokens,output_tokens\n" + "".join(f"{3000 * row},5,3\n" for row in range(9)))
        with pytest.raises(TraceError, match=r"in seconds its .* 0.000333 requests/s, in milliseconds 0.333"):
            TraceSource(path).scan()
        assert seconds(path, time_unit="ms")[-1] == 24.0

    def test_what_contradicts_the_file(self, write):
        azure = write(AZURE_HEADER + "2023-11-16 18:15:46,1,2\n", "azure")
        with pytest.raises(TraceError, match=r"times in 'TIMESTAMP' are dates: leave workload.time_unit out"):
            TraceSource(azure, TraceOptions(time_unit="s")).scan()
        named = write("arrival_ms,input_tokens,output_tokens\n0,1,1\n", "named")
        with pytest.raises(TraceError, match=r"'arrival_ms' says milliseconds, but workload.time_unit is s"):
            TraceSource(named, TraceOptions(time_unit="s")).scan()
        log = write("INFO 02-13 11:33:33 [logger.py:1] Received request a: params: x, prompt_token_ids: [1]\n", "log")
        with pytest.raises(TraceError, match="vllm-log has no columns"):
            TraceSource(log, TraceOptions("vllm-log", time_unit="s")).scan()


class TestNames:
    @pytest.mark.parametrize(
        "header",
        [
            "arrival,prompt_tokens,output_tokens",
            "arrived_at,num_prefill_tokens,num_decode_tokens",
            "arrival_time,input_length,output_length",
            "time_s,Prompt Length,Completion Length",
            "Timestamp (s),inputTokens,outputTokens",
            "timestamp,prompt_token_count,completion_token_count",
            "request_time,request_tokens,response_tokens",
            "start_time,n_prompt_tokens,n_generated",
            "ts,ISL,OSL",
            "t,input_len,gen_len",
            "created_at,tokens_in,tokens_out",
        ],
    )
    def test_usual_names_of_columns(self, write, header):
        path = write(f"{header}\n1,30,4\n2.5,20,3\n")
        assert seconds(path) == [0.0, 1.5]
        assert [(one.prompt.length, one.output_len) for one in TraceSource(path)] == [(30, 4), (20, 3)]
        summary = TraceSource(path).scan()
        time, prompt, output = header.split(",")
        assert summary.format == "csv"
        assert summary.notes[0] == f"reads {time!r} as arrival, {prompt!r} as prompt, {output!r} as output"

    def test_a_named_unit_a_date_other_columns_and_sessions(self, write):
        path = write(
            "id,arrivalMs,user,prompt_tokens,max_tokens,output_tokens,cached_tokens,session_id\n"
            "a,500,u,30,900,4.0,7,s1\nb,1.25e3,u,20.0,900,3,7,s2\n"
        )
        assert seconds(path) == [0.0, 0.75] and [one.session for one in TraceSource(path)] == ["s1", "s2"]
        assert TraceSource(path).scan().notes == (
            "reads 'arrivalMs' as arrival, 'prompt_tokens' as prompt, 'output_tokens' as output, 'session_id' as session; "
            "leaves out 'id', 'user', 'max_tokens', 'cached_tokens'",
            "times in milliseconds, by the name 'arrivalMs'",
        )
        multimodal = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"  # Azure 2025
        path = write(multimodal + "2024-10-15 00:00:00.5,1,30,4\n2024-10-15T00:00:02,0,20,3\n")
        assert seconds(path) == [0.0, 1.5] and "leaves out 'NumImages'" in TraceSource(path).scan().notes[0]

    def test_columns_that_the_user_names(self, write):
        path = write("when,asked,answered,tenant\n0,30,4,a\n2,20,3,b\n")
        assert seconds(path, columns="arrival=when,prompt=asked,output=answered") == [0.0, 2.0]
        source = TraceSource(path, TraceOptions(columns="arrival=when, prompt=asked, output=answered, session=tenant"))
        assert [one.session for one in source] == ["a", "b"]
        lines = write('{"at": 0, "p": 5, "o": 2}\n{"at": 2, "p": 6, "o": 3}\n')
        assert seconds(lines, columns="arrival=at,prompt=p,output=o") == [0.0, 2.0]

    @pytest.mark.parametrize(
        ("header", "columns", "words"),
        [
            ("when,asked,made", None, "it lacks arrival, prompt, output; found: 'when', 'asked', 'made'"),
            ("when,prompt_tokens,output_tokens", None, "it lacks arrival; .*give --columns arrival=NAME"),
            (
                "arrival,input_tokens,prompt_tokens,output_tokens",
                None,
                "'input_tokens', 'prompt_tokens'; give .*prompt=NAME",
            ),
            ("a,b,c", "arrival=a,prompt=b", "it lacks output; found: 'a', 'b', 'c'"),
            ("a,b,c", "arrival=a,prompt=b,output=d", "no column 'd'"),
            ("a,b,c", "arival=a", "expected arrival=NAME.*did you mean 'arrival'"),
            ("a,b,c", "arrival", "expected arrival=NAME"),
            ("arrival,output_tokens,prompt_tokens,arrival", None, "'arrival', 'arrival'|occurs twice"),
            ("arrival;prompt_tokens;output_tokens", None, "separated by semicolons, expected commas"),
        ],
    )
    def test_columns_that_are_not_clear(self, write, header, columns, words):
        with pytest.raises(TraceError, match=words):
            TraceSource(write(f"{header}\n"), TraceOptions(columns=columns)).scan()

    def test_a_bad_cell_is_named_by_its_column(self, write):
        with pytest.raises(TraceError, match="line 3: column 'prompt_tokens': found 'many'"):
            TraceSource(write("arrival_s,prompt_tokens,output_tokens\n0,5,1\n9,many,1\n")).scan()

    def test_json_lines_by_names(self, write):
        rows = [{"arrival_time": 2.0 * i, "prompt_tokens": 30 + i, "output_tokens": 4, "model": "m"} for i in range(3)]
        path = write("".join(json.dumps(row) + "\n" for row in rows))
        assert seconds(path) == [0.0, 2.0, 4.0] and TraceSource(path).scan().format == "jsonl"
        assert TraceSource(path).scan().notes[0].endswith("leaves out 'model'")

    def test_mooncake_lines_without_blocks(self, write):
        lines = [json.dumps({"timestamp": 400 * i, "input_length": 600, "output_length": 4}) + "\n" for i in range(3)]
        source = TraceSource(write("".join(lines)))
        assert source.scan().format == "mooncake" and not source.has_block_hashes
        assert [one.prompt.length for one in source] == [600] * 3

    def test_qwen_bailian(self, write):
        """Seconds, and blocks of 16 tokens."""
        rows = [
            {"chat_id": i, "parent_chat_id": -1, "timestamp": 0.25 * i, "input_length": 40, "output_length": 5,
             "type": "text", "turn": 1, "hash_ids": [1, 2, 10 + i]}
            for i in range(8)
        ]  # fmt: skip
        source = TraceSource(write("".join(json.dumps(row) + "\n" for row in rows)))
        one, two, *_ = source
        assert (source.scan().format, two.time_ns) == ("bailian", 250_000_000)
        assert source.scan().notes == ("blocks of 16 tokens, by the number of hash_ids",)
        same = one.prompt.materialize() == two.prompt.materialize()
        assert same[:32].all() and not same[32:].any()

    @pytest.mark.parametrize(
        ("keys", "notes"),
        [
            ({}, ("blocks of 512 tokens, by the number of hash_ids; of the first rows 16, 32, 64, 128, 256, 512 fit",)),
            (
                {"chat_id": 1, "parent_chat_id": -1},
                ("blocks of 16 tokens, by the number of hash_ids; of the first rows 16, 32, 64, 128, 256, 512 fit",),
            ),
        ],
    )
    def test_of_several_sizes_of_blocks_that_of_the_format_is_taken_and_said(self, write, keys, notes):
        rows = [
            keys | {"timestamp": 900 * i, "input_length": 12, "output_length": 5, "hash_ids": [i]} for i in range(8)
        ]
        assert TraceSource(write("".join(json.dumps(row) + "\n" for row in rows))).scan().notes == notes
