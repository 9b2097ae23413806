"""The base of drafters, and the batches that they work on.

prefill   the draft's own pass over prompt chunks             → what finished prompts relay to their first round
propose   relayed values → a verify tree                      (S − 1 draft passes; none for look-up)
catch_up  draft KV of every accepted position, one pass       → what this round relays to the next one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..batch.chunks import Chunks
from ..batch.tree import DeviceTree
from ..ops.port import Ops

Relayed = dict[str, Tensor]
"""Relay fields beside the bonus token, [rows, …]."""


@dataclass(frozen=True, slots=True)
class RoundBatch:
    """One decode round of bs rows. `row_numbers` is the host's copy of `rows`; `table` is the device's request table."""

    row_numbers: np.ndarray  # int [bs]
    rows: Tensor  # int64 [bs]
    lengths: Tensor  # int64 [bs]: KV length of target and draft
    roots: Tensor  # int64 [bs]: last emitted tokens, which have no KV yet
    table: Tensor  # int32 [num_rows + 1, row width]
    steps: int
    topk: int
    num_draft_tokens: int
    max_len: int  # host's bound of lengths
    padded_rows: int  # bs of the captured batch that holds these rows, captured or not
    max_nodes: int  # the most nodes, and accepted nodes, of any round that the engine may plan
    max_position: int  # last position of the context
    proposed: Mapping[str, Tensor] | None = None  # what `propose_on_host` gave, in a captured round


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of verification, for the draft's catch-up. The last `emitted` token of a row is its bonus token."""

    emitted: Tensor  # int64 [bs, width], −1 past the end
    accept_lens: Tensor  # int32 [bs]
    captured: Tensor | None  # [bs, nd, C]: target hidden states, entry j belongs to the j-th accepted node
    longest: int  # host's bound of accept_lens
    # [bs, …]: the tree's, of each row's last accepted node
    next_relay: Mapping[str, Tensor] = field(default_factory=dict)


class Draft:
    """A drafter on a device. `aux_layers` and `wants_hidden` say what the target's forward passes capture for it."""

    aux_layers: tuple[int, ...] = ()
    wants_hidden: bool = False
    on_host: bool = False  # proposals need the tokens of earlier rounds on the host, so rounds wait for each other
    is_captured: bool = True  # whether rounds may be; those of a draft on the host from what `propose_on_host` gives

    def open_row(self, row: int, cached: np.ndarray) -> None:
        """Begin a request in `row`; `cached` int64 [n] is the part of its text that is not prefilled again."""

    def observe(self, row: int, tokens: np.ndarray) -> None:
        """Take in tokens int64 [n] that `row` has prefilled or emitted (drafts on the host only)."""

    def prefill(self, chunks: Chunks, captured: Tensor | None, sampled: Tensor) -> Relayed:
        """Run the draft's pass over the chunks; `captured` [t, C] like the target's tokens, `sampled` int64 [m] for the m last chunks."""
        return {}

    def propose_on_host(
        self, rows: np.ndarray, steps: int, topk: int, num_draft_tokens: int, size: int
    ) -> dict[str, np.ndarray]:
        """Return the trees of `rows` and of padding up to `size` rows, as the fields of `DeviceTree` that the host knows, [size, nd]."""
        return {}

    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        raise NotImplementedError

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        """Run the draft over the accepted tokens and return what the next round begins with; `relayed` is what this one began with."""
        return {}


class NoDraft(Draft):
    """Plain decoding: a tree is its root."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        return root_only(self._ops, batch)


def root_only(ops: Ops, batch: RoundBatch) -> DeviceTree:
    """Return the tree of a round without drafts."""
    drafts = torch.empty((len(batch.row_numbers), 0), dtype=torch.int64, device=batch.roots.device)
    return ops.build_chain(batch.roots, drafts, batch.lengths, batch.max_position)


def best_candidate(logits: Tensor) -> Tensor:
    """Return the draft's first choice of logits [m, V], int64 [m, 1]: what `top_candidates` puts first, without its probability."""
    return logits.max(dim=-1, keepdim=True).indices


def top_candidates(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return the draft's `topk` tokens of logits [m, V], best first, and their probabilities: int64 and float32 [m, topk]."""
    if topk == 1:
        best, tokens = logits.max(dim=-1, keepdim=True)
    else:
        best, tokens = logits.topk(topk, dim=-1)
    return tokens, (best - logits.logsumexp(dim=-1, keepdim=True)).exp().float()
