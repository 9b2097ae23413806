"""`foredraft generate`: text and JSON lines, the files of a run, its replay, interruption, bad input."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from foredraft.cli.decode.display import DecodeProgress, Display, stats_text
from foredraft.cli.decode.generate import _asked_to_stop
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.gpu.session.plan import plan_session
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.session.text_session import SessionStats
from foredraft.gpu.types.session_options import SessionOptions
from foredraft.observe.distribution.install_hint import install_command


@pytest.fixture
def generate(command, models):
    """`generate(…)` runs the command on the small target."""

    def run(*arguments: object):
        return command("generate", "--model", models["target"], "--dtype", "float64", *arguments)

    return run


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "def add", "id": "long", "max_tokens": 30},
        {"tokens": [5, 6, 7], "max_tokens": 2, "logprobs": True},
        {"messages": [{"role": "user", "content": "Hi"}], "id": "chat"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def as_stdin(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.split("\n") if line]


def test_sampling_defaults_come_from_the_model(command, models, tmp_path):
    """An option wins over generation_config.json, and --generation-config none leaves the file out."""
    model = tmp_path / "model"
    shutil.copytree(models["target"], model)
    file = model / "generation_config.json"
    ends = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(ends | {"do_sample": True, "temperature": 9.0, "max_new_tokens": 7}))

    def run(*arguments):
        arguments = ("--model", model, "--dtype", "float64", "--prompt", "def add", "--ignore-eos", *arguments)
        return command("generate", *arguments, "--json")

    def text(outcome):
        return json_lines(outcome.out)[0]["text"]

    warm, greedy = run(), run("--temperature", 0)
    assert f"note: defaults of {file}: max_tokens 7" not in warm.err  # in the order of the parameters
    assert f"note: defaults of {file}: temperature 9.0, max_tokens 7 (--generation-config none" in warm.err
    assert "defaults of" in greedy.err and "temperature" not in greedy.err
    assert len(json_lines(warm.out)[0]["tokens"]) == len(json_lines(greedy.out)[0]["tokens"]) == 7
    assert text(warm) != text(greedy)
    off = run("--generation-config", "none", "--max-tokens", 7)
    assert off.err == "" and text(off) == text(greedy)
    assert run("--generation-config", "file").code == 2
    file.write_text('{"top_p": 2}')
    outcome = run()
    assert outcome.code == 2 and f"{file}: top_p: is 2; expected a number above 0, at most 1" in outcome.err


def test_one_prompt_gives_its_text_alone(generate, models, monkeypatch):
    outcome = generate("--prompt", "def add", "--max-tokens", 20)
    assert outcome.code == 0 and outcome.err == ""
    as_json = generate("--prompt", "def add", "--max-tokens", 20, "--json")
    (line,) = json_lines(as_json.out)
    assert line["text"].rstrip("\n") == outcome.out.rstrip("\n") and outcome.out.endswith("\n")
    assert (line["finish"], len(line["tokens"]), line["id"]) == ("length", 20, "1")
    drafted = generate("--prompt", "def add", "--max-tokens", 20, "--draft", models["STANDALONE"], "--topk", 2)
    assert drafted.out == outcome.out
    as_stdin(monkeypatch, "def add")
    assert generate("--max-tokens", 20).out == outcome.out


def test_a_name_of_the_hub_without_a_network(command, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    outcome = command("generate", "--model", "org/name", "--prompt", "x")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "foredraft: --model: org/name" in outcome.err and "hf download org/name --local-dir name" in outcome.err


def test_a_wrong_schema_is_named_by_its_file(generate, tmp_path):
    pytest.importorskip("llguidance")
    (tmp_path / "wrong.json").write_text('{"type": "objekt"}')
    outcome = generate("--prompt", "x", "--json-schema", tmp_path / "wrong.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"foredraft: {tmp_path / 'wrong.json'}: json_schema: ")


def test_text_is_written_while_it_is_decoded(generate, monkeypatch):
    written = []

    class Recorder(io.StringIO):
        def write(self, text):
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Recorder())
    generate("--prompt", "def add", "--max-tokens", 40)
    assert len(written) > 3


def test_many_prompts_give_json_lines_in_their_order(generate, prompts):
    outcome = generate("--prompts", prompts, "--max-tokens", 5)
    assert outcome.code == 0 and outcome.err == ""
    first, second, third = json_lines(outcome.out)
    assert [line["id"] for line in (first, second, third)] == ["long", "2", "chat"]
    assert [len(line["tokens"]) for line in (first, second, third)] == [30, 2, 5]
    assert len(second["logprobs"]) == 2 and all(value <= 0 for value in second["logprobs"])
    assert first["logprobs"] is None


def test_prompts_from_standard_input(generate, prompts, monkeypatch):
    from_file = generate("--prompts", prompts).out
    as_stdin(monkeypatch, prompts.read_text())
    assert generate("--prompts", "-").out == from_file


def test_stats_stand_on_standard_error(generate, models):
    outcome = generate("--prompt", "def add", "--max-tokens", 20, "--stats", "--draft", models["EAGLE3"], "--topk", 2)
    assert "tokens/s" not in outcome.out
    for words in (
        "1 request: 2 prompt and 20 output tokens",
        "tokens/s",
        "accept length",
        "EAGLE3, 3 steps",
        "trees of 11",
    ):
        assert words in outcome.err, outcome.err
    time = next(line for line in outcome.err.splitlines() if line.startswith("time: "))
    assert all(f"{phase} " in time for phase in ("draft", "verify", "host", "other"))
    without_draft = ("--prompt", "def add", "--max-tokens", 3, "--stats")
    assert "NGRAM, 3 steps" in generate(*without_draft).err
    for plain in (("--algorithm", "NONE"), ("--steps", 0)):
        assert "plain decoding" in generate(*without_draft, *plain).err


@pytest.mark.parametrize(("cpu_seconds", "says_so"), [(0.5, True), (1.9, False), (7.0, False), (None, False)])
def test_stats_say_that_the_machine_was_busy(cpu_seconds, says_so, models):
    plan = plan_session(SessionOptions(model=models["target"], device="cpu"))
    numbers = {"requests": 1, "prompt_tokens": 2, "output_tokens": 8, "rounds": 4, "verified_rows": 4}
    stats = SessionStats(
        seconds=2.0, **numbers, drafted=9, correct_drafts=4, phase_seconds={"verify": 1.5}, cpu_seconds=cpu_seconds
    )
    assert ("the machine was busy: 0.50 s of processor time in 2.00 s" in stats_text(stats, plan)) is says_so


def test_a_session_counts_its_processor_time(models):
    with closing(DecodeSession.open(SessionOptions(model=models["target"], device="cpu"))) as session:
        session.run([Request("one", Prompt.of_tokens([5, 6, 7]), 12)])
        stats = session.stats()
    assert stats.cpu_seconds > 0 and stats.cpu_share > 0


def test_a_run_leaves_its_files_and_replays(generate, command, models, prompts, tmp_path):
    run = tmp_path / "deep" / "run"
    run.mkdir(parents=True)
    (run / "rounds.parquet").write_text("of an earlier run")
    outcome = generate(
        "--prompts", prompts, "--out", run, "--draft", models["STANDALONE"], "--adaptive", "default", "--overlap"
    )
    assert outcome.code == 0
    assert {path.name for path in run.iterdir()} == {"events.jsonl", "outputs.jsonl", "summary.json"}
    assert (run / "outputs.jsonl").read_text() == outcome.out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["completed"] == 3 and summary["incomplete"] is False
    assert summary["total_output_tokens"] == sum(len(line["tokens"]) for line in json_lines(outcome.out))
    assert (summary["algorithm"], summary["policy"], summary["dtype"]) == ("STANDALONE", "ema", "float64")
    assert 0 < summary["share_verify"] < 1 and summary["output_throughput"] > 0
    # The models may be gone: the log is enough.
    replayed = command("audit", "--replay", run)
    assert replayed.code == 0 and "decisions identical (1 replica" in replayed.out
    log = run / "events.jsonl"
    lines = log.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"t":"plan"' in line and '"S":' in line)
    log.write_text("\n".join([*lines[:place], lines[place].replace('"S":', '"S":1'), *lines[place + 1 :]]) + "\n")
    assert command("audit", "--replay", run).code == 1


BAD = {
    "no such model": (["--model", "nowhere", "--prompt", "x"], ["nowhere", "no such directory"]),
    "no such draft": (["--draft", "nowhere", "--prompt", "x"], ["nowhere", "no such directory"]),
    "no such file": (["--prompts", "nothing.jsonl"], ["nothing.jsonl", "cannot be read"]),
    "an empty prompt": (["--prompt", ""], ["--prompt", "the prompt is empty"]),
    "all settings at once": (
        ["--prompt", "x", "--temperature", "-1", "--top-p", "nan", "--max-tokens", "0"],
        ["foredraft: --temperature: is -1", "foredraft: --top-p: is nan", "foredraft: --max-tokens: is 0"],
    ),
    "a prompt beyond the context": (["--prompt", "a b c " * 200], ["--prompt", "601 tokens", "room for 255"]),
    "a device that is not there": (["--prompt", "x", "--device", "cuda:77"], ["cuda:77", "not there"]),
    "a prompt that is not UTF-8": (["--prompt", "a\udcff"], ["foredraft: --prompt: is not UTF-8 (at character 2)"]),
    "a directory that cannot be": (["--prompt", "x", "--out", "/dev/null/run"], ["/dev/null/run", "cannot be used"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_before_a_weight_is_read(refused, models, name, monkeypatch):
    import foredraft.gpu.models.checkpoint as checkpoint

    monkeypatch.setattr(checkpoint, "load_target", lambda *arguments: pytest.fail("weights were read"))
    arguments, words = BAD[name]
    message = refused("generate", "--model", models["target"], *arguments)
    assert all(line.startswith("foredraft: ") for line in message.splitlines())
    assert all(word in message for word in words), message


def test_broken_weights_are_found_before_any_are_read(generate, models, tmp_path, monkeypatch):
    """Of the draft too: its files are looked at before the target's weights are read."""
    for name, options in (("target", ["--model"]), ("STANDALONE", ["--draft"]), ("EAGLE3", ["--draft"])):
        broken = tmp_path / name
        shutil.copytree(models[name], broken)
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        outcome = generate("--prompt", "x", *options, broken)
        assert outcome.code == 2 and "truncated" in outcome.err and str(broken) in outcome.err, outcome
        weights.unlink()
        assert "model.safetensors" in generate("--prompt", "x", *options, broken).err


