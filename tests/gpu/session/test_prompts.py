"""Prompts as JSONL, and the requests that they make."""

import numpy as np
import pytest
from foredraft.core.contract.request import SamplingParams
from foredraft.core.errors import ConfigError
from foredraft.gpu.session.prompts import (
    RequestDefaults,
    defaults_note,
    file_defaults,
    make_requests,
    read_prompt_file,
    read_prompts,
)
from small_checkpoint import small_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def requests_of(tokenizer, *lines, chat=False, **defaults):
    return make_requests(read_prompts(lines, "f"), tokenizer, RequestDefaults(**defaults), "f", chat=chat)


def test_a_line_says_all_that_a_request_can_have(tokenizer):
    (request,) = requests_of(
        tokenizer,
        '{"prompt": "def add", "id": "a", "max_tokens": 9, "temperature": 1, "top_p": 0.5, "top_k": 3, "seed": 7, '
        '"stop": "end", "logprobs": true, "priority": -2, "min_tokens": 4}',
    )
    assert request.prompt.tokens.tolist() == tokenizer.encode("def add").tolist()
    assert (request.request_id, request.max_tokens, request.priority, request.min_tokens) == ("a", 9, -2, 4)
    assert request.sampling == SamplingParams(1, 0.5, 3, 7)
    assert (request.stop_strings, request.outputs, request.stop_tokens) == (("end",), ("logprobs",), tokenizer.eos_ids)


def test_what_a_line_leaves_out_is_the_default(tokenizer):
    first, second = requests_of(
        tokenizer,
        '{"prompt": "a"}',
        "",
        '{"tokens": [5, 6], "stop": [], "logprobs": false}',
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        stop=("x", "y"),
        logprobs=True,
        ignore_eos=True,
    )
    assert (first.request_id, second.request_id) == ("1", "3"), "an id is the line's number"
    assert first.max_tokens == 3 and first.sampling == SamplingParams(0.5, 1.0, 4, 0)
    assert (first.stop_strings, first.outputs, first.stop_tokens) == (("x", "y"), ("logprobs",), ())
    assert (second.stop_strings, second.outputs) == ((), ())
    assert second.prompt.tokens.tolist() == [5, 6]


def test_a_bias_has_tokens_of_the_vocabulary(tokenizer):
    (biased,) = requests_of(tokenizer, '{"prompt": "a", "logit_bias": {"7": -2, "5": 1.5}}')
    assert biased.sampling.logit_bias == ((5, 1.5), (7, -2.0))
    assert SamplingParams.from_json(biased.sampling.to_json()) == biased.sampling
    with pytest.raises(ConfigError, match="line 1: logit_bias: token 99999 is not in the vocabulary"):
        requests_of(tokenizer, '{"prompt": "a", "logit_bias": {"99999": 1}}')


def test_messages_go_through_the_template_and_texts_if_asked(tokenizer):
    lines = ['{"messages": [{"role": "user", "content": "Hi"}]}', '{"prompt": "Hi"}']
    turns, plain = requests_of(tokenizer, *lines)
    assert np.array_equal(turns.prompt.tokens, tokenizer.encode_chat([{"role": "user", "content": "Hi"}]))
    assert np.array_equal(plain.prompt.tokens, tokenizer.encode("Hi"))
    turns, chat = requests_of(tokenizer, *lines, chat=True)
    assert np.array_equal(turns.prompt.tokens, chat.prompt.tokens)


