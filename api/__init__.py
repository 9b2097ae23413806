"""Foredraft: simulate, run and check the serving of language models with speculative decoding.

    from foredraft import simulate

    result = simulate("chat.toml", {"workload.rate": 20.0})
    print(result.summary["p99_ttft_ms"], result.slo_attainment)

The names here are what most users need. Importing the package loads none of the others; `simulate`, `Scenario` and
`Result` need the extra `sim`, `plan`, `tune`, `doctor` and `cost` the extra `planning`, `calibrate` the extra
`calibrate`, `Session` the extra `gpu`, and `check` NumPy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.planning.answers.answer import PlanAnswer
    from foredraft.planning.rounds.cost import Cost
    from foredraft.planning.rounds.doctor import Diagnosis
    from foredraft.planning.tuning.result import TuneResult
    from foredraft.properties.harness.report import Report
    from foredraft.session import Session
    from foredraft.sim.calibration.result import CalibrateResult
    from foredraft.sim.scenario import Scenario
    from foredraft.simulation import Result, ScenarioLike

    __version__: str

__all__ = [
    "Result", "Scenario", "Session", "__version__", "calibrate", "check", "cost", "doctor", "plan", "simulate", "tune",
]  # fmt: skip


def simulate(
    scenario: ScenarioLike = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    workers: int = 1,
) -> Result:
    """Simulate a deployment and return its `Result`.

    Args:
        scenario: A `Scenario`, a scenario file, its tables as a dictionary, or None for the defaults (Llama-3.1-8B on
            one H100, EAGLE-3).
        overrides: Dotted keys with their values, which replace those of the scenario.
        workers: Processes that share the replicas of the run. The result is that of one process. More than one needs a
            router that does not look at the replicas (`router.policy` round_robin or random).

    Raises:
        ForedraftError: The scenario cannot run; the message names every key at fault.

    Example::

        for gpu in ("H100", "H200"):
            result = simulate("examples/chat_on_h100.toml", {"hardware.gpu": gpu})
            print(gpu, result.summary["p99_ttft_ms"], result.slo_attainment)
    """
    from foredraft.simulation import run_scenario

    return run_scenario(scenario, overrides or {}, workers)


def plan(
    scenario: ScenarioLike = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    slo: str | None = None,
    rate: float | None = None,
    gpus: int | None = None,
    compare: Mapping[str, Sequence[Any]] | None = None,
    prices: Mapping[str, float] | None = None,
    by_hour: bool = False,
    headroom: float = 0.2,
    warm_up_s: float = 300.0,
    seeds: int = 48,
    requests: int | None = None,
    out: str | PathLike[str] | None = None,
    workers: int | None = None,
    cluster: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> PlanAnswer:
    """Find the configuration that serves the most load within latency limits, or a given load with the fewest GPUs.

    Args:
        scenario: As for `simulate`.
        overrides: As for `simulate`.
        slo: Limits, as for `foredraft plan --slo`; None: `[slo]` of the scenario, else ttft_p99<1s,tpot_p99<50ms.
        rate: Requests per second to serve; with a trace, how many times as fast to replay it. None asks for the
            greatest.
        gpus: Devices to divide into engines; None: those of one engine, or as many as all candidates divide.
        compare: Keys of the scenario with the values to compare; None compares ways to draft.
        prices: Of an hour of a GPU, by its name.
        by_hour: Of a trace: plan its busiest hour, and return the replicas of each hour.
        headroom: With `by_hour`: the share to add to the rate of an hour.
        warm_up_s: With `by_hour`: how long a replica starts, which is paid.
        seeds: Most runs of the best candidate at a load.
        requests: Of a run. None: 600, or as many as a trace has.
        out: Directory that keeps every run, so that the same call continues there; None keeps none.
        workers: Processes; None: one per core.
        cluster: Address of a Ray cluster that makes the runs, as for `foredraft plan --cluster`.
        on_progress: Gets a line for each candidate that a round ends with. An exception that it raises ends the search.

    Raises:
        ForedraftError: The scenario or an argument is wrong; the message names every key at fault.

    Example::

        answer = plan("examples/chat_on_h100.toml", slo="ttft_p99<500ms", compare={"speculation.steps": [0, 3]})
        if answer.best is not None:
            print(answer.best.name, answer.best.load, answer.load_unit)
    """
    from foredraft.questions import ask_plan

    asked: dict[str, Any] = {"slo": slo, "load": rate, "gpus": gpus, "seeds": seeds, "requests": requests}
    asked |= {"prices": prices or {}, "by_hour": by_hour, "headroom": headroom, "warm_up_s": warm_up_s}
    return ask_plan(scenario, overrides, compare, asked, out, workers, cluster, on_progress)


def tune(
    scenario: ScenarioLike = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    trials: int = 32,
    search_seeds: int = 3,
    seeds: int = 5,
    requests: int = 100,
    out: str | PathLike[str] | None = None,
    workers: int | None = None,
    cluster: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> TuneResult:
    """Find the table of draft steps by batch size that serves a workload fastest.

    Args:
        scenario: As for `simulate`.
        overrides: As for `simulate`.
        trials: Tables that the search tries.
        search_seeds: Runs of each table in the search.
        seeds: Runs of each candidate in the final comparison, with other seeds.
        requests: Approximate number of requests of a run.
        out: As for `plan`; the result and its files are written there, too.
        workers: As for `plan`.
        cluster: As for `plan`.
        on_progress: Gets a line for each run and each table. An exception that it raises ends the search.

    Raises:
        ForedraftError: The scenario or an argument is wrong, or nothing can run.

    Example::

        found = tune("examples/chat_on_h100.toml", trials=8, out="runs/steps")
        print(found.holds, found.table, found.files["sglang.args"])
    """
    from foredraft.questions import ask_tune

    asked = {"trials": trials, "search_seeds": search_seeds, "seeds": seeds, "requests": requests}
    return ask_tune(scenario, overrides, asked, out, workers, cluster, on_progress)


def doctor(
    scenario: ScenarioLike = None, overrides: Mapping[str, Any] | None = None, *, requests: int = 200
) -> Diagnosis:
    """Judge whether speculation pays in a deployment, up to which batch, and how it changes latencies.

    Args:
        scenario: As for `simulate`.
        overrides: As for `simulate`.
        requests: Requests to simulate, with and without speculation.

    Raises:
        ForedraftError: The scenario does not speculate, or cannot run.

    Example::

        found = doctor(overrides={"hardware.gpu": "L40S"})
        print(found.verdict, found.pays_up_to_batch, found.load["p99_itl_ms"].speculative)
    """
    from foredraft.questions import ask_doctor

    return ask_doctor(scenario, overrides, requests)


def cost(
    scenario: ScenarioLike = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    batch: Sequence[int] = (1, 8, 64),
    context: int = 1024,
    steps: Sequence[int] = (0, 1, 2, 3, 4, 5, 6, 7),
) -> Cost:
    """Price decode rounds, part by part, by batch size and draft steps.

    Args:
        scenario: As for `simulate`.
        overrides: As for `simulate`.
        batch: Numbers of requests that decode together.
        context: KV tokens of each request.
        steps: Numbers of draft steps; 0 is plain decoding.

    Raises:
        ForedraftError: The scenario cannot be assembled, or a number is out of range.

    Example::

        for size in cost(batch=[1, 64], steps=[0, 3]).batches:
            print(size.batch, [(one.steps, one.round_us, one.break_even) for one in size.rounds])
    """
    from foredraft.questions import ask_cost

    return ask_cost(scenario, overrides, batch, context, steps)


def calibrate(
    files: Sequence[str | PathLike[str]] | str | PathLike[str],
    scenario: ScenarioLike = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    out: str | PathLike[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> CalibrateResult:
    """Fit the simulator's timing to results of benchmarks.

    Args:
        files: Result files, as for `foredraft calibrate --from`.
        scenario: The deployment that was measured; as for `simulate`.
        overrides: As for `simulate`.
        out: Write the profile to this file, for `hardware.profile`.
        on_progress: Gets a line after each simulation. An exception that it raises ends the fit.

    Raises:
        ForedraftError: A file cannot be used, or there are too few points; the message says what to measure.

    Example::

        found = calibrate("examples/calibration/points.csv", overrides={"hardware.server": "sglang-0.5"})
        print(found.left_out_error, {one.name: one.value for one in found.parameters})
    """
    from foredraft.questions import ask_calibrate

    return ask_calibrate(files, scenario, overrides, out, on_progress)


def check(contract: str, make: Callable[[Any], Any] | str, **options: Any) -> Report:
    """Search for operations that break a component, and return the report; nothing is raised for a broken invariant.

    Args:
        contract: "allocator", "prefix-cache", "relay", "accept", "step-controller", "engine", "executor",
            "block-manager", "transport" or "simulator".
        make: A function that takes a configuration and returns a fresh component, or its name as "module:make".
        **options: Passed to `foredraft.properties.conformance.check`, for example `budget="60s"`,
            `capabilities=("paged",)`, `seed=7`.

    Raises:
        ConfigError: There is no such contract, component or capability.

    Example::

        report = check("allocator", lambda config: MyAllocator(config.num_pages), budget="10s")
        assert report.ok, report.text()
    """
    from foredraft.properties import conformance, suites
    from foredraft.properties.harness import importing

    return conformance.check(
        suites.suite_of(contract), importing.load_make(make) if isinstance(make, str) else make, **options
    )


def __getattr__(name: str) -> Any:
    if name == "Scenario":
        from foredraft.sim.scenario import Scenario

        return Scenario
    if name == "Session":
        from foredraft.session import Session

        return Session
    if name == "Result":
        from foredraft.simulation import Result

        return Result
    if name == "__version__":
        from importlib.metadata import version

        return version("foredraft")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
