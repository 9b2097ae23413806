"""Sessions over small real checkpoints: text to the user, logs that replay."""

import dataclasses
import json

import numpy as np
import pytest
from foredraft.core.contract.request import Request
from foredraft.core.errors import InvariantViolation
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.spec import EngineSpec
from foredraft.gpu.models.checkpoint import load_target, random_head, save_draft
from foredraft.gpu.models.heads.config import HeadConfig
from foredraft.gpu.session.devices import ops_for
from foredraft.gpu.session.plan import recognise_draft
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.session.text import Tokenizer
from foredraft.observe.log import EventLog
from foredraft.observe.replay import replay
from small_checkpoint import SHAPE, VOCAB_SIZE, write_target
from small_sessions import LINES, options_for, requests_of


@pytest.fixture(scope="module")
def plain(models):
    """What each request is without speculation."""
    return DecodeSession.open(options_for(models)).run(requests_of(models))


FILES = {  # of SGLang
    "round_times": {"sample_batch_tokens": [1, 6], "sample_steps_per_sec": [90.0, 30.0], "max_batch_tokens": 16},
    "confidence_temperatures": {"temperatures": [1.5, 0.8]},
}
WAYS = {
    "STANDALONE chain, overlap": ("STANDALONE", {"overlap": True}),
    "STANDALONE tree, pages": ("STANDALONE", {"topk": 2, "page_size": 4, "debug": True}),
    "EAGLE": ("EAGLE", {}),
    "EAGLE3 tree": ("EAGLE3", {"topk": 3, "steps": 2, "num_draft_tokens": 6}),
    "MULTI_LAYER_EAGLE": ("MULTI_LAYER_EAGLE", {}),
    "NGRAM": (None, {"algorithm": "NGRAM", "steps": 4}),
    "SUFFIX, overlap": (None, {"algorithm": "SUFFIX", "steps": 6, "overlap": True}),
    "HYBRID": ("EAGLE3", {"algorithm": "HYBRID", "steps": 6, "debug": True}),
    "HYBRID, overlap": ("EAGLE3", {"algorithm": "HYBRID", "steps": 4, "overlap": True, "page_size": 4}),
    "adaptive": ("STANDALONE", {"adaptive": "with-zero", "multi_step_rounds": 1}),
    "adaptive trees": ("STANDALONE", {"adaptive": "with-zero", "topk": 3, "num_draft_tokens": {"3": 9, "7": 12}}),
    "goodput": (
        "STANDALONE",
        {"adaptive": '{"1": {"candidate_steps": [0, 2]}}', "policy": "goodput", "max_running": 4},
    ),
    "confidence": ("EAGLE3", {"steps": 3, "policy": "confidence", "max_running": 4}),
    "confidence, files": ("STANDALONE", {"steps": 2, "policy": "confidence", "max_running": 4}),
    "confidence, overlap": (
        "STANDALONE",
        {"adaptive": '{"1": {"candidate_steps": [0, 2]}}', "policy": "confidence", "max_running": 4, "overlap": True},
    ),
}


@pytest.mark.fast(
    "STANDALONE tree, pages", "adaptive trees", "confidence, files", ci=("MULTI_LAYER_EAGLE", "goodput", "confidence")
)
@pytest.mark.parametrize("way", WAYS)
def test_greedy_outputs_are_the_same_whatever_drafts_and_the_log_replays(models, plain, way, tmp_path):
    draft, options = WAYS[way]
    if "files" in way:
        options = options | {name: str(tmp_path / name) for name in FILES}
        for name, table in FILES.items():
            (tmp_path / name).write_text(json.dumps(table))
    path = tmp_path / "events.jsonl"
    logs = []

    def make_sinks(spec):
        logs.append(EventLog(path, {"engine": spec.to_json()}))
        return [logs[0].sink(0)]

    session = DecodeSession.open(options_for(models, draft, **options), make_sinks=make_sinks)
    outputs = session.run(requests_of(models))
    logs[0].close(True)
    assert list(outputs) == list(plain)
    for name in ("1", "chat", "4"):
        assert outputs[name].tokens == plain[name].tokens and outputs[name].text == plain[name].text
        assert outputs[name].finish == plain[name].finish
    assert np.allclose(outputs["chat"].logprobs, plain["chat"].logprobs) and len(outputs["chat"].logprobs) == 9
    assert len(outputs["3"].tokens) == 20 and outputs["4"].finish == "length"

    def from_header(header, replica, events):
        return EngineSpec.from_json(header["engine"], "log").make_engine(events)

    report = replay(path, from_header)
    assert report.identical and report.complete, report.difference
    assert session.plan.spec.temperatures == ((1.5, 0.8) if "files" in way else ())
    assert report.num_commits == session.loop.driver.num_steps
    assert session.plan.algorithm.name == (options.get("algorithm") or recognise_draft(models[draft]))


