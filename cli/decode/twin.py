"""`foredraft bench --twin`: the real executor beside its simulation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import count_of
from ..names import complete_setting
from ..options import ONLY, Decorator, argument, only_with, print_document, refuse_without_effect, with_options
from ..terminal import EXIT_INTERRUPTED
from .options import session_option
from .tiny import default_directory

if TYPE_CHECKING:
    from ...sim.cost.executor_steps import ExecutorSteps
    from ...twin.arms import TwinArm
    from ...twin.comparison import ComparedNumber, Comparison
    from ..progress import StatusLine

LONGEST = 160  # tokens of the longest request of the workload without a scenario
REPORT_WIDTH = 168
MAX_RUNNING = 8
LOADS = ("light", "knee", "saturated")
SECONDS = 8.0
SIDES = ("measured", "error of times", "error of forecast", "runs differ by")

twin_option = only_with("--twin")

# fmt: off
ScenarioFile = Annotated[Path | None, argument("SCENARIO",
    "TOML file with the speculation, engine and workload to run. Default: five ways to decode at three loads.",
    "--twin")]
Settings = Annotated[list[str] | None, twin_option("--set", "Set one key of the scenario; repeatable.", "K=V",
    autocompletion=complete_setting)]
Pair = Annotated[Path | None, twin_option("--pair",
    "Directory made by `foredraft tiny`, instead of --model. Default: the pair in the user's cache, which is trained if "
    "missing.")]
Profile = Annotated[Path | None, twin_option("--profile",
    "Profile of steps, written by `foredraft calibrate --model`. Default: measure them now.", "FILE")]
LoadNames = Annotated[str | None, twin_option("--loads",
    "Loads to run: light (30 % of the capacity), knee (75 %), saturated. Default: all. A scenario has its own load.",
    "LOAD,…")]
Seconds = Annotated[float | None, twin_option("--seconds",
    "Approximate seconds of a measured run of these loads. Default: 8.", min=0.5)]
Clock = Annotated[str, twin_option("--clock",
    "wall: real time. cpu: processor time of this thread, for a machine that does other work too.", "wall|cpu")]
MaxRunning = Annotated[int, session_option("max_running", panel=f"{ONLY}--twin", min=1)]
# fmt: on


def _twin_options(
    scenario: ScenarioFile = None, settings: Settings = None, pair: Pair = None, profile: Profile = None,
    loads: LoadNames = None, seconds: Seconds = None, clock: Clock = "wall", max_running: MaxRunning = MAX_RUNNING,
) -> None:  # fmt: skip
    """Declare the options."""


with_twin_options: Decorator = with_options("twin", _twin_options)


def compare_with_simulation(
    *, scenario: Path | None, settings: list[str] | None, pair: Path | None, profile: Path | None, loads: str | None,
    seconds: float | None, clock: str, max_running: int, model: Path | None, draft: Path | None, dtype: str, repeat: int,
    seed: int, device: str, threads: int | None, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Run a workload on the real executor, simulate the same one, and print both.

    The simulation has the same engine, arrivals and lengths. Its times come from a profile of single steps. Each way
    with drafts is simulated twice: with the accept lengths of the measured runs, and with those of other prompts.
    Raises ConfigError for a profile of another model or device, a missing draft, or a request that does not fit.
    """
    from ...gpu.session.hub import local_checkpoint
    from ...gpu.session.plan import SessionOptions
    from ...sim.scenario_file import load_scenario
    from ...twin.arms import open_arms, way_of_scenario, ways_of_draft, ways_of_pair
    from ...twin.run import TwinPlan, default_scenario, run_twin
    from ..progress import StatusLine

    names = LOADS if loads is None else tuple(dict.fromkeys(name for name in loads.split(",") if name))
    _check(names, model, draft, pair)
    has_scenario = scenario is not None or bool(settings)
    why = "the scenario has arrivals of its own (workload)"
    refuse_without_effect(
        ("--loads", has_scenario and loads is not None, why), ("--seconds", has_scenario and seconds is not None, why)
    )
    workload, given = load_scenario(scenario, settings or ()) if has_scenario else (default_scenario(), {})
    progress = StatusLine(quiet)
    if model is None:
        pair = pair or _usual_pair(quiet)
        target = pair / "target"
    else:
        pair, target = None, local_checkpoint(model)
    base = SessionOptions(
        model=target,
        draft=None if draft is None else local_checkpoint(draft, "draft"), dtype=dtype, device=device, threads=threads,
        max_running=max_running, prefix_cache=False, seed=seed,
    )  # fmt: skip
    engine: dict[str, Any] = {}
    if not has_scenario:
        ways = ways_of_draft(base) if pair is None else ways_of_pair(pair, base)
        longest = LONGEST
    else:
        options, engine = way_of_scenario(workload, given, base, pair)
        ways, longest, names = {workload.name: options}, None, ()
    plan = TwinPlan(workload, names or None, SECONDS if seconds is None else seconds, repeat, clock=clock, seed=seed)
    found: list[Comparison] = []
    finished = False
    try:
        arms = open_arms(ways, longest, engine, progress.show)
        steps = measured_steps(arms, clock, profile, progress)
        for comparison in run_twin(arms, steps, plan, progress.show):
            found.append(comparison)
        finished = True
    except KeyboardInterrupt:
        pass
    finally:
        progress.clear()
    if found and as_json:
        from ..documents.decoding import TwinDocument

        print_document(TwinDocument(finished, steps.device, clock, [one.to_json() for one in found]))
    elif found:
        _show(found, clock)
    if not finished:
        print(f"foredraft: interrupted; {len(found)} comparisons are finished", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)


