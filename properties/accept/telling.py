"""What happened at a moment, in a line of a report."""

from __future__ import annotations

from collections.abc import Sequence

from .moment import Moment
from .operations import LAUNCHES


def tell(m: Moment) -> str:
    if m.answer is not None and m.round is not None:
        return "-> " + ("; ".join(_row(m, number) for number in m.live()) or "nothing")
    if m.round is not None and isinstance(m.operation, LAUNCHES):
        trees = (
            f"row {row}: tokens {_short(m.round.tokens[number])} below {_short(m.round.parents[number])}"
            for number, row in enumerate(m.round.rows)
        )
        return "-> " + ("; ".join(trees) or "an idle batch")
    return "done"


def _row(m: Moment, number: int) -> str:
    answer, round = m.answer, m.round
    path = answer.paths[number]
    text = f"row {m.row_of(number)}: path {_short(path)}"
    if all(0 <= node < round.nodes for node in path):
        text += f" emits {_short([answer.predict[number * round.nodes + node] for node in path])}"
    if answer.moves is not None:
        window = set(round.batch.windows[number].tolist())
        pairs = [f"{source} to {target}" for source, target in zip(*answer.moves, strict=True) if target in window]
        text += f", moves {', '.join(pairs[:9]) or 'nothing'}"
    return text


def _short(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers[:10]))
    return f"[{text}]" if len(numbers) <= 10 else f"[{text}, … {len(numbers)} in all]"
