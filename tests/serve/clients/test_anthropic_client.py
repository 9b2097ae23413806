"""Anthropic's package against a simulated server: whole answers, streams, tools, histories, errors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from foredraft.serve.requests.messages import CountTokensRequest
from http_server import Served, serving, simulated_body

TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}
ASKED: dict[str, Any] = {
    "model": "served",
    "max_tokens": 30,
    "system": "You are brief.",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
}


@pytest.fixture(scope="module")
def anthropic() -> ModuleType:
    return pytest.importorskip("anthropic", reason="a package of the extra dev")


def _client(anthropic: ModuleType, served: Served, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0)


def test_an_answer_has_its_text_its_reason_and_its_tokens(anthropic, simulated):
    client = _client(anthropic, simulated)
    whole = client.messages.create(**ASKED)
    (block,) = whole.content
    assert (whole.type, whole.role, whole.model, block.type) == ("message", "assistant", "served", "text")
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 30 and block.text
    told = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    count = {key: value for key, value in ASKED.items() if key != "max_tokens"}
    assert told == client.messages.count_tokens(**count).input_tokens > 5
    chat = [{"role": "system", "content": ASKED["system"]}, *ASKED["messages"]]
    assert told == simulated.post("/tokenize", messages=chat).json()["count"]
    again = client.messages.create(**ASKED).usage
    assert again.cache_read_input_tokens > 0 and again.input_tokens + again.cache_read_input_tokens == told


def test_a_stream_has_the_events_of_an_answer(anthropic, simulated):
    with _client(anthropic, simulated).messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    own = [kind for kind in kinds if kind != "text"]
    assert own[:2] == ["message_start", "content_block_start"]
    assert own[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(own[2:-3]) == {"content_block_delta"}
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 30
    raw = simulated.post("/v1/messages", **ASKED, stream=True).text
    assert "[DONE]" not in raw and message.content[0].text


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_sequence_is_named(anthropic, simulated, streams):
    client, asked = _client(anthropic, simulated), {**ASKED, "stop_sequences": ["###", "e"]}
    if streams:
        with client.messages.stream(**asked) as stream:
            ended = stream.get_final_message()
    else:
        ended = client.messages.create(**asked)
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "e")
    assert ended.usage.output_tokens < 30 and "e" not in ended.content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
@pytest.mark.parametrize("streams", [False, True])
def test_a_demanded_tool_is_used_and_its_result_is_history(anthropic, choice, streams):
    with serving(simulated_body("workload.output={kind='fixed',value=8}"), model="served") as served:
        client = _client(anthropic, served)
        asked = {**ASKED, "tools": [TOOL], "tool_choice": choice}
        if streams:
            with client.messages.stream(**asked) as stream:
                used = stream.get_final_message()
        else:
            used = client.messages.create(**asked)
        (block,) = used.content
        assert (used.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
        assert set(block.input) == {"city", "days"} and block.input["days"] == 0 and block.input["city"]
        result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
        history = [
            *ASKED["messages"],
            {"role": "assistant", "content": used.content},
            {"role": "user", "content": [result, {"type": "text", "text": "thanks", "cache_control": None}]},
        ]
        answer = client.messages.create(**{**ASKED, "messages": history, "tools": [TOOL]})
        assert (
            answer.content[0].type == "text" and answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 40
        )


def test_a_history_with_tools_is_the_chat_that_it_is():
    asked = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "…", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    chat = CountTokensRequest.model_validate(asked).to_chat()
    call = {"type": "function", "id": "t1", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert [message.to_template() for message in chat.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "t1"},
    ]
    assert chat.demanded is not None and chat.demanded.parameters == TOOL["input_schema"]


def test_errors_and_keys_are_those_that_the_package_knows(anthropic):
    with serving(simulated_body(), model="served", api_key="secret") as served:
        client = _client(anthropic, served, "secret")
        assert client.messages.create(**ASKED).content
        with pytest.raises(anthropic.AuthenticationError):
            _client(anthropic, served, "other").messages.create(**ASKED)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**ASKED, "model": "other"})
        for wrong in ({"tool_choice": {"type": "any"}}, {"temperature": 2}, {"thinking": {"type": "disabled"}}):
            with pytest.raises(anthropic.BadRequestError) as refused:
                client.messages.create(**ASKED, extra_body=wrong)
            assert (refused.value.body["type"], refused.value.body["error"]["type"]) == (
                "error",
                "invalid_request_error",
            )
    with serving(simulated_body(), model="served", dialect="vllm") as served:
        assert _client(anthropic, served).messages.create(**ASKED, thinking={"type": "disabled"}).content
