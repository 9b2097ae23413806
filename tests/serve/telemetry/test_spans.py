"""Spans: one for each output, with vLLM's attributes, under the client's trace."""

from __future__ import annotations

import time

import pytest
from foredraft.core.errors import ConfigError
from foredraft.serve.metrics import ServerMetrics
from http_server import serving, simulated_body, sum_of_times, wait_until

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from foredraft.serve.telemetry.spans import RequestSpans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_each_output_has_a_span_under_the_clients_trace():
    exporter, metrics = InMemorySpanExporter(), ServerMetrics()
    body = simulated_body(speed=2.0, metrics=metrics)
    spans = RequestSpans(SimpleSpanProcessor(exporter), body)
    with serving(body, metrics=metrics, on_end=spans.ended) as served:
        begin_ns = time.time_ns()
        asked = {"prompt": "why", "max_tokens": 30, "ignore_eos": True, "n": 2, "temperature": 0.5, "top_p": 0.9}
        head = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = served.http.post("/v1/completions", json=asked, headers=head)
        wait_until(lambda: len(exporter.get_finished_spans()) == 2)
        end_ns = time.time_ns()
        total_s = sum_of_times(metrics)
    for span in exporter.get_finished_spans():
        assert (span.name, span.kind, span.resource.attributes["service.name"]) == (
            "llm_request",
            SpanKind.SERVER,
            "foredraft",
        )
        assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
        assert begin_ns < span.start_time < span.end_time < end_ns + 10**9
        of = {name.removeprefix("gen_ai."): value for name, value in span.attributes.items()}
        assert of["request.id"] == answer.json()["id"]
        assert (of["request.n"], of["request.temperature"], of["request.top_p"]) == (2, 0.5, 0.9)
        assert (of["request.max_tokens"], of["usage.completion_tokens"], of["usage.prompt_tokens"]) == (30, 30, 1)
        assert of["latency.time_in_queue"] + of["latency.time_in_model_inference"] == pytest.approx(of["latency.e2e"])
        assert of["latency.time_to_first_token"] == pytest.approx(
            of["latency.time_in_queue"] + of["latency.time_in_model_prefill"]
        )
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(of["latency.e2e"] / 2, abs=1e-3)
    each = [span.attributes["gen_ai.latency.e2e"] for span in exporter.get_finished_spans()]
    assert sum(each) == pytest.approx(total_s)


def test_an_output_that_was_never_admitted_has_a_span_without_the_latencies_of_the_model():
    exporter, metrics = InMemorySpanExporter(), ServerMetrics()
    body = simulated_body("engine.max_running=1", "engine.max_queue=1", metrics=metrics)
    spans = RequestSpans(SimpleSpanProcessor(exporter), body)
    with serving(body, metrics=metrics, on_end=spans.ended) as served:
        codes = [served.post("/v1/completions", prompt=["x", "y", "z", "u"], max_tokens=200).status_code]
        wait_until(lambda: len(exporter.get_finished_spans()) == 4)
        assert codes == [429]
    without = [one for one in exporter.get_finished_spans() if "gen_ai.latency.time_in_queue" not in one.attributes]
    assert without and all(one.attributes["gen_ai.usage.completion_tokens"] == 0 for one in without)


def test_the_address_of_a_collector_is_checked():
    with pytest.raises(ConfigError, match="'localhost:4318' is no http:// or https:// address"):
        RequestSpans.to_collector("localhost:4318", simulated_body())
