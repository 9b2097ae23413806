"""What one request can make the event loop do in a turn: bytes, items and tokens are bounded, whatever it sends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from functools import partial

import httpx
import pytest
from foredraft.serve.answers.forms import CompletionForm
from foredraft.serve.answers.frontend import Frontend
from foredraft.serve.answers.reply import SHOWN_WITH_TOPS, TOKENS_PER_UNIT
from foredraft.serve.app import make_app
from foredraft.serve.base.errors import ApiError
from foredraft.serve.base.limits import SMALL_BODY, Limits
from foredraft.serve.base.turns import REQUEST, WORK_PER_TURN
from foredraft.serve.bodies.filler import FillerTokenizer
from foredraft.serve.metrics import ServerMetrics
from foredraft.serve.requests import api, reading
from foredraft.serve.requests.reading import MAX_WAITING_BYTES, RequestReader
from foredraft.serve.requests.schema import MAX_PROMPTS, CompletionRequest
from http_server import Served, simulated_body

SIZE = 2_000_000
MESSAGE = {"role": "user", "content": "x"}
HOSTILE = {
    "a long text": ("/v1/completions", {"prompt": "x y " * (SIZE // 4)}, "context_length_exceeded"),
    "many texts": ("/v1/completions", {"prompt": ["x"] * (SIZE // 4)}, None),
    "many tokens": ("/v1/completions", {"prompt": [1] * (SIZE // 2)}, "context_length_exceeded"),
    "many wrong tokens": ("/v1/completions", {"prompt": [1, *([-1] * (SIZE // 3))]}, None),
    "many lists": ("/v1/completions", {"prompt": [[1]] * (SIZE // 4)}, None),
    "many keys": ("/v1/completions", {str(i): 0 for i in range(SIZE // 12)}, None),
    "deep": ("/v1/completions", {"prompt": "x", "user": "[" * (SIZE // 2), "stop": ["x"] * (SIZE // 8)}, None),
    "many messages": ("/v1/chat/completions", {"messages": [MESSAGE] * (SIZE // 40)}, "context_length_exceeded"),
    "a long message": ("/v1/chat/completions", {"messages": [{**MESSAGE, "content": "é" * (SIZE // 6)}]}, None),
    "a long name": ("/v1/completions", {"prompt": "x", "model": "m" * SIZE}, "model_not_found"),
    "wrong messages": ("/v1/chat/completions", {"messages": [{"role": "user"}] * (SIZE // 20)}, None),
}


def test_what_a_long_request_sends_is_read_elsewhere(simulated: Served, monkeypatch: pytest.MonkeyPatch):
    """The event loop itself gets no more than SMALL_BODY bytes of it, and no text of it to tokenize."""
    read_here, encoded_here = [], []
    read, encode = reading.read, FillerTokenizer.encode

    def spied_read(kind, data, *others):
        read_here.append(len(data))
        return read(kind, data, *others)

    def spied_encode(self, text, **named):
        encoded_here.append(len(text))
        return encode(self, text, **named)

    monkeypatch.setattr(reading, "read", spied_read)
    monkeypatch.setattr(FillerTokenizer, "encode", spied_encode)
    for name, (path, asked, code) in HOSTILE.items():
        answer = simulated.post(path, **asked)
        assert answer.status_code in (400, 404) and len(answer.content) < 500, (name, answer.text[:500])
        assert code is None or answer.json()["error"]["code"] == code, (name, answer.text)
    tokens = simulated.post("/tokenize", prompt="x y " * 100_000).json()
    assert tokens["count"] == len(tokens["tokens"]) > 100_000
    assert len(simulated.post("/detokenize", tokens=tokens["tokens"]).json()["prompt"]) == 400_000
    assert simulated.post("/v1/completions", prompt="x y z", max_tokens=2).status_code == 200
    assert read_here and max(read_here) <= 8192 and max(encoded_here) <= 8192


def test_a_long_request_is_answered_like_a_short_one(simulated: Served):
    requests = [
        {"prompt": "x", "max_tokens": 3, "seed": 1, "echo": True},
        {"prompt": ["x", "y"], "max_tokens": 3, "seed": 1, "logprobs": 2},
        {"prompt": [5, 6], "max_tokens": 3, "seed": 1},
        {"prompt": ["x"] * (MAX_PROMPTS + 1)},
        *({"prompt": wrong} for wrong in ("", [], [[]], ["x", 1], [1, "x"], None, 3, "\ud800")),
        {"prompt": "x", "model": "another"},
        {"prompt": "x", "beam_width": 2, "seed": 1},
        {"messages": [MESSAGE], "max_tokens": 3, "seed": 1, "logprobs": True},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    ]
    for asked in requests:
        path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
        text = json.dumps(asked)
        short, long = (
            simulated.http.post(path, content=content, headers={"Content-Type": "application/json"})
            for content in (text, text + " " * (SMALL_BODY + 1))
        )
        told = [answer.json() for answer in (short, long)]
        for one in told:
            one.pop("id", None), one.pop("created", None), one.get("usage", {}).pop("prompt_tokens_details", None)
        assert short.status_code == long.status_code and told[0] == told[1], asked


def test_a_grammar_that_takes_too_long_is_refused(simulated: Served, monkeypatch: pytest.MonkeyPatch):
    done = threading.Event()
    monkeypatch.setattr(api, "GRAMMAR_S", 0.05)
    monkeypatch.setattr(simulated.frontend.body, "check_grammar", lambda grammar: done.wait(60))
    try:
        answer = simulated.post("/v1/completions", prompt="x", response_format={"type": "json_object"})
    finally:
        done.set()
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.ci
def test_a_process_that_reads_and_has_died_is_replaced(simulated: Served):
    long = {"prompt": "x" * (SMALL_BODY + 1), "max_tokens": 1}
    assert simulated.post("/v1/completions", **long).status_code == 200
    reader = simulated.server.config.app.state.reader
    for pool in reader._free:
        os.kill(pool.submit(os.getpid).result(), signal.SIGKILL)
    assert simulated.post("/v1/completions", **long).status_code == 200
    assert reader._waiting_bytes == 0 and len(reader._free) == 1


@pytest.mark.ci
def test_a_dear_request_holds_one_of_two_processes_and_not_for_long(monkeypatch: pytest.MonkeyPatch):
    """Others are read beside it; what is not read in time is refused, and its process replaced."""

    async def both() -> None:
        begun = asyncio.ensure_future(reader._read_elsewhere(partial(time.sleep, 600)))
        while reader._free:
            await asyncio.sleep(0.01)
        body = json.dumps({"prompt": "x" * SMALL_BODY}).encode()
        (read, _) = await reader.read(CompletionRequest, body)
        assert len(read.prompts) == 1 and not begun.done()
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun
        monkeypatch.setattr(reading, "READ_S", 0)
        with pytest.raises(ApiError, match="takes longer than 0 s") as refused:
            await reader.read(CompletionRequest, body)
        assert refused.value.status == 400 and not reader._free and reader._waiting_bytes == 0

    rules = make_app(Frontend(simulated_body(), Limits(), ServerMetrics())).state.reader.rules
    reader = RequestReader(rules, FillerTokenizer())
    reader.start()
    asyncio.run(both())
    reader.stop()


def test_long_requests_that_wait_are_bounded(simulated: Served):
    async def many() -> list[int]:
        body = json.dumps({"prompt": ["x"] * 1_500_000}).encode()
        async with httpx.AsyncClient(base_url=simulated.url, timeout=60, verify=False) as client:
            headers = {"Content-Type": "application/json"}
            count = MAX_WAITING_BYTES // len(body) + 3
            asked = [client.post("/v1/completions", content=body, headers=headers) for _ in range(count)]
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    reader = simulated.server.config.app.state.reader
    reader._waiting_bytes, before = MAX_WAITING_BYTES - 9_000_000, reader._waiting_bytes
    try:
        statuses = asyncio.run(many())
    finally:
        reader._waiting_bytes = before
    assert set(statuses) == {400, 429}


async def _ask(app, asked: dict, send, path: str = "/v1/completions") -> None:
    """Send a request to an application without sockets."""
    requests = [{"type": "http.request", "body": json.dumps(asked).encode()}]

    async def receive() -> dict:
        return requests.pop() if requests else await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), 60)


@pytest.mark.parametrize("streams", [True, False])
def test_work_for_many_clients_is_cut_into_turns(streams: bool, monkeypatch: pytest.MonkeyPatch):
    """200 clients ask at once, and each round brings tokens with log-probabilities for all of them. Between two passes
    of the event loop, in which a probe is answered, few requests are read and few texts of tokens made."""
    body = simulated_body("engine.max_running=256", "hardware.graph_sizes=[256]", speed=50.0)
    frontend = Frontend(body, Limits(), ServerMetrics())
    app, counts, passes = make_app(frontend), Counter(), []
    read, text_of = reading.read, FillerTokenizer.text_of

    def spied_read(*arguments):
        counts["read"] += 1
        return read(*arguments)

    def spied_text_of(*arguments) -> str:
        counts["texts"] += 1
        return text_of(*arguments)

    monkeypatch.setattr(reading, "read", spied_read)
    monkeypatch.setattr(FillerTokenizer, "text_of", spied_text_of)

    async def probe() -> None:
        while True:
            passes.append(counts.copy())
            counts.clear()
            await asyncio.sleep(0)

    async def send(message: dict) -> None:
        await asyncio.sleep(0)

    async def many() -> None:
        frontend.start()
        probing = asyncio.ensure_future(probe())
        asked = {"prompt": "x", "max_tokens": 8, "ignore_eos": True, "logprobs": 20, "stream": streams}
        await asyncio.gather(*(_ask(app, asked, send) for _ in range(200)))
        probing.cancel()
        await frontend.stop()

    asyncio.run(many())
    assert sum(one["read"] for one in passes) == 200 and sum(one["texts"] for one in passes) == 200 * 8 * 21
    assert max(one["read"] for one in passes) <= WORK_PER_TURN // REQUEST + 1
    each = SHOWN_WITH_TOPS // TOKENS_PER_UNIT  # units of a token with the likeliest ones
    most_tokens = 2 * (WORK_PER_TURN // each + 8)  # of tasks that the last turn has woken, and of this turn
    assert max(one["texts"] for one in passes) <= 21 * most_tokens < 200 * 21 / 2


@pytest.mark.ci
def test_what_waits_for_a_slow_client_becomes_text_in_parts():
    """The client takes nothing until all tokens are there."""
    body = simulated_body(speed=1000.0)
    frontend = Frontend(body, Limits(), ServerMetrics())
    app, sent = make_app(frontend), []

    async def send(message: dict) -> None:
        sent.append(message)
        while len(sent) == 2 and frontend.num_live:
            await asyncio.sleep(0.001)

    async def ask() -> None:
        frontend.start()
        await _ask(app, asked, send)
        await frontend.stop()

    asked = {"prompt": "x", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    asyncio.run(ask())
    texts = [json.loads(part[6:]) for one in sent[1:] for part in one["body"].decode().split("\n\n") if "{" in part]
    counts = [len(one["choices"][0]["text"].split()) for one in texts]
    assert sum(counts) == 20_000 and 1024 <= max(counts) < 1124


def test_a_whole_answer_is_written_as_it_comes(simulated: Served, monkeypatch: pytest.MonkeyPatch):
    """Nothing of it is left to decode at its end."""
    in_whole, whole = [], CompletionForm.whole

    def spied_whole(self) -> bytes:
        codec, text_of = type(self.codec), type(self.codec).text_of
        monkeypatch.setattr(codec, "text_of", lambda self, token: in_whole.append(token) or text_of(self, token))
        return whole(self)

    monkeypatch.setattr(CompletionForm, "whole", spied_whole)
    answer = simulated.post("/v1/completions", prompt="x", max_tokens=50, ignore_eos=True, logprobs=3).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert [len(logprobs[name]) for name in sorted(logprobs)] == [50] * 4 and not in_whole
    assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