def measured_steps(arms: Sequence[TwinArm], clock: str, profile: Path | None, progress: StatusLine) -> ExecutorSteps:
    """Return the steps of a profile, or measure those of `arms` now.
    Raises ConfigError for a profile of something else."""
    from ...core.errors import ConfigError
    from ...gpu.measure.cells import MeasuringPlan
    from ...gpu.measure.run import device_name
    from ...sim.cost.calibration import load_calibration
    from ...twin.measuring import measure_steps, shape_of

    if profile is None:
        show = show_cells(progress)
        return measure_steps(arms, MeasuringPlan(clock=clock), None, show).steps
    steps = load_calibration(profile).steps
    if steps is None:
        message = "has no measured steps of Foredraft's executor; `foredraft calibrate --model` measures them"
        raise ConfigError.of(str(profile), "steps", message)
    steps.check_target(str(profile), **shape_of(arms[0]))
    here = device_name(arms[0].plan.device)
    if steps.device != here:
        raise ConfigError.of(str(profile), "steps.device", f"measured on {steps.device}, but this device is {here}")
    return steps


def show_cells(progress: StatusLine) -> Any:
    """Return what shows how many of the timings are done, now and then."""
    from ..progress import LINE_EVERY_S, StatusLine

    line = StatusLine(progress.is_quiet, redraw_every_s=0.2, line_every_s=LINE_EVERY_S)

    def show(done: int, of: int, what: str) -> None:
        if line.due_s() is not None:
            line.show(f"measuring steps: {done} of {of} timings, {what}")

    return show


def _check(loads: Sequence[str], model: Path | None, draft: Path | None, pair: Path | None) -> None:
    from ...core.errors import ConfigError, Problem, nearest

    problems = [
        Problem("loads", f"{name!r} is none of {', '.join(LOADS)}{nearest(name, LOADS)}")
        for name in loads
        if name not in LOADS
    ]
    if not loads:
        problems.append(Problem("loads", f"expected some of {', '.join(LOADS)}"))
    if model is not None and pair is not None:
        problems.append(Problem("pair", "contradicts --model: give one of them"))
    if draft is not None and model is None:
        problems.append(Problem("draft", "needs --model; a pair has its own drafts"))
    if problems:
        raise ConfigError("<arguments>", problems)


def _usual_pair(quiet: bool) -> Path:
    """Return the tiny pair of the user's cache; train it if it is missing, which takes some minutes."""
    from ...gpu.tiny.pair import make_pair
    from ...gpu.tiny.sizes import PairOptions, size_of
    from ..progress import training_progress

    with training_progress(quiet) as show:
        return make_pair(default_directory("tiny"), PairOptions(size_of("tiny")), show).directory


