"""`foredraft calibrate --model`: measure our own executor's steps, and write their profile."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...core.errors import count_of
from ..decode.options import problems_name_options
from ..options import print_document
from ..terminal import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from ...twin.measuring import Measured


@problems_name_options
def measure(
    *,
    out: Path,
    model: Path,
    draft: Path | None,
    steps: str | None,
    topk: int,
    num_draft_tokens: int | None,
    max_running: int,
    context_len: int,
    repeat: int,
    clock: str,
    device: str,
    threads: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure plain decoding and, with a draft, chains of every step count and trees; write `out` and print a summary.

    Timings are kept beside `out` until all are there. Raises ConfigError for models or options that do not fit.
    """
    from ...gpu.measure.cells import MeasuringPlan
    from ...gpu.measure.turns import TimingRecord
    from ...gpu.session.hub import local_checkpoint
    from ...gpu.session.plan import SessionOptions
    from ...observe.output_files import write_json
    from ...sim.cost.calibration import Calibration, profile_document
    from ...twin.arms import open_arms, ways_of_steps
    from ...twin.measuring import measure_steps
    from ..decode.twin import show_cells
    from ..progress import StatusLine

    base = SessionOptions(
        model=local_checkpoint(model),
        draft=None if draft is None else local_checkpoint(draft, "draft"),
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        device=device,
        threads=threads,
        max_running=max_running,
        context_len=context_len,
        prefix_cache=False,
    )
    progress = StatusLine(quiet)
    arms = open_arms(ways_of_steps(base, steps), None, None, progress.show)
    plan = MeasuringPlan(repeats=repeat, clock=clock)
    about = {"ways": [arm.spec.to_json() for arm in arms], "model": str(model), "draft": str(draft), "plan": str(plan)}
    record = TimingRecord(out.with_name(f"{out.name}.partial"), about)
    try:
        measured = measure_steps(arms, plan, record, show_cells(progress))
    except KeyboardInterrupt:
        record.close(finished=False)
        progress.clear()
        kept = f"kept {count_of(len(record.values), 'timing')}; the same command continues from there"
        print(f"foredraft: interrupted; {kept}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    progress.clear()
    found = measured.steps
    source = f"foredraft calibrate --model {model.name}" + ("" if draft is None else f" --draft {draft.name}")
    calibration = Calibration(out.stem, source, found.device, model.resolve().name, steps=found)
    profile = profile_document(calibration)
    write_json(out, profile)
    record.close(finished=True)
    if as_json:
        from ..documents.simulation import MeasureDocument

        print_document(MeasureDocument(str(out), profile, [asdict(one) for one in measured.closures]))
    else:
        _show(measured, out)


def _show(measured: Measured, out: Path) -> None:
    """Print what a round takes by part, and how well the parts add up to served steps."""
    steps = measured.steps
    lines = [
        f"{steps.device}, {count_of(steps.threads, 'thread')}; ms at the shortest context",
        "",
    ]
    lines.append(f"{'':28}{'rows':>5}{'draft':>9}{'verify':>9}{'KV move':>9}{'extend':>9}{'rest':>9}")
    for name, algorithm in steps.algorithms.items():
        for topk, grids in algorithm.rounds.items():
            axes = grids.draft.axes
            for rows in (axes["rows"][0], axes["rows"][-1]):
                count, nodes = axes["steps"][-1], grids.verify.axes["nodes"][-1]
                shape = (
                    "plain"
                    if not count
                    else f"chain {count}"
                    if topk == 1
                    else f"tree {count}, top-{topk}, {nodes} nodes"
                )
                times = (
                    grids.draft.at(steps=count, rows=rows).ns[0],
                    grids.verify.at(nodes=nodes, rows=rows).ns[0],
                    grids.kv_move.at(steps=count, rows=rows).ns,
                    grids.extend.at(accepted=grids.extend.axes["accepted"][-1], rows=rows).ns[0],
                    algorithm.rest.at(rows=rows).ns,
                )
                lines.append(f"{f'{name} {shape}':28.28}{rows:5}" + "".join(f"{time / 1e6:9.3f}" for time in times))
    host = steps.host
    lines += [
        "",
        f"host: plan {host.plan_ns(1) / 1e3:.0f} us, launch {host.launch_ns(1) / 1e3:.0f}, commit {host.commit_ns(1, 1) / 1e3:.0f}",
        "spread of one step's time: "
        + ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in steps.spread.items()),
    ]
    for closure in measured.closures:
        error = closure.priced_s / closure.measured_s - 1
        lines.append(
            f"{closure.steps} served steps of {closure.arm}: the profile says {100 * error:+.1f} % of their time"
        )
    typer.echo("\n".join([*lines, "", f"Written to {out}."]))
