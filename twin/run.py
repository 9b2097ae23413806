"""The twin: every way to serve, at every load, simulated from a profile and served by the real executor, side by side.

profile, acceptance of calibration prompts ─► loads ─► simulate (several draws of acceptance) ─┐
                                                └────► serve (several times, ways taking turns) ─┴─► compare
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.acceptance.fit import AcceptanceFit, fit
from ..core.acceptance.process import AcceptanceProcess, FixedMeanAcceptance, GaussianAcceptance
from ..core.adaptive.config import fixed_config
from ..core.contract.events import Committed, Event, Planned
from ..core.contract.request import Request
from ..core.errors import ConfigError, ForedraftError, Problem
from ..core.prompt import Prompt
from ..gpu.bench.run import bench_prompts
from ..sim.cost.executor_steps import ExecutorSteps, StepCost
from ..sim.load import make_workload
from ..sim.scenario import Scenario
from ..sim.scenario_file import scenario_with
from .arms import Arm
from .comparison import Comparison, compare, simulate
from .host_times import tokenizer_of
from .measuring import Pace
from .served import Asked, Served, make_clock, metrics_of, serve

CALIBRATION_SEED = 104_729  # other windows of the text than those of the workload
LIGHT, KNEE, SATURATED = "light", "knee", "saturated"
LOADS = {LIGHT: 0.3, KNEE: 0.75}  # shares of the capacity that is simulated
MIN_CALIBRATION = 16  # requests
QUEUED = 1.5  # clients of the saturated load, per row
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TwinPlan:
    """What is run. `loads` None: the scenario's own arrivals; `seconds`:
    about how long one measured run lasts, where a load is made."""

    scenario: Scenario
    loads: tuple[str, ...] | None = (LIGHT, KNEE, SATURATED)
    seconds: float = 8.0
    repeats: int = 3
    draws: int = 8  # simulated draws of acceptance
    calibration_requests_per_s: float = 16.0  # that tell the acceptance, per second of `seconds`
    calibration_output: int = 48
    clock: str = "wall"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and how they come."""

    name: str
    asked: tuple[Asked, ...]
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class Side:
    """What the simulated side of an arm is made of.
    `pace`: what the machine takes while this arm is served, over what it took before."""

    cost: StepCost
    steps: ExecutorSteps
    acceptance: AcceptanceProcess
    pace: float = 1.0

    def simulate(self, arm: Arm, load: Load, seed: int = 0) -> list[Event]:
        acceptance = self.acceptance
        if isinstance(acceptance, GaussianAcceptance):
            acceptance = replace(acceptance, seed=seed)
        spread = self.steps.spread
        return simulate(
            arm.simulated_spec, self.cost.at_pace(self.pace), self.steps.host.at_pace(self.pace), acceptance, load.asked, load.concurrency,
            device_spread=spread.get("decode", 0.0), host_spread=spread.get("host", 0.0), seed=seed,
        )  # fmt: skip


def default_scenario() -> Scenario:
    """Return the workload without arguments: prompts and outputs that a tiny pair serves in a fraction of a second."""
    return scenario_with(
        {},
        {
            "workload.prompt": {"kind": "uniform", "low": 16, "high": 96},
            "workload.output": {"kind": "uniform", "low": 24, "high": 64},
        },
    )


