"""Reads the answers of a component that accepts: trees, verdicts and tables. Another form is a misbehaviour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..harness.trial import Trial
from .contract import LaunchBatch
from .model import LaunchedRound, depths_of


def read_round(
    trial: Trial,
    shape: tuple[int, ...],
    batch: LaunchBatch,
    handle: object,
    rows: tuple[int, ...] = (),
    garbage: str = "",
    is_proposed: bool = False,
) -> LaunchedRound:
    """Return a launched round as the component shows it. Raises Violation unless there is a tree per row."""
    num_rows, nodes = batch.windows.shape
    flat = read_flat(trial, trial.must(trial.subject.tree, handle), "tree()", 3, num_rows * nodes)
    tokens, parents, positions = (
        [list(part[at : at + nodes]) for at in range(0, num_rows * nodes, nodes)] for part in flat
    )
    depths = [depths_of(tuple(links)) for links in parents]
    if None in depths:
        row = depths.index(None)
        message = "-1 for the root and for no node, else the number of an earlier node"
        raise trial.misbehaviour("TYPE", f"the parents of row {row} are {parents[row]}", message)
    return LaunchedRound(shape, is_proposed, rows, garbage, batch, handle, nodes, tokens, parents, positions, depths)


def read_links(trial: Trial, answer: object, num_rows: int, nodes: int) -> tuple[tuple[int, ...], ...]:
    """Return the four parts of `links()` of a round (see `contract.py`)."""
    parts = read_flat(trial, answer, "links()", 4)
    sizes = [num_rows * nodes, num_rows * nodes, num_rows * nodes * nodes, num_rows]
    if [len(part) for part in parts] != sizes:
        raise trial.misbehaviour("TYPE", f"links() has {[len(part) for part in parts]} entries", f"{sizes}")
    return tuple(parts)


def read_compacted(trial: Trial, answer: Any, given: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Return compacted outputs by name, those that were given."""
    if not hasattr(answer, "keys") or set(answer.keys()) != set(given):
        raise trial.misbehaviour("TYPE", f"compact() gave {type(answer).__name__}", f"{', '.join(given)}")
    return {name: np.asarray(answer[name]) for name in given}


def read_cells(trial: Trial, answer: object, shape: tuple[int, ...]) -> np.ndarray:
    """Return the cells of KV after a move, int64 of this shape."""
    after = np.asarray(answer)
    if after.shape != shape or after.dtype.kind not in "iu":
        raise trial.misbehaviour("TYPE", f"move() gave {after.dtype} {list(after.shape)}", f"integers {list(shape)}")
    return after.astype(np.int64)


def read_moves(trial: Trial, answer: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the slots that a move reads, and those that it writes."""
    sources, targets = read_flat(trial, answer, "moves()", 2)
    if len(sources) != len(targets):
        raise trial.misbehaviour("TYPE", f"{len(sources)} sources for {len(targets)} targets", "one for each")
    return sources, targets


def read_flat(trial: Trial, answer: Any, what: str, count: int, length: int | None = None) -> list[tuple[int, ...]]:
    """Return an answer of `count` flat sequences of integers, each of the given length, or of any."""
    answer = list(answer) if isinstance(answer, Iterable) else answer
    parts = enumerate(trial.sequence(answer, what, f"{count} sequences of integers", count))
    return [trial.integers(part, f"part {number} of {what}", length) for number, part in parts]


def read_table(trial: Trial, answer: object, what: str, shape: Sequence[int]) -> np.ndarray:
    """Return an answer of numbers of this shape, float64."""
    found = np.asarray(answer)
    if found.shape != tuple(shape) or found.dtype.kind != "f":
        raise trial.misbehaviour("TYPE", f"{what} gave {found.dtype} {list(found.shape)}", f"numbers {list(shape)}")
    return found.astype(np.float64)
