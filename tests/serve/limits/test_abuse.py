"""Clients send thousands of invalid or broken requests, drawn by a seed. The server answers a valid question with the
same text before, meanwhile and afterwards, none of its answers is an error of its own (500), and it keeps nothing of
the requests."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pytest
from foredraft.serve.base.limits import Limits
from http_server import Served, serving, simulated_body

ASKED = {"prompt": "Why is the sky blue?", "max_tokens": 24, "ignore_eos": True, "seed": 7, "stream": True}
"""The question whose answer must not change."""
VALUES = (
    *(None, True, 0, -1, 0.5, 10**30, 1e308, 2**63, -(2**63), "", "x", "\ud800", "\0", "é" * 50, [], {}, [[]], [None]),
    *([1, 2, 3], ["a"] * 20, {"a": {"b": [1]}}, "word " * 300, [-1], [2**31], [2**40], [[1], [2]], "A" * 3000),
)
KEYS = (
    *("prompt", "messages", "model", "n", "max_tokens", "seed", "stop", "ignore_eos", "priority", "stream", "echo"),
    *("stream_options", "logit_bias", "stop_token_ids", "cache_salt", "logprobs", "top_logprobs", "temperature"),
    *("top_p", "top_k", "min_tokens", "tools", "tool_choice", "user", "best_of", "suffix", "max_completion_tokens"),
    *("system", "tokens", "request_id", "input", "x" * 200, "\0"),
)
POSTS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"),
    *("/detokenize", "/abort", "/v1/responses"),
)
PATHS = (
    *("/", "/health", "/ready", "/metrics", "/load", "/v1/models", "/v1/models/../x", "/openapi.json"),
    *("//", "/%00", "/%ff", "/v1/completions?x=" + "y" * 500, "*", "http://x/health", "/" + "a" * 9000, "/\xe9"),
)
MOST_LEFT_PER_REQUEST = 0.2
"""Blocks of Python's allocator that may be left for each request."""
MOST_GROWTH_BYTES = 48 * 2**20


