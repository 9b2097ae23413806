"""Runs whose profile has measured steps (`hardware.profile`):
everything that a run, its report and a plan ask of their cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from foredraft.core.contract.step import RoundShape
from foredraft.core.errors import ConfigError
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.planning.candidates.rounds import RoundModel
from foredraft.planning.rounds.bottleneck import bottleneck
from foredraft.sim.assembly import assemble
from foredraft.sim.assembly.explaining import derived_rows, timing_line
from foredraft.sim.cost.calibration import Calibration, profile_document
from foredraft.sim.effects.given_keys import refuse_without_effect
from foredraft.sim.effects.notices import notices_of
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import load_scenario
from foredraft.sim.summary.summary import summarize_run
from made_steps import made_grid, made_steps

ROWS_OF_THE_GRAPH = 8


@pytest.fixture
def settings(tmp_path) -> list[str]:
    """A scenario with such a profile; rounds of 3 steps were captured as graphs."""
    steps = replace(made_steps("EAGLE3", "NONE"), target={"layers": 32})
    graphs = {RoundShape.chain(3): made_grid("graph")}
    algorithms = {name: replace(tables, graphs=graphs) for name, tables in steps.algorithms.items()}
    calibration = Calibration("made", "a test", "H100", "llama-3.1-8b", steps=replace(steps, algorithms=algorithms))
    (tmp_path / "profile.json").write_text(json.dumps(profile_document(calibration)))
    return [
        f"hardware.profile={tmp_path / 'profile.json'}",
        "engine.kv_slots=50000",
        "engine.max_running=8",
        "engine.mode=synchronous",
        "workload.num_requests=20",
    ]


@pytest.mark.parametrize("policy", ["fixed", "ema", "goodput"])
@pytest.mark.parametrize("cuda_graphs", ["true", "false"])
def test_a_run_takes_its_times_from_the_profile(settings, policy, cuda_graphs):
    scenario, _ = load_scenario(
        None, [*settings, f"speculation.policy={policy}", f"hardware.cuda_graphs={cuda_graphs}"]
    )
    metrics = RunMetrics()
    simulation = Simulation(scenario, sinks=lambda replica: [metrics.sink(replica)])
    report = simulation.run()
    summary = summarize_run(scenario, report, metrics)
    assert report.complete and summary["completed"] == 20
    assert simulation.notices == (), "the profile is of this model and of one device"
    assert "steps measured on a device" in timing_line(simulation.assembly)
    assert bottleneck(simulation.assembly, summary) in ("host", "prefill", "compute", "weights' bandwidth", "KV memory")


def test_steps_of_a_former_profile_are_read(settings, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 1}))
    assert assemble(load_scenario(None, settings)[0]).deployment.calibration.steps is not None


def test_measured_steps_are_those_of_one_kind_of_engine(settings):
    pools = ["disaggregation.prefill=1", "disaggregation.decode=1", "engine.page_size=16"]
    assert assemble(load_scenario(None, [*settings, *pools])[0]).prefill is None
    with pytest.raises(
        ConfigError, match=r"hardware\.profile: has steps that were measured on one device, and the pools"
    ):
        assemble(load_scenario(None, [*settings, *pools, "hardware.prefill.tensor_parallel=2"])[0])


def test_a_profile_of_another_model_is_named(settings):
    scenario, origins = load_scenario(None, [*settings, "model.target=llama-2-7b"])
    (notice,) = notices_of(assemble(scenario), origins)
    assert "was calibrated with llama-3.1-8b; its fit may be worse for llama-2-7b" in notice


def test_what_explain_derives_is_what_was_measured(settings):
    scenario, _ = load_scenario(None, settings)
    names = [name for name, *_ in derived_rows(assemble(scenario))]
    assert any(name.startswith("measured verify of chains") for name in names)
    assert not any(name.startswith("captured") for name in names), "the profile says which rounds were captured"


def test_experts_have_no_price_of_their_own(settings):
    scenario, origins = load_scenario(None, [*settings, "model.expert_independence=0.5"])
    with pytest.raises(ConfigError, match=r"expert_independence: 0\.5 has no effect: the steps of the profile"):
        refuse_without_effect(assemble(scenario), origins)


def test_a_round_of_a_plan_is_priced_as_the_run_prices_it(settings):
    scenario, _ = load_scenario(None, settings)
    cost = RoundModel(scenario).with_steps(3).cost
    assert cost.decode_parts(4, RoundShape.chain(3), 4 * 100) == {
        "round": cost.decode_ns(4, RoundShape.chain(3), 4 * 100)
    }
    assert (
        sum(RoundModel(scenario).round(4, 100, 3).parts_ns.values())
        == cost.decode_ns(4, RoundShape.chain(3), 4 * 100)
        > 0
    )


def test_rounds_are_captured_up_to_the_largest_graph(settings):
    cost = assemble(load_scenario(None, settings)[0]).cost
    assert cost.is_captured(ROWS_OF_THE_GRAPH, 4)
    assert not cost.is_captured(ROWS_OF_THE_GRAPH + 1, 4) and not cost.is_captured(1, 2)
