"""Sessions over small real checkpoints: options to engine, text to the user, logs that replay."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from foredraft.core.contract.request import Request
from foredraft.core.errors import ConfigError, ForedraftError, InvariantViolation
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.spec import EngineSpec
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.models.checkpoint import load_target, random_head, save_draft
from foredraft.gpu.models.head_config import HeadConfig
from foredraft.gpu.session import round_cost
from foredraft.gpu.session.devices import ops_for
from foredraft.gpu.session.memory import NotEnoughMemory
from foredraft.gpu.session.plan import plan_session, recognise_draft
from foredraft.gpu.session.prompts import RequestDefaults, make_requests, read_prompts
from foredraft.gpu.session.round_cost import batch_sizes, cost_table
from foredraft.gpu.session.session import DecodeSession, SessionOptions, check_lengths, check_vocabulary
from foredraft.gpu.session.text import Tokenizer
from foredraft.observe.log import EventLog
from foredraft.observe.replay import replay
from safetensors.torch import load_file, save_file
from small_checkpoint import CONTEXT, SHAPE, VOCAB_SIZE, write_target


def options_for(models, draft=None, **options) -> SessionOptions:
    return SessionOptions(models["target"], models[draft] if draft else None, **{"dtype": "float64", **options})


LINES = [
    '{"prompt": "def add(a, b):", "max_tokens": 40}',
    '{"messages": [{"role": "user", "content": "Hi"}], "id": "chat", "logprobs": true, "max_tokens": 9}',
    '{"prompt": "for i in", "temperature": 0.9, "seed": 5, "max_tokens": 20}',
    '{"tokens": [5, 6, 7], "max_tokens": 1}',
]


def requests_of(models, lines=LINES):
    return make_requests(read_prompts(lines, "f"), Tokenizer.load(models["target"]), RequestDefaults(), "f")


@pytest.fixture(scope="module")
def plain(models):
    """What each request is without speculation."""
    return DecodeSession.open(options_for(models)).run(requests_of(models))


WAYS = {
    "STANDALONE chain, overlap": ("STANDALONE", {"overlap": True}),
    "STANDALONE tree, pages": ("STANDALONE", {"topk": 2, "page_size": 4, "debug": True}),
    "EAGLE": ("EAGLE", {}),
    "EAGLE3 tree": ("EAGLE3", {"topk": 3, "steps": 2, "num_draft_tokens": 6}),
    "MULTI_LAYER_EAGLE": ("MULTI_LAYER_EAGLE", {}),
    "NGRAM": (None, {"algorithm": "NGRAM", "steps": 4}),
    "adaptive": ("STANDALONE", {"adaptive": "with-zero", "block_rounds": 1}),
    "adaptive trees": ("STANDALONE", {"adaptive": "with-zero", "topk": 3, "num_draft_tokens": {"3": 9, "7": 12}}),
    "goodput": (
        "STANDALONE",
        {"adaptive": '{"1": {"candidate_steps": [0, 2]}}', "policy": "goodput", "max_running": 4},
    ),
}


@pytest.mark.parametrize(
    ("options", "candidates"),
    [({}, (2,)), ({"policy": "ema"}, (1, 2)), ({"policy": "goodput"}, (0, 1, 2)), ({"topk": 2}, (2,))],
)
def test_steps_that_are_not_given_follow_the_heads(models, options, candidates):
    """A draft of two heads can take two steps; the usual three, or a preset's seven, would be refused."""
    plan = plan_session(options_for(models, "MULTI_LAYER_EAGLE", **options))
    found = plan.spec.adaptive.candidate_steps
    assert found[-1] == 2 and set(found) <= set(candidates)
    with pytest.raises(ForedraftError, match="the draft has 2"):
        plan_session(options_for(models, "MULTI_LAYER_EAGLE", **options, adaptive="default"))


@pytest.mark.fast("STANDALONE tree, pages", "MULTI_LAYER_EAGLE", "adaptive trees", "goodput")
@pytest.mark.parametrize("way", WAYS)
def test_greedy_outputs_are_the_same_whatever_drafts_and_the_log_replays(models, plain, way, tmp_path):
    draft, options = WAYS[way]
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


def test_a_text_that_ends_inside_a_character_is_told_to_its_end(models, plain):
    tokens, tokenizer = np.array(plain["1"].tokens), Tokenizer.load(models["target"])
    count = next(n for n in range(1, len(tokens)) if tokenizer.decode(tokens[:n]).endswith("\ufffd"))
    request = dataclasses.replace(requests_of(models)[0], max_tokens=count)
    (output,) = DecodeSession.open(options_for(models)).run([request]).values()
    assert output.text == tokenizer.decode(tokens[:count])
    assert plain["1"].text == tokenizer.decode(tokens)


