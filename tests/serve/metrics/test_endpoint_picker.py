"""The endpoint picker of llm-d and of the Gateway API: what it reads of `/metrics`, and how its rules of scoring order
replicas that are loaded differently.

The picker itself is a program in Go, which is not built here. These are its rules, as its source has them (2026): of a
series the first sample counts, whatever its labels; a queue and the number of running requests score by where they
stand between the least and the most; the KV cache by what is free; a pool is saturated by the mean of its pods'
greater share of 5 waiting requests and of 80 % of the KV.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from foredraft.serve.base.connections import bind
from foredraft.serve.metrics import ServerMetrics
from http_server import Served, serving, simulated_body, wait_until
from prometheus_client.parser import text_string_to_metric_families

READ = {
    "vllm": ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"),
    "sglang": ("num_queue_reqs", "num_running_reqs", "token_usage"),
}
BLOCKS = {
    "vllm": ("cache_config_info block_size", "cache_config_info num_gpu_blocks"),
    "sglang": ("page_size", "num_pages"),
}


class Seen(NamedTuple):
    """What the picker knows of a pod."""

    waiting: float
    running: float
    kv_usage: float
    block_size: float
    num_blocks: float


def _scrape(url: str, style: str) -> Seen:
    first: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            first.setdefault(sample.name, sample.value)
            for label in ("block_size", "num_gpu_blocks"):
                if label in sample.labels:
                    first.setdefault(f"{sample.name} {label}", float(sample.labels[label]))
    return Seen(*(first[f"{style}:{name}"] for name in (*READ[style], *BLOCKS[style])))


def _between(values: list[float]) -> list[float]:
    """Return the scores of a queue: the shortest has 1, the longest 0, and 1 each if all are alike."""
    least, most = min(values), max(values)
    return [1.0 if least == most else (most - value) / (most - least) for value in values]


def _scores(pods: list[Seen]) -> list[tuple[float, float, float]]:
    queues, running = _between([pod.waiting for pod in pods]), _between([pod.running for pod in pods])
    return [(queue, run, 1 - pod.kv_usage) for queue, run, pod in zip(queues, running, pods, strict=True)]


def _saturation(pods: list[Seen]) -> float:
    return sum(max(pod.waiting / 5, pod.kv_usage / 0.8) for pod in pods) / len(pods)


@pytest.fixture(params=READ)
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served, list[str]]]:
    """Two replicas with a port each, which stand still soon: the style of their metrics, the server, the addresses."""
    metrics = ServerMetrics()
    listeners = [bind("127.0.0.1", 0) for _ in range(3)]
    ports = [one.getsockname()[1] for one in listeners]
    keys = ("hardware.replicas=2", "engine.max_running=4", "engine.kv_slots=8000", "engine.page_size=16")
    body = simulated_body(*keys, "hardware.graph_sizes=[1,2,4]", metrics=metrics, speed=0.05)
    alone = {ports[1]: 0, ports[2]: 1}
    with serving(body, metrics=metrics, listeners=listeners, engine_of_port=alone, metrics_as=request.param) as served:
        yield request.param, served, [f"http://127.0.0.1:{port}" for port in ports[1:]]


@pytest.mark.fast("vllm", ci="*")
def test_the_free_replica_is_preferred_until_both_are_full(pool: tuple[str, Served, list[str]]):
    style, served, urls = pool
    asked = {"prompt": list(range(1, 1001)), "max_tokens": 900, "ignore_eos": True, "stream": True}
    threads: list[threading.Thread] = []

    def hold(url: str, count: int, waiting: int) -> None:
        """Open streams on a replica, and wait until so many of them wait."""
        for number in range(count):
            given = {**asked, "prompt": [number + 1000 * len(threads), *asked["prompt"]]}
            threads.append(
                threading.Thread(
                    target=httpx.post, args=(f"{url}/v1/completions",), kwargs={"json": given, "timeout": 60}
                )
            )
            threads[-1].start()
        wait_until(lambda: (seen := _scrape(url, style)).running == 4 and seen.waiting == waiting)

    idle = [_scrape(url, style) for url in urls]
    assert _scores(idle) == [(1, 1, 1), (1, 1, 1)] and _saturation(idle) == 0
    assert all((pod.block_size, pod.num_blocks) == (16, 500) for pod in idle)
    hold(urls[0], 10, waiting=6)
    busy = [_scrape(url, style) for url in urls]
    loaded, free = _scores(busy)
    assert free == (1, 1, 1) and loaded[:2] == (0, 0) and 0 < loaded[2] < 0.7
    assert _saturation(busy[:1]) > 1 > _saturation(busy) > 0.5
    hold(urls[1], 10, waiting=6)
    full = [_scrape(url, style) for url in urls]
    assert _saturation(full) > 1 and [score[0] for score in _scores(full)] == [1, 1]
    served.frontend._loop.call_soon_threadsafe(served.frontend.give_up)
    for thread in threads:
        thread.join()
    served.wait_until_idle()
    assert [_scrape(url, style)[:3] for url in urls] == [(0, 0, 0)] * 2


@pytest.mark.fast("sglang", ci="*")
def test_the_main_port_shows_the_picker_its_first_replica_alone(pool: tuple[str, Served, list[str]]):
    """Each replica is an engine with samples of its own, and the picker takes the first: it has to scrape the ports."""
    style, served, urls = pool
    given = {"prompt": [1, 2, 3], "max_tokens": 900, "ignore_eos": True}
    thread = threading.Thread(
        target=httpx.post, args=(f"{urls[1]}/v1/completions",), kwargs={"json": given, "timeout": 60}
    )
    thread.start()
    wait_until(lambda: _scrape(urls[1], style).running == 1)
    assert _scrape(served.url, style).running == 0
    served.frontend._loop.call_soon_threadsafe(served.frontend.give_up)
    thread.join()
