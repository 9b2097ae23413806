"""Run the command, inside this process or in another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest
import typer.main
import typer.testing
from foredraft.cli.__main__ import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session", autouse=True)
def built_once() -> Iterator[None]:
    """Build the commands once: Typer does so again with each call, which takes as long as many a test."""
    built = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", built)
        patch.setattr(typer.testing, "_get_command", built)
        yield


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., Outcome]:
    """`command("simulate", …)` in this process."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["foredraft", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(command) -> Callable[..., str]:
    """`refused("simulate", …)`: the message of a command that must end with exit code 2 and print nothing else."""

    def message(*arguments: object) -> str:
        outcome = command(*arguments)
        assert (outcome.code, outcome.out) == (2, ""), outcome
        assert outcome.err.startswith(("foredraft: ", "Usage: foredraft ")) and "Traceback" not in outcome.err, outcome
        return outcome.err

    return message


@pytest.fixture
def process() -> Callable[..., subprocess.Popen[str]]:
    """`process("simulate", …)` starts another process;
    `env` adds to its environment, `code` runs instead of the command."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: object,
        env: dict[str, str] | None = None,
        code: str = "from foredraft.cli.__main__ import main; main()",
        **options,
    ) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", code, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(line, env={**os.environ, **(env or {})}, **{**pipes, **options}))
        return started[-1]

    yield start
    for running in started:
        if running.poll() is None:
            running.kill()
        running.communicate()
