"""Acceptance on both sides of a comparison: forecast from other texts, replayed as it was measured, and how sure an
accept length is that comes from so many prompts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..core.acceptance.fit import MIN_ROUNDS, AcceptanceFit, fit
from ..core.acceptance.process import AcceptanceProcess
from ..core.adaptive.config import fixed_config
from ..core.contract.account import EngineAccount, LifeStep
from ..core.contract.events import Committed, Event
from ..core.draws import request_key
from ..gpu.measure.clock import Clock
from ..gpu.measure.served import TimedOrder
from .arms import TwinArm

MIN_CALIBRATION, MOST_CALIBRATION = 16, 1024  # requests
WANTED_HALF = 0.03  # of half an interval, relative to the accept length: where calibration ends
MOST_GROWTH = 4  # times as many requests for one more run: few prompts know their own spread badly
SURE = 1.96  # standard deviations: 95 %


def draft_of(arm: TwinArm) -> Hashable:
    """Return what drafts of an arm are accepted by: the draft, and the shape of its trees."""
    spec = arm.spec
    tree = (spec.topk, spec.max_steps, spec.num_draft_tokens) if spec.topk > 1 else None
    return arm.algorithm, str(arm.plan.options.draft), tree


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds with drafts of some runs, a column for each: int64 [n].

    `requests` number the entries of `ids`; `positions` are of the output, where the rounds began.
    """

    ids: tuple[str, ...]
    requests: NDArray[np.int64]
    positions: NDArray[np.int64]
    steps: NDArray[np.int64]
    correct: NDArray[np.int64]

    @classmethod
    def none(cls) -> Rounds:
        return cls((), *np.empty((4, 0), np.int64))


def rounds_of(events: Sequence[Event]) -> Rounds:
    """Return the rounds with drafts of one engine's run."""
    account = EngineAccount()
    number_of: dict[str, int] = {}
    emitted: dict[int, int] = {}
    found: list[tuple[int, int, int, int]] = []
    for event in events:
        if isinstance(event, Committed):
            decode, result = event.step.decode, event.result.decode
            for request, number, place, tokens in account.runs(event):
                if number >= 0 and decode is not None and result is not None and decode.shape.steps:
                    correct = min(int(result.accept_lens[number, place]) - 1, decode.shape.steps)
                    found.append((request.column, emitted[request.column], decode.shape.steps, correct))
                emitted[request.column] += tokens
        for step, request, _ in account.take(event):
            if step is LifeStep.ENTER and request.join is not None:
                request.column = number_of.setdefault(request.request_id, len(number_of))
                emitted[request.column] = request.join.num_emitted
    return Rounds(tuple(number_of), *np.array(found, np.int64).reshape(-1, 4).T)


# -- forecast ---------------------------------------------------------------------------------------------------------


def serve_calibration(arm: TwinArm, asked: Sequence[TimedOrder]) -> Rounds:
    """Serve prompts that are not the workload's, as many at once as the arm can, at the most steps that it takes.
    Return their rounds."""
    spec = replace(
        arm.spec, policy="fixed", adaptive=fixed_config(arm.spec.max_steps), initial_steps=None, cost_table=None
    )
    if arm.spec.policy != "fixed":
        spec = replace(spec, graph_sizes=None)
    return rounds_of(replace(arm, spec=spec).serve(asked, Clock(), arm.spec.config.max_running).events)


def num_calibration(arm: TwinArm, mean_output: float, wanted: int) -> int:
    """Return how many requests to calibrate with at first: as `wanted`, but enough rounds for a fit."""
    least = MIN_ROUNDS * (arm.spec.max_steps + 1) / max(mean_output - 1, 1.0)
    return int(np.clip(max(wanted, least), MIN_CALIBRATION, MOST_CALIBRATION))


