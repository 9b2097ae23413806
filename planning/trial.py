"""One run of a sweep: a scenario with some settings and a seed, simulated; with the numbers of its summary, or the
reason why there are none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.errors import ForedraftError, InvariantViolation
from ..observe.measuring.metrics import RunMetrics
from ..sim.effects.given_keys import given_keys
from ..sim.running.report import RunProgress
from ..sim.running.run import Simulation
from ..sim.scenario_file import OVERRIDES, SCENARIO, SETTINGS, scenario_with
from ..sim.summary.summary import summarize_run

Status = Literal["done", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of one run.

    Attributes:
        status: "done"; "refused" if the scenario cannot run with these settings (they contradict each other, have no
            effect, the model does not fit); "failed" if the run broke off.
        message: Why it was refused or failed.
        summary: The numbers, texts, truth values and intervals of the run's summary by name; empty unless it is done.
        wall_s: Seconds that it took.
    """

    status: Status
    message: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0


def reason_of(error: ForedraftError) -> str:
    """Return the problems of a scenario by their keys, without a file name, because its settings do not come from a
    file of the user."""
    return str(error).replace(f"{SCENARIO}: ", "")


def run_trial(
    tables: Mapping[str, Any], settings: Mapping[str, Any], on_progress: Callable[[RunProgress], None] | None = None
) -> RunOutcome:
    """Simulate a scenario, given as its tables, with the values of some keys replaced.
    Raises KeyboardInterrupt if it was interrupted."""
    started_s = time.monotonic()
    try:
        scenario = scenario_with(tables, settings)
        origins = {**given_keys(scenario, "scenario"), **dict.fromkeys(settings, SETTINGS), "seed": OVERRIDES}
        with closing(RunMetrics()) as metrics:
            report = Simulation(
                scenario, sinks=lambda replica: [metrics.sink(replica)], origins=origins, named_slots=False
            ).run(on_progress)
            if not report.complete:
                raise KeyboardInterrupt
            summary = summarize_run(scenario, report, metrics)
    except ForedraftError as error:
        return RunOutcome("refused", reason_of(error), wall_s=time.monotonic() - started_s)
    except (InvariantViolation, ArithmeticError, LookupError, ValueError, TypeError) as error:
        return RunOutcome("failed", f"{type(error).__name__}: {error}", wall_s=time.monotonic() - started_s)
    kept = {
        key: value
        for key, value in summary.items()
        if isinstance(value, str | int | float | None) or key.endswith("_interval")
    }
    return RunOutcome("done", "", kept, time.monotonic() - started_s)
