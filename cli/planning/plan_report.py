"""The report of `foredraft plan`: its tables and sentences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .plan_day import WIDTH, hours_of

if TYPE_CHECKING:
    from ...planning.answers.answer import PlanAnswer
    from ...planning.answers.bill import Bill
    from ...planning.confidence.ranked import Ranked
    from ...planning.plan import Plan
    from ...planning.search.judge import SearchFinding


MOST_LINES = 15  # of the table without --details


def report_of(whole: Plan, ranked: Sequence[Ranked], answer: PlanAnswer, details: bool = True) -> list[str]:
    """Return the lines of the answer: a sentence and a table, and with `details` what they rest on."""
    both = [(item, one) for item, one in zip(ranked, answer.candidates, strict=True) if not item.dropped]
    shown = [item for item, _ in both]
    lines = textwrap.wrap(answer.sentences[1] if ranked else "No candidate can run.", WIDTH)
    if shown and shown[0].holds:
        if not details:
            return [*lines, "", *_short_table(whole, shown), "", *_short_notes(whole, ranked, answer)]
        lines += ["", *textwrap.wrap(answer.sentences[0], WIDTH)]
        lines += ["", *_table(whole, shown), *_bill_table(whole, shown, [one.bill for _, one in both])]
        lines += _model_table(whole, shown)
        lines += [line for text in (*answer.sentences[2:], answer.timing) for line in textwrap.wrap(text, WIDTH)]
    lines += _left_out(ranked, is_answered=bool(shown and shown[0].holds))
    return [*lines, *_refused(whole), *(hours_of(answer.hours) if answer.hours is not None else [])]


def _left_out(ranked: Sequence[Ranked], *, is_answered: bool) -> list[str]:
    """Return the candidates that were not searched on, and those that hold no load."""
    lines = []
    left = "not searched on (in brackets: of the best load in the first round)"
    for is_equal, why in ((True, f"Equal within the error of comparisons, {left}"), (False, f"Behind, {left}")):
        dropped = [item for item in ranked if item.dropped and item.holds and item.equal == is_equal]
        if dropped:
            names = "; ".join(f"{item.candidate.name} ({item.first_share:.0%})" for item in dropped)
            lines += ["", *textwrap.wrap(f"{why}: {names}.", WIDTH)]
    hopeless = [item.candidate.name for item in ranked if not item.holds]
    if hopeless and is_answered:
        lines += ["", *textwrap.wrap(f"Within the limits at no load: {'; '.join(hopeless)}.", WIDTH)]
    return lines


def _refused(whole: Plan) -> list[str]:
    """Return the candidates that cannot run, by the reason."""
    by_reason: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}  # the first in full of those that differ in the numbers in brackets alone
    for candidate, reason in whole.refused():
        what = reason.partition("(")[0]
        reasons.setdefault(what, reason)
        by_reason.setdefault(what, []).append(candidate.name)
    lines = []
    for what, refused in by_reason.items():
        lines += ["", *textwrap.wrap(f"Cannot run: {'; '.join(refused)}: {reasons[what]}", WIDTH)]
    return lines


def _short_table(whole: Plan, shown: Sequence[Ranked]) -> list[str]:
    """Return the table of the best candidates, with as many as MOST_LINES have room for."""
    from ...planning.answers.answer import tokens_per_s

    is_load = whole.question.load is None
    head = f"{whole.load_unit:>12}{'80 %':>18}{'GPUs':>6}" if is_load else f"{'GPUs':>6}{'80 %':>12}"
    head += f"{'tokens/s':>10}"
    rows = []
    for item in shown:
        if not item.holds:
            rows.append("holds on no number of GPUs that was tried")
            continue
        tokens = f"{tokens_per_s(whole, item):>10,.0f}"
        if is_load:
            load = f"{'≥ ' if item.finding.is_bound else ''}{item.load:.3g}"
            rows.append(f"{load:>12}{_ends(item.load_range):>18}{item.gpus:>6}{tokens}")
        else:
            rows.append(f"{item.gpus:>6}{_ends(item.gpu_range):>12}{tokens}")
    count = len(shown)
    while len(lines := _rows(shown[:count], head, rows[:count])) > MOST_LINES - (count < len(shown)):
        count -= 1
    return [*lines, *([f"    … {len(shown) - count} more"] if count < len(shown) else [])]


def _short_notes(whole: Plan, ranked: Sequence[Ranked], answer: PlanAnswer) -> list[str]:
    """Return what a reader of the short table must know, and where the rest stands."""
    from ...planning.answers.answer import too_few_seeds
    from ...planning.plan import LEAST_ARRIVALS_S

    shown = [item for item in ranked if not item.dropped]
    asked, best, texts = whole.question, answer.candidates[0], []
    if any(item.equal for item in shown[1:]):
        texts.append(
            "= no clear difference from the first." if asked.load is None else "= costs no more than the first."
        )
    texts += whole.about_guesses(item.candidate for item in shown if item.holds)
    texts.append(too_few_seeds(shown))
    if whole.trace_part is not None:
        texts += whole.trace_part.warnings(asked.load)
    if best.run is not None and asked.requests is not None and best.run.submitted > asked.requests:
        texts.append(
            f"A run has {best.run.submitted:,} requests, more than --requests ({asked.requests:,}): it covers at least "
            f"{LEAST_ARRIVALS_S:.0f} s of arrivals, so that a queue that grows is seen."
        )
    if best.bill is not None:
        texts.append(
            f"{best.name}: {best.bill.planned:.3g} for a million output tokens, {best.bill.month:,.0f} a month (--price)."
        )
    left = [(len(ranked) - len(shown), "not searched on"), (sum(not item.holds for item in shown), "hold no load")]
    left.append((len(answer.refused), "cannot run"))
    if counts := [f"{count} {what}" for count, what in left if count]:
        texts.append(f"Other candidates: {', '.join(counts)}.")
    texts.append("--details: limits, 80 % intervals and what they rest on, other candidates, bills.")
    lines = [line for text in filter(None, texts) for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]
    return [*lines, *(hours_of(answer.hours) if answer.hours is not None else [])]


def _table(whole: Plan, shown: Sequence[Ranked]) -> list[str]:
    from ...planning.answers.answer import HELD, tightest_of, tokens_per_s

    greatest = whole.question.load is None
    head = (f"{whole.load_unit:>12}{'half of runs':>16}" if greatest else "") + f"{'GPUs':>6}{'tokens/s':>10}"
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
        rows.append(f"{cells}  {tightest_of(found).name} {found.excess:.0%}")
    explained = f"{HELD} hold the first load, half of them the second. " if greatest else ""
    explained += "tokens/s: output tokens per second of all GPUs of a row, its load times the mean output of a request."
    return [*_rows(shown, head, rows), "", *textwrap.wrap(explained, WIDTH)]


def _bill_table(whole: Plan, shown: Sequence[Ranked], bills: Sequence[Bill | None]) -> list[str]:
    """Return the costs of the candidates whose GPU has a price: at the load that they hold, and at the scenario's."""
    if not any(bills):
        return []
    rows = []
    for bill in bills:
        sides = (None, None) if bill is None else (bill.planned, bill.own)
        cells = ["–" if one is None else f"{one:.3g}" for one in sides]
        cells.append(f"{bill.month:,.0f}" if bill else "–")
        rows.append("".join(f"{cell:>10}" for cell in cells))
    head = "".join(f"{name:>10}" for name in ("at load", "at own", "month"))
    text = (
        f"Price of a million output tokens, by --price: at the load that the row holds, and at the scenario's own "
        f"{whole.own_load:g} {whole.load_unit} on the same GPUs. month: 730 hours."
    )
    return ["", *textwrap.wrap(text, WIDTH), "", *_rows(shown, head, rows)]