def test_deltas_come_while_it_decodes_and_make_the_output(models, plain):
    session = DecodeSession.open(options_for(models, block_rounds=2))
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
    session = DecodeSession.open(options_for(models, "STANDALONE", overlap=overlap, max_running=2, block_rounds=2))
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


def test_a_refused_request_is_told_of(models):
    session = DecodeSession.open(options_for(models, context_len=32))
    long = Request("long", Prompt.of_tokens([3] * 40), 4)
    outputs = session.run([long, requests_of(models)[3]])
    assert outputs["long"].finish == "refused" and "too long" in outputs["long"].message
    assert outputs["4"].finish == "length"


# -- from options to a plan -------------------------------------------------------------------------------------------


def test_the_context_is_what_the_requests_need(models):
    plan = plan_session(options_for(models, "STANDALONE", steps=4), longest_request=50)
    assert plan.spec.config.context_len == 50, "what a round writes past the last token is in the row's reserve"
    assert plan_session(options_for(models, "STANDALONE"), 10**6).spec.config.context_len == CONTEXT
    assert plan_session(options_for(models)).spec.config.context_len == CONTEXT
    assert plan_session(options_for(models, context_len=40), 200).spec.config.context_len == 40


def test_the_mode_is_that_of_the_device_unless_it_is_asked_for(models):
    assert plan_session(options_for(models)).spec.config.overlap is False
    config = plan_session(options_for(models, overlap=True)).spec.config
    assert config.overlap and config.mode_reason == "overlap mode was asked for"


def test_the_pool_is_as_large_as_the_requests_or_the_memory(models, monkeypatch):
    def plan(**options):
        return plan_session(options_for(models, "STANDALONE", dtype="float32", max_running=4, **options), 60)

    roomy = plan(page_size=4)
    slots = roomy.spec.config.num_pages * 4
    assert 4 * roomy.sizes.row_width <= slots <= 6 * (roomy.sizes.row_width + 4)
    # 2 · layers · key-value heads · channels · 4 bytes, of the target and of the draft.
    slot_bytes = 2 * 4 * (SHAPE.num_layers * 2 * 8 + 1 * 2 * 4)
    assert roomy.kv_bytes == (slots + 4) * slot_bytes
    assert plan(kv_tokens=100).spec.config.num_pages == 100
    monkeypatch.setattr(
        "foredraft.gpu.session.memory.free_bytes", lambda device: 2 * (roomy.weight_bytes + 100 * slot_bytes)
    )
    assert plan(memory_fraction=0.5).spec.config.num_pages == 99
    with pytest.raises(NotEnoughMemory, match=r"weights need .* KV of \d+ tokens"):
        plan(memory_fraction=0.4)
    with pytest.raises(NotEnoughMemory):
        plan(memory_fraction=0.5, kv_tokens=200)


def test_weights_are_counted_before_they_are_read(models):
    plan = plan_session(options_for(models, "STANDALONE", dtype="float32"))
    session = DecodeSession.open(plan.options, plan=plan)
    target = sum(p.numel() * 4 for p in session.executor.target.parameters())
    assert target < plan.weight_bytes < 2 * target


def test_on_a_cpu_16_bits_become_32(models):
    assert str(plan_session(options_for(models, dtype="auto")).dtype) == "torch.float32"
    assert str(plan_session(options_for(models, dtype="bfloat16")).dtype) == "torch.bfloat16"


def test_a_gpu_does_not_compute_in_64_bits(models, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="float64 is for a CPU"):
        plan_session(options_for(models, device="cuda"))


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


BAD = {
    "no model": ({"model": "nowhere"}, "nowhere: no such directory"),
    "a draft that is missing": ({"algorithm": "EAGLE3"}, "EAGLE3 needs the directory of a draft"),
    "a draft too many": ({"draft": "STANDALONE", "algorithm": "NGRAM"}, "NGRAM takes no draft"),
    "steps without a draft": ({"steps": 3}, "NONE drafts nothing"),
    "unknown policy": ({"draft": "STANDALONE", "policy": "goodptu"}, "did you mean 'goodput'"),
    "unknown dtype": ({"dtype": "flaot32"}, "did you mean 'float32'"),
    "a device that is not there": ({"device": "cuda:99"}, "not there"),
    "more steps than heads": ({"draft": "MULTI_LAYER_EAGLE", "steps": 3}, "3 steps need 3 heads, the draft has 2"),
    "a tree beyond its capacity": ({"draft": "STANDALONE", "topk": 2, "steps": 2, "num_draft_tokens": 8}, "at most 7"),
    "nodes of a chain": ({"draft": "STANDALONE", "steps": 2, "num_draft_tokens": 8}, "give topk for a tree"),
    "a context that is not there": ({"context_len": 257}, "beyond the model's 256 positions"),
    "no pool": ({"kv_tokens": 2}, "hold no request"),
    "several at once": ({"page_size": 0, "max_running": 0, "seed": -1}, "max_running: must be at least 1"),
    "no share of memory": ({"memory_fraction": float("nan")}, "memory_fraction"),
    "steps beyond a round": (
        {"draft": "EAGLE3", "steps": 64},
        "<arguments>: steps: 64; expected at most 63 draft steps",
    ),
    "steps that are no candidate": ({"draft": "STANDALONE", "adaptive": "default", "steps": 2}, "candidate"),
}


