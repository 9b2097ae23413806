"""Figures of plans and sweeps: tokens of a GPU against those of a user, attainment and cost against the load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="the extra `report` is not installed")

from foredraft.core.errors import ConfigError
from foredraft.observe import figures
from foredraft.observe.figures.curves import rising
from hypothesis import given
from hypothesis import strategies as st

TPOT = {"name": "tpot_p99", "key": "p99_tpot_ms", "limit_ms": 40.0}
OUTPUTS = 100.0


def run(settings: dict[str, Any], tpot_ms: float | None, seed: int = 0, **more: Any) -> dict[str, Any]:
    summary = {"seed": seed, "p99_tpot_ms": tpot_ms, "mean_tpot_ms": tpot_ms, "mean_output_tokens": OUTPUTS}
    summary |= {"submitted": 600, "output_throughput": 1.0, "overloaded": False, **more}
    return {"settings": {**settings, "seed": seed}, "status": "done", "summary": summary}


def candidate(name: str, settings: dict[str, Any], status: str = "equal", **more: Any) -> dict[str, Any]:
    found = {"name": name, "settings": settings, "status": status, "load": 8.0, "gpus": 2, "tokens_per_s": 800.0}
    found |= {"half_width": None, "bill": None, "tightest": "tpot_p99", "taken": 1.0}
    return found | dict.fromkeys(("load_interval", "gpus_interval", "taken_interval")) | more


def store(folder: Path, kind: str, runs: list[Any], answer: dict[str, Any] | None = None, **tables: Any) -> Path:
    folder.mkdir()
    scenario = {"hardware": {"tensor_parallel": 2, "replicas": 1}, **tables}
    (folder / "question.json").write_text(json.dumps({"kind": kind, "scenario": scenario, "version": "1"}))
    (folder / "trials.jsonl").write_text("".join(json.dumps(one) + "\n" for one in runs))
    if answer is not None:
        whole = {"limits": [TPOT], "load": None, "load_key": "workload.rate", "load_unit": "requests/s", **answer}
        (folder / "answer.json").write_text(json.dumps(whole))
    return folder


def lines(made: Any) -> dict[str, Any]:
    return {one.name: one for one in made.data if "lines" in one.mode}


def test_the_tokens_of_a_gpu_stand_above_those_of_a_user(tmp_path):
    plain, drafts = ({"speculation.steps": steps} for steps in (0, 3))
    runs = [run({**plain, "workload.rate": rate}, tpot) for rate, tpot in ((2.0, 20.0), (8.0, 50.0))]
    runs += [run({**drafts, "workload.rate": rate}, tpot) for rate, tpot in ((2.0, 10.0), (8.0, 25.0))]
    runs += [
        run({**drafts, "workload.rate": 8.0}, 20.0, seed=1, mean_tpot_ms=1.0)
    ]  # a seed that the other load has not
    candidates = [candidate("drafts", drafts, "best", taken_interval=[0.8, 1.25]), candidate("plain", plain, "behind")]
    made = figures.throughput_per_gpu(store(tmp_path / "plan", "plan", runs, {"candidates": candidates}))
    found = lines(made)
    assert found["plain"].x == (50.0, 20.0) and found["plain"].y == (100.0, 400.0), "two GPUs share the tokens"
    assert found["drafts"].x == (100.0, 40.0), "by the seed that both loads have"
    assert found["drafts"].error_x.array == (0.0, 10.0), "up to the other seed, 50"
    assert found["plain"].marker.symbol == ("circle", "circle-open"), "50 ms exceed the limit"
    (region,) = [one for one in made.layout.shapes if one.type == "rect"]
    assert region.x0 == 25.0
    (band,) = [one for one in made.data if one.fill]
    assert band.x == pytest.approx((80.0, 32.0, 50.0, 125.0))


def test_a_plan_without_a_limit_of_tpot_takes_the_mean_and_has_no_region(tmp_path):
    settings = {"speculation.steps": 1}
    runs = [run({**settings, "workload.rate": 2.0}, 20.0, p99_tpot_ms=80.0, p99_ttft_ms=500.0)]
    answer = {"limits": [{"name": "ttft_p99", "key": "p99_ttft_ms", "limit_ms": 1e3}]}
    answer["candidates"] = [candidate("one", settings, "best")]
    made = figures.throughput_per_gpu(store(tmp_path / "plan", "plan", runs, answer))
    assert lines(made)["one"].x == (50.0,) and not made.layout.shapes


def test_parts_of_a_trace_are_compared_by_its_speed(tmp_path):
    """The first round takes the busiest part of a trace, whose own throughput is no measure of the whole."""
    settings = {"speculation.steps": 1}
    rough = run(
        {**settings, "workload.rate_scale": 1.0, "workload.start_s": 9.0}, 10.0, submitted=100, output_throughput=900.0
    )
    fine = [
        run({**settings, "workload.rate_scale": scale}, 20.0, output_throughput=200.0 * scale) for scale in (2.0, 4.0)
    ]
    answer = {"load_key": "workload.rate_scale", "load_unit": "× the trace"}
    answer["candidates"] = [candidate("one", settings, "best")]
    made = figures.throughput_per_gpu(store(tmp_path / "plan", "plan", [rough, *fine], answer, workload={"trace": "x"}))
    assert lines(made)["one"].y == (100.0, 200.0, 400.0)


def test_a_short_run_gives_way_to_a_longer_one_at_no_more_load(tmp_path):
    settings = {"speculation.steps": 1}
    runs = [run({**settings, "workload.rate": 2.0}, 10.0, submitted=100)]
    runs += [run({**settings, "workload.rate": 4.0}, 20.0)]
    runs += [
        run({**settings, "workload.rate": rate, "workload.num_requests": 100}, 15.0, submitted=100)
        for rate in (4.0, 5.0)
    ]
    answer = {"candidates": [candidate("one", settings, "best")]}
    made = figures.latency_against_load(store(tmp_path / "plan", "plan", runs, answer))
    assert lines(made)["one"].x == (2.0, 4.0) and lines(made)["one"].y == (10.0, 20.0)


def test_the_line_of_a_latency_meets_its_limit_once(tmp_path):
    """Means of few seeds go up and down around the limit; the line is their least-squares fit that never falls."""
    settings = {"speculation.steps": 1}
    tried = {4.0: (20.0,), 4.5: (36.0,), 5.0: (30.0, 48.0), 5.5: (30.0,), 6.0: (50.0,), 7.0: (44.0,), 8.0: (90.0,)}
    runs = [
        run({**settings, "workload.rate": rate}, tpot, seed)
        for rate, values in tried.items()
        for seed, tpot in enumerate(values)
    ]
    made = figures.latency_against_load(
        store(tmp_path / "plan", "plan", runs, {"candidates": [candidate("one", settings, "best")]})
    )
    line, (points,) = lines(made)["one"], [one for one in made.data if one.name == "one, means"]
    assert line.x == points.x == tuple(tried) and points.y == (20.0, 36.0, 39.0, 30.0, 50.0, 44.0, 90.0)
    assert line.y == (20.0, *[36.0] * 3, 47.0, 47.0, 90.0), "four values of 36 in the mean, then two of 47"
    assert [*line.y] == sorted(line.y) == rising([*tried.values()])


@given(st.lists(st.lists(st.floats(1, 100), min_size=1, max_size=4), min_size=1, max_size=8))
def test_a_rising_line_has_the_mean_of_all_values(groups):
    line = rising(groups)
    assert line == sorted(line) and len(line) == len(groups)
    total = sum(value * len(values) for value, values in zip(line, groups, strict=True))
    assert total == pytest.approx(sum(map(sum, groups)))


def test_loads_are_those_of_an_engine_where_their_number_was_searched(tmp_path):
    settings = {"speculation.steps": 1}
    runs = [run({**settings, "workload.rate": 4.0, "hardware.replicas": 1}, 10.0)]
    runs += [
        run({**settings, "workload.rate": 24.0, "hardware.replicas": engines}, 60.0 / engines) for engines in (2, 3)
    ]
    answer = {"load": 24.0, "candidates": [candidate("one", settings, "best", load=24.0, gpus=6, gpus_interval=[4, 8])]}
    place = store(tmp_path / "plan", "plan", runs, answer)
    made = figures.latency_against_load(place)
    assert lines(made)["one"].x == (4.0, 8.0, 12.0) and "per engine" in made.layout.xaxis.title.text
    made = figures.cost_against_load(place)
    corners = dict(zip(lines(made)["one"].x, lines(made)["one"].y, strict=True))
    assert corners[8.0] == 4 and corners[16.0] == 6, "an engine of two GPUs for each 8 requests/s"
    (band,) = [one for one in made.data if one.fill]
    assert band.x[1] == 6.0 and 12.0 in band.x, "24 requests/s on 8 and on 4 GPUs"


def test_the_cost_is_that_of_whole_deployments(tmp_path):
    plain, drafts = ({"speculation.steps": steps} for steps in (0, 3))
    runs = [run({**one, "workload.rate": 2.0}, 10.0) for one in (plain, drafts)]
    bill = {"planned": 3.0 * 2 * 1e6 / 3600 / 800}  # of two GPUs for 3 an hour each
    candidates = [candidate("drafts", drafts, "best", load_interval=[5.0, 10.0], bill=bill)]
    candidates += [candidate("plain", plain, "behind", load=4.0, bill=bill)]
    place = store(tmp_path / "plan", "plan", runs, {"candidates": candidates})
    made = figures.cost_against_load(place)
    assert lines(made)["drafts"].x == (0, 8, 8, 16, 16, 24) and lines(made)["drafts"].y == (6, 6, 12, 12, 18, 18)
    assert lines(made)["plain"].y[-1] == 36 and made.layout.yaxis.title.text == "price per hour"
    candidates[1]["bill"] = None
    made = figures.cost_against_load(store(tmp_path / "unpriced", "plan", runs, {"candidates": candidates}))
    assert lines(made)["plain"].y[-1] == 12 and made.layout.yaxis.title.text == "GPUs"


def test_twelve_candidates_have_twelve_colours_and_the_others_are_counted(tmp_path):
    settings = [{"speculation.steps": steps} for steps in range(14)]
    runs = [run({**one, "workload.rate": rate}, 10.0 * rate) for one in settings for rate in (1.0, 2.0)]
    found = [candidate(f"EAGLE3, {place} steps, on H100", one) for place, one in enumerate(settings)]
    place = store(tmp_path / "plan", "plan", runs, {"candidates": found})
    for made in (figures.latency_against_load(place), figures.throughput_per_gpu(place)):
        drawn = [one for one in made.data if one.line.color]
        assert len({one.line.color for one in drawn}) == len(drawn) == 12
        assert not made.layout.showlegend and len(made.layout.annotations) >= 12
        assert "all: EAGLE3, on H100" in made.layout.meta["note"] and "2 more have no line" in made.layout.meta["note"]


def test_runs_without_a_value_leave_their_point_out(tmp_path):
    some, none = ({"speculation.steps": steps} for steps in (1, 2))
    runs = [run({**some, "workload.rate": rate}, tpot) for rate, tpot in ((1.0, None), (2.0, 20.0))]
    runs += [run({**none, "workload.rate": 1.0}, None)]
    answer = {"candidates": [candidate("some", some, "best"), candidate("none", none)]}
    place = store(tmp_path / "plan", "plan", runs, answer)
    for made in (figures.latency_against_load(place), figures.throughput_per_gpu(place)):
        assert {name: len(one.x) for name, one in lines(made).items()} == {"some": 1}


def test_the_attainment_of_a_sweep_is_drawn_if_it_has_an_slo(tmp_path):
    runs = [
        run({"workload.rate": rate, "speculation.steps": steps}, 10.0, seed, slo_attainment=share - seed / 100)
        for rate, share in ((1.0, 1.0), (2.0, 0.8))
        for steps in (0, 3)
        for seed in (0, 1)
    ]
    place = store(tmp_path / "sweep", "sweep", runs, slo={"ttft_ms": 200.0, "tpot_ms": None})
    made = figures.attainment_against_load(place)
    assert lines(made)["steps 3"].x == (1.0, 2.0) and lines(made)["steps 3"].y == pytest.approx((0.995, 0.795))
    (points,) = [one for one in made.data if one.name == "steps 3, means"]
    assert points.error_y.array == pytest.approx((0.005, 0.005))
    assert "TTFT below 200 ms" in made.layout.meta["note"]
    for one in runs:
        one["summary"]["slo_attainment"] = None
    with pytest.raises(ConfigError, match="no share of requests within an SLO"):
        figures.attainment_against_load(store(tmp_path / "without", "sweep", runs))
    del runs[:4]  # one load is left
    with pytest.raises(ConfigError, match="does not vary a load"):
        figures.throughput_per_gpu(store(tmp_path / "one", "sweep", runs))


def test_the_share_that_a_plan_wants_is_marked(tmp_path):
    """Beside it, points with a smaller share are open in the figure of speeds."""
    settings = {"speculation.steps": 1}
    runs = [
        run({**settings, "workload.rate": rate}, 10.0 * rate, slo_attainment=share, p99_ttft_ms=500.0)
        for rate, share in ((1.0, 1.0), (2.0, 0.96), (4.0, 0.9))
    ]
    wanted = {
        "name": "attainment",
        "key": "slo_attainment",
        "limit_ms": None,
        "share": 0.95,
        "text": "95 % of requests",
    }
    answer = {"limits": [wanted], "candidates": [candidate("one", settings, "best", tightest="attainment")]}
    place = store(tmp_path / "plan", "plan", runs, answer, slo={"ttft_ms": 200.0, "attainment": 0.95})
    made = figures.attainment_against_load(place)
    (line,) = [one for one in made.layout.shapes if one.type == "line"]
    assert line.y0 == line.y1 == 0.95 and any(one.text == "limit 95 %" for one in made.layout.annotations)
    assert made.layout.meta["note"].startswith("TTFT below 200 ms") and "0.95 ms" not in made.layout.meta["note"]
    assert lines(figures.throughput_per_gpu(place))["one"].marker.symbol == ("circle", "circle", "circle-open")
    with pytest.raises(ConfigError, match="limits no latency"):
        figures.latency_against_load(place)


def test_whiskers_reach_the_load_that_half_of_the_runs_hold(tmp_path):
    found = [candidate("one", {}, "best", half_load=9.5), candidate("two", {}, half_load=None)]
    made = figures.frontier(store(tmp_path / "plan", "plan", [], {"candidates": found}))
    one, two = (point for point in made.data if point.mode == "markers")
    assert one.x == (8.0,) and one.error_x.array == (1.5,) and one.error_x.arrayminus == (0,)
    assert two.error_x.array is None and "half of the runs" in made.layout.meta["note"]


def test_words_stand_side_by_side_and_lines_through_them_have_their_names(tmp_path):
    runs = [
        run({"hardware.gpu": gpu, "speculation.steps": steps}, 10.0, output_throughput=100.0 * place + steps)
        for place, gpu in enumerate(("H100", "H200"))
        for steps in (1, 3)
    ]
    made = figures.against(store(tmp_path / "sweep", "sweep", runs), "hardware.gpu", "output_throughput")
    assert made.layout.xaxis.ticktext == ("H100", "H200") and made.layout.xaxis.tickvals == (0, 1)
    assert [(one.x, one.y) for one in made.data] == [((0, 1), (1.0, 101.0)), ((0, 1), (3.0, 103.0))]
    assert [one.text for one in made.layout.annotations] == ["steps 3", "steps 1"]
