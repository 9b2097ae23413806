"""`foredraft bench`: its table, its JSON, an interruption, and bad input."""

import json
import re

import pytest
from foredraft.gpu.measure.arm import BatchArm
from foredraft.gpu.measure.plan import BenchOptions, plan_bench
from foredraft.gpu.measure.run import Bench

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture
def arguments(tmp_path, monkeypatch) -> list:
    monkeypatch.setattr("foredraft.gpu.measure.floor.CPU_BYTES", 1 << 20)  # far beyond the caches takes seconds
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    cells = "--batch-sizes 1,2 --context-lengths 8 --steps 2 --output-tokens 16 --repeat 1 --prompts 1 --device cpu"
    return ["bench", "--random-weights", path, *cells.split()]


def rows_of(out: str) -> list[list[str]]:
    """The table's rows, split at spaces."""
    lines = [line.split() for line in out.splitlines()]
    title = next(i for i, words in enumerate(lines) if words[:3] == ["batch", "context", "steps"])
    return [words for words in lines[title + 2 :] if words and words[0].isdecimal()]


def test_table_and_json(command, arguments):
    outcome = command(*arguments, "--acceptance", "2.0")
    assert outcome.code == 0, outcome.err
    titles = next(line for line in outcome.out.splitlines() if "tokens/s" in line)
    assert re.split(r"\s{2,}", titles.strip()) == [
        "batch", "context", "steps", "nodes", "tokens/s", "per req.", "accept", "speed-up", "range", "ms/round", "draft", "verify",
        "host", "other", "floor", "prefill/s",
    ]  # fmt: skip
    rows = rows_of(outcome.out)
    assert [row[:4] for row in rows] == [
        ["1", "8", "plain", "1"], ["1", "8", "2", "3"], ["2", "8", "plain", "1"], ["2", "8", "2", "3"],
    ]  # fmt: skip
    assert [row[6] for row in rows] == ["1.00", "2.00", "1.00", "2.00"] and rows[0][7] == rows[2][7] == "1.00×"
    for words in ("EAGLE3, float32", "random weights", "memory copies at", "GB/s", "simulated (mean length 2)"):
        assert words in outcome.out
    for words in ("for weights", "for KV (batch 2", "cell 1 of 2", "turn 1 of 1", "plain decoding"):
        assert words in outcome.err
    as_json = command(*arguments, "--batch-sizes", 1, "--quiet", "--json")
    record = json.loads(as_json.out)
    assert as_json.err == "" and record["complete"] and record["command"][:2] == ["bench", "--random-weights"]
    assert [(cell["steps"], cell["batch_size"]) for cell in record["cells"]] == [(0, 1), (2, 1)]


@pytest.mark.ci
def test_an_interruption_keeps_finished_cells(command, arguments, monkeypatch):
    run, runs = BatchArm.run, []

    def interrupted(arm, **options):
        runs.append(arm.arm.spec.config.max_running)
        if len(runs) == 6:
            raise KeyboardInterrupt
        return run(arm, **options)

    monkeypatch.setattr(BatchArm, "run", interrupted)
    outcome = command(*arguments)
    assert outcome.code == 130 and runs == [1, 1, 1, 1, 2, 2]
    assert "interrupted; 1 of 2 cells" in outcome.err and "Traceback" not in outcome.err
    assert [row[0] for row in rows_of(outcome.out)] == ["1", "1"]
    runs.clear()
    as_json = command(*arguments, "--json")
    record = json.loads(as_json.out)
    assert as_json.code == 130 and not record["complete"]
    assert [cell["batch_size"] for cell in record["cells"]] == [1, 1]