def test_the_most_steps_that_a_round_holds_are_decoded(models, plain):
    for change in ({"draft": models["STANDALONE"]}, {"algorithm": "NGRAM"}):
        session = DecodeSession.open(dataclasses.replace(options_for(models), steps=63, **change))
        (request,) = requests_of(models, LINES[:1])
        assert session.run([request])[request.request_id].tokens == plain[request.request_id].tokens


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_said_before_a_weight_is_read(models, name, monkeypatch):
    import foredraft.gpu.models.checkpoint as checkpoint

    monkeypatch.setattr(checkpoint, "load_target", lambda *arguments: pytest.fail("weights were read"))
    change, words = BAD[name]
    known = {key: models.get(value, value) if key in ("model", "draft") else value for key, value in change.items()}
    with pytest.raises(ForedraftError) as caught:
        DecodeSession.open(SessionOptions(**{"model": models["target"], **known}))
    assert words in str(caught.value)


@pytest.mark.parametrize("more", [8, -8])
def test_a_draft_whose_vocabulary_differs_by_padding_drafts(models, plain, tmp_path, more):
    """A small Qwen2.5 has 128 rows less than its large brothers, which read the same tokens."""
    small = dataclasses.replace(SHAPE, vocab_size=VOCAB_SIZE + more, num_layers=1)
    write_target(tmp_path / "small", small)
    session = DecodeSession.open(dataclasses.replace(options_for(models, steps=3), draft=tmp_path / "small"))
    assert session.plan.algorithm.name == "STANDALONE"
    outputs = session.run(requests_of(models))
    assert outputs["1"].tokens == plain["1"].tokens and outputs["chat"].tokens == plain["chat"].tokens


def test_a_draft_of_another_vocabulary_is_refused(models, tmp_path):
    other = write_target(tmp_path / "other", dataclasses.replace(SHAPE, vocab_size=VOCAB_SIZE + 8))
    file = other / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"</s>"', '"</p>"'), encoding="utf-8")
    words = "the target has 320 tokens, the draft 328, and "
    with pytest.raises(ConfigError, match=f"{words}token 1 is '</s>' in .*target, '</p>' in .*other"):
        plan_session(SessionOptions(models["target"], other))
    file.unlink()
    with pytest.raises(ConfigError, match=f"{words}their tokenizers cannot be compared: .*is missing"):
        plan_session(SessionOptions(models["target"], other))


def test_a_head_for_another_hidden_size_is_refused(models, tmp_path):
    write_target(tmp_path / "other", dataclasses.replace(SHAPE, hidden_size=64, head_dim=16))
    with pytest.raises(ConfigError, match="hidden_size"):
        plan_session(SessionOptions(tmp_path / "other", models["EAGLE3"]))


def test_a_tokenizer_of_another_model_is_refused(models, tmp_path):
    write_target(tmp_path / "small", dataclasses.replace(SHAPE, vocab_size=100))
    plan = plan_session(SessionOptions(tmp_path / "small"))
    with pytest.raises(ConfigError, match="do not belong together"):
        check_vocabulary(Tokenizer.load(tmp_path / "small"), plan)


def test_prompts_beyond_the_context_are_named(models):
    plan = plan_session(options_for(models, context_len=24))
    requests = [Request(str(n), Prompt.of_tokens([3] * n), 4) for n in (22, 23, 24, 25)]
    assert plan.max_prompt_len() == 23
    with pytest.raises(ConfigError) as caught:
        check_lengths(requests, plan, "p.jsonl", {"24": "line 3", "25": "line 4"})
    assert [problem.key for problem in caught.value.problems] == ["line 3", "line 4"]
    assert "24 tokens" in str(caught.value) and "room for 23" in str(caught.value)


# -- the cost of rounds -----------------------------------------------------------------------------------------------


