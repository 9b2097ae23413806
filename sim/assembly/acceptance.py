"""The acceptance of a scenario: its own numbers, and a preset for those that it leaves out."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ...core.acceptance.presets import PresetChoice, TraceAcceptance, usual_preset
from ...core.acceptance.process import AcceptanceProcess, GaussianAcceptance, RegimeAcceptance
from ...core.algorithm.algorithm import SpecAlgorithm
from ...core.contract.step import RoundShape
from ...core.model_shape import ModelShape
from ...core.scheduler.spec import EngineSpec
from ..scenario import Scenario
from ..workload.acceptance.runs import load_recorded_runs


def acceptance_of(
    scenario: Scenario, algorithm: SpecAlgorithm, target: ModelShape, spec: EngineSpec
) -> tuple[PresetChoice, AcceptanceProcess]:
    """Return the preset that gives what the scenario leaves out, and the process from which rounds draw their accepted
    drafts."""
    name = algorithm.draft_form or algorithm.name
    choice = usual_preset(name, target.family, algorithm.usual_acceptance, scenario.acceptance.preset)
    return choice, _process(scenario, choice, spec)


def _process(scenario: Scenario, choice: PresetChoice, spec: EngineSpec) -> AcceptanceProcess:
    table, seed = scenario.acceptance, scenario.seed
    if table.recorded is not None:
        return TraceAcceptance.of_runs(load_recorded_runs(table.recorded), seed=seed)
    base = choice.preset
    regimes = table.regimes
    process = GaussianAcceptance(
        tuple(table.conditional) if table.conditional is not None else base.conditional,
        seed,
        base.request_share if table.request_share is None else table.request_share,
        base.field_share if table.field_share is None else table.field_share,
        table.correlation_len or base.correlation_len,
        table.drift_per_1k_tokens,
        RegimeAcceptance(regimes.stretch_len, tuple(regimes.shifts), tuple(regimes.weights)) if regimes else None,
        draft_confidence=base.draft_confidence if table.conditional is None else None,
    )
    if table.mean_length is None or not spec.max_steps:
        return process
    tree = (spec.largest_round, table.rank_ratio) if spec.topk > 1 else None
    return replace(_with_mean(replace(process, seed=0), table.mean_length, spec.max_steps, tree), seed=seed)


@lru_cache(maxsize=64)
def _with_mean(
    process: GaussianAcceptance, mean: float, steps: int, tree: tuple[RoundShape, float] | None
) -> GaussianAcceptance:
    """Return `process`, more or less likely to accept at every depth, so that rounds of `steps` emit `mean`
    tokens on average."""
    from ...core.acceptance.fit import fit_means  # seldom needed

    drafted_as = None if tree is None else lambda process: process.for_tree(*tree)
    return fit_means([(steps, min(mean, steps + 1.0))], process, drafted_as)[0]


def acceptance_source(scenario: Scenario, choice: PresetChoice) -> str:
    """Say where the acceptance of a run comes from."""
    table = scenario.acceptance
    if table.mean_length is not None:
        return f"the scenario's mean, with the spread and correlation of preset {choice.preset.name}"
    if table.recorded is not None or table.conditional is not None:
        return "scenario"
    return f"preset {choice.preset.name}: {choice.preset.source}"
