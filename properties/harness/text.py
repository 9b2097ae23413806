"""Values of a trial as short text, the same in every process."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_SHOWN_ITEMS = 6
MAX_PLAIN = 2_000
PLAIN = (int, float, str, list, tuple, dict, set, frozenset)
"""Types of plain data, which is shown whole up to MAX_PLAIN characters if there is no array in it."""


def shortened(value: object, length: int) -> str:
    """Return a value in at most `length` characters, or whole if it is plain data: of a larger array only type and
    shape, of an object no address."""
    if getattr(value, "size", 0) > MAX_SHOWN_ITEMS and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))
    if isinstance(value, PLAIN) and not re.search(r"array\(|tensor\(|=<", text):
        length = max(length, MAX_PLAIN)
    return text if len(text) <= length else text[: length - 1] + "…"


def shown(value: object) -> str:
    """Return type and `repr` of a value that is no answer, cut after 77 characters: it may be anything."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '…'}"


def listed(numbers: Sequence[int], most: int = 12) -> str:
    """Return the first `most` numbers, and how many there are if these are not all."""
    text = ", ".join(map(str, numbers[:most]))
    return f"[{text}]" if len(numbers) <= most else f"[{text}, … {len(numbers)} in all]"
