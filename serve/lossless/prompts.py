"""The prompts that endpoints are compared on: built in, or of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_lines

MAX_PROMPTS = 10_000

BUILT_IN: Sequence[str] = (
    "The lighthouse keeper climbed the stairs every evening and",
    "The main reason why bridges expand in summer is",
    "Dear Ms. Alvarez,\n\nThank you for your letter of March 3. I am writing to",
    "Q: Why is the sky blue?\nA:",
    "def fibonacci(n):\n    ",
    "import json\n\n\ndef read_settings(path):\n    with open(path) as file:\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    '{"name": "Ada", "age": 36, "languages": ["en", "fr"]}\n{"name": "Bo", ',
    "<ul>\n  <li>apples</li>\n  <li>bread</li>\n  ",
    "Shopping list:\n- milk\n- eggs\n-",
    "The planets from the sun outward: 1. Mercury\n2. Venus\n3.",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "12 + 7 = 19\n23 + 48 = 71\n156 + 287 =",
    "3.14159265358979",
    "one two one two one two one two one two",
    "A rose is a rose is a rose is a rose is",
    "abcabcabcabcabcabcabcabc",
    "Die Hauptstadt von Frankreich ist Paris. Die Hauptstadt von Italien ist",
    "El río más largo del mundo es",
    "Столица России — это",
    "日本で一番高い山は",
    "العاصمة المصرية هي",
    "🙂 🙃 🙂 🙃 🙂",
    "The",
)
"""Prose, code, lists, numbers, repeated text, other scripts."""


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: its lines, or in a `.jsonl` file their texts or values of `prompt`. Leaves out
    empty lines.

    Raises ConfigError with the line that is no prompt.
    """

    def refused(message: str, number: int = 0) -> ConfigError:
        return ConfigError.of(str(path), f"line {number}" if number else "", message)

    prompts: list[str] = []
    for number, line in enumerate(read_lines(path), 1):
        prompt: Any = line.rstrip("\r\n")
        if not prompt.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                value = parse_json(prompt, long_integers=True)
            except ParseError as error:
                raise refused(f"is not JSON: {error}", number) from None
            prompt = value.get("prompt") if isinstance(value, dict) else value
            if not isinstance(prompt, str) or not prompt:
                raise refused('has no prompt; expected a text, or {"prompt": TEXT}', number)
        if len(prompts) == MAX_PROMPTS:
            raise refused(f"more than {MAX_PROMPTS:,} prompts", number)
        prompts.append(prompt)
    if not prompts:
        raise refused("has no prompt; expected one prompt per line")
    return prompts
