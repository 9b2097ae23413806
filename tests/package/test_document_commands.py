"""docs/commands.py, which runs README and the tutorial:
what it runs of a document, what it compares, what it writes."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import commands as documents
import pytest

ROOT = Path(__file__).resolve().parents[2]

PAGE = """# Page

## First

```sh
pip install '.[sim]'
```

<!-- varies, exit 1, needs torch, nightly -->
```console
$ search \\
    --all
2 of 3 found in 0.5 s
$ search nothing
```

## Second

```python
print(2 + 2)
```

```text
4
```

```toml
not = "run"
```

<!-- file two.py -->
```python
TWO = 2
```
"""


def test_a_document_becomes_commands_with_the_outputs_that_it_shows():
    install, search, nothing, program, file = documents.commands_of("page.md", PAGE)
    assert install.installs and install.shown is None and install.section == "First"
    assert (search.code, search.shown) == ("search \\\n    --all\n", "2 of 3 found in 0.5 s\n")
    assert (search.varies, search.code_expected, nothing.shown) == (True, 1, "")
    assert (program.program[0], program.section, program.shown, program.varies) == ("python", "Second", "4\n", False)
    assert (search.needs, search.is_nightly, program.needs, program.is_nightly) == ("torch", True, "", False)
    assert file.program[-1] == "two.py" and file.code == "TWO = 2\n" and file.shown is None


@pytest.mark.parametrize(
    ("shown", "printed", "varies", "same"),
    [
        ("a 12.5 ms\n", "a 12.5 ms   \n\n", False, True),
        ("a 12.5 ms\n", "a 12.6 ms\n", False, False),
        ("a   12.5 ms\n", "a 1,312 ms\n", True, True),
        ("a 12.5 ms\n", "b 12.5 ms\n", True, False),
        ("a\nb\n", "a\n", True, False),
        ("ALLOC-10 in 0.1 s (15,726 per second)\n", "ALLOC-10 in 12 s (9 per second)\n", True, True),
        ("ALLOC-10 in 0.1 s\n", "ALLOC-03 in 0.1 s\n", True, False),
        ("a 12.5 %\n", "a -12.5 %\n", True, False),
    ],
)
def test_outputs_are_compared_by_line_and_those_that_vary_without_durations_and_rates(shown, printed, varies, same):
    command = documents.Command("page.md", 1, "", ("bash",), "run\n", shown, varies, 0)
    assert (command.problem(subprocess.CompletedProcess((), 0, printed, "")) == "") is same
    assert "exit code 2" in command.problem(subprocess.CompletedProcess((), 2, shown, ""))


def test_only_an_install_has_the_home_of_this_machine(tmp_path, monkeypatch):
    home, mine = tmp_path / "of the user", tmp_path / "of the user" / "cache"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")
    for name in ("PYTHONPATH", "FOREDRAFT_KERNELS", "VIRTUAL_ENV", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(mine))
    reader = documents.Reader(tmp_path)
    installs, runs = reader._variables(installs=True), reader._variables(installs=False)
    assert installs["HOME"] == str(home) and installs["PIP_INDEX_URL"] == "https://example.org/simple"
    assert installs["PIP_CONSTRAINT"] == str(reader.clone / "constraints.txt") and "NO_NETWORK" not in installs
    assert runs["HOME"] == str(tmp_path / "home") and runs["NO_NETWORK"] == "1"
    assert not [name for name, value in runs.items() if value == str(mine)]
    assert "PYTHONPATH" not in installs and "VIRTUAL_ENV" not in installs
    assert str(Path(sys.executable).parent) not in runs["PATH"].split(os.pathsep)


def run_bash(code: str, folder: Path, **limit: float) -> subprocess.CompletedProcess[str]:
    return documents.run_alone(("bash", "-e", "-c", code), folder, dict(os.environ), **limit)


def test_a_command_that_reads_its_input_takes_no_line_of_the_script(tmp_path):
    done = run_bash("cat\necho out\necho error >&2\nfalse\n", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "out\n", "error\n")


@pytest.mark.parametrize(("last", "limit_s", "code"), [("false", 60, 1), ("wait", 1, -signal.SIGKILL)])
def test_what_a_script_left_in_the_background_ends_with_it_or_at_its_limit(tmp_path, last, limit_s, code):
    os.mkfifo(tmp_path / "held")  # reads to its end when no process holds it any more
    reading = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    done = run_bash(f"exec 3> held\nsleep 100 &\necho begun\n{last}\n", tmp_path, limit_s=limit_s)
    assert (done.returncode, done.stdout) == (code, "begun\n")
    assert ("its limit" in done.stderr) is (last == "wait")
    assert select.select([reading], [], [], 30)[0] and os.read(reading, 1) == b""
    os.close(reading)


def test_a_command_runs_in_a_folder_with_the_files_of_its_document(tmp_path, monkeypatch):
    *_, file = documents.commands_of("page.md", PAGE)
    shown = documents.Command("page.md", 1, "", documents.BASH, "ls; cat of.whl two.py\n", "", False, 0)
    assert documents.run_here(file, tmp_path).returncode == 0
    with pytest.raises(FileNotFoundError, match=r"of\.whl is not in FOREDRAFT_WHEELS"):
        documents.run_here(shown, tmp_path)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "of.whl").write_text("wheel\n")
    monkeypatch.setenv("FOREDRAFT_WHEELS", str(tmp_path / "wheels"))
    assert documents.run_here(shown, tmp_path).stdout == "of.whl\ntwo.py\nwheels\nwheel\nTWO = 2\n"


def test_an_output_is_replaced_where_it_stands():
    *_, nothing, program, _ = documents.commands_of("page.md", PAGE)
    text = documents.rewritten(PAGE, nothing, "none \n")
    assert text == PAGE.replace("$ search nothing\n", "$ search nothing\nnone\n")
    assert documents.rewritten(text, program, "5\n") == text.replace("\n4\n", "\n5\n")


@pytest.mark.parametrize(
    ("shown", "is_right"),
    [
        ("a b c d", True),
        ("a … d", True),
        ("… c d", True),
        ("a b …", True),
        ("a … c … d", True),
        ("a b c", False),
        ("a c d", False),
        ("a … e", False),
        ("… b", False),
        ("a … d … c", False),
        ("a b c d e", False),
    ],
)
def test_lines_may_be_left_out_where_it_is_said(shown, is_right):
    assert documents.is_shown(["a", "b", "c", "d"], shown.split()) is is_right


PLANNING = "docs/planning.md"


def repeated(document: str) -> list:
    """Return what a test repeats of a document: programs, and commands with an output. A command reads what the ones
    before have written, so one worker runs all of them."""
    return [
        pytest.param(
            command,
            id=command.name,
            marks=[
                pytest.mark.xdist_group(document),
                *([pytest.mark.slow] if command.is_nightly or document == PLANNING else []),
            ],
        )
        for command in commands_of(document)
        if command.shown is not None or command.program == documents.PYTHON
    ]


def commands_of(document: str) -> list[documents.Command]:
    return documents.commands_of(document, (ROOT / document).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder in which the commands of a document run, by its name. It has the files of the document; planning has
    the examples of a clone."""
    made = {}

    def folder_of(document):
        if document not in made:
            place = tmp_path_factory.mktemp("reader")
            made[document] = documents.Reader(place).clone if document == PLANNING else place
            for command in commands_of(document):
                if command.program[:-1] == documents.WRITE:
                    assert documents.run_here(command, made[document]).returncode == 0
        return made[document]

    return folder_of


