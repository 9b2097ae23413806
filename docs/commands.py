"""Runs what README and the tutorial show, as a reader of a fresh clone would, and writes what the commands print into
the documents.

    python docs/commands.py                       # `make docs` runs it
    python docs/commands.py Serve                 # only the sections whose heading has this word
    python docs/commands.py docs/properties.md    # another document, in an empty folder, with this Python

What is fenced as `sh` is one bash script, `console` has commands behind `$` and what they print, `python` is a program,
and a block `text` right behind it is what it prints. A comment before the fence says what is special:
`<!-- varies -->`, since the output has durations or rates of this machine, which then are not compared;
`<!-- exit 1 -->`, since the command ends with that code; `<!-- file blocks.py -->`, since the block is this file and no
program; `<!-- needs torch -->` and `<!-- nightly -->`, since it runs only where that can be imported, or at night. The
wheels that a command names are those of the folder FOREDRAFT_WHEELS.

A line `…` of an output stands for lines that are left out. An output that differs is written whole.

Every section (`##`) that installs something has a fresh environment, which the sections after it keep. It has the
versions of constraints.txt, so that the outputs do not change with every release of a library. Nothing but
`pip install` reaches the network. Standard error, where the commands show progress, is not part of what a document
shows.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/tutorial.md")
NOTE = r"(?:varies|nightly|exit \d+|(?:file|needs) \S+?)"
FENCE = re.compile(
    rf"(?:^<!-- (?P<note>{NOTE}(?:, {NOTE})*) -->\n)?"
    r"^```(?P<language>sh|console|python|text)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LEFT_OUT = "…"
DURATION = re.compile(r"\d[\d.,]*(?= (?:s|ms|per second)\b)")
LIMIT_S = 900
TUTORIAL = Path("runs", "tutorial")  # what the tutorial's commands write; docs/pictures.py draws it
# Python's own sockets reach this machine alone; `pip install` runs without it.
NO_NETWORK = """
import os, socket
if os.environ.get("NO_NETWORK"):
    def only_here(function, place):
        def call(*arguments, **settings):
            host = arguments[place][0] if isinstance(arguments[place], tuple) else arguments[place]
            if host not in (None, "localhost", "") and not str(host).startswith(("127.", "::1", "/", "\\0")):
                raise OSError(f"{host} must not be reached: the documents run without the network")
            return function(*arguments, **settings)
        return call
    socket.socket.connect = only_here(socket.socket.connect, 1)
    socket.socket.connect_ex = only_here(socket.socket.connect_ex, 1)
    socket.getaddrinfo = only_here(socket.getaddrinfo, 0)
"""


@dataclass(frozen=True)
class Command:
    """One thing that a document runs. `shown` is the output beside it, None where the document shows none."""

    document: str
    line: int
    section: str  # the heading `##` above
    program: tuple[str, ...]  # the interpreter; `code` follows
    code: str
    shown: str | None
    varies: bool
    code_expected: int
    is_nightly: bool = False
    needs: str = ""  # a module

    @property
    def name(self) -> str:
        return f"{self.document}:{self.line} {self.code.splitlines()[0][:60]}"

    @property
    def installs(self) -> bool:
        return self.code.startswith("pip install")

    def problem(self, done: subprocess.CompletedProcess[str]) -> str:
        """Return what differs from the document, empty if nothing does."""
        if done.returncode != self.code_expected:
            ends = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            return f"{self.name}: exit code {done.returncode}, expected {self.code_expected}\n{ends}"
        if self.shown is None or is_shown(form(done.stdout, self.varies), form(self.shown, self.varies)):
            return ""
        return f"{self.name}: run docs/commands.py; it prints\n{done.stdout}\nwhere the document has\n{self.shown}"


def form(text: str, varies: bool) -> list[str]:
    """Return what is compared of an output: its lines, of one that varies with # for durations and rates, and one
    space for several. All other numbers are compared."""
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    return [re.sub(r"\s+", " ", DURATION.sub("#", line)) for line in lines] if varies else lines


def is_shown(printed: list[str], shown: list[str]) -> bool:
    """Return whether a document shows what was printed. A line `…` stands for any lines that it leaves out."""
    at, may_skip = 0, False
    for line in shown:
        if line == LEFT_OUT:
            may_skip = True
            continue
        if may_skip and line in printed[at:]:
            at = printed.index(line, at)
        if at == len(printed) or printed[at] != line:
            return False
        at, may_skip = at + 1, False
    return may_skip or at == len(printed)


def commands_of(document: str, text: str) -> list[Command]:
    """Return everything that a document runs, in order."""
    found: list[Command] = []
    ends_at = 0  # of the block before
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start("code")) + 1
        note, language, code = block["note"] or "", block["language"], block["code"]
        expected = re.search(r"exit (\d+)", note)
        common = {
            "document": document,
            "section": ["", *re.findall(r"^## (.*)$", text[: block.start()], re.MULTILINE)][-1],
            "varies": "varies" in note,
            "code_expected": int(expected[1]) if expected else 0,
            "is_nightly": "nightly" in note,
            "needs": _noted(note, "needs"),
        }
        if language == "text":
            if found and found[-1].program == PYTHON and not text[ends_at : block.start()].strip():
                found[-1] = replace(found[-1], shown=code, varies=common["varies"])
        elif language == "console":
            for at, command, shown in _typed(code):
                found.append(Command(line=line + at, program=BASH, code=command, shown=shown, **common))
        else:
            program = PYTHON if language == "python" else BASH
            if file := _noted(note, "file"):
                program = (*WRITE, file)
            found.append(Command(line=line, program=program, code=code, shown=None, **common))
        ends_at = block.end()
    return found


BASH = ("bash", "-e", "-o", "pipefail", "-c")
PYTHON = ("python", "-c")
WRITE = (*PYTHON, "import sys; open(sys.argv[1], 'w', encoding='utf-8').write(sys.argv[2])")


def _noted(note: str, word: str) -> str:
    """Return what follows a word of a note, empty if it has none."""
    found = re.search(rf"{word} ([^,\s]+)", note)
    return found[1] if found else ""


def _typed(block: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, command and output of each command of a block `console`."""
    lines = block.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        last = start
        while lines[last].rstrip("\n").endswith("\\"):
            last += 1
        yield start, "".join(lines[start : last + 1])[2:], "".join(lines[last + 1 : end])


