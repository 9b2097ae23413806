"""JSON that a simulated server makes of schemas: it follows them, in each form of answer, whole and as a stream."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from foredraft.core.errors import InvalidRequest
from foredraft.serve.bodies.shaped import MAX_VALUES, frame_of
from foredraft.serve.requests.reading import schema_in
from http_server import Served
from hypothesis import example, given, settings
from hypothesis import strategies as st

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 1}
NESTED = {
    "$defs": {
        "Step": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}, "how": {"type": "string"}}},
        "Tree": {"type": "object", "required": ["left"], "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Leaf"}]}}},
        "Leaf": {"const": "leaf"},
    },
    "type": "object",
    "properties": {
        "steps": {"type": "array", "minItems": 2, "items": {"allOf": [{"$ref": "#/$defs/Step"}, {"required": ["n", "how"]}]}},
        "tree": {"$ref": "#/$defs/Tree"},
        "when": {"type": "string", "format": "date"},
        "code": {"type": "string", "minLength": 2, "maxLength": 3},
        "size": {"type": ["number", "null"], "exclusiveMinimum": 2, "maximum": 9},
        "kind": {"enum": ["a", "b"]},
        "done": {"type": "boolean"},
    },
    "required": ["steps", "tree", "when", "code", "size", "kind", "done"],
    "additionalProperties": False,
}  # fmt: skip


def _filled(schema: Any, words: str = ' say "no"') -> Any:
    before, after = frame_of(schema)
    return json.loads(before + (json.dumps(words)[1:-1] if after else "") + after)


def test_the_value_follows_its_schema_and_has_the_words_once():
    value = _filled(NESTED)
    jsonschema.validate(value, NESTED)
    assert value["steps"][0]["how"] == ' say "no"' and json.dumps(value).count("say") == 1
    assert value["tree"] == {"left": "leaf"} and value["size"] == 3


@given(st.floats(-9, 9), st.floats(0.1, 9), st.booleans(), st.booleans())
def test_drawn_bounds_are_kept(low: float, room: float, is_open_below: bool, is_open_above: bool):
    below = "exclusiveMinimum" if is_open_below else "minimum"
    above = "exclusiveMaximum" if is_open_above else "maximum"
    for schema in ({below: low, above: low + room}, {below: low}, {above: low}):
        jsonschema.validate(_filled({"type": "number", **schema}), schema)
        if len(schema) == 1 or room > 2:
            jsonschema.validate(_filled({"type": "integer", **schema}), {"type": "integer", **schema})


KINDS = st.recursive(
    st.one_of(
        st.builds(lambda least: {"type": "integer", "minimum": least, "maximum": least + 2}, st.integers(-5, 5)),
        st.builds(lambda least: {"type": "string", "minLength": least}, st.integers(0, 3)),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": [3, "x"]}, {"const": [1]}, True, {}]),
    ),
    lambda inner: st.one_of(
        st.builds(lambda one, least: {"type": "array", "items": one, "minItems": least}, inner, st.integers(0, 2)),
        st.builds(
            lambda named: {"type": "object", "properties": named, "required": sorted(named)},
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        ),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)


@given(KINDS)
def test_drawn_schemas_are_followed(schema: Any):
    jsonschema.validate(_filled(schema, "words of an output"), schema)


DOUBLING = {f"d{i}": {"type": "array", "minItems": 2, "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(40)}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"}, {"$ref": "#/$defs/none"}, {"type": "objekt"}, {"type": "object", "required": 5}, {"enum": []}, 5,
        {"type": "object", "properties": [], "required": ["a"]} | {"properties": [1]}, {"allOf": [{"$ref": "#"}]},
        {"type": "array", "minItems": 10**12}, {"type": "integer", "minimum": "x"}, {"anyOf": 3},
        {"type": "integer", "minimum": 1e999}, {"const": 1e999}, {"type": "array", "minItems": 1e999},
        {"allOf": [{"required": ["a"]}] * (MAX_VALUES + 1)},
        {"$defs": {**DOUBLING, "d40": {}}, "$ref": "#/$defs/d0"},
        {"type": "array", "minItems": MAX_VALUES - 1, "items": {"const": "x" * 5000}},
        {"type": "integer", "minimum": 10**400}, {"type": "array", "minItems": 10**400}, {"type": {}}, {"type": [[]]},
        {"$defs": {"m": {"properties": {str(i): True for i in range(4000)}}}, "allOf": [{"$ref": "#/$defs/m"}] * 900},
    ],
)  # fmt: skip
def test_a_schema_that_is_none_or_asks_for_too_much_is_an_error(simulated: Served, schema: Any):
    with pytest.raises(InvalidRequest):
        frame_of(schema)
    if isinstance(schema, dict):
        asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        assert _refused(simulated, response_format=asked) == "response_format"
        parameters = {"properties": {"a": schema}, "required": ["a"]}
        if "$ref" not in json.dumps(schema):
            tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
            assert _refused(simulated, tools=[tool], tool_choice="required") == "tools"


WORDS_OF_SCHEMAS = (
    *("type", "properties", "required", "items", "prefixItems", "minItems", "enum", "const", "anyOf", "allOf", "$ref"),
    *("$defs", "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "a"),
)
ODD_VALUES = st.recursive(
    st.one_of(
        *(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(max_size=3),
        ),
        st.sampled_from(
            ["object", "array", "string", "integer", "number", "#", "#/$defs/a", "date", 10**400, -(10**400)]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS_OF_SCHEMAS), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from(WORDS_OF_SCHEMAS), ODD_VALUES, max_size=6))
@example({"format": []})
@example({"allOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}, {"required": ["a"]}], "required": ["a"]})
def test_values_of_any_types_make_json_or_an_error(schema: dict[str, Any]):
    with suppress(InvalidRequest):
        before, after = frame_of(schema)
        json.loads(before + ("words" if after else "") + after)


def test_parts_that_all_hold_are_merged_in_one_walk():
    """A schema of a thousand parts with a name each is no larger than its properties."""
    parts = [{"properties": {f"n{i}": {"const": i}}, "required": [f"n{i}"]} for i in range(200)]
    before, after = frame_of({"allOf": parts, "properties": {"n7": {"const": "seven"}}})
    assert json.loads(before + after) == {f"n{i}": i for i in range(200)} | {"n7": "seven"}


def _refused(served: Served, **more: Any) -> Any:
    """Send a chat, also with numbers that are none for Python's JSON. Return the parameter that is wrong."""
    body = json.dumps({**CHAT, **more}).replace("Infinity", "1e999")
    answer = served.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]


