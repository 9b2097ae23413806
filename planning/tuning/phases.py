"""The phases of a workload in which a table of steps must not lose:
loads from light to saturated, or windows of a trace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import ForedraftError, count_of
from ...sim.load import make_workload
from ...sim.scenario import Scenario
from ...sim.workload.traces import TraceSource
from ..candidates.rounds import RoundModel

WINDOWS = 12  # of a trace, all of one length
LIGHT_SHARE, KNEE_SHARE = 0.1, 0.5
"""Of the tokens per second of full batches: a load is light up to the first, and the knee is where the
second is reached."""
RUNS_OF_CLIENTS = 3  # requests of each client in a closed loop
SAMPLE = 1000  # requests, whose mean lengths count
OWN_LOAD = "own load"


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the workload: the keys of the scenario that make it, and what they mean in words."""

    name: str
    about: str
    settings: Mapping[str, Any]


def phases_of(scenario: Scenario, model: RoundModel, requests: int, most_steps: int) -> list[Phase]:
    """Return the phases that tables are judged in, with about `requests` requests each.

    A trace: the quietest, the middle and the busiest of WINDOWS equal windows. Else closed loops of a light load, at
    the knee and saturated (so many clients as full batches have requests), and the scenario's own load. Raises
    ForedraftError for a trace without requests.
    """
    if scenario.workload.trace is not None:
        return _windows(scenario, requests)
    sizes = _batch_sizes(scenario, model, most_steps)
    own = {"workload.num_requests": min(requests, scenario.workload.num_requests or requests)}
    groups = scenario.hardware.replicas * model.plain.deployment.parallel.data
    found = [_closed_loop(name, clients * groups, requests) for name, clients in sizes.items()]
    return [*found, Phase(OWN_LOAD, _own_words(scenario), own)]


def _closed_loop(name: str, clients: int, requests: int) -> Phase:
    number = max(requests, RUNS_OF_CLIENTS * clients)
    settings = {"workload.concurrency": clients, "workload.num_requests": number}
    return Phase(name, count_of(clients, "client"), settings)


def _own_words(scenario: Scenario) -> str:
    table = scenario.workload
    return f"{table.rate:g} requests/s" if table.concurrency is None else count_of(table.concurrency, "client")


def _batch_sizes(scenario: Scenario, model: RoundModel, most_steps: int) -> dict[str, int]:
    """Return the batches of an engine in each phase, by the tokens per second that the best number of steps gives."""
    context = mean_context(scenario, model)
    full = model.most_rows(context, most_steps)
    if full < 1:
        raise ForedraftError(f"no request of {context:,} tokens has room in the KV pool")
    sizes = [*itertools.takewhile(lambda size: size < full, (2**i for i in itertools.count())), full]
    tokens = [model.best(size, context, most_steps).tokens_per_s for size in sizes]
    light = max((size for size, rate in zip(sizes, tokens, strict=True) if rate <= LIGHT_SHARE * tokens[-1]), default=1)
    knee = next(size for size, rate in zip(sizes, tokens, strict=True) if rate >= KNEE_SHARE * tokens[-1])
    return {"light": light, "knee": knee, "saturated": full}


def mean_context(scenario: Scenario, model: RoundModel) -> int:
    """Return the KV tokens of an average request in the middle of its output."""
    workload = make_workload(scenario, model.plain.spec.config.context_len)
    arrivals = list(itertools.islice(workload, SAMPLE))
    return round(float(np.mean([one.prompt.length + one.output_len / 2 for one in arrivals]))) if arrivals else 1


def _windows(scenario: Scenario, requests: int) -> list[Phase]:
    table = scenario.workload
    assert table.trace is not None, "windows are those of a trace"
    source = TraceSource(table.trace, table.trace_options, 1.0, table.start_s, table.stop_s)
    times = np.array([one.time_ns for one in source], dtype=np.int64)
    if not len(times):
        raise ForedraftError(f"{table.trace}: has no request in the window of the scenario")
    width = max(math.ceil((int(times[-1]) + 1) / WINDOWS), 1)
    counts = np.bincount(times // width, minlength=1)
    filled = sorted(np.flatnonzero(counts).tolist(), key=lambda window: (counts[window], window))
    chosen = {"quiet": filled[0], "middle": filled[len(filled) // 2], "busy": filled[-1]}
    phases: dict[int, Phase] = {}
    for name, window in chosen.items():
        start_s = table.start_s + window * width / 1e9
        settings = {
            "workload.start_s": start_s,
            "workload.stop_s": start_s + width / 1e9,
            "workload.num_requests": min(int(counts[window]), requests),
        }
        rate = counts[window] / width * 1e9 * table.rate_scale
        phases.setdefault(window, Phase(name, f"from {start_s:.0f} s, {rate:.3g} requests/s", settings))
    return list(phases.values())
