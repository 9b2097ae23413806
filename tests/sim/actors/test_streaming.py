"""The way of a token to its client: chunks, and the process that sends them in turn."""

from __future__ import annotations

import io
import itertools
from collections import defaultdict

import pytest
from foredraft.core.contract.events import Committed, Planned
from foredraft.core.errors import ConfigError
from foredraft.observe.encoding import LineEncoder
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict

SERVICE = {
    "model": {"target": "qwen3-0.6b", "context_len": 4096},
    "hardware": {"kernels": "roofline"},
    "speculation": {"algorithm": "NONE"},
    "workload": {"num_requests": 30, "rate": 40.0, "output": {"mean": 60.0, "high": 200}},
}
SPECULATION = {"algorithm": "EAGLE3", "policy": "fixed", "steps": 3}
CHUNKS = {"stream_interval": 7, "chunk_us": 900.0, "output_token_us": 70.0}


def run(front_end, **tables):
    """Return the events, the summary and the report of a run."""
    scenario = scenario_from_dict(SERVICE | {"front_end": front_end} | tables, "test")
    events, metrics = [], RunMetrics()
    report = Simulation(scenario, sinks=lambda replica: [events.append, metrics.sink(replica)]).run()
    return events, metrics.summary(report.duration_ns), report


class PlainServer:
    """Sends token by token, in the order in which rounds end: no arrays, one queue, one list of tokens per request."""

    def __init__(self, interval: int, first_alone: bool, chunk_ns: int, token_ns: int) -> None:
        self.interval, self.first_alone, self.chunk_ns, self.token_ns = interval, first_alone, chunk_ns, token_ns
        self.waiting: dict[str, int] = defaultdict(int)
        self.arrivals: dict[str, list[int]] = defaultdict(list)  # by request: of each chunk
        self.rows: dict[int, str] = {}
        self.free_ns = 0

    def token(self, name: str, count: int, at_ns: int, is_last: bool) -> None:
        self.waiting[name] += count
        is_first = self.first_alone and not self.arrivals[name]
        if self.waiting[name] >= self.interval or is_last or is_first:
            self.free_ns = max(self.free_ns, at_ns) + self.chunk_ns + self.token_ns * self.waiting[name]
            self.arrivals[name].append(self.free_ns)
            self.waiting[name] = 0

    def take(self, event) -> None:
        if isinstance(event, Planned) and event.step is not None:
            self.rows |= {join.row: join.request.request_id for join in event.step.joins}
        if not isinstance(event, Committed):
            return
        ended = {one.request_id for one in event.finished}
        ends = event.result.round_end_ns.tolist()
        for name in event.first_tokens:
            self.token(name, 1, ends[0], name in ended)
        if event.step.decode is None:
            return
        for i, at_ns in enumerate(ends):
            for j, row in enumerate(event.step.decode.rows.tolist()):
                count, later = int(event.kept[i, j]), int(event.kept[i + 1 :, j].sum())
                if count:
                    self.token(self.rows[row], count, at_ns, self.rows[row] in ended and not later)


