"""The twin: every way to serve, at every load, simulated from a profile and served by the real executor, side by side.

profile, acceptance of other prompts ─► loads ─► serve (several times, each with other texts, ways taking turns) ─┐
  │                                        └─► simulate with the acceptance of other prompts (several draws) ─────┤
  └─► simulate each run again with the acceptance that was measured in it ──────────────────────────── compare ◄──┘
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.acceptance.process import AcceptanceProcess, FixedMeanAcceptance, GaussianAcceptance
from ..core.contract.events import Event
from ..core.contract.request import Request
from ..core.errors import ConfigError, ForedraftError, Problem
from ..core.prompt import Prompt
from ..gpu.measure.clock import make_clock
from ..gpu.measure.prompts import bench_prompts
from ..gpu.measure.served import ServedRun, TimedOrder, metrics_of
from ..gpu.measure.turns import Timed, take_turns
from ..observe.measuring.metrics import RunMetrics
from ..sim.cost.executor_steps import ExecutorSteps, StepCost
from ..sim.load import make_workload
from ..sim.scenario import Scenario
from ..sim.scenario_file import scenario_with
from .acceptance import (
    AcceptLength,
    ReplayedAcceptance,
    Rounds,
    accept_length_of,
    draft_of,
    fit_acceptance,
    joined,
    num_calibration,
    num_more,
    rounds_of,
    serve_calibration,
)
from .arms import TwinArm
from .comparison import Comparison, compare, sensitivity, simulate
from .host_times import tokenizer_of
from .measuring import ArmPace

CALIBRATION_SEED = 104_729  # other windows of the text than those of the workload
LIGHT, KNEE, SATURATED = "light", "knee", "saturated"
LOADS = {LIGHT: 0.3, KNEE: 0.75}  # shares of the capacity that is simulated
MORE_LOAD = 0.04  # with which the sensitivity to the load is simulated: above the noise of draws, below another regime
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
    calibration_requests_per_s: float = 32.0  # that forecast the acceptance, per second of `seconds`
    clock: str = "wall"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TwinLoad:
    """Requests, and how they come."""

    name: str
    asked: tuple[TimedOrder, ...]
    concurrency: int | None

    def times(self, factor: float) -> TwinLoad:
        """Return the same requests of an open loop, at `factor` times the rate."""
        asked = (replace(one, arrival_ns=round(one.due_ns / factor)) for one in self.asked)
        return replace(self, asked=tuple(asked))


@dataclass(frozen=True, slots=True)
class Side:
    """What the simulated side of an arm is made of.
    `forecast`: the accept length of the prompts that `acceptance` was fitted to. `pace`: what the machine takes while
    this arm is served, over what it took before."""

    cost: StepCost
    steps: ExecutorSteps
    acceptance: AcceptanceProcess
    forecast: AcceptLength | None = None
    pace: float = 1.0

    def simulate(
        self, arm: TwinArm, load: TwinLoad, seed: int = 0, acceptance: AcceptanceProcess | None = None
    ) -> list[Event]:
        """Simulate a load. `acceptance`: as measured; None: as forecast."""
        acceptance = acceptance or self.acceptance
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
    arms: Sequence[TwinArm], steps: ExecutorSteps, plan: TwinPlan, on_progress: OnProgress = lambda text: None
) -> Iterator[Comparison]:
    """Yield the comparisons, load by load. Raises ConfigError for a profile of something else, and other
    ForedraftErrors."""
    make_clock(plan.clock, arms[0].plan.device)
    _check_scenario(plan.scenario)
    costs = [steps.cost(arm.spec, "profile") for arm in arms]  # refuses before anything is served
    # Chains of one draft accept alike, however long they are: one run of the longest tells it for all of them.
    fitted: dict[Hashable, tuple[AcceptanceProcess, AcceptLength | None]] = {}
    sides = []
    for arm, cost in zip(arms, costs, strict=True):
        process: AcceptanceProcess = FixedMeanAcceptance(1.0)
        forecast: AcceptLength | None = None
        if arm.is_speculative:
            key = draft_of(arm)
            if key not in fitted:
                on_progress(f"{arm.name}: acceptance of other prompts")
                alike = [other for other in arms if other.is_speculative and draft_of(other) == key]
                longest = max(alike, key=lambda other: other.spec.max_steps)
                rounds = _calibrated(longest, arms, plan)
                fitted[key] = fit_acceptance(rounds).process, accept_length_of([rounds])
            process, forecast = fitted[key]
        sides.append(Side(cost, steps, process, forecast))
    # On a GPU a second pool would stand in the way of the first.
    pace = ArmPace(arms[0], costs[0], plan.clock) if arms[0].plan.device == "cpu" else None
    for name in plan.loads or ("as given",):
        # Each repeat has other texts, so that the range of the runs is that of both texts and machine.
        loads = [
            [_load(name, arm, side, arms, plan, plan.seed + repeat) for repeat in range(plan.repeats)]
            for arm, side in zip(arms, sides, strict=True)
        ]

        def show(done: int, total: int, what: str, name: str = name) -> None:
            on_progress(f"{name}: {what}, run {done // len(arms) + 1} of {plan.repeats}")

        def timed(arm: TwinArm, each: Sequence[TwinLoad]) -> Timed[tuple[ServedRun, list[float]]]:
            """Return runs of an arm, each with the pace of the machine before and after it."""

            def serve(sample: int) -> tuple[ServedRun, list[float]]:
                before = [] if pace is None else [pace.now()]
                clock = make_clock(plan.clock, arm.plan.device)
                served = arm.serve(each[sample].asked, clock, each[sample].concurrency)
                return served, before if pace is None else [*before, pace.now()]

            return Timed(f"{arm.name}, {len(each[0].asked)} requests", plan.repeats, serve)

        runs_of = take_turns([timed(*pair) for pair in zip(arms, loads, strict=True)], plan.seed, show)
        for arm, side, each, found in zip(arms, sides, loads, runs_of, strict=True):
            on_progress(f"{name}: {arm.name}, simulating")
            paces = [value for _, of_run in found for value in of_run]
            runs = [run for run, _ in found]
            yield _compared(arm, replace(side, pace=float(np.mean(paces or [1.0]))), each, runs, plan, paces)


def _compared(
    arm: TwinArm,
    side: Side,
    loads: Sequence[TwinLoad],
    runs: Sequence[ServedRun],
    plan: TwinPlan,
    paces: Sequence[float],
) -> Comparison:
    """Simulate the measured runs of an arm, with the acceptance that was forecast and with that of each run itself."""
    draws = range(plan.draws)

    def of_draws(load_factor: float = 1.0) -> list[RunMetrics]:
        """Return the metrics of the runs as forecast, each draw with a load of its own."""
        used = [load if load_factor == 1.0 else load.times(load_factor) for load in loads]
        return [metrics_of(side.simulate(arm, used[draw % len(used)], draw)) for draw in draws]

    forecast = of_draws()
    replayed: list[RunMetrics] = []
    rounds = [rounds_of(run.events) for run in runs] if arm.is_speculative else []
    for load, of_run in zip(loads, rounds, strict=bool(rounds)):
        acceptance = ReplayedAcceptance(of_run)
        replayed += [
            metrics_of(side.simulate(arm, load, draw, acceptance)) for draw in range(max(1, plan.draws // len(loads)))
        ]
    busier = of_draws(1 + MORE_LOAD) if loads[0].concurrency is None else ()
    share = float(np.mean([run.processor_share for run in runs]))
    lengths = {"measured": accept_length_of(rounds) if rounds else None, "forecast": side.forecast}
    return compare(
        arm.name,
        loads[0].name,
        len(loads[0].asked),
        forecast,
        [run.metrics() for run in runs],
        share,
        paces,
        replayed=replayed,
        ttft_per_load=sensitivity(forecast, busier, MORE_LOAD),
        accept_lengths={name: length for name, length in lengths.items() if length is not None},
    )


# -- the workload -----------------------------------------------------------------------------------------------------


def _load(name: str, arm: TwinArm, side: Side, arms: Sequence[TwinArm], plan: TwinPlan, seed: int) -> TwinLoad:
    """Make one load of an arm: a share of its simulated capacity, or more clients than it has rows. `seed`: of the
    texts."""
    if plan.loads is None:
        asked = requests_of(plan.scenario, arm, arms, seed)
        return TwinLoad(name, asked, plan.scenario.workload.concurrency)
    rows = arm.spec.config.max_running
    closed = scenario_with(
        plan.scenario.model_dump(), {"workload.concurrency": rows, "workload.num_requests": 16 * rows}
    )
    events = side.simulate(arm, TwinLoad(name, requests_of(closed, arm, arms, seed, text=False), rows))
    capacity = metrics_of(events).summary()["request_throughput"]
    share = LOADS.get(name, 1.0)
    count = {"workload.num_requests": int(np.clip(plan.seconds * share * capacity, 3 * rows, 2000))}
    if name == SATURATED:
        clients = int(QUEUED * rows)
        made = scenario_with(plan.scenario.model_dump(), {**count, "workload.concurrency": clients})
        return TwinLoad(name, requests_of(made, arm, arms, seed), clients)
    made = scenario_with(
        plan.scenario.model_dump(), {**count, "workload.concurrency": None, "workload.rate": share * capacity}
    )
    return TwinLoad(name, requests_of(made, arm, arms, seed), None)


def _calibrated(arm: TwinArm, arms: Sequence[TwinArm], plan: TwinPlan) -> Rounds:
    """Serve prompts of the workload's lengths with other texts, until their accept length is sure or there are as many
    as there may be. Return their rounds."""
    own = requests_of(plan.scenario, arm, arms, plan.seed, text=False)
    mean_output = float(np.mean([one.request.max_tokens for one in own]))
    count = num_calibration(arm, mean_output, round(plan.calibration_requests_per_s * plan.seconds))
    rounds, served = Rounds.none(), 0
    while count:
        asked = _other_prompts(arm, own, count, served, plan.seed)
        rounds, served = joined([rounds, serve_calibration(arm, asked)]), served + count
        count = num_more(accept_length_of([rounds]), served)
    return rounds


def _other_prompts(arm: TwinArm, own: Sequence[TimedOrder], count: int, first: int, seed: int) -> list[TimedOrder]:
    """Return `count` requests of the workload's lengths, from number `first` on, with other texts than those of the
    workload and of smaller numbers, for a closed loop that forecasts the acceptance."""
    lengths = [one.request for one in itertools.islice(itertools.cycle(own), first, first + count)]
    longest = max(request.prompt.length for request in lengths)
    texts = bench_prompts(
        tokenizer_of(arm), arm.plan.target.vocab_size, count, longest, seed + CALIBRATION_SEED + first
    )
    return [
        TimedOrder(
            Request(f"c{first + i}", Prompt.of_tokens(text[: request.prompt.length]), max(2, request.max_tokens)), None
        )
        for i, (text, request) in enumerate(zip(texts, lengths, strict=True))
    ]


def requests_of(
    scenario: Scenario, arm: TwinArm, arms: Sequence[TwinArm], seed: int, text: bool = True
) -> tuple[TimedOrder, ...]:
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
        asked.append(
            TimedOrder(Request(f"r{arrival.row}", prompt, arrival.output_len, arrival.priority), arrival.time_ns)
        )
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
