"""`foredraft plan` and `doctor`: what they print, and what they refuse."""

from __future__ import annotations

import json
import re

import pytest
from foredraft.planning.trial import Trial


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
    pays = command("doctor", "--requests", "30")
    assert pays.code == 0 and "Speculation pays" in pays.out and "p99 ms" in pays.out
    assert "Expected by the preset eagle3-llama-chat (" in pays.out and "acceptance.preset takes" in pays.out
    hardly = ("doctor", "--requests", "30", "--set", "acceptance.conditional=[0.02]")
    untold = command(*hardly)
    assert untold.code == 0 and "Whether speculation pays cannot be told:" in untold.out
    assert re.search(r"Beyond batch \d+ it does not pay\.", " ".join(untold.out.split()))
    assert "1 step =0.96 ×" in untold.out and "= cannot be told from plain decoding" in " ".join(untold.out.split())
    assert "Expected by acceptance.conditional of the scenario.\n" in untold.out
    slow = ("--set", "speculation.algorithm=STANDALONE", "--set", "model.draft=llama-3.2-1b")
    pays_not = command(*hardly, *slow)
    assert pays_not.code == 0 and "Speculation does not pay" in pays_not.out
    assert "=" not in pays_not.out.split("gain over plain")[1].split("Speed-ups")[0]
    assert "The 80 % intervals rest on no benchmark of this server: order of magnitude" in pays.out
    assert "Nothing is published for larger batches." in " ".join(pays.out.split())
    assert max(map(len, (pays.out + untold.out + pays_not.out).splitlines())) <= 80


def test_doctor_and_its_rounds_compare_no_batch_that_drafts_do_not_allow(command):
    """SGLang decodes at most 48 requests at a time with a draft."""
    server = ("--set", "hardware.server=sglang-0.5")
    told = command("doctor", "--requests", "20", *server)
    assert "It pays at every batch that fits, up to 48 requests. Without drafts up to" in " ".join(told.out.split())
    assert "batch 48 " in told.out and "batch 64 " not in told.out
    told = command("doctor", "--round", "--batch", "48,64", "--steps", "3,0", *server)
    assert "64 requests with 1,024 tokens of context and 3 draft steps: no room" in " ".join(told.out.split())
    tables = told.out.split("microseconds")
    heads = [line.split()[2:] for line in told.out.splitlines() if line.startswith("draft steps")]
    assert len(tables) == 3 and heads == [["3", "0"], ["0"]]


def test_doctor_and_its_rounds_have_the_intervals_of_published_points(command):
    server = ("--set", "hardware.server=vllm-0.18")
    told = command("doctor", "--requests", "30", *server)
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


SHORT = ("--set", "workload.output.value=8", "--set", "workload.prompt.value=100", "--set", "engine.max_running=2")
SHORT += ("--requests", 100, "--seeds", 2, "--workers", 1, "--quiet")


@pytest.mark.slow
def test_plan_says_how_near_the_nearest_comes(command, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.planning.plan.LEAST_ARRIVALS_S", 1.0)
    impossible = ("plan", "--slo", "e2el_p50<1us", "--try", "speculation.steps=1")
    code, out, _ = command(*impossible, *SHORT, "--out", tmp_path)
    assert code == 1 and "Nothing holds" in out and "times the limit of 0.001 ms" in " ".join(out.split())


def test_plan_ranks_candidates_and_goes_on_from_its_store(command, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.planning.plan.LEAST_ARRIVALS_S", 1.0)
    asked = ("plan", "--slo", "e2el_p99<1s", "--try", "speculation.steps=1,3", "--price", "H100=2.5")
    code, out, errors = command(*asked, *SHORT, "--out", tmp_path)
    assert (code, errors) == (0, "")
    assert (
        "greatest rate" in out
        and "Price of a million output tokens, by" in out
        and "half of runs  GPUs" in out
        and "is limited by" in out
    )
    told = " ".join(out.split())
    assert "that 95 % of runs hold within e2el_p99 < 1000 ms" in told and "its load times the mean output" in told
    assert "A run has 100 requests in" in told and "is a tolerance bound over 2 seeds" in told
    assert "The 80 % intervals rest on no benchmark of this server: order of magnitude" in out
    rows = [line for line in out.splitlines() if "EAGLE3, " in line and " ± " in line]
    assert [row.split("EAGLE3, ")[1][0] for row in rows] == ["3", "1"]
    pytest.importorskip("plotly", reason="the extra `report` is not installed")
    told = command("report", tmp_path, "--out", tmp_path / "plan.html")
    assert told.code == 0 and "requests/s on 1 GPU" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    journal = (tmp_path / "trials.jsonl").read_text()
    assert command(*asked, *SHORT, "--out", tmp_path).out == out
    assert (tmp_path / "trials.jsonl").read_text() == journal


class Queue:
    """Workers whose service has a p99 TPOT that rises with the load of an engine, the more the more draft steps."""

    count = 1

    def __init__(self) -> None:
        self.jobs = []

    def submit(self, job) -> None:
        self.jobs.append(job)

    def next_ended(self):
        job = self.jobs.pop()
        engines = job.settings["hardware.replicas"]
        capacity = 8 - 0.2 * job.settings["speculation.steps"] - 0.1 * (job.settings.get("hardware.gpu") == "L40S")
        share = job.settings["workload.rate"] / engines / capacity
        summary = dict.fromkeys(("refused", "aborted", "failed", "unfinished", "retractions", "max_queue_length"), 0)
        summary |= {
            "submitted": 600,
            "overloaded": False,
            "saturation": 0.5,
            "replicas": engines,
            "mean_running": 8.0 * engines,
        }
        summary |= {
            "p99_tpot_ms": 50 * share**2,
            "mean_tpot_ms": 10.0,
            "mean_ttft_ms": 100.0,
            "mean_output_tokens": 200.0,
        }
        summary |= {"mean_input_tokens": 500.0, "decode_rounds": 9, "kv_occupancy_max": 0.5, "duration": 9.0}
        return job, Trial("done", "", summary | {"device_busy_share": 0.5, "timing": "Timing of a test."})

    def close(self) -> None:
        pass


def test_plan_keeps_two_statements_apart(command, tmp_path, monkeypatch):
    """What holds if the times are right, and the range if they are not; a name that is too wide is wrapped."""
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Queue())
    asked = ["plan", "--slo", "tpot_p99<50ms", "--try", "speculation.steps=1,3", "--try", "hardware.gpu=H100,L40S"]
    asked += ["--try", "engine.max_running=64", "--try", "speculation.algorithm=EAGLE3", "--price", "H100=2.5"]
    asked += ["--set", "hardware.server=vllm-0.18", "--seeds", 2, "--workers", 1, "--quiet"]
    code, out, _ = command(*asked, "--out", tmp_path)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    right, wrong = out.split("If the times of passes and first tokens are not as simulated, 80 % intervals\n")
    right, bills = right.split("Price of a million output tokens")
    # Only one GPU has a price, and no row holds the scenario's own 8 requests/s.
    assert bills.count("–") == 2 * 3 + 2 and bills.count("1,825") == 2
    assert right.count("EAGLE3, ") == wrong.split("The 80 % intervals rest on")[0].count("EAGLE3, ") == 4
    assert "  = EAGLE3, 1 step," in right and "  = EAGLE3, 3" in right
    assert "= cannot be told from the first, compared seed by seed, with a cost model that may be" in " ".join(
        out.split()
    )
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert "docs/evidence/accuracy.md" in answer["model_error_source"]