def test_stop_strings_end_text_and_request(models, plain):
    text, tokenizer = plain["1"].text, Tokenizer.load(models["target"])
    stop = next(
        text[i : i + 2]
        for i in range(8, len(text))
        if text.index(text[i : i + 2]) == i and "\ufffd" not in text[i : i + 2]
    )
    lines = [json.dumps({"prompt": "def add(a, b):", "max_tokens": 40, "stop": ["never", stop]})]
    session = DecodeSession.open(options_for(models, "STANDALONE"))
    (output,) = session.run(requests_of(models, lines)).values()
    assert output.finish == "stop" and output.text == text[: text.index(stop)]
    assert stop in tokenizer.decode(np.array(output.tokens))
    assert len(output.tokens) < 40 and plain["1"].tokens[: len(output.tokens)] == output.tokens


def test_a_text_that_ends_inside_a_character_is_delivered_to_its_end(models, plain):
    tokens, tokenizer = np.array(plain["1"].tokens), Tokenizer.load(models["target"])
    count = next(n for n in range(1, len(tokens)) if tokenizer.decode(tokens[:n]).endswith("\ufffd"))
    request = dataclasses.replace(requests_of(models)[0], max_tokens=count)
    (output,) = DecodeSession.open(options_for(models)).run([request]).values()
    assert output.text == tokenizer.decode(tokens[:count])
    assert plain["1"].text == tokenizer.decode(tokens)


def test_deltas_come_while_it_decodes_and_make_the_output(models, plain):
    session = DecodeSession.open(options_for(models, multi_step_rounds=2))
    deltas = list(session.stream(requests_of(models)[:1]))
    assert len(deltas) > 5
    assert "".join(delta.text for delta in deltas) == plain["1"].text
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    stats = session.stats()
    assert (stats.requests, stats.output_tokens, stats.prompt_tokens) == (1, 40, requests_of(models)[0].prompt.length)
    assert stats.accept_length == 1.0 and stats.rounds == stats.verified_rows == 39
    shares = stats.shares()
    assert {"prefill", "verify", "host", "other"} <= shares.keys() and abs(sum(shares.values()) - 1) < 1e-6
    assert stats.tokens_per_s == pytest.approx(40 / stats.seconds)
    idle = dataclasses.replace(stats, seconds=0.0, output_tokens=0, verified_rows=0)
    assert idle.tokens_per_s is idle.accept_length is None and idle.shares() == {}


@pytest.mark.parametrize("overlap", [False, True])
def test_interruption_ends_all_requests_with_what_they_have(models, plain, overlap):
    session = DecodeSession.open(options_for(models, "STANDALONE", overlap=overlap, max_running=2, multi_step_rounds=2))
    told = []
    outputs = session.run(requests_of(models), told.append, lambda: len(told) >= 4)
    assert session.loop.is_idle and session.engine.is_idle
    aborted = [output for output in outputs.values() if output.finish == "aborted"]
    assert aborted and any(output.tokens for output in outputs.values())
    for name, output in outputs.items():
        if name != "3":
            assert plain[name].tokens[: len(output.tokens)] == output.tokens
    again = session.run([dataclasses.replace(requests_of(models)[0], request_id="again")])
    assert again["again"].tokens == plain["1"].tokens, "the session goes on"


