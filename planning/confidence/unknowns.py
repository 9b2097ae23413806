"""How much the gain of speculation depends on inputs that a user often does not know."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.acceptance.presets import TEXTS
from ...sim.assembly.acceptance import guessed_lengths, is_guessed
from ...sim.assembly.rounds import PricedRound
from ...sim.scenario_file import scenario_with
from ..candidates.rounds import RoundModel
from .comparison import speed_up_error

LENGTHS = (0.5, 2.0)
"""Factors on the lengths of prompts and outputs, where the scenario has no trace."""
ACCEPTANCE = "the accept length"
"""The name of that input."""
OWN_ACCEPTANCE = 0.1
"""An accept length of the scenario's own is taken to be wrong by this share of the drafts that it accepts."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The range of the gain over plain decoding that an unknown input leaves. `what` says how the input varies."""

    name: str
    what: str
    low: float
    high: float


def gains_by_unknown(model: RoundModel, rows: int, context: int, most_steps: int) -> list[Moved]:
    """Return the range of the gain by each unknown input, the widest first, for a batch of `rows` requests.

    The steps are those that are best by the scenario, because a deployment has them before the input is known.
    """
    steps = model.best_drafted(rows, context, most_steps).shape.steps
    own = model.round(rows, context, steps)
    gain, error = model.gain(own), math.exp(speed_up_error(model.with_steps(1)))
    found = [
        Moved("the cost model", "by the error of speed-ups", gain / error, gain * error),
        _of(ACCEPTANCE, *_by_acceptance(model, rows, context, steps)),
    ]
    if model.scenario.workload.trace is None:
        found.append(_of("the lengths", "with lengths half or twice as long", [gain, *_by_lengths(model, own)]))
    return sorted(found, key=lambda one: one.low / one.high)


def _of(name: str, what: str, gains: Sequence[float]) -> Moved:
    return Moved(name, what, min(gains), max(gains))


def _by_lengths(model: RoundModel, own: PricedRound) -> Iterator[float]:
    for factor in LENGTHS:
        other = RoundModel(model.scenario, model.output_len and model.output_len * factor)
        yield other.gain(other.round(own.batch_size, max(1, round(own.context_len * factor)), own.shape.steps))


def _by_acceptance(model: RoundModel, rows: int, context: int, steps: int) -> tuple[str, list[float]]:
    """Return how the accept length varies, and the gains: over published drafts if this one's acceptance is not known,
    over kinds of text, or around the scenario's own numbers."""
    table = model.scenario.acceptance
    own = model.round(rows, context, steps)
    if any(getattr(table, key) is not None for key in ("conditional", "mean_length", "recorded")):
        drafts = (own.accept_length - 1) * OWN_ACCEPTANCE
        factors = [(own.accept_length + change) / own.accept_length for change in (-drafts, drafts)]
        return f"with {OWN_ACCEPTANCE:.0%} fewer or more accepted drafts", [model.gain(own) * one for one in factors]
    run = model.with_steps(steps)
    if is_guessed(run.scenario, run.preset):
        names = [name for name, _ in guessed_lengths(run.preset, own.shape)]
        what = f"over published drafts of this kind ({names[0]} to {names[-1]})"
        return what, list(_over_presets(model, names, rows, context, steps))
    return f"over kinds of text ({', '.join(TEXTS)})", list(_over_presets(model, TEXTS, rows, context, steps))


def _over_presets(model: RoundModel, names: Sequence[str], rows: int, context: int, steps: int) -> Iterator[float]:
    tables = model.scenario.model_dump(mode="json")
    for name in names:
        other = RoundModel(scenario_with(tables, {"acceptance.preset": name}), model.output_len)
        yield other.gain(other.round(rows, context, steps))
