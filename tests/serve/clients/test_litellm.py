"""LiteLLM against a simulated server: conversations with tools, errors as its own exceptions, retries, streams that are
left. `make clients` installs it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from foredraft.serve.base.limits import Limits
from foredraft.serve.metrics import ServerMetrics
from http_server import Served, serving, simulated_body, wait_until

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import asks the network
litellm = pytest.importorskip("litellm", reason="`make clients` installs LiteLLM and runs this")
ASKED: dict[str, Any] = {"max_tokens": 12, "api_key": "none", "num_retries": 0, "max_retries": 0}
USER = {"role": "user", "content": "How is the weather in Rome?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _ask(served: Served, messages: list[Any], provider: str = "hosted_vllm", **more: Any) -> Any:
    """Return the answer of LiteLLM; of a stream what LiteLLM itself makes of its parts."""
    asked = {**ASKED, "model": f"{provider}/served", "api_base": f"{served.url}/v1", "messages": messages, **more}
    if not asked.get("stream"):
        return litellm.completion(**asked)
    parts = list(litellm.completion(**asked, stream_options={"include_usage": True}))
    return litellm.stream_chunk_builder(parts, messages=messages)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool(simulated: Served, provider: str, stream: bool):
    history: list[Any] = [USER]
    prompts = []
    for choice in ("required", "auto", "none"):
        answer = _ask(simulated, history, provider, tools=[TOOL], tool_choice=choice, stream=stream)
        message = answer.choices[0].message
        prompts.append(answer.usage.prompt_tokens)
        assert answer.usage.completion_tokens == 12 and answer.usage.total_tokens == prompts[-1] + 12
        history.append(message)
        if choice == "required":
            (call,) = message.tool_calls
            assert call.function.name == "weather" and json.loads(call.function.arguments)["city"]
            history.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
        else:
            assert message.content and not message.tool_calls
            history.append({"role": "user", "content": "And tomorrow?"})
    assert prompts == sorted(prompts) and prompts[0] < prompts[2]
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_log_probabilities_and_other_ends(simulated: Served):
    entries = _ask(simulated, [USER], logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(entries) == 12 and all(len(entry.top_logprobs) == 2 for entry in entries)
    text = litellm.text_completion(
        model="text-completion-openai/served", prompt="x", max_tokens=5, api_base=f"{simulated.url}/v1", api_key="none"
    )
    assert text.usage.completion_tokens == 5 and text.choices[0].text
    shaped = {"type": "json_schema", "json_schema": {"name": "n", "schema": TOOL["function"]["parameters"]}}
    assert json.loads(_ask(simulated, [USER], response_format=shaped).choices[0].message.content)["city"]


ERRORS = [
    ({"max_tokens": 10**8}, "ContextWindowExceededError"), ({"messages": [USER] * 9000}, "ContextWindowExceededError"),
    ({"model": "hosted_vllm/other"}, "NotFoundError"), ({"temperature": -1}, "BadRequestError"),
    ({"messages": []}, "BadRequestError"), ({"api_key": "wrong"}, "AuthenticationError"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_exceptions_of_their_kind(stream: bool):
    with serving(simulated_body(), model="served", api_key="secret") as served:
        for more, name in ERRORS:
            asked = {"messages": [USER], "api_key": "secret", "stream": stream, **more}
            with pytest.raises(getattr(litellm, name)) as caught:
                _ask(served, **asked)
            assert caught.value.status_code in (400, 401, 404), name


@pytest.fixture
def full() -> Iterator[Served]:
    """A server whose only place is taken by a stream that goes on."""
    metrics = ServerMetrics()
    with serving(simulated_body(metrics=metrics, speed=1.0), Limits(max_streams=1), metrics, model="served") as served:
        asked = {"prompt": "x", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=asked) as stream:
            lines = stream.iter_lines()
            next(lines)
            yield served


def test_a_full_server_is_a_rate_limit_and_a_retry_gets_through(full: Served):
    with pytest.raises(litellm.RateLimitError):
        _ask(full, [USER])
    refused = full.frontend.metrics.num_refused
    freed = threading.Event()

    def free() -> None:
        wait_until(lambda: full.frontend.metrics.num_refused > refused)
        full.frontend._loop.call_soon_threadsafe(full.frontend.give_up)
        freed.set()

    thread = threading.Thread(target=free)
    thread.start()
    assert _ask(full, [USER], "openai", max_retries=5, num_retries=None).usage.completion_tokens == 12
    thread.join()
    assert freed.is_set()


def test_a_server_that_drains_is_unavailable(full: Served):
    full.frontend.is_draining = True  # as after SIGTERM, and without its end after some seconds
    with pytest.raises(litellm.ServiceUnavailableError, match="stopping"):
        _ask(full, [USER])


def test_a_stream_that_is_left_frees_its_place(simulated: Served):
    async def leave() -> None:
        asked = {**ASKED, "model": "hosted_vllm/served", "api_base": f"{simulated.url}/v1", "max_tokens": 30_000}
        stream = await litellm.acompletion(**asked, messages=[USER], stream=True, extra_body={"ignore_eos": True})
        async for part in stream:
            if part.choices[0].delta.content:
                break
        await stream.aclose()

    asyncio.run(leave())
    simulated.wait_until_idle()


def test_a_client_that_waits_no_longer_is_a_timeout(full: Served):
    """The answer takes minutes, and the client waits for less than a second."""
    full.frontend._loop.call_soon_threadsafe(full.frontend.give_up)
    full.wait_until_idle()
    with pytest.raises(litellm.Timeout):
        _ask(full, [USER], max_tokens=30_000, timeout=0.5, extra_body={"ignore_eos": True})
    full.wait_until_idle()