def run_twin(
    arms: Sequence[Arm], steps: ExecutorSteps, plan: TwinPlan, on_progress: OnProgress = lambda text: None
) -> Iterator[Comparison]:
    """Yield the comparisons, load by load. Raises ConfigError for a profile of something else, and other
    ForedraftErrors."""
    make_clock(plan.clock, arms[0].plan.device)
    _check_scenario(plan.scenario)
    costs = [steps.cost(arm.spec, "profile") for arm in arms]  # refuses before anything is served
    # Chains of one draft accept alike, however long they are: one run of the longest tells it for all of them.
    fitted: dict[Hashable, AcceptanceProcess] = {}
    sides = []
    for arm, cost in zip(arms, costs, strict=True):
        process: AcceptanceProcess = FixedMeanAcceptance(1.0)
        if arm.is_speculative:
            key = _draft_of(arm)
            if key not in fitted:
                on_progress(f"{arm.name}: acceptance of calibration prompts")
                alike = [other for other in arms if other.is_speculative and _draft_of(other) == key]
                fitted[key] = fit_acceptance(max(alike, key=lambda other: other.spec.max_steps), plan).process
            process = fitted[key]
        sides.append(Side(cost, steps, process))
    # On a GPU a second pool would stand in the way of the first.
    pace = Pace(arms[0], costs[0], plan.clock) if arms[0].plan.device == "cpu" else None
    for name in plan.loads or ("as given",):
        loads = [_load(name, arm, side, arms, plan) for arm, side in zip(arms, sides, strict=True)]
        measured: list[list[Served]] = [[] for _ in arms]
        paces: list[list[float]] = [[] for _ in arms]
        for repeat in range(plan.repeats):
            for number, (arm, load) in enumerate(zip(arms, loads, strict=True)):
                on_progress(f"{name}: {arm.name}, {len(load.asked)} requests, run {repeat + 1} of {plan.repeats}")
                clock = make_clock(plan.clock, arm.plan.device)
                before = [] if pace is None else [pace.now()]
                measured[number].append(serve(arm, load.asked, clock, load.concurrency, plan.seed))
                paces[number] += before if pace is None else [*before, pace.now()]
        for arm, side, load, runs, found in zip(arms, sides, loads, measured, paces, strict=True):
            on_progress(f"{name}: {arm.name}, simulating")
            pace_now = float(np.mean(found)) if found else None
            side = replace(side, pace=pace_now or 1.0)
            simulated = [metrics_of(side.simulate(arm, load, draw)) for draw in range(plan.draws)]
            share = float(np.mean([run.processor_share for run in runs]))
            measured_metrics = [run.metrics() for run in runs]
            yield compare(
                arm.name,
                name,
                len(load.asked),
                simulated,
                measured_metrics,
                share,
                pace_now,
            )


# -- the workload -----------------------------------------------------------------------------------------------------


def _load(name: str, arm: Arm, side: Side, arms: Sequence[Arm], plan: TwinPlan) -> Load:
    """Make one load of an arm: a share of its simulated capacity, or more clients than it has rows."""
    if plan.loads is None:
        asked = requests_of(plan.scenario, arm, arms, plan.seed)
        return Load(name, asked, plan.scenario.workload.concurrency)
    rows = arm.spec.config.max_running
    closed = scenario_with(
        plan.scenario.model_dump(), {"workload.concurrency": rows, "workload.num_requests": 16 * rows}
    )
    events = side.simulate(arm, Load(name, requests_of(closed, arm, arms, plan.seed, text=False), rows))
    capacity = metrics_of(events).summary()["request_throughput"]
    share = LOADS.get(name, 1.0)
    count = {"workload.num_requests": int(np.clip(plan.seconds * share * capacity, 3 * rows, 2000))}
    if name == SATURATED:
        clients = int(QUEUED * rows)
        made = scenario_with(plan.scenario.model_dump(), {**count, "workload.concurrency": clients})
        return Load(name, requests_of(made, arm, arms, plan.seed), clients)
    made = scenario_with(
        plan.scenario.model_dump(), {**count, "workload.concurrency": None, "workload.rate": share * capacity}
    )
    return Load(name, requests_of(made, arm, arms, plan.seed), None)


def requests_of(scenario: Scenario, arm: Arm, arms: Sequence[Arm], seed: int, text: bool = True) -> tuple[Asked, ...]:
    """Return the scenario's requests with prompts of real text; each asks for as many tokens as it is to emit.

    Without `text` the prompts have a length alone, for simulations. Raises ConfigError for a request that some arm
    cannot hold.
    """
    total = min(each.plan.spec.config.context_len for each in arms)
    arrivals = list(make_workload(scenario, total))
    most = max((arrival.prompt.length + arrival.output_len for arrival in arrivals), default=0)
    if most > total:
        message = f"a request of {most} tokens; with their drafts these ways to serve take {total} (model.context_len)"
        raise ConfigError.of("<scenario>", "workload", message)
    if not arrivals:
        raise ForedraftError("the workload has no requests")
    longest = max(arrival.prompt.length for arrival in arrivals)
    texts = []
    if text:
        texts = bench_prompts(tokenizer_of(arm), arm.plan.target.vocab_size, len(arrivals), longest, seed)
    asked = []
    for number, arrival in enumerate(arrivals):
        prompt = Prompt.of_tokens(texts[number][: arrival.prompt.length]) if text else arrival.prompt
        asked.append(Asked(Request(f"r{arrival.row}", prompt, arrival.output_len, arrival.priority), arrival.time_ns))
    return tuple(asked)