@pytest.mark.fast("roomy-token-drafts", "foredraft-interval-plain", "vllm-0.18-token-*", ci="*")
@pytest.mark.parametrize("speculation", [SERVICE["speculation"], SPECULATION], ids=["plain", "drafts"])
@pytest.mark.parametrize("first_chunk", ["token", "interval"])
@pytest.mark.parametrize("rules", ["roomy", "foredraft", "vllm-0.18"])
def test_clients_see_what_a_plain_server_sends(speculation, first_chunk, rules):
    """Also for requests that are retracted, and under vLLM's rules get tokens after that."""
    engine = {"max_running": 16} | ({} if rules == "roomy" else {"kv_slots": 800, "watermark": 0.0})
    workload = SERVICE["workload"] | {
        "rate": 400.0,
        "prompt": {"mean": 40.0, "high": 100},
        "output": {"mean": 120.0, "high": 300},
    }
    hardware = SERVICE["hardware"] | ({} if rules == "roomy" else {"server": rules, "correction": "off"})
    tables = {"speculation": speculation, "engine": engine, "workload": workload, "hardware": hardware}
    events, summary, _ = run(CHUNKS | {"first_chunk": first_chunk}, **tables)
    plain = PlainServer(7, first_chunk == "token", 900_000, 70_000)
    for event in events:
        plain.take(event)
    assert (summary["retractions"] > 0) == (rules != "roomy")
    arrived = {
        event.request.request_id: event.request.arrived_ns or event.now_ns
        for event in events
        if hasattr(event, "refusal")
    }
    ttft = [chunks[0] - arrived[name] for name, chunks in plain.arrivals.items()]
    whole = [chunks[-1] - arrived[name] for name, chunks in plain.arrivals.items()]
    gaps = [after - before for chunks in plain.arrivals.values() for before, after in itertools.pairwise(chunks)]
    assert len(ttft) == 30 and not any(plain.waiting.values())
    assert summary["mean_ttft_ms"] == pytest.approx(sum(ttft) / 30e6)
    assert summary["mean_e2el_ms"] == pytest.approx(sum(whole) / 30e6)
    assert summary["mean_itl_ms"] == pytest.approx(sum(gaps) / len(gaps) / 1e6)


def test_the_engine_decides_alike_whatever_clients_see():
    """In an open loop no client waits for another: the decision logs are the same bytes."""
    logs = []
    for front_end in ({}, CHUNKS):
        text, encoder = io.StringIO(), LineEncoder(0)
        for event in run(front_end)[0]:
            text.write(encoder.encode(event) + "\n")
        logs.append(text.getvalue())
    assert logs[0] == logs[1]


def test_the_first_token_comes_at_once_and_the_last_with_the_end():
    plain, chunks, waits = (
        run(front_end)[1]
        for front_end in ({}, {"stream_interval": 16}, {"stream_interval": 16, "first_chunk": "interval"})
    )
    assert chunks["mean_ttft_ms"] == plain["mean_ttft_ms"] and chunks["mean_e2el_ms"] == plain["mean_e2el_ms"]
    assert 12 * plain["mean_itl_ms"] < chunks["mean_itl_ms"] < 17 * plain["mean_itl_ms"]
    later = (waits["mean_ttft_ms"] - plain["mean_ttft_ms"]) / plain["mean_tpot_ms"]
    assert 13 < later < 16, "by most of an interval"


def test_no_more_tokens_arrive_than_the_process_sends_however_fast_the_device_is():
    workload = SERVICE["workload"] | {"concurrency": 16, "num_requests": 64}
    throughputs = []
    for gpu in ("H100", "B200"):
        hardware = SERVICE["hardware"] | {"gpu": gpu}
        events, summary, report = run({"output_token_us": 500.0}, hardware=hardware, workload=workload)
        throughputs.append(summary["output_throughput"])
        last_ns = max(event.now_ns for event in events if isinstance(event, Committed))
        assert report.duration_ns > last_ns, "the last tokens arrive later than the engine has made them"
    assert throughputs == pytest.approx([2000.0, 2000.0], rel=0.05)


def test_prefill_and_decode_engines_each_have_a_front_end():
    pools = {"disaggregation": {"prefill": 1, "decode": 1}, "engine": {"page_size": 16}}
    plain, chunks = (run(front_end, **pools)[1] for front_end in ({}, {"stream_interval": 1000}))
    assert chunks["mean_ttft_ms"] == plain["mean_ttft_ms"] and chunks["mean_e2el_ms"] == plain["mean_e2el_ms"]
    # The first token comes from the prefill engine, all others in one chunk from the decode engine.
    assert chunks["mean_itl_ms"] == pytest.approx(chunks["mean_e2el_ms"] - chunks["mean_ttft_ms"])


@pytest.mark.parametrize(
    "front_end",
    [{"stream_interval": 0}, {"stream_interval": "10"}, {"chunk_us": -1.0}, {"first_chunk": "none"}],
    ids=str,
)
def test_impossible_values_are_refused(front_end):
    (key,) = front_end
    with pytest.raises(ConfigError, match=rf"front_end\.{key}"):
        run(front_end)
