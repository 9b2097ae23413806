"""One simulated server computes a prompt, another one decodes it: `kv_transfer_params` as vLLM's routers write them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from foredraft.cli.app import app
from foredraft.core.contract.events import Committed, Planned
from foredraft.serve.metrics import ServerMetrics
from foredraft.sim.disaggregation.cluster import draft_input_bytes
from http_server import Served, serving, simulated_body
from server_process import recorded, serve
from typer.testing import CliRunner

PAGES = "engine.page_size=16"
PROMPT = "Why is the sky blue and the sea green? " * 40
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As a router sends it to the server that computes the prompt."""


class Seen:
    """An event sink: the prompt tokens that an engine computed, those that came, and when requests were planned."""

    def __init__(self) -> None:
        self.computed = self.received = 0
        self.planned_ns: list[int] = []

    def __call__(self, event: object) -> None:
        if isinstance(event, Planned) and event.step is not None:
            self.received += sum(join.num_received for join in event.step.joins)
            self.planned_ns += [event.now_ns] * len(event.step.joins)
        if isinstance(event, Committed) and event.step.prefill is not None:
            self.computed += int(event.step.prefill.lens.sum())


def ask(url: str, params: dict | None, max_tokens: int = 40, **fields: object) -> httpx.Response:
    asked = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "kv_transfer_params": params, **fields}
    return httpx.post(f"{url}/v1/completions", json=asked, timeout=60)


def blocks_of(served: Served) -> dict:
    """Let a server compute the prompt; returns what a router passes on."""
    answer = ask(served.url, TO_PREFILL, 1)
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def test_a_prompt_is_computed_once_and_its_transfer_takes_time():
    first, second, metrics_of = Seen(), Seen(), ServerMetrics()
    rate = "disaggregation.bandwidth_gbps=0.05"  # slow, so that the transfer is longer than all else
    with (
        serving(simulated_body(PAGES, sinks=lambda engine: [first])) as prefill,
        serving(
            simulated_body(PAGES, rate, sinks=lambda engine: [second], metrics=metrics_of), metrics=metrics_of
        ) as decode,
    ):
        params = blocks_of(prefill)
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        answer = ask(decode.url, params).json()
        assert answer["usage"]["completion_tokens"] == 40 and "kv_transfer_params" not in answer
        num_prompt = answer["usage"]["prompt_tokens"]
        assert first.computed == num_prompt and len(params["remote_block_ids"]) == -(-num_prompt // 16)
        assert (second.computed, second.received) == (0, num_prompt)
        assembly = decode.frontend.body.simulation.assembly
        num_bytes = len(params["remote_block_ids"]) * 16 * assembly.sent_kv_bytes + draft_input_bytes(assembly)
        takes_ns = num_bytes / assembly.deployment.port_bytes_per_s * 1e9
        metrics = httpx.get(f"{decode.url}/metrics").text
        ttft = next(line for line in metrics.splitlines() if "time_to_first_token_seconds_sum" in line)
        waited_s = float(ttft.rpartition(" ")[2])
        assert takes_ns / 1e9 <= waited_s < takes_ns / 1e9 + 0.05, (takes_ns, waited_s)
        assert f'source="external_kv_transfer"}} {num_prompt:.1f}' in metrics
        prefill.wait_until_idle()
        # A second turn of the same prompt needs only what the cache lacks.
        again = ask(decode.url, params).json()
        assert again["usage"]["completion_tokens"] == 40 and second.computed == 0
        decode.wait_until_idle()


def test_requests_wait_for_room_and_clients_leave():
    """Many at once, in a pool for a few; some leave while their KV travels, others while they wait."""
    settings = (PAGES, "engine.kv_slots=2000", "disaggregation.bandwidth_gbps=0.5", "engine.prefix_cache=false")
    with serving(simulated_body(PAGES)) as prefill, serving(simulated_body(*settings, speed=3)) as decode:
        params = blocks_of(prefill)
        with httpx.Client(timeout=60) as client:
            asked = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": True}
            request = client.build_request(
                "POST", f"{decode.url}/v1/completions", json={**asked, "kv_transfer_params": params}
            )
            left = [client.send(request, stream=True) for _ in range(6)]
            for answer in left[::2]:
                answer.close()
            for answer in left[1::2]:
                text = answer.read().decode()
                assert text.count('"text"') > 3 and "[DONE]" in text and "error" not in text, text[-300:]
        decode.wait_until_idle()


@pytest.mark.parametrize(
    ("params", "fields", "words"),
    [
        ({"do_remote_prefill": True, "remote_block_ids": [0]}, {}, "both servers need the same page size"),
        ({"do_remote_prefill": True, "remote_block_ids": [*range(999)]}, {"max_tokens": 1}, "must be 2 or more"),
        ({"do_remote_prefill": True, "remote_block_ids": [*range(999)]}, {"n": 2}, "one prompt and n 1"),
        ({"do_remote_prefill": "x"}, {}, "do_remote_prefill"),
    ],
)
def test_parameters_that_fit_nothing_are_400(simulated: Served, params: dict, fields: dict, words: str):
    answer = ask(simulated.url, params, **fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_without_blocks_the_prompt_is_computed_here():
    seen = Seen()
    with serving(simulated_body(PAGES, sinks=lambda engine: [seen])) as served:
        answer = ask(served.url, {"do_remote_prefill": True, "remote_block_ids": None})
        assert answer.status_code == 200 and seen.computed == answer.json()["usage"]["prompt_tokens"]


def test_pools_and_faults_take_no_kv():
    pools = ("disaggregation.prefill=1", "disaggregation.decode=1", PAGES)
    for dialect in ("openai", "vllm"):
        with serving(simulated_body(*pools), dialect=dialect) as served:
            answer = ask(served.url, TO_PREFILL, 1)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"


@pytest.mark.ci
def test_two_processes_and_the_record_replays(tmp_path: Path):
    options = ["--dialect", "vllm", "--speed", "10", "--set", PAGES]
    for name in ("prefill", "decode"):
        (tmp_path / name).mkdir()
    record = tmp_path / "record"
    with (
        serve(tmp_path / "prefill", *options) as (_, prefill, _),
        serve(tmp_path / "decode", *options, "--record", str(record)) as (process, decode, _),
    ):
        chat = {"messages": [{"role": "user", "content": PROMPT}], "kv_transfer_params": TO_PREFILL, "max_tokens": 1}
        params = httpx.post(f"{prefill}/v1/chat/completions", json=chat).json()["kv_transfer_params"]
        chat |= {"kv_transfer_params": params, "max_tokens": 40, "ignore_eos": True}
        answer = httpx.post(f"{decode}/v1/chat/completions", json=chat).json()
        assert answer["usage"]["completion_tokens"] == 40
        process.terminate()
        assert process.wait(30) == 0
    (folder,) = recorded(record)
    assert '"move":"join"' in (folder / "events.jsonl").read_text()
    done = CliRunner().invoke(app, ["audit", "--replay", str(folder)])
    assert done.exit_code == 0 and "decisions identical" in done.output, done.output
