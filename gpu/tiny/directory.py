"""The directory of a pair, which exists only when it is complete; parts are made in another directory beside it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, Problem
from .sizes import TinySize

FORMAT = 1  # rises when the same options would give another pair
SUMMARY = "pair.json"
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class PairOptions:
    """All that decides what the pair is. The device does not: it changes no more than the last bits."""

    size: TinySize
    seed: int = 0
    time_budget_s: float | None = None  # a pair of a budget depends on the machine's speed

    @property
    def digest(self) -> str:
        """Hexadecimal, the same for equal options."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def described(self) -> str:
        budget = "" if self.time_budget_s is None else f", time budget {self.time_budget_s:g} s"
        return f"size {self.size.name}, seed {self.seed}{budget}"


def read_summary(directory: Path, options: PairOptions) -> dict[str, Any] | None:
    """Return the summary of the pair in `directory` if it is there and has these options; None if there is nothing.

    Raises ConfigError if something else is there: nothing of the user's is ever overwritten.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    expected = f"expected an empty directory, none, or a pair of {options.described}"
    if not directory.is_dir():
        raise ConfigError(str(directory), [Problem("", f"is a file; {expected}")])
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        digest, described = summary["digest"], summary["described"]
    except FileNotFoundError:
        names = sorted(path.name for path in directory.iterdir())
        found = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ConfigError(str(directory), [Problem("", f"has something else in it ({found}); {expected}")]) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            str(directory / SUMMARY), [Problem("", f"is not the summary of a pair; {expected}")]
        ) from error
    if digest != options.digest:
        other = described if described != options.described else f"{described}, made by another version"
        raise ConfigError(str(directory), [Problem("", f"has another pair in it ({other}); {expected}")])
    return summary


def partial_directory(directory: Path, options: PairOptions) -> Path:
    """Return where the pair is being made."""
    return directory.with_name(f"{directory.name}.partial-{options.digest}")


@contextmanager
def making(directory: Path, options: PairOptions) -> Iterator[Path]:
    """Yield the partial directory, held by this process alone; others wait here and then find the pair.

    What was finished stays when the body raises, so that another run goes on from there.
    """
    partial = partial_directory(directory, options)
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(str(partial), [Problem("", f"cannot be made: {error.strerror or error}")]) from error
    with (partial / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield partial
        finally:
            for leftover in sorted(partial.glob("*.tmp")):
                shutil.rmtree(leftover)
            if partial.exists() and [path.name for path in partial.iterdir()] == [LOCK]:
                shutil.rmtree(partial)


@contextmanager
def writing_part(partial: Path, part: str) -> Iterator[Path]:
    """Yield a directory to write the part into; it gets its name when the body has come to its end."""
    temporary = partial / f"{part}.tmp"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    yield temporary
    temporary.rename(partial / part)


def publish(partial: Path, directory: Path, summary: dict[str, Any]) -> None:
    (partial / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (partial / LOCK).unlink()
    partial.rename(directory)
