"""`foredraft plan` and `doctor`: what they print, and what they refuse."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from foredraft.planning.trial import RunOutcome

SHORT = ("--set", "workload.output.value=8", "--set", "workload.prompt.value=100", "--set", "engine.max_running=2")
SHORT += ("--requests", 100, "--seeds", 2, "--workers", 1, "--quiet")


@pytest.mark.slow
def test_plan_says_how_near_the_nearest_comes(command, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.planning.plan.LEAST_ARRIVALS_S", 1.0)
    impossible = ("plan", "--slo", "e2el_p50<1us", "--try", "speculation.steps=1")
    code, out, _ = command(*impossible, *SHORT, "--out", tmp_path)
    assert code == 1 and "Nothing holds" in out and "times the limit of 0.001 ms" in " ".join(out.split())


@pytest.mark.ci
def test_plan_ranks_candidates_and_goes_on_from_its_store(command, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.planning.plan.LEAST_ARRIVALS_S", 1.0)
    asked = ("plan", "--slo", "e2el_p99<1s", "--try", "speculation.steps=1,3", "--price", "H100=2.5")
    code, out, errors = command(*asked, *SHORT, "--details", "--out", tmp_path)
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
    assert command(*asked, *SHORT, "--details", "--out", tmp_path).out == out
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
        return job, RunOutcome("done", "", summary | {"device_busy_share": 0.5, "timing": "Timing of a test."})

    def close(self) -> None:
        pass


def test_plan_keeps_two_statements_apart(command, tmp_path, monkeypatch):
    """What holds if the times are right, and the range if they are not; a name that is too wide is wrapped."""
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Queue())
    asked = ["plan", "--slo", "tpot_p99<50ms", "--try", "speculation.steps=1,3", "--try", "hardware.gpu=H100,L40S"]
    asked += ["--try", "engine.max_running=64", "--try", "speculation.algorithm=EAGLE3", "--price", "H100=2.5"]
    asked += ["--set", "hardware.server=vllm-0.18", "--seeds", 2, "--workers", 1, "--quiet"]
    code, out, _ = command(*asked, "--details", "--out", tmp_path)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    right, wrong = out.split("If the times of passes and first tokens are not as simulated, 80 % intervals\n")
    right, bills = right.split("Price of a million output tokens")
    # Only one GPU has a price, and no row holds the scenario's own 8 requests/s.
    assert bills.count("–") == 2 * 3 + 2 and bills.count("1,825") == 2
    assert right.count("EAGLE3, ") - 1 == wrong.split("The 80 % intervals rest on")[0].count("EAGLE3, ") == 4
    assert "  = EAGLE3, 1 step," in right and "  = EAGLE3, 3" in right
    assert "= no clear difference from the first, compared seed by seed, with a cost model that may be" in " ".join(
        out.split()
    )
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert "docs/evidence/accuracy.md" in answer["model_error_source"]
    best, *others = answer["candidates"]
    assert best["of_best_interval"] is None and best["gpus_interval"] is None
    for one in answer["candidates"]:
        low, high = one["load_interval"]
        # At the limit the TPOT rises by 2 per logarithm of the load, so the load follows all times by 1.5.
        expected = [
            (one["load"] / end) / (end**0.5) for end in (share / one["taken"] for share in one["taken_interval"])
        ]
        assert [high, low] == pytest.approx(expected, rel=0.02)
        assert f"{low:.3g} to {high:.3g}" in wrong and one["intervals_rest_on"] in " ".join(wrong.split())
    for one in others:
        ends = one["of_best_interval"]
        assert ends[0] < ends[1] and (one["status"] == "equal") == (ends[1] >= 1)
    servers = ["--try", "hardware.gpu=H100", "--try", "hardware.server=foredraft,vllm-0.18"]
    code, out, _ = command(*asked[:5], *servers, *asked[-5:], "--details", "--out", tmp_path / "servers")
    rows = out.split("80 % intervals\n\n")[1].split("\n\n")[0].splitlines()
    assert code == 0 and sum(" to " in row for row in rows) == 4
    told = " ".join(out.split())
    assert "no benchmark of this server" in told and "; of other rows: " in told
    as_json = command(*asked, "--out", tmp_path, "--json")
    assert as_json.code == 0 and json.loads(as_json.out) == answer
    code, out, _ = command(*asked, "--rate", "30", "--details", "--out", tmp_path / "rate")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    best = json.loads((tmp_path / "rate" / "answer.json").read_text())["candidates"][0]
    low, high = best["gpus_interval"]
    assert best["gpus"] == 4 and low <= high and f" {low} to {high}  tpot_p99" in out


@pytest.mark.parametrize(
    ("more", "notes"),
    [
        (
            (),
            ("= no clear difference from the first.", "A run has 600 requests, more than --requests (100): it covers"),
        ),
        (("--rate", "30", "--price", "H100=2.5"), ("for a million output tokens", "(--price)")),
        (("--set", "model.target=llama-3.1-70b", "--gpus", 1), ()),
    ],
)
def test_plan_answers_in_one_sentence_and_one_table(command, tmp_path, monkeypatch, more, notes):
    """Of more candidates than the table has room for; what cannot run is said without --details, where nothing can."""
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Queue())
    asked = ["plan", "--slo", "tpot_p99<50ms", "--try", "speculation.steps=1..5", "--try", "hardware.gpu=H100,L40S"]
    asked += ["--try", "engine.max_running=64,96", "--set", "hardware.server=vllm-0.18", "--requests", 100, "--quiet"]
    code, out, _ = command(*asked, "--seeds", 2, "--workers", 1, *more, "--out", tmp_path)
    if not notes:
        assert code == 2 and out.startswith("No candidate can run.\n\nCannot run: ")
        return
    sentence, table, told = out.split("\n\n")
    assert code == 0 and "holds " in sentence and "within tpot_p99 < 50 ms." in " ".join(sentence.split())
    assert len(table.splitlines()) <= 15 and max(map(len, out.splitlines())) <= 80
    assert "80 %" in table and " more" in table.splitlines()[-1] and "--details: " in told
    assert all(words in " ".join(told.split()) for words in notes)
    assert "rest on" not in table + sentence


class TwoKinds(Queue):
    """The same, with a TPOT that is 10 % longer for every other seed, and as much shorter for the others."""

    def next_ended(self):
        job, done = super().next_ended()
        factor = 1.1 if job.settings["seed"] % 2 else 1 / 1.1
        return job, replace(done, summary={**done.summary, "p99_tpot_ms": factor * done.summary["p99_tpot_ms"]})


def test_plan_buys_no_gpu_where_all_runs_on_fewer_hold(command, tmp_path, monkeypatch):
    """On one GPU all runs take at most 89 % of the limit, which four of them do not show of 95 % of all."""
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: TwoKinds())
    asked = ["plan", "--slo", "tpot_p99<50ms", "--try", "speculation.steps=1", "--rate", "7", "--quiet"]
    few = json.loads(command(*asked, "--seeds", 4, "--json", "--out", tmp_path / "4").out)
    (best,) = few["candidates"]
    needed = best["needs_seeds"]
    assert (best["gpus"], best["run"]["seeds"]) == (1, 4) and 4 < needed <= 37
    assert "on 1 GPU in 4 of 4 runs," in few["sentences"][1]
    code, out, _ = command(*asked, "--seeds", 4, "--out", tmp_path / "4")
    assert code == 0 and f"held in 4 of 4; 95 % needs {needed} seeds (--seeds {needed})." in " ".join(out.split())
    many = json.loads(command(*asked, "--seeds", needed, "--json", "--out", tmp_path / "many").out)
    (best,) = many["candidates"]
    assert (best["gpus"], best["needs_seeds"]) == (1, None) and "on 1 GPU in 95 % of runs," in many["sentences"][1]
    assert not any("held in" in text for text in many["sentences"])


def test_plan_speaks_of_its_trace_before_it_searches(command, refused, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.planning.answers.answer.search_plan", lambda *_: pytest.fail("it searches"))
    trace = tmp_path / "long.csv"
    rows = "".join(f"2024-01-01 00:00:{second:02},200000,5\n" for second in range(20))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    asked = ("plan", "--trace", trace, "--try", "speculation.steps=1")
    assert "the longest has 200,000 tokens (line 2); expected prompts below the context" in refused(*asked)
    with trace.open("a") as rows:
        rows.write("2024-01-01 00:00:20,20,5\n")
    monkeypatch.setattr("foredraft.planning.answers.answer.search_plan", lambda *_: sys.exit(7))
    code, out, errors = command(*asked)
    assert (code, out) == (7, "") and "in 20 of 21 requests" in " ".join(errors.split())


class Toy:
    """Workers in whose service every draft step up to the fourth makes requests 10 % faster, and every other
    one 10 % slower."""

    count = 1

    def __init__(self) -> None:
        self.jobs = []

    def submit(self, job) -> None:
        self.jobs.append(job)

    def next_ended(self):
        job = self.jobs.pop()
        table = job.settings.get(
            "speculation.adaptive", {"1": {"candidate_steps": [job.settings.get("speculation.steps", 0)]}}
        )
        steps = [count for slot in table.values() for count in slot["candidate_steps"]]
        speed = sum(1.1 ** (4 - abs(4 - count)) for count in steps) / len(steps)
        summary = {"mean_e2el_ms": 1 / speed, "mean_output_tokens": 1.0, "mean_running": 4.0, "replicas": 1}
        return job, RunOutcome("done", "", summary)

    def close(self) -> None:
        pass


def test_tune_writes_what_it_prints(command, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Toy())
    fixed = ["--set", "engine.max_running=16", "--trials", "14", "--requests", "20", "--quiet"]
    asked = ["tune", *fixed, "--out", tmp_path]
    code, out, errors = command(*asked)
    assert (code, errors) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert "faster than" in out and "no speculation" in out and "as fast as it" in out
    assert (
        "\nSimulated times rest on no benchmark of this server: order of magnitude" in out
        and "80 % intervals of speed-ups and break-even lengths are ±" in " ".join(out.split())
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["intervals_rest_on"].startswith("no benchmark of this server: order of magnitude")
    assert result["holds"] and result["table"] == json.loads((tmp_path / "adaptive.json").read_text())
    assert result["gain_over"]["0 steps"]["light"][0] == pytest.approx(1.1**4 - 1)
    # The steps are those of our own engine: no other server gets them.
    assert set(result["files"]) == {"adaptive.json", "scenario.toml"} and not (tmp_path / "sglang.args").exists()
    why = "Nothing for SGLang: the steps were tuned for foredraft, whose times are others: tune with --set hardware.server=sglang-0.5."
    assert why in " ".join(out.split())
    served = json.loads(command(*asked[:-1], tmp_path / "sglang", "--set", "hardware.server=sglang-0.5", "--json").out)
    assert set(served["files"]) == {"adaptive.json", "scenario.toml", "sglang.args"}
    assert set(served["not_written"]) == {"vLLM", "TensorRT-LLM"}
    assert "--speculative-num-steps 4" in (tmp_path / "sglang" / "sglang.args").read_text()
    again = command(*asked, "--json")
    assert again.code == 0 and json.loads(again.out)["gain_over"] == result["gain_over"]
    explained = command("simulate", tmp_path / "scenario.toml", "--explain")
    assert explained.code == 0 and "steps = 4 " in explained.out


class Even:
    """Workers whose runs have wide numbers, which differ by draft steps and seeds alone."""

    count = 1

    def __init__(self) -> None:
        self.jobs = []

    def submit(self, job) -> None:
        self.jobs.append(job)

    def next_ended(self):
        job = self.jobs.pop()
        seed, steps = job.settings["seed"], job.settings["speculation.steps"]
        rates = {"request_throughput": 18.24 + steps + seed, "output_throughput": 15_319.0 + 100 * seed * steps}
        summary = {
            **rates,
            "p99_ttft_ms": 38_252.0 + seed * steps,
            "p99_tpot_ms": 197.6 * steps,
            "accept_length": 1 + steps,
        }
        points = {"intervals_rest_on": "12 published points"}
        return job, RunOutcome("done", "", {**summary, "slo_attainment": 0.25, **points})

    def close(self) -> None:
        pass


def test_sweep_prints_a_table_of_80_columns(command, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Even())
    monkeypatch.setenv("COLUMNS", "80")
    asked = [
        "sweep",
        "--grid",
        "speculation.steps=1,3",
        "--grid",
        "speculation.policy=fixed",
        "--seeds",
        "2",
        "--quiet",
    ]
    code, out, _ = command(*asked, "--out", tmp_path / "two")
    assert code == 0 and max(map(len, out.split("Written to")[0].splitlines())) <= 80
    same = " ".join(out.split("The same in every row: ")[1].split("\n\n")[0].split())
    assert out.count("\nSimulated times rest on 12 published points.\n") == 1
    assert "speculation.policy fixed" in same and "in SLO % 25.0±0.0" in same and "accept length" not in same
    rows = [line.split() for line in out.splitlines() if "±" in line and line.lstrip()[0] in "13"]
    assert [row[0] for row in rows] == ["1", "3"] and rows[0][-1] == "2.00±0.00" and rows[0][1].startswith("19.74±")
    more = ["--grid", "workload.prompt.low=1,2", "--grid", "workload.output.low=1,2", "--grid", "workload.rate=1,2"]
    asked += [*more, "--set", "workload.prompt.kind=lognormal", "--set", "workload.output.kind=lognormal"]
    code, out, _ = command(*asked, "--out", tmp_path / "many")
    assert code == 0 and max(map(len, out.split("Written to")[0].splitlines())) <= 80
    assert "columns would show half of the 95 % intervals" in " ".join(out.split()) and "±" not in out
    assert "prompt." in out and "output." in out


class Overloaded(Even):
    """Workers whose runs with 3 steps are overloaded, with one of the seeds."""

    def next_ended(self):
        job, trial = super().next_ended()
        if job.settings["speculation.steps"] == 3 and job.settings["seed"] == 1:
            more = {"overloaded": True, "overload": "16/s is asked, about 12/s is the most"}
            trial = RunOutcome("done", "", {**trial.summary, **more})
        return job, trial


def test_sweep_names_the_combinations_that_are_overloaded(command, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Overloaded())
    asked = ["sweep", "--grid", "speculation.steps=1,3", "--seeds", "2", "--quiet"]
    told = "Overloaded, speculation.steps=3: 16/s is asked, about 12/s is the most"
    found = command(*asked, "--out", tmp_path / "text").out
    assert told in " ".join(found.split()) and found.count("Overloaded") == 1
    assert told in json.loads(command(*asked, "--out", tmp_path / "json", "--json").out)["notices"]


def test_sweep_takes_the_number_of_requests_as_plan_and_tune_do(command, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "foredraft.planning.store.make_workers", lambda tables, count, cluster: asked.append(tables) or Even()
    )
    code, _, _ = command("sweep", "--grid", "speculation.steps=1,3", "--requests", 30, "--quiet", "--out", tmp_path)
    assert code == 0 and asked[0]["workload"]["num_requests"] == 30
    both = ("sweep", "--grid", "workload.num_requests=10,20", "--requests", 30)
    code, _, errors = command(*both)
    assert code == 2 and "--requests: has no effect: --grid varies workload.num_requests" in errors


def test_a_launch_command_takes_the_place_of_a_scenario(command, tmp_path):
    launch = "vllm serve llama-3.1-8b --spec-method eagle3 --spec-tokens 2 --port 80 --enable-lora"
    code, out, errors = command("simulate", "--from-vllm", launch, "--set", "hardware.gpu=L40S", "--explain")
    assert code == 0 and "steps = 2 " in out and "max_running = 256 " in out and "# --from-vllm" in out
    assert "without effect on timing: --port" in errors and "not modelled: --enable-lora: LoRA" in errors
    written = tmp_path / "scenario.toml"
    written.write_text(out)
    again = command("simulate", written, "--explain").out
    values = [[line.partition("#")[0] for line in text.splitlines()] for text in (out, again)]
    assert values[0] == values[1]
    over = command(
        "doctor",
        "--round",
        written,
        "--from-sglang",
        "--speculative-algorithm EAGLE --speculative-num-steps 4 --model qwen3-8b",
    )
    assert over.code == 0 and over.out.startswith("Timing of sglang-0.5")
    for model in (["--set", "model.target=qwen3-8b"], [written]):
        assert command("simulate", *model, "--from-sglang", "--tp 1", "--explain").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--set", "speculation.algorithm=NONE"], "name the algorithm"),
        (["tune", "--set", "speculation.algorithm=NONE"], "name the algorithm"),
        (["doctor", "--set", "model.target=llama-3.1-70b"], "does not fit"),
        (["plan", "--from-sglang", "--tp-sise 2"], "is no argument of SGLang (did you mean '--tp-size'?)"),
        (["plan", "--from-vllm", "vllm serve x --foo-bar 3"], "is no argument of vLLM\n"),
        (["plan", "--from-vllm", "vllm serve x --a b:1", "vllm serve x --a c:2"], "was split by the shell"),
        (["plan", "--rate", "inf"], "less than or equal to"),
        (["doctor", "--round", "--from-sglang", "--tp 2", "--from-vllm", "vllm serve x"], "give one of them"),
        (["doctor", "--round", "--from-vllm", "vllm serve --max-num-seqs 8"], "model: the command names none"),
        (["plan", "--slo", "ttft_p99<500"], "500 has no unit; write 500ms or 500s"),
        (["plan", "--price", "H100"], "--price: H100: expected GPU=PRICE per hour"),
        (["plan", "--price", "H10=2"], "did you mean 'H100'"),
        (["plan", "--set", "workload.concurrency=4"], "a closed loop has no request rate"),
        (["plan", "--try", "speculation.stps=1"], "unknown key (did you mean 'steps'?)"),
        (["doctor", "--round", "--batch", "0"], "--batch: 0 is no integer from 1 on"),
        (["doctor", "--round", "--steps", "1.5"], "--steps: 1.5 is no integer"),
        (["doctor", "--details", "--json"], "--details: has no effect: the document of --json has them"),
        (["doctor", "--steps", "3"], "--steps: has no effect: without --round"),
        (["doctor", "--round", "--requests", "20"], "--requests: has no effect: --round makes no use of it"),
        (["doctor", "--round", "--steps", "3..1"], "the range '3..1' is empty"),
    ],
)
def test_what_cannot_be_answered_is_one_message(refused, arguments: list[str], message: str):
    assert message in refused(*arguments)
