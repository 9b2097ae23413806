"""`foredraft calibrate`: fit a simulation to measurements: the timing of a server, or the acceptance of drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import count_of
from ..decode.options import session_option
from ..options import ONLY, AsJson, Quiet, Settings, argument, mode_of, only_with, option, print_document

if TYPE_CHECKING:
    from ...sim.calibration.result import CalibrateResult

PROFILE = Path("profile.json")
LABELS = {
    "round_factor": "rounds (factor)",
    "round_slope": "  per doubling of clients",
    "drafts_factor": "with drafts (further factor)",
    "drafts_slope": "  per doubling of clients",
    "prompt_factor": "prompts (factor)",
    "front_end_ns": "front end per request (ms)",
}
UNITS = {"mean_tpot_ms": "TPOT ms", "mean_ttft_ms": "TTFT ms", "output_tokens_per_s": "tokens/s"}
REDRAW_EVERY_S = 0.2


of_executor = only_with("--model")
OF_MODEL = f"{ONLY}--model"
of_acceptance = only_with("--acceptance")
# fmt: off
First = Annotated[list[str] | None, option("--from", "Result file of a benchmark; repeatable.", "FILE")]
More = Annotated[list[str] | None, argument("[FILE]...", "More files.")]
Scenario = Annotated[Path | None, option("--scenario", "Scenario of the deployment that was measured.", "SCENARIO.toml")]
Acceptance = Annotated[bool, option("--acceptance",
    "Fit the acceptance of drafts, instead of the timing, to files that a server wrote.")]
Preset = Annotated[str, of_acceptance("--preset",
    "Kind of text (chat, code, math, edit) or preset that supplies what the files do not contain.")]
AllowTruncated = Annotated[bool, of_acceptance("--allow-truncated",
    "Accept the events of a run that was killed; such a file has no end.")]
Model = Annotated[Path | None, option("--model", "Measure Foredraft's own executor with this checkpoint.", "DIR")]
Steps = Annotated[str | None, only_with("--model", "--acceptance")("--steps",
    "Draft steps: to measure (default: 1,3,5,7), or of the server whose files do not have the number.", "S,S,…")]
Draft = Annotated[Path | None, session_option("draft", panel=OF_MODEL)]
Topk = Annotated[int, of_executor("--topk", "If more than 1: also measure trees with this number of branches.", min=1)]
NumDraftTokens = Annotated[int | None, of_executor("--num-draft-tokens", "Nodes of these trees. Default: up to 16.", min=2)]
MaxRunning = Annotated[int, session_option("max_running", panel=OF_MODEL, min=1)]
ContextLen = Annotated[int, of_executor("--context-len", "Length of the longest request, in tokens.", min=64)]
Repeat = Annotated[int, of_executor("--repeat", "Number of timings of every step.", min=1)]
Clock = Annotated[str, of_executor("--clock",
    "wall: real time. cpu: processor time, for a machine that does other work too.", "wall|cpu")]
Device = Annotated[str, session_option("device", panel=OF_MODEL)]
Threads = Annotated[int | None, session_option("threads", panel=OF_MODEL)]
Out = Annotated[Path | None, option("--out",
    "Write the profile to this file. Default: profile.json. With --acceptance: write the table of a scenario.")]
# fmt: on

FILES = {"first", "more", "out", "as_json", "quiet"}
MODES = {"--acceptance": FILES, "--model": FILES - {"first", "more"}}


def calibrate(
    ctx: typer.Context,
    first: First = None, more: More = None, scenario: Scenario = None, settings: Settings = None,
    acceptance: Acceptance = False, preset: Preset = "chat", allow_truncated: AllowTruncated = False, model: Model = None,
    draft: Draft = None, steps: Steps = None, topk: Topk = 1, num_draft_tokens: NumDraftTokens = None, max_running: MaxRunning = 8,
    context_len: ContextLen = 512, repeat: Repeat = 7, clock: Clock = "wall", device: Device = "auto", threads: Threads = None,
    out: Out = None, as_json: AsJson = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Fit the simulator to your own measurements: the timing of a server, or the acceptance of drafts.

    Reads the results of `vllm bench serve --save-result`, SGLang's bench_serving
    --output-file, guidellm (benchmarks.json) and aiperf
    (profile_export_aiperf.json), or CSV with a header (docs/calibration.md). A
    few points are enough: plain decoding at three concurrencies, and one point
    with speculation. Settings that a file does not contain follow its name, as in
    the second example.

        foredraft calibrate --from plain.jsonl spec.jsonl \\
            --set hardware.gpu=H200 --set hardware.server=sglang-0.5
        foredraft calibrate --from vllm.json:algorithm=EAGLE3,steps=3 plain.json \\
            --scenario mine.toml --out mine.json
        foredraft simulate --set hardware.profile=profile.json \\
            --set hardware.gpu=H200 --set hardware.server=sglang-0.5
        foredraft calibrate --acceptance runs/a --out acceptance.toml
        foredraft calibrate --model models/target --draft models/eagle3

    Prints the factor on rounds, how it changes with the number of clients, and
    what prompts take; the error of each point in the fit, and its error when it is
    left out of the fit; and which run to measure next. Exit code 2: a file cannot
    be used, the points contradict each other, or no deployment can be that fast.

    With --acceptance the files are events.jsonl of a run, vLLM's per-request
    metrics, Prometheus pages and logs of vLLM and SGLang, or CSV with the header
    steps,accept_length (docs/calibration.md). The command prints recorded and
    fitted numbers side by side, what the files do not contain, and the table.

    With --model the command measures the steps of Foredraft's own executor:
    prompt chunks, drafting, verifying, catching up, over rows, nodes and context,
    and the time of the host. After Ctrl-C the same command continues with the
    timings so far.
    """
    mode = mode_of(ctx, MODES)
    files = [*(first or ()), *(more or ())]
    if mode == "--model":
        from .measure import measure

        assert model is not None, "it is given"
        measure(
            out=out or PROFILE, model=model, draft=draft, steps=steps, topk=topk, num_draft_tokens=num_draft_tokens,
            max_running=max_running, context_len=context_len, repeat=repeat, clock=clock, device=device, threads=threads,
            as_json=as_json, quiet=quiet,
        )  # fmt: skip
        return
    if not files:
        from ...core.errors import ForedraftError

        what = "no files to fit to" if acceptance else "nothing to calibrate from"
        more_ways = "" if acceptance else " (a benchmark's result), --acceptance FILE or --model DIR"
        raise ForedraftError(f"{what}: give --from FILE{more_ways}; see --help")
    if acceptance:
        from .acceptance import fit_acceptance

        fit_acceptance(files, steps, preset, allow_truncated, out, as_json)
    else:
        _fit(files, scenario, settings, out or PROFILE, as_json, quiet)


