"""`foredraft serve` as a process: signals, the record, and what it refuses."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from foredraft.cli.app import app
from foredraft.core.errors import ForedraftError
from foredraft.gpu.session.text import Tokenizer
from foredraft.serve.bodies.simulated import SimulatedBody
from foredraft.sim.scenario_file import load_scenario
from server_process import FOREDRAFT, recorded, serve, wait_for
from typer.testing import CliRunner

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_signals_and_the_record(tmp_path: Path):
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"1": {"candidate_steps": [1, 3]}}))
    record = tmp_path / "record"
    keys = ["--set", "speculation.policy='ema'", "--set", f"speculation.adaptive='{table}'"]
    with serve(tmp_path, *keys, "--record", str(record), "--speed", "5", "--strict") as (process, address, log):
        asked = {"prompt": "Why?", "max_tokens": 200, "ignore_eos": True}
        assert httpx.post(f"{address}/v1/completions", json=asked).status_code == 200
        assert httpx.post(f"{address}/v1/completions", json={**asked, "beam_width": 2}).status_code == 400
        table.write_text('{"1": {"candidate_steps": [1,')
        process.send_signal(signal.SIGHUP)
        wait_for(log, "stays as it was", process)
        table.write_text(json.dumps({"1": {"candidate_steps": [3]}}))
        process.send_signal(signal.SIGHUP)
        wait_for(log, "was read again", process)
        with httpx.stream("POST", f"{address}/v1/completions", json={**asked, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)  # what is served ends
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(60) == 0
    (folder,) = recorded(record)
    events = (folder / "events.jsonl").read_text()
    assert '"t":"reload"' in events and '"complete":true' in events
    table.write_text('{"1": {"candidate_steps": [2, 7]}}')  # the record has the tables that were used
    done = CliRunner().invoke(app, ["audit", "--replay", str(folder)])
    assert done.exit_code == 0 and "decisions identical" in done.output, done.output


@pytest.mark.ci
def test_a_server_that_drains_can_be_watched(tmp_path: Path):
    """It listens until what it serves has ended, and says so."""
    with serve(tmp_path, "--speed", "0.3") as (process, address, _):
        asked = {"prompt": "Why?", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            while (ready := httpx.get(f"{address}/ready")).status_code == 200:
                time.sleep(0.01)
            assert (ready.status_code, ready.json()["reason"]) == (503, "the server is stopping")
            refused = httpx.post(f"{address}/v1/completions", json=asked)
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
            assert httpx.get(f"{address}/health").status_code == 200
            assert "foredraft:num_requests_running" in httpx.get(f"{address}/metrics").text
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == 0


@pytest.mark.ci
def test_names_and_a_tokenizer_of_a_process(tmp_path: Path, models: dict[str, Path]):
    names = [*("--served-model-name", "a"), *("--served-model-name", "b"), *("--lora-modules", "sql=/nowhere")]
    given = [*names, *("--tokenizer", str(models["target"])), *("--tool-call-share", "1")]
    with serve(tmp_path, *given) as (_, address, _):
        assert [card["id"] for card in httpx.get(f"{address}/v1/models").json()["data"]] == ["a", "b", "sql"]
        tokens = httpx.post(f"{address}/tokenize", json={"prompt": "def add", "model": "b"}).json()["tokens"]
        assert tokens == Tokenizer.load(models["target"]).encode("def add").tolist()


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (["--served-model-name", "a", "--lora-modules", "a"], "expected names that differ, found 'a'"),
        (["--lora-modules", "=/path"], "expected names that differ, found ''"),
        (["--tokenizer", "missing"], "tokenizer.json"),
        (["--tool-call-share", "2"], "2"),
    ],
)
def test_names_and_tokenizers_that_cannot_be_are_refused(tmp_path: Path, given: list[str], word: str):
    (tmp_path / "scenario.toml").write_text("")
    result = CliRunner().invoke(app, ["serve", "--simulate", str(tmp_path / "scenario.toml"), "--port", "0", *given])
    assert result.exit_code != 0 and word in f"{result.output} {result.exception}"


@pytest.mark.ci
def test_the_admin_port_of_a_process(tmp_path: Path):
    with serve(tmp_path, "--admin-port", "0", "--access-log", "--log-format", "json") as (process, address, log):
        admin = wait_for(log, "faults are asked for on ", process).partition('"')[0]
        asked = {"prompt": "x", "max_tokens": 3}
        assert httpx.put(admin, json={"fault": "503"}).status_code == 200
        assert httpx.post(f"{address}/v1/completions", json=asked).status_code == 503
        assert httpx.delete(admin).status_code == 200
        assert httpx.post(f"{address}/v1/completions", json=asked).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines if line["message"] == "request"] == [503, 200]


def test_an_empty_key_opens_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREDRAFT_API_KEY", "")
    result = CliRunner().invoke(app, ["serve", "--simulate", "missing.toml", "--port", "0"])
    assert isinstance(result.exception, ForedraftError) and "FOREDRAFT_API_KEY" in str(result.exception)


@pytest.mark.parametrize(("host", "is_warned"), [("0.0.0.0", True), ("::", True), ("127.0.0.1", False)])
def test_an_open_server_without_a_key_says_so(host: str, is_warned: bool):
    result = CliRunner().invoke(app, ["serve", "--simulate", "missing.toml", "--port", "0", "--host", host])
    assert ("give a key" in result.stderr) == is_warned
    result = CliRunner().invoke(
        app, ["serve", "--simulate", "missing.toml", "--port", "0", "--api-key", "k", "--host", host]
    )
    assert "give a key" not in result.stderr


@pytest.mark.parametrize(
    "keys", ["router.policy='prefix_aware'", "engine.prefix_cache=true", "engine.eviction_policy='fifo'"]
)
def test_keys_that_need_the_contents_of_prompts_have_effect(keys: str):
    """A workload without contents makes them useless in `simulate`; clients bring contents."""
    scenario, origins = load_scenario(None, ["hardware.replicas=2", keys])
    body = SimulatedBody(scenario, origins=origins)
    assert not [notice for notice in body.simulation.notices if keys.split("=")[0] in notice]


@pytest.mark.slow
def test_a_second_signal_gives_up_what_is_left(tmp_path: Path):
    with serve(tmp_path, "--speed", "0.01") as (process, address, _):
        asked = {"prompt": "Why?", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=60) as stream:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert '"finish_reason":"abort"' in stream.read().decode()
        assert process.wait(30) == 0


@pytest.mark.slow
def test_what_is_left_when_draining_ends_is_given_up(tmp_path: Path):
    with serve(tmp_path, "--speed", "0.01", "--drain-s", "1") as (process, address, log):
        asked = {"prompt": "Why?", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        with (
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as half,
            httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=60) as stream,
        ):
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            lines = [line for line in stream.iter_lines() if line]
            assert '"finish_reason":"abort"' in lines[-2] and lines[-1] == "data: [DONE]"
            assert process.wait(30) == 0
        assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_a_checkpoint_is_served_as_generate_decodes_it(tmp_path: Path, models: dict[str, Path]):
    target, draft = models["target"], models["STANDALONE"]
    record = tmp_path / "record"
    options = ["--draft", str(draft), "--dtype", "float64", "--record", str(record)]
    with serve(tmp_path, *options, model=target) as (process, address, _):
        asked = {"prompt": "def add", "max_tokens": 24, "temperature": 0}
        text = httpx.post(f"{address}/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    command = [*FOREDRAFT, "generate", "--model", str(target), "--dtype", "float64", "--prompt", "def add"]
    done = subprocess.run([*command, "--max-tokens", "24", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["text"] == text
    done = subprocess.run(
        [*FOREDRAFT, "audit", "--replay", *map(str, recorded(record))], capture_output=True, text=True
    )
    assert done.returncode == 0 and "decisions identical" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_an_executor_that_fails_by_a_plan(tmp_path: Path):
    plan, record = tmp_path / "plan.toml", tmp_path / "record"
    plan.write_text("[device.poison]\nprobability = 0.3\n\n[device.raises]\nprobability = 0.05\n")
    options = ["--faults", str(plan), "--record", str(record), "--speed", "5"]
    with serve(tmp_path, *options) as (process, address, _):
        asked = {"prompt": "Why?", "max_tokens": 40, "ignore_eos": True}
        statuses = [httpx.post(f"{address}/v1/completions", json=asked).status_code for _ in range(30)]
        assert set(statuses) == {200, 503} and statuses.count(503) < 20
        assert httpx.get(f"{address}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "every promise was kept"
    done = CliRunner().invoke(app, ["audit", "--replay", *map(str, recorded(record))])
    assert done.exit_code == 0 and "decisions identical" in done.output, done.output


def test_a_port_in_use_is_one_message_before_anything_is_written(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        arguments = ["serve", "--simulate", "x.toml", "--port", port, "--record", str(tmp_path / "record")]
        result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ForedraftError) and f"port {port}: address already in use" in str(
        result.exception
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model or --simulate"),
        (["--simulate", "x.toml", "--model", "x"], "--model or --simulate"),
        (["--simulate", "x.toml", "--draft", "d"], "--draft"),
        (["--simulate", "x.toml", "--metrics-as", "vlm"], "did you mean 'vllm'"),
        (["--simulate", "x.toml", "--speed", "-1"], "--speed"),
        (["--simulate", "x.toml", "--max-streams", "0"], "--max-streams"),
        (["--simulate", "missing.toml"], "missing.toml"),
        (["--model", "missing", "--speed", "2"], "--speed"),
        (["--model", "missing", "--strict"], "--strict"),
        (["--model", "missing", "--faults", "swarm"], "--faults"),
        (["--simulate", "x.toml", "--ready-s", "5"], "nothing is captured"),
        (["--simulate", str(EXAMPLES / "chat_on_h100.toml"), "--faults", "swarn"], "did you mean 'swarm'"),
        (["--simulate", "x.toml", "--api-key", " "], "--api-key"),
        (["--simulate", "x.toml", "--host", "999.0.0.1"], "cannot listen on 999.0.0.1"),
    ],
)
def test_bad_arguments_are_one_message(arguments: list[str], words: str):
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert isinstance(result.exception, ForedraftError) and words in str(result.exception)


@pytest.mark.parametrize("workers", [[], ["--disaggregate", "prefill=1,decode=1"]], ids=["one process", "workers"])
def test_seconds_for_captures_are_refused_where_nothing_is_captured(workers: list[str], models: dict[str, Path]):
    asked = ["--model", str(models["target"]), "--device", "cpu", "--ready-s", "5", *workers]
    result = CliRunner().invoke(app, ["serve", "--port", "0", *asked])
    assert isinstance(result.exception, ForedraftError)
    assert "--ready-s: has no effect: no rounds are captured here" in str(result.exception)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_served_model_is_ready_before_it_listens(
    ranks: int, models: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Rounds are captured on a CPU as on a GPU, but for the capture itself."""
    from foredraft.cli.serving.serve import _real_body
    from foredraft.gpu.session.plan import SessionOptions
    from foredraft.gpu.session.session import DecodeSession
    from foredraft.serve.telemetry.log_lines import ServerLog
    from foredraft.serve.telemetry.recording import Recording

    opened: list[DecodeSession] = []
    open_session = DecodeSession.open
    monkeypatch.setattr(
        DecodeSession, "open", lambda *a, **named: opened.append(open_session(*a, **named)) or opened[-1]
    )
    options = SessionOptions(
        models["target"],
        dtype="float64",
        device="cpu",
        max_running=1,
        multi_step_rounds=1,
        graphs=True,
        tensor_parallel=ranks,
    )
    with Recording(None) as recording:
        body = _real_body(options, recording, ServerLog(), None)
        assert [engine.num_uncommitted for engine in body.engines] == [0]
        told = capsys.readouterr().err
        assert "compiling: greedy rounds" in told and "all rounds are captured: 18 CUDA graphs" in told
        _real_body(options, recording, ServerLog(), 0.0)
        assert "18 kinds of rounds run without a CUDA graph" in capsys.readouterr().err
    for session in opened:
        session.close()
