"""OpenTelemetry spans: one `llm_request` for each output, with the attributes that vLLM 0.33 gives it.

A span lies under the one that the request's `traceparent` names. It begins and ends in real time; the latencies among
its attributes are those of the body, so that they agree with the metrics.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ...core.contract.request import FinishedRequest
from ...core.errors import ConfigError
from ..base.port import Body, body_clock
from ..metrics.counts import Life

NAME = "llm_request"
USAGE, REQUEST, LATENCY = "gen_ai.usage.", "gen_ai.request.", "gen_ai.latency."


class RequestSpans:
    """Makes a span of each output that ends, until `close`."""

    def __init__(self, processor: SpanProcessor, body: Body) -> None:
        self._unix_ns = body_clock(body)
        resource = Resource.create({"service.name": "foredraft"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("foredraft.serve")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, url: str, body: Body) -> RequestSpans:
        """Return spans that go to a collector in batches. Raises ConfigError for what is no address."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError.of("<arguments>", "--otlp-traces-endpoint", f"{url!r} is no http:// or https:// address")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)), body)

    def ended(self, end: FinishedRequest, at_ns: int, life: Life) -> None:
        """Take the end of an output. Called on the scheduler's thread."""
        span = self._tracer.start_span(
            NAME,
            self._propagator.extract(dict(life.order.trace)),
            SpanKind.SERVER,
            _attributes(at_ns, life),
            start_time=self._unix_ns(life.arrival_ns),
        )
        span.end(self._unix_ns(at_ns))

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def _attributes(at_ns: int, life: Life) -> dict[str, Any]:
    order, sampling = life.order, life.order.sampling
    found: dict[str, Any] = {
        REQUEST + "id": order.name,
        REQUEST + "max_tokens": order.max_tokens,
        REQUEST + "top_p": sampling.top_p,
        REQUEST + "temperature": sampling.temperature,
        REQUEST + "n": order.num_outputs,
        USAGE + "prompt_tokens": life.num_prompt,
        USAGE + "completion_tokens": life.num_tokens,
        LATENCY + "e2e": (at_ns - life.arrival_ns) / 1e9,
    }
    if life.admitted_ns >= 0:
        found[LATENCY + "time_in_queue"] = (life.admitted_ns - life.arrival_ns) / 1e9
        found[LATENCY + "time_in_model_inference"] = (at_ns - life.admitted_ns) / 1e9
    if life.num_tokens:
        found[LATENCY + "time_to_first_token"] = (life.first_ns - life.arrival_ns) / 1e9
        found[LATENCY + "time_in_model_prefill"] = (life.first_ns - life.admitted_ns) / 1e9
        found[LATENCY + "time_in_model_decode"] = (life.last_ns - life.first_ns) / 1e9
    return found
