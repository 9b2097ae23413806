"""The acceptance of a scenario: its own numbers, and a preset for those that it leaves out."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ...core.acceptance.block import by_block
from ...core.acceptance.presets import OWN_LAYER, PRESETS, PresetChoice, TraceAcceptance, presets_like, usual_preset
from ...core.acceptance.process import AcceptanceProcess, GaussianAcceptance, RegimeAcceptance
from ...core.algorithm.algorithm import SpecAlgorithm
from ...core.contract.step import RoundShape
from ...core.model_shape import ModelShape
from ...core.scheduler.spec import EngineSpec
from ..cost.draft import MULTI_LAYER_EAGLE, DraftShape
from ..scenario import Scenario
from ..workload.acceptance.runs import load_recorded_runs

LOOK_UPS_LIKE = "ngram-edit"
"""The preset of look-ups beside a head where none is given: a row takes them where they are known to be good, as in
text that is edited (an assumption)."""


def acceptance_of(
    scenario: Scenario, algorithm: SpecAlgorithm, target: ModelShape, draft: DraftShape | None, spec: EngineSpec
) -> tuple[PresetChoice, AcceptanceProcess]:
    """Return the preset that gives what the scenario leaves out, and the process from which rounds draw their accepted
    drafts."""
    name = algorithm.draft_form or algorithm.name
    if draft is not None and draft.is_own_layer and draft.algorithm != MULTI_LAYER_EAGLE:
        name = OWN_LAYER
    choice = usual_preset(name, target.family, algorithm.usual_acceptance, scenario.acceptance.preset)
    process = _process(scenario, algorithm, choice, spec)
    if is_block_of_rejection(scenario, algorithm):
        assert isinstance(process, GaussianAcceptance), "of recorded runs the rule is refused"
        process = by_block(process, scenario.acceptance.rejected_ratio)
    return choice, process


def is_block_of_rejection(scenario: Scenario, algorithm: SpecAlgorithm) -> bool:
    """Return whether rounds accept what block verification keeps of drafts whose acceptance is that of rejection."""
    rules = scenario.acceptance.of_rule, scenario.speculation.accept_rule
    return rules == ("rejection", "block") and not algorithm.has_look_ups


def _process(scenario: Scenario, algorithm: SpecAlgorithm, choice: PresetChoice, spec: EngineSpec) -> AcceptanceProcess:
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
    if table.look_up_share and algorithm.looks_up_beside_a_draft:
        look_ups = table.look_up_conditional or PRESETS[LOOK_UPS_LIKE].conditional
        process = process.mixed(tuple(look_ups), table.look_up_share)
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


def is_guessed(scenario: Scenario, choice: PresetChoice) -> bool:
    """Return whether the acceptance is that of another algorithm, family or kind of text than the scenario's."""
    table = scenario.acceptance
    return bool(choice.differs) and all(v is None for v in (table.conditional, table.mean_length, table.recorded))


def guessed_lengths(choice: PresetChoice, shape: RoundShape) -> tuple[tuple[str, float], ...]:
    """Return the presets with the shortest and the longest mean accept length of those between which an acceptance is
    that was not published (`presets_like`), and the length of the chosen one in the middle."""
    found = {preset.name: _usual_length(preset.name, shape) for preset in presets_like(choice)}
    least, most = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    own = choice.preset.name
    return (least, found[least]), (own, _usual_length(own, shape)), (most, found[most])


@lru_cache(maxsize=256)
def _usual_length(preset: str, shape: RoundShape) -> float:
    from ...core.acceptance.fit import mean_accept_length  # seldom needed

    process = PRESETS[preset].process()
    return mean_accept_length(process if shape.topk == 1 else process.for_tree(shape), shape.steps)


def acceptance_source(scenario: Scenario, algorithm: SpecAlgorithm, choice: PresetChoice) -> str:
    """Say where the acceptance of a run comes from."""
    source = _source(scenario, choice)
    if not is_block_of_rejection(scenario, algorithm):
        return source
    ratio = scenario.acceptance.rejected_ratio
    return f"block verification of drafts that rejection accepts so (acceptance.rejected_ratio {ratio:g}): {source}"


def _source(scenario: Scenario, choice: PresetChoice) -> str:
    table = scenario.acceptance
    if table.mean_length is not None:
        return f"the scenario's mean, with the spread and correlation of preset {choice.preset.name}"
    if table.recorded is not None or table.conditional is not None:
        return "scenario"
    return f"preset {choice.preset.name}: {choice.preset.source}"
