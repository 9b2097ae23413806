"""`echo` with `logprobs`, `max_tokens: 0`, and conversations whose last message is continued."""

from __future__ import annotations

import pytest
from http_server import Served

PROMPT = [5, 77, 31, 250, 9, 9, 140, 63, 17, 201, 88, 42]
CHAT = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "Once upon a"}]


def completion(served: Served, **asked) -> dict:
    response = served.post("/v1/completions", model="served", temperature=0, **asked)
    assert response.status_code == 200, response.text
    return response.json()


def test_each_token_of_a_prompt_is_as_likely_as_decoding_what_is_before_it_says(real: Served):
    (choice,) = completion(real, prompt=PROMPT, max_tokens=0, echo=True, logprobs=20)["choices"]
    table = choice["logprobs"]
    assert choice["finish_reason"] == "length" and choice["text"]
    assert {len(table[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {len(PROMPT)}
    assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
    assert table["text_offset"] == [sum(map(len, table["tokens"][:place])) for place in range(len(PROMPT))]
    for place in (1, 5, 11):
        assert table["token_logprobs"][place] <= table["top_logprobs"][place][table["tokens"][place]]
        decoded = completion(real, prompt=PROMPT[:place], max_tokens=1, logprobs=20, ignore_eos=True)
        (likely,) = decoded["choices"][0]["logprobs"]["top_logprobs"]
        assert len(likely) >= 6  # of twenty tokens some have the same text
        told = table["top_logprobs"][place]
        assert {text: told[text] for text in likely} == pytest.approx(likely, abs=1e-6)


def test_an_output_follows_the_prompt_that_is_echoed(real: Served):
    alone = completion(real, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    (both,) = completion(real, prompt=PROMPT, max_tokens=3, echo=True, logprobs=1, ignore_eos=True)["choices"]
    assert len(both["logprobs"]["tokens"]) == len(PROMPT) + 3
    for name, values in alone.items():
        assert both["logprobs"][name][: len(PROMPT)] == values
    streamed = real.post(
        "/v1/completions",
        model="served",
        prompt=PROMPT,
        max_tokens=1,
        echo=True,
        logprobs=1,
        stream=True,
        temperature=0,
    ).text
    assert '"token_logprobs": [null' in streamed or '"token_logprobs":[null' in streamed


def test_a_body_without_a_model_tells_the_prompt_but_not_how_likely_it_is(simulated: Served):
    whole = completion(simulated, prompt="a b c", max_tokens=0, echo=True, n=2)
    assert [choice["text"] for choice in whole["choices"]] == ["a b c"] * 2
    assert whole["usage"]["completion_tokens"] == 0
    for asked, param in (
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
    ):
        response = simulated.post("/v1/completions", model="served", prompt="a b c", **asked)
        assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_the_last_message_of_a_conversation_is_continued(simulated: Served):
    def text_of(**asked) -> str:
        tokens = simulated.post("/tokenize", messages=CHAT, **asked).json()["tokens"]
        return simulated.post("/detokenize", tokens=tokens).json()["prompt"]

    assert text_of(continue_final_message=True).endswith("Once upon a")
    assert text_of(add_generation_prompt=False).endswith("Once upon a\n")
    assert text_of().endswith("<assistant>\n")
    answer = simulated.post(
        "/v1/chat/completions", model="served", messages=CHAT, continue_final_message=True, max_tokens=3
    )
    assert answer.status_code == 200
    both = simulated.post("/tokenize", messages=CHAT, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400 and "contradicts add_generation_prompt" in both.text
