"""Names of requests, and the lines of a server's log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from foredraft.serve.telemetry.log_lines import LIBRARIES, ServerLog
from http_server import serving, simulated_body

ASKED = {"prompt": "x", "max_tokens": 3}
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def libraries() -> Iterator[None]:
    """Leave the loggers of libraries as they were."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_the_id_of_a_client_is_in_the_answer_and_in_the_log():
    lines: list[dict] = []
    with serving(simulated_body(), access=lines.append) as served:
        headers = {"X-Request-Id": "abc-1", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        answers = [served.http.post("/v1/completions", json=ASKED | {"n": 2}, headers=headers) for _ in range(2)]
        assert [answer.headers["X-Request-Id"] for answer in answers] == ["abc-1"] * 2
        assert [answer.json()["id"] for answer in answers] == ["cmpl-abc-1"] * 2
        made = served.post("/v1/completions", **ASKED).headers["X-Request-Id"]
        wrong = served.http.post("/v1/completions", json={}, headers={"X-Request-Id": "x" * 200})
        assert wrong.status_code == 400 and len(wrong.headers["X-Request-Id"]) == len(made) == 32
        with served.http.stream("POST", "/v1/completions", json=ASKED | {"stream": True}, headers=headers) as stream:
            assert '"id":"cmpl-abc-1"' in stream.read().decode()
        served.wait_until_idle()
    assert [line["status"] for line in lines] == [200, 200, 200, 400, 200]
    assert [line.get("orders") for line in lines] == ["r0-r1", "r2-r3", "r4", None, "r5"]
    assert {line.get("trace_id") for line in lines[:2]} == {TRACE} and lines[2]["request_id"] == made
    assert all(line["ms"] >= 0 and line["path"] == "/v1/completions" for line in lines)


def test_two_answers_at_once_have_different_ids():
    with serving(simulated_body(speed=0.1)) as served:
        headers, asked = {"X-Request-Id": "same"}, {**ASKED, "stream": True, "max_tokens": 3000, "ignore_eos": True}
        with served.http.stream("POST", "/v1/completions", json=asked, headers=headers) as first:
            lines = first.iter_lines()
            first_id = next(lines).split('"id":"')[1].split('"')[0]
            second = served.http.post("/v1/completions", json=ASKED, headers=headers).json()["id"]
        assert first_id == "cmpl-same" != second


@pytest.mark.usefixtures("libraries")
def test_every_line_is_json(capsys: pytest.CaptureFixture[str]):
    log = ServerLog(as_json=True)
    log.take_over()
    body = simulated_body()
    with serving(body, access=log.access) as served:
        served.frontend.tell = log.tell
        log.tell('note: a "sentence"')
        served.post("/v1/completions", **ASKED)
        body.tokenizer.encode = lambda *_, **__: 1 / 0
        assert served.post("/v1/completions", **ASKED).status_code == 500
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines if line["level"] == "warning"] == ['note: a "sentence"']
    assert "ZeroDivisionError" in next(line["traceback"] for line in lines if line["level"] == "error")
    assert sum(line["message"] == "request" for line in lines) == 2


@pytest.mark.usefixtures("libraries")
def test_lines_of_text(capsys: pytest.CaptureFixture[str]):
    log = ServerLog()
    log.access({"client": "::1", "method": "GET", "path": "/x", "status": 200, "ms": 1.25, "request_id": "a"})
    log.tell("ready")
    assert capsys.readouterr().err == "::1 GET /x 200 1.2 ms request_id=a\nforedraft: ready\n"


@pytest.mark.usefixtures("libraries")
def test_a_request_writes_one_line_whatever_it_says(capsys: pytest.CaptureFixture[str]):
    log = ServerLog()
    log.take_over()
    with serving(simulated_body(), access=log.access) as served:
        served.frontend.tell = log.tell
        assert served.http.get("/x%0Aforedraft:%20ready%1B[31m").status_code == 404
        assert served.post(
            "/v1/completions", **ASKED, **{"a\nforedraft: ready": 1, "b\x1b[31m": 2, "plain": 3}
        ).is_success
        logging.getLogger("uvicorn").warning("a client said %s", "x\ny\x1b[31m")
    lines = capsys.readouterr().err.split("\n")
    assert not any(one.startswith("foredraft: ready") for one in lines) and "\x1b" not in "".join(lines)
    assert any("GET /x\\nforedraft: ready\\x1b[31m 404" in one for one in lines)
    assert "WARNING: a client said x\\ny\\x1b[31m" in lines and sum("plain" in one for one in lines) == 1
