"""The report of `foredraft plan`: its tables and sentences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .plan_day import WIDTH, hours_of

if TYPE_CHECKING:
    from ...planning.answer import PlanAnswer
    from ...planning.confidence.ranked import Ranked
    from ...planning.demand.bill import Bill
    from ...planning.plan import Plan
    from ...planning.search.judge import Finding


def report_of(whole: Plan, ranked: Sequence[Ranked], answer: PlanAnswer) -> list[str]:
    """Return the lines of the answer."""
    lines = textwrap.wrap(answer.sentences[0], WIDTH)
    both = [(item, one) for item, one in zip(ranked, answer.candidates, strict=True) if not item.dropped]
    shown = [item for item, _ in both]
    if shown and shown[0].holds:
        lines += ["", *_table(whole, shown), *_bill_table(whole, shown, [one.bill for _, one in both])]
        lines += _model_table(whole, shown)
        lines += [line for text in (*answer.sentences[2:], answer.timing) for line in textwrap.wrap(text, WIDTH)]
    elif ranked:
        lines += ["", *textwrap.wrap(answer.sentences[1], WIDTH)]
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
    return [*lines, *(hours_of(answer.hours) if answer.hours is not None else [])]


def _table(whole: Plan, shown: Sequence[Ranked]) -> list[str]:
    from ...planning.answer import HELD, tightest_of, tokens_per_s

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


def _half(found: Finding) -> str:
    """Return the load that half of the runs hold, with half of its 95 % interval where that is known."""
    if found.interval is None:
        return "–"
    width = found.interval.half_width
    return f"{found.interval.mean:.3g}" + (f" ± {width:.2g}" if math.isfinite(width) else "")


def _model_table(whole: Plan, shown: Sequence[Ranked]) -> list[str]:
    """Return a table of what holds if times are not as simulated, and what it rests on."""
    from ...observe.tables import intervals_rest_on
    from ...planning.answer import tightest_of

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