def test_the_cost_table_is_the_time_of_rounds(models):
    """A clock that the executor moves: 100 ns a round, 10 a row, 7 a step, 1 a KV token of a row."""
    from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor

    now = [0]

    class Timed(ReferenceExecutor):
        def launch(self, step):
            super().launch(step)
            if step.decode is not None:
                part = step.decode
                now[0] += 100 + 10 * len(part.rows) + 7 * part.steps + int(part.seq_lens.sum())

    options = options_for(
        models, "STANDALONE", adaptive='{"1": {"candidate_steps": [0, 2]}}', policy="goodput", max_running=5
    )
    plan = plan_session(options)
    draft = HashDraft(HashLanguageModel(seed=1, vocab_size=24))
    table = cost_table(plan.spec, lambda engine: Timed(engine, draft), lambda: now[0], positions=CONTEXT)
    assert table.steps == (0, 2) and table.batch_sizes == batch_sizes(plan.spec) == (1, 2, 4, 5)
    for steps, row, token_ps in zip(table.steps, table.round_ns, table.kv_token_ps, strict=True):
        for size, time_ns in zip(table.batch_sizes, row, strict=True):
            assert abs(time_ns - (100 + 10 * size + 7 * steps + size * 30)) <= size * 16
        assert 900 <= token_ps <= 1100


@pytest.mark.parametrize("draft", ["STANDALONE", "EAGLE3"])
def test_rounds_are_measured_though_the_only_request_is_short(models, draft):
    options = options_for(models, draft, policy="goodput", max_running=2)
    plan = plan_session(options, longest_request=5)
    session = DecodeSession.open(plan.options, plan=plan)
    assert session.plan.spec.cost_table.steps == tuple(range(8))
    assert session.plan.spec.config.context_len == plan.spec.config.context_len
    request = Request("a", Prompt.of_tokens([5, 6, 7]), 2)
    assert len(session.run([request])["a"].tokens) == 2


def test_a_model_with_too_few_positions_to_measure_is_named(models, tmp_path):
    write_target(tmp_path / "short", dataclasses.replace(SHAPE, max_position_embeddings=16))
    with pytest.raises(ConfigError, match="policy: goodput measures rounds after 16 tokens"):
        DecodeSession.open(SessionOptions(tmp_path / "short", algorithm="NGRAM", policy="goodput"))


def test_where_rounds_are_captured_the_measured_ones_are_too(models, monkeypatch):
    captured = []

    def build(*models, **options):
        executor = build_executor(*models, **options)
        captured.append(executor.graphs.reports)  # which its rounds fill
        return executor

    monkeypatch.setattr(round_cost, "build_executor", build)
    options = {"adaptive": '{"1": {"candidate_steps": [0, 2]}}', "policy": "goodput", "max_running": 2}
    DecodeSession.open(options_for(models, "STANDALONE", graphs=False, **options))
    assert captured and not any(captured)
    captured.clear()
    DecodeSession.open(options_for(models, "STANDALONE", graphs=True, **options))
    assert all(len(graphs) == 1 for graphs in captured)
    found = {(graph.steps, graph.batch_size, graph.kind.value) for (graph,) in captured}
    assert found == {(s, size, "greedy") for s in (0, 2) for size in (1, 2)}


def test_an_engine_that_stands_still_is_an_error_and_not_a_hang(models, monkeypatch):
    session = DecodeSession.open(options_for(models))
    monkeypatch.setattr(Engine, "plan", lambda self, now_ns: None)
    with pytest.raises(InvariantViolation, match="ENGINE-11"):
        session.run(requests_of(models))


def test_memory_that_the_plan_did_not_count_is_named(models, monkeypatch):
    def build(*models, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("foredraft.gpu.executor.build.build_executor", build)
    with pytest.raises(NotEnoughMemory, match=r"weights and .* of KV there is no room for activations"):
        DecodeSession.open(options_for(models))


def write_quantized(directory, source) -> None:
    """Write a copy of a checkpoint whose matrices are 8-bit floats with a scale per row."""
    shutil.copytree(source, directory)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            tensors[name] = tensor
            continue
        scale = tensor.float().abs().amax(1, True) / 448
        tensors |= {name: (tensor.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    quantization = {"quant_method": "fbgemm_fp8"}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def test_quantized_weights_are_kept_or_unpacked_with_equal_tokens(models, tmp_path):
    write_quantized(tmp_path / "fp8", models["target"])
    found, sizes = [], []
    for quantized in ("keep", "unpack"):
        options = SessionOptions(tmp_path / "fp8", models["STANDALONE"], dtype="float64", quantized=quantized)
        session = DecodeSession.open(options)
        found.append(session.run(requests_of(models)))
        sizes.append(session.plan.weight_bytes)
    assert found[0] == found[1] and sizes[0] < sizes[1]
    auto = SessionOptions(tmp_path / "fp8", dtype="float64")
    assert plan_session(auto).weight_bytes == plan_session(dataclasses.replace(auto, quantized="unpack")).weight_bytes
    with pytest.raises(ConfigError, match=r"quantized: 'kept' is none of auto, keep, unpack .did you mean 'keep'"):
        plan_session(dataclasses.replace(auto, quantized="kept"))
