"""The metrics: what they count, and that they have the names that dashboards know."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import httpx
import pytest
from foredraft.serve.metrics import Exposition, ServerMetrics
from foredraft.serve.metrics.series import ABSENT, STYLES
from http_server import Served, serving, simulated_body
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[3]


def _samples(text: str) -> dict[str, float]:
    """Return the value of each sample, by its name and its labels but for the model."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = ("model_name", "engine", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
            labels = [f"{key}={value}" for key, value in sorted(sample.labels.items()) if key not in own]
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


PACKAGES = {"vllm": "vllm-0.33.0.json", "sglang": "sglang-0.5.23.json"}
"""What `tests/serve/metrics/extract.py` found in the packages: name → [kind, labels, buckets]."""
NOT_A_CALL = {"cache_config_info"}
"""vLLM makes this one from the fields of a class."""
AUTOSCALER = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info request_success_total "
    "request_prompt_tokens_sum request_prompt_tokens_count request_generation_tokens_sum request_generation_tokens_count "
    "time_to_first_token_seconds_sum inter_token_latency_seconds_sum request_time_per_output_token_seconds_count"
)
"""What llm-d's autoscaler and its endpoint picker ask vLLM for."""


def _package(style: str) -> dict[str, list]:
    """Return the metrics of a server's package, as Prometheus' client names them."""
    found = json.loads((ROOT / "tests/serve/metrics" / PACKAGES[style]).read_text())
    names = {name: name.removesuffix("_total") if kind == "counter" else name for name, (kind, _, _) in found.items()}
    return {names[name].partition(":")[2]: facts for name, facts in found.items()}


