"""Measured steps: their tables, what is between and beyond their points, a stopped measuring that goes on, profiles
that do not fit."""

import numpy as np
import pytest
from foredraft.core.contract.step import RoundShape
from foredraft.core.errors import ConfigError
from foredraft.gpu.measure.cells import MeasuringPlan
from foredraft.gpu.measure.turns import TimingRecord
from foredraft.observe.output_files import write_json
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.calibration import Calibration, load_calibration, profile_document, read_profile
from foredraft.sim.cost.executor_steps import StepCost
from foredraft.sim.scenario_file import scenario_with
from foredraft.twin.measuring import measure_steps
from hypothesis import given
from hypothesis import strategies as st
from made_steps import AXIS, made_grid, made_steps

PLAN = MeasuringPlan(repeats=1, rows=(1, 2), contexts=(4, 30))


def profile(steps) -> Calibration:
    return Calibration("own", "a test", "a device", "target", steps=steps)


def test_steps_come_back_from_a_profile_as_they_were_written(tmp_path):
    steps = made_steps("NONE", "EAGLE3", topk=2)
    write_json(tmp_path / "profile.json", profile_document(profile(steps)))
    read = load_calibration(tmp_path / "profile.json")
    assert profile_document(read) == profile_document(profile(steps))
    assert read.steps.algorithms["EAGLE3"].rounds[2].draft.axes == steps.algorithms["EAGLE3"].rounds[2].draft.axes


@given(
    rows=st.integers(1, 8),
    steps=st.sampled_from([1, 2, 3, 5, 7]),
    context=st.floats(1, 2000),
    accepted=st.integers(1, 8),
)
def test_times_between_and_beyond_the_points(rows, steps, context, accepted):
    """The grids are linear, so interpolation is exact, and context goes on behind its end."""
    accepted = min(accepted, steps + 1)
    tables = made_steps("EAGLE3").algorithms["EAGLE3"]
    cost = StepCost(tables, True, "made")
    parts = (("draft", {"steps": steps}), ("verify", {"nodes": steps + 1}), ("extend", {"accepted": accepted}))
    expected = sum(float(made_grid(name).at(rows=rows, context=context, **own).ns) for name, own in parts)
    expected += float(made_grid("kv_move").at(steps=steps, rows=rows).ns) + float(tables.rest.at(rows=rows).ns)
    exact = (
        100_000 * 5
        + 50_000 * 5 * rows
        + 900 * 3 * context
        + 2 * 400_000 * steps
        + 70_000 * (steps + 1)
        + 30_000 * accepted
    )
    assert expected == pytest.approx(exact)
    found = cost.rounds_ns(rows, RoundShape.chain(steps), np.array([context]), np.array([accepted]))
    assert found[0] == pytest.approx(exact, abs=2)


def test_below_the_first_point_the_first_counts_and_a_falling_end_does_not_go_on():
    grid = made_grid("prefill")
    assert grid.at(chunks=1, tokens=1, context=0).ns == grid.at(chunks=1, tokens=8, context=1).ns
    falling = made_grid("rest", AXIS | {"rows": (1, 2)})
    context = made_grid("graph", AXIS | {"rows": (1,)})
    context.ns[0, -1] = 1.0
    assert context.at(rows=1, context=9999).ns == 1.0
    assert falling.at(rows=1.5).ns == pytest.approx(175_000.0)


@pytest.mark.parametrize(
    ("change", "key"),
    [({"max_running": 9}, "rows"), ({"steps": 8}, "steps"), ({"topk": 2, "steps": 3, "num_draft_tokens": 6}, "rounds")],
)
def test_what_was_not_measured_is_refused(make_arms, change, key):
    (arm,) = make_arms(way={"draft": "EAGLE3", "steps": 3, **change})
    with pytest.raises(ConfigError) as refused:
        made_steps("EAGLE3").cost(arm.spec, "profile.json")
    assert refused.value.problems[0].key == f"steps.algorithms.EAGLE3.{key}"


def test_a_profile_of_another_algorithm_or_model_is_refused(make_arms):
    (arm,) = make_arms(way={"draft": "EAGLE3", "steps": 3})
    with pytest.raises(ConfigError, match="EAGLE3 was not measured; the profile has NONE"):
        made_steps("NONE").cost(arm.spec, "profile.json")
    with pytest.raises(ConfigError, match=r"steps.target.hidden: measured with 32, but the run's model has 64"):
        made_steps("NONE").check_target("profile.json", hidden=64)


def spelt_twice(table, name, other):
    table[other] = table.setdefault(name, {"axes": {"rows": [1], "context": [8]}, "ns": [[5]]})


