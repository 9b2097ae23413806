"""Predicted against measured: the same summary of both sides, the error, and how much the measurement itself varies."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.acceptance.process import AcceptanceProcess
from ..core.contract.events import Event
from ..core.contract.request import FinishedRequest
from ..core.draws import Purpose, request_key
from ..core.errors import ForedraftError
from ..core.scheduler.spec import EngineSpec
from ..gpu.measure.served import TimedOrder
from ..observe.measuring.metrics import RunMetrics
from ..observe.measuring.summary import SHORT_NAMES
from ..sim.actors.clock import Environment, call_at
from ..sim.actors.device import Jitter, SimulatedDevice, Truth
from ..sim.actors.engine import EngineActor
from ..sim.actors.host_work import HostJitter, HostWork
from ..sim.cost.executor_steps import StepCost
from ..sim.cost.host import HostCost
from .acceptance import AcceptLength


def simulate(
    spec: EngineSpec,
    cost: StepCost,
    host: HostCost,
    acceptance: AcceptanceProcess,
    asked: Sequence[TimedOrder],
    concurrency: int | None = None,
    *,
    device_spread: float = 0.0,
    host_spread: float = 0.0,
    seed: int = 0,
) -> list[Event]:
    """Return the events of a run in which every request emits its `max_tokens`. `acceptance` holds for trees as it is.

    `device_spread` and `host_spread` let the times of steps fluctuate, drawn by `seed`. Arrivals and `concurrency` as
    in `serve`. Raises ForedraftError if a request is refused.
    """
    env = Environment()
    events: list[Event] = []
    waiting = deque(asked)

    def send() -> None:
        if waiting:
            request = waiting.popleft().request
            actor.receive(request, Truth(request.max_tokens, request_key(request.request_id)))

    def ended(_: int, finished: FinishedRequest) -> None:
        if finished.message:
            raise ForedraftError(f"request {finished.request_id!r} of the workload was refused: {finished.message}")
        if concurrency is not None:
            send()

    jitter = Jitter.of(device_spread, seed, Purpose.DEVICE_TIME, 0)
    host_jitter = HostJitter.of(host_spread, seed, 0)
    device = SimulatedDevice(cost, spec.config.max_running, acceptance, lambda *shape: acceptance, jitter)
    engine = spec.make_engine(events.append)
    has_look_ups = engine.algorithm.has_look_ups
    work = HostWork(host, not engine.config.overlap, host_jitter, has_look_ups=has_look_ups)
    actor = EngineActor(env, 0, engine, device, work, ended)
    for one in asked if concurrency is None else asked[:concurrency]:
        call_at(env, one.due_ns if concurrency is None else 0, send)
    env.run()
    return events


BUCKETS = 10


@dataclass(frozen=True, slots=True)
class ComparedNumber:
    """One number: the mean over simulations with the acceptance that was forecast, the mean over measured runs, and
    half the range of either, relative to its mean.

    `replayed`: the mean over simulations with the acceptance that was measured in the same runs; None for a way without
    drafts, and for the accept length itself. `predicted_spread` is what the draws of acceptance make of it, `noise`
    what texts and machine do; None of a single run, which tells none.
    """

    predicted: float
    measured: float
    predicted_spread: float | None
    noise: float | None
    replayed: float | None = None

    @property
    def error(self) -> float | None:
        """How far the forecast is above the measurement, relative to it; None of nothing."""
        return self.predicted / self.measured - 1 if self.measured else None

    @property
    def replayed_error(self) -> float | None:
        """The same of the simulation with the measured acceptance: the error of the simulated times."""
        return self.replayed / self.measured - 1 if self.measured and self.replayed is not None else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way to serve at one load. `steps`: shares of decode rounds by their draft steps; `batch`:
    mean batch in tenths of the run."""

    arm: str
    load: str
    requests: int
    repeats: int
    metrics: Mapping[str, ComparedNumber]
    steps: Mapping[int, tuple[float, float]]  # steps -> predicted, measured
    batch: tuple[tuple[float, ...], tuple[float, ...]]  # predicted, measured
    processor_share: float
    # what single rounds took each time between the runs, over what the profile says of them; none on a GPU
    paces: tuple[float, ...] = ()
    accept_lengths: Mapping[str, AcceptLength] = field(default_factory=dict)  # "measured" and "forecast"
    ttft_per_load: float | None = None  # relative change of the mean TTFT over that of the load; None: a closed loop

    @property
    def pace(self) -> float | None:
        """The mean of `paces`; the simulated times are of it."""
        return float(np.mean(self.paces)) if self.paces else None

    def to_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "load": self.load,
            "requests": self.requests,
            "repeats": self.repeats,
            "processor_share": self.processor_share,
            "pace": self.pace,
            "pace_range": [min(self.paces), max(self.paces)] if self.paces else None,
            "metrics": {
                name: {
                    "predicted": one.predicted,
                    "measured": one.measured,
                    "error": one.error,
                    "replayed": one.replayed,
                    "replayed_error": one.replayed_error,
                    "predicted_spread": one.predicted_spread,
                    "noise": one.noise,
                }
                for name, one in self.metrics.items()
            },
            "steps": {str(steps): {"predicted": pair[0], "measured": pair[1]} for steps, pair in self.steps.items()},
            "batch": {"predicted": list(self.batch[0]), "measured": list(self.batch[1])},
            "ttft_per_load": self.ttft_per_load,
            "accept_lengths": {name: length.to_json() for name, length in self.accept_lengths.items()},
        }


