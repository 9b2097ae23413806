"""From options to a plan: sizes, dtypes, measured costs, and what cannot be, said before a weight is read."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tokenizers
import torch
from foredraft.core.adaptive import costs_from_json
from foredraft.core.contract.request import Request
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.core.prompt import Prompt
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.kernels import host
from foredraft.gpu.models import projection
from foredraft.gpu.ops import tilings
from foredraft.gpu.session import round_cost
from foredraft.gpu.session.memory import NotEnoughMemory
from foredraft.gpu.session.plan import plan_session
from foredraft.gpu.session.ready import time_products
from foredraft.gpu.session.round_cost import batch_sizes, cost_table, pass_costs
from foredraft.gpu.session.session import DecodeSession, SessionOptions, check_lengths, check_vocabulary
from foredraft.gpu.session.text import Tokenizer
from safetensors.torch import load_file, save_file
from small_checkpoint import CONTEXT, SHAPE, VOCAB_SIZE, write_target
from small_sessions import options_for, requests_of
from tokenizers import models as models_of_tokenizers


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


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_said_before_a_weight_is_read(models, name, monkeypatch):
    import foredraft.gpu.models.checkpoint as checkpoint

    monkeypatch.setattr(checkpoint, "load_target", lambda *arguments: pytest.fail("weights were read"))
    change, words = BAD[name]
    known = {key: models.get(value, value) if key in ("model", "draft") else value for key, value in change.items()}
    with pytest.raises(ForedraftError) as caught:
        DecodeSession.open(SessionOptions(**{"model": models["target"], **known}))
    assert words in str(caught.value)


def test_a_draft_of_another_vocabulary_drafts_what_both_spell_alike(models, tmp_path):
    other = write_target(tmp_path / "other", dataclasses.replace(SHAPE, vocab_size=VOCAB_SIZE + 8))
    file = other / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"</s>"', '"</p>"'), encoding="utf-8")
    words = "the target has 320 tokens, the draft 328"
    (note,) = [note for note in plan_session(SessionOptions(models["target"], other)).notices if "tokenizer" in note]
    assert "it drafts the 319 tokens that both spell alike: token 1 is '</s>'" in note
    tokenizer = tokenizers.Tokenizer(models_of_tokenizers.WordLevel({f"word{i}": i for i in range(328)}, "word0"))
    tokenizer.save(str(file))
    message = (
        f"{words}; 0 of the draft's 328 tokens are spelled as tokens of the target, expected 25%; token 0 is '<s>'"
    )
    with pytest.raises(ConfigError, match=message):
        plan_session(SessionOptions(models["target"], other))
    file.unlink()
    with pytest.raises(ConfigError, match=f"{words}, and their tokenizers cannot be compared: .*is missing"):
        plan_session(SessionOptions(models["target"], other))


def test_a_draft_with_another_tokenizer_of_the_same_size_is_warned_of(models, tmp_path):
    other = write_target(tmp_path / "other", SHAPE)
    options = SessionOptions(models["target"], other)
    assert not [note for note in plan_session(options).notices if "tokenizer" in note]
    file = other / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"</s>"', '"</p>"'), encoding="utf-8")
    (note,) = [note for note in plan_session(options).notices if "tokenizer" in note]
    assert "has another tokenizer than its target" in note and "token 1 is '</s>'" in note


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
    with pytest.raises(
        ConfigError, match=r"quantized: 'kept' is none of auto, keep, unpack, int8 .did you mean 'keep'"
    ):
        plan_session(dataclasses.replace(auto, quantized="kept"))


@pytest.mark.skipif(not (host.HAS_NUMBA or projection.has_integers()), reason="neither Numba nor VNNI")
@pytest.mark.parametrize("draft", [None, "STANDALONE", "EAGLE3"])
def test_sessions_decode_with_integers(models, monkeypatch, draft):
    """The draft's weights are rounded too."""
    monkeypatch.setattr(projection, "MIN_PACKED_ELEMENTS", 0)
    session = DecodeSession.open(options_for(models, draft, dtype="auto", quantized="int8"))
    for model in (session.executor.target, *([session.executor.draft_model] if draft else [])):
        layouts = {p.layout for module in model.modules() for p in getattr(module, "projections", ())}
        assert layouts == {projection.INT8}
    outputs = session.run(requests_of(models))
    assert len(outputs) == len(requests_of(models)) and all(output.tokens for output in outputs.values())