class Reader:
    """Someone who has cloned the project into `folder` and goes through its documents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clone = folder / "foredraft"  # as `git clone` calls it
        self._environment = folder / "environment"
        self._home = folder / "home"
        self._home.mkdir()
        self._installed_for: tuple[str, str] | None = None
        names = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(names, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():  # else it is deleted, and the next commit says so
                (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.clone / name)

    def run(self, command: Command) -> subprocess.CompletedProcess[str]:
        """Run a command at the root of the clone, an install line in an environment of its section."""
        place = (command.document, command.section)
        if command.installs and self._installed_for != place:
            self._installed_for = place
            shutil.rmtree(self._environment, ignore_errors=True)
            venv.create(self._environment, with_pip=True)
            (packages,) = self._environment.glob("lib/python*/site-packages")
            (packages / "no_network.py").write_text(NO_NETWORK)
            (packages / "no_network.pth").write_text("import no_network\n")
        assert self._environment.is_dir(), f"{command.name}: a section above it installs what it needs; run that, too"
        return run_alone((*command.program, command.code), self.clone, self._variables(command.installs))

    def _variables(self, installs: bool) -> dict[str, str]:
        """Return the environment's variables: those of this process without what belongs to its Python and its
        settings. Only an install has its home, where pip may have its own settings, such as where it finds packages."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "FOREDRAFT", "PYTEST", "COV_"))
            and name not in ("VIRTUAL_ENV", "OMP_NUM_THREADS")
        }
        paths = [path for path in kept["PATH"].split(os.pathsep) if path != str(Path(sys.executable).parent)]
        kept["PATH"] = os.pathsep.join([str(self._environment / "bin"), *paths])
        kept |= {"COLUMNS": "80", "NO_COLOR": "1"}
        if installs:
            return kept | {"PIP_CONSTRAINT": str(self.clone / "constraints.txt")}
        own = {name: value for name, value in kept.items() if not name.startswith(("XDG_", "HF_", "TRITON_"))}
        return own | {"HOME": str(self._home), "NO_NETWORK": "1"}


def run_alone(
    words: tuple[str, ...], folder: Path, variables: dict[str, str], limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run a program that gets no input. When it ends or `limit_s` have passed, what it started in the background
    ends, too: a server that a script left behind would hold its port."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
    ):
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        late = ""
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = f"ended after {limit_s:g} s, its limit\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, process.returncode, out.read(), errors.read() + late)


def run_here(command: Command, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder with the Python and the environment of this process. Raises FileNotFoundError for a
    wheel that FOREDRAFT_WHEELS does not have."""
    for name in re.findall(r"\S+\.whl", command.code):
        wheel = Path(os.environ.get("FOREDRAFT_WHEELS", os.devnull), name)
        if not wheel.is_file():
            raise FileNotFoundError(f"{name} is not in FOREDRAFT_WHEELS")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(wheel)
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FOREDRAFT", "PYTEST"))}
    surroundings = {**kept, "PATH": programs, "COLUMNS": "80", "NO_COLOR": "1"}
    return run_alone((*command.program, command.code), folder, surroundings)


def rewritten(text: str, command: Command, output: str) -> str:
    """Return the document's text with this output beside the command."""
    assert command.shown is not None
    shown = "".join(f"{line.rstrip()}\n" for line in output.rstrip().splitlines())
    typed = f"$ {command.code}" if command.program == BASH else f"{command.code}```\n\n```text\n"
    assert text.count(typed + command.shown) == 1, f"{command.name}: shown more than once"
    return text.replace(typed + command.shown, typed + shown)


def main() -> None:
    """Run the documents and rewrite the outputs that differ.
    A command that fails ends it, after what came before is written."""
    documents = [word for word in sys.argv[1:] if word.endswith(".md")]
    sections = [word for word in sys.argv[1:] if word not in documents]
    with tempfile.TemporaryDirectory(prefix="foredraft-documents-") as folder:
        reader, page = Reader(Path(folder)), Path(folder, "page")
        page.mkdir()
        for document in documents or DOCUMENTS:
            path = ROOT / document
            for command in commands_of(document, path.read_text(encoding="utf-8")):
                if not any(word in command.section for word in sections or [""]):
                    continue
                print(command.name, flush=True)
                done = reader.run(command) if document in DOCUMENTS else run_here(command, page)
                if command.problem(done) and command.shown is not None and done.returncode == command.code_expected:
                    path.write_text(rewritten(path.read_text(encoding="utf-8"), command, done.stdout), encoding="utf-8")
                elif problem := command.problem(done):
                    sys.exit(problem)
        if (reader.clone / TUTORIAL).is_dir():
            shutil.copytree(reader.clone / TUTORIAL, ROOT / TUTORIAL, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
