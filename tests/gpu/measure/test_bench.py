"""Timing decode: which cells there are, what is refused, what is measured, and the bytes that the floor counts."""

import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch
from foredraft.cli.decode.bench import footing
from foredraft.core.algorithm.algorithm import Drafter
from foredraft.core.errors import ForedraftError
from foredraft.core.model_shape import known_models, lookup_model
from foredraft.gpu.executor.graphs import CaptureReport, RoundKind
from foredraft.gpu.measure import floor as bandwidth_module
from foredraft.gpu.measure import others
from foredraft.gpu.measure import prompts as prompts_module
from foredraft.gpu.measure.arm import Arm, BatchArm, common_outputs
from foredraft.gpu.measure.floor import round_bytes
from foredraft.gpu.measure.others import OtherResult
from foredraft.gpu.measure.plan import BenchOptions, acceptance_of_arm, plan_bench
from foredraft.gpu.measure.processes import found_from_json, found_to_json, run_process, summarised
from foredraft.gpu.measure.prompts import bench_prompts, read_source
from foredraft.gpu.measure.report import graph_costs, other_rows, report, result_rows
from foredraft.gpu.measure.run import Bench, Machine
from foredraft.gpu.measure.shapes import random_draft, shape_of
from foredraft.gpu.models.checkpoint import random_weights
from foredraft.gpu.session.devices import ops_for
from foredraft.gpu.session.memory import NotEnoughMemory
from foredraft.gpu.session.text import Tokenizer

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 200,
    "max_position_embeddings": 256,
}
MOE = SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.fixture(autouse=True)
def small_inputs(monkeypatch):
    """A copy far beyond the caches, or reading much text, takes as long as the rest of a test."""
    monkeypatch.setattr(bandwidth_module, "CPU_BYTES", 1 << 20)
    monkeypatch.setattr(prompts_module, "CORPUS_BYTES", 400_000)


@pytest.fixture
def small(tmp_path) -> BenchOptions:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return BenchOptions(
        random_weights=str(path),
        batch_sizes="2",
        context_lengths="12",
        output_tokens=24,
        prompts=1,
        repeat=2,
        device="cpu",
    )


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_cells_are_batch_sizes_times_contexts_with_plain_decoding_first(small):
    plan = plan_bench(replace(small, batch_sizes="4,1,4", context_lengths="8,30", steps="5,2,0"))
    assert [(cell.batch_size, cell.context_len) for cell in plan.cells] == [(1, 8), (4, 8), (1, 30), (4, 30)]
    for cell in plan.cells:
        assert [arm.steps for arm in cell.arms] == [0, 2, 5]
        assert [arm.spec.algorithm for arm in cell.arms] == ["NONE", "EAGLE3", "EAGLE3"]
        assert [arm.num_nodes for arm in cell.arms] == [1, 3, 6]
        assert all(arm.spec.config.max_running == cell.batch_size for arm in cell.arms)
    assert plan.kv_bytes == max(cell.kv_bytes for cell in plan.cells) == plan.cells[3].kv_bytes
    assert [arm.steps for arm in plan_bench(small).cells[0].arms] == [0, 1, 3, 5]
    assert [arm.steps for arm in plan_bench(replace(small, algorithm="NONE")).cells[0].arms] == [0]


def test_trees_have_the_nodes_that_their_steps_can_have(small):
    plan = plan_bench(replace(small, topk=4, steps="1,2,3"))
    assert [arm.spec.num_draft_tokens for arm in plan.cells[0].arms] == [None, 5, 16, 16]


