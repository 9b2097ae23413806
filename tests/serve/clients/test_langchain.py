"""LangChain's OpenAI model against a simulated server: agents' turns with tools, structured outputs, errors, streams
that are left. `make clients` installs it."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("langchain_openai", reason="`make clients` installs LangChain and runs this")

from foredraft.serve.base.limits import Limits
from http_server import Served, serving, simulated_body
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"rain in {city}"


class Trip(BaseModel):
    city: str
    stops: list[str]
    nights: int


def _model(served: Served, **more: Any) -> Any:
    asked = {"model": "served", "base_url": f"{served.url}/v1", "api_key": "none", "max_retries": 0, **more}
    return ChatOpenAI(**asked, use_responses_api=False, stream_usage=True)


def _answer(model: Any, history: list[Any], streams: bool) -> Any:
    if not streams:
        return model.invoke(history)
    parts = list(model.stream(history))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    return whole


@pytest.mark.parametrize("streams", [False, True])
def test_turns_of_an_agent(simulated: Served, streams: bool):
    model = _model(simulated, max_tokens=12)
    history: list[Any] = [SystemMessage("Be brief."), HumanMessage("How is the weather in Rome?")]
    called = _answer(model.bind_tools([weather], tool_choice="any"), history, streams)
    (call,) = called.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] and call["args"]["days"] == 0
    assert called.usage_metadata["output_tokens"] == 11
    history += [called, weather.invoke(call)]
    assert isinstance(history[-1], ToolMessage)
    told = _answer(model.bind_tools([weather], parallel_tool_calls=False), history, streams)
    assert told.text and not told.tool_calls
    last = _answer(model, [*history, told, HumanMessage("And tomorrow?")], streams)
    assert last.usage_metadata["input_tokens"] > 20 and last.usage_metadata["output_tokens"] == 12


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_outputs(simulated: Served, method: str):
    """Within 30 tokens. In the JSON mode the prompt alone has the schema."""
    asked = "plan a trip" + (f" as {json.dumps(Trip.model_json_schema())}" if method == "json_mode" else "")
    found = _model(simulated, max_tokens=30).with_structured_output(Trip, method=method).invoke(asked)
    assert isinstance(found, Trip) and found.city and found.nights == 0


def test_errors_are_exceptions_of_their_kind():
    openai = pytest.importorskip("openai")
    with serving(simulated_body(), Limits(max_streams=1), model="served", api_key="secret") as served:
        model = _model(served, api_key="secret")
        with pytest.raises(ContextOverflowError):
            model.invoke("word " * 60_000)
        for more, kind in (
            ({"api_key": "wrong"}, openai.AuthenticationError),
            ({"model": "other"}, openai.NotFoundError),
            ({"max_tokens": 10**8}, openai.BadRequestError),
        ):
            with pytest.raises(kind):
                _model(served, **{"api_key": "secret", **more}).invoke("hi")
        stream = _model(served, api_key="secret", extra_body={"ignore_eos": True}).stream("hi")
        next(stream)
        with pytest.raises(openai.RateLimitError) as caught:
            model.invoke("hi")
        assert caught.value.response.headers["retry-after"] == "1"
        stream.close()
        served.wait_until_idle()
        assert model.invoke("hi").text