@pytest.mark.parametrize(
    ("damage", "key"),
    [
        (lambda d: d["algorithms"]["NONE"]["rest"].update(ns=[1]), "steps.algorithms.NONE.rest.ns"),
        (lambda d: d["algorithms"]["NONE"]["rounds"]["1"].pop("verify"), "steps.algorithms.NONE.rounds.1.verify"),
        (
            lambda d: d["algorithms"]["NONE"]["prefill"]["axes"].update(tokens=[8, 8]),
            "steps.algorithms.NONE.prefill.axes.tokens",
        ),
        (lambda d: d["host"].update(plan_base_ns=-1), "steps.host.plan_base_ns"),
        (lambda d: d["spread"].update(decode=float("nan")), "steps.spread.decode"),
        (lambda d: d.update(padded=1), "steps.padded"),
        (lambda d: spelt_twice(d["algorithms"]["NONE"]["rounds"], "1", "01"), "steps.algorithms.NONE.rounds.01"),
        (
            lambda d: spelt_twice(d["algorithms"]["NONE"]["graphs"], "2-1-3", "02-1-3"),
            "steps.algorithms.NONE.graphs.02-1-3",
        ),
        (lambda d: d.pop("algorithms"), "steps.algorithms"),
        (lambda d: d.update(extra=0), "steps.extra"),
    ],
)
def test_a_damaged_profile_is_named_by_its_key(damage, key):
    document = profile_document(profile(made_steps("NONE")))
    damage(document["steps"])
    with pytest.raises(ConfigError) as refused:
        read_profile(document, "profile.json")
    assert key in [problem.key for problem in refused.value.problems]


def test_a_scenario_takes_measured_steps(models, tmp_path):
    steps = made_steps("EAGLE3")
    write_json(tmp_path / "profile.json", profile_document(profile(steps)))
    config = models["target"] / "config.json"
    text = config.read_text().replace("float32", "bfloat16")
    (tmp_path / "config.json").write_text(text)
    settings = {
        "model.target": str(tmp_path / "config.json"),
        "model.draft_vocab": 64,
        "hardware.profile": str(tmp_path / "profile.json"),
        "hardware.cuda_graphs": False,
        "speculation.policy": "fixed",
        "speculation.steps": 3,
        "engine.max_running": 8,
        "engine.kv_slots": 1000,
    }
    run = assemble(scenario_with({}, settings))
    assert run.host == steps.host and run.cost.priced_by == "steps measured on a device"
    del settings["engine.kv_slots"]
    with pytest.raises(ConfigError, match=r"engine\.kv_slots"):
        assemble(scenario_with({}, settings))


class Stopped(Exception):
    pass


def test_measuring_goes_on_where_it_was_stopped(make_arms, tmp_path):
    """A stopped run leaves what it measured; the next one times the rest only, and its grids have every point."""
    arms = make_arms(
        plain={"max_running": 2, "context_len": 64},
        chain={"draft": "EAGLE3", "steps": 2, "max_running": 2, "context_len": 64},
    )
    path, about = tmp_path / "profile.json.partial", {"model": "target"}

    def stop(done, of, what):
        if done == of // 2:
            raise Stopped

    record = TimingRecord(path, about)
    with pytest.raises(Stopped):
        measure_steps(arms, PLAN, record, stop)
    record.close(finished=False)
    half = len(record.values)
    with path.open("a") as file:
        file.write('{"key": "torn')  # the line that was being written
    again = TimingRecord(path, about)
    assert again.values == record.values and half > 10
    measured = measure_steps(arms, PLAN, again)
    again.close(finished=True)
    assert {key: again.values[key] for key in record.values} == record.values
    assert len(again.values) > half and not path.exists()
    assert set(measured.steps.algorithms) == {"NONE", "EAGLE3"}
    chain = measured.steps.algorithms["EAGLE3"].rounds[1]
    assert chain.draft.axes == {"steps": (2,), "rows": (1, 2), "context": (4, 30)}
    assert (chain.verify.ns > 0).all() and (chain.extend.ns > 0).all()
    assert measured.steps.host.plan_ns(2) > 0
    for arm in arms:
        measured.steps.cost(arm.spec, "profile")
    assert [closure.steps > 0 and closure.priced_s > 0 for closure in measured.closures] == [True, True]


def test_captured_rounds_are_timed_as_graphs(make_arms):
    """Without a GPU a captured round runs its function anew; its time is that of the whole round, by captured size."""
    (arm,) = make_arms(chain={"draft": "EAGLE3", "steps": 1, "max_running": 2, "context_len": 64, "graphs": True})
    steps = measure_steps([arm], PLAN).steps
    graph = steps.algorithms["EAGLE3"].graphs[(1, 1, 2)]
    assert graph.axes == {"rows": (1, 2), "context": (4, 30)} and (graph.ns > 0).all()
    assert (steps.algorithms["EAGLE3"].rounds[1].draft.ns == 0).all()