def test_answers_are_json_in_each_form(simulated: Served):
    """They end within `max_tokens`, all of whose text they are: a client that demands JSON meets no cut one."""
    shaped = {"type": "json_schema", "json_schema": {"name": "n", "schema": NESTED}}
    asked = {**CHAT, "response_format": shaped}
    whole = simulated.post("/v1/chat/completions", **asked).json()
    text = whole["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), NESTED)
    tokens = simulated.post("/tokenize", prompt=text).json()["count"]
    assert whole["usage"]["completion_tokens"] <= tokens <= 200 and whole["choices"][0]["finish_reason"] == "stop"
    events = simulated.client.chat.completions.create(model="served", **asked, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == text
    least = whole["usage"]["completion_tokens"] - len(json.loads(text)["steps"][0]["how"].split()) + 1
    for most, finish in ((least + 1, "stop"), (least, "length")):  # a model needs a token to stop
        cut = simulated.post("/v1/chat/completions", **{**asked, "max_tokens": most}).json()
        assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == (finish, least)
    plain = {"prompt": "x", "max_tokens": 12, "response_format": {"type": "json_object"}, "logprobs": 0}
    answer = simulated.post("/v1/completions", **plain).json()["choices"][0]
    assert json.loads(answer["text"])["text"].split() and "".join(answer["logprobs"]["tokens"]) == answer["text"]


def test_json_follows_a_schema_in_the_prompt(simulated: Served):
    """As a model would that reads it: clients whose JSON mode sends no other schema."""
    text = f'An example: {{"properties": {{"x": 1}}}}. {{Match}} this:\n{json.dumps(NESTED, indent=2)}\n{{"a": 1}}'
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "plan {"}]
    asked = {**CHAT, "messages": messages, "response_format": {"type": "json_object"}}
    answer = simulated.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(answer), NESTED)
    assert schema_in(['{"a": ' * 100_000, "{" * 100_000]) is None


def test_texts_of_a_schema_are_texts_and_nothing_else(simulated: Served):
    """A listed text with any character is repeated, and the words stand where the first free text is; a name that is
    required twice is there once."""
    listed = {"const": "\0"}
    schema = {"properties": {"first": listed, "words": {"type": "string"}, "last": listed}}
    schema["required"] = ["first", "words", "last", "words"]
    shaped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    tool = {"type": "function", "function": {"name": "\0001", "parameters": schema}}
    whole = simulated.post("/v1/chat/completions", **CHAT, response_format=shaped).json()
    called = simulated.post("/v1/chat/completions", **CHAT, tools=[tool], tool_choice="required").json()
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "\0001"
    for text in (whole["choices"][0]["message"]["content"], call["function"]["arguments"]):
        found = json.loads(text)
        assert found["first"] == found["last"] == "\0" and found["words"].split(), text


def test_a_stop_string_ends_json_too(simulated: Served):
    asked = {**CHAT, "max_tokens": 40, "response_format": {"type": "json_object"}}
    words = json.loads(simulated.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"])
    stop = words["text"].split()[5]
    cut = simulated.post("/v1/chat/completions", **asked, stop=f" {stop}").json()["choices"][0]
    assert cut["finish_reason"] == "stop" and cut["message"]["content"].startswith('{"text": "')
    assert not cut["message"]["content"].endswith("}")
