"""What the readers of all methods share: lists of exceptions, and expressions that must be readable."""

from __future__ import annotations

import re

from ...parsing import ConfigReader
from .beside import OF_PARTS
from .scheme import FormatEntry, Tier

KEPT = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "exclude", "llm_int8_skip_modules")


def kept(config: ConfigReader, *, is_loose: bool = False) -> Tier:
    """Return the matrices that are named as not quantized."""
    entries: list[FormatEntry] = []
    whole = OF_PARTS.split()
    for key in KEPT:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            config.problem(key, f"must be a list of names, got {value!r:.60}")
            continue
        for name in value:
            is_part = is_loose and name not in whole and not set("*?") & set(name) and not name.endswith(".weight")
            if is_readable(config, key, name):
                entries.append(FormatEntry(key, name, None, "the exceptions", is_part))
    return Tier(tuple(entries))


def is_readable(config: ConfigReader, key: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            config.problem(key, f"{pattern!r} is no expression: {error}")
            return False
    return True