def _check_scenario(scenario: Scenario) -> None:
    """Raise ConfigError for what one real executor in this process does not do."""
    table, clients = scenario.workload, scenario.clients
    refused: Mapping[str, bool] = {
        "hardware.replicas": scenario.hardware.replicas > 1,
        "hardware.tensor_parallel": scenario.hardware.tensor_parallel > 1,
        "disaggregation": scenario.disaggregation.prefill > 0 or scenario.disaggregation.ratio is not None,
        "clients": clients.deadline_s is not None or clients.cancel_share > 0,
        "workload.trace": table.trace is not None and table.num_requests is None and table.stop_s is None,
    }
    why = {
        "workload.trace": "a whole trace would be served in real time; limit it by workload.num_requests or stop_s",
        "clients": "clients that leave are not a part of the twin",
    }
    problems = [
        Problem(key, why.get(key, "the twin serves with one engine")) for key, wrong in refused.items() if wrong
    ]
    if problems:
        raise ConfigError("<scenario>", problems)


# -- acceptance -------------------------------------------------------------------------------------------------------


def _draft_of(arm: Arm) -> Hashable:
    """Return what drafts of an arm are accepted by: the draft, and the shape of its trees."""
    spec = arm.spec
    tree = (spec.topk, spec.max_steps, spec.num_draft_tokens) if spec.topk > 1 else None
    return arm.algorithm, str(arm.plan.options.draft), tree


def fit_acceptance(arm: Arm, plan: TwinPlan) -> AcceptanceFit:
    """Fit the acceptance of the arm's drafts, at the most steps that it takes, to prompts that are not the workload's.

    Raises AcceptanceFitError.
    """
    most_steps = fixed_config(arm.spec.max_steps)
    spec = replace(arm.spec, policy="fixed", adaptive=most_steps, initial_steps=None, cost_table=None)
    if arm.spec.policy != "fixed":
        spec = replace(spec, graph_sizes=None)
    return fit(*rounds_of(_serve_calibration(replace(arm, spec=spec), plan).events))


def _serve_calibration(arm: Arm, plan: TwinPlan) -> Served:
    """Serve the calibration's prompts, as many at once as the arm can."""
    longest = max(2, min(64, arm.spec.config.context_len // 3))
    output = max(2, min(plan.calibration_output, arm.plan.spec.config.context_len - longest))
    count = max(MIN_CALIBRATION, round(plan.calibration_requests_per_s * plan.seconds))
    texts = bench_prompts(tokenizer_of(arm), arm.plan.target.vocab_size, count, longest, plan.seed + CALIBRATION_SEED)
    asked = [Asked(Request(f"c{i}", Prompt.of_tokens(text), output), None) for i, text in enumerate(texts)]
    return serve(arm, asked, None, arm.spec.config.max_running, plan.seed)


def rounds_of(events: Sequence[Event]) -> np.ndarray:
    """Return the rounds with drafts, int64 [4, n]: request, output position, steps and correct drafts."""
    number_of: dict[str, int] = {}
    in_row: dict[int, int] = {}
    emitted: dict[int, int] = {}
    found: list[tuple[int, int, int, int]] = []
    for event in events:
        if isinstance(event, Planned) and event.step is not None:
            for join in event.step.joins:
                in_row[join.row] = number_of.setdefault(join.request.request_id, len(number_of))
                emitted[in_row[join.row]] = join.num_emitted
        elif isinstance(event, Committed):
            for request_id in event.first_tokens:
                emitted[number_of[request_id]] += 1
            if event.kept is None:
                continue
            decode, lens = event.step.decode, event.result.decode.accept_lens
            for round_number, kept in enumerate(event.kept):
                for i in np.flatnonzero(kept).tolist():
                    request = in_row[int(decode.rows[i])]
                    if decode.steps:
                        correct = min(int(lens[round_number, i]) - 1, decode.steps)
                        found.append((request, emitted[request], decode.steps, correct))
                    emitted[request] += int(kept[i])
    return np.array(found, np.int64).reshape(-1, 4).T
