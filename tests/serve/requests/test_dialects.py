"""Requests as clients of OpenAI, vLLM and SGLang write them: what has effect, what is left out, what a strict server
refuses, and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from foredraft.core.contract.request import GREEDY
from foredraft.serve.base.port import Order
from foredraft.serve.metrics import ServerMetrics
from foredraft.serve.requests.schema import ChatRequest
from http_server import Served, serving, simulated_body

ASKED = {"prompt": "Why is the sky blue?", "max_tokens": 60, "seed": 3}
LEFT_OUT = {
    "skip_special_tokens": False, "frequency_penalty": 0.5, "best_of": 4, "rid": "x",
    "structured_outputs": {"regex": "a"},
}  # fmt: skip
BELOW = {
    "stream_options": {"include_usage": True, "include_obfuscation": True, "as_of": 1},
    "response_format": {"type": "json_object", "schema": {}},
}
"""Parameters with a part that is unknown, or has no effect."""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}, "place": {"type": "string"}},
            "required": ["days", "unit", "place"],
        },
    },
}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 1}


@pytest.fixture(scope="module", params=["openai", "vllm", "sglang"])
def spoken(request: pytest.FixtureRequest) -> Iterator[tuple[Served, list[str]]]:
    told: list[str] = []
    metrics = ServerMetrics()
    body = simulated_body("workload.output={kind='fixed',value=20}", metrics=metrics)
    with serving(body, metrics=metrics, dialect=request.param) as served:
        served.frontend.tell = told.append
        yield served, told


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    with serving(simulated_body(), strict=True) as served:
        yield served


@pytest.mark.fast("vllm", ci="*")
def test_parameters_without_effect_are_left_out_and_told_once(spoken: tuple[Served, list[str]], strict: Served):
    served, told = spoken
    plain = served.post("/v1/completions", **ASKED).json()["choices"]
    for _ in range(2):
        assert served.post("/v1/completions", **ASKED, **LEFT_OUT).json()["choices"] == plain
    long = served.post("/v1/completions", **{**ASKED, "prompt": "x" * 20_000}, **LEFT_OUT)
    assert long.status_code == 200, "also if another process reads it"
    assert sorted(told) == sorted(f"note: {name} of requests has no effect here" for name in LEFT_OUT)
    for name, value in LEFT_OUT.items():
        refused = strict.post("/v1/completions", **ASKED, **{name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert served.post("/v1/completions", **{**ASKED, "max_tokens": -1}).status_code == 400


def test_what_is_within_a_parameter_is_left_out_too(strict: Served):
    told: list[str] = []
    with serving(simulated_body()) as served:
        served.frontend.tell = told.append
        for name, value in BELOW.items():
            asked = {**ASKED, "stream": True, name: value}
            assert served.post("/v1/completions", **asked).status_code == 200, name
            refused = strict.post("/v1/completions", **asked)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        names = ("include_obfuscation", "as_of", "schema")
        assert sorted(told) == sorted(f"note: {name} of requests has no effect here" for name in names)


def test_a_model_refuses_what_would_have_no_effect(real: Served):
    for name, value in {**LEFT_OUT, **BELOW}.items():
        if name != "frequency_penalty":  # it has one
            refused = real.post("/v1/completions", **{**ASKED, "stream": True, name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    for path in ("/tokenize", "/abort"):
        assert real.post(path, prompt="x", request_id="cmpl-1", foo=1).status_code == 400


def test_tokens_are_asked_for_as_vllm_and_sglang_have_it(spoken: tuple[Served, list[str]], strict: Served):
    served, told = spoken
    chat = {"messages": CHAT["messages"], "add_generation_prompt": True, "return_token_strs": False}
    tokens = served.post("/tokenize", **chat).json()["tokens"]
    assert served.post("/detokenize", tokens=tokens, skip_special_tokens=True).status_code == 200
    assert served.post("/abort", request_id="cmpl-1", abort_all=True).status_code == 404
    names = ("return_token_strs", "skip_special_tokens", "abort_all")
    assert {f"note: {name} of requests has no effect here" for name in names} <= set(told)
    assert strict.post("/tokenize", **chat).json()["error"]["param"] == "return_token_strs"
    assert strict.post("/abort", request_id="cmpl-1", abort_all=True).json()["error"]["param"] == "abort_all"


def test_the_newer_limit_of_tokens_counts(spoken: tuple[Served, list[str]], strict: Served):
    """Clients for several servers send both, as do routers that have the prompt computed elsewhere."""
    served, _ = spoken
    both = {**CHAT, "max_tokens": 8, "max_completion_tokens": 5, "ignore_eos": True}
    assert served.post("/v1/chat/completions", **both).json()["usage"]["completion_tokens"] == 5
    assert strict.post("/v1/chat/completions", **both).json()["error"]["param"] == "max_completion_tokens"


@pytest.mark.fast("sglang-200-200", ci="*")
@pytest.mark.parametrize(
    ("dialect", "model", "options"), [("vllm", 404, 400), ("sglang", 200, 200), ("openai", 404, 400)]
)
def test_what_sglang_does_not_look_at(dialect: str, model: int, options: int):
    """Its clients call the model "default", and its server reads `stream_options` of streams alone."""
    with serving(simulated_body(), dialect=dialect) as served:
        assert served.post("/v1/completions", **ASKED, model="default").status_code == model
        assert served.post("/v1/completions", **ASKED, stream_options={"include_usage": True}).status_code == options


def test_no_top_log_probabilities_are_no_error(simulated: Served):
    for given in ({"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}):
        choice = simulated.post("/v1/chat/completions", **CHAT, **given).json()["choices"][0]
        assert choice["logprobs"] is None
    assert simulated.post("/v1/chat/completions", **CHAT, top_logprobs=1).json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("arguments", [{"days": 1}, None, "{}"])
def test_a_history_has_calls_in_each_form(simulated: Served, arguments: object):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "fine"},
    ]
    asked = {**CHAT, "messages": [*CHAT["messages"], *history]}
    assert simulated.post("/v1/chat/completions", **asked).status_code == 200
    asked["messages"] = [{"role": "user", "content": None}]
    assert simulated.post("/v1/chat/completions", **asked).status_code == 400


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop": ["a"] * 20}, "stop: List should have at most 16 items after validation, not 20"),
        ({"stop": "a" * 257}, "stop: String should have at most 256 characters"),
        ({"stop": ["a", "a" * 257]}, "stop.1: String should have at most 256 characters"),
        ({"stop": 5}, "stop: Input should be a valid string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages.0.content.0.type: Input should be 'text'",
        ),
        ({"n": 0, "logit_bias": {"a": 1}}, "n: Input should be greater than or equal to 1"),
    ],
)
def test_an_error_names_the_deepest_fault(simulated: Served, given: dict, message: str):
    assert simulated.post("/v1/chat/completions", **{**CHAT, **given}).json()["error"]["message"] == message


def test_min_tokens_and_ignore_eos(spoken: tuple[Served, list[str]]):
    served, _ = spoken
    counts = {}
    for given in ({}, {"min_tokens": 30}, {"min_tokens": 5}, {"ignore_eos": True}, {"min_tokens": 60}):
        answer = served.post("/v1/completions", **ASKED, **given).json()
        counts[str(given)] = answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]
    assert list(counts.values()) == [(20, "stop"), (31, "stop"), (20, "stop"), (60, "length"), (60, "length")]
    assert served.post("/v1/completions", **ASKED, min_tokens=61).json()["error"]["param"] == "min_tokens"


def test_stop_tokens_end_an_output(spoken: tuple[Served, list[str]]):
    """The token is counted and not shown; before min_tokens it does nothing."""
    served, _ = spoken
    asked = {**ASKED, "ignore_eos": True}
    words = served.post("/v1/completions", **asked).json()["choices"][0]["text"].split()
    place = next(i for i in range(10, 40) if words[i] not in words[:i])
    (token,) = served.post("/tokenize", prompt=f" {words[place]}").json()["tokens"]
    answer = served.post("/v1/completions", **asked, stop_token_ids=[token]).json()
    assert answer["choices"][0]["text"].split() == words[:place]
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (place + 1, "stop")
    later = served.post("/v1/completions", **asked, stop_token_ids=[token], min_tokens=place + 1).json()
    assert later["usage"]["completion_tokens"] > place + 1
    served.wait_until_idle()


def test_cached_tokens_are_told_and_a_salt_hides_them(spoken: tuple[Served, list[str]]):
    served, _ = spoken

    def cached(prompts: list, **more: object) -> int:
        usage = served.post("/v1/completions", prompt=prompts, max_tokens=2, **more).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    prompt = list(range(1000, 1300))
    assert [cached([prompt]), cached([prompt]), cached([prompt], cache_salt="a")] == [0, 299, 0]
    assert cached([prompt], cache_salt="a", n=3) == 299 and cached([prompt, prompt]) == 598


@pytest.mark.parametrize(("dialect", "first"), [("vllm", "low"), ("sglang", "high"), ("openai", "high")])
def test_which_priority_is_first(dialect: str, first: str):
    orders: list[Order] = []
    body = simulated_body()
    submit = body.submit
    body.submit = lambda order: orders.append(order) or submit(order)
    with serving(body, dialect=dialect) as served:
        for priority in (1, 5):
            served.post("/v1/completions", **ASKED, priority=priority)
    low, high = (order.priority for order in orders)
    assert (first == "low") == (low > high)


def test_a_model_has_several_names_and_adapters():
    """Answers have the first name, or that of their adapter, whose prompts share no prefix with others."""
    metrics = ServerMetrics()
    body = simulated_body(metrics=metrics, speed=0.01)
    names = {"model": "served", "aliases": ["also"], "adapters": ["sql", "chat"], "metrics_as": "vllm"}
    counted = ServerMetrics()
    with serving(simulated_body(metrics=counted), metrics=counted, **names) as served:
        cards = served.http.get("/v1/models").json()["data"]
        found = [("served", None), ("also", None), ("sql", "served"), ("chat", "served")]
        assert [(card["id"], card["parent"]) for card in cards] == found
        assert served.http.get("/v1/models/sql").json()["id"] == "sql"
        asked = {"prompt": list(range(300)), "max_tokens": 2}
        for name, shown, cached in (
            (None, "served", 0), ("also", "served", 299), ("sql", "sql", 0), ("sql", "sql", 299), ("chat", "chat", 0),
        ):  # fmt: skip
            answer = served.post("/v1/completions", **asked, model=name).json()
            assert (answer["model"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (shown, cached)
        refused = served.post("/v1/completions", **asked, model="other")
        assert refused.status_code == 404 and "'served', 'also', 'sql', 'chat'" in refused.json()["error"]["message"]
    with serving(body, metrics=metrics, **names) as served:
        asked = {"prompt": "x", "max_tokens": 9000, "ignore_eos": True, "model": "sql", "stream": True}
        with served.http.stream("POST", "/v1/completions", json=asked) as stream:
            next(stream.iter_lines())
            line = next(one for one in served.http.get("/metrics").text.splitlines() if "lora_requests_info{" in one)
            assert line.startswith(
                'vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql",waiting_lora_adapters=""} '
            )


def test_a_demanded_call_is_made(simulated: Served):
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        message = simulated.post(
            "/v1/chat/completions", **{**CHAT, "max_tokens": 60}, ignore_eos=True, tools=[TOOL], tool_choice=choice
        ).json()
        (call,) = message["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "weather" and message["choices"][0]["message"]["content"] is None
        assert (arguments["days"], arguments["unit"]) == (0, "C") and arguments["place"].split()
        assert message["usage"]["completion_tokens"] == 60
        whole = simulated.client.chat.completions.create(model="served", **CHAT, tools=[TOOL], tool_choice=choice)
        assert whole.choices[0].message.tool_calls[0].function.name == "weather"
        parts = [
            event.choices[0].delta.tool_calls[0]
            for event in simulated.client.chat.completions.create(
                model="served", **CHAT, tools=[TOOL], tool_choice=choice, stream=True
            )
        ]
        assert (
            "".join(part.function.arguments for part in parts)
            == whole.choices[0].message.tool_calls[0].function.arguments
        )
        assert parts[0].function.name == "weather" and all(part.id is None for part in parts[1:])


def test_tools_that_need_not_be_called_are_part_of_the_prompt(simulated: Served):
    plain, tooled = (simulated.post("/v1/chat/completions", **CHAT, **more).json() for more in ({}, {"tools": [TOOL]}))
    assert tooled["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 50
    assert tooled["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    for wrong in ({"tool_choice": "required"}, {"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}):
        assert simulated.post("/v1/chat/completions", **CHAT, **wrong).status_code == 400


def test_an_agent_that_must_call_comes_to_its_last_function():
    """Any function is demanded: the first that was not called since the user's last message."""
    tools = [{"function": {"name": name}} for name in ("look", "read", "done")]
    messages: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    names = []
    for _ in range(5):
        demanded = ChatRequest.model_validate(
            {"messages": messages, "tools": tools, "tool_choice": "required"}
        ).next_function
        assert demanded is not None
        names.append(demanded.name)
        call = {"id": "c", "function": {"name": demanded.name}}
        messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "", "tool_call_id": "c"}]
        if names[-2:] == ["done", "done"]:
            messages.append({"role": "user", "content": "more"})
    assert names == ["look", "read", "done", "done", "look"]


