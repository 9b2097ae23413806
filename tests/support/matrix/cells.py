"""The cells of the matrix: one choice in every dimension each.

`pairwise_cells` covers every legal pair of choices with few cells, `random_cells` draws any number.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from hostile_driver import Dice

CHAINS_ALONE = ("P_EAGLE", "PARD", "DFLASH", "DFLASH2", "DSPARK")
"""Algorithms of one pass of a network, which draft no trees."""


def _dimension(*values: Any, usual: Any = MISSING) -> Any:
    """Declare a dimension by its choices; `usual` is what a cell has that does not say, if not the first one."""
    return field(default=values[0] if usual is MISSING else usual, metadata={"choices": values})


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """One configuration. Every field is one dimension of the matrix;
    `seed` chooses the workload and the disturbances."""

    algorithm: str = _dimension(
        *("NONE", "STANDALONE", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "NGRAM", "SUFFIX", "PLUGIN"),
        *CHAINS_ALONE,
    )
    mode: str = _dimension("synchronous", "overlap")
    page_size: int = _dimension(1, 2, 4, 16)
    topk: int = _dimension(1, 2, 4, 8, 16)
    steps: int = _dimension(0, 1, 2, 3, 4, 5, 6, 7)
    policy: str = _dimension("fixed", "ema", "goodput", "ranges")
    chunk_size: int = _dimension(3, 8, 64, usual=64)
    mixed: bool = _dimension(True, False)
    multi_step_rounds: int = _dimension(1, 3, 8, 32)
    pool: str = _dimension("roomy", "tight", "tiny")
    disturbance: str = _dimension("none", "abort", "retract", "all")
    prefixes: str = _dimension("none", "shared", "namespaces")
    cache: bool = _dimension(True, False)
    priorities: str = _dimension("none", "classes", "preempt")
    stops: str = _dimension("none", "tokens", "strings")
    outputs: bool = _dimension(False, True)
    agreement: float = _dimension(0.0, 0.7, 1.0, usual=0.7)
    drafts: str = _dimension("model", "simulated")
    arrivals: str = _dimension("at once", "spread")
    token_budget: bool = _dimension(False, True)
    faults: str = _dimension("none", "target", "slow host")
    verify: str = _dimension("all", "remaining")
    seed: int = 0

    def reproducer(self) -> str:
        """Return one line that runs this cell again."""
        return f"python tests/support/matrix/serving_matrix.py --cell '{json.dumps(asdict(self))}'"


DIMENSIONS: dict[str, tuple] = {
    field.name: field.metadata["choices"] for field in fields(MatrixCell) if "choices" in field.metadata
}


PLAIN = {"topk": 1, "steps": 0, "policy": "fixed", "drafts": "model", "agreement": 0.7}
"""What plain decoding has where others draft."""


def is_legal(cell: MatrixCell) -> bool:
    """Return whether a cell describes something: plain decoding, which drafts nothing, is one cell of the
    drafting dimensions."""
    if cell.algorithm == "NONE":
        return all(getattr(cell, name) == value for name, value in PLAIN.items())
    if cell.algorithm in ("SUFFIX", *CHAINS_ALONE) and cell.topk > 1:
        return False
    if cell.steps == 0 and (cell.policy != "fixed" or cell.topk > 1):
        return False
    # Without a mixed batch there are no verify tokens to leave room for.
    return cell.mixed or not cell.token_budget


def random_cell(dice: Dice, seed: int, fixed: dict | None = None) -> MatrixCell:
    """Draw a legal cell, with the given choices fixed; a legal one must exist."""
    while True:
        choices = {name: dice.choose(values) for name, values in DIMENSIONS.items()}
        choices |= fixed or {}
        if choices["algorithm"] == "NONE":
            choices |= PLAIN | (fixed or {})
        cell = MatrixCell(**choices, seed=seed)
        if is_legal(cell):
            return cell


def legal_pairs() -> dict[tuple[str, object, str, object], None]:
    """Return every pair of choices in two dimensions that some legal cell has, in a fixed order."""
    pairs = {}
    for first, second in itertools.combinations(DIMENSIONS, 2):
        for a, b in itertools.product(DIMENSIONS[first], DIMENSIONS[second]):
            if _extends({first: a, second: b}):
                pairs[first, a, second, b] = None
    return pairs


def _extends(choices: dict) -> bool:
    """Return whether two choices occur together in a legal cell:
    the rest is either plain decoding or the most permissive one."""
    plain = MatrixCell()
    speculative = MatrixCell(algorithm="EAGLE", steps=3, topk=1)
    return any(is_legal(replace(base, **choices)) for base in (plain, speculative))


def pairs_of(cell: MatrixCell) -> list[tuple[str, object, str, object]]:
    return [(a, getattr(cell, a), b, getattr(cell, b)) for a, b in itertools.combinations(DIMENSIONS, 2)]


def pairwise_cells(seed: int = 0, attempts: int = 24) -> list[MatrixCell]:
    """Return cells that together have every legal pair;
    each is the best of some that have the first pair still missing."""
    missing = legal_pairs()
    dice = Dice(seed)
    cells: list[MatrixCell] = []
    while missing:
        first, a, second, b = next(iter(missing))
        drawn = (random_cell(dice, len(cells), {first: a, second: b}) for _ in range(attempts))
        best = max(drawn, key=lambda cell: sum(pair in missing for pair in pairs_of(cell)))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        cells.append(best)
    return cells


def random_cells(count: int, seed: int, fixed: dict | None = None) -> Iterator[MatrixCell]:
    """Yield `count` random legal cells, with the given choices fixed."""
    dice = Dice(seed)
    for number in range(count):
        yield random_cell(dice, seed * 1_000_000 + number, fixed)
