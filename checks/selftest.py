"""The self-test of a machine: every step in order within a budget of time, and one report.
Also `python -m foredraft.checks.selftest`, which needs neither typer nor rich.

The most basic parts come first: the machine, the kernels at the sizes of real models, the contracts of acceptance and
of the executor on the device, then what no contract sees, and the speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import torch

from ..core.errors import ForedraftError
from ..gpu.selftest.forward import flashinfer_steps, forward_steps
from ..gpu.selftest.machine import machine_steps
from ..gpu.selftest.report import SelftestReport, closing_lines, exit_code, seconds_of
from ..gpu.selftest.sessions import session_steps
from ..gpu.selftest.speed import speed_steps
from ..gpu.selftest.steps import (
    Context,
    SelftestStep,
    StepFinding,
    StepOutcome,
    UnavailableHere,
    not_run,
    run_apart,
    run_here,
    serve_steps,
)
from ..gpu.session.devices import can_capture, check_ops, resolve_device
from ..gpu.types.session_options import AUTO, DECLARED, FLASHINFER
from ..properties.harness.suite import Component
from ..properties.harness.swarm import Budget, Swarm
from ..properties.suites import suite_of

DEFAULT_BUDGET, DEFAULT_DIRECTORY = "10m", "selftest"
EXIT_BAD_INPUT = 2
SEED = 1
CONTRACT_LIMIT_S = 300.0  # the first run of each configuration compiles its kernels
GPU_SHARE, CPU_SHARE = Budget(seconds=60.0), Budget(operations=250)
"""How long each component is checked."""

OnLine = Callable[[str], None]


def catalogue(context: Context) -> list[SelftestStep]:
    """Return the steps for the context's device; those that need a GPU are among them on a CPU, too."""
    parts = (machine_steps, forward_steps, flashinfer_steps, contract_steps, session_steps, speed_steps)
    return [step for steps_of in parts for step in steps_of(context)]


# -- the contracts on the device ---------------------------------------------------------------------------------------


def contract_steps(context: Context) -> Iterator[SelftestStep]:
    """Yield the contract of acceptance for the device's operations, then that of the executor: with every index
    checked, and with captured rounds."""
    yield SelftestStep("contracts", "acceptance", partial(holds, context, _acceptance), limit_s=CONTRACT_LIMIT_S)
    for captured, name in ((False, "executor, every index checked"), (True, "executor, captured rounds")):
        run = partial(holds, context, partial(_executor, captured))
        yield SelftestStep("contracts", name, run, limit_s=CONTRACT_LIMIT_S)


def _acceptance(context: Context) -> Component:
    from .adapters.torch_accept import DeviceAccept

    def make_there(config: object) -> DeviceAccept:
        return DeviceAccept(context.ops, context.device)

    return suite_of("accept").component(make_there, DeviceAccept.capabilities)


def _executor(captured: bool, context: Context) -> Component:
    from .adapters.torch_executor import HOST, DevicePlace, ExecutorIn, make

    choice = context.ops_choice
    if choice == FLASHINFER:
        raise UnavailableHere("its models have heads of 16 channels in float32, which FlashInfer lacks")
    if captured and context.on_gpu and not can_capture(choice, context.device):
        raise UnavailableHere(f"the operations {choice} wait for the device, which a graph cannot")
    name = choice if choice != AUTO else "triton" if context.on_gpu else "host"
    place = DevicePlace(context.device, name, captured)
    return suite_of("executor").component(make if place == HOST else ExecutorIn(place))


