"""`foredraft trace`: what a trace is like, and a synthetic workload that resembles it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import count_of
from ..options import (
    AsJson,
    Columns,
    Quiet,
    ScenarioFile,
    Settings,
    argument,
    option,
    print_document,
    refuse_without_effect,
)
from .simulate import given_by_options

if TYPE_CHECKING:
    from ...sim.calibration.synthesis import Synthesis
    from ...sim.scenario import Scenario
    from ...sim.workload.description import ArrivalDescription, Description, Lengths
    from ...sim.workload.traces import TraceSummary
    from ..documents.simulation import TraceDocument

WIDTH = 80
SHOWN_PERCENTILES = (50, 90, 99, 99.9)
COMPARED_PERCENTILES = (5, 50, 90, 99)
CHECKED = {  # key of the summary -> its name
    "mean_ttft_ms": "TTFT, mean ms",
    "p99_ttft_ms": "TTFT, p99 ms",
    "mean_tpot_ms": "TPOT, mean ms",
    "p99_tpot_ms": "TPOT, p99 ms",
    "p99_e2el_ms": "E2EL, p99 ms",
    "output_throughput": "output tokens/s",
    "mean_running": "running, mean",
    "max_queue_length": "waiting, most",
    "prefix_cache_hit_rate": "prefix hit rate",
}


# fmt: off
File = Annotated[Path, argument("FILE", "A trace file, as for `foredraft simulate --trace`.")]
CacheTokens = Annotated[str | None, option("--cache-tokens",
    "Cache sizes, in tokens, whose hit rates to print: 500000, or 65536..4194304:log.", "VALUES")]
Out = Annotated[Path | None, option("--out",
    "Fit a synthetic workload to the trace, and write it to this file.", "FILE")]
Since = Annotated[Path | None, option("--since",
    "Of a Prometheus page: the workload since this earlier page of the same servers.", "FILE")]
Seconds = Annotated[float | None, option("--seconds",
    "Of a Prometheus page: the time that its counts cover, for the rate of requests.", min=1e-3)]
Check = Annotated[bool, option("--check", "Simulate the trace and the synthetic workload, and compare the results.")]
# fmt: on


def trace(
    file: File, scenario: ScenarioFile = None, settings: Settings = None, columns: Columns = None,
    cache_tokens: CacheTokens = None, out: Out = None,
    check: Check = False, since: Since = None, seconds: Seconds = None, as_json: AsJson = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Describe a trace: rates, lengths, burstiness, prefix reuse; fit a synthetic workload to it.

    The hit rates count prompts only. They are given for an infinite cache and for
    the sizes of --cache-tokens. With a SCENARIO (or --set of a key outside the
    workload) they are also given for one cache as large as the KV slots of all
    its engines. Settings such as --set workload.start_s=600 take a part of the
    trace.

        foredraft trace requests.csv
        foredraft trace requests.jsonl --cache-tokens 500000,5000000
        foredraft trace requests.jsonl chat.toml
        foredraft trace day.csv --columns arrival=when,prompt=asked,output=made
        foredraft trace requests.csv --out workload.toml --check
        foredraft simulate workload.toml --set workload.rate=20

    --out writes the table `workload` of a scenario: rates over time, burstiness,
    lengths, shared prefixes. The report shows how close each of them is to the
    trace. --check shows how much the difference changes a simulation's results.

    FILE is a trace, a log of vLLM or SGLang with its requests, OpenTelemetry
    spans, or a Prometheus page of these servers (docs/traces.md):

        foredraft trace later.prom --since earlier.prom --seconds 600 \\
            --out workload.toml
    """
    from ...core.errors import ConfigError
    from ...planning.grid import parse_values
    from ...sim.workload.prometheus import is_page

    sizes = parse_values("--cache-tokens", cache_tokens, int, 1) if cache_tokens is not None else []
    if out is not None and out.exists() and file.exists() and out.samefile(file):
        raise ConfigError.of("--out", "", f"{out} is the trace itself, which would be replaced: name another file")
    if is_page(str(file)):  # a file that cannot be read is refused
        from .metrics_page import describe_page

        for_requests = {
            "SCENARIO": scenario,
            "--set": settings,
            "--columns": columns,
            "--cache-tokens": cache_tokens,
            "--check": check,
        }
        describe_page(file, since, seconds, out, as_json, for_requests)
        return
    refuse_without_effect(
        ("--since", since is not None, "only pages of metrics count from an earlier one on"),
        ("--seconds", seconds is not None, "a trace has the times of its requests"),
    )
    given = [*(settings or ()), *given_by_options(file, None, columns)]
    _describe_requests(file, scenario, given, sizes, out, check, as_json, quiet)


