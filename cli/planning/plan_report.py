"""The report of `foredraft plan`: its tables and sentences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...core.errors import count_of

if TYPE_CHECKING:
    from ...planning.confidence.ranked import Ranked
    from ...planning.plan import Plan
    from ...planning.search.judge import Finding
    from ...planning.slo import Objective

WIDTH = 80
HELD = "95 % of runs"


def report_of(
    whole: Plan, ranked: list[Ranked], prices: Mapping[str, float], watts: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Return the lines of the answer, and the sentences in it that concern the best."""
    sentences = [_question(whole)]
    lines = textwrap.wrap(sentences[0], WIDTH)
    shown = [item for item in ranked if not item.dropped]
    if shown and shown[0].holds:
        remarks = _remarks(whole, shown)
        sentences += [_best(whole, shown[0]), *remarks[:-1]]
        lines += ["", *_table(whole, shown), *_bill_table(whole, shown, prices), *_energy(whole, shown[0], watts)]
        lines += _model_table(whole, shown)
        lines += [line for text in remarks for line in textwrap.wrap(text, WIDTH)]
    elif ranked:
        sentences.append(_nothing_holds(whole, min(ranked, key=lambda item: item.finding.excess)))
        lines += ["", *textwrap.wrap(sentences[-1], WIDTH)]
    left = "not searched on (in brackets: of the best load in the first round)"
    for is_equal, why in ((True, f"Equal within the error of comparisons, {left}"), (False, f"Behind, {left}")):
        dropped = [item for item in ranked if item.dropped and item.holds and item.equal == is_equal]
        if dropped:
            names = "; ".join(f"{item.candidate.name} ({item.first_share:.0%})" for item in dropped)
            lines += ["", *textwrap.wrap(f"{why}: {names}.", WIDTH)]
    hopeless = [item.candidate.name for item in ranked if not item.holds]
    if hopeless and shown and shown[0].holds:
        lines += ["", *textwrap.wrap(f"Within the limits at no load: {'; '.join(hopeless)}.", WIDTH)]
    by_reason: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}  # the first in full of those that differ in the numbers in brackets alone
    for candidate, reason in whole.refused():
        what = reason.partition("(")[0]
        reasons.setdefault(what, reason)
        by_reason.setdefault(what, []).append(candidate.name)
    for what, refused in by_reason.items():
        lines += ["", *textwrap.wrap(f"Cannot run: {'; '.join(refused)}: {reasons[what]}", WIDTH)]
    return lines, sentences


def _question(whole: Plan) -> str:
    """Return what was asked: of which runs, within which limits."""
    asked, trace = whole.question, whole.scenario.workload.trace
    limits = ", ".join(map(str, asked.objectives))
    if asked.load is None:
        on = count_of(asked.gpus, "GPU") if asked.gpus else "the GPUs of one engine"
        what = f"greatest {'load' if trace else 'rate'} on {on} that {HELD} hold"
    else:
        what = f"least GPUs for {asked.load:g} {'× the trace' if trace else 'requests/s'} that {HELD} hold"
    return f"{whole.scenario.name}: {what} within {limits}"


def _best(whole: Plan, best: Ranked) -> str:
    from ...planning.answer import tokens_per_s

    unit = "times the trace" if whole.scenario.workload.trace is not None else "requests/s"
    gpus = count_of(best.gpus, "GPU")
    return (
        f"{best.candidate.name} holds {best.load:.3g} {unit} on {gpus} in {HELD}, "
        f"{tokens_per_s(whole, best):,.0f} output tokens/s."
    )


def _length_of_runs(whole: Plan, best: Ranked) -> str:
    """Say how long a run is, and how the stated load was found."""
    from ...planning.confidence.bounds import CONFIDENCE, SHARE

    summary = best.finding.summary
    text = f"A run has {summary['submitted']:,} requests in {summary['duration']:.0f} s."
    if whole.trace_part is not None:
        text = f"{text} {whole.trace_part.of_a_run()}"
    seeds = len(best.finding.crossings)
    if seeds > 1:
        text += (
            f" The load is a tolerance bound over {seeds} seeds: with {CONFIDENCE:.0%} confidence {SHARE:.0%} of runs "
            "of this length hold it. A longer run meets more bursts."
        )
    return text


