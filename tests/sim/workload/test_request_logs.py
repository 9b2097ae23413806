"""Logs of servers and OpenTelemetry spans as traces. The lines have the form of those that vLLM 0.6 to 0.19, SGLang 0.5
and the OpenTelemetry collector write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foredraft.sim.workload.trace_inference import TraceError
from foredraft.sim.workload.trace_layout import TraceOptions, resolve_layout
from foredraft.sim.workload.traces import TraceSource

PARAMS = "SamplingParams(n=1, temperature=0.7, stop=[], stop_token_ids=[], max_tokens=512, extra_args=None)"


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines: str) -> Path:
        path = tmp_path / "log"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write_lines


def rows(path: Path, form: str = "auto") -> list[tuple[float, int, int]]:
    """Seconds, prompt and output of every request."""
    return [(one.time_ns / 1e9, one.prompt.length, one.output_len) for one in TraceSource(path, TraceOptions(form))]


# -- vLLM -------------------------------------------------------------------------------------------------------------

START = "(APIServer pid=7) INFO:     Started server process [7]"


def details(time: str, name: str, tokens: int, prompt: str = "'Hi'") -> str:
    ids = list(range(tokens))
    said = f"Request {name} details: prompt: {prompt}, prompt_token_ids: {ids}, prompt_embeds shape: None."
    return f"(APIServer pid=7) DEBUG {time} [logger.py:56] {said}"


def received(time: str, name: str) -> str:
    return (
        f"(APIServer pid=7) INFO {time} [logger.py:65] Received request {name}: params: {PARAMS}, lora_request: None."
    )


def generated(time: str, name: str, ids: object, stream: str = "", why: str = "'stop'") -> str:
    said = f"Generated response {name}{stream}: output: 'x, y', output_token_ids: {ids}, finish_reason: {why}"
    return f"(APIServer pid=7) INFO {time} [logger.py:92] {said}"


def test_vllm_with_details_and_streams(write):
    delta, whole = " (streaming delta)", " (streaming complete)"
    path = write(
        START,
        details("02-13 11:33:33", "chatcmpl-a1", 5),
        received("02-13 11:33:33", "chatcmpl-a1"),
        "(APIServer pid=7) INFO 02-13 11:33:33 [async_llm.py:382] Added request chatcmpl-a1-b2.",
        details("02-13 11:33:34", "chatcmpl-b2", 7, prompt="'prompt_token_ids: [1, 2, 3], and more'"),
        received("02-13 11:33:34", "chatcmpl-b2"),
        generated("02-13 11:33:35", "chatcmpl-b2", [9, 9], delta, "None"),
        generated("02-13 11:33:36", "chatcmpl-b2", [9], delta, "None"),
        generated("02-13 11:33:36", "chatcmpl-b2", None, whole, "'streaming_complete'"),
        generated("02-13 11:33:37", "chatcmpl-a1", [4, 5, 6, 7]),
        received("02-13 11:33:39", "chatcmpl-c3"),
    )
    assert resolve_layout(str(path)).format == "vllm-log"
    assert rows(path) == [(0.0, 5, 4), (1.0, 7, 3)]
    assert TraceSource(path).scan().num_rows == 3, "a request without an answer is a row without work"


def test_vllm_before_0_11_has_the_prompt_in_one_line(write):
    prompt = "INFO 10-01 18:43:{} logger.py:36] Received request cmpl-{}-0: prompt: 'a [b]', params: "
    path = write(
        *(prompt.format(27 + i, i) + f"{PARAMS}, {key}: [1, 2, 3], lora_request: None." for i, key in enumerate(
            ("prompt_token_ids", "prompt token ids"))),
        "INFO 10-01 18:43:29 logger.py:60] Generated response cmpl-0-0: output: '', output_token_ids: (1, 2), finish_reason: length",
        "INFO 10-01 18:43:30 logger.py:60] Generated response cmpl-1: output: '', output_token_ids: [1], finish_reason: length",
    )  # fmt: skip
    assert rows(path) == [(0.0, 3, 2), (1.0, 3, 1)]


@pytest.mark.parametrize(
    ("first", "second", "gap_s"), [("12-31 23:59:59", "01-01 00:00:01", 2), ("02-28 23:59:59", "02-29 00:00:00", 1)]
)
def test_vllm_does_not_write_the_year(write, first, second, gap_s):
    lines = [
        line
        for i, time in enumerate((first, second))
        for line in (details(time, f"cmpl-{i}", 2), generated(time, f"cmpl-{i}", [1]))
    ]
    assert [row[0] for row in rows(write(*lines))] == [0.0, gap_s]


def test_vllm_without_lengths_says_how_to_get_them(write):
    path = write(START, received("02-13 11:33:33", "chatcmpl-a1"), received("02-13 11:33:34", "chatcmpl-b2"))
    with pytest.raises(TraceError, match=r"2 requests, and the tokens of none; start vLLM with --enable-log-requests"):
        TraceSource(path).scan()
    with pytest.raises(TraceError, match="line 1: '2025-13-41 11:33:33' is no time"):
        TraceSource(write(details("13-41 11:33:33", "cmpl-1", 2))).scan()


# -- SGLang -----------------------------------------------------------------------------------------------------------


def finish(meta: dict, stamp: str = "[2025-12-24 21:05:35] ", more: str = "") -> str:
    obj = f"GenerateReqInput(rid='r', stream=True{more}, text=\"'meta_info': {{'prompt_tokens': 9}}\")"
    return f"{stamp}Finish: obj={obj}, out={{'text': 'x', 'meta_info': {meta}}}"


def test_sglang_as_text_is_sorted_by_arrival(write):
    meta = {"id": "r", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 100, "cached_tokens": 64}
    meta |= {"weight_version": "default", "completion_tokens": 20, "e2e_latency": 1.5}
    path = write(
        "[2025-12-24 21:05:30] The server is fired up and ready to roll!",
        "[2025-12-24 21:05:31 TP0] Prefill batch, #new-seq: 1, #new-token: 128, #cached-token: 0, token usage: 0.00",
        finish(meta),
        finish({**meta, "prompt_tokens": 30, "e2e_latency": 4.25}),
        finish({**meta, "completion_tokens": 0}),
    )
    assert resolve_layout(str(path)).format == "sglang-log"
    assert rows(path) == [(0.0, 30, 20), (2.75, 100, 20)]


def test_sglang_says_when_a_request_arrived(write):
    meta = {"prompt_tokens": 10, "completion_tokens": 2, "e2e_latency": 9.0}
    path = write(
        finish({**meta, "request_received_ts": 1779262962.5}, stamp="1779264164565\t2026-05-20T08:02:44.565Z\t"),
        finish(meta, more=", received_time=1779262961.25, received_time_perf=137449.5"),
        finish({**meta, "request_received_ts": 1779262963.0}, more=", received_time=26519772.45"),
    )
    assert [row[0] for row in rows(path)] == [0.0, 1.25, 1.75]


def test_sglang_as_json(write):
    def entry(event: str, second: int, **more: object) -> str:
        stamp = f"2026-05-20T08:02:{second:02}.123456"
        return json.dumps({"timestamp": stamp, "event": event, "rid": "r", "obj": {"stream": True}, **more})

    meta = {"prompt_tokens": 12, "completion_tokens": 3, "e2e_latency": 2.0}
    path = write(
        entry("request.received", 40),
        entry("request.finished", 44, out={"meta_info": meta}),
        entry("request.finished", 45, out={"meta_info": meta | {"e2e_latency": 5.0}}),
    )
    assert resolve_layout(str(path)).format == "sglang-log"
    assert rows(path) == [(0.0, 12, 3), (2.0, 12, 3)]
    with pytest.raises(TraceError, match=r"line 1: -4 tokens; expected a whole number"):
        TraceSource(write(entry("request.finished", 44, out={"meta_info": meta | {"prompt_tokens": -4}}))).scan()


# -- OpenTelemetry ----------------------------------------------------------------------------------------------------


def span(name: str, start_s: float, tokens: dict | None = None, parent: str = "", session: str = "") -> dict:
    attributes = [{"key": "gen_ai.request.model", "value": {"stringValue": "llama"}}]
    attributes += [{"key": key, "value": {"intValue": value}} for key, value in (tokens or {}).items()]
    if session:
        attributes.append({"key": "gen_ai.conversation.id", "value": {"stringValue": session}})
    times = {"startTimeUnixNano": str(round(start_s * 1e9)), "endTimeUnixNano": str(round(start_s * 1e9) + 7)}
    ids = {"traceId": "5b8aa5a2d2c872e8321cf37308d69df2", "spanId": name, "parentSpanId": parent}
    return {**ids, "name": "llm_request", "kind": 2, **times, "attributes": attributes, "status": {}}


def document(*spans: dict) -> dict:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "vllm"}}]}
    scopes = [{"scope": {"name": "vllm.llm_engine"}, "spans": list(spans)}]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}


OLD = {"gen_ai.usage.prompt_tokens": "120", "gen_ai.usage.completion_tokens": "80"}
NEW = {"gen_ai.usage.input_tokens": 40, "gen_ai.usage.output_tokens": 8}


def test_spans_of_both_conventions_as_lines(write):
    path = write(
        json.dumps(document(span("a", 1_700_000_002.5, OLD), span("db", 1_700_000_000.0))),
        json.dumps(document(span("b", 1_700_000_001.0, NEW, session="s1"))),
    )
    assert resolve_layout(str(path)).format == "otlp"
    assert rows(path) == [(0.0, 40, 8), (1.5, 120, 80)]
    assert [one.session for one in TraceSource(path)] == ["s1", None]


def test_a_request_counts_once_in_a_document_of_nested_spans(write):
    agent = span("agent", 1.0, {"gen_ai.usage.input_tokens": 160, "gen_ai.usage.output_tokens": 88})
    around = span("client", 1.5, NEW, parent="tool")
    tool = span("tool", 1.2, parent="agent")
    path = write(
        json.dumps(
            document(agent, tool, around, span("server", 2.0, NEW, "client"), span("x", 3.0, OLD, "agent")), indent=1
        )
    )
    assert resolve_layout(str(path)).format == "otlp"
    assert rows(path) == [(0.0, 40, 8), (1.0, 120, 80)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(document(span("a", 1.0))), "no request in this log; expected spans with the attributes gen_ai.usage"),
        (json.dumps(document(span("a", 1.0, NEW | {"gen_ai.usage.input_tokens": "x"}))), "line 1: found 'x'; expected a whole"),
        (json.dumps(document(span("a", 1.0, NEW) | {"startTimeUnixNano": None})), "line 1: found None; expected a whole number"),
        ('{"resourceSpans": 5}', "line 1: resourceSpans: found 5; expected a list of objects"),
        ('{"resourceSpans": [', "is not JSON (a truncated line?)"),
    ],
)  # fmt: skip
def test_broken_spans_are_one_message(write, text, message):
    with pytest.raises(TraceError) as caught:
        TraceSource(write(text)).scan()
    assert message in str(caught.value)


# -- other logs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"level": "info", "ts": 1.5, "msg": "GET /v1/completions"}',
        '{"level":\n"info"}',
        "[1, 2]",
        "7",
        "Nov 27 00:41:56 host nginx[5]: 10.0.0.1 - POST /v1/chat/completions 200",
        '10.42.0.190 - - [20/May/2026:08:02:44 +0000] "POST /v1/chat/completions HTTP/1.1" 200 512',
        "2026-05-20 08:02:44 INFO Finish: of something else",
        "\x00" * 10,
    ],
)
def test_a_foreign_log_gets_the_formats_that_are_known(write, text):
    path = write(text)
    with pytest.raises(TraceError) as caught:
        TraceSource(path).scan()
    message = str(caught.value)
    assert message.startswith(f"{path}, line 1: ") and "\n" not in message
    for name in ("azure", "BurstGPT", "Mooncake", "vllm-log", "sglang-log", "otlp", "Prometheus"):
        assert name in message


def test_a_page_of_metrics_is_no_trace(write):
    with pytest.raises(TraceError, match="has no single requests: `foredraft trace FILE --out"):
        TraceSource(write("# HELP vllm:x A counter.", "# TYPE vllm:x counter", "vllm:x 1.0")).scan()


def test_a_format_that_is_given_must_be_the_files(write):
    for form, words in (("vllm-log", "start vLLM"), ("sglang-log", "start SGLang"), ("otlp", "is not JSON")):
        with pytest.raises(TraceError, match=words):
            TraceSource(write("nothing of a request"), TraceOptions(form)).scan()
