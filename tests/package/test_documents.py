"""README and docs: the commands, options, settings, files and symbols that they name exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as parquet
import refresh
import typer
from foredraft.checks.registry import contracts, mutants_of
from foredraft.cli.app import app
from foredraft.cli.simulation.run_record import RunRecord
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.properties.harness.contract import SUITE_VERSION
from foredraft.properties.harness.invariants import all_invariants
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import load_scenario

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "sim", "gpu", "properties", "checks", "observe", "planning", "serve", "ui", "twin", "cli", "api")


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def code_of(text: str) -> Iterator[str]:
    """Every line of a code block (with those that continue it), and every piece of inline code."""
    for number, part in enumerate(re.split(r"^```.*$", text, flags=re.MULTILINE)):
        if number % 2:
            yield from part.replace("\\\n", " ").splitlines()
        else:
            yield from re.findall(r"`([^`\n]+)`", part)


def command_lines() -> Iterator[tuple[str, list[str]]]:
    for path in documents():
        for line in code_of(path.read_text(encoding="utf-8")):
            line = re.split(r"\s#\s|\s\|\s|\s>\s|\s&&\s", line.strip().removeprefix("$ "))[0]
            if re.match(r"(\.venv/bin/)?foredraft(\s|$)", line):
                yield path.name, shlex.split(line)[1:]


def test_documents_name_only_commands_and_options_that_exist():
    root = typer.main.get_command(app)
    seen = 0
    for document, words in command_lines():
        if not words or words[0].startswith("-"):
            known = {option for parameter in root.params for option in parameter.opts} | {"--help"}
            assert not words or words[0] in known, f"{document}: foredraft {' '.join(words)}"
            continue
        assert words[0] in root.commands, f"{document}: there is no command {words[0]!r}"
        command = root.commands[words[0]]
        if words[1:] and words[1] in getattr(command, "commands", ()):
            command = command.commands[words[1]]
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        for word in words[1:]:
            if word.startswith("-"):
                assert word.split("=")[0] in options, f"{document}: {words[0]} has no option {word}"
        seen += 1
    assert seen >= 5


def test_documents_name_only_settings_that_exist():
    for _, words in command_lines():
        for option, value in pairwise(words):
            if option == "--set" and "=" in value and "…" not in value:
                load_scenario(None, [value])  # a ConfigError fails the test with the key and its problem


def test_documents_name_only_make_targets_that_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in documents():
        for line in code_of(path.read_text(encoding="utf-8")):
            for target in re.findall(r"^\s*(?:\$ )?make ([a-z]+)", line):
                assert target in targets, f"{path.name}: make {target}"


def test_documents_name_only_files_that_exist():
    tops = {path.name for path in ROOT.iterdir()}
    seen = 0
    for path in documents():
        for piece in code_of(path.read_text(encoding="utf-8")):
            for word in re.findall(r"[\w.\-/]+", piece):
                if "/" not in word or word.split("/")[0] not in tops - {"runs"} or word.startswith(".venv"):
                    continue
                seen += 1
                assert (ROOT / word).exists(), f"{path.name}: there is no {word}"
    assert seen >= 5


def test_the_files_of_commands_exist_or_are_explained():
    """A file that a command reads is in the clone, or an earlier command wrote it, or the prose says what it is."""
    seen = 0
    for path in documents():
        parts = re.split(r"^```.*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        prose, written = "".join(parts[::2]), set()
        for line in "\n".join(parts[1::2]).replace("\\\n", " ").splitlines():
            if not re.match(r"(\$ )?(foredraft|cat) ", line):
                continue
            outputs = set(re.findall(r"(?:>|--out|--result-filename) ([\w./-]+)", line))
            for word in re.findall(r"(?<![\w./-])[\w./-]+\.(?:toml|csv|jsonl?|yaml|sh)\b", line.partition(" # ")[0]):
                if word not in outputs | written and not word.startswith("runs/") and not (ROOT / word).exists():
                    seen += 1
                    assert f"`{word}`" in prose, f"{path.name}: what is {word}?"
            written |= outputs
    assert seen >= 5


def test_documents_name_only_symbols_that_exist():
    """`Engine.plan`, `max_rounds`, `load_scenario(…)` in inline code: every word of them occurs in the source."""
    # Names that are put together when they are made; N stands for a number.
    metrics = RunMetrics()
    known = {
        *metrics.summary(1),
        *(f"timeline_{key}" for key in metrics.timeline()),
        "rounds_at_steps_N",
        "round_part_NAME_us",
        "correct_drafts_at_steps_N",
        "ema_accept_len_from_N",
    }
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        known |= set(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
    for path in documents():
        parts = re.split(r"^```.*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for piece in re.findall(r"`([^`\n]+)`", "".join(parts[::2])):
            name = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", piece)
            if name is None or not re.search(r"[a-z][A-Z]|_|\w\.\w|^[A-Z][a-z]", name[1]) or (ROOT / name[1]).exists():
                continue
            if name[1].endswith((".json", ".jsonl", ".toml", ".yaml", ".csv", ".parquet", ".txt", ".md", ".py", ".sh")):
                continue
            missing = [word for word in name[1].split(".") if word and word != "foredraft" and word not in known]
            assert not missing, f"{path.name}: `{piece}`: {missing} occurs nowhere"


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a document, as GitHub and the site name them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#{1,4} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_documents_link_only_to_what_exists():
    seen = 0
    for path in documents():
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", path.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
                place = path.parent / target if target else path
                assert not anchor or anchor in anchors(place), f"{path.name} links to {target}#{anchor}"
                seen += bool(anchor)
    assert seen >= 5


# -- parts that are made from the source, or must keep up with it ------------------------------------------------------


def test_documents_and_messages_install_from_a_clone():
    """The project is not on PyPI; messages ask observe/distribution/install_hint.py where this one came from."""
    notebooks = (ROOT / "examples").rglob("*.ipynb")
    sources = (path for package in (*PACKAGES, "benchmarks") for path in (ROOT / package).rglob("*.py"))
    for path in (*documents(), *notebooks, *sources):
        assert not re.search(r"pip install\s+['\"]?foredraft", path.read_text(encoding="utf-8")), path.name


def test_lines_of_prose_are_short():
    """Tables, code and what scripts write are as wide as they are."""
    made = re.compile(r"^```.*?^```|<!-- (?:from|accuracy).*?<!-- end -->|^\|.*?$", re.MULTILINE | re.DOTALL)
    for path in documents():
        lines = made.sub("", path.read_text(encoding="utf-8")).splitlines()
        assert not (long := [line for line in lines if len(line) > 120]), f"{path.name}: {long}"


def test_lines_of_code_fit_into_the_column_of_the_site():
    """What commands print is as wide as it is; docs/site/static/site.css makes the column."""
    for path in documents():
        blocks = re.findall(r"^ *```([^\n]*)\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for language, block in blocks:
            if language == "console":  # commands begin with $, all else is output
                block = "\n".join(re.findall(r"^\$ (?:.*\\\n)*.*$", block, re.MULTILINE))
            if language not in ("text", "mermaid"):
                assert not (long := [line for line in block.splitlines() if len(line) > 100]), f"{path.name}: {long}"


def test_documents_name_the_version_of_the_suite():
    page = (ROOT / "docs" / "properties.md").read_text(encoding="utf-8")
    assert set(re.findall(r'spec="([^"]+)"', page)) == {SUITE_VERSION}


def test_documents_count_invariants_and_planted_defects_as_the_commands_do():
    """`check --list` counts invariants, `check CONTRACT --mutants` planted defects."""
    invariants = str(len(all_invariants()))
    counts = {path.name: re.findall(r"(\d+) invariants", path.read_text(encoding="utf-8")) for path in documents()}
    del counts["CHANGELOG.md"]  # tells what was
    assert {one for found in counts.values() for one in found if len(one) > 2} == {invariants}  # not of one run
    assert invariants in counts["README.md"] and invariants in counts["properties.md"]
    page = (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")
    planted = map(int, re.findall(r"(\d+) (?:planted )?(?:defects(?! before)|mutants)\b", page))
    assert [*planted] == [len(mutants_of(contract)) for contract in contracts()]


def test_made_parts_are_fresh():
    used = set()
    for path in documents():
        text = path.read_text(encoding="utf-8")
        used |= {block[2] for block in refresh.BLOCK.finditer(text)}
        assert text.count("<!-- from ") == len(refresh.BLOCK.findall(text)), f"{path.name}: a block without an end"
        assert refresh.refreshed(text) == text, f"{path.name} is stale: run `make docs`"
    assert used == set(refresh.BLOCKS)


def test_every_table_of_states_has_a_diagram():
    """Made from the table itself, which docs/refresh.py imports by its name."""
    pattern = re.compile(r"^(\w*TRANSITIONS)\b.*= \{$", re.MULTILINE)
    found = [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), name)
        for folder in ("core", "gpu", "sim", "serve", "planning", "observe")
        for path in (ROOT / folder).rglob("*.py")
        for name in pattern.findall(path.read_text("utf-8"))
    ]
    assert len(found) > 9
    shown = [id(value) for value in vars(refresh).values()]
    missing = [
        (module, name) for module, name in found if id(getattr(import_module(f"foredraft.{module}"), name)) not in shown
    ]
    assert not missing, f"no diagram in docs/ is made of {missing}"


def test_every_result_is_documented(tmp_path):
    """Every key of the summary, and every column of the tables, stands in docs/simulate.md."""
    scenario, _ = load_scenario(None, ["workload.num_requests=400", "workload.rate=20"])
    record = RunRecord(scenario, tmp_path)
    with record:
        summary = record.finish(Simulation(scenario, sinks=record.sinks, spans=record.spans).run())
    results = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", results.partition("## The files of a run")[2]))
    latency = re.compile(r"(mean|median|std|p90|p95|p99)_(ttft|tpot|itl|e2el)_ms")
    keys = {
        re.sub(r"^(rounds_at_steps|correct_drafts_at_steps|ema_accept_len_from)_\d+$", r"\1_N", key) for key in summary
    }
    columns = {
        column for name in ("requests", "rounds") for column in parquet.read_schema(tmp_path / f"{name}.parquet").names
    }
    keys = {re.sub(r"^round_part_\w+_us$", "round_part_NAME_us", key) for key in keys}
    undocumented = {key for key in keys | columns if key not in named and not latency.fullmatch(key)}
    assert not undocumented
    assert sum(bool(latency.fullmatch(key)) for key in keys) == 24
    table = set(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", results.partition("### `summary.json`")[2], re.MULTILINE))
    documented = {name.strip("`") for cell in table for name in cell.split(", ")}
    assert documented <= keys, f"documented, but not there: {documented - keys}"