def _nothing_holds(whole: Plan, nearest: Ranked) -> str:
    from ...planning.slo import TAKEN

    found, gpus = nearest.finding, whole.question.gpus
    needed = {index: whole.needed(index) for index in whole.rough} if whole.question.load is not None else {}
    least = min((index for index in needed if needed[index]), key=lambda index: needed[index], default=None)
    if least is not None:
        there = f"the {count_of(gpus, 'GPU')}" if gpus else "the engines that are tried"
        return f"Nothing holds on {there}. {whole.candidates[least].name} needs the least: about {count_of(needed[least], 'GPU')}."
    devices = f" on {count_of(gpus, 'GPU')}" if gpus else ""
    if refused := found.summary.get("refused"):
        count = f"{refused:,} of {count_of(found.summary['submitted'], 'request')}"
        return f"Nothing holds{devices}: at any load the engines refuse {count}. `foredraft simulate` says for which reason."
    at = found.summary.get("request_throughput")
    tightest = _tightest(found)
    if found.excess == float("inf"):
        within = "it is an overloaded run"
    elif tightest.key == TAKEN:
        within = f"all limits would have to be {found.excess:.3g} times as long for {tightest}"
    else:
        value = found.excess * tightest.limit_ms
        within = f"{tightest.name} is {value:.3g} ms, {found.excess:.3g} times the limit of {tightest.limit_ms:g} ms"
    return f"Nothing holds{devices}. Nearest is {nearest.candidate.name}: at {at:.3g} requests/s {within}."


def _tightest(found: Finding) -> Objective:
    """Return the objective that takes the most of its limit, of a candidate that could be searched."""
    assert found.tightest is not None
    return found.tightest


def _table(whole: Plan, shown: list[Ranked]) -> list[str]:
    from ...planning.answer import load_unit, tokens_per_s

    greatest = whole.question.load is None
    head = (f"{load_unit(whole):>12}{'half of runs':>16}" if greatest else "") + f"{'GPUs':>6}{'tokens/s':>10}"
    head += "  tightest"
    rows = []
    for item in shown:
        found = item.finding
        if not item.holds:
            rows.append("holds on no number of GPUs that was tried")
            continue
        cells = ""
        if greatest:
            cells += f"{('≥ ' if found.is_bound else '') + f'{item.load:.3g}':>12}{_half(found):>16}"
        tokens = tokens_per_s(whole, item)
        cells += f"{item.gpus:>6}{tokens:>10,.0f}"
        rows.append(f"{cells}  {_tightest(found).name} {found.excess:.0%}")
    explained = f"{HELD} hold the first load, half of them the second. " if greatest else ""
    explained += "tokens/s: output tokens per second of all GPUs of a row, its load times the mean output of a request."
    return [*_rows(shown, head, rows), "", *textwrap.wrap(explained, WIDTH)]


def _bill_table(whole: Plan, shown: list[Ranked], prices: Mapping[str, float]) -> list[str]:
    """Return the costs of the candidates whose GPU has a price: at the load that they hold, and at the scenario's."""
    from ...planning.answer import load_unit
    from ...planning.demand.bill import Bill

    bills = []
    for item in shown:
        price = prices.get(whole.gpu_of(item.candidate))
        bills.append(Bill.of(whole, item, price) if item.holds and price is not None else None)
    if not any(bills):
        return []
    rows = []
    for bill in bills:
        sides = (None, None) if bill is None else (bill.planned, bill.own)
        cells = [f"{one.output:>8.3g}{one.input:>7.3g}{one.all:>7.3g}" if one else f"{'–':>8}{'':14}" for one in sides]
        rows.append("".join(cells) + (f"{bill.month:>9,.0f}" if bill else f"{'–':>9}"))
    head = 2 * f"{'output':>8}{'input':>7}{'all':>7}" + f"{'month':>9}"
    text = (
        f"Price of a million tokens, by --price. Left at the load that the row holds, right at the scenario's own "
        f"{whole.own_load:g} {load_unit(whole)} on the same GPUs. output, input, all: the whole price, borne by these "
        "tokens alone. month: 730 hours."
    )
    return ["", *textwrap.wrap(text, WIDTH), "", *_rows(shown, head, rows)]


