"""The simulator's prediction for a measured point: a short simulation of its load.

Closed loops of equally long requests run in waves, prompts delay the decoding of others, and overlap scheduling hides
the host behind the device. A formula would miss these effects, so a point is simulated. Runs are cut to some waves of
requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from ...core.errors import ConfigError, ForedraftError
from ...core.model_shape import lookup_model
from ...observe.measuring.metrics import RunMetrics
from ..assembly import Assembly, assemble
from ..cost.calibration import PARAMETERS, Calibration, FittedParameter, FittedParameters, MeasuredClients
from ..cost.hardware import CUSTOM, GPU, lookup_gpu
from ..cost.measured.model_files import is_config_file
from ..cost.round import RoundCost
from ..running.run import Simulation
from ..scenario import Scenario
from ..scenario_file import scenario_with
from .points import MEASURED, BenchmarkPoint

WAVES = 4
"""Requests per client that are simulated at most."""
LEAST_REQUESTS = 6
ROOM = 16
"""Context of a simulation, in mean requests; the tails of the lengths fit into it."""
OPEN_REQUESTS = 200
"""Requests of an open loop that are simulated at most."""


class CannotPredict(ForedraftError):
    """A point that cannot be simulated; the message names it and says why."""


PHYSICAL = 0.95
"""Of the time in which a device reads its weights once at the bandwidth of its data sheet. A result that is shorter is
not of this model on this device."""
WHAT_ELSE = "are the weights in fewer bits (model.weight_dtype)? another GPU (hardware.gpu)? more devices (FILE:tensor_parallel=N)?"


ONE_CLIENT = MeasuredClients(1.0, 1.0, 1.0)


class Predictor:
    """Simulates one point under any values of the parameters, each once; calls `simulated` after every simulation.

    `clients`: the requests at a time of all points that are fitted.
    """

    def __init__(
        self,
        point: BenchmarkPoint,
        base: Scenario,
        simulated: Callable[[], None] = lambda: None,
        clients: MeasuredClients = ONE_CLIENT,
    ) -> None:
        self.point = point
        self.clients = clients
        self.simulated = simulated
        self.scenario: Scenario = point_scenario(point, base)
        with self._named_errors():
            self.assembly: Assembly = assemble(self.scenario)
        cost = self.assembly.cost
        assert isinstance(cost, RoundCost), "a point's scenario has no profile"
        self.cost = cost
        # Rows as long as the model's context would take most of a short simulation.
        longest = ROOM * round(point.input_tokens + point.output_tokens)
        if longest < self.assembly.spec.config.context_len:
            self.scenario = scenario_with(self.scenario.model_dump(mode="json"), {"model.context_len": longest})
        self._found: dict[tuple[tuple[str, float], ...], dict[str, float]] = {}
        self._is_whole = point.num_requests is not None and point.num_requests <= _num_requests(point)

    @property
    def measured(self) -> dict[str, float]:
        """The results of the point that are fitted, by column."""
        values = {column: getattr(self.point, column) for column in MEASURED}
        if self.point.rate_per_s is not None:
            values["output_tokens_per_s"] = None  # tells the rate
        return {column: value for column, value in values.items() if value is not None}

    @property
    def reading_ms(self) -> float:
        """The time in which the devices read the weights of one pass once."""
        bandwidth = self.cost.parallel.devices * self.cost.gpu.memory_bandwidth_bytes_per_s
        return self.cost.target.read_bytes / bandwidth * 1e3

    def refuse_unphysical(self) -> None:
        """Raise ConfigError for a result that is too short even if every pass only read the weights once."""
        point, least_ms = self.point, self.reading_ms
        output, rounds = point.output_tokens, 1 + (point.output_tokens - 1) / point.accept_length
        read_gb = self.cost.target.read_bytes / self.cost.parallel.devices / 1e9
        for column, found in self.measured.items():
            least = least_ms / (point.accept_length if column == "mean_tpot_ms" else 1.0)
            expected, is_possible = f"at least {least:.3g} ms", found >= PHYSICAL * least
            if column == "output_tokens_per_s":
                most = (point.concurrency or 0) * output / (least_ms / 1e3 * rounds)
                expected, is_possible = f"at most {most:,.0f} tokens/s", PHYSICAL * found <= most
            if not is_possible:
                per_pass = f", for {point.accept_length:g} tokens," if point.is_speculative else ""
                message = (
                    f"{found:g} cannot be: expected {expected}, since a pass{per_pass} reads {read_gb:.1f} GB of weights "
                    f"of {self.cost.target.name}, and {self.cost.gpu.name} has {bandwidth_of(self.cost.gpu)}: {WHAT_ELSE}"
                )
                raise ConfigError.of(point.source, column, message)

    def parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters that the point depends on."""
        return tuple(name for name in PARAMETERS if self.point.is_speculative or not name.startswith("drafts_"))

    def predict(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the results of the simulation, by column. Raises CannotPredict."""
        key = tuple((name, values[name]) for name in self.parameters() if name in values)
        if key not in self._found:
            self._found[key] = self._simulate(dict(key))
            self.simulated()
        return self._found[key]

    def _simulate(self, values: Mapping[str, float]) -> dict[str, float]:
        calibration = self._calibration(values)
        with self._named_errors(), closing(RunMetrics()) as metrics:
            simulation = Simulation(
                self.scenario,
                sinks=lambda replica: [metrics.sink(replica)],
                calibration=calibration,
                named_slots=False,
            )
            report = simulation.run()
            if not report.complete:
                raise KeyboardInterrupt  # which ended the run early
            summary = metrics.summary(report.duration_ns)
        return self._results(summary)

    def _results(self, summary: Mapping[str, Any]) -> dict[str, float]:
        """Return the results of a run by column, as if its rounds had had the point's mean accept length
        to the last digit."""
        slower = (summary["accept_length"] or 1.0) / self.point.accept_length if self.point.is_speculative else 1.0
        first_ms, whole_ms = summary["mean_ttft_ms"], summary["mean_e2el_ms"]
        corrected_ms = first_ms + (whole_ms - first_ms) * slower
        rate = summary["output_throughput"] * whole_ms / corrected_ms
        if self.point.concurrency is not None and not self._is_whole:
            # Of the steady state (Little's law): a run of few requests ends with fewer clients.
            rate = self.point.concurrency * summary["mean_output_tokens"] / corrected_ms * 1e3
        found = {"output_tokens_per_s": rate, "mean_ttft_ms": first_ms}
        if summary["mean_tpot_ms"] is not None:
            found["mean_tpot_ms"] = summary["mean_tpot_ms"] * slower
        return found

    def _calibration(self, values: Mapping[str, float]) -> Calibration:
        """Return a profile of bare values for the point's own scenario."""
        run = self.assembly
        items = {name: FittedParameter(value, value, value) for name, value in values.items()}
        fitted = FittedParameters(run.deployment.server.name, self.cost.kernels, items, self.clients, 0, 0.0, 0.0)
        return Calibration("fit", "fit", run.deployment.gpu.name, run.target.name, (self.cost.tp,), fitted)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except ForedraftError as error:
            raise CannotPredict(f"{self.point.source} ({self.point.title}): {error}") from None


def bandwidth_of(gpu: GPU) -> str:
    """Return the memory bandwidth of a GPU's data sheet in words."""
    return f"{gpu.memory_bandwidth_bytes_per_s / 1e9:,.0f} GB/s"


def measured_scenario(points: Sequence[BenchmarkPoint], base: Scenario, given: Container[str]) -> Scenario:
    """Return `base` with the model and the GPU that the points name. `given`: the keys that the user gave; they must
    agree.

    Raises ConfigError for another model or GPU, and for a model that is not in the catalogue.
    """
    settings = {}
    for name, key, look_up in (("model", "model.target", lookup_model), ("gpu", "hardware.gpu", lookup_gpu)):
        point = next((point for point in points if getattr(point, name) is not None), None)
        if point is None:
            continue
        found = getattr(point, name)
        table, field = key.split(".")
        used = getattr(getattr(base, table), field)
        try:
            canonical = look_up(found).name
            if key in given and not is_config_file(used) and look_up(used).name != canonical:
                message = f"{found} was measured, but {key} is {used}"
                raise ConfigError.of(point.source, name, message)
        except ConfigError:
            raise
        except ForedraftError:
            if key not in given and used != CUSTOM:
                message = f"{found!r} is not in the catalogue: say what it is with --set {key}=…"
                raise ConfigError.of(point.source, name, message) from None
            continue
        if key not in given and used != CUSTOM:
            settings[key] = found
    return scenario_with(base.model_dump(mode="json"), settings) if settings else base


def point_scenario(point: BenchmarkPoint, base: Scenario) -> Scenario:
    """Return `base` with the load, the speculation and the accept length of the point. Raises ConfigError."""
    workload: dict[str, Any] = {"num_requests": _num_requests(point), "prompt": _length(point, "input")}
    workload |= {"output": _length(point, "output"), "concurrency": point.concurrency}
    if point.rate_per_s is not None:
        workload["rate"] = point.rate_per_s
    settings: dict[str, Any] = {
        "workload": workload,
        "hardware.profile": None,
        "hardware.correction": "off",
        "slo": {},
        "acceptance": {},
    }
    settings["speculation"] = {"algorithm": "NONE"}
    if point.is_speculative:
        shape = {key: getattr(point, key) for key in ("algorithm", "steps", "topk", "num_draft_tokens")}
        settings["speculation"] = {"policy": "fixed", **shape}
        # Few rounds are simulated: without a spread between requests their mean is near the point's.
        settings["acceptance"] = {"mean_length": point.accept_length, "request_share": 0.0, "field_share": 0.0}
    if point.tensor_parallel is not None:
        settings["hardware.tensor_parallel"] = point.tensor_parallel
    return scenario_with(base.model_dump(mode="json"), settings)


def _num_requests(point: BenchmarkPoint) -> int:
    most = OPEN_REQUESTS if point.concurrency is None else max(LEAST_REQUESTS, WAVES * point.concurrency)
    return most if point.num_requests is None else min(most, point.num_requests)


def _length(point: BenchmarkPoint, kind: str) -> dict[str, Any]:
    lens: Sequence[int] = getattr(point, f"{kind}_lens")
    if lens:
        values, counts = np.unique(np.array(lens), return_counts=True)
        return {"kind": "empirical", "values": values.tolist(), "weights": counts.astype(float).tolist()}
    mean, std = getattr(point, f"{kind}_tokens"), getattr(point, f"{kind}_std")
    if std < 0.02 * mean:
        return {"kind": "fixed", "value": max(1, round(mean))}
    return {"kind": "lognormal", "mean": mean, "sigma": math.sqrt(math.log1p((std / mean) ** 2))}