def _show(found: Sequence[Comparison], clock: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ...observe.measuring.summary import SHORT_NAMES

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, REPORT_WIDTH) if sys.stdout.isatty() else REPORT_WIDTH
    for load in dict.fromkeys(one.load for one in found):
        rows = [one for one in found if one.load == load]
        table = Table(title=load, box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left")
        table.add_column("", no_wrap=True)
        table.add_column("", no_wrap=True)
        for key, name in SHORT_NAMES.items():
            table.add_column(f"{name} ms" if key.endswith("_ms") else name, justify="right", no_wrap=True)
        measured = [one for one in rows if _is_measured(one, clock)]
        for one in rows:
            if one not in measured:
                table.add_row(one.arm, "not measured", *("–" for _ in SHORT_NAMES), end_section=True)
                continue
            is_drafted = bool(one.accept_lengths)  # plain decoding accepts nothing, so its two errors are one
            for number, side in enumerate(SIDES):
                if number == 2 and not is_drafted:
                    continue
                cells = (_cells(one.metrics.get(key), is_drafted)[number] for key in SHORT_NAMES)
                table.add_row("" if number else one.arm, side, *cells, end_section=number == len(SIDES) - 1)
        console.print(table)
        for one in measured:
            console.print(_over_time(one), markup=False)
        for one in measured:
            if one.accept_lengths:
                console.print(f"\n{_accept_lengths(one)}", markup=False)
        amplified = [one for one in measured if one.ttft_per_load is not None]
        if amplified:
            console.print(f"\n{_ttft_of_load(amplified)}", markup=False)
        paces = ", ".join(
            f"{one.arm} {one.pace - 1:+.1%} ({min(one.paces) - 1:+.0%} to {max(one.paces) - 1:+.0%})"
            for one in measured
            if one.pace is not None
        )
        if paces:
            console.print(
                f"\nTime of single rounds of {found[0].arm}, measured between the runs of each way, against the profile: {paces}. "
                "The simulated times are of the mean; where the machine's pace changes that much, they are no surer than that.",
                markup=False,
            )
    if any(_is_measured(one, clock) for one in found):
        console.print(f"\n{_about(found[0], clock)}", markup=False)
    least = min(one.processor_share for one in found)
    if least < 0.97 and clock == "wall":
        left_out = sum(not _is_measured(one, clock) for one in found)
        verb = "counts" if left_out == 1 else "count"
        rule = f", so {left_out} of {count_of(len(found), 'comparison')} {verb} as not measured" if left_out else ""
        console.print(
            f"\nThis process had a processor for only {least:.0%} of the time that it worked: other work runs on this "
            f"machine{rule}. Measure again when it is quiet, or with --clock cpu.",
            markup=False,
        )


def _is_measured(one: Comparison, clock: str) -> bool:
    """Return whether the measured side is that of the executor, and not of the other work of a busy machine."""
    from ...observe.measuring.summary import LEAST_PROCESSOR_SHARE

    return clock != "wall" or one.processor_share >= LEAST_PROCESSOR_SHARE


def _cells(one: ComparedNumber | None, is_drafted: bool) -> tuple[str, str, str, str]:
    """Return what was measured, the errors of times and of the forecast, and how much the runs differ."""
    if one is None or one.error is None:
        return "–", "", "", ""
    digits = 0 if one.measured >= 100 else 1 if one.measured >= 10 else 2
    of_times = one.replayed_error if is_drafted else one.error
    return (
        f"{one.measured:.{digits}f}",
        "" if of_times is None else f"{of_times:+.1%}",
        f"{one.error:+.1%}",
        "" if one.noise is None else f"±{one.noise:.1%}",
    )


def _accept_lengths(one: Comparison) -> str:
    """Say how sure the two accept lengths of a way with drafts are."""
    measured, forecast = one.accept_lengths["measured"], one.accept_lengths["forecast"]
    return (
        f"Accept length of {one.arm}: {measured.words} of {count_of(measured.prompts, 'prompt')} measured, "
        f"{forecast.words} of {count_of(forecast.prompts, 'other prompt')} forecast (± 95 % over prompts)."
    )


def _ttft_of_load(found: Sequence[Comparison]) -> str:
    """Say how much TTFT depends on the load, and so on every error of times and accept lengths."""
    each = ", ".join(f"{one.arm} {one.ttft_per_load:+.1f} %" for one in found)
    return f"TTFT for 1 % more load, simulated: {each}. An error of the times or of the accept length acts like load."


def _about(one: Comparison, clock: str) -> str:
    """Say what the rows are."""
    runs = "the only run" if one.repeats == 1 else f"{one.repeats} runs, each with other texts"
    times = " Times are processor time of one thread: waiting for a processor does not count." if clock == "cpu" else ""
    return (
        "error of times: of the simulation with the accept lengths of the measured runs. error of forecast: with those of "
        f"other prompts.\nmeasured: the mean of {runs}. runs differ by: half their range.{times}"
    )


def _over_time(one: Comparison) -> str:
    """Return the mean batch in tenths of the run, and the steps in use, predicted above measured."""
    lines = []
    for side, batch, index in (("predicted", one.batch[0], 0), ("measured", one.batch[1], 1)):
        steps = ", ".join(f"{steps}: {shares[index]:.0%}" for steps, shares in one.steps.items())
        title = one.arm if index == 0 else ""
        lines.append(f" {title:20.20} {side:9}  batch {' '.join(f'{rows:5.1f}' for rows in batch)}   steps {steps}")
    return "\n".join(lines)
