"""The steps of the executor's trial: rules by which rows verify unequal numbers of nodes, and steps in words."""

from __future__ import annotations

import numpy as np

from ...core.contract.arrays import Int32Array, Int64Array
from ...core.contract.step import DraftBudget, RoundShape, Step


def nodes_in_turn(drafts: tuple[int, ...], shape: RoundShape, left: Int64Array) -> Int32Array | None:
    """Return the nodes of rows that verify so many drafts each, in turn; None for trees, and for all drafts."""
    nodes = np.array([1 + drafts[row % len(drafts)] for row in range(len(left))]).clip(1, shape.nodes)
    return None if shape.topk > 1 or nodes.min() == shape.nodes else nodes.astype(np.int32)


def budget_of(drafts: int, slope: float, shape: RoundShape) -> DraftBudget | None:
    """Return a budget of so many drafts for chains; None for trees, and where nothing is drafted."""
    if shape.topk != 1 or not shape.steps:
        return None
    return DraftBudget(drafts, slope, tuple(-0.2 - 0.05 * position for position in range(shape.steps)))


def words_of(step: Step) -> str:
    """Say how many tokens and rows a step has."""
    parts = []
    if step.prefill is not None:
        parts.append(f"{int(step.prefill.lens.sum())} prompt tokens")
    if step.decode is not None:
        d = step.decode
        rounds = f", at most {d.max_rounds} rounds" if d.max_rounds > 1 else ""
        nodes = d.shape.nodes if d.row_nodes is None else d.row_nodes.tolist()
        chosen = "" if d.budget is None else f" at most, {d.budget.drafts} drafts in all"
        parts.append(f"{len(d.rows)} rows of {nodes} nodes{chosen}{rounds}")
    return " and ".join(parts)