ERRORS = {
    "no model": ({"random_weights": None}, ["--model", "--random-weights"]),
    "batch size 0": ({"batch_sizes": "1,0"}, ["--batch-sizes", "'1,0'", "from 1 on"]),
    "batch sizes that are none": ({"batch_sizes": "1,,2"}, ["--batch-sizes", "'1,,2'"]),
    "a context that is none": ({"context_lengths": "12k"}, ["--context-lengths", "'12k'"]),
    "steps beyond a round": ({"steps": "0,100"}, ["--steps: 100", "at most 63 draft steps", "at most 64 nodes"]),
    "one output token": ({"output_tokens": 1}, ["--output-tokens", "at least 2"]),
    "no turn": ({"repeat": 0}, ["--repeat", "at least 1"]),
    "too many nodes": ({"topk": 2, "steps": "2", "num_draft_tokens": 60}, ["num_draft_tokens", "at most 7"]),
    "steps without a draft": ({"algorithm": "NONE", "steps": "3"}, ["--steps", "--draft"]),
    "a shape for a head": ({"draft": "llama-3.2-1b"}, ["draft", "STANDALONE"]),
    "a mean below 1": ({"acceptance": "0.7"}, ["--acceptance", "0.7", "write 0.7,0.7"]),
    "acceptance of nothing": ({"algorithm": "NONE", "acceptance": "3"}, ["--acceptance", "nothing"]),
    "a context beyond the model's": ({"context_lengths": "12,250"}, ["--context-lengths", "250", "256"]),
    "an engine that is not known": (
        {"against": "transformers,ctranslate"},
        ["--against", "did you mean", "ctranslate2"],
    ),
    "others beside ranks": ({"against": "transformers", "tensor_parallel": 2}, ["--against", "--tensor-parallel"]),
    "graphs on a CPU": ({"graphs": True}, ["--graphs", "CPU"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_is_refused(case, small):
    changes, expected = ERRORS[case]
    with pytest.raises(ForedraftError) as caught:
        plan_bench(replace(small, **changes))
    for words in expected:
        assert words in str(caught.value)


def test_too_much_memory_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr("foredraft.gpu.measure.plan.free_bytes", lambda device: 8 << 30)
    options = BenchOptions(random_weights="llama-3.1-8b", dtype="bfloat16", device="cpu", steps="4", batch_sizes="32")
    with pytest.raises(NotEnoughMemory) as caught:
        plan_bench(options)
    for words in ("GiB for weights", "GiB for KV", "batch 32, context 1024", "7.20 GiB"):
        assert words in str(caught.value)
    monkeypatch.setattr("foredraft.gpu.measure.plan.free_bytes", lambda device: 100 << 30)
    plan = plan_bench(options)
    # 8.03 billion weights of the model, in the head a layer of double input width, its fusion, and its own LM head.
    assert 8.03e9 * 2 + 0.6e9 < plan.weight_bytes < 8.03e9 * 2 + 1.0e9
    a_token = 2 * 32 * 8 * 128 * 2
    least = 32 * (1024 + 128) * (2 * a_token + a_token // 32)
    assert least < plan.kv_bytes < 1.05 * least


# -- what is run ------------------------------------------------------------------------------------------------------


def run(options: BenchOptions):
    plan = plan_bench(options)
    bench = Bench(plan)
    return plan, bench, [result for cell in bench.cells() for result in cell]


@pytest.mark.fast("2 3 4 True", ci="3 NGRAM")
@pytest.mark.parametrize(
    "changes",
    [
        {"steps": "1,3"},
        {"steps": "2", "topk": 3, "page_size": 4, "overlap": True},
        {"steps": "3", "algorithm": "STANDALONE"},
        {"steps": "2", "algorithm": "MULTI_LAYER_EAGLE", "overlap": True},
        {"steps": "2", "algorithm": "EAGLE", "dtype": "float64"},
        {"steps": "3", "algorithm": "NGRAM"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_every_kind_of_draft_is_timed(small, changes):
    plan, bench, results = run(replace(small, **changes, repeat=1))
    assert [result.steps for result in results] == [arm.steps for arm in plan.cells[0].arms]
    assert results[0].speedup == results[0].accept_length == 1.0
    for result in results:
        assert result.tokens_per_s > 0 and result.prefill_tokens_per_s > 0
        assert result.tokens_per_s_request == pytest.approx(result.tokens_per_s / 2)
        # Tokens of full rounds over their time, but for tokens past an end.
        full = 2 * result.accept_length / result.round_ms * 1e3
        assert 0.8 * full < result.tokens_per_s < 1.001 * full
        assert sum(result.shares.values()) == pytest.approx(1.0, abs=1e-9)
        assert result.shares["verify"] > 0 and result.shares["host"] > 0
        assert result.idle_share is None and result.equal_outputs is None and not result.captures
        assert result.floor_share > 0
    if plan.acceptance_name == "chat":
        assert 1.2 < results[-1].accept_length < results[-1].num_nodes
    assert bench.machine.copy_bytes_per_s > 0


def absent(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize("weights", ["random", "of a checkpoint"])
def test_other_engines_decode_the_same_tokens_with_the_same_weights(weights, small, models, monkeypatch):
    monkeypatch.setattr(others, "version", lambda name: "5" if name == "transformers" else absent(name))
    options = replace(small, algorithm="NONE", against="ctranslate2, transformers", output_tokens=8)
    if weights != "random":
        options = replace(options, model=models["target"], random_weights=None)
    plan, bench, (plain,) = run(options)
    missing, theirs = plain.others
    assert missing == OtherResult("ctranslate2", problem="it is not installed (pip install ctranslate2)")
    assert (theirs.name, theirs.computes, theirs.equal_outputs) == ("transformers 5", "float32", 2)
    assert min(theirs.tokens_per_s, theirs.tokens_per_cpu_s, theirs.ratio, theirs.cpu_ratio) > 0
    assert footing(plan, [plain]) == ["ctranslate2 is not compared with: it is not installed (pip install ctranslate2)"]
    assert [row["engine"] for row in other_rows(plan, [plain])] == ["foredraft, plain", "transformers 5"]
    machine = Machine("cpu", 1, 1e9, 1, 0)
    assert found_from_json(json.loads(json.dumps(found_to_json(machine, [plain])))) == (machine, [plain])
    assert summarised([[plain], [plain]])[0].others == plain.others
    bench.close()


@pytest.mark.parametrize("quantized, computes", [("auto", "float32"), ("int8", "int8_float32")])
def test_ctranslate2_decodes_the_same_requests(quantized, computes, small):
    pytest.importorskip("ctranslate2")
    _, bench, (plain,) = run(
        replace(small, algorithm="NONE", against="ctranslate2", output_tokens=8, quantized=quantized, prompts=4)
    )
    (theirs,) = plain.others
    assert (theirs.computes, theirs.problem) == (computes, "")
    assert theirs.equal_outputs == 4 or quantized == "int8"
    bench.close()


def test_a_model_that_another_engine_does_not_know_is_said(small, tmp_path, monkeypatch):
    def refuses(source, place, plan):
        raise ValueError("no conversion is registered\nfor it")

    monkeypatch.setattr(others, "version", lambda name: "1")
    monkeypatch.setitem(others._ENGINES, "ctranslate2", refuses)
    plan, bench, (plain,) = run(replace(small, algorithm="NONE", against="ctranslate2", output_tokens=4))
    assert plain.others[0].problem == "no conversion is registered" and plain.tokens_per_cpu_s > 0
    assert other_rows(plan, [plain])[0]["engine"] == "foredraft, plain"
    bench.close()


@pytest.mark.ci
def test_trees_go_as_deep_as_they_are_accepted(small):
    """A random draft must be sure enough of itself that its trees have depth."""
    options = replace(small, steps="4", topk=4, num_draft_tokens=8, acceptance="0.99,0.99", output_tokens=100, repeat=1)
    *_, results = run(options)
    assert results[1].accept_length > 3.5, "of evenly likely candidates the seven best are of depth 1 and 2"


@pytest.mark.ci
def test_warming_runs_the_rounds_of_every_cell_and_times_none(small, monkeypatch):
    ran, run_arm = [], BatchArm.run
    monkeypatch.setattr(
        BatchArm, "run", lambda arm, **options: (ran.append((arm.arm.spec.max_steps, options)), run_arm(arm, **options))
    )
    monkeypatch.setattr(BatchArm, "captures", ("a graph",))
    plan = plan_bench(replace(small, batch_sizes="1,2", steps="3", repeat=5))
    assert Bench(plan).warm() == len(ran) == 4 and [steps for steps, _ in ran] == [0, 3, 0, 3]
    assert all(options["max_tokens"] <= 16 for _, options in ran)


def test_probabilities_hold_for_a_chain_and_grow_for_a_tree(small):
    for topk in (1, 4):
        plan = plan_bench(replace(small, acceptance="0.5,0.5", steps="3", topk=topk))
        plain, arm = plan.cells[0].arms
        assert acceptance_of_arm(plan, plain) is None
        first = acceptance_of_arm(plan, arm).survival[0]
        assert first == 0.5 if topk == 1 else 0.6 < first < 0.9


@pytest.mark.fast(ci="EAGLE3")
@pytest.mark.parametrize("draft", ["STANDALONE", "EAGLE3"])
def test_a_checkpoint_decodes_its_own_tokens(models, draft):
    options = BenchOptions(
        model=models["target"],
        batch_sizes="1,3",
        context_lengths="10",
        output_tokens=10,
        repeat=1,
        device="cpu",
        steps="2",
    )
    plan, _, results = run(replace(options, draft=str(models[draft]), dtype="float64"))
    assert plan.acceptance is None and plan.acceptance_name == "measured"
    assert [result.equal_outputs for result in results] == [4, 4, 6, 6], "four prompts at least, in whole batches"


@pytest.mark.ci
def test_turns_repeat_themselves_and_end_with_the_first_request(small):
    plan = plan_bench(replace(small, steps="3", batch_sizes="3", output_tokens=60))
    ops = ops_for("cpu")
    target = random_weights(plan.target, ops, "cpu", torch.float32, 0)
    draft = random_draft(plan.draft, target, 1)
    prompts = bench_prompts(None, plan.target.vocab_size, 3, 12, 0)
    arm_plan = plan.cells[0].arms[1]
    chain = Arm("chain", arm_plan.spec, target, draft, ops, acceptance_of_arm(plan, arm_plan))
    arm = BatchArm(chain, prompts, 60)
    first, second = arm.run(), arm.run()
    assert first.outputs == second.outputs and common_outputs(first, second) == 3
    assert (first.rounds, first.tokens, first.bytes_read) == (second.rounds, second.tokens, second.bytes_read)
    lengths = sorted(map(len, first.outputs))
    assert lengths[-1] == 60 and lengths[0] < 60, "rows that are accepted less are not waited for"
    assert first.tokens == sum(lengths) - 3, "all but the tokens of the prefill"
    # Captured rounds decode the same, on a CPU too.
    captured = BatchArm(replace(chain, spec=replace(chain.spec, graph_sizes=(4,))), prompts, 60)
    timing = captured.run()
    assert timing.outputs == first.outputs and "graph" in timing.phase_s
    assert [(capture.steps, capture.batch_size) for capture in captured.captures] == [(3, 4)]
    overlapped = replace(chain, spec=chain.spec.with_config(overlap=True, multi_step_rounds=1))
    timing = BatchArm(overlapped, prompts, 60).run()
    assert timing.outputs == first.outputs
    assert (timing.rounds, timing.tokens) == (first.rounds, first.tokens), "a round in flight past the end is not timed"
    other = replace(timing, outputs=((9999, *timing.outputs[0][1:]), *timing.outputs[1:]))
    assert common_outputs(first, other) == 2


@pytest.mark.ci
def test_processes_are_summarised_and_what_cannot_be_is_explained(small):
    plan, _, results = run(replace(small, steps="3"))
    slow = [replace(r, speedup=4 * r.speedup, tokens_per_s=1.0, round_ms=8.0 if not r.steps else 2.0) for r in results]
    machine = Machine("cpu", 1, 1e9, 1, 0)
    capture = CaptureReport(3, 4, 1, RoundKind.SAMPLED, 0.5, 10)
    sent = [*results, replace(results[0], captures=(capture,))]
    assert found_from_json(json.loads(json.dumps(found_to_json(machine, sent)))) == (machine, sent)
    summary = summarised([results, slow, slow])
    assert summary[1].speedups == (results[1].speedup, slow[1].speedup, slow[1].speedup)
    assert (summary[1].tokens_per_s, summary[0].round_ms) == (1.0, 8.0)
    suspect = replace(summary[1], speedup=summary[1].accept_length + 0.5)
    lines = footing(plan, [summary[0], suspect])
    assert (
        "is more than the accept length" in lines[1] and "2.000 ms, less than the 8.000 ms of a plain step" in lines[1]
    )
    assert len(footing(plan, [summary[0], replace(suspect, speedup=1.0)])) == 1
    plain, _ = result_rows(results)
    assert {"graph", "idle"}.isdisjoint(plain) and (plain["steps"], plain["range"]) == ("plain", "")
    captured = replace(results[1], shares={**results[1].shares, "graph": 0.5}, idle_share=0.02)
    rows = result_rows([results[0], captured])
    assert [list(row) for row in rows] == [list(rows[0])] * 2 and set(rows[0]) - set(plain) == {"graph", "idle"}
    assert (rows[0]["graph"], rows[1]["graph"], rows[1]["idle"]) == ("", "50%", "2.0%")


@pytest.mark.slow
def test_a_process_measures_what_this_one_would(small, tmp_path):
    machine, results = run_process(replace(small, steps="3"))
    _, bench, expected = run(replace(small, steps="3"))
    assert replace(machine, copy_bytes_per_s=0.0) == replace(bench.machine, copy_bytes_per_s=0.0)
    assert [(r.steps, r.rounds, r.equal_outputs) for r in results] == [
        (r.steps, r.rounds, r.equal_outputs) for r in expected
    ]
    with pytest.raises(ForedraftError, match=r"a process of the benchmark: .*gone"):
        run_process(replace(small, random_weights=str(tmp_path / "gone.json")))


# -- the floor --------------------------------------------------------------------------------------------------------


def test_of_a_mixture_the_experts_that_tokens_choose_count(tmp_path):
    path = tmp_path / "moe.json"
    path.write_text(json.dumps(MOE))
    target = random_weights(shape_of(str(path)), ops_for("cpu"), "cpu", torch.float32, 0)
    expert = 3 * 16 * 32 * 4
    everything = target.weight_bytes - target.embed_weight.nbytes
    one = round_bytes(target, None, Drafter.NONE, 0, 1).weights
    assert everything - one == 4 * (8 - 2) * expert
    assert everything - round_bytes(target, None, Drafter.NONE, 0, 2).weights == pytest.approx(4 * 8 * 0.75**2 * expert)
    assert round_bytes(target, None, Drafter.NONE, 0, 1000).weights == everything


def test_in_layers_with_a_window_the_tokens_inside_it_count(tmp_path):
    path = tmp_path / "moe.json"
    path.write_text(json.dumps(MOE))
    target = random_weights(shape_of(str(path)), ops_for("cpu"), "cpu", torch.float32, 0)
    layer, lens = 2 * target.config.num_kv_heads * target.config.head_dim * 4, np.array([[4, 20], [7, 21]])
    whole = round_bytes(target, None, Drafter.NONE, 0, 2)
    assert whole.total(lens) == 2 * whole.weights + 52 * layer * target.num_layers
    target.config = replace(target.config, window=8, windowed_layers=(0,))
    assert whole.total(lens) - round_bytes(target, None, Drafter.NONE, 0, 2).total(lens) == (12 + 13) * layer


def test_a_copy_reads_and_writes(monkeypatch):
    assert bandwidth_module.copy_bandwidth("cpu", 1 << 20) > 0
    seconds = iter([99.0, *([0.5] * 4), *([2.0] * 5)])  # the first is a warm-up, the median the fifth of nine
    monkeypatch.setattr(bandwidth_module, "_timed_copy", lambda source, target: next(seconds))
    assert bandwidth_module.copy_bandwidth("cpu", 1000) == 2 * 1000 / 2.0


# -- prompts and shapes -----------------------------------------------------------------------------------------------


def test_prompts_of_a_tokenizer_are_text(models):
    tokenizer = Tokenizer.load(models["target"])
    prompts = bench_prompts(tokenizer, 320, 4, 50, 0)
    assert len({tuple(prompt) for prompt in prompts}) == 4
    for prompt in prompts:
        assert len(prompt) == 50 and prompt[0] == tokenizer.bos_id
        assert tokenizer.decode(prompt[1:]).isascii()
    # Longer than all the text there is: it begins anew.
    assert len(bench_prompts(tokenizer, 320, 1, 1_000_000, 0)[0]) == 1_000_000


def test_source_for_prompts_leaves_out_tests_and_foreign_encodings(tmp_path):
    for i in range(20):
        (tmp_path / f"m{i:02}.py").write_text(f"x = {i}\n" + "# filler\n" * 60)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text("left out\n" * 100)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 200)
    assert [text.splitlines()[0] for text in read_source(tmp_path)] == ["x = 9", "x = 19"]
    assert read_source(tmp_path / "test") == []


def test_the_decoder_can_run_every_built_in_model():
    for name in known_models():
        config, shape = shape_of(name), lookup_model(name)
        assert (config.num_layers, config.hidden_size, config.dtype) == (shape.layers, shape.hidden, torch.bfloat16)
        assert config.num_moe_layers == shape.moe_layers


def test_what_graphs_cost_and_what_pruning_saves():
    """The default table: 1, 3, 7 steps from batch size 1 on, 1, 3 from 8, 1 from 32."""
    assert graph_costs([], (1, 8)) is None
    captures = [CaptureReport(1, 2, 1, False, 0.5, 100), CaptureReport(3, 4, 32, False, 1.5, 300)]
    costs = graph_costs(captures, (1, 8, 32))
    assert (costs.num_captured, costs.seconds, costs.num_bytes) == (2, 2.0, 400)
    assert (costs.adaptive_num, costs.adaptive_num_unpruned) == (6, 9)
    # (1, 1) was captured and costs 100; (3, 32) costs 300 and cannot be reached; any other the mean, 200.
    assert (costs.adaptive_bytes, costs.adaptive_bytes_unpruned) == (100 + 5 * 200, 100 + 300 + 7 * 200)
    assert costs.adaptive_seconds == pytest.approx(5.5) and costs.adaptive_seconds_unpruned == pytest.approx(9.0)


@pytest.mark.ci
def test_the_record_is_json_and_says_what_is_missing(small):
    plan, bench, results = run(replace(small, steps="2", repeat=1))
    whole = json.loads(json.dumps(report(plan, bench.machine, results, ["bench", "x"]), allow_nan=False))
    assert whole["complete"] and whole["command"] == ["bench", "x"] and whole["graphs"] is None
    assert {"python", "torch", "foredraft", "numpy"} <= whole["versions"].keys()
    assert whole["parameters"]["steps"] == [0, 2] and whole["parameters"]["acceptance"] == "eagle3-llama-chat"
    assert whole["machine"]["copy_bytes_per_s"] == bench.machine.copy_bytes_per_s
    assert [cell["steps"] for cell in whole["cells"]] == [0, 2]
    assert not report(plan, bench.machine, results[:1], [])["complete"]
    assert not report(plan, None, [], [])["complete"]