def _fit(
    files: list[str], scenario: Path | None, settings: list[str] | None, out: Path, as_json: bool, quiet: bool
) -> None:
    """Fit the timing to the points of `files`, write the profile, and print it."""
    from ...observe.output_files import JsonRecord
    from ...sim.calibration.fit import calibrate_from_files
    from ...sim.scenario_file import load_scenario
    from ..progress import LINE_EVERY_S, StatusLine

    record = JsonRecord(out)
    base, origins = load_scenario(scenario, settings or ())
    line = StatusLine(quiet, redraw_every_s=REDRAW_EVERY_S, line_every_s=LINE_EVERY_S)

    def show(points: int, simulations: int) -> None:
        if line.due_s() is not None:
            line.show(f"{count_of(points, 'point')}, {count_of(simulations, 'simulation')}")

    try:
        found = calibrate_from_files(files, base, origins, out.stem, show)
    finally:
        line.clear()
    record.write(dict(found.profile))
    if as_json:
        print_document(found)
        return
    lines = [*_parameters(found), "", *_results(found), "", *_remarks(found)]
    typer.echo("\n".join([*lines, f"Written to {out}. In a scenario:", "", *_table(found, out)]))


def _parameters(found: CalibrateResult) -> Iterator[str]:
    """Yield the lines of the parameters: fitted, and how well they are known."""
    kernels = {"roofline": "the roofline", "measured": "measured kernels"}[found.kernels]
    what = f"{found.model} on {found.gpu}"
    yield f"{count_of(found.points, 'point')}, fitted around {found.server} over {kernels}: {what}"
    yield ""
    yield f"{f'clients: {found.clients:.3g}':30}{'fitted':>9}   interval (90 %)"
    for one in found.parameters:
        value, low, high = (_shown(one.name, number) for number in (one.value, one.low, one.high))
        yield f"{LABELS[one.name]:30}{value:>9}   {low} … {high}"


def _shown(name: str, value: float) -> str:
    """Return a parameter as the report has it: a slope as the share by which a doubling changes the factor."""
    if name.endswith("_ns"):
        return f"{value / 1e6:.1f}"
    return f"{2**value - 1:+.1%}" if name.endswith("_slope") else f"{value:.3f}"


def _results(found: CalibrateResult) -> Iterator[str]:
    """Yield a line for every result: measured, fitted, its error in the fit, and left out of it."""
    width = max(len(one.point) for one in found.results)
    yield f"{'':{width + 10}}{'measured':>10}{'fitted':>10}{'error':>8}{'left out':>12}"
    last = ""
    for one in found.results:
        numbers = f"{one.measured:10,.2f}{one.fitted:10,.2f}{one.error:+8.1%}{one.left_out_error:+12.1%}"
        title, last = "" if one.source == last else one.point, one.source
        yield f"{title:{width}}{UNITS[one.name]:>10}{numbers}"
    yield f"{'mean absolute error, decoding':{width + 30}}{found.error:8.1%}{found.left_out_error:12.1%}"
    if found.left_out_ttft_error is not None:
        yield f"{'mean absolute error, first token':{width + 38}}{found.left_out_ttft_error:12.1%}"


def _remarks(found: CalibrateResult) -> Iterator[str]:
    """Yield what was left out or assumed, which run to measure next, and which points contradict the others."""
    lines = [f"left out     {what}" for what in found.left_out]
    if drifting := sum(one.assumes_spread for one in found.results):
        lines.append(
            f"assumed      lengths with a spread in {drifting} of the runs: by the time to the first token clients keep no step"
        )
    if found.left_out_ttft_error is None:
        lines.append("not known    prompts, but for their share of decoding: no point has its mean TTFT")
    lines.append("usual        three points of a deployment take the error of its other points from 13 to 7 %")
    lines.append(f"next         {found.next_run}: of all runs these points tell least of it")
    for item in found.results:
        if item.contradicts:
            lines.append(
                f"contradicts  {item.source}: {UNITS[item.name]} {item.measured:.4g}, by the other points "
                f"{item.measured * (1 + item.left_out_error):.4g} ({item.point})"
            )
    yield from [*lines, ""]


def _table(found: CalibrateResult, out: Path) -> Iterator[str]:
    yield "[hardware]"
    yield f"profile = {json.dumps(str(out), ensure_ascii=False)}"
    yield f'gpu = "{found.gpu}"'
    yield f'server = "{found.server}"'
    yield f'kernels = "{found.kernels}"'
