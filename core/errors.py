"""Typed errors. Bad input is a `ForedraftError` that names the thing;
a contradiction inside is an `InvariantViolation`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

MAX_SHOWN = 80  # characters of a wrong value in a message


class ForedraftError(Exception):
    """Base of every error that a user can cause. The command line prints it and exits with code 2."""


class InvalidRequest(ForedraftError):
    """A request that is refused at the door; the message says the number that was expected."""


class KVPoolExhausted(ForedraftError):
    """An allocation asked for more slots than are free. The allocator's state is unchanged."""


class InvalidFree(ForedraftError):
    """Slots were freed that are not held, are not whole pages, or occur twice. The allocator's state is unchanged."""


class InvariantViolation(AssertionError):
    """The program contradicts itself: `invariant` is the id in the catalogue of invariants (for example ALLOC-10)."""

    def __init__(self, invariant: str, message: str) -> None:
        # `args` are the constructor's own, so that an error can be copied, as SimPy does when a process raises it.
        super().__init__(invariant, message)
        self.invariant = invariant
        self.message = message

    def __str__(self) -> str:
        return f"{self.invariant}: {self.message}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with an input: where it stands, what was found, what was expected.

    `key` is a dotted path ("engine.page_size"), a line ("line 12") or "" for the input as a whole.
    """

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigError(ForedraftError):
    """One input (a file, or `<arguments>`) with all its problems at once."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        problems = tuple(problems)
        assert problems, "a ConfigError without a problem"
        super().__init__(source, problems)  # `args` are the constructor's own, so that an error can be copied
        self.source = source
        self.problems = problems

    @classmethod
    def of(cls, source: str, key: str, message: str) -> Self:
        """Return the error of an input with one problem."""
        return cls(source, [Problem(key, message)])

    def __str__(self) -> str:
        return "\n".join(f"{self.source}: {problem}" for problem in self.problems)


def shown(value: object) -> str:
    """Return a wrong value for a message: its `repr`, cut off if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun for a message: "1 row", "1,585 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return a hint for a misspelt key: ` (did you mean 'x'?)`, or an empty string if no key is that similar (difflib's
    ratio)."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest_name(word: str, known: Iterable[str]) -> str:
    """Return a hint like that of `nearest`, for models and devices: a name with another number or another word is
    another thing.

    A repeated digit that is missing or typed twice counts as a typing error: 'H10' is near 'H100'.
    """
    return nearest(word, [name for name in known if _are_slips(word, name)])


def _parts(name: str) -> tuple[list[str], list[str]]:
    """Return the numbers, with repeated digits once, and the words of a name.
    Single letters, such as units, do not count."""
    numbers = [re.sub(r"(\d)\1+", r"\1", number) for number in re.findall(r"\d+", name)]
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]{2,}", name)
    return numbers, [word.lower() for word in words if len(word) > 1]


def _are_slips(word: str, name: str) -> bool:
    (numbers, words), (other_numbers, other_words) = _parts(word), _parts(name)
    if numbers != other_numbers or len(words) != len(other_words):
        return False
    return all(
        difflib.SequenceMatcher(None, mine, theirs).ratio() >= 0.75
        for mine, theirs in zip(words, other_words, strict=True)
    )