def _describe_requests(
    file: Path,
    scenario: Path | None,
    settings: Sequence[str],
    sizes: list[int],
    out: Path | None,
    check: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Describe a file of requests, which the settings name, with caches of these sizes. With `out` or `check` fit a
    synthetic workload to it."""
    from ...observe.output_files import write_text
    from ...sim.calibration.synthesis import synthesize
    from ...sim.load import make_workload
    from ...sim.scenario.scenario_text import workload_text
    from ...sim.scenario_file import load_scenario
    from ...sim.workload.description import describe
    from ...sim.workload.traces import TraceSource

    resolved, origins = load_scenario(scenario, settings)
    slots = None
    if scenario is not None or any(not key.startswith("workload.") for key in origins):
        slots = _kv_slots(resolved)
        sizes.append(slots)
    source = make_workload(resolved, 0)
    assert isinstance(source, TraceSource)
    whole = source.scan()
    described, columns = describe(source, tuple(dict.fromkeys(sizes)))
    skipped = whole.num_rows - whole.num_requests
    made = synthesize(source, described, columns) if out is not None or check else None
    lines = [*_heading(file, whole, described, skipped), *_arrivals(described.arrivals), *_lengths(described)]
    lines += [*_reuse(described, slots), *_unknown(described)]
    if made is not None:
        lines += ["", *_compared(described, made)]
    if made is not None and out is not None:
        write_text(out, workload_text(made.table, file.name, made.losses), replace=True)
        lines += ["", f"Written to {out}."]
    if not as_json:
        typer.echo("\n".join(lines))
    checked = _check(resolved, made, quiet) if made is not None and check else None
    if as_json:
        print_document(_document(file, whole, skipped, described, made, checked))
    elif checked is not None:
        typer.echo("\n".join(_checked(resolved, checked)))


def _document(
    file: Path,
    whole: TraceSummary,
    skipped: int,
    described: Description,
    made: Synthesis | None,
    checked: Mapping[str, Mapping[str, Any]] | None,
) -> TraceDocument:
    from ...observe.rates import rates_of
    from ..documents.simulation import TraceDocument

    results = None
    if checked is not None:
        shown = {key: rates_of(key, *checked.values()) for key in CHECKED}
        results = {name: {key: both[place] for key, both in shown.items()} for place, name in enumerate(checked)}
    synthetic = None if made is None else made.to_json()
    untold = list(_untold(described))
    return TraceDocument(
        str(file), whole.format, list(whole.notes), skipped, untold, described.to_json(), synthetic, results
    )


def _kv_slots(scenario: Scenario) -> int:
    from ...sim.assembly import assemble

    run = assemble(scenario)
    return run.spec.config.num_pages * run.spec.config.page_size * run.pools.num_engines


# -- what the trace is like -------------------------------------------------------------------------------------------


def _heading(file: Path, whole: TraceSummary, described: Description, skipped: int) -> list[str]:
    found = described.arrivals
    rate = "" if found.rate is None else f", {found.rate:.3g} per second"
    text = (
        f"{file.name} ({whole.format}): {count_of(described.num_requests, 'request')} over {_clock(found.span_s)}{rate}"
    )
    if described.sessions is not None:
        text += f", {count_of(described.sessions, 'session')}"
    if skipped:
        text += f"; left out are {count_of(skipped, 'row')} without prompt or output"
    lines = textwrap.wrap(text, WIDTH)
    for note in whole.notes:
        lines += textwrap.wrap(f"Inferred: {note}.", WIDTH, subsequent_indent="  ")
    return [*lines, ""]


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{seconds:02} minutes"
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02} hours"


def _arrivals(found: ArrivalDescription) -> list[str]:
    from ...observe.tables import sparkline

    if found.rate is None:
        return ["All requests come at the same time.", ""]
    lines = [f"Requests/s over time, means of {found.bucket_s:.3g} s"]
    lines += [f"  {sparkline(found.rates, 60)}  {min(found.rates):.3g} to {max(found.rates):.3g}", ""]
    windows = list(found.peaks)
    lines.append(f"{'Arrivals in windows of':34}" + "".join(f"{f'{w:g} s':>9}" for w in windows))
    lines.append(f"{'  variance / mean':34}" + "".join(f"{_number(found.dispersion.get(w)):>9}" for w in windows))
    lines.append(f"{'  requests/s, the greatest':34}" + "".join(f"{_number(found.peaks[w]):>9}" for w in windows))
    if found.tick_s is None:
        lines.append(f"{'  gaps: standard deviation / mean':34}{found.gap_cv:>9.3g}")
    return [*lines, "  (1 is Poisson; more is burstier, also where the rate changes over time)", ""]


def _lengths(described: Description) -> list[str]:
    names = ["mean", "least", *(f"p{p:g}" for p in SHOWN_PERCENTILES), "greatest"]
    lines = [f"{'Tokens':10}" + "".join(f"{name:>10}" for name in names)]
    for name, lengths in (("  prompt", described.prompt), ("  output", described.output)):
        cells = [lengths.mean, lengths.least, *(lengths.percentiles[p] for p in SHOWN_PERCENTILES), lengths.greatest]
        lines.append(f"{name:10}" + "".join(f"{cell:>10,.0f}" for cell in cells))
    if described.length_correlation is not None:
        lines.append(f"  correlation of a request's prompt and output (ranks): {described.length_correlation:+.2f}")
    return [*lines, ""]


def _reuse(described: Description, slots: int | None) -> list[str]:
    found = described.reuse
    if found is None:
        return []
    lines = [f"{'Prefix reuse, by the cache':34}{'tokens':>16}{'hit rate':>10}"]
    lines.append(f"{'  infinite':34}{found.distinct_tokens:>16,}{found.infinite:>10.1%}")
    for size, rate in found.caches.items():
        name = "  KV slots of the scenario" if size == slots else "  least recently used goes first"
        lines.append(f"{name:34}{size:>16,}{rate:>10.1%}")
    return [*lines, f"  {found.requests:.1%} of the requests find something in the infinite cache", ""]


def _unknown(described: Description) -> list[str]:
    return [
        line
        for text in _untold(described)
        for line in textwrap.wrap(f"The trace does not tell {text}.", WIDTH, subsequent_indent="  ")
    ]


def _untold(described: Description) -> Iterator[str]:
    """Yield what the trace says nothing about, as the objects of a sentence."""
    if described.reuse is None:
        yield "what the prompts contain (it has no block hashes), so nothing about prefix reuse"
    else:
        yield "what the outputs contain: the hit rates count prompts alone, as if outputs were not kept"
    if described.arrivals.tick_s is not None:
        yield f"gaps: most requests share their time with others, and these times are {described.arrivals.tick_s:g} s apart"
    if described.sessions is None:
        yield "which requests belong to one conversation"


# -- the synthetic workload -------------------------------------------------------------------------------------------


def _compared(described: Description, made: Synthesis) -> list[str]:
    lines = [f"{'Synthetic workload':34}{'trace':>14}{'synthetic':>14}{'ratio':>8}"]
    other = made.description
    if described.arrivals.rate is not None and other.arrivals.rate is not None:
        lines.append(_row("requests/s", described.arrivals.rate, other.arrivals.rate))
        for window, value in described.arrivals.dispersion.items():
            if window in other.arrivals.dispersion:
                lines.append(_row(f"variance / mean in {window:g} s", value, other.arrivals.dispersion[window]))
    for name, one, two in (("prompt", described.prompt, other.prompt), ("output", described.output, other.output)):
        lines += [_row(f"{name} tokens, {what}", *pair) for what, pair in _length_pairs(one, two)]
    if described.reuse is not None and other.reuse is not None:
        lines.append(_row("hit rate, infinite cache", described.reuse.infinite, other.reuse.infinite))
        for size, rate in described.reuse.caches.items():
            lines.append(_row(f"hit rate, {size:,} tokens", rate, other.reuse.caches[size]))
    distance = " and ".join(f"{value:.1%} ({name})" for name, value in made.distance.items())
    text = f"The distribution functions of lengths differ by at most {distance} (Kolmogorov-Smirnov)."
    lines += ["", *textwrap.wrap(text, WIDTH)]
    for loss in made.losses:
        lines += textwrap.wrap(f"It leaves out {loss}.", WIDTH, subsequent_indent="  ")
    return lines


def _length_pairs(one: Lengths, two: Lengths) -> Iterator[tuple[str, tuple[float, float]]]:
    yield "mean", (one.mean, two.mean)
    for percentile in COMPARED_PERCENTILES:
        yield f"p{percentile}", (one.percentiles[percentile], two.percentiles[percentile])


def _row(name: str, one: float | None, two: float | None) -> str:
    ratio = f"{two / one:.2f}" if one and two is not None else "–"
    return f"  {name:32}{_number(one):>14}{_number(two):>14}{ratio:>8}"


def _number(value: float | None) -> str:
    from ...observe.tables import format_number

    return format_number(float(value) if value is not None else None)


def _check(scenario: Scenario, made: Synthesis, quiet: bool) -> dict[str, Mapping[str, Any]]:
    """Simulate both workloads, and return their summaries."""
    from ...core.errors import ForedraftError
    from ...planning.trial import run_trial
    from ..progress import simulation_progress

    tables = scenario.model_dump(mode="json")
    synthetic = {**tables, "workload": {**made.table, "max_tokens": scenario.workload.max_tokens}}
    found: dict[str, Mapping[str, Any]] = {}
    for name, one in (("trace", tables), ("synthetic", synthetic)):
        with simulation_progress(quiet) as progress:
            trial = run_trial(one, {}, progress)
        if trial.status != "done":
            raise ForedraftError(trial.message)
        found[name] = trial.summary
    return found


def _checked(scenario: Scenario, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the latencies of both workloads side by side."""
    from ...observe.rates import rates_of

    lines = ["", f"{f'Simulated: {_deployment(scenario)}':34}{'trace':>14}{'synthetic':>14}{'ratio':>8}"]
    for key, name in CHECKED.items():
        both = rates_of(key, *found.values())
        if any(value is not None for value in both):
            lines.append(_row(name, *both))
    for name, summary in found.items():
        if summary["overloaded"]:
            lines += textwrap.wrap(f"Overloaded, {name}: {summary['overload']}.", WIDTH)
    return lines


def _deployment(scenario: Scenario) -> str:
    return f"{scenario.model.target}, {scenario.hardware.gpu}"