@pytest.mark.parametrize("function", [{"name": "f"}, {"name": "f", "parameters": {"required": ["a"]}}])
def test_arguments_of_a_call_end_within_its_tokens(simulated: Served, function: dict):
    """Without a place for words they are as short as they can be; with `max_tokens` below that they are cut."""
    tools = [{"type": "function", "function": function}]
    for max_tokens, finish in ((12, "tool_calls"), (1, "length")):
        asked = {**CHAT, "max_tokens": max_tokens, "tools": tools, "tool_choice": "required"}
        answer = simulated.post("/v1/chat/completions", **asked).json()
        assert answer["choices"][0]["finish_reason"] == finish
        assert answer["usage"]["completion_tokens"] == (11 if "parameters" in function and max_tokens == 12 else 1)
        arguments = answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
        assert finish == "length" or list(json.loads(arguments)) == ["a"][: "parameters" in function]


def test_a_share_of_answers_that_may_call_a_function_does():
    """Evenly, as long as there is a function that was not called since the user's last message."""
    with serving(simulated_body(), model="served", tool_call_share=0.4) as served:
        ends = []
        for choice in (*[None, "auto"] * 5, "none"):
            answer = served.post("/v1/chat/completions", **CHAT, tools=[TOOL], tool_choice=choice).json()
            ends.append("tool_calls" in answer["choices"][0]["message"])
        assert ends == [False, False, True, False, True] * 2 + [False]
        call = {"id": "c", "function": {"name": "weather", "arguments": "{}"}}
        called = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "", "tool_call_id": "c"}]
        for _ in range(3):
            asked = {**CHAT, "messages": [*CHAT["messages"], *called], "tools": [TOOL]}
            assert "tool_calls" not in served.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]