def holds(context: Context, component_of: Callable[[Context], Component]) -> StepFinding:
    """Run random operations on a component. Raises AssertionError with the history that has broken an invariant, as it
    was drawn: a fault may have spoilt the device, on which nothing could be shrunk."""
    component = component_of(context)
    swarm = Swarm(component, SEED)
    found = swarm.search(component.invariants, GPU_SHARE if context.on_gpu else CPU_SHARE)
    if found is not None:
        history = "\n".join(f"{number:>4}. {operation}" for number, operation in enumerate(found.operations, 1))
        message = f"{found.violation}\nseed {found.seed}, run {found.run}: {found.config}\n{history}"
        raise AssertionError(message)
    checked = ", ".join(item.id for item in component.invariants if swarm.evaluations.get(item.id))
    return StepFinding(f"{swarm.num_operations:,} operations in {swarm.num_runs} runs; held: {checked}")


# -- the whole test ----------------------------------------------------------------------------------------------------


def selftest(device: str, directory: Path, budget: str, on_line: OnLine, ops: str = AUTO) -> SelftestReport:
    """Run the test on `device` ("auto", "cpu", "cuda") and return its report, which is in `directory` then. `ops`:
    `SessionOptions.ops`.

    On Ctrl-C the report has the steps that ran and is marked `interrupted`. Raises ConfigError for arguments,
    ForedraftError if nothing can be written.
    """
    end_s = time.monotonic() + seconds_of(budget)
    device = resolve_device(device)
    check_ops(ops, device)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="foredraft-selftest-") as made:
        context = Context(device, Path(made), ops)
        steps = catalogue(context)
        report = SelftestReport(directory, device, sys.argv, f"{datetime.now():%Y-%m-%d %H:%M}", len(steps))
        report.write()

        def begin(step: SelftestStep) -> None:
            on_line(f"{len(report.outcomes) + 1} of {len(steps)}: {step.title}")
            report.begin(step)

        try:
            for outcome in _outcomes(steps, context, lambda: end_s - time.monotonic(), begin):
                report.seconds = time.monotonic() - begun_s
                report.add(outcome)
        except KeyboardInterrupt:
            report.interrupted = True
            report.seconds = time.monotonic() - begun_s
            report.write()
    return report


def _outcomes(
    steps: Sequence[SelftestStep],
    context: Context,
    seconds_left: Callable[[], float],
    on_begin: Callable[[SelftestStep], None],
) -> Iterator[StepOutcome]:
    if context.device != "cpu":
        serve = partial(serve_catalogue, context.device, context.directory, context.ops_choice)
        yield from run_apart(steps, serve, seconds_left, on_begin)
        return
    for step in steps:
        if step.needs_gpu:
            yield not_run(step, "needs a GPU")
        else:
            yield from run_here([step], seconds_left, on_begin)


def serve_catalogue(device: str, directory: Path, ops: str, first: int, answer: Callable[[StepOutcome], None]) -> None:
    """Run the steps from number `first` on, in a process of their own:
    up to one that leaves a GPU which no longer answers."""

    def is_spoilt() -> bool:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
        return False

    serve_steps(catalogue(Context(device, directory, ops)), first, answer, is_spoilt)


def main() -> int:
    """Run the self-test with argparse, on machines without the packages that the command `foredraft` needs."""
    parser = argparse.ArgumentParser("python -m foredraft.checks.selftest", description=__doc__)
    parser.add_argument("--device", default="auto", help="cpu, cuda; auto: a GPU if there is one")
    parser.add_argument("--ops", default=AUTO, help=f"what computes: {', '.join(DECLARED['ops'].known)}")
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_DIRECTORY), help="directory of the report")
    parser.add_argument("--budget", default=DEFAULT_BUDGET, help="time, as 90s or 10m")
    given = parser.parse_args()
    try:
        report = selftest(
            given.device, given.out, given.budget, lambda text: print(text, file=sys.stderr, flush=True), given.ops
        )
    except (ForedraftError, ModuleNotFoundError) as error:
        needed = "" if isinstance(error, ForedraftError) else ": it needs torch, triton, numpy, safetensors, tokenizers"
        print(f"foredraft: {error}{needed}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print("\n".join(closing_lines(report)))
    return exit_code(report)


if __name__ == "__main__":
    sys.exit(main())