@dataclass
class Abuse:
    """Draws clients for the server at `port`; counts the statuses of the answers that came."""

    port: int
    dice: random.Random
    statuses: Counter[int] = field(default_factory=Counter)

    def body(self) -> bytes:
        """Return a body that is valid but for some keys, or bytes that are like one."""
        dice = self.dice
        body: object = {"prompt": "x y z", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
        for key in dice.choices(KEYS, k=dice.choice((0, 1, 1, 2, 5))):
            body[key] = dice.choice(VALUES)
        if dice.random() < 0.3:
            body["stream"] = True
        if dice.random() < 0.05:
            body = dice.choice(VALUES)
        data = json.dumps(body).encode()
        if dice.random() < 0.15:
            data = bytearray(data or b"x")
            for _ in range(dice.randrange(1, 9)):
                data[dice.randrange(len(data))] = dice.randrange(256)
        return bytes(data)

    def request(self) -> bytes:
        """Return the bytes of a request that a server may be sent."""
        dice = self.dice
        method = dice.choice(("POST",) * 9 + ("GET", "HEAD", "OPTIONS", "PUT", "CONNECT", "x", "GET\0"))
        path = dice.choice(POSTS) if method == "POST" else dice.choice(PATHS)
        body = self.body() if method == "POST" else b""
        lines = [f"{method} {path} HTTP/{dice.choice(('1.1',) * 9 + ('1.0', '2.0', '9'))}".encode(), b"Host: x"]
        length = len(body) + dice.choice((0,) * 15 + (1, -1, 10**9, -5))
        if dice.random() < 0.1:
            lines.append(b"Transfer-Encoding: chunked")
            body = b"%x\r\n%b\r\n%b" % (length & 0xFFFF, body, dice.choice((b"0\r\n\r\n", b"", b"zz\r\n")))
        else:
            lines.append(b"Content-Length: %d" % length)
        if dice.random() < 0.9:
            lines.append(b"Content-Type: application/json")
        if dice.random() < 0.1:  # many, long, or without a name
            name, value = dice.choice(((b"x", b"y"), (b"x", b"y" * 3000), (b"", b""), (b"X-Request-Id", b"\xff" * 200)))
            lines += [name + b": " + value] * dice.choice((1, 10, 200))
        return b"\r\n".join([*lines, b"", body])

    async def client(self) -> None:
        """Be one client: ask, and read all, some or nothing of the answer."""
        dice = self.dice
        kind = dice.choice(("reads",) * 6 + ("leaves", "resets", "half", "two", "deaf", "rubbish", "opens", "shuts"))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
        try:
            data = self.request()
            if kind == "half":
                data = data[: dice.randrange(len(data))]
            elif kind == "two":
                data += self.request()
            elif kind == "rubbish":
                data = dice.randbytes(dice.randrange(1, 3000))
            elif kind == "opens":
                data = b""
            elif kind == "deaf":
                data = _post({"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True})
            writer.write(data)
            if kind == "shuts":
                writer.write_eof()
            if kind in ("reads", "two", "shuts", "rubbish"):
                answer = await asyncio.wait_for(self._read(reader), 60)
                if answer.startswith(b"HTTP/1.1 "):
                    self.statuses[int(answer[9:12])] += 1
            elif kind == "leaves":
                await asyncio.wait_for(reader.read(dice.randrange(1, 900)), 60)
            else:
                await asyncio.sleep(dice.random() * 0.05)
            if kind == "resets" and not writer.is_closing():
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except TimeoutError:
            raise
        except (OSError, asyncio.IncompleteReadError):  # the server has closed the connection
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """Read an answer to its end, as far as its head tells where that is, or for some time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                head = await reader.readuntil(b"\r\n\r\n")
                if b"chunked" in head:
                    while not (await reader.readuntil(b"\r\n\r\n")).endswith(b"0\r\n\r\n"):
                        pass
                return head
        return b""


def _post(body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(data)}\r\n\r\n".encode() + data


async def _abuse(abuse: Abuse, num_clients: int, ask) -> set[str]:
    """Send clients, at most 40 at once; return the answers that the question got meanwhile."""
    at_once, answers = asyncio.Semaphore(40), set()

    async def one(number: int) -> None:
        async with at_once:
            await abuse.client()
            if number % 20 == 0:
                answers.add(await asyncio.to_thread(ask))

    await asyncio.gather(*(one(number) for number in range(num_clients)))
    return answers


def _ask(served: Served) -> str:
    """Return the text of the question's answer; a server that is full is asked again."""
    for _ in range(600):
        answer = served.post("/v1/completions", **ASKED)
        if answer.status_code != 429:
            break
        time.sleep(0.05)
    parts = [json.loads(part[6:]) for part in answer.text.split("\n\n") if part.startswith("data: {")]
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
    return "".join(part["choices"][0]["text"] for part in parts)


def _left(served: Served) -> tuple[int, int]:
    """Return blocks of Python's allocator that are in use, and the process' bytes of memory, with an idle server."""
    served.wait_until_idle()
    gc.collect()
    return sys.getallocatedblocks(), int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("num_clients", [150, pytest.param(20_000, marks=pytest.mark.slow)])
def test_abuse_changes_no_answer_and_leaves_nothing(num_clients: int, caplog: pytest.LogCaptureFixture):
    """The seed is the date, but in continuous integration."""
    caplog.set_level(logging.ERROR, "uvicorn.error")  # a record of each request that is no HTTP would be kept
    seed = 1 if "CI" in os.environ or num_clients < 1000 else date.today().toordinal()
    body = simulated_body("engine.kv_slots=8000", "engine.max_queue=30", speed=50.0)
    with serving(body, Limits(max_streams=100, stall_s=1.0, max_body_bytes=100_000)) as served:
        abuse = Abuse(int(served.url.rpartition(":")[2]), random.Random(seed))
        text = _ask(served)
        warm_up, rest = num_clients // 3, num_clients - num_clients // 3
        answers = asyncio.run(_abuse(abuse, warm_up, lambda: _ask(served)))
        blocks, memory = _left(served)
        answers |= asyncio.run(_abuse(abuse, rest, lambda: _ask(served)))
        more_blocks, more_memory = _left(served)
        assert served.http.get("/health").status_code == 200
    assert answers == {text} and len(text.split()) == ASKED["max_tokens"], seed
    known = {200, 204, 400, 401, 404, 405, 408, 413, 415, 422, 429, 431}
    assert set(abuse.statuses) <= known and 400 in abuse.statuses, (seed, abuse.statuses)
    assert 200 in abuse.statuses or num_clients < 1000, (seed, abuse.statuses)
    errors = [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert not errors, (seed, errors[0])
    if rest > 1000:
        assert more_blocks - blocks < MOST_LEFT_PER_REQUEST * rest, (seed, blocks, more_blocks)
        assert more_memory - memory < MOST_GROWTH_BYTES, (seed, memory, more_memory)
