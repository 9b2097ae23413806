"""`foredraft serve --model --disaggregate`: the text of `generate`, whatever clients do and whichever worker dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from foredraft.cli.app import app
from foredraft.core.errors import ForedraftError
from server_process import FOREDRAFT, recorded, serve, wait_for
from typer.testing import CliRunner

PROMPTS = [f"def f{i}(a, b):\n    return {i} " for i in range(6)]
NUM_TOKENS = 200
ASKED = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts of `generate` in one process, without drafts."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    command = [
        *FOREDRAFT,
        "generate",
        "--model",
        str(models["target"]),
        "--algorithm",
        "none",
        "--dtype",
        "float64",
    ]
    command += ["--max-tokens", str(NUM_TOKENS), "--ignore-eos", "--prompts", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line)["text"] for line in done.stdout.splitlines()]


@contextmanager
def workers(tmp_path: Path, models: dict[str, Path], topology: str, *options: str) -> Iterator[tuple]:
    arguments = ["--draft", str(models["STANDALONE"]), "--dtype", "float64", "--disaggregate", topology, *options]
    with serve(tmp_path, *arguments, model=models["target"]) as started:
        yield started


def pid_of(server: subprocess.Popen, number: int) -> int:
    """Return the process of a worker by its rank: they are started one after the other."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    found = [int(pid) for pid in children if b"disaggregation.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return sorted(found)[number]


class Stream(threading.Thread):
    """A client of one prompt. `text` grows; `error` is an error event, `finish` the reason of the end."""

    def __init__(self, address: str, prompt: str, leave_after: int | None = None, **fields: object) -> None:
        super().__init__(daemon=True)
        self.text = self.error = self.finish = ""
        self.num_events = 0
        self._asked = (f"{address}/v1/completions", {**ASKED, "prompt": prompt, "stream": True, **fields})
        self._leave_after = leave_after
        self.start()

    def run(self) -> None:
        url, asked = self._asked
        with httpx.stream("POST", url, json=asked, timeout=DEADLINE_S) as answer:
            if answer.status_code != 200:
                self.error = answer.read().decode()
                return
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                self.num_events += 1
                if "error" in event:
                    self.error = event["error"]["message"]
                for choice in event.get("choices", ()):
                    self.text += choice["text"]
                    self.finish = choice["finish_reason"] or self.finish
                if self._leave_after is not None and len(self.text) >= self._leave_after:
                    return

    def wait_for_text(self) -> None:
        begin = time.monotonic()
        while not self.text and time.monotonic() - begin < DEADLINE_S:
            time.sleep(0.002)


def wait_until(holds) -> None:
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < DEADLINE_S, "waited in vain"
        time.sleep(0.05)


def series(address: str) -> dict[str, float]:
    """The samples of `/metrics` by name and labels."""
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def total(address: str, name: str) -> float:
    return sum(value for key, value in series(address).items() if key.startswith(f"foredraft:{name}{{"))


@pytest.mark.ci
def test_workers_serve_the_text_of_generate_and_a_loss_changes_none(
    tmp_path: Path, models: dict[str, Path], expected: list[str]
):
    """One decode worker of two dies in the middle of its streams; then the last one does."""
    record = tmp_path / "record"
    with workers(tmp_path, models, "prefill=1,decode=2", "--record", str(record)) as (server, address, log):
        leaving = Stream(address, PROMPTS[0], leave_after=5)
        streams = [Stream(address, prompt) for prompt in PROMPTS]
        wait_until(lambda: any(stream.num_events > 2 for stream in streams))
        os.kill(pid_of(server, 1), signal.SIGSTOP)  # its streams stand; those of the other one end
        wait_until(lambda: sum(not stream.is_alive() for stream in streams) >= 2)
        assert any(stream.is_alive() for stream in streams)
        os.kill(pid_of(server, 1), signal.SIGKILL)
        for stream, text in zip(streams, expected, strict=True):
            stream.join(DEADLINE_S)
            assert (stream.text, stream.finish, stream.error) == (text, "length", "")
        leaving.join(DEADLINE_S)
        assert expected[0].startswith(leaving.text)
        wait_for(log, "worker decode0 was killed by SIGKILL; its requests go on elsewhere", server)
        ready = httpx.get(f"{address}/ready")
        assert (ready.status_code, ready.json()["workers"]["decode0"]) == (200, "was killed by SIGKILL")
        again = {**ASKED, "prompt": PROMPTS[1], "logprobs": 2}
        answer = httpx.post(f"{address}/v1/completions", json=again, timeout=DEADLINE_S).json()
        assert answer["choices"][0]["text"] == expected[1]
        alone = again | {"max_tokens": 0, "echo": True}  # a worker judges the prompt
        (choice,) = httpx.post(f"{address}/v1/completions", json=alone, timeout=DEADLINE_S).json()["choices"]
        assert choice["text"] == PROMPTS[1] and all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
        assert (
            len(answer["choices"][0]["logprobs"]["top_logprobs"]) == answer["usage"]["completion_tokens"] == NUM_TOKENS
        )
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        wait_until(lambda: total(address, "spec_decode_num_draft_tokens_total") > 0)
        found = series(address)
        assert [found[key] for key in sorted(found) if key.startswith("foredraft:worker_up")] == [0, 1, 1]
        assert total(address, "generation_tokens_total") >= 7 * NUM_TOKENS
        wait_until(lambda: total(address, "kv_cache_usage_perc") == total(address, "num_requests_running") == 0)
        assert not [key for key in found if "iteration_tokens" in key], "not known here, so absent"
        os.kill(pid_of(server, 1), signal.SIGSTOP)  # the prompt is computed, and its output stands
        before = total(address, "generation_tokens_total")
        last = Stream(address, PROMPTS[2])
        wait_until(lambda: total(address, "generation_tokens_total") > before)
        os.kill(pid_of(server, 1), signal.SIGKILL)
        last.join(DEADLINE_S)
        assert re.search("worker decode1 was killed by SIGKILL; there is no other worker", last.error), last.error
        ready = httpx.get(f"{address}/ready")
        assert ready.status_code == 503 and "no decode worker is left" in ready.json()["reason"]
        assert httpx.get(f"{address}/health").status_code == 503
        refused = httpx.post(f"{address}/v1/completions", json={**ASKED, "prompt": "x"})
        assert refused.status_code == 503 and "no decode worker is left" in refused.json()["error"]["message"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert "leaked" not in log.read_text()
    (folder,) = recorded(record)
    for name in ("prefill0", "decode0", "decode1"):
        done = CliRunner().invoke(app, ["audit", "--replay", str(folder / name), "--allow-truncated"])
        assert done.exit_code == 0 and "identical" in done.output, done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "m", "--disaggregate", "prefil=1"], "prefil"),
        (["--model", "m", "--disaggregate", "prefill=1,decode=1", "--kv-events", "tcp://*:0"], "--kv-events"),
        (["--simulate", "x.toml", "--disaggregate", "prefill=1,decode=1"], "--disaggregate"),
    ],
)
def test_what_workers_cannot_do_is_one_message(arguments: list[str], words: str, tmp_path: Path):
    (tmp_path / "m").mkdir()
    arguments = [str(tmp_path / "m") if one == "m" else one for one in arguments]
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert isinstance(result.exception, ForedraftError) and words in str(result.exception)


