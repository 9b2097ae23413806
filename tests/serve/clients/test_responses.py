"""OpenAI's package, `client.responses`, against both bodies: whole answers, streams, calls, histories, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from foredraft.serve.limits import Limits
from foredraft.serve.requests.responses import ResponsesRequest
from http_server import Served, serving, simulated_body

MODEL = "served"
ASKED: dict[str, Any] = {"model": MODEL, "input": "Why is the sky blue?", "instructions": "Be brief."}
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}


def test_an_answer_has_its_text_its_status_and_its_tokens(served: Served):
    whole = served.client.responses.create(**ASKED, max_output_tokens=9, temperature=0, metadata={"a": "b"})
    (item,) = whole.output
    assert (whole.object, whole.status, whole.incomplete_details.reason) == (
        "response",
        "incomplete",
        "max_output_tokens",
    )
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete") and whole.output_text
    assert (whole.usage.output_tokens, whole.usage.output_tokens_details.reasoning_tokens) == (9, 0)
    assert (whole.metadata, whole.instructions, whole.max_output_tokens) == ({"a": "b"}, "Be brief.", 9)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED["input"]}]
    assert whole.usage.input_tokens == served.post("/tokenize", messages=chat).json()["count"]
    again = served.client.responses.create(**ASKED, max_output_tokens=9, temperature=0)
    assert again.usage.input_tokens_details.cached_tokens == whole.usage.input_tokens - 1
    told = served.client.chat.completions.create(model=MODEL, messages=chat, max_tokens=9, temperature=0)
    if served.frontend.body.pace is None:
        assert again.output_text == told.choices[0].message.content


def test_a_stream_has_the_events_of_an_answer(served: Served):
    asked = {**ASKED, "max_output_tokens": 12, "temperature": 0, "extra_body": {"seed": 5}}
    events = list(served.client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    ended = events[-1].response
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == ended.output_text
    whole = served.client.responses.create(**asked)
    assert ended.output_text == whole.output_text and ended.usage.output_tokens == 12
    with served.client.responses.stream(**asked) as stream:
        assert [event.type for event in stream if event.type == "response.output_text.delta"]
    assert events[0].response.status == "in_progress" and events[0].response.id == ended.id


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
@pytest.mark.parametrize("streams", [False, True])
def test_a_demanded_call_is_made_and_its_result_is_history(choice: Any, streams: bool):
    with serving(simulated_body("workload.output={kind='fixed',value=8}"), model=MODEL) as served:
        client = served.client
        asked = {**ASKED, "tools": [TOOL], "tool_choice": choice}
        if streams:
            events = list(client.responses.create(**asked, stream=True))
            parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
            answer = events[-1].response
            assert "".join(parts) == done.arguments and events[-1].type == "response.completed"
        else:
            answer = client.responses.create(**asked)
        (call,) = answer.output
        assert (answer.status, call.type, call.name, call.status) == (
            "completed",
            "function_call",
            "weather",
            "completed",
        )
        arguments = json.loads(call.arguments)
        assert arguments["days"] == 0 and arguments["city"] and answer.tools[0].name == "weather"
        history = [
            {"role": "user", "content": ASKED["input"]},
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        goes_on = client.responses.create(**{**ASKED, "input": history, "tools": [TOOL]})
        assert goes_on.output[0].type == "message" and goes_on.status == "completed"
        assert goes_on.usage.input_tokens > answer.usage.input_tokens
        last = client.responses.create(**{**ASKED, "input": [*history, *(one.model_dump() for one in goes_on.output)]})
        assert last.usage.input_tokens_details.cached_tokens < last.usage.input_tokens


def test_items_are_the_chat_that_they_are():
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    asked = {
        "input": items,
        "instructions": "Be brief.",
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    chat = ResponsesRequest.model_validate(asked).to_chat()
    calls = [
        {"type": "function", "id": name, "function": {"name": "weather", "arguments": arguments}}
        for name, arguments in (("c1", {"city": "Rome"}), ("c2", {}))
    ]
    assert [message.to_template() for message in chat.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "ab"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    assert chat.demanded is not None and chat.demanded.parameters == TOOL["parameters"]


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_are_included_on_demand(served: Served, streams: bool):
    asked = {**ASKED, "max_output_tokens": 5, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = served.client.responses.create(**asked, stream=streams)
    if streams:
        events = list(answer)
        parts = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        answer = events[-1].response
        assert [part.token for part in parts] == [one.token for one in answer.output[0].content[0].logprobs]
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == 5 and all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)


REFUSED = [
    ({"previous_response_id": "resp_1"}, None), ({"store": True}, "store"), ({"background": True}, "background"),
    ({"reasoning": {"effort": "low"}}, "reasoning"), ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"input": []}, "input"), ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"max_output_tokens": 10**8}, "max_output_tokens"), ({"truncation": "auto"}, "truncation"), ({"foo": 1}, "foo"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"tool_choice": "required"}, None), ({"input": "x " * 100_000}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "param"), REFUSED)
def test_what_cannot_be_honoured_is_an_error_with_its_name(simulated: Served, more: dict[str, Any], param: str | None):
    answer = simulated.post("/v1/responses", **{**ASKED, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_answers_are_not_stored(simulated: Served):
    whole = simulated.client.responses.create(**ASKED, max_output_tokens=2, store=False)
    for call in (simulated.client.responses.retrieve, simulated.client.responses.delete):
        with pytest.raises(simulated.openai.NotFoundError, match="not stored"):
            call(whole.id)


def test_a_dialect_leaves_out_what_has_no_effect_but_never_the_history():
    told: list[str] = []
    with serving(simulated_body(), model=MODEL, dialect="vllm") as served:
        served.frontend.tell = told.append
        for more in ({"store": True}, {"reasoning": {"effort": "low"}}, {"truncation": "auto"}, {"foo": 1}):
            assert served.post("/v1/responses", **ASKED, **more, max_output_tokens=2).status_code == 200
        assert len(told) == 4
        refused = served.post("/v1/responses", **ASKED, previous_response_id="resp_1")
        assert refused.status_code == 400 and "not stored" in refused.text


def test_an_aborted_answer_is_cancelled(simulated: Served):
    with simulated.client.responses.create(**ASKED, stream=True, extra_body={"ignore_eos": True}) as stream:
        begun = next(iter(stream))
        simulated.post("/abort", request_id=begun.response.id)
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    simulated.wait_until_idle()


def test_a_failure_within_a_stream_is_its_last_event():
    with serving(simulated_body(speed=0.05), Limits(deadline_s=1.0), model=MODEL) as served:
        last = list(served.client.responses.create(**ASKED, stream=True, extra_body={"ignore_eos": True}))[-1]
        assert (last.type, last.code) == ("error", "deadline_exceeded")
