"""After verify: the accepted path becomes contiguous, in the KV pool and in every per-node output.

    verify batch   root  c₁  c₂  c₃          accepted path root → c₂ → c₃
    KV slots         a    b   c   d          c → b, d → c
    outputs        o₀   o₁  o₂  o₃          o₀ o₂ o₃ ·
    emitted tokens  the target's token after root, after c₂, after c₃ (the bonus token)

The width of everything is `accept_index.shape[1]`, never a configured number of steps or nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..kv.moves import KVMovePlan
from .outputs import NodeOutputs
from .verify import Verified


@dataclass(frozen=True, slots=True)
class Finalized:
    """What a decode round leaves for bs rows."""

    emitted_tokens: np.ndarray  # int32 [bs, width]; the target's tokens in order, bonus last, −1 past the end
    bonus_tokens: np.ndarray  # int32 [bs]; the root of the next tree
    moves: KVMovePlan  # KV of the j-th accepted node to the j-th slot of the row's window
    outputs: NodeOutputs  # stride nd; entry r · nd + j belongs to the j-th accepted node


def finalize(verified: Verified, node_slots: np.ndarray, outputs: NodeOutputs) -> Finalized:
    """Compact one verified batch. `node_slots` int32 [bs, nd] are the slots captured when the step was launched."""
    emitted = emitted_tokens(verified.predict, verified.accept_index)
    return Finalized(
        emitted_tokens=emitted,
        bonus_tokens=gather_last(emitted, verified.accept_lens),
        moves=KVMovePlan.from_accept_index(verified.accept_index, verified.accept_lens, node_slots),
        outputs=outputs.compact(verified.accept_index, node_slots.shape[1]),
    )


def emitted_tokens(predict: np.ndarray, accept_index: np.ndarray) -> np.ndarray:
    """Return the target's token after each accepted node, int32 [bs, width], −1 past the end."""
    if not accept_index.size:
        return np.zeros(accept_index.shape, np.int32)
    return np.where(accept_index >= 0, predict[np.maximum(accept_index, 0)], -1).astype(np.int32)


def gather_last(emitted: np.ndarray, accept_lens: np.ndarray) -> np.ndarray:
    """Return the last emitted token of each row, int32 [bs]: a flat gather whose stride is the width of what is read.

    A row whose target failed has −1 there; the next round gets the valid id 0 instead of a placeholder (RELAY-05).
    """
    batch_size, width = emitted.shape
    last = emitted.reshape(-1)[np.arange(batch_size) * width + accept_lens - 1]
    return np.maximum(last, 0)