@pytest.mark.slow
def test_draining_lets_streams_end_even_if_all_processes_are_told(
    tmp_path: Path, models: dict[str, Path], expected: list[str]
):
    """As systemd ends a unit: SIGTERM to the server and to each worker."""
    with workers(tmp_path, models, "prefill=1,decode=1") as (server, address, _):
        streams = [Stream(address, prompt) for prompt in PROMPTS]
        for stream in streams:
            stream.wait_for_text()
        for pid in (pid_of(server, 0), pid_of(server, 1), server.pid):
            os.kill(pid, signal.SIGTERM)
        for stream, text in zip(streams, expected, strict=True):
            stream.join(DEADLINE_S)
            assert (stream.text, stream.finish) == (text, "length")
        assert server.wait(60) == 0


@pytest.mark.slow
def test_adaptive_steps_are_reloaded_in_the_workers(tmp_path: Path, models: dict[str, Path], expected: list[str]):
    table, record = tmp_path / "table.json", tmp_path / "record"
    table.write_text('{"1": {"candidate_steps": [1, 3]}}')
    options = ["--adaptive", str(table), "--policy", "ema", "--record", str(record)]
    with workers(tmp_path, models, "prefill=1,decode=1", *options) as (server, address, log):
        for text, words in (
            ('{"1": {"candidate_steps": [2, 7]}}', "stays as it was"),
            ('{"1": {"candidate_steps": [3]}}', "was read again"),
        ):
            table.write_text(text)
            server.send_signal(signal.SIGHUP)
            wait_for(log, words, server)
        asked = {**ASKED, "prompt": PROMPTS[0]}
        answer = httpx.post(f"{address}/v1/completions", json=asked, timeout=DEADLINE_S).json()
        assert answer["choices"][0]["text"] == expected[0]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    (folder,) = recorded(record)
    assert '"t":"reload"' in (folder / "decode0" / "events.jsonl").read_text()
    done = CliRunner().invoke(app, ["audit", "--replay", str(folder / "decode0")])
    assert done.exit_code == 0 and "decisions identical" in done.output, done.output


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2], ids=["a prefill worker", "a decode worker"])
def test_streams_outlive_a_worker_under_load(tmp_path: Path, models: dict[str, Path], expected: list[str], lost: int):
    """Forty streams, many of which leave; afterwards nothing of them is held."""
    with workers(tmp_path, models, "prefill=2,decode=2", "--max-running", "8") as (server, address, _):
        streams = [Stream(address, PROMPTS[i % 6], leave_after=9 if i % 3 == 0 else None) for i in range(40)]
        wait_until(lambda: sum(bool(stream.text) for stream in streams) > 10)
        os.kill(pid_of(server, lost), signal.SIGKILL)
        for number, stream in enumerate(streams):
            stream.join(DEADLINE_S)
            whole = expected[number % 6]
            assert not stream.error and (whole.startswith(stream.text) if number % 3 == 0 else stream.text == whole)
        wait_until(lambda: total(address, "num_requests_running") == 0 and total(address, "kv_cache_usage_perc") == 0)
        assert httpx.get(f"{address}/load").json() == {"server_load": 0}