def _half(found: SearchFinding) -> str:
    """Return the load that half of the runs hold, with half of its 95 % interval where that is known."""
    if found.interval is None:
        return "–"
    width = found.interval.half_width
    return f"{found.interval.mean:.3g}" + (f" ± {width:.2g}" if math.isfinite(width) else "")


def _model_table(whole: Plan, shown: Sequence[Ranked]) -> list[str]:
    """Return a table of what holds if times are not as simulated, and what it rests on."""
    from ...observe.tables import intervals_rest_on
    from ...planning.answers.answer import tightest_of

    rests = [item.rests_on for item in shown if item.holds]
    if all(item.taken_range is None for item in shown):
        return textwrap.wrap(intervals_rest_on(*rests, are_known=False), WIDTH)
    is_load, rows = whole.question.load is None, []
    for item in shown:
        ends = item.load_range if is_load else item.gpu_range
        cells = f"{_ends(ends):>18}"
        if item.taken_range is not None:
            low, high = item.taken_range
            cells += f"  {tightest_of(item.finding).name} {low:.0%} to {high:.0%}"
        rows.append(cells)
    lines = ["", "If the times of passes and first tokens are not as simulated, 80 % intervals", ""]
    lines += [*_rows(shown, f"{whole.load_unit if is_load else 'GPUs':>18}  tightest", rows), ""]
    return [*lines, *textwrap.wrap(intervals_rest_on(*rests), WIDTH)]


def _ends(ends: Sequence[float | None] | None) -> str:
    """Return an interval of loads or numbers of GPUs in words; an end that is not known is a dash."""
    return "–" if ends is None else " to ".join("–" if end is None else f"{end:.3g}" for end in ends)


def _rows(shown: Sequence[Ranked], head: str, rows: Sequence[str]) -> list[str]:
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
