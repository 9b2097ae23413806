"""Commands whose target is divided among ranks: their text, their end, and a server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path

import pytest
from small_checkpoint import write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("model") / "target")


def members_of(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(its_group) == group and state != "Z":
                found.append(int(entry.name))
    return found


@pytest.fixture
def start():
    """Starts commands in groups of processes of their own, which end with the test."""
    started = []

    def command(name: str, target: Path, *options: str) -> subprocess.Popen:
        words = (sys.executable, "-P", "-m", "foredraft", name, "--model", str(target), "--device", "cpu")
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*words, "--tensor-parallel", "2", *options], stdout=pipe, stderr=pipe, start_new_session=True, text=True
        )
        started.append(process)
        return process

    yield command
    for process in started:
        for pid in members_of(process.pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_command_prints_the_text_of_one_process(target, start):
    texts = []
    for ranks in ("1", "2"):
        process = start(
            "generate",
            target,
            "--prompt",
            "def add",
            "--max-tokens",
            "12",
            "--dtype",
            "float64",
            "--tensor-parallel",
            ranks,
        )
        text, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        texts.append(text)
        assert not members_of(process.pid)
    assert texts[0] == texts[1] != ""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_command_leaves_no_process(number, target, start):
    length = ("--max-tokens", "200", "--context-len", "250", "--ignore-eos")
    process = start("generate", target, "--prompt", "def add", *length)
    assert process.stdout is not None and process.stdout.read(1), "it has begun to print"
    assert len(members_of(process.pid)) == 3
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)
    process.communicate(timeout=120)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    for _ in range(600):
        if not members_of(process.pid):
            return
        time.sleep(0.1)
    pytest.fail(f"still there: {members_of(process.pid)}")


@pytest.mark.slow
def test_a_server_of_ranks_answers_and_ends_with_the_rank_that_dies(target, start):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start("serve", target, "--context-len", "100", "--port", str(port))

    def ask() -> bytes:
        body = json.dumps({"prompt": "def add", "max_tokens": 8, "temperature": 0}).encode()
        address = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=60).read()

    answer = None
    while answer is None and process.poll() is None:
        try:
            answer = ask()
        except OSError:  # it does not listen yet
            time.sleep(0.5)
    assert answer is not None and json.loads(answer)["usage"]["completion_tokens"] == 8
    of_ranks = [p for p in members_of(process.pid) if b"session.rank" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(of_ranks) == 2
    os.kill(of_ranks[1], signal.SIGKILL)
    with pytest.raises((OSError, HTTPException)):
        ask()
    text = "".join(process.communicate(timeout=120))
    assert process.returncode and "was killed by SIGKILL; the session is over" in text, text
    until_s = time.monotonic() + 60  # Python's own helper processes end after the server
    while members_of(process.pid) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not members_of(process.pid)