@pytest.mark.parametrize("style", PACKAGES)
def test_series_are_those_of_the_package(style: str):
    """Each has the type and the buckets of the package, or is listed as absent, with a reason."""
    series = {one.name: one for prefix, one in STYLES[style] if prefix == style}
    package = _package(style)
    assert set(series) - NOT_A_CALL <= set(package)
    absent = {name: [pattern for pattern in ABSENT[style] if fnmatchcase(name, pattern)] for name in package}
    assert {name for name, patterns in absent.items() if patterns} == set(package) - set(series)
    assert {pattern for patterns in absent.values() for pattern in patterns} == set(ABSENT[style])
    for name, (kind, _, buckets) in package.items():
        if name in series:
            assert series[name].kind == kind, name
            assert buckets is None or tuple(buckets) == tuple(map(float, series[name].buckets)), name


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[ServerMetrics, dict[str, set[str]]]]:
    """A server with too little memory and a short queue: its metrics, and by style the samples that were not 0 at some
    time."""
    metrics = ServerMetrics()
    keys = ("engine.kv_slots=500", "engine.max_queue=3", "engine.guarantee_output=0.1", "engine.max_running=8")
    body = simulated_body(*keys, "hardware.graph_sizes=[1,2,4,8]", metrics=metrics, speed=0.3)
    moved: dict[str, set[str]] = {style: set() for style in STYLES}
    with serving(body, metrics=metrics) as served:

        def look() -> None:
            for style, found in moved.items():
                exposition = Exposition(metrics, "m", style, lambda: body.at_ns(time.monotonic()))
                found |= {name.split()[0] for name, value in _samples(exposition()[0].decode()).items() if value}

        async def load() -> None:
            async with httpx.AsyncClient(base_url=served.url, timeout=60, verify=False) as client:
                asked = {"max_tokens": 80, "ignore_eos": True}
                prompts = [list(range(200 * (i // 2), 200 * (i // 2) + 100)) for i in range(24)]
                for _ in range(2):  # the second finds the prompt of the first in the cache, on any machine
                    await client.post("/v1/completions", json=asked | {"prompt": prompts[0]})
                # Three in one request run beside each other on any machine, and together grow beyond the pool.
                together = [list(range(10_000 * i, 10_000 * i + 100)) for i in (1, 2, 3)]
                await client.post("/v1/completions", json=asked | {"prompt": together})
                posts = [
                    client.post("/v1/completions", json=asked | {"prompt": prompt, "stream": i % 2 == 0})
                    for i, prompt in enumerate(prompts)
                ]
                tasks = [asyncio.ensure_future(post) for post in posts]
                while not all(task.done() for task in tasks):
                    await asyncio.sleep(0.01)
                    look()

        asyncio.run(load())
        leaving = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=leaving) as stream:
            next(stream.iter_lines())
        served.wait_until_idle()
        look()
        yield metrics, moved


HOST = {
    *("external_prefix_cache_queries", "external_prefix_cache_hits"),
    *("hicache_host_used_tokens", "hicache_host_total_tokens"),
}


def test_tokens_from_host_memory_have_their_series():
    """A prompt that the pool has given up, and host memory has not."""
    metrics = ServerMetrics()
    keys = ("engine.kv_slots=1000", "engine.host_cache_gb=4", "hardware.server='sglang-0.5'")
    with serving(simulated_body(*keys, metrics=metrics, speed=50.0), metrics=metrics) as served:
        for number in (0, 1, 2, 0):
            prompt = list(range(1000 * number, 1000 * number + 600))
            assert served.post("/v1/completions", prompt=prompt, max_tokens=4).status_code == 200
        served.wait_until_idle()
        of = {style: _samples(Exposition(metrics, "m", style)()[0].decode()) for style in PACKAGES}
    hits = of["vllm"]["vllm:external_prefix_cache_hits_total"]
    assert 500 < hits <= 599 and of["vllm"]["vllm:prompt_tokens_by_source_total source=external_kv_transfer"] == hits
    assert of["sglang"]["sglang:cached_tokens_total cache_source=host"] == hits
    sources = [value for name, value in of["vllm"].items() if name.startswith("vllm:prompt_tokens_cached_by_source")]
    assert sum(sources) == of["vllm"]["vllm:prefix_cache_hits_total"] + hits
    assert 1790 <= of["sglang"]["sglang:hicache_host_used_tokens"] <= of["sglang"]["sglang:hicache_host_total_tokens"]


@pytest.mark.fast("vllm", ci="*")
@pytest.mark.parametrize("style", PACKAGES)
def test_every_series_moves(loaded: tuple[ServerMetrics, dict[str, set[str]]], style: str):
    """None is a constant zero; and the labels are those of the package."""
    metrics, moved = loaded
    names = {
        name.removesuffix("_total").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for name in moved[style]
    }
    still = {one.name for prefix, one in STYLES[style] if f"{prefix}:{one.name}" not in moved[style] | names}
    absent = {"steps_lost", "worker_up", "lora_requests_info", *HOST}
    assert still <= absent, "no step fails, no worker serves, there are no adapters, there is no host memory"
    text = Exposition(metrics, "m", style)()[0].decode()
    package = _package(style)
    for family in text_string_to_metric_families(text):
        prefix, _, name = family.name.partition(":")
        if prefix == style and name not in NOT_A_CALL:
            _, labels, _ = package[name]
            assert all(set(sample.labels) - {"le"} == set(labels) for sample in family.samples), name


def test_what_autoscalers_and_endpoint_pickers_read(loaded: tuple[ServerMetrics, dict[str, set[str]]]):
    assert {f"vllm:{name}" for name in AUTOSCALER.split()} <= loaded[1]["vllm"]


def test_numbers_of_a_busy_server_fit_each_other(loaded: tuple[ServerMetrics, dict[str, set[str]]]):
    metrics, _ = loaded
    found = _samples(Exposition(metrics, "m", "vllm")()[0].decode())
    of = {name.removeprefix("vllm:"): value for name, value in found.items()}
    by_source = {
        name.partition("source=")[2]: value for name, value in of.items() if name.startswith("prompt_tokens_by")
    }
    assert sum(by_source.values()) == of["prompt_tokens_total"] and by_source["external_kv_transfer"] == 0
    assert by_source["local_cache_hit"] == of["prompt_tokens_cached_total"] > 0
    refused = of["admission_rejections_total reason=max_num_queued_reqs"]
    ended = of["request_success_total finished_reason=length"]
    assert ended + refused == 29 and refused > 0 and of["request_success_total finished_reason=error"] == 0
    for name in ("request_prompt_tokens", "request_generation_tokens", "request_queue_time_seconds"):
        assert of[f"{name}_count"] == ended
    assert of["request_generation_tokens_sum"] == 80 * ended and of["request_prompt_tokens_sum"] == 100 * ended
    assert of["request_num_preemptions_sum"] == of["num_preemptions_total"] > 0
    parts = (of[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    assert sum(parts) == pytest.approx(of["e2e_request_latency_seconds_sum"], rel=1e-3)
    assert of["iteration_tokens_total_sum"] >= of["generation_tokens_total"] >= 80 * ended


PROMETHEUS = {
    "2.x": (
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    ),
    "3.x": (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
        "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    ),
    "3.x, underscores": "application/openmetrics-text;version=1.0.0;escaping=underscores,*/*;q=0.2",
    "3.x, dots": "application/openmetrics-text;version=1.0.0;escaping=dots,*/*;q=0.2",
    "3.x, values": "text/plain;version=1.0.0;escaping=values,*/*;q=0.2",
    "text alone": "text/plain;version=0.0.4",
    "no header": "",
}
"""What clients accept: the releases of Prometheus by default, and with a scheme of escaping from their settings."""


@pytest.mark.parametrize("client", PROMETHEUS)
def test_names_keep_their_colon_whatever_the_client_accepts(simulated: Served, client: str):
    """Prometheus 2.x accepts OpenMetrics without an escaping, and stores the names of samples as they come."""
    answer = simulated.http.get("/metrics", headers={"Accept": PROMETHEUS[client]})
    is_open = "openmetrics" in PROMETHEUS[client]
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text" if is_open else "text/plain")
    assert "escaping" not in answer.headers["Content-Type"] and answer.text.endswith("# EOF\n") == is_open
    names = {line.split("{")[0].split()[0] for line in answer.text.splitlines() if not line.startswith("#")}
    assert "foredraft:num_requests_running" in names and all(":" in name for name in names)
    plain = simulated.http.get("/metrics", headers={"Accept": "text/plain"}).text
    assert {line.split("{")[0].split()[0] for line in plain.splitlines() if line[0] != "#"} == names
    read = openmetrics.text_string_to_metric_families if is_open else text_string_to_metric_families
    assert names == {sample.name for family in read(answer.text) for sample in family.samples}


def test_the_dashboard_asks_for_metrics_that_there_are(simulated: Served):
    simulated.post("/v1/completions", prompt="x", max_tokens=9)
    names = {name.split()[0] for name in _samples(simulated.http.get("/metrics").text)}
    panels = json.loads((ROOT / "examples/serving/grafana/dashboard.json").read_text())["panels"]
    asked = {
        part for panel in panels for target in panel["targets"] for part in target["expr"].replace("(", " ").replace("{", " ").split()
        if part.startswith("foredraft:")
    }  # fmt: skip
    asked = {name.split("[")[0].rstrip(")") for name in asked}
    assert len(asked) > 12 and asked <= names
