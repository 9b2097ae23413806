"""OpenAI's own client, unmodified, against both bodies."""

from __future__ import annotations

import asyncio
import json

import pytest
from http_server import Served

MODEL = "served"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "def add"}]}]


def test_a_completion_is_the_text_of_its_stream(served: Served):
    asked = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0, "seed": 3}
    whole = served.client.completions.create(**asked)
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (12, "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    events = list(served.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    assert events[-1].usage.completion_tokens == 12 and not events[-1].choices
    assert events[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert events[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert len({event.id for event in events}) == 1 and whole.id != events[0].id
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        event.usage.completion_tokens
        for event in served.client.completions.create(**asked, stream=True, stream_options=options)
    ]
    assert counts == sorted(counts) and len(set(counts)) == len(counts) - 1 and counts[-1] == 12


def test_a_chat_is_the_text_of_its_stream(served: Served):
    asked = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 9, "temperature": 0, "seed": 1}
    whole = served.client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant" and whole.usage.completion_tokens <= 9
    with served.client.chat.completions.create(**asked, stream=True) as stream:
        deltas = [event.choices[0].delta for event in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content


def test_choices_of_several_prompts_come_in_order(served: Served):
    asked = {"model": MODEL, "prompt": ["for i", "def"], "n": 2, "max_tokens": 5, "seed": 0, "echo": True}
    whole = served.client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in whole.choices] == ["for", "for", "def", "def"]
    texts = ["", "", "", ""]
    for event in served.client.completions.create(**asked, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [choice.text for choice in whole.choices], "a seed gives the same texts again"
    assert texts[0] != texts[1], "choices of one seed differ"


def test_many_clients_at_once(served: Served):
    async def ask(client, number: int) -> int:
        stream = await client.completions.create(
            model=MODEL, prompt=f"number {number}", max_tokens=8, stream=True, extra_body={"ignore_eos": True, "top_k": 5},
            stream_options={"include_usage": True},
        )  # fmt: skip
        return [event async for event in stream][-1].usage.completion_tokens

    async def all_of_them() -> list[int]:
        async with served.async_client as client:
            return await asyncio.gather(*(ask(client, number) for number in range(24)))

    assert asyncio.run(all_of_them()) == [8] * 24
    served.wait_until_idle()


def test_a_stop_string_ends_the_text_before_it(served: Served):
    asked = {
        "model": MODEL,
        "prompt": "x",
        "max_tokens": 30,
        "temperature": 0,
        "seed": 4,
        "extra_body": {"ignore_eos": True},
    }
    text = served.client.completions.create(**asked).choices[0].text
    stop = text[8:11]
    for stream in (False, True):
        answer = served.client.completions.create(**asked, stop=[stop, "§"], stream=stream)
        choices = [event.choices[0] for event in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"
    served.wait_until_idle()


def test_tokens_after_a_stop_string_are_not_counted(simulated: Served):
    """A round brings several tokens; the stop string may be in the first of them."""
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 200, "seed": 4, "extra_body": {"ignore_eos": True}}
    text = simulated.client.completions.create(**asked).choices[0].text
    words = text.split()
    for number in range(1, 40, 3):
        stop = " " + " ".join(words[number : number + 3])
        expected = text[: text.index(stop)].count(" ") + 3  # with the tokens of the stop string
        events = list(simulated.client.completions.create(
            **asked, stop=stop, logprobs=0, stream=True, stream_options={"include_usage": True}
        ))  # fmt: skip
        shown = sum(len(event.choices[0].logprobs.tokens) for event in events if event.choices)
        assert events[-1].usage.completion_tokens == shown == expected
    simulated.wait_until_idle()


def test_the_bytes_of_half_a_character(served: Served):
    """Tokens that are a part of a character have its bytes, not those of the sign that shows them."""
    text = "añ😀é日本"
    codec = served.frontend.body.tokenizer
    tokens = codec.encode(text, add_special_tokens=False).tolist()
    assert b"".join(codec.bytes_of(token) for token in tokens).lstrip() == text.encode()


def test_a_conversation_goes_on_with_its_own_answers(served: Served):
    """Clients send an answer back as it came, and the answers of other servers."""
    first = served.client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=5).choices[0].message
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [
        *CHAT,
        first.model_dump(),
        {"role": "user", "content": "more", "name": None, "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": None, "annotations": []},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    short = served.post("/tokenize", messages=history[:4]).json()["count"]
    long = served.client.chat.completions.create(model=MODEL, messages=history, max_tokens=5)
    assert long.usage.prompt_tokens > short


def test_tokens_go_and_come_back(served: Served):
    text = "def add(a, b):\n    return a + b\n"
    tokens = served.post("/tokenize", prompt=text, add_special_tokens=False).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert served.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    answer = served.client.completions.create(model=MODEL, prompt=tokens["tokens"], max_tokens=1)
    assert answer.usage.prompt_tokens == tokens["count"]
    chat = served.post("/tokenize", messages=[{"role": "user", "content": "hi"}]).json()
    asked = served.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=1
    )
    assert asked.usage.prompt_tokens == chat["count"]


def test_the_model_is_listed(served: Served):
    (card,) = served.client.models.list().data
    assert card.id == MODEL and card.max_model_len == served.frontend.body.context_len
    assert served.client.models.retrieve(MODEL) == card
    with pytest.raises(served.openai.NotFoundError, match="'served'"):
        served.client.models.retrieve("a/b")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"extra_body": {"response_format": {"type": "json_schema"}}}, "response_format"),
        ({"temperature": -1}, "temperature"),
        ({"n": 17}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [2**31 - 1, -1]}, "prompt"),
        ({"max_tokens": 10**8}, "max_tokens"),
        ({"extra_body": {"response_format": {"type": "json_object"}, "ignore_eos": True}}, "ignore_eos"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "logit_bias"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_with_its_name(simulated: Served, asked: dict, param: str):
    with pytest.raises(simulated.openai.BadRequestError) as caught:
        simulated.client.completions.create(**{"model": MODEL, "prompt": "x", **asked})
    assert caught.value.body["param"] == param


@pytest.mark.slow
def test_penalties_and_schemas_change_a_models_text(real: Served):
    pytest.importorskip("llguidance")
    asked = {"model": MODEL, "max_tokens": 40, "temperature": 0}
    plain = real.client.completions.create(**asked, prompt="def", extra_body={"ignore_eos": True}).choices[0].text
    for more in ({"presence_penalty": 1.5}, {"frequency_penalty": 1.0}, {"extra_body": {"repetition_penalty": 1.8}}):
        more = {**more, "extra_body": {"ignore_eos": True, **more.get("extra_body", {})}}
        assert real.client.completions.create(**asked, prompt="def", **more).choices[0].text != plain, more
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    schema["x-guidance"] = {"whitespace_flexible": False}
    chosen = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = real.client.chat.completions.create(**asked, messages=CHAT, response_format=chosen).choices[0]
    assert answer.finish_reason == "stop" and isinstance(json.loads(answer.message.content)["ok"], bool)
    chosen["json_schema"]["schema"] = {"type": "objekt"}
    for wrong, param in (({"response_format": chosen}, "response_format"), ({"extra_body": {"min_p": 2}}, "min_p")):
        with pytest.raises(real.openai.BadRequestError) as caught:
            real.client.chat.completions.create(**{**asked, "messages": CHAT, **wrong})
        assert caught.value.body["param"] == param


def test_another_model_is_not_found(simulated: Served):
    with pytest.raises(simulated.openai.NotFoundError, match="'served'"):
        simulated.client.completions.create(model="gpt-4", prompt="x")


def test_a_bias_selects_and_bans_tokens(served: Served):
    asked = {"model": MODEL, "prompt": "def", "max_tokens": 9, "temperature": 0, "extra_body": {"ignore_eos": True}}
    chosen, banned = served.post("/tokenize", prompt=" the of", add_special_tokens=False).json()["tokens"][:2]
    only = served.client.completions.create(**asked, logit_bias={str(chosen): 100}).choices[0].text
    assert only == served.post("/detokenize", tokens=[chosen] * 9).json()["prompt"]
    both = {str(chosen): 100, str(banned): 100}
    mixed = served.client.chat.completions.create(
        **{name: value for name, value in asked.items() if name != "prompt"},
        messages=CHAT,
        logit_bias={**both, str(banned): -100},
    )
    assert mixed.choices[0].message.content == only


def test_log_probabilities(served: Served):
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    logprobs = served.client.completions.create(**asked, prompt="def", logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    assert all(
        max(top.values()) == value <= 0
        for top, value in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )
    chat = served.client.chat.completions.create(**asked, messages=CHAT, logprobs=True, top_logprobs=2)
    entries = chat.choices[0].logprobs.content
    assert len(entries) == 6 and all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
