"""What a component prints while it is checked: it may be megabytes, and stands in no report or document."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

MAX_KEPT = 200
"""Characters that are kept."""


class Printed(io.TextIOBase):
    """Counts what is written, and keeps its beginning."""

    def __init__(self) -> None:
        self.num_characters: int = 0
        self.beginning: str = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.num_characters += len(text)
        self.beginning += text[: MAX_KEPT - len(self.beginning)]
        return len(text)

    def line(self) -> str:
        """Return what a report says about it, empty if nothing was printed."""
        if not self.num_characters:
            return ""
        return (
            f"\nprinted by the component, and not shown: {self.num_characters:,} characters, first {self.beginning!r}"
        )


@contextmanager
def held_back() -> Iterator[Printed]:
    """Hold back what is printed to Python's standard output meanwhile."""
    printed = Printed()
    with redirect_stdout(printed):
        yield printed
