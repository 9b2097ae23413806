"""Outputs of a JSON schema or a Lark grammar, by llguidance over a real tokenizer:
with drafts the text of plain decoding."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from foredraft.core.contract.request import Grammar, Request, SamplingParams
from foredraft.core.errors import ConfigError, InvalidRequest
from foredraft.core.prompt import Prompt
from foredraft.gpu.session.grammar import Grammars, grammars_of, json_schema
from foredraft.gpu.session.plan import SessionOptions
from foredraft.gpu.session.prompts import RequestDefaults, make_requests, read_prompts
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.session.text import Tokenizer
from small_checkpoint import CONTEXT, VOCAB_SIZE, write_tokenizer

pytest.importorskip("llguidance", reason="needs the extra grammar")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # random weights would write spaces without end
}
LINES = [
    json.dumps({"prompt": "def add(a, b):", "json_schema": SCHEMA, "max_tokens": 120}),
    json.dumps({"prompt": "for i", "lark": 'start: ("tick" | "tock") " " /[0-9]{3}/', "max_tokens": 40}),
    json.dumps({"prompt": "café", "max_tokens": 12, "repetition_penalty": 1.3}),
    json.dumps(
        {"prompt": "10", "json_schema": SCHEMA, "max_tokens": 120, "temperature": 1.5, "seed": 4, "min_p": 0.02}
    ),
]


def tokens_of(mask: np.ndarray | None) -> np.ndarray:
    """Return bool [V] of the bits that a matcher gives."""
    return np.unpackbits(mask, bitorder="little")[:VOCAB_SIZE].astype(bool)


def texts_of(models, **options) -> list[str]:
    plan = SessionOptions(model=models["target"], dtype="float64", device="cpu", context_len=CONTEXT, **options)
    tokenizer = Tokenizer.load(models["target"])
    requests = make_requests(read_prompts(LINES, "lines"), tokenizer, RequestDefaults(), "lines", vocab_size=VOCAB_SIZE)
    outputs = DecodeSession.open(plan, tokenizer=tokenizer).run(requests)
    assert [output.finish for output in outputs.values()] == ["stop", "stop", "length", "stop"]
    return [output.text for output in outputs.values()]


def test_outputs_are_of_their_grammar_and_those_of_plain_decoding(models):
    plain = texts_of(models, algorithm="NONE")
    for text in (plain[0], plain[3]):
        value = json.loads(text)
        assert value["name"] in ("Ada", "Grace") and 0 <= value["age"] <= 99 and len(value) == 2
    word, number = plain[1].split(" ")
    assert word in ("tick", "tock") and len(number) == 3 and number.isdecimal()
    ways = ({"algorithm": "NGRAM"}, {"draft": models["STANDALONE"], "steps": 3}, {"draft": models["EAGLE3"], "topk": 3})
    for way in ways:
        drafted = texts_of(models, **way)
        assert drafted[:3] == plain[:3], way
        assert json.loads(drafted[3])["name"] in ("Ada", "Grace"), "sampled: equal in distribution"


def test_behind_the_end_of_a_grammar_drafts_change_nothing(models):
    """Without stop tokens, as requests of the Python API have it, an output goes on behind its grammar's end."""
    tokenizer = Tokenizer.load(models["target"])
    end = tokenizer.eos_ids[0]
    grammars = [Grammar("lark", text) for text in ('start: "tick" | "tock"', "start: /[0-9]{1,3}/")]

    def outputs(**options) -> list[tuple[int, ...]]:
        plan = SessionOptions(model=models["target"], dtype="float64", device="cpu", context_len=CONTEXT, **options)
        requests = [
            Request(str(i), Prompt.of_tokens([5 + i, end, end, end]), 24, sampling=SamplingParams(grammar=grammar))
            for i, grammar in enumerate(grammars)
        ]
        return [output.tokens for output in DecodeSession.open(plan, tokenizer=tokenizer).run(requests).values()]

    plain = outputs(algorithm="NONE")
    assert all(tokens[-12:] == (end,) * 12 for tokens in plain)
    assert outputs(algorithm="NGRAM", steps=4) == plain


def test_each_path_is_followed_as_the_same_text_would_be(models):
    """`allowed(path)` is what a new matcher allows that has taken the path in, at an end and behind it, too."""
    tokenizer = Tokenizer.load(models["target"])
    grammars = Grammars(tokenizer, VOCAB_SIZE)
    grammar = Grammar("lark", 'start: "a" | "ab" "c"?')
    begun = grammars.make(grammar)
    paths: list[list[int]] = [[]]
    for path in paths:
        plain = grammars.make(grammar)
        plain.advance(np.array(path, np.int64))
        allowed = tokens_of(plain.allowed([]))
        assert (tokens_of(begun.allowed(path)) == allowed).all(), path
        if len(path) < 5:
            paths += [[*path, token] for token in np.flatnonzero(allowed).tolist()]
            forbidden = int(np.flatnonzero(~allowed)[0])
            assert begun.allowed([*path, forbidden]) is None
    assert any(path.count(tokenizer.eos_ids[0]) > 2 for path in paths)