@pytest.mark.ci
@pytest.mark.parametrize(
    "command", [*repeated(PLANNING), *repeated("docs/properties.md"), *repeated("docs/contracts.md")]
)
def test_a_document_prints_what_is_shown(command, folders):
    if command.document == PLANNING:
        pytest.importorskip("aiconfigurator_core", reason="needs the extra measured")
    if command.needs:
        pytest.importorskip(command.needs)
    try:
        done = documents.run_here(command, folders(command.document))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    if problem := command.problem(done):
        pytest.fail(problem, pytrace=False)


def test_every_install_line_is_run():
    for document in documents.DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        installs = [command for command in documents.commands_of(document, text) if "pip install" in command.code]
        assert installs and all(re.fullmatch(r"pip install '[^'\n]*'\n", command.code) for command in installs)
        assert text.count("pip install") == len(installs), f"{document}: an install line that nothing runs"


def test_python_of_a_document_reaches_no_network():
    code = (
        f"import os; os.environ['NO_NETWORK'] = '1'\n{documents.NO_NETWORK}\n"
        + """
import socket
listening = socket.create_server(("127.0.0.1", 0))
socket.create_connection(listening.getsockname()).close()
for call in (lambda: socket.create_connection(("192.0.2.1", 80), 5), lambda: socket.getaddrinfo("example.org", 80)):
    try:
        call()
    except OSError as error:
        print(error)
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.count("must not be reached") == 2
