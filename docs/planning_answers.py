"""Run the commands of docs/evidence/planning-answers.md on a trace, and show or store their output.

    python docs/planning_answers.py AzureLLMInferenceTrace_conv.csv [--write] [NAME …]

An answer in the document is a console block below the comment `<!-- answer NAME -->`. Its lines that begin with $ are
the commands. With --write the script puts the present output below each command. It keeps the runs in runs/answers:
after Ctrl-C the same command continues.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "evidence" / "planning-answers.md"
ANSWER = re.compile(r"(<!-- answer (?P<name>[\w-]+) -->\n```console\n)(?P<block>.*?)(?=```\n)", re.DOTALL)
MISSING = "not on this page yet"
"""Marks the paragraph above an answer without output; the script deletes that paragraph when it writes the output."""
TRACE = "AzureLLMInferenceTrace_conv.csv"
"""The name that the document's commands give the trace."""


def commands(block: str) -> list[str]:
    """Return the commands of a console block: lines that begin with $, with their continuation lines."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE)


def output(command: str, trace: Path) -> str:
    """Run a command of the document and return its output. Exits if the command fails."""
    words = [str(trace) if word == TRACE else word for word in shlex.split(command.replace("\\\n", " "))]
    program = {"python": [sys.executable], "foredraft": [sys.executable, "-m", "foredraft.cli"]}[words[0]]
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command}\nended with exit code {done.returncode}\n{done.stdout}")
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "trace", type=Path, help="the Azure conversation trace, or another that `foredraft trace` reads"
    )
    parser.add_argument("names", nargs="*", help="answers to give; default: all")
    parser.add_argument("--write", action="store_true", help="put the answers into docs/evidence/planning-answers.md")
    given = parser.parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    answers = {found["name"]: found["block"] for found in ANSWER.finditer(text)}
    for name in given.names or answers:
        if name not in answers:
            sys.exit(f"{name}: there is no such answer; expected {', '.join(answers)}")
        parts = []
        for command in commands(answers[name]):
            parts.append(f"$ {command}\n{output(command, given.trace.resolve())}\n")
            print(parts[-1], flush=True)
        if given.write:
            block = "\n".join(parts)
            text = ANSWER.sub(
                lambda found, name=name, block=block: found[1] + (block if found["name"] == name else found["block"]),
                text,
            )
            text = re.sub(rf"[^\n]*{MISSING}[^\n]*\n\n(?=<!-- answer {name} -->)", "", text)
            DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
