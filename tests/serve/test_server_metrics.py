"""The metrics: what they count, and that they have the names that dashboards know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foredraft.serve.metrics import Exposition, ServerMetrics
from http_server import Served, serving, simulated_body
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]


def _samples(text: str) -> dict[str, float]:
    """Return the value of each sample, by its name and its labels but for the model."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def test_counts_are_those_of_the_requests():
    metrics = ServerMetrics()
    with serving(simulated_body(metrics=metrics), metrics=metrics) as served:
        for _ in range(3):
            served.post("/v1/completions", prompt=list(range(1, 65)), max_tokens=20, ignore_eos=True)
        served.post("/v1/completions", prompt="x", max_tokens=1000)  # the scenario's outputs have 40 tokens
        served.wait_until_idle()
        samples = _samples(served.http.get("/metrics").text)
    prefix = "foredraft:"
    expected = {
        "prompt_tokens_total": 193, "generation_tokens_total": 100, "request_success_total finished_reason=length": 3,
        "request_success_total finished_reason=stop": 1, "num_requests_running": 0, "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0, "prefix_cache_queries_total": 193, "prefix_cache_hits_total": 126,
        "time_to_first_token_seconds_count": 4, "e2e_request_latency_seconds_count": 4, "steps_lost_total": 0,
    }  # fmt: skip
    assert {name: samples[prefix + name] for name in expected} == expected
    accepted = samples[prefix + "spec_decode_num_accepted_tokens_total"]
    at = [value for name, value in samples.items() if "accepted_tokens_per_pos_total" in name]
    assert sum(at) == accepted > 0 and at == sorted(at, reverse=True)
    rounds = samples[prefix + "spec_decode_num_drafts_total"]
    assert samples[prefix + "spec_decode_accept_length"] == 1 + accepted / rounds
    assert samples[prefix + "inter_token_latency_seconds_count"] == rounds
    assert samples[prefix + "e2e_request_latency_seconds_sum"] > samples[prefix + "time_to_first_token_seconds_sum"] > 0


@pytest.mark.parametrize(
    ("style", "names"),
    [
        (
            "vllm",
            "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total "
            "prompt_tokens_total generation_tokens_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket "
            "request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket num_preemptions_total "
            "spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total",
        ),
        (
            "sglang",
            "num_running_reqs num_queue_reqs token_usage cache_hit_rate prompt_tokens_total generation_tokens_total num_requests_total "
            "time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket "
            "spec_accept_length num_retracted_requests_total",
        ),
    ],
)
def test_names_are_those_of_other_servers(style: str, names: str):
    text = Exposition(ServerMetrics(), "m", style)()[0].decode()
    assert {f"{style}:{name}" for name in names.split()} <= {name.split()[0] for name in _samples(text)}


def test_the_dashboard_asks_for_metrics_that_there_are(simulated: Served):
    simulated.post("/v1/completions", prompt="x", max_tokens=9)
    names = {name.split()[0] for name in _samples(simulated.http.get("/metrics").text)}
    panels = json.loads((ROOT / "examples/serving_dashboard.json").read_text())["panels"]
    asked = {
        part for panel in panels for target in panel["targets"] for part in target["expr"].replace("(", " ").replace("{", " ").split()
        if part.startswith("foredraft:")
    }  # fmt: skip
    asked = {name.split("[")[0].rstrip(")") for name in asked}
    assert len(asked) > 12 and asked <= names
