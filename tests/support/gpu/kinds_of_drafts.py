"""Every kind of draft, as options of a session whose target is small."""

from __future__ import annotations

ITSELF = "itself, as a tree"
DRAFTS: dict[str, dict] = {
    ITSELF: {"steps": 3, "topk": 2, "num_draft_tokens": 8},
    "itself, as a chain": {"steps": 2},
    "look-up": {"algorithm": "NGRAM", "steps": 3},
    "EAGLE": {"steps": 2, "topk": 2, "num_draft_tokens": 4},
    "EAGLE3": {"steps": 2},
}