def compare(
    arm: str,
    load: str,
    requests: int,
    predicted: Sequence[RunMetrics],
    measured: Sequence[RunMetrics],
    processor_share: float = 1.0,
    paces: Sequence[float] = (),
    *,
    replayed: Sequence[RunMetrics] = (),
    accept_lengths: Mapping[str, AcceptLength] | None = None,
    ttft_per_load: float | None = None,
) -> Comparison:
    """Compare simulated runs with measured ones of the same requests. `replayed`: simulated with the measured
    acceptance. What one of them does not have (an accept length) is left out."""
    ours, theirs, again = ([metrics.summary() for metrics in runs] for runs in (predicted, measured, replayed))
    found = {}
    for key in SHORT_NAMES:
        pair = [[summary[key] for summary in summaries] for summaries in (ours, theirs)]
        if not any(value is None for values in pair for value in values):
            (mean, spread), (true_mean, noise) = (_mean_and_spread(values) for values in pair)
            same = [summary[key] for summary in again if summary[key] is not None and key != "accept_length"]
            found[key] = ComparedNumber(mean, true_mean, spread, noise, float(np.mean(same)) if same else None)
    shares = [_mean_shares(summaries) for summaries in (ours, theirs)]
    steps = {n: (shares[0].get(n, 0.0), shares[1].get(n, 0.0)) for n in sorted({*shares[0], *shares[1]})}
    batch = (_batch_over_time(predicted), _batch_over_time(measured))
    lengths = accept_lengths or {}
    return Comparison(
        arm, load, requests, len(measured), found, steps, batch, processor_share, tuple(paces), lengths, ttft_per_load
    )


def sensitivity(runs: Sequence[RunMetrics], busier: Sequence[RunMetrics], more: float) -> float | None:
    """Return by which percentage the mean TTFT grows for each percent of load, from simulated runs and the same ones
    at `more` load; None without those."""
    means = [[metrics.summary()["mean_ttft_ms"] for metrics in each] for each in (runs, busier)]
    if not busier or any(value is None for each in means for value in each):
        return None
    return float((np.mean(means[1]) / np.mean(means[0]) - 1) / more)


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and half the range relative to it."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    return mean, float(max(values) - min(values)) / 2 / mean if mean else 0.0


def _mean_shares(summaries: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the mean share of rounds by steps."""
    prefix = "rounds_at_steps_"
    found: dict[int, float] = {}
    for summary in summaries:
        for key, share in summary.items():
            if key.startswith(prefix):
                steps = int(key.removeprefix(prefix))
                found[steps] = found.get(steps, 0.0) + share / len(summaries)
    return found


def _batch_over_time(runs: Sequence[RunMetrics]) -> tuple[float, ...]:
    """Return the mean batch in each tenth of the runs, each over its own length."""
    found = []
    for metrics in runs:
        timeline, duration_s = metrics.timeline(), metrics.summary()["duration"]
        # The last bucket ends with the run.
        edges = np.minimum(np.arange(len(timeline["running"]) + 1) * timeline["bucket_s"], duration_s)
        areas = np.cumsum([0.0, *(np.diff(edges) * np.array(timeline["running"], float))])
        found.append(np.diff(np.interp(np.linspace(0, duration_s, BUCKETS + 1), edges, areas)) * BUCKETS / duration_s)
    return tuple(float(value) for value in np.mean(found, axis=0))