def test_products_of_a_session_are_timed_once(models, monkeypatch, tmp_path):
    write_quantized(tmp_path / "fp8", models["target"])
    options = SessionOptions(tmp_path / "fp8", models["STANDALONE"], dtype="float64", quantized="keep")
    session, path = DecodeSession.open(options), tmp_path / "cache" / "a-gpu.json"
    monkeypatch.setattr(tilings, "_measured", {})
    monkeypatch.setattr(tilings, "device_seconds", lambda device: lambda call: 1.0)
    monkeypatch.setattr(tilings, "tilings_path", lambda device: path)
    lines: list[str] = []
    for _ in range(2):
        time_products(session.plan, session.executor, lines.append, 60.0)
    found = tilings.read_tilings(path)
    assert lines == [f"timing products: {number} of {len(found)}" for number in range(1, len(found) + 1)]
    assert {shape.rows for shape in found} == set(tilings.TIMED_ROWS)
    mlp = SHAPE.intermediate_size
    assert {(2 * mlp, SHAPE.hidden_size), (SHAPE.hidden_size, mlp)} <= {(one.outputs, one.inputs) for one in found}


# -- the cost of rounds -----------------------------------------------------------------------------------------------


def test_the_cost_table_is_the_time_of_rounds(models):
    """A clock that the executor moves: 100 ns a round, 10 a row, 7 a step, 1 a KV token of a row, 3 a prompt token; 50
    if the draft takes part."""
    from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor

    now = [0]

    class Timed(ReferenceExecutor):
        def launch(self, step):
            super().launch(step)
            now[0] += 0 if step.prefill is None else 3 * int(step.prefill.lens.sum())
            if step.decode is not None:
                part = step.decode
                now[0] += 50 * (not part.shape.is_parked)
                now[0] += 100 + 10 * len(part.rows) + 7 * part.shape.steps + int(part.seq_lens.sum())

    options = options_for(
        models, "STANDALONE", adaptive='{"1": {"candidate_steps": [0, 2]}}', policy="goodput", max_running=5
    )
    plan = plan_session(options)
    draft = HashDraft(HashLanguageModel(seed=1, vocab_size=24))
    table = cost_table(plan.spec, lambda engine: Timed(engine, draft), lambda: now[0], positions=CONTEXT)
    assert table.steps == (0, 2) and table.batch_sizes == batch_sizes(plan.spec) == (1, 2, 4, 5)
    for steps, row, token_ps in zip(table.steps, table.round_ns, table.kv_token_ps, strict=True):
        for size, time_ns in zip(table.batch_sizes, row, strict=True):
            assert abs(time_ns - (100 + 10 * size + (50 + 7 * steps) * (steps > 0) + size * 30)) <= size * 16
        assert 900 <= token_ps <= 1100
    assert table.prefill_token_ps == 3000
    without = plan_session(options_for(models, "STANDALONE", adaptive="default", policy="goodput", max_running=5))
    table = cost_table(without.spec, lambda engine: Timed(engine, draft), lambda: now[0], positions=CONTEXT)
    assert 0 not in table.steps and table.prefill_token_ps == 0, "a draft that is always used is never parked"


@pytest.mark.parametrize("disturbed_ns", [0, 900])
def test_confidence_measures_what_tokens_and_budgets_add_to_a_round(models, disturbed_ns):
    """Also where another program disturbs some rounds with a budget: rounds without one keep their times."""
    from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor

    now = [0]

    class Timed(ReferenceExecutor):
        def launch(self, step):
            super().launch(step)
            if step.decode is not None:
                part = step.decode
                now[0] += 1000 + 10 * len(part.rows) + 70 * part.shape.steps + 30 * part.num_verify_tokens
                if part.budget is not None:
                    now[0] += 200 + disturbed_ns * (part.budget.drafts in (2, 6))

    table = '{"1": {"candidate_steps": [0, 1, 3]}}'
    plan = plan_session(options_for(models, "STANDALONE", policy="confidence", adaptive=table, max_running=5))
    draft = HashDraft(HashLanguageModel(seed=1, vocab_size=24))
    costs = pass_costs(plan.spec, lambda engine: Timed(engine, draft), lambda: now[0], positions=CONTEXT)
    assert costs.steps == (0, 1, 3) and costs.batch_sizes == (1, 2, 4, 5) and costs.captured_tokens == 0
    assert costs.tokens == (1, 2, 3, 4, 6, 8, 12, 16, 20) and costs.budget_ns == 200
    for steps in costs.steps:
        for rows in costs.batch_sizes:
            every = {0, rows * steps // 2, rows * steps}
            for drafts in {rows * steps} if disturbed_ns else every:
                if disturbed_ns and rows + drafts not in costs.tokens:
                    continue
                found = costs.draft_time(steps, rows) + costs.verify_times(np.array([rows + drafts]))[0]
                assert found == pytest.approx(1000 + 10 * rows + 70 * steps + 30 * (rows + drafts), abs=1)
    assert costs_from_json(costs.to_json(), "a log") == costs


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
    assert [len(graphs) for graphs in captured[:-1]] == [1] * (len(captured) - 1)
    assert captured[-1] == []  # prompts alone: what a return of a parked draft costs
    found = {(graph.steps, graph.batch_size, graph.kind.value) for (graph,) in captured[:-1]}
    assert found == {(s, size, "greedy") for s in (0, 2) for size in (1, 2)}
