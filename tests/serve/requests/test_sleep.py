"""Engines of a simulated server that sleep: what is gone, how long a wake-up takes, and that the record replays."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest
from foredraft.cli.app import app
from foredraft.serve.metrics import ServerMetrics
from http_server import Served, serving, simulated_body, wait_until
from server_process import recorded, serve
from typer.testing import CliRunner

PROMPT = "Why is the sky blue and the sea green? " * 20
ASKED = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}


def cached(served: Served) -> int:
    """The prompt tokens that the prefix cache has when the prompt is asked for."""
    answer = served.post("/v1/completions", **ASKED)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 60
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def state(served: Served) -> dict[str, float]:
    lines = served.http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("vllm:engine_sleep_state{")]
    return {line.partition('sleep_state="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in found}


def asleep(served: Served) -> bool:
    return served.http.get("/is_sleeping").json()["is_sleeping"]


def test_a_sleep_drops_the_kv_and_a_wake_up_takes_the_load_of_the_weights():
    metrics = ServerMetrics()
    body = simulated_body(metrics=metrics, speed=10)
    with serving(body, metrics=metrics, metrics_as="vllm") as served:
        assert (cached(served), asleep(served)) == (0, False)
        assert cached(served) > 150 and state(served) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        assert served.http.post("/sleep").status_code == 200
        assert asleep(served) and state(served) == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
        assert "vllm:kv_cache_usage_perc" in served.http.get("/metrics").text
        assert served.http.get("/ready").json()["sleeping"] == [0]
        begin_ns = body.at_ns(time.monotonic())
        assert served.http.post("/wake_up", params={"tags": "weights"}).status_code == 200
        took_ns = body.at_ns(time.monotonic()) - begin_ns
        weights = 8.03e9 * 2  # bytes of llama-3.1-8b in 16 bits
        link = body.simulation.assembly.deployment.gpu.host_link_bytes_per_s
        assert took_ns >= body.simulation.assembly.weights_ns == pytest.approx(weights / link * 1e9, rel=0.2)
        assert not asleep(served) and served.http.get("/ready").json().get("sleeping") is None
        assert cached(served) == 0, "the prefix cache was dropped"
        assert cached(served) > 150
        served.wait_until_idle()


@pytest.mark.parametrize(("mode", "finish"), [("abort", "abort"), ("keep", "length")])
def test_requests_of_an_engine_that_falls_asleep(mode: str, finish: str):
    """They are aborted, or go on after the wake-up; those that come meanwhile wait."""
    with serving(simulated_body(speed=1)) as served:
        answers: list[httpx.Response] = []

        def ask(**fields: object) -> threading.Thread:
            asked = {**ASKED, **fields}
            task = threading.Thread(target=lambda: answers.append(httpx.post(
                f"{served.url}/v1/completions", json=asked, timeout=60)))  # fmt: skip
            task.start()
            return task

        running = [ask(max_tokens=2000) for _ in range(3)]
        wait_until(lambda: served.frontend.num_live == 3)
        assert served.http.post("/sleep", params={"mode": mode}).status_code == 200
        late = ask()
        wait_until(lambda: served.frontend.num_live == (4 if mode == "keep" else 1))
        for task in running if mode == "abort" else ():
            task.join(60)
        assert len(answers) == (0 if mode == "keep" else 3)
        assert served.http.post("/wake_up").status_code == 200
        for task in (*running, late):
            task.join(60)
        ends = sorted(answer.json()["choices"][0]["finish_reason"] for answer in answers)
        assert ends == sorted([finish] * 3 + ["length"])
        if mode == "keep":
            assert sorted(answer.json()["usage"]["completion_tokens"] for answer in answers) == [60, 2000, 2000, 2000]
        served.wait_until_idle()


@pytest.mark.parametrize(
    ("query", "words"),
    [({"level": "3"}, "none of 1, 2"), ({"mode": "wait"}, "none of abort, keep"), ({"level": "2"}, "--start-s")],
)
def test_what_cannot_be_done_is_400(simulated: Served, query: dict[str, str], words: str):
    answer = simulated.http.post("/sleep", params=query)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert simulated.http.post("/wake_up").status_code == 200, "an engine that is awake stays so"


def test_level_2_loads_the_weights_as_a_start_does(tmp_path: Path):
    """In a process; its record replays, and what waits when it stops is given up."""
    record = tmp_path / "record"
    options = ["--start-s", "3", "--speed", "20", "--record", str(record), "--replica-ports", "0"]
    options += ["--set", "hardware.replicas=2", "--drain-s", "1"]
    with serve(tmp_path, *options) as (process, address, _), httpx.Client(base_url=address, timeout=60) as client:
        wait_until(lambda: client.get("/ready").status_code == 200)
        for mode in ("keep", "abort"):
            threads = [threading.Thread(target=client.post, args=["/v1/completions"], kwargs={"json": ASKED})]
            threads[0].start()
            assert client.post("/sleep", params={"level": "2", "mode": mode}).status_code == 200
            begin = time.monotonic()
            assert client.post("/wake_up").status_code == 200 and time.monotonic() - begin >= 3 / 20
            threads[0].join(60)
        assert client.post("/v1/completions", json=ASKED).status_code == 200
        assert client.post("/sleep").status_code == 200
        waiting = threading.Thread(target=client.post, args=["/v1/completions"], kwargs={"json": ASKED})
        waiting.start()
        wait_until(lambda: client.get("/load").json()["server_load"] == 1)
        process.terminate()
        assert process.wait(30) == 0
        waiting.join(60)
    (folder,) = recorded(record)
    assert (folder / "events.jsonl").read_text().count('"restarted":true') == 6
    done = CliRunner().invoke(app, ["audit", "--replay", str(folder)])
    assert done.exit_code == 0 and "decisions identical" in done.output, done.output


def test_pools_do_not_sleep():
    with serving(simulated_body("disaggregation.prefill=1", "disaggregation.decode=1")) as served:
        answer = served.http.post("/sleep")
        assert answer.status_code == 400 and "pools" in answer.json()["error"]["message"]
        assert not asleep(served)
