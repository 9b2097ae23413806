"""Frameworks that build on OpenAI's interface, each with its usual call, against a simulated server. `make clients`
installs each in an environment of its own and runs its test there."""

from __future__ import annotations

import asyncio

import pytest
from http_server import Served
from pydantic import BaseModel

WHERE = "`make clients` installs it and runs this"


class Trip(BaseModel):
    city: str
    nights: int
    stops: list[str]


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


def test_instructor(simulated: Served):
    instructor = pytest.importorskip("instructor", reason=WHERE)
    asked = {"model": "served", "messages": [{"role": "user", "content": "Plan a trip."}]}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        client = instructor.from_openai(simulated.client, mode=mode)
        trip, completion = client.chat.completions.create_with_completion(**asked, response_model=Trip)
        assert trip.city and (trip.nights, trip.stops) == (0, []) and completion.usage.completion_tokens == 40
        parts = list(client.chat.completions.create_partial(**asked, response_model=Trip))
        assert parts[-1].city and parts[-1].nights == 0


def test_pydantic_ai(simulated: Served):
    pydantic_ai = pytest.importorskip("pydantic_ai", reason=WHERE)
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask() -> None:
        async with simulated.async_client as client:
            model = OpenAIChatModel("served", provider=OpenAIProvider(openai_client=client))
            agent = pydantic_ai.Agent(model, tools=[weather])
            first = await agent.run("How is the weather in Rome?")
            assert first.output and first.usage.output_tokens == 40
            async with agent.run_stream("And tomorrow?", message_history=first.all_messages()) as stream:
                assert await stream.get_output()
            shaped = await agent.run("Plan a trip.", output_type=Trip)
            assert shaped.output.city and shaped.output.nights == 0

    asyncio.run(ask())


def test_agents(simulated: Served):
    agents = pytest.importorskip("agents", reason=WHERE)
    agents.set_tracing_disabled(True)

    async def ask() -> None:
        async with simulated.async_client as client:
            model = agents.OpenAIChatCompletionsModel(model="served", openai_client=client)
            agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[agents.function_tool(weather)])
            demanding = agent.clone(model_settings=agents.ModelSettings(tool_choice="required"))
            first = await agents.Runner.run(demanding, "How is the weather in Rome?")
            assert first.final_output and len(first.raw_responses) == 2, "a call, and the answer after its result"
            goes_on = [*first.to_input_list(), {"role": "user", "content": "And tomorrow?"}]
            streamed = agents.Runner.run_streamed(agent, goes_on)
            kinds = {event.type async for event in streamed.stream_events()}
            assert streamed.final_output and "raw_response_event" in kinds
            shaped = await agents.Runner.run(agents.Agent(name="b", model=model, output_type=Trip), "Plan a trip.")
            assert shaped.final_output.city and shaped.final_output.nights == 0

    asyncio.run(ask())


def test_llama_index(simulated: Served):
    pytest.importorskip("llama_index.llms.openai_like", reason=WHERE)
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    asked = {"api_base": f"{simulated.url}/v1", "api_key": "none", "max_retries": 0, "max_tokens": 12}
    model = OpenAILike("served", **asked, is_chat_model=True, is_function_calling_model=True)
    history = [ChatMessage(role="user", content="How is the weather in Rome?")]
    answer = model.chat(history)
    assert answer.message.content and answer.raw.usage.completion_tokens == 12
    assert [part.delta for part in model.stream_chat([*history, answer.message])][-1] is not None
    tool = FunctionTool.from_defaults(weather)
    called = model.chat_with_tools([tool], chat_history=history, tool_required=True)
    (call,) = model.get_tool_calls_from_response(called)
    assert call.tool_name == "weather" and call.tool_kwargs["city"]
    assert OpenAILike("served", **asked).complete("Rome is").text