def test_who_stops_listening_stops_the_requests(models):
    session = DecodeSession.open(options_for(models))
    stream = session.stream(requests_of(models))
    next(stream)
    stream.close()
    assert session.engine.is_idle
    session.engine.check()


def test_a_refused_request_is_reported(models):
    session = DecodeSession.open(options_for(models, context_len=32))
    long = Request("long", Prompt.of_tokens([3] * 40), 4)
    outputs = session.run([long, requests_of(models)[3]])
    assert outputs["long"].finish == "refused" and "too long" in outputs["long"].message
    assert outputs["4"].finish == "length"


def test_a_draft_of_a_shorter_context_drafts_beyond_it(models, tmp_path):
    write_target(tmp_path / "short", dataclasses.replace(SHAPE, num_layers=1, max_position_embeddings=16))
    requests = [Request("a", Prompt.of_tokens([5, 6, 7]), 40)]
    plain = DecodeSession.open(options_for(models)).run(requests)
    session = DecodeSession.open(dataclasses.replace(options_for(models), draft=tmp_path / "short"))
    assert session.run(requests) == plain
    assert len(plain["a"].tokens) == 40 > 16


@pytest.mark.parametrize("prompt_len", [3, 29])
def test_heads_beyond_the_steps_may_guess_past_the_end_of_the_context(models, tmp_path, prompt_len):
    """Eight heads, one step: the catch-up's window is longer than what the last row of the table has left."""
    head_config = HeadConfig(
        "MULTI_LAYER_EAGLE", dataclasses.replace(SHAPE, num_layers=1), SHAPE.hidden_size, VOCAB_SIZE, (), num_heads=8
    )
    target = load_target(models["target"], ops_for("cpu"))
    save_draft(random_head(head_config, target, seed=4), tmp_path / "heads")
    requests = [Request("a", Prompt.of_tokens(list(range(3, 3 + prompt_len))), 400)]
    options = options_for(models, context_len=32, max_running=1)
    plain = DecodeSession.open(options).run(requests)["a"]
    drafted = DecodeSession.open(dataclasses.replace(options, draft=tmp_path / "heads", steps=1)).run(requests)["a"]
    assert drafted.finish == "length" and drafted.tokens
    assert drafted.tokens == plain.tokens[: len(drafted.tokens)]


@pytest.mark.ci
def test_the_most_steps_that_a_round_holds_are_decoded(models, plain):
    for change in ({"draft": models["STANDALONE"]}, {"algorithm": "NGRAM"}):
        session = DecodeSession.open(dataclasses.replace(options_for(models), steps=63, **change))
        (request,) = requests_of(models, LINES[:1])
        assert session.run([request])[request.request_id].tokens == plain[request.request_id].tokens


@pytest.mark.parametrize("more", [8, -8])
def test_a_draft_whose_vocabulary_differs_by_padding_drafts(models, plain, tmp_path, more):
    """A small Qwen2.5 has 128 rows less than its large brothers, which read the same tokens."""
    small = dataclasses.replace(SHAPE, vocab_size=VOCAB_SIZE + more, num_layers=1)
    write_target(tmp_path / "small", small)
    session = DecodeSession.open(dataclasses.replace(options_for(models, steps=3), draft=tmp_path / "small"))
    assert session.plan.algorithm.name == "STANDALONE"
    outputs = session.run(requests_of(models))
    assert outputs["1"].tokens == plain["1"].tokens and outputs["chat"].tokens == plain["chat"].tokens


def test_an_engine_that_stands_still_is_an_error_and_not_a_hang(models, monkeypatch):
    session = DecodeSession.open(options_for(models))
    monkeypatch.setattr(Engine, "plan", lambda self, now_ns: None)
    with pytest.raises(InvariantViolation, match="ENGINE-11"):
        session.run(requests_of(models))
