"""The tutorial's trace and the pictures: made again from their sources, and the same numbers as on the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pictures
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tutorial"
MOST_BYTES = 60_000


@pytest.fixture(scope="module")
def numbers() -> dict:
    return json.loads(pictures.NUMBERS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_the_trace_is_what_its_script_writes(tmp_path):
    made = tmp_path / "requests.csv"
    subprocess.run([sys.executable, EXAMPLE / "make_trace.py", made], check=True, timeout=60)
    assert made.read_bytes() == (EXAMPLE / "requests.csv").read_bytes()


def test_the_pictures_show_their_numbers(numbers):
    drawn = pictures.pictures(numbers)
    assert {path.name for path in pictures.FOLDER.glob("*.svg")} == set(drawn)
    for name, text in drawn.items():
        assert (pictures.FOLDER / name).read_text(encoding="utf-8") == text, f"{name} is stale: run `make docs`"
        assert len(text.encode()) < MOST_BYTES


def test_other_numbers_draw_another_picture(numbers):
    changed = json.loads(json.dumps(numbers))
    changed["speculation"]["NONE"]["throughput"][3] *= 1.1
    was, is_now = pictures.pictures(numbers), pictures.pictures(changed)
    assert [name for name in was if was[name] != is_now[name]] == ["speculation.svg"]


@pytest.mark.parametrize("users", [(1, 16), pytest.param((64, 256), marks=pytest.mark.slow)])
def test_the_speeds_of_the_picture_are_what_is_simulated(numbers, users):
    for algorithm, curve in pictures.speculation_numbers(users).items():
        shown = numbers["speculation"][algorithm]
        places = [shown["users"].index(number) for number in users]
        assert {key: [values[place] for place in places] for key, values in shown.items()} == curve


def test_the_pictures_of_the_tutorial_have_the_numbers_of_its_page(numbers, page):
    """`make readme` finds what the page shows by running it."""
    points = [trace for trace in numbers["tutorial"]["plan-candidates"]["traces"] if "base" not in trace]
    for trace in points:
        for name, load in zip(trace["y"], trace["x"], strict=True):
            assert re.search(rf"^ +[\d=] {name} +{load:.3g} ", page, re.MULTILINE), (name, load)
    (steps,) = numbers["tutorial"]["tune-steps"]["traces"]
    for batch, count in zip(steps["x"][:-1], steps["y"], strict=False):
        assert re.search(rf"^  batch {batch} (to \d+|on) +{count:g} steps?$", page, re.MULTILINE), (batch, count)


def test_the_pages_show_every_picture(page):
    shown = set(re.findall(r"\]\(pictures/([\w-]+\.svg)\)", page))
    shown |= set(re.findall(r"docs/pictures/([\w-]+\.svg)", (ROOT / "README.md").read_text(encoding="utf-8")))
    shown |= set(re.findall(r"\]\(pictures/([\w-]+\.svg)\)", (ROOT / "docs/serve.md").read_text(encoding="utf-8")))
    assert shown == {path.name for path in pictures.FOLDER.glob("*.svg")}
