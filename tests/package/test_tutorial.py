"""The tutorial's trace and the pictures: made again from their sources, and the same numbers as on the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pictures
import pytest
from foredraft.sim.scenario_file import load_scenario
from foredraft.ui.answers import answer

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


@pytest.mark.ci
def test_other_numbers_draw_another_picture(numbers):
    changed = json.loads(json.dumps(numbers))
    changed["speculation"]["NONE"]["throughput"][3] *= 1.1
    was, is_now = pictures.pictures(numbers), pictures.pictures(changed)
    assert [name for name in was if was[name] != is_now[name]] == ["speculation.svg"]


def test_the_picture_and_the_page_with_sliders_answer_one_question_alike(numbers):
    """How many tokens per second does the GPU of the chat service give to so many users, prompts included?"""
    shown = numbers["speculation"]
    assert pictures.speculation_numbers() == shown
    scenario, origins = load_scenario(pictures.CHAT, ["hardware.kernels=roofline"])
    answered = answer(scenario, origins, 5, None)["speeds"]
    on_page = {one["batch"]: (one["plain"], one["drafted"]) for one in answered}
    for place, users in enumerate(shown["NONE"]["users"]):
        drawn = [shown[algorithm]["throughput"][place] for algorithm in ("NONE", "EAGLE3")]
        assert drawn == pytest.approx(on_page[users], abs=0.1)
    assert 5 in on_page, "the batch that is asked for"


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