def num_more(reached: AcceptLength | None, served: int) -> int:
    """Return with how many further requests the accept length is sure to ± 3 %, by the spread that it has `reached`
    over the prompts of `served` requests; 0: it is, or calibration is as large as it may be."""
    if reached is None or reached.half is None or reached.half <= WANTED_HALF * reached.mean:
        return 0
    needed = served * min((reached.half / (WANTED_HALF * reached.mean)) ** 2, MOST_GROWTH)
    return max(0, min(math.ceil(needed), MOST_CALIBRATION) - served)


def joined(runs: Sequence[Rounds]) -> Rounds:
    """Return the rounds of runs whose requests have different ids."""
    begins = np.cumsum([0, *(len(run.ids) for run in runs)])
    requests = [run.requests + begin for run, begin in zip(runs, begins, strict=False)]
    columns = ([getattr(run, name) for run in runs] for name in ("positions", "steps", "correct"))
    ids = tuple(request_id for run in runs for request_id in run.ids)
    return Rounds(ids, np.concatenate(requests), *map(np.concatenate, columns))


def fit_acceptance(rounds: Rounds) -> AcceptanceFit:
    """Fit a process to recorded rounds. Raises AcceptanceFitError."""
    return fit(rounds.requests, rounds.positions, rounds.steps, rounds.correct)


# -- as it was measured -----------------------------------------------------------------------------------------------


class ReplayedAcceptance(AcceptanceProcess):
    """Accepts in every round what the same request accepted in a measured run.

    A round that begins where none was measured (after other draft steps) accepts as the one before that place did.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.max_depth: int = max(1, int(rounds.correct.max(initial=0)))
        self._runs: dict[int, NDArray[np.int32]] = {}
        for number, request_id in enumerate(rounds.ids):
            own = np.flatnonzero(rounds.requests == number)
            if len(own):
                places = rounds.positions[own]
                before = np.maximum(np.searchsorted(places, np.arange(places[-1] + 1), side="right") - 1, 0)
                self._runs[request_key(request_id)] = rounds.correct[own][before].astype(np.int32)

    def longest_run(
        self, request_keys: np.ndarray, positions: np.ndarray, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        keys, where = np.broadcast_arrays(
            np.atleast_1d(np.asarray(request_keys, np.uint64)), np.atleast_1d(np.asarray(positions, np.int64))
        )
        found = np.zeros(where.shape, np.int32)
        for key in np.unique(keys):
            runs, own = self._runs.get(int(key)), keys == key
            if runs is not None:
                found[own] = runs[np.minimum(where[own], len(runs) - 1)]
        return found


# -- how sure ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcceptLength:
    """A mean accept length, the prompts behind it, and half its 95 % interval over prompts (None: of one)."""

    mean: float
    prompts: int
    half: float | None

    @property
    def words(self) -> str:
        half = "" if self.half is None else f" ± {self.half:.2f} ({self.half / self.mean:.1%})"
        return f"{self.mean:.2f}{half}"

    def to_json(self) -> Mapping[str, float | int | None]:
        return {"mean": self.mean, "prompts": self.prompts, "half_interval": self.half}


def accept_length_of(runs: Iterable[Rounds]) -> AcceptLength | None:
    """Return the accept length of all rounds of these runs; None without rounds. Rounds of one prompt are alike, so the
    interval is that of a ratio of sums over prompts (Cochran, Sampling Techniques, 1977, §6.3)."""
    tokens, counts = [], []
    for rounds in runs:
        kept = np.bincount(rounds.requests, minlength=len(rounds.ids))
        tokens.append(np.bincount(rounds.requests, rounds.correct + 1.0, len(rounds.ids))[kept > 0])
        counts.append(kept[kept > 0])
    of_tokens, of_counts = np.concatenate(tokens), np.concatenate(counts)
    if not len(of_counts):
        return None
    mean, n = float(of_tokens.sum() / of_counts.sum()), len(of_counts)
    half = None
    if n > 1:
        rest = of_tokens - mean * of_counts
        half = SURE * float(np.sqrt(n / (n - 1) * (rest @ rest)) / of_counts.sum())
    return AcceptLength(mean, n, half)
