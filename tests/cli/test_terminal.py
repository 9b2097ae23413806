"""What surrounds the command: encodings, narrow terminals, readers that stop, Ctrl-C while it starts,
shell completion."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys

import pytest
import typer
from foredraft.cli.app import app

SMALL = ("--set", "workload.num_requests=40", "--set", "workload.rate=40", "--quiet")
COMMANDS = typer.main.get_command(app).commands
BRACKETS = re.compile(r"\[[^\]]+\]")


def texts_of(command) -> list[str]:
    """The texts of a command's help."""
    return [command.help, *(parameter.help for parameter in command.params)]


STATISTICS = ("mean", "median", "p90", "p95", "p99")


@pytest.mark.fast("C locale")
@pytest.mark.parametrize(
    "env",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["ascii", "C locale"],
)
def test_an_output_that_is_not_utf8_gets_similar_characters(process, env):
    out, err = process("simulate", *SMALL, env={"PYTHONIOENCODING": "", "COLUMNS": "80", **env}).communicate()
    assert "Traceback" not in err and out.isascii()
    assert re.search(r"^running +[_.,+*#=-]{20,}", out, re.MULTILINE), "the timeline is drawn in ASCII"
    assert re.search(r"prefix cache hits +-$", out, re.MULTILINE), "a value that is not there is a dash"
    assert "?" not in out


def test_an_error_can_be_read_in_ascii(command, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert command("simulate", "--set", "name='é – x'", "--set", "hardware.gpu=H10é").code == 2
    assert written.getvalue().startswith(b"foredraft: --set: hardware.gpu: ") and written.getvalue().isascii()


@pytest.mark.fast("30", "60")
@pytest.mark.parametrize("width", [30, 40, 60, 79])
def test_a_narrow_terminal_shows_every_number(command, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", "80")
    wide = command("simulate", *SMALL).out
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = command("simulate", *SMALL).out
    assert max(map(len, narrow.splitlines())) <= width and "…" not in narrow
    numbers = {
        number
        for line in wide.splitlines()
        if re.match(r"(TTFT|TPOT|ITL|E2EL), ", line)
        for number in line.split()[-len(STATISTICS) :]
    }
    assert len(numbers) > 15 and numbers <= set(narrow.split())
    for word in ("KV slots", "decode rounds", "p95", "p99"):
        assert word in narrow
    assert ("needs 44 columns" in narrow) == (width < 44), "what is left out is said"


@pytest.mark.parametrize("name", [name for name, one in COMMANDS.items() if BRACKETS.search(" ".join(texts_of(one)))])
def test_the_help_has_its_brackets(command, name):
    """Words in brackets, such as `[slo]`, are no markup."""
    out = re.sub(r"[│\s]", "", command(name, "--help").out)
    for word in BRACKETS.findall(" ".join(texts_of(COMMANDS[name])).replace("\\[", "[")):
        assert re.sub(r"\s", "", word) in out


@pytest.mark.fast("help", ci="a run")
@pytest.mark.parametrize(
    "arguments",
    [("simulate", *SMALL), ("simulate", "--schema", "scenario"), ("simulate", "--help"), ("check", "--list")],
    ids=["a run", "schema", "help", "list"],
)
def test_a_reader_that_stops_is_no_failure_of_the_command(process, arguments):
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    running = process(*arguments, stdout=reader.stdin)
    reader.stdin.close()
    reader.wait()
    assert running.wait() == 141, "128 + SIGPIPE; 1 would mean a broken promise"
    assert running.stderr.read() == ""


def test_an_output_without_room_is_one_message(process):
    with open("/dev/full", "w") as full:
        running = process("simulate", "--schema", "scenario", stdout=full)
        assert running.wait() == 2
    assert running.stderr.read().splitlines() == ["foredraft: the output cannot be written: No space left on device"]


IMPORT_INTERRUPTED = """
import os, sys
from foredraft.cli import __main__
module, sys.argv[1:] = sys.argv[1], ["simulate", "--quiet"]
class Finder:
    def find_spec(self, name, path, target=None):
        if name == module:
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Finder())
__main__.main()
"""


@pytest.mark.fast("foredraft.core.errors", "typer", "numpy")
@pytest.mark.parametrize("module", ["foredraft.core.errors", "foredraft.cli.app", "typer", "pydantic", "numpy"])
def test_ctrl_c_during_an_import_is_exit_code_130(process, module):
    running = process(module, code=IMPORT_INTERRUPTED)
    assert running.wait() == 130
    out, err = running.communicate()
    assert out == "" and "Traceback" not in err


def test_ctrl_c_that_is_ignored_stays_ignored(process):
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{IMPORT_INTERRUPTED}"
    running = process("foredraft.cli.app", code=code.replace('"simulate", "--quiet"', '"--version"'))
    assert running.wait() == 0


def test_the_handler_of_ctrl_c_is_the_one_of_before(command):
    before = signal.getsignal(signal.SIGINT)
    assert command("--version").code == 0
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.fast("bash")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_the_command(process, shell):
    out, err = process(env={"_FOREDRAFT_COMPLETE": f"source_{shell}"}).communicate()
    assert "foredraft" in out and err == ""


def test_completion_offers_the_subcommands(process):
    env = {"_FOREDRAFT_COMPLETE": "complete_bash", "COMP_WORDS": "foredraft si", "COMP_CWORD": "1"}
    assert process(env=env).communicate()[0].split() == ["simulate"]


SETTINGS = {
    "simulate --set engine.page_s": ["engine.page_size="],
    "doctor --set hardware.gpu=H1": ["hardware.gpu=H100"],
    "doctor --set hardware.decode.gpu=RTX4": ["hardware.decode.gpu=RTX4090"],
    "plan --try hardware.server=foredr": ["hardware.server=foredraft"],
    "sweep --grid model.draft=llama-3.2-": ["model.draft=llama-3.2-1b", "model.draft=llama-3.2-3b"],
    "bench --twin --set engine.mode=": ["engine.mode=overlap", "engine.mode=synchronous"],
    "tune --set seed=1 --set engine.prefix_cache=t": ["engine.prefix_cache=true"],
    "plan --set workload.rate=": [],
    "plan --set hardware.gpu.x=": [],
}
"""Words of a command -> what completes the last."""


@pytest.mark.parametrize("line", SETTINGS)
def test_shells_complete_keys_and_names(line, command, monkeypatch):
    """Bash makes three words of KEY=VALUE, or two where the value is empty, and takes the value alone."""
    monkeypatch.setenv("_FOREDRAFT_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"foredraft {line}")
    assert command().out.split() == SETTINGS[line]
    words = [one for one in re.split(r"\s|(=)", f"foredraft {line}") if one]
    monkeypatch.setenv("_FOREDRAFT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setenv("_FOREDRAFT_KEY", "")
    key, equals, _ = line.split()[-1].partition("=")
    assert command().out.split() == [one.removeprefix(f"{key}=") if equals else one for one in SETTINGS[line]]


@pytest.mark.parametrize("kind", ["gpus", "models", "servers"])
def test_names_are_listed(command, refused, kind):
    from foredraft.cli.names import names_of

    assert command("simulate", "--list", kind).out.splitlines() == names_of(kind) and len(names_of(kind)) > 4
    assert f"did you mean '{kind}'?" in refused("simulate", "--list", kind[:-1])
