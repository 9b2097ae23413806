"""Draws of defects (`benchmarks/power`): they can be read, are planted and shown, and their share has an interval."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from foredraft.checks.registry import contracts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def power():
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.power import __main__ as main
        from benchmarks.power import copies, defects, judging, sites

        yield type(
            "Power", (), {"copies": copies, "defects": defects, "judging": judging, "main": main, "sites": sites}
        )
    finally:
        sys.path.remove(str(ROOT))


def test_the_draws_can_be_read(power):
    draws = [power.defects.read_draw(path) for path in sorted((ROOT / "benchmarks" / "power" / "draws").glob("*.toml"))]
    assert draws
    for draw in draws:
        groups = [one.group for one in draw.defects]
        assert groups.count("scheduler") >= 25 and groups.count("services") >= 15, draw.path
        assert all(one.old != one.new and one.mistake and one.show for one in draw.defects)


def test_the_contracts_that_judge_are_there(power):
    named = {contract for found in power.judging.COMPONENTS.values() for contract in found}
    assert named <= set(contracts()), named - set(contracts())
    assert power.judging.COMPONENTS.keys() == {area for areas in power.sites.AREAS.values() for area in areas}


def test_another_patch_has_another_digest_and_another_script_has_not(power, tmp_path):
    text = '[defects.kv-1]\nsite = "core/errors.py count_of"\nmistake = "m"\nold = "a"\nnew = "b"\nshow = "print(1)"\n'
    path = tmp_path / "draw.toml"

    def digest(changed: str) -> str:
        path.write_text(changed)
        return power.defects.read_draw(path).digest

    assert digest(text) == digest(text.replace("print(1)", "print(2)")) != digest(text.replace('"b"', '"c"'))
    with pytest.raises(ValueError, match=r"kv-1\.show has 16 lines"):
        digest(text.replace("print(1)", r"\n".join(["1"] * 16)))
    with pytest.raises(ValueError, match="x-1 is of no area"):
        digest(text.replace("kv-1", "x-1"))


def test_sites_are_drawn_by_seed_and_length(power):
    first = power.sites.draw_sites("scheduler", "kv", 1, 8)
    assert (
        first == power.sites.draw_sites("scheduler", "kv", 1, 12)[:8] != power.sites.draw_sites("scheduler", "kv", 2, 8)
    )
    assert len(set(first)) == 8 and all(site.module.startswith("core/kv/") for site in first)
    lengths = [site.last - site.first for site in power.sites.sites_of("scheduler", "kv")]
    drawn = [power.sites.draw_sites("scheduler", "kv", seed, 1)[0] for seed in range(200)]
    mean = sum(site.last - site.first for site in drawn) / len(drawn)
    assert mean > 1.2 * sum(lengths) / len(lengths), "longer functions come up more often"


def test_a_planted_defect_is_seen_in_a_copy_alone(power, tmp_path):
    texts = {"old": "def count_of(", "new": "def counted(", "show": ""}
    defect = power.defects.DrawnDefect("kv-1", "kv", "core/errors.py count_of", "renamed", "core/errors.py", **texts)

    with power.copies.planted(tmp_path / "copy", defect) as place:
        script = "from foredraft.core import errors; print([n for n in ('count_of', 'counted') if hasattr(errors, n)])"
        environment = os.environ | {"PYTHONPATH": str(place)}
        done = subprocess.run([sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "['counted']", done.stderr
    assert not (tmp_path / "copy").exists() and "def count_of(" in (ROOT / "core" / "errors.py").read_text("utf-8")
    with pytest.raises(ValueError, match="stands 0 times"):
        defect.applied("nothing")


def test_only_what_was_seen_is_judged(power, tmp_path, monkeypatch):
    texts = {
        "site": "core/kv/store.py x",
        "mistake": "m",
        "file": "core/kv/store.py",
        "old": "a",
        "new": "b",
        "show": "",
    }
    ones = tuple(power.defects.DrawnDefect(f"kv-{number}", "kv", **texts) for number in range(1, 6))
    draw = power.defects.DrawOfDefects(Path("1.toml"), "0", ones, {})
    monkeypatch.setattr(power.main, "ROOT", tmp_path)
    power.main._seen_file(draw).write_text(json.dumps({"kv-1": True, "kv-2": False, "kv-3": True, "kv-5": True}))
    outcome = {"area": "kv", "ids": []}
    monkeypatch.setattr(
        power.main,
        "judge_one",
        lambda one, folder, seed: outcome | {"id": one.id, "found_by": "x" if one.id == "kv-1" else ""},
    )
    monkeypatch.setattr(power.defects.DrawnDefect, "gone", lambda one: "it has moved" if one.id == "kv-4" else "")
    for _ in range(2):  # the second call has nothing left to judge
        lines = power.main._judge(draw, list(ones[:3]), 1, 1, "first")
        assert "| kv | 2 | 1 | 50% (9% to 91%) | kv-3 |" in lines and lines[1].startswith("digest 0, 2 defects judged")
        assert "Not counted, no script has shown them: kv-2." in lines
        assert "Not counted, their place is no longer in the source: kv-4." in lines
        assert lines[-1] == "Not judged yet, in the order of their numbers: 1 more defects that were shown."
    assert len((tmp_path / "runs" / "power" / "1-0-first-seed-1.jsonl").read_text().splitlines()) == 2


def test_a_judgement_is_written_into_its_own_place(power, tmp_path, monkeypatch):
    page = "<!-- draw 1, first -->\nold\n<!-- end -->\n<!-- draw 1, now -->\nkept\n<!-- end -->\n"
    written = tmp_path / "evidence" / "detection.md"
    written.parent.mkdir()
    written.write_text(page)
    monkeypatch.setattr("benchmarks.pages.DOCS", tmp_path)
    monkeypatch.setattr(power.main, "_judge", lambda *given: ["a", "table"])
    monkeypatch.setattr(power.main, "warm_up", lambda: None)
    path = str(ROOT / "benchmarks" / "power" / "draws" / "1.toml")
    monkeypatch.setattr(sys, "argv", ["power", "judge", path, "--write"])
    assert power.main.main() == 0
    assert written.read_text() == page.replace("old", "a\ntable")


def test_the_interval_of_a_share(power):
    """58 of 100, worked out by hand, and the ends."""
    low, high = power.judging.wilson(58, 100)
    assert (round(low, 3), round(high, 3)) == (0.482, 0.672)
    assert power.judging.wilson(0, 20)[0] == 0 and power.judging.wilson(20, 20)[1] == pytest.approx(1)
