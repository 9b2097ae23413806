"""A sweep: every combination of some settings, each with several seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..observe.rates import rate_of
from .trial import RunOutcome
from .workers import Job, JobWorkers


@dataclass
class Sweep:
    """The runs to make, and those that have ended.

    Attributes:
        points: Per combination the dotted keys and the values that replace those of the scenario.
        seeds: The seeds of each combination. All combinations have the same ones: draws are keyed, so their arrivals,
            lengths and acceptance are the same, and differences between combinations are not chance.
        trials: The outcomes, by index of the combination and seed.
    """

    points: Sequence[Mapping[str, Any]]
    seeds: Sequence[int]
    trials: dict[tuple[int, int], RunOutcome] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.points) * len(self.seeds)

    def run(self, workers: JobWorkers) -> Iterator[tuple[Job, RunOutcome]]:
        """Make all runs and yield each as it ends:
        every combination with the first seed, then the next, so that a part shows the whole."""
        for seed in self.seeds:
            for point, settings in enumerate(self.points):
                workers.submit(Job(point, {**settings, "seed": seed}))
        for _ in range(len(self)):
            job, trial = workers.next_ended()
            self.trials[job.ticket, job.settings["seed"]] = trial
            yield job, trial

    def overloads(self, keys: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each combination with a run to which more came than it can serve."""
        for point, settings in enumerate(self.points):
            trials = (self.trials.get((point, seed)) for seed in self.seeds)
            told = (
                trial.summary["overload"] for trial in trials if trial is not None and trial.summary.get("overload")
            )
            if sentence := next(told, None):
                named = ", ".join(f"{key}={settings[key]}" for key in keys if key in settings)
                yield f"Overloaded, {named}: {sentence}"

    def values(self, point: int, key: str) -> list[float]:
        """Return the number `key` (`rate_of`) of a combination's runs; runs without it are left out."""
        trials = (self.trials.get((point, seed)) for seed in self.seeds)
        found = (rate_of(trial.summary, key) for trial in trials if trial is not None)
        return [value for value in found if value is not None]
