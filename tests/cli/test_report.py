"""`foredraft report`: its page holds what the files say, opens in a browser without a network, and stays small."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly", reason="the extra `report` is not installed")

from foredraft import Scenario
from foredraft.cli.simulation.run_record import RunRecord
from foredraft.core.errors import ConfigError
from foredraft.observe import figures
from foredraft.observe.figures.reports import page_of
from foredraft.observe.tables import LATENCIES, format_number
from foredraft.planning.store import TrialStore, question
from foredraft.planning.trial import run_trial
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_with

pytestmark = pytest.mark.xdist_group("report")  # the runs are made once

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium or Chrome")
WIDTHS = {"desktop": 1280, "phone": 390}


def twin_record() -> dict:
    """Two ways to decode at two loads, as `twin --json` writes them; predicted 10 % too much."""
    keys = ["output_throughput", *["mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms"]]
    keys += ["median_itl_ms", "p99_itl_ms", "mean_running"]
    one = {"predicted": 11.0, "measured": 10.0, "error": 0.1, "predicted_spread": 0.02, "noise": 0.03}
    batch = {"predicted": list(range(10)), "measured": list(range(1, 11))}
    shared = {"requests": 40, "repeats": 3, "processor_share": 0.9, "pace": 1.0, "metrics": dict.fromkeys(keys, one)}
    shared |= {"steps": {"3": {"predicted": 1.0, "measured": 1.0}}, "batch": batch}
    comparisons = [
        {"arm": arm, "load": load, **shared} for load in ("light", "saturated") for arm in ("plain", "EAGLE3, 3 steps")
    ]
    return {"device": "a CPU <8 cores>", "clock": "wall", "comparisons": comparisons}


SHORT = {"num_requests": 40, "output": {"value": 30}, "prompt": {"value": 200}}
TABLES = Scenario.model_validate(
    {"name": "a </script> & b", "workload": SHORT, "slo": {"ttft_ms": 200.0}, "speculation": {"policy": "fixed"}}
).model_dump(mode="json")


def plan_store(folder: Path) -> None:
    """Two candidates at three loads, and one that cannot run, as `plan` leaves them."""
    folder.mkdir()
    candidates = []
    with (folder / "trials.jsonl").open("w") as journal:
        for number, status in ((1, "best"), (3, "equal")):
            settings = {"speculation.steps": number}
            for load in (4.0, 8.0, 16.0):
                for seed in (0, 1):
                    given = {**settings, "workload.rate": load, "seed": seed}
                    summary = {
                        "p99_tpot_ms": number + load / 2 + seed,
                        "mean_output_tokens": 30.0,
                        "submitted": 400,
                        "overloaded": False,
                        "timing": "Timing of a test.",
                        "intervals_rest_on": "31 published points",
                    }
                    journal.write(json.dumps({"settings": given, "status": "done", "summary": summary}) + "\n")
            found = {
                "load": 9.0 - number,
                "half_load": 9.5 - number,
                "half_width": 0.5,
                "gpus": 1,
                "tokens_per_s": 900.0,
                "bill": None,
            }
            found |= {"load_interval": [7.0 - number, 10.0 - number], "gpus_interval": None}
            found |= {"taken_interval": [0.9, 1.2], "intervals_rest_on": "31 published points"}
            name = f"EAGLE3, {number} steps, top-4, 8 nodes, tensor_parallel 8, a draft of/some-long-name-of-a-model-instruct-fp8"
            candidates.append(
                {"name": name, "settings": settings, "status": status, **found, "tightest": "tpot_p99", "taken": 0.97}
            )
    answer = {"sentences": ["EAGLE3, 1 steps holds 8 requests/s on 1 GPU.", "It is limited by a test."], "load": None}
    answer |= {"limits": [{"name": "tpot_p99", "key": "p99_tpot_ms", "limit_ms": 6.0}], "load_key": "workload.rate"}
    answer |= {
        "load_unit": "requests/s",
        "model_error_source": "a test",
        "candidates": candidates,
        "refused": [{"name": "x", "reason": "y"}],
    }
    (folder / "answer.json").write_text(json.dumps(answer))
    (folder / "question.json").write_text(json.dumps({"kind": "plan", "scenario": TABLES, "version": "1"}))


def tune_store(folder: Path) -> None:
    """A table of two batch sizes against two alternatives, one of which cannot run in a phase, as `tune` leaves it."""
    folder.mkdir()
    run = {"settings": {"speculation.steps": 3, "seed": 0}, "status": "done", "summary": {"overloaded": False}}
    (folder / "trials.jsonl").write_text(json.dumps(run) + "\n")
    (folder / "question.json").write_text(json.dumps({"kind": "tune", "scenario": TABLES, "version": "1"}))
    result = {
        "phases": {"light": {"about": "4 clients"}, "knee": {"about": "64 clients"}},
        "seeds": [0, 1],
        "holds": False,
    }
    result |= {"table": {"1": {"candidate_steps": [2, 5]}, "16": {"candidate_steps": [1]}}, "schedule": None}
    result |= {"behind_best_fixed": {"light": -0.01, "knee": 0.02}, "passed_over": []}
    rows = {"no speculation": {"light": [0.5, 0.1], "knee": [0.2, 0.05], "all": [0.35, 0.04]}}
    result["gain_over"] = rows | {"5 steps": {"light": [0.01, 0.02], "knee": None, "all": None}}
    (folder / "result.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Two runs, a sweep, a plan, a tune and a twin."""
    folder = tmp_path_factory.mktemp("report")
    for name, settings in (("run", {"speculation.steps": 3}), ("plain", {"speculation": {"algorithm": "NONE"}})):
        scenario = scenario_with(TABLES, settings)
        record = RunRecord(scenario, folder / name, events=False, perfetto=False)
        with record:
            simulation = Simulation(scenario, sinks=record.sinks)
            record.write_scenario({}, [], [])
            record.finish(simulation.run())
    points = [{"speculation.steps": steps, "workload.rate": rate} for rate in (5.0, 20.0) for steps in (0, 3)]
    store = TrialStore(folder / "sweep", question("sweep", TABLES, points=points, seeds=[0, 1]))
    for settings in ({**point, "seed": seed} for point in points for seed in (0, 1)):
        store.add(settings, run_trial(TABLES, settings))
    store.close()
    plan_store(folder / "plan")
    (folder / "twin.json").write_text(json.dumps(twin_record()))
    tune_store(folder / "tune")
    return {name: folder / name for name in ("run", "plain", "sweep", "plan", "tune")} | {"twin": folder / "twin.json"}


