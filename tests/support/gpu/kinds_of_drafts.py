"""Every kind of draft, as options of a session whose target is small."""

from __future__ import annotations

import numpy as np
from foredraft.core.contract.step import RoundShape

ITSELF = "itself, as a tree"
DRAFTS: dict[str, dict] = {
    ITSELF: {"steps": 3, "topk": 2, "num_draft_tokens": 8},
    "itself, as a chain": {"steps": 2},
    "look-up": {"algorithm": "NGRAM", "steps": 3},
    "EAGLE": {"steps": 2, "topk": 2, "num_draft_tokens": 4},
    "EAGLE3": {"steps": 2},
}


def unequal_rows(shape: RoundShape, left: np.ndarray) -> np.ndarray:
    """A rule of `DecodeRounds.row_lengths`: any number of nodes, other ones for each row and in each round."""
    return ((left * 40503 + np.arange(len(left)) * 9973 >> 5) % shape.nodes + 1).astype(np.int32)
