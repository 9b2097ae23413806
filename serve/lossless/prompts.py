"""The prompts that endpoints are compared on: built in, or of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...core.errors import ConfigError, Problem
from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_lines

MAX_PROMPTS = 10_000

BUILT_IN: Sequence[str] = (
    "The lighthouse keeper climbed the stairs every evening and",
    "Once upon a time, in a village between two rivers, there lived",
    "The main reason why bridges expand in summer is",
    "Dear Ms. Alvarez,\n\nThank you for your letter of March 3. I am writing to",
    "Q: Why is the sky blue?\nA:",
    "def fibonacci(n):\n    ",
    "import json\n\n\ndef read_settings(path):\n    with open(path) as file:\n",
    "SELECT name, COUNT(*) FROM orders\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    '{"name": "Ada", "age": 36, "languages": ["en", "fr"]}\n{"name": "Bo", ',
    "<ul>\n  <li>apples</li>\n  <li>bread</li>\n  ",
    "Shopping list:\n- milk\n- eggs\n-",
    "The planets from the sun outward: 1. Mercury\n2. Venus\n3.",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "2, 3, 5, 7, 11, 13, 17,",
    "12 + 7 = 19\n23 + 48 = 71\n156 + 287 =",
    "3.14159265358979",
    "one two one two one two one two one two",
    "tick tock tick tock tick tock tick tock tick",
    "A rose is a rose is a rose is a rose is",
    "abcabcabcabcabcabcabcabc",
    "Die Hauptstadt von Frankreich ist Paris. Die Hauptstadt von Italien ist",
    "Le petit chat noir dort sur",
    "El río más largo del mundo es",
    "Столица России — это",
    "日本で一番高い山は",
    "今天天气很好，我们",
    "العاصمة المصرية هي",
    "🙂 🙃 🙂 🙃 🙂",
    "The",
    "THE QUICK BROWN FOX JUMPS OVER THE",
    "Translate to French: Good morning ->",
)
"""Prose, code, lists, numbers, repeated text, other scripts."""


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one a line, or of a `.jsonl` file the value of `prompt` (or the text itself) of every line.

    Empty lines are left out. Raises ConfigError with the line that is no prompt.
    """
    prompts: list[str] = []
    for number, line in enumerate(read_lines(path), 1):
        if not (text := line.rstrip("\r\n")).strip():
            continue
        if len(prompts) == MAX_PROMPTS:
            raise ConfigError(str(path), [Problem(f"line {number}", f"more than {MAX_PROMPTS:,} prompts")])
        prompts.append(_of_json(text, path, number) if path.suffix == ".jsonl" else text)
    if not prompts:
        raise ConfigError(str(path), [Problem("", "has no prompt; expected one a line")])
    return prompts


def _of_json(line: str, path: Path, number: int) -> str:
    try:
        value = parse_json(line)
    except ParseError as error:
        raise ConfigError(str(path), [Problem(f"line {number}", f"is no JSON: {error}")]) from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        expected = 'expected a text, or {"prompt": TEXT}'
        raise ConfigError(str(path), [Problem(f"line {number}", f"has no prompt; {expected}")])
    return prompt
