"""Per-token outputs of the reference executor, as its results carry them."""

from __future__ import annotations

import numpy as np

from ...core.tree.outputs import NodeOutputs

# Per-node outputs that the next round starts from; users do not see them.
DRAFT_HIDDEN = "draft_hidden_states"
NEXT_RELAY = "next_relay."  # and the field's name


def as_columns(outputs: NodeOutputs, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return user outputs [bs, width, …] from compacted node outputs of stride nd; where the width exceeds nd the rest is zeros."""
    bs, width = shape
    columns = {}
    for name in outputs:
        array = outputs[name]
        if name == DRAFT_HIDDEN or name.startswith(NEXT_RELAY) or array is None:
            continue
        nodes = array.shape[0] // bs
        by_row = array.reshape(bs, nodes, *array.shape[1:])
        padded = np.zeros((bs, width, *array.shape[1:]), dtype=array.dtype)
        padded[:, : min(width, nodes)] = by_row[:, :width]
        columns[name] = padded
    return columns


def by_name(outputs: list[dict[str, np.ndarray] | None]) -> dict[str, np.ndarray] | None:
    """Return per-chunk outputs [1, …] joined to [n, …] per name; zeros for chunks that have none of it."""
    found = {name: array for entry in outputs if entry is not None for name, array in entry.items()}
    if not found:
        return None
    return {
        name: np.concatenate([(entry or {}).get(name, np.zeros_like(array)) for entry in outputs])
        for name, array in found.items()
    }
