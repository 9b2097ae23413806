"""What a server refuses, and what it survives: keys, sizes, deadlines, clients that leave, stop reading
or send rubbish."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import time
from contextlib import suppress

import httpx
import pytest
from foredraft.serve import server
from foredraft.serve.answers.frontend import Frontend
from foredraft.serve.app import make_app
from foredraft.serve.base.limits import Limits
from foredraft.serve.metrics import ServerMetrics
from foredraft.sim.faults.plan import fault_plan
from http_server import Served, serving, simulated_body, wait_until

ASKED = {"prompt": "Why is the sky blue?", "max_tokens": 30, "ignore_eos": True}


def _raw(served: Served, data: bytes, *, then_shut: bool = False) -> bytes:
    """Send bytes on a connection of their own; return what comes back before it is closed."""
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        if then_shut:
            return b""
        answer = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
        return answer


def _head(length: int, path: str = "/v1/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


def test_a_key_is_demanded():
    with serving(simulated_body(), api_key="secret") as served:
        for key in (None, "Bearer", "Bearer wrong", "Basic secret", "Bearer s\u00e9cret"):
            headers = {} if key is None else {"Authorization": key.encode()}
            answer = served.http.post("/v1/completions", json=ASKED, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert served.http.get("/metrics", headers=headers).status_code == 401
        for path in ("/health", "/health_generate", "/ready", "/version"):
            assert served.http.get(path).status_code == 200
        headers = {"Authorization": "Bearer secret"}
        assert served.http.post("/v1/completions", json=ASKED, headers=headers).status_code == 200


def test_bodies_are_bounded_in_size_and_time():
    with serving(simulated_body(), Limits(max_body_bytes=1000, stall_s=0.3, max_prompt_tokens=50)) as served:
        assert served.post("/v1/completions", prompt="x" * 2000).status_code == 413
        chunked = served.http.post("/v1/completions", content=iter([b"x" * 600, b"x" * 600]))
        assert chunked.status_code == 413
        assert b" 408 " in _raw(served, _head(500) + b'{"prompt":')
        long = served.post("/v1/completions", prompt="x y " * 120)
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        for text in ("", "{", "[]", "null", '"x"', '{"prompt": NaN}', "[" * 900, '{"prompt": "\\ud800"}', "\xff"):
            answer = served.http.post("/v1/completions", content=text.encode("latin-1"))
            assert answer.status_code == 400 and answer.json()["error"]["message"], text
        assert served.http.get("/nothing").json()["error"]["type"] == "not_found_error"
        served.wait_until_idle()


def test_a_request_that_trickles_is_given_up():
    def trickle(begin: bytes, more: bytes) -> bool:
        """Return whether the connection is closed while the client still sends."""
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            give_up = time.monotonic() + 20
            try:
                client.sendall(begin)
                while more and time.monotonic() < give_up:
                    client.sendall(more)
                    time.sleep(0.02)
                return not more and client.recv(100) == b""
            except (BrokenPipeError, ConnectionResetError):
                return True

    with serving(simulated_body(), Limits(stall_s=0.3, deadline_s=0.6)) as served:
        port = int(served.url.rpartition(":")[2])
        assert trickle(b"", b""), "nothing comes"
        assert trickle(b"GET /health HTTP/1.1\r\n", b"x: y\r\n"), "a head without an end"
        assert trickle(_head(1000), b" "), "a body, byte by byte"
    with serving(simulated_body()) as served:
        port = int(served.url.rpartition(":")[2])
        assert trickle(b"GET /health HTTP/1.1\r\n", b"x: %b\r\n" % (b"y" * 20_000)), "a long head"
        assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"y" * 70_000,
        b"x: y\r\n" * 20_000,
        b"Content-Length: 9000\r\nx: " + b"y" * 66_000,
        b"x: " + b"y" * 200_000,
    ],
    ids=["one", "many", "with a body", "without an end"],
)
def test_a_long_head_is_431(simulated: Served, head: bytes):
    """Also if it comes in one piece, with or without its end, or after another request."""
    end = b"" if len(head) == 100_003 else b"\r\n\r\n"
    for before in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
        answer = _raw(simulated, before + b"GET /health HTTP/1.1\r\n" + head + end)
        if end or answer:  # else the client was still sending when the connection was closed
            assert b"HTTP/1.1 431 " in answer and b"head_too_large" in answer
    answer = _raw(simulated, b"GET /health HTTP/1.1\r\nConnection: close\r\nx: " + b"y" * 60_000 + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_body_that_is_too_large_is_answered_to_the_end():
    """The client sends all of it before it reads."""
    with serving(simulated_body(), Limits(max_body_bytes=3_000_000)) as served:
        for _ in range(3):
            assert b" 413 " in _raw(served, _head(5_000_000) + b" " * 5_000_000)


def test_a_client_that_leaves_within_its_body_is_no_error(simulated: Served, caplog: pytest.LogCaptureFixture):
    assert _raw(simulated, _head(500) + b'{"prompt":', then_shut=True) == b""
    assert simulated.post("/v1/completions", **ASKED).status_code == 200
    wait_until(lambda: not simulated.server.server_state.tasks)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_probes_and_browsers_may_ask_without_a_body(simulated: Served):
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        answer = simulated.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    allowed = simulated.http.options("/v1/chat/completions")
    assert (allowed.status_code, allowed.headers["Allow"]) == (204, "POST")
    assert simulated.http.get("/v1/chat/completions").status_code == 405
    assert simulated.http.options("/nothing").status_code == 404
    refused = simulated.http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert refused.status_code == 415


def test_more_streams_than_allowed_are_429_and_the_deadline_is_504():
    with serving(simulated_body(speed=0.001), Limits(max_streams=3, deadline_s=1.0)) as served:
        refused = served.post("/v1/completions", **{**ASKED, "n": 4})
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        late = served.post("/v1/completions", **{**ASKED, "n": 3})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        wait_until(lambda: served.frontend.num_live == 0)
        assert served.frontend.metrics.num_refused == 1


def test_an_answer_is_aborted_by_its_id(simulated: Served):
    asked = {**ASKED, "max_tokens": 30000, "stream": True}
    with simulated.http.stream("POST", "/v1/completions", json=asked) as stream:
        lines = stream.iter_lines()
        answer_id = next(lines).split('"id":"')[1].split('"')[0]
        assert simulated.post("/abort", request_id="cmpl-other").status_code == 404
        assert simulated.post("/abort", request_id=answer_id).json() == {"aborted": answer_id}
        assert '"finish_reason":"abort"' in [line for line in lines if line][-2]
    simulated.wait_until_idle()


def test_a_client_that_leaves_ends_its_request(simulated: Served):
    aborted = simulated.frontend.metrics.ended["abort"]
    with simulated.http.stream(
        "POST", "/v1/completions", json={**ASKED, "max_tokens": 30000, "n": 2, "stream": True}
    ) as stream:
        next(stream.iter_lines())
    simulated.wait_until_idle()
    assert simulated.frontend.metrics.ended["abort"] == aborted + 2


def test_a_client_that_takes_nothing_stalls_no_other_and_is_given_up():
    """The same application without sockets, whose buffers would take megabytes first."""
    frontend = Frontend(simulated_body(), Limits(stall_s=0.3), ServerMetrics())
    app = make_app(frontend)

    async def ask(body: dict, takes: int) -> list[dict]:
        """Send one request; the client takes so many messages, then no more."""
        requests, sent = [{"type": "http.request", "body": json.dumps(body).encode()}], []

        async def receive() -> dict:
            return requests.pop() if requests else await asyncio.Event().wait()

        async def send(message: dict) -> None:
            if len(sent) == takes:
                await asyncio.Event().wait()
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await asyncio.wait_for(app(scope, receive, send), 60)
        return sent

    async def both() -> None:
        frontend.start()
        deaf = asyncio.create_task(ask({**ASKED, "max_tokens": 30000, "stream": True}, takes=3))
        answers = await asyncio.gather(*(ask(ASKED, takes=100) for _ in range(5)))
        assert all(answer[0]["status"] == 200 and answer[-1]["body"] for answer in answers)
        assert len(await deaf) == 3
        while frontend.num_live:
            await asyncio.sleep(0.001)
        await frontend.stop()

    asyncio.run(both())
    assert frontend.metrics.ended == {"length": 5, "abort": 1, "stop": 0, "error": 0}


FAULTS = {
    "device": {"raises": {"probability": 0.05}, "hangs": {"probability": 0.01, "watchdog_s": 0.02, "restart_s": 0.02},
               "poison": {"probability": 0.1}, "restarts": {"probability": 0.01, "restart_s": 0.02}},
    "link": {"lost": {"probability": 0.02, "retry_s": 0.05}},
    "pool": {"retraction": {"probability": 0.02}},
}  # fmt: skip
"""An executor that dies again and again; seconds are simulated ones."""


SWARM_SPEED = 20.0


async def _swarm(served: Served, seed: int, num_clients: int) -> list[int]:
    """Let clients of all kinds come within a minute of the service's time or more;
    return the statuses of those that behave."""
    spread_s = max(60 / SWARM_SPEED, num_clients / 333)
    dice = random.Random(seed)
    port = int(served.url.rpartition(":")[2])
    body = b'{"prompt": "x y z", "max_tokens": 40, "stream": true, "ignore_eos": true}'

    async def rude(kind: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if kind == "half":
            writer.write(_head(len(body)) + body[: dice.randrange(len(body))])
        elif kind == "rubbish":
            writer.write(bytes(dice.randrange(256) for _ in range(200)) + b"\r\n\r\n")
        elif kind == "invalid":
            writer.write(_head(len(body)) + bytes(dice.choice(b'{}[]",:x0') for _ in range(len(body))))
        elif kind == "leaves":
            writer.write(_head(len(body)) + body)
            await reader.read(dice.randrange(1, 600))
        elif kind == "two":  # a second request before the first has ended
            writer.write((_head(len(body)) + body) * 2)
            await reader.read(10)
        await asyncio.sleep(dice.random() * 0.02)
        writer.close()

    async def polite(client: httpx.AsyncClient) -> int:
        answer = await client.post("/v1/completions", json={**ASKED, "n": dice.choice((1, 1, 2))})
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] in (30, 60)
        return answer.status_code

    at_once = asyncio.Semaphore(200)  # the queue of connections that the system keeps is no matter of ours

    async def one(client: httpx.AsyncClient) -> int | None:
        await asyncio.sleep(dice.random() * spread_s)
        async with at_once:
            return await (polite(client) if dice.random() < 0.4 else rude(dice.choice(kinds)))

    kinds = ("opens", "half", "rubbish", "invalid", "leaves", "two")
    async with httpx.AsyncClient(base_url=served.url, timeout=60, verify=False) as client:
        statuses = await asyncio.gather(*(one(client) for _ in range(num_clients)))
        return [status for status in statuses if status is not None]


@pytest.mark.parametrize(
    ("seed", "num_clients"),
    [
        (1, 150),
        *(pytest.param(seed, 2000, marks=pytest.mark.slow) for seed in range(2, 6)),
        pytest.param(6, 20_000, marks=pytest.mark.slow),
    ],
)
def test_a_swarm_of_clients_and_faults(seed: int, num_clients: int):
    body = simulated_body("engine.max_queue=20", speed=SWARM_SPEED, faults=fault_plan(FAULTS))
    with serving(body, Limits(max_streams=40, stall_s=2.0 if num_clients < 1000 else 10.0)) as served:
        statuses = asyncio.run(_swarm(served, seed, num_clients))
        assert set(statuses) <= {200, 429, 503} and statuses.count(200) > 10  # how many more depends on the machine
        served.wait_until_idle()
        assert body.at_ns(time.monotonic()) > 55e9, "a minute of the service's time"
        assert served.http.get("/health").status_code == 200
    report = body.finish()
    assert report.kept and not set(report.never_fired) & {"device.raises", "device.poison"}, report


@pytest.mark.slow
def test_ten_thousand_connections_opened_and_dropped(simulated: Served):
    port = int(simulated.url.rpartition(":")[2])
    for _ in range(10_000):
        socket.create_connection(("127.0.0.1", port)).close()
    assert simulated.post("/v1/completions", **ASKED).status_code == 200


def test_a_body_that_contradicts_itself_ends_the_requests_is_not_healthy_and_then_ends_the_server(monkeypatch):
    monkeypatch.setattr(server, "FAILED_S", math.inf)
    body = simulated_body()
    with serving(body) as served:
        body.turn = lambda outlet: 1 / 0
        answer = served.post("/v1/completions", **ASKED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_error")
        assert served.http.get("/health").status_code == served.http.get("/ready").status_code == 503
        assert served.post("/v1/completions", **ASKED).status_code == 503
        monkeypatch.setattr(server, "FAILED_S", 0.0)
        wait_until(lambda: served.server.should_exit)