def test_every_token_that_ends_a_text_ends_a_grammar(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    matcher = Grammars(Tokenizer.load(tmp_path), VOCAB_SIZE).make(Grammar("lark", 'start: "a"+'))
    assert tokens_of(matcher.allowed([int(Tokenizer.load(tmp_path).encode("a")[0])]))[[1, 7]].all()


def test_a_tokenizer_that_the_library_does_not_know_refuses_the_request_alone(models):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer = Tokenizer(words, "words", eos_ids=[1])
    plan = SessionOptions(model=models["target"], algorithm="NONE", device="cpu", context_len=CONTEXT)
    grammar = Grammar("lark", 'start: "a"')
    requests = [
        Request("shaped", Prompt.of_tokens([0]), 4, sampling=SamplingParams(grammar=grammar)),
        Request("free", Prompt.of_tokens([0]), 4),
    ]
    outputs = DecodeSession.open(plan, tokenizer=tokenizer).run(requests)
    assert outputs["shaped"].finish == "error" and "llguidance" in outputs["shaped"].message
    assert outputs["free"].finish == "length"
    with pytest.raises(ConfigError, match=r"words: tokenizer\.json: .* llguidance"):
        Grammars(tokenizer, VOCAB_SIZE)


def optional(count: int) -> dict:
    """Return a schema of which the library finds, behind the first brace, that it has too many ways to go on."""
    names = {f"key{i}": {"type": "string"} for i in range(count)}
    return {"type": "object", "properties": names, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        optional(600),
        {"$ref": "#"},
        {"type": "integer", "multipleOf": 99991, "minimum": 1, "maximum": 10**12},
        {"enum": ["x" * 50_000, "y" * 50_000]},
        {"const": 'a "' * 5000},
        {"allOf": [{"properties": {f"k{i}": {}}} for i in range(600)]},
    ],
    ids=["optional", "cycle", "multiple", "long", "text", "allOf"],
)
def test_a_schema_that_the_library_gives_up_is_refused_before_it_is_served(models, schema):
    grammars = Grammars(Tokenizer.load(models["target"]), VOCAB_SIZE)
    with pytest.raises(InvalidRequest, match="json_schema: "):
        grammars.check(json_schema(schema))


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_a_grammar_that_is_given_up_within_an_output_fails_its_request_alone(models, algorithm):
    """The text until then is no answer: not one that has stopped."""
    tokenizer = Tokenizer.load(models["target"])
    begin = {"type": "string", "pattern": "^[a-z]{30,40}$"}  # of more tokens than a grammar is tried with
    schema = {"type": "object", "properties": {"a": begin, "b": optional(600)}, "required": ["a", "b"]}
    schema["x-guidance"] = {"whitespace_flexible": False}
    grammars_of(tokenizer, VOCAB_SIZE).check(json_schema(schema))
    plan = SessionOptions(
        model=models["target"], algorithm=algorithm, dtype="float64", device="cpu", context_len=CONTEXT
    )
    prompt = Prompt.of_tokens(tokenizer.encode("x").tolist())
    shaped = SamplingParams(grammar=json_schema(schema))
    requests = [Request("shaped", prompt, 120, sampling=shaped), Request("free", prompt, 120)]
    outputs = DecodeSession.open(plan, tokenizer=tokenizer).run(requests)
    assert outputs["shaped"].finish == "error" and outputs["shaped"].message.startswith("grammar: Parser Error: ")
    assert outputs["free"].finish == "length"


def test_what_was_checked_is_not_compiled_again(models, monkeypatch):
    grammars = Grammars(Tokenizer.load(models["target"]), VOCAB_SIZE)
    grammars.check(json_schema(SCHEMA))
    monkeypatch.setattr(grammars, "_compiled", None)
    first, second = grammars.make(json_schema(SCHEMA)), grammars.make(json_schema(SCHEMA))
    token = int(np.flatnonzero(tokens_of(first.allowed([])))[0])
    first.advance(np.array([token]))
    assert not (tokens_of(first.allowed([])) == tokens_of(second.allowed([]))).all(), "each has its own state"


def test_space_between_parts_is_bounded(models):
    tokenizer = Tokenizer.load(models["target"])
    matcher = Grammars(tokenizer, VOCAB_SIZE).make(json_schema({"type": "object", "properties": {"a": {}}}))
    space, newline = (tokenizer.encode(text, add_special_tokens=False).tolist() for text in (" ", "\n"))
    for count in (1, 16):
        assert (
            matcher.allowed([*tokenizer.encode("{", add_special_tokens=False).tolist(), *newline, *space * count])
            is not None
        )
    beyond = [*tokenizer.encode("{", add_special_tokens=False).tolist(), *newline, *space * 17]
    assert matcher.allowed(beyond) is None


@pytest.mark.parametrize(
    ("settings", "defaults", "words"),
    [
        ({"json_schema": {"type": "nonsense"}}, {}, "json_schema"),
        ({"lark": "start: ("}, {}, "lark"),
        ({"lark": 'start: "a"', "json_schema": {}}, {}, "expected one of them"),
        ({"lark": 'start: "a"'}, {"ignore_eos": True}, "contradicts --ignore-eos"),
        ({"json_schema": 3}, {}, "expected a schema"),
        ({"min_p": 2}, {}, "from 0 (off) to 1"),
        ({"repetition_penalty": 0}, {}, "above 0"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(models, settings, defaults, words):
    with pytest.raises(ConfigError) as caught:
        entries = read_prompts([json.dumps({"prompt": "x", **settings})], "lines")
        usual = replace(RequestDefaults(), **defaults)
        make_requests(entries, Tokenizer.load(models["target"]), usual, "lines", vocab_size=VOCAB_SIZE)
    assert "line 1" in str(caught.value) and words in str(caught.value)