def test_output_fits_the_encoding_of_standard_output(generate, monkeypatch, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x", "max_tokens": 4, "id": "ö"}')
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert generate("--prompts", prompts)[::2] == (0, "")
    assert written.getvalue().isascii() and json.loads(written.getvalue())["id"] == "ö"


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("torch", "gpu", ("generate", "--model", "TARGET", "--prompt", "x")),
        ("typer", "sim", ("simulate",)),
        ("pydantic", "sim", ("simulate", "--quiet")),
    ],
)
def test_missing_libraries_are_named_with_their_extra(models, process, package, extra, arguments):
    code = f"import sys; sys.modules[{package!r}] = None; from foredraft.cli.__main__ import main; main()"
    arguments = [str(models["target"]) if word == "TARGET" else word for word in arguments]
    running = process(*arguments, code=code)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 2 and out == ""
    assert err == f"foredraft: {package} is not installed: {install_command(extra)}\n"


def test_standard_input_that_is_not_utf_8_is_named(generate, monkeypatch):
    for more in ((), ("--prompts", "-")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
        outcome = generate(*more)
        assert outcome.code == 2 and "<standard input>: is not UTF-8" in outcome.err


def test_a_terminal_without_a_prompt_says_what_to_give(generate, monkeypatch):
    as_stdin(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    outcome = generate()
    assert outcome.code == 2 and "--prompt: is missing" in outcome.err


@pytest.mark.ci
def test_an_interruption_keeps_what_was_produced(process, command, models, tmp_path):
    prompts, run = tmp_path / "p.jsonl", tmp_path / "run"
    prompts.write_text('{"tokens": [5], "max_tokens": 3}\n' + '{"prompt": "def add", "max_tokens": 250}\n' * 400)
    arguments = ("--model", models["target"], "--prompts", prompts, "--out", run, "--ignore-eos", "--max-running", 4)
    running = process("generate", *arguments)
    first = running.stdout.readline()
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130 and "interrupted" in err and "Traceback" not in err
    lines = json_lines(first + out)
    assert len(lines) == 401 and [line["id"] for line in lines] == [str(n) for n in range(1, 402)]
    ends = {line["finish"] for line in lines}
    assert lines[0]["finish"] == "length" and "aborted" in ends and lines[-1]["tokens"] == []
    assert (run / "outputs.jsonl").read_text() == first + out
    assert json.loads((run / "summary.json").read_text())["incomplete"] is True
    replayed = command("audit", "--replay", run)
    assert replayed.code == 0 and "interrupted" in replayed.out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_noted_once_and_the_second_interrupts(generate, monkeypatch, number, code):
    before = signal.getsignal(number)
    add, told = Display.add, []

    def then_signal(self, delta):
        add(self, delta)
        told.append(delta)
        if len(told) == 2:
            signal.raise_signal(number)

    monkeypatch.setattr(Display, "add", then_signal)
    outcome = generate("--prompt", "def add", "--max-tokens", 100, "--ignore-eos")
    assert outcome.code == code and "interrupted" in outcome.err
    assert told[-1].finish == "aborted" and outcome.out.rstrip("\n") == "".join(d.text for d in told).rstrip("\n")
    with pytest.raises(KeyboardInterrupt), _asked_to_stop() as received:
        signal.raise_signal(number)
        assert received == [number]
        signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_progress_is_a_line_now_and_then(capsys, monkeypatch):
    clock = iter([0.0, 4.0, 11.0])
    monkeypatch.setattr("foredraft.cli.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    progress = DecodeProgress(3)
    progress.add(10, ended=False)
    assert capsys.readouterr().err == ""
    progress.add(100, ended=True)
    assert capsys.readouterr().err == "1 of 3 requests, 110 tokens, 10 tokens/s\n"