def test_a_model_refuses_what_it_cannot_honour(real: Served):
    answer = real.post("/v1/chat/completions", **{**CHAT, "tools": [TOOL]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    as_json = {"min_tokens": 3, "response_format": {"type": "json_object"}}
    answer = real.post("/v1/completions", **{**ASKED, **as_json})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
    text = real.post("/v1/completions", **ASKED, temperature=0, ignore_eos=True).json()["choices"][0]["text"]
    tokens = real.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    stopped = real.post("/v1/completions", **ASKED, temperature=0, ignore_eos=True, stop_token_ids=[tokens[10]]).json()
    assert stopped["choices"][0]["finish_reason"] == "stop" and text.startswith(stopped["choices"][0]["text"])
    held = {**ASKED, "temperature": 0, "ignore_eos": True, "stop_token_ids": [tokens[10]], "min_tokens": 40}
    answer = real.post("/v1/completions", **held).json()
    assert answer["usage"]["completion_tokens"] > 40
    shown = real.post("/tokenize", prompt=answer["choices"][0]["text"], add_special_tokens=False).json()["tokens"]
    assert tokens[10] not in shown[:40]
    real.wait_until_idle()


def test_the_defaults_of_a_model_hold_where_a_request_says_nothing(real: Served, monkeypatch: pytest.MonkeyPatch):
    """Those of its generation_config.json: requests win."""
    body = real.frontend.body
    asked = {"prompt": "class Cache:", "max_tokens": 12}
    greedy = real.post("/v1/completions", **asked, temperature=0).json()["choices"][0]["text"]
    usual = {"temperature": 0.01, "top_k": 1, "repetition_penalty": 1.0, "max_tokens": 9}
    monkeypatch.setattr(body, "defaults", usual)
    texts = {real.post("/v1/completions", **asked).json()["choices"][0]["text"] for _ in range(4)}
    assert texts == {greedy}
    free = {**asked, "temperature": 5, "top_k": 0}
    assert len({real.post("/v1/completions", **free).json()["choices"][0]["text"] for _ in range(4)}) > 1
    for path in ("/v1/completions", "/v1/chat/completions"):
        given = {"prompt": "a"} if path == "/v1/completions" else CHAT
        given = {key: value for key, value in given.items() if key != "max_tokens"}
        assert real.post(path, **given, ignore_eos=True).json()["usage"]["completion_tokens"] == 9
    usual["repetition_penalty"] = 50.0
    assert real.post("/v1/completions", **asked).json()["choices"][0]["text"] != greedy
    assert real.post("/v1/completions", **asked, repetition_penalty=1).json()["choices"][0]["text"] == greedy
    real.wait_until_idle()


def test_prompts_of_other_namespaces_go_to_other_replicas_by_their_hashes():
    body = simulated_body("hardware.replicas=2", "router.policy='prefix_aware'")
    prompts = []
    body.simulation.submit = lambda request, *others, **more: prompts.append(request.prompt)
    for namespace in ("", "", "a"):
        body.submit(Order(len(prompts), np.arange(1, 65), 4, 0.0, GREEDY, namespace=namespace))
    assert prompts[0].to_json() == prompts[1].to_json() != prompts[2].to_json()
