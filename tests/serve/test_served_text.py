"""The text over HTTP is that of a session, whatever other clients do; failed steps cost no token and no slot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from foredraft.core.draws import uniform
from foredraft.gpu.session.plan import SessionOptions
from foredraft.gpu.session.prompts import PromptEntry, RequestDefaults, make_requests
from foredraft.gpu.session.session import DecodeSession
from http_server import Served

PROMPTS = [f"def f{i}(a, b):\n    return {i} " for i in range(16)]
NUM_TOKENS = 12
FAILING_STEPS = (3, 4, 16)


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> list[str]:
    """Greedy text without drafts and without HTTP."""
    session = DecodeSession.open(SessionOptions(models["target"], dtype="float64"))
    entries = [PromptEntry(str(i), "", prompt=prompt) for i, prompt in enumerate(PROMPTS)]
    requests = make_requests(entries, session.tokenizer, RequestDefaults(max_tokens=NUM_TOKENS), "<test>")
    return [output.text for output in session.run(requests).values()]


async def _stream(client, number: int, leave_after: int | None) -> str:
    text = ""
    stream = await client.completions.create(
        model="served", prompt=PROMPTS[number % 16], max_tokens=NUM_TOKENS, temperature=0, stream=True
    )
    async with stream:
        async for event in stream:
            text += event.choices[0].text
            if leave_after is not None and len(text) >= leave_after:
                break
    return text


def _texts(served: Served, leaves: list[int | None]) -> list[str]:
    """Ask for one text per entry, all at once; a client with a number leaves after so many characters."""

    async def all_of_them() -> list[str]:
        async with served.async_client as client:
            return await asyncio.gather(*(_stream(client, number, leave) for number, leave in enumerate(leaves)))

    return asyncio.run(all_of_them())


@pytest.mark.ci
def test_greedy_text_under_clients_that_leave(real: Served, expected: list[str]):
    coins = uniform(5, 1, np.arange(64), 0)
    leaves = [int(coin * 20) if coin < 0.5 else None for coin in coins.tolist()]
    for number, text in enumerate(_texts(real, leaves)):
        whole = expected[number % 16]
        assert whole.startswith(text) if coins[number] < 0.5 else text == whole
    real.wait_until_idle()


def test_an_executor_that_fails_is_started_again(real: Served, expected: list[str], monkeypatch: pytest.MonkeyPatch):
    executor = real.frontend.body._loop.driver.executor
    collect, calls = executor.collect, iter(range(1_000_000))

    def failing():
        if next(calls) in FAILING_STEPS:
            raise RuntimeError("the device is gone")
        return collect()

    monkeypatch.setattr(executor, "collect", failing)
    assert _texts(real, [None] * 8) == expected[:8]
    assert next(calls) > max(FAILING_STEPS)
    real.wait_until_idle()


def test_a_request_that_fails_alone_is_503_and_the_server_stays(real: Served, monkeypatch: pytest.MonkeyPatch):
    def failing():
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(real.frontend.body._loop.driver.executor, "collect", failing)
        answer = real.post("/v1/completions", prompt="def", max_tokens=4)
        assert answer.status_code == 503 and "the device is gone" in answer.json()["error"]["message"]
    assert real.post("/v1/completions", prompt="def", max_tokens=4).status_code == 200
    real.wait_until_idle()