def test_an_interruption_before_the_first_cell(command, arguments, monkeypatch):
    def interrupted(self, plan, on_progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "__init__", interrupted)
    outcome = command(*arguments)
    assert outcome.code == 130 and "0 of 2 cells" in outcome.err and "no cell is finished" in outcome.out
    assert json.loads(command(*arguments, "--json").out)["cells"] == []


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--model", "x"], ["--model", "--random-weights"]),
        (["--steps", "two"], ["--steps", "'two'"]),
        (["--context-lengths", "127"], ["--context-lengths", "128"]),
        (["--acceptance", "most"], ["--acceptance", "'most'", "chat"]),
        (["--graphs"], ["--graphs", "CPU"]),
        (["--topk", "2", "--num-draft-tokens", "40"], ["--num-draft-tokens: 40"]),
        (["--topk", "2", "--num-draft-tokens", "2:5,2:7"], ["--num-draft-tokens", "'2:5,2:7'", "1:5,3:16"]),
        (["--topk", "2", "--num-draft-tokens", "2:40"], ["--num-draft-tokens: 40"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_bad_input_is_refused_before_any_work(more, expected, refused, arguments, monkeypatch):
    def work(self, plan, on_progress):
        raise AssertionError("too late")

    monkeypatch.setattr(Bench, "__init__", work)
    message = refused(*arguments, *more)
    assert all(words in message for words in expected), message


def test_too_much_memory(refused, arguments, monkeypatch):
    monkeypatch.setattr("foredraft.gpu.measure.plan.free_bytes", lambda device: 50_000)
    message = refused(*arguments)
    assert message.count("foredraft: ") == 1
    assert all(words in message for words in ("not enough memory", "for weights", "for KV", "--batch-sizes"))


@pytest.mark.fast("1", ci="*")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_estimate_needs_no_gpu_and_has_a_row_for_each_part(ranks, command, arguments):
    pytest.importorskip("triton")
    cells = "--batch-sizes 2 --context-lengths 8 --steps 2 --output-tokens 16 --dtype bfloat16 --acceptance 2.5"
    words = (*arguments[:3], *cells.split(), "--estimate", "h200", "--tensor-parallel", str(ranks))
    outcome, as_json = command(*words), command(*words, "--json")
    assert outcome.code == as_json.code == 0, outcome.err
    out = " ".join(outcome.out.split())
    plain, chain = json.loads(as_json.out)["estimates"]
    assert (plain["gpu"], plain["steps"], chain["steps"], chain["num_nodes"]) == ("H200", 0, 2, 3)
    assert plain["ranks"] == ranks and ("on each of 2 H200: expected" in out) == (ranks == 2)
    for estimate in (plain, chain):
        parts = estimate["parts"]
        assert all(0 < part["floor_us"] < part["us"] and part["launches"] for part in parts)
        us = sum(part["us"] for part in parts)
        assert f"round {sum(part['launches'] for part in parts)}" in out
        accepted = estimate["accept_length"]
        assert f"accept length {accepted:.2f}: {2e6 * accepted / us:,.0f} tokens/s" in out
    assert chain["accept_length"] == pytest.approx(2.5, abs=0.05)
    assert {part["name"] for part in chain["parts"]} > {"target: projections", "draft: attention", "everything else"}
    exchanged = {"sums of all ranks", "logits of all ranks"}
    assert exchanged & {part["name"] for part in plain["parts"]} == (exchanged if ranks == 2 else set())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--estimate", "h201"], "unknown GPU 'h201'"),
        (["--estimate", "mi300x"], "runs none of these kernels"),
        (["--estimate", "h100", "--dtype", "float32"], "give --dtype bfloat16"),
        (["--estimate", "h100", "--repeat", "2", "--no-graphs"], "--graphs: has no effect"),
    ],
)
def test_what_cannot_be_estimated_is_said(refused, arguments, more, words):
    arguments = [*arguments[:3], *["--batch-sizes", "1", "--context-lengths", "8", "--output-tokens", "16"]]
    assert words in refused(*arguments, *more)


def test_the_options_are_the_plans(command, arguments, monkeypatch):
    """Every option arrives where it belongs."""
    seen = []

    def keep(options):
        seen.append(options)
        return plan_bench(BenchOptions(random_weights=None))  # raises, which ends the command

    monkeypatch.setattr("foredraft.gpu.measure.plan.plan_bench", keep)
    given = {
        "--draft": "d", "--dtype": "float64", "--algorithm": "A", "--topk": 3, "--num-draft-tokens": 7,
        "--acceptance": "code", "--page-size": 4, "--seed": 5,
    }  # fmt: skip
    command(*arguments, *[word for pair in given.items() for word in pair], "--overlap", "--no-graphs")
    expected = BenchOptions(
        random_weights=str(arguments[2]), draft="d", algorithm="A", steps="2", topk=3, num_draft_tokens=7,
        batch_sizes="1,2", context_lengths="8", output_tokens=16, acceptance="code", overlap=True, graphs=False,
        device="cpu", dtype="float64", page_size=4, prompts=1, repeat=1, seed=5,
    )  # fmt: skip
    assert seen == [expected]


def test_policies_are_not_timed_and_the_reason_is_said(refused):
    said = refused("bench", "--random-weights", "smollm2-135m", "--policy", "goodput")
    assert "--policy: a cell has one batch" in said and "generate --policy" in said