GOOD = '{"prompt": "x"}'
BAD = {
    "not JSON": ("{", "is not JSON"),
    "no object": ("[1]", "expected an object"),
    "unknown key": ('{"prompt": "x", "top_pp": 1}', "did you mean 'top_p'?"),
    "no prompt": ('{"id": "x"}', "expected exactly one of prompt, messages, tokens"),
    "two prompts": ('{"prompt": "x", "tokens": [1]}', "has prompt and tokens"),
    "a number for a text": ('{"prompt": 3}', "prompt is a number; expected a text"),
    "half a surrogate": (r'{"prompt": "\ud800"}', "surrogate"),
    "half a surrogate in a message": (r'{"messages": [{"role": "user", "content": "\ud800"}]}', "surrogate"),
    "no messages": ('{"messages": []}', "messages is an empty list"),
    "a message without role": ('{"messages": [{"role": "user", "content": "x"}, {"content": "x"}]}', "message 1"),
    "no tokens": ('{"tokens": []}', "tokens is an empty list"),
    "a fraction among tokens": ('{"tokens": [1.5]}', "1.5"),
    "a boolean among tokens": ('{"tokens": [true]}', "True"),
    "a negative token": ('{"tokens": [-1]}', "-1"),
    "no id": ('{"prompt": "x", "id": ""}', "id is an empty text"),
    "max_tokens 0": ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
    "max_tokens 1.0": ('{"prompt": "x", "max_tokens": 1.0}', "max_tokens is 1.0"),
    "temperature text": ('{"prompt": "x", "temperature": "hot"}', "temperature is 'hot'"),
    "temperature NaN": ('{"prompt": "x", "temperature": NaN}', "NaN"),
    "temperature infinite": ('{"prompt": "x", "temperature": 1e999}', "the number 1e999 is too large"),
    "top_p 0": ('{"prompt": "x", "top_p": 0}', "top_p is 0"),
    "top_k -1": ('{"prompt": "x", "top_k": -1}', "top_k is -1"),
    "seed -1": ('{"prompt": "x", "seed": -1}', "seed is -1"),
    "empty stop": ('{"prompt": "x", "stop": ["a", ""]}', "stop is a list"),
    "stop number": ('{"prompt": "x", "stop": 3}', "stop is 3"),
    "logprobs 1": ('{"prompt": "x", "logprobs": 1}', "logprobs is 1"),
    "priority text": ('{"prompt": "x", "priority": "high"}', "priority is 'high'"),
    "a key twice": ('{"prompt": "x", "prompt": "y"}', "'prompt' is written twice"),
    "a key that is null": ('{"prompt": null}', "prompt is null"),
    "bias": (
        '{"prompt": "x", "logit_bias": {"5": true}}',
        "logit_bias has True for '5'; expected a number for a token id",
    ),
    "bias null": ('{"prompt": "x", "logit_bias": null}', "logit_bias is null; expected an object"),
    "bias 0": ('{"prompt": "x", "logit_bias": 0}', "logit_bias is a number; expected an object"),
    "bias of no token": ('{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias has 1 for 'a'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_are_named(name):
    line, words = BAD[name]
    with pytest.raises(ConfigError) as caught:
        read_prompts([GOOD, line], "prompts.jsonl")
    (problem,) = caught.value.problems
    assert problem.key == "line 2" and words in problem.message, problem
    assert str(caught.value).startswith("prompts.jsonl: line 2: ")


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        read_prompts([line for line, _ in BAD.values()], "f")
    assert len({problem.key for problem in caught.value.problems}) == len(BAD)


def test_ids_are_told_apart():
    with pytest.raises(ConfigError, match="line 3: id '1' is that of line 1"):
        read_prompts([GOOD, GOOD, '{"prompt": "x", "id": "1"}'], "f")


def test_a_file_without_prompts_is_refused():
    with pytest.raises(ConfigError, match="has no prompt"):
        read_prompts(["", "  "], "f")


def test_files_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes('\ufeff{"prompt": "naïve \u2028 line"}\r\n{"prompt": "b"}'.encode())
    entries = read_prompt_file(path)
    assert [entry.prompt for entry in entries] == ["naïve \u2028 line", "b"]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_prompt_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompt_file(tmp_path)


def test_what_only_the_tokenizer_finds_has_its_line_too(tokenizer, tmp_path):
    lines = [GOOD, '{"prompt": ""}', '{"tokens": [319, 320]}', '{"messages": [{"role": "user", "content": "x"}]}']
    entries = read_prompts(lines, "f")
    plain = small_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(ConfigError) as caught:
        make_requests(entries, plain, RequestDefaults(), "f")
    assert [
        (p.key, word in p.message)
        for p, word in zip(caught.value.problems, ["empty", "320", "chat template"], strict=True)
    ] == [("line 2", True), ("line 3", True), ("line 4", True)]


def test_defaults_are_checked_like_lines():
    problems = RequestDefaults(
        max_tokens=0, temperature=float("nan"), top_p=2.0, top_k=-1, seed=-1, stop=("",)
    ).problems()
    assert {problem.key for problem in problems} == {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop"}
    assert RequestDefaults().problems() == RequestDefaults(logit_bias=((5, 1.0),)).problems() == []


# -- generation_config.json -------------------------------------------------------------------------------------------

FILES = {  # as published, and what they are the defaults of
    "Llama 3": (
        '{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}',
        {"temperature": 0.6, "top_p": 0.9},
    ),
    "Qwen": (
        '{"do_sample": true, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 2048}',
        {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 2048},
    ),
    "Gemma": ('{"do_sample": true, "top_k": 64, "top_p": 0.95}', {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
    "no do_sample": ('{"temperature": 0.3, "min_p": null}', {"temperature": 0.3}),
    "greedy": ('{"do_sample": false, "temperature": 0.6, "top_k": 50.0}', {"temperature": 0.0, "top_k": 50}),
    "all tokens": ('{"top_k": -1}', {"top_k": 0}),
    "nothing": ('{"eos_token_id": 0}', {}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_the_defaults_of_sampling_parameters(tmp_path, name):
    content, expected = FILES[name]
    (tmp_path / "generation_config.json").write_text(content)
    found = file_defaults(tmp_path)
    assert found == expected and file_defaults(tmp_path, "none") == {}
    assert not RequestDefaults(**found).problems()
    note = defaults_note(tmp_path, found, {"temperature": 0.0, "top_k": 0})
    assert bool(note) == (name not in ("nothing", "all tokens"))
    assert all(f"{key} {value}" in note for key, value in expected.items() if value)


def test_a_directory_without_the_file_has_no_defaults(tmp_path):
    assert file_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ('{"temperature": -1}', "temperature"),
        ('{"top_p": "0.9"}', "top_p"),
        ('{"top_k": 2.5}', "top_k"),
        ('{"max_new_tokens": 0}', "max_new_tokens"),
        ("[]", "must hold a JSON object"),
    ],
)
def test_a_wrong_value_of_the_file_is_named(tmp_path, content, key):
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=key) as caught:
        file_defaults(tmp_path)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="'nine' is none of auto, none"):
        file_defaults(tmp_path, "nine")


def test_min_tokens_beyond_max_tokens_or_with_a_grammar_is_refused(tokenizer):
    for more in ('"max_tokens": 3', '"lark": "start: /a+/"'):
        with pytest.raises(ConfigError, match=r"line 1.*min_tokens"):
            requests_of(tokenizer, f'{{"prompt": "a", "min_tokens": 4, {more}}}')
