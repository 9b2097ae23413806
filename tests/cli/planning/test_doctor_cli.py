"""`foredraft doctor`: its sentence, its tables, and what it says while it works."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

import pytest
from foredraft.cli.planning.doctor import TREES_AND_CHAINS


def test_a_round_is_printed_in_parts_that_sum_to_the_round(command):
    code, out, errors = command("doctor", "--round", "--batch", "4,32", "--steps", "0..2", "--context", "100")
    assert (code, errors) == (0, "")
    for block in out.split("\n\n")[1:]:
        lines = {line[:18]: [cell.replace(",", "") for cell in line[18:].split()] for line in block.splitlines()[1:]}
        parts = [cells for name, cells in lines.items() if name.startswith("  ")]
        device = lines["device".ljust(18)]
        assert len(parts) > 4 and len(device) == 3
        for column in range(3):
            total = sum(int(cells[column]) for cells in parts if cells[column] != "–")
            assert total == pytest.approx(int(device[column]), abs=len(parts))


def test_doctor_says_where_it_pays_and_where_not(command):
    pays = command("doctor", "--details", "--requests", "30")
    assert pays.code == 0 and "Speculation pays" in pays.out and "p99 ms" in pays.out
    assert "Expected by the preset eagle3-llama-chat (" in pays.out and "acceptance.preset takes" in pays.out
    hardly = ("doctor", "--details", "--requests", "30", "--set", "acceptance.conditional=[0.02]")
    untold = command(*hardly)
    assert untold.code == 0 and "Whether speculation pays is uncertain:" in untold.out
    assert re.search(r"Beyond batch \d+ it does not pay\.", " ".join(untold.out.split()))
    assert "1 step =0.96 ×" in untold.out and "= no clear difference from plain decoding" in " ".join(
        untold.out.split()
    )
    assert "Expected by acceptance.conditional of the scenario.\n" in untold.out
    slow = ("--set", "speculation.algorithm=STANDALONE", "--set", "model.draft=llama-3.2-1b")
    pays_not = command(*hardly, *slow)
    assert pays_not.code == 0 and "Speculation does not pay" in pays_not.out
    assert "=" not in pays_not.out.split("gain over plain")[1].split("Speed-ups")[0]
    assert "The 80 % intervals rest on no benchmark of this server: order of magnitude" in pays.out
    assert "Nothing is published for larger batches." in " ".join(pays.out.split())
    assert max(map(len, (pays.out + untold.out + pays_not.out).splitlines())) <= 80


SLOW = ("--set", "speculation.algorithm=STANDALONE", "--set", "model.draft=llama-3.2-1b")
HARDLY = ("--set", "acceptance.conditional=[0.02]")


@pytest.mark.fast("given0*", "given3*", ci="*")
@pytest.mark.parametrize(
    ("given", "answer", "batches"),
    [
        ((), "Speculation pays at every batch that fits, up to 256 requests: EAGLE3 on llama-3.1-8b, H100 gives 1.", 4),
        (HARDLY, "Whether speculation pays is uncertain: EAGLE3 on llama-3.1-8b, H100 gives 0.", 4),
        ((*HARDLY, *SLOW), "Speculation does not pay: STANDALONE on llama-3.1-8b, H100 is slower than plain", 0),
        (("--set", "workload.rate=900"), "Overloaded, as it is: ", 4),
    ],
)
def test_doctor_answers_in_one_sentence_and_one_table(command, given, answer, batches):
    """What stands behind --details is not there, but for an overload, whose latencies are those of a queue."""
    out = command("doctor", "--requests", "60", *given).out
    sentence, *tables, notes = out.split("\n\n")
    assert answer in " ".join(out.split()) and sentence.count(". ") == 0 and "--details: " in notes
    assert sum(line.startswith("batch ") for line in out.splitlines()) == batches
    assert len("\n\n".join(tables).splitlines()) <= 15 and max(map(len, out.splitlines())) <= 80
    assert "break" not in sentence + "".join(tables)


@pytest.mark.ci
def test_doctor_says_what_it_does_while_it_works(command, monkeypatch):
    monkeypatch.setattr("foredraft.cli.progress.LINE_EVERY_S", -1.0)
    few = ("doctor", "--requests", "20")
    said = command(*few).err
    assert "pricing rounds\nsimulating the load as it is\n" in said
    assert "simulating the load without speculation: 20 requests\n" in said
    assert command(*few, "--quiet").err == ""


def test_doctor_and_its_rounds_compare_no_batch_that_drafts_do_not_allow(command):
    """SGLang decodes at most 48 requests at a time with a draft."""
    server = ("--set", "hardware.server=sglang-0.5")
    told = command("doctor", "--details", "--requests", "20", *server)
    assert "Speculation pays at every batch that fits, up to 48 requests:" in " ".join(told.out.split())
    assert "Without drafts up to" in " ".join(told.out.split())
    assert "batch 48 " in told.out and "batch 64 " not in told.out
    told = command("doctor", "--round", "--batch", "48,64", "--steps", "3,0", *server)
    assert "64 requests with 1,024 tokens of context and 3 draft steps: no room" in " ".join(told.out.split())
    tables = told.out.split("microseconds")
    heads = [line.split()[2:] for line in told.out.splitlines() if line.startswith("draft steps")]
    assert len(tables) == 3 and heads == [["3", "0"], ["0"]]


def test_doctor_and_its_rounds_have_the_intervals_of_published_points(command):
    server = ("--set", "hardware.server=vllm-0.18")
    told = command("doctor", "--details", "--requests", "30", *server)
    assert told.code == 0 and max(map(len, told.out.splitlines())) <= 80
    rows = {line[:13]: line[17:].split() for line in told.out.splitlines() if " ms  " in line}
    for name in ("TTFT, mean ms", "TPOT, mean ms", "E2EL, mean ms"):
        _, low, to, high, _, other_low, _, other_high, _ = (cell.replace(",", "") for cell in rows[name])
        assert to == "to" and float(low) < float(high) and float(other_low) < float(other_high)
    assert len(rows["TTFT, p99 ms "]) == 3
    rests = "The 80 % intervals rest on none of this deployment; "
    assert rests in " ".join(told.out.split())
    code, out, _ = command("doctor", "--round", "--batch", "8", "--steps", "0,3", *server)
    assert code == 0 and rests in " ".join(out.split()) and "80 % intervals of speed-ups and break-even" in out
    lines = {
        line[:18].strip(): [int(cell.replace(",", "")) for cell in line[18:].split()]
        for line in out.splitlines()
        if line.startswith("round")
    }
    for side in ("from", "to"):
        plain, drafts = (end / middle for end, middle in zip(lines[f"round, 80 % {side}"], lines["round"], strict=True))
        assert plain == pytest.approx(drafts, rel=1e-3)
    assert lines["round, 80 % from"][0] < lines["round, 80 % to"][0]


def test_what_is_said_of_trees_is_what_was_published(command):
    """Each pair is of one model, draft, text and number of requests."""
    cases: dict[tuple[str, ...], tuple[list[float], list[float]]] = {}
    with (Path(__file__).parents[3] / "benchmarks" / "published" / "rounds.csv").open() as lines:
        for row in csv.DictReader(lines):
            if row["server"].startswith("sglang") and row["algorithm"] == "EAGLE3":
                key = tuple(row[name] for name in ("model", "draft", "text", "concurrency"))
                cases.setdefault(key, ([], []))[int(row["topk"]) > 1].append(float(row["tokens_per_s"]))
    ratios = [max(trees) / max(chains) for chains, trees in cases.values()]
    least, middle, most = min(ratios), statistics.median(ratios), max(ratios)
    assert (
        f"gave {least:.2f} to {most:.2f} ×" in TREES_AND_CHAINS and f"{middle:.2f} × in the median" in TREES_AND_CHAINS
    )
    assert f"more in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)} cases" in TREES_AND_CHAINS
    out = command("doctor", "--details", "--requests", "20").out
    assert TREES_AND_CHAINS in " ".join(out.split())
    other = command("doctor", "--details", "--requests", "20", "--set", "speculation.algorithm=NGRAM").out
    assert "Trees: " not in other