@pytest.fixture(scope="module")
def pages(made, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    wanted = {name: (source,) for name, source in made.items() if name != "plain"}
    wanted["pair"] = (made["plain"], made["run"])
    for name, sources in wanted.items():
        (folder / f"{name}.html").write_text(page_of(*sources).html(), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in wanted}


def test_percentiles_of_the_curves_are_those_of_all_requests(made):
    one = figures.StoredRun(made["run"])
    for name in ("ttft", "tpot", "e2el"):
        for share, key in ((0.5, "median"), (0.9, "p90"), (0.99, "p99")):
            place = figures.run.CURVE_SHARES.index(share)
            assert one.quantiles_ms[name][place] == pytest.approx(one.summary[f"{key}_{name}_ms"], rel=1e-9)
    assert one.quantiles_ms["itl"][50] == pytest.approx(one.summary["median_itl_ms"])


def test_figures_show_every_round_and_row_once(made):
    one = figures.StoredRun(made["run"])
    assert one.rounds_by_batch().sum() == one.summary["decode_rounds"]
    bars = figures.steps_by_batch(one).data
    assert np.sum([bar.y for bar in bars], axis=0) == pytest.approx(1, abs=1e-3)
    first = figures.acceptance_by_position(one).data[0]
    assert first.customdata[0] == one.summary["verified_rows"]
    accepted = np.cumprod(first.y)
    if len({key for key in one.summary if key.startswith("correct_drafts_at_steps_")}) == 1:
        assert accepted.sum() == pytest.approx(one.summary["accept_length"] - 1, rel=1e-3)


def test_a_run_of_a_published_server_has_intervals_in_its_report(made, tmp_path):
    copy = Path(shutil.copytree(made["run"], tmp_path / "run"))
    summary = json.loads((copy / "summary.json").read_text())
    summary = {key: value for key, value in summary.items() if not key.endswith("_interval")}
    (copy / "summary.json").write_text(json.dumps(summary | {"overload": "16/s is asked"}))
    with pytest.raises(ConfigError, match="has no intervals: 16/s is asked"):
        figures.intervals(copy)
    for key, ends in (("mean_ttft_ms", (0.5, 2.0)), ("mean_tpot_ms", (0.9, 1.25)), ("output_throughput", (0.8, 1.1))):
        summary[f"{key}_interval"] = [summary[key] * end for end in ends]
    (copy / "summary.json").write_text(json.dumps(summary | {"intervals_rest_on": "31 published points of this model"}))
    (bars,) = figures.intervals(copy).data
    assert bars.base == pytest.approx((0.5, 0.9, 0.8)) and bars.x == pytest.approx((1.5, 0.35, 0.3))
    assert [name.partition(" ")[0] for name in bars.y] == ["mean", "mean", "output"]
    page = page_of(copy)
    tiles = {name: below for name, _, below in page.tiles}
    low, high = (format_number(end) for end in summary["output_throughput_interval"])
    assert f"80 %: {low} to {high}" in tiles["output tokens/s"] and "(80 %: " in tiles["p99 TTFT"]
    assert ("intervals", "The 80 % intervals rest on 31 published points of this model.") in page.provenance
    (table,) = page.tables
    assert table.columns[-1] == "mean, 80 %" and [row[-1] == "–" for row in table.rows] == [False, False, True, True]
    assert [one.name for one in page.pictures].count("intervals") == 1


def test_a_sweep_is_drawn_with_a_line_per_deployment(made):
    drawn = figures.throughput_against_latency(made["sweep"])
    assert [line.name for line in drawn.data] == ["steps 0", "steps 3"] and all(len(line.x) == 2 for line in drawn.data)
    by_steps = figures.against(made["sweep"], "speculation.steps", "accept_length")
    assert by_steps.data[0].y[0] == 1.0 and by_steps.data[0].y[1] > 1.5


def test_the_frontier_has_the_candidates_of_the_answer(made):
    answer = json.loads((made["plan"] / "answer.json").read_text())
    bars, *points = figures.frontier(made["plan"]).data
    assert points[0].error_x.array == (0.5,)
    assert bars.base == (6.0, 4.0) and bars.x == (3.0, 3.0), "from the low to the high end of the load"
    assert len({line.marker.color for line in points}) == 2, "a colour for each candidate"
    assert bars.y == tuple(one["name"] for one in answer["candidates"])
    loads = {name: load for line in points for name, load in zip(line.y, line.x, strict=True)}
    assert loads == {one["name"]: one["load"] for one in answer["candidates"] if one["load"]} and len(loads) == 2
    band, *lines = figures.latency_against_load(made["plan"]).data
    assert band.x == (4.0, 8.0, 16.0, 16.0, 8.0, 4.0)
    ends = [factor / 0.97 * y for factor, ys in ((0.9, (3.5, 5.5, 9.5)), (1.2, (9.5, 5.5, 3.5))) for y in ys]
    assert band.y == pytest.approx(ends, rel=1e-4)
    limits = [one for one in figures.latency_against_load(made["plan"]).layout.shapes if one.line.dash == "dash"]
    assert [(one.y0, one.y1) for one in limits] == [(6.0, 6.0)]
    assert lines[0].x == (4.0, 8.0, 16.0) and lines[0].y == (3.5, 5.5, 9.5), "the means over both seeds"


def test_a_waterfall_adds_up_to_the_round(made):
    run, plain = (figures.StoredRun(made[name]) for name in ("run", "plain"))
    parts, whole = figures.round_waterfall(run).data
    assert (whole.base, whole.y) == ((0.0,), ("round",)) and parts.y[-1].startswith("host")
    ends = [start + length for start, length in zip(parts.base, parts.x, strict=True)][:-1]
    assert parts.base[0] == 0 and parts.base[1 : len(ends)] == pytest.approx(ends[:-1], rel=1e-3)
    assert whole.x[0] == pytest.approx(max(ends[-1], parts.x[-1]), rel=1e-3)
    found = run.summary
    assert found["round_batch"] == round(found["verified_rows"] / found["decode_rounds"]) and found["round_steps"] == 3
    assert not any(part.startswith("round_part_draft") for part in plain.summary)


def test_two_runs_stand_side_by_side(command, refused, made, tmp_path):
    out = tmp_path / "pair.html"
    assert command("report", made["plain"], made["run"], "--out", out).code == 0 and out.exists()
    assert command("report", made["plain"], made["run"]).code == 0 and (made["plain"] / "beside-run.html").exists()
    for latency in ("ttft", "itl"):
        lines = [
            one for one in figures.latencies_of_two(made["plain"], made["run"], latency).data if one.mode == "lines"
        ]
        assert [one.name for one in lines] == ["plain", "run"] and len({one.line.color for one in lines}) == 2
        assert lines[1].x == figures.latencies(made["run"]).data[2 * list(LATENCIES).index(latency)].x
    assert [max(one.y) for one in figures.steps_of_two(made["plain"], made["run"]).data] == [0.0, 3.0]
    assert len(figures.batch_of_two(made["plain"], made["run"]).data) == 2
    page = page_of(made["plain"], made["run"])
    numbers = {row[0]: row[1:] for row in page.tables[0].rows}
    was, is_now = (figures.StoredRun(made[name]).summary["mean_tpot_ms"] for name in ("plain", "run"))
    assert numbers["mean TPOT, ms"][2] == f"{is_now / was - 1:+.1%}"
    assert ["speculation.algorithm", "NONE", "EAGLE3"] in page.tables[1].rows and not page.notices
    assert "is no run of simulate --out" in refused("report", made["run"], made["sweep"])


def test_a_tune_is_drawn_by_phase_and_batch_size(made):
    light, knee = figures.tuned_gains(made["tune"]).data
    assert (light.x, light.y) == ((0.5, 0.01), ("no speculation", "5 steps")) and knee.y == ("no speculation",)
    most, fewest = figures.tuned_steps(made["tune"]).data
    assert most.x[:2] == (1, 16) and most.y[:2] == (5, 1) and fewest.y[:2] == (2, 1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("run", ["40 of 40 requests completed", "a &lt;/script&gt; &amp; b", "hardware.server", "TTFT 200 ms"]),
        (
            "pair",
            ["From plain to run: output tokens/s +", "speculation.algorithm", "The scenario of plain", "accept length"],
        ),
        ("sweep", ["Most output tokens per second: steps 3, rate 20", "means of 2 seeds", "p99 TTFT by workload.rate"]),
        (
            "plan",
            [
                "80 %: 6 to 9",
                "80 %: 90% to 120%",
                "Simulated times rest on 31 published points.",
                "requests/s on 1 GPU",
                "Cannot run",
                "Timing of a test.",
                "a test: within it candidates are called equal",
                "Throughput of a GPU against the speed of a user",
                "GPUs against load",
                "p99 TPOT against",
            ],
        ),
        (
            "tune",
            [
                "Draft steps: 2, 5 from a batch of 1 on; 1 from",
                "it is 2.0% behind",
                "+35.0%",
                "cannot run",
                "was not written",
            ],
        ),
        ("twin", ["a CPU &lt;8 cores&gt;", "TTFT mean by 10.0%", "a processor for only 90%"]),
    ],
)
def test_a_page_is_one_file_that_says_the_answer_first(pages, name, says):
    text = pages[name].read_text(encoding="utf-8")
    shown, _, _ = text.partition("<script>")
    for words in says:
        assert words in shown.replace("\\u003c", "<"), words
    assert not re.search(r"(src|href)=.?(https?:)?//", shown) and len(text) < 6e6
    assert shown.index("class=answer") < shown.index("class=pictures") < shown.index("Where the numbers come from")


PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const root = document.documentElement, plots = document.querySelectorAll(".plot");
  const empty = [...plots].filter(plot => !plot.querySelector(".main-svg")).length;
  let cut = 0, least = 1;  // texts that leave their figure, and the least share of a figure's width that is left for its points
  for (const plot of plots) {
    const frame = plot.getBoundingClientRect();
    for (const text of plot.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (box.width && (box.left < frame.left - 1 || box.right > frame.right + 1)) cut += 1;
    }
    for (const grid of plot.querySelectorAll(".nsewdrag")) least = Math.min(least, grid.getBoundingClientRect().width / frame.width);
  }
  const tooWide = Math.max(0, root.scrollWidth - root.clientWidth);
  parent.postMessage([NAME, plots.length, empty, tooWide, cut, Math.floor(100 * least)].join(), "*");
}, 500));</script></body>"""


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1])
def test_pages_open_without_a_network_and_without_an_error(pages, tmp_path, turn):
    """At desktop and phone width, half of them in each turn, every figure is drawn whole, and nothing is wider
    than the window."""
    frames = []
    for number, (name, place) in enumerate(pages.items()):
        form = list(WIDTHS)[(number + turn + 1) % 2]
        copy = tmp_path / f"{name}-{form}.html"
        probe = PROBE.replace("NAME", json.dumps(f"{name}-{form}"))
        copy.write_text(place.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
        frames.append(f"<iframe src={copy.name} width={WIDTHS[form]} height=900></iframe>")
    note = "<script>addEventListener('message', e => document.body.append('[' + e.data + ']'))</script>"
    (tmp_path / "all.html").write_text("<!DOCTYPE html><body>" + note + "".join(frames), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=6000"]
    options += [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1400,1000",
    ]
    line = [CHROMIUM, *options, "--dump-dom", (tmp_path / "all.html").as_uri()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=180, check=False)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = dict(re.findall(r"\[([a-z]+-[a-z]+),([\d,]+)\]", done.stdout))
    assert len(found) == len(frames), done.stderr[-2000:]
    for name, counts in found.items():
        plots, empty, too_wide, cut, least_percent = map(int, counts.split(","))
        assert plots >= 2 and (empty, too_wide, cut) == (0, 0, 0), f"{name}: {counts}"
        assert least_percent >= 40, f"{name}: {least_percent} % of a figure's width are left for its points"


def test_what_a_busy_machine_measured_is_no_error_of_the_simulation(tmp_path):
    record = twin_record()
    for one in record["comparisons"][:2]:
        one["processor_share"] = 0.5
    (tmp_path / "twin.json").write_text(json.dumps(record))
    page = page_of(tmp_path / "twin.json")
    assert "2 of 4 comparisons count as not measured" in page.notices[0] and "median of 2 comparisons" in page.answer[0]
    assert [row[2] == "not measured" for row in page.tables[0].rows] == [True, True, False, False]
    for one in record["comparisons"]:
        one["processor_share"] = 0.5
    (tmp_path / "twin.json").write_text(json.dumps(record))
    page = page_of(tmp_path / "twin.json")
    assert page.answer == ["Not measured: other work ran on the machine."] and not page.pictures
    (tmp_path / "twin.json").write_text(json.dumps(record | {"clock": "cpu"}))
    assert len(page_of(tmp_path / "twin.json").pictures) == 4


def test_a_file_of_another_program_is_not_replaced(command, made, tmp_path):
    out = tmp_path / "page.html"
    assert command("report", made["twin"], "--out", out).code == 0
    assert command("report", made["twin"], "--out", out).code == 0, "its own report is replaced"
    out.write_text("<html>mine</html>")
    code, _, errors = command("report", made["twin"], "--out", out)
    assert code == 2 and "is not a report" in errors and out.read_text() == "<html>mine</html>"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "cannot be read"),
        ("empty", "neither summary.json"),
        ("list.json", "is no JSON object"),
        ("other.json", "no comparisons"),
        ("old", "no completed"),
        ("stopped", "no run that has ended"),
        ("searching", "no result.json: the search has not ended"),
    ],
)
def test_what_is_no_result_is_refused(refused, tmp_path, source, message):
    for folder in ("empty", "old", "stopped"):
        (tmp_path / folder).mkdir()
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "old" / "summary.json").write_text("{}")
    (tmp_path / "stopped" / "question.json").write_text('{"kind": "sweep", "scenario": {}}')
    tune_store(tmp_path / "searching")
    (tmp_path / "searching" / "result.json").unlink()
    assert message in refused("report", tmp_path / source)


def test_pictures_without_a_browser_are_one_message(command, made, tmp_path, monkeypatch):
    pytest.importorskip("kaleido")
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nothing"))
    code, _, errors = command("report", made["twin"], "--out", tmp_path / "t.html", "--png", tmp_path / "pictures")
    assert code == 2 and "--png needs Chrome or Chromium" in errors


@needs_browser
@pytest.mark.slow
def test_pictures_are_written(command, made, tmp_path, monkeypatch):
    pytest.importorskip("kaleido")
    monkeypatch.setenv("BROWSER_PATH", CHROMIUM)
    assert command("report", made["twin"], "--out", tmp_path / "t.html", "--png", tmp_path / "p").code == 0
    written = sorted((tmp_path / "p").iterdir())
    assert len(written) == 4 and all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.mark.slow
def test_the_notebook_of_the_examples_runs():
    cells = json.loads(
        (Path(__file__).parents[2] / "examples" / "planning" / "planning.ipynb").read_text(encoding="utf-8")
    )["cells"]
    found: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "planning.ipynb", "exec"), found)
    assert len(found["throughput"].data) == 2 and sum(len(line.x) for line in found["frontier"].data) == 2
    assert (found["folder"] / "plan" / "report.html").exists()
