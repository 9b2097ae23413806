"""The next turn of a conversation finds the last answer of a simulated server in its prefix cache."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from foredraft.cli.app import app
from foredraft.serve.metrics import ServerMetrics
from http_server import Served, serving, simulated_body
from server_process import recorded, serve
from typer.testing import CliRunner

COMPUTED = "foredraft:generation_tokens_total"
TURNS = ("Why is the sky blue?", "And the sea? Ist es überall so?", "Danke! 谢谢")


def converse(post, num_turns: int = 3, **fields: object) -> list[dict]:
    """Ask turn by turn, with all that was said before; returns the usage of each."""
    messages, usages = [], []
    for text in TURNS[:num_turns]:
        messages.append({"role": "user", "content": text})
        answer = post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 80, "ignore_eos": True, **fields}
        )
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        usages.append(answer.json()["usage"])
    return usages


def cached(usage: dict) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(("settings", "page"), [((), 1), (("engine.page_size=16",), 16)])
def test_history_is_cached_with_its_answers(settings: tuple[str, ...], page: int):
    metrics = ServerMetrics()
    with serving(simulated_body(*settings, metrics=metrics), metrics=metrics) as served:
        usages = converse(served.http.post, seed=7)
        for before, usage in pairwise(usages):
            computed = before["prompt_tokens"] + before["completion_tokens"] - 1  # the last token has no KV yet
            assert computed - page < cached(usage) <= computed
        unsaid = [{"role": "user", "content": TURNS[0]}, {"role": "assistant", "content": " what was never said"}]
        asked = {"messages": [*unsaid, {"role": "user", "content": TURNS[1]}], "max_tokens": 2}
        usage = served.post("/v1/chat/completions", **asked).json()["usage"]
        assert cached(usage) <= usages[0]["prompt_tokens"] + page
        served.wait_until_idle()


def test_a_stream_that_stops_early_leaves_what_it_said(simulated: Served):
    """At a stop string the rest of the words is not cached, as far as the engine has not computed them by then."""

    def num_computed() -> int:
        page = simulated.http.get("/metrics").text
        return int(sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(COMPUTED)))

    asked = {"max_tokens": 400, "ignore_eos": True, "seed": 11}
    text = simulated.post("/v1/completions", prompt="One", **asked).json()["choices"][0]["text"]
    words = " ".join(text.split()[120:123])  # they do not follow each other earlier
    before = num_computed()
    short = simulated.post("/v1/completions", prompt="Two", **asked, stop=f" {words}").json()
    simulated.wait_until_idle()  # its slots are given back once no step in flight can touch them
    computed = num_computed() - before
    said = short["choices"][0]["text"]
    again = simulated.post("/v1/completions", prompt=f"Two{text}", max_tokens=1).json()["usage"]
    assert len(said.split()) <= cached(again) <= computed
    simulated.wait_until_idle()


@pytest.mark.ci
def test_retracted_requests_and_the_record(tmp_path: Path):
    """In a pool that is too small for all; what waits again finds its own words; the record replays."""
    record = tmp_path / "record"
    options = ["--speed", "10", "--record", str(record), "--set", "engine.kv_slots=900"]
    with serve(tmp_path, *options) as (process, address, _), httpx.Client(base_url=address, timeout=60) as client:
        usages = converse(client.post, 3)
        assert cached(usages[2]) > usages[1]["prompt_tokens"] + 40
        many = client.post("/v1/completions", json={
            "prompt": [f"Number {i}" for i in range(8)], "max_tokens": 300, "ignore_eos": True})  # fmt: skip
        assert many.json()["usage"]["completion_tokens"] == 8 * 300
        metrics = client.get("/metrics").text
        assert 'foredraft:num_preemptions_total{engine="0"' in metrics
        process.terminate()
        assert process.wait(30) == 0
    (folder,) = recorded(record)
    assert '"retracted":["' in (folder / "events.jsonl").read_text()
    done = CliRunner().invoke(app, ["audit", "--replay", str(folder)])
    assert done.exit_code == 0 and "decisions identical" in done.output, done.output