def _energy(whole: Plan, best: Ranked, watts: Mapping[str, float]) -> list[str]:
    from ...planning.demand.bill import energy

    found = energy(whole, best, watts)
    if found is None:
        return []
    text = (
        f"{best.candidate.name} takes {found['kwh_per_million']:.3g} kWh per million output tokens and "
        f"{found['kwh_per_month']:,.0f} kWh a month, with {found['watts_per_gpu']:g} W a GPU (--power)."
    )
    return ["", *textwrap.wrap(text, WIDTH)]


def _half(found: Finding) -> str:
    """Return the load that half of the runs hold, with half of its 95 % interval where that is known."""
    if found.interval is None:
        return "–"
    width = found.interval.half_width
    return f"{found.interval.mean:.3g}" + (f" ± {width:.2g}" if math.isfinite(width) else "")


def _model_table(whole: Plan, shown: list[Ranked]) -> list[str]:
    """Return a table of what holds if times are not as simulated, and what it rests on."""
    from ...observe.tables import intervals_rest_on, outside_of_intervals
    from ...planning.answer import load_unit

    rests = [item.rests_on for item in shown if item.holds]
    if all(item.taken_range is None for item in shown):
        return textwrap.wrap(intervals_rest_on(*rests, are_known=False), WIDTH)
    is_load, rows = whole.question.load is None, []
    numbers: dict[str, tuple[float, Sequence[float]]] = {}
    for place, item in enumerate(shown, 1):
        ends = item.load_range if is_load else item.gpu_range
        cells = f"{_ends(ends):>18}"
        if ends is not None:
            low, high = ends
            span = (-math.inf if low is None else low, math.inf if high is None else high)
            numbers[f"{'requests/s' if is_load else 'GPUs'} of row {place}"] = (
                item.load if is_load else item.gpus,
                span,
            )
        if item.taken_range is not None:
            low, high = item.taken_range
            cells += f"  {_tightest(item.finding).name} {low:.0%} to {high:.0%}"
        rows.append(cells)
    lines = ["", "If the times of passes and first tokens are not as simulated, 80 % intervals", ""]
    lines += [*_rows(shown, f"{load_unit(whole) if is_load else 'GPUs':>18}  tightest", rows), ""]
    texts = (intervals_rest_on(*rests), outside_of_intervals(numbers))
    return lines + [line for text in texts for line in textwrap.wrap(text, WIDTH)]


def _ends(ends: Sequence[float | None] | None) -> str:
    """Return an interval of loads or numbers of GPUs in words; an end that is not known is a dash."""
    return "–" if ends is None else " to ".join("–" if end is None else f"{end:.3g}" for end in ends)


def _rows(shown: list[Ranked], head: str, rows: Sequence[str]) -> list[str]:
    """Return a table with a row for each candidate: its mark, its name, its cells. Names are wrapped where the table
    would be wider than 80 columns."""
    widest = max(map(len, (head, *rows)))
    width = min(max(len(item.candidate.name) for item in shown) + 2, max(WIDTH - 4 - widest, 16))
    lines = [f"{'':4}{'':{width}}{head}"]
    for place, (item, cells) in enumerate(zip(shown, rows, strict=True), 1):
        mark = "=" if item.equal and place > 1 else str(place)
        first, *more = textwrap.wrap(item.candidate.name, width - 1, break_on_hyphens=False)
        lines += [f"{mark:>3} {first:{width}}{cells}", *(f"{'':6}{line}" for line in more)]
    return lines


def _remarks(whole: Plan, shown: list[Ranked]) -> list[str]:
    """Return what limits the best candidate, what the marks mean, what the runs took of a trace, and at the end whose
    timing it is."""
    from ...planning.answer import limit_of
    from ...planning.confidence.comparison import source_of_comparisons

    limited, timing = limit_of(whole, shown[0])
    texts = [limited]
    if any(item.equal for item in shown[1:]) and whole.question.load is not None:
        texts.append(
            "= serves the load at no more cost than the first; the one that takes less of the limits stands first."
        )
    elif any(item.equal for item in shown[1:]):
        source = source_of_comparisons(whole.question.model_error)
        texts.append(
            f"= cannot be told from the first, compared seed by seed, with a cost model that may be wrong about the ratio "
            f"of two candidates, but not about what they share (80 % intervals; {source})."
        )
    texts.append(_length_of_runs(whole, shown[0]))
    if whole.trace_part is not None:
        texts += whole.trace_part.warnings(whole.question.load)
    return [*texts, timing]
