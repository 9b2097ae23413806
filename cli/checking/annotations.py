"""What a failed check says to GitHub Actions: a workflow command, which marks the component in a pull request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...properties.harness.report import Report


def error_commands(report: Report, make: Callable[[Any], Any], replay: Mapping[str, str]) -> list[str]:
    """Return a line `::error …` for each failure that was not announced, and one for all other reasons.

    `replay`: invariant -> the command that runs its case again.
    """
    place = _place_of(make)
    lines = []
    for failure in (*report.failures, *report.disputed):
        found = failure.finding
        text = [failure.sentence, f"at {failure.ends_in}", f"was {found.was}", f"should {found.should}"]
        text.append(replay.get(failure.id, ""))
        lines.append(_command(place, f"{failure.id} {report.subject}", "\n".join(text).rstrip()))
    if not lines and not report.ok:
        lines.append(_command(place, report.subject, "; ".join(report.reasons())))
    return lines


def _command(place: dict[str, object], title: str, text: str) -> str:
    properties = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in {**place, "title": title}.items())
    return f"::error {properties}::{_escaped(text)}"


def _escaped(text: str, more: str = "") -> str:
    return "".join(f"%{ord(letter):02X}" if letter in "%\r\n" + more else letter for letter in text)


def _place_of(make: Callable[[Any], Any]) -> dict[str, object]:
    """Return file and line of a component: of its class or function, relative to the current directory if it stands
    there. Nothing of one without a source."""
    code: Any = inspect.unwrap(make)
    while isinstance(code, partial):
        code = inspect.unwrap(code.func)
    if not (inspect.isclass(code) or inspect.isroutine(code)):
        code = type(code)
    try:
        file, line = Path(inspect.getsourcefile(code) or "").resolve(), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return {}
    return {
        "file": (file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file).as_posix(),
        "line": line,
    }
