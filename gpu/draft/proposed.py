"""Drafts from the host, such as NGRAM's: what an algorithm proposes after each row's prompt and output, as trees on the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm.host_drafts import HostDrafts
from ...core.tree.build import build_proposed_tree
from ..batch.chunks import Chunks
from ..batch.tree import DeviceTree
from ..batch.uploads import uploads_to
from ..ops.port import Ops
from .port import Accepted, Draft, Relayed, RoundBatch, root_only


class ProposedDraft(Draft):
    """Works on the host, so a round begins when the tokens of the one before it are known there."""

    on_host = True

    def __init__(self, ops: Ops, drafts: HostDrafts) -> None:
        self._ops = ops
        self._drafts = drafts

    def open_row(self, row: int, cached: np.ndarray) -> None:
        self._drafts.open_row(row)
        self._drafts.observe(row, cached)

    def observe(self, row: int, tokens: np.ndarray) -> None:
        self._drafts.observe(row, tokens)

    def prefill(self, chunks: Chunks, captured: Tensor | None, sampled: Tensor) -> Relayed:
        if not len(chunks.last):
            return {}
        return _on_device(self._drafts.first_relay(chunks.part.rows[chunks.last]), sampled.device)

    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        if batch.proposed is not None:
            return _device_tree(batch, batch.proposed)
        if batch.num_draft_tokens == 1 and not self._drafts.own_fields:
            return root_only(self._ops, batch)
        own = {f.name: relayed[f.name].cpu().numpy() for f in self._drafts.own_fields}
        proposal = self._drafts.propose(batch.row_numbers, batch.steps, batch.topk, batch.num_draft_tokens, own)
        columns = _columns_of(self._drafts.roots(batch.row_numbers), proposal.tokens, proposal.parents)
        device = batch.rows.device
        return _device_tree(batch, _on_device(columns, device), _on_device(proposal.next_relay, device))

    @property
    def is_captured(self) -> bool:
        # Own fields are read on the host, where a captured round leaves nothing.
        return not self._drafts.own_fields

    def propose_on_host(
        self, rows: np.ndarray, steps: int, topk: int, num_draft_tokens: int, size: int
    ) -> dict[str, np.ndarray]:
        if num_draft_tokens == 1:
            return {}
        padding = size - len(rows)
        tokens, parents = (np.full((padding, num_draft_tokens - 1), fill, np.int64) for fill in (0, -1))
        roots = np.zeros(padding, np.int64)
        if len(rows):
            proposal = self._drafts.propose(rows, steps, topk, num_draft_tokens, {})
            roots = np.concatenate([self._drafts.roots(rows), roots])
            tokens, parents = (
                np.concatenate(both) for both in ((proposal.tokens, tokens), (proposal.parents, parents))
            )
        return _columns_of(roots, tokens, parents)

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        return dict(accepted.next_relay)


def _columns_of(roots: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> dict[str, np.ndarray]:
    """Return the fields of proposed trees [bs, nd] that the host knows: depths in place of positions, which follow from the lengths."""
    unknown = np.zeros(len(roots), np.int64)
    tree = build_proposed_tree(roots, tokens, parents, unknown)
    return {
        "tokens": tree.tokens.reshape(tree.parents.shape).astype(np.int64),
        "parents": tree.parents,
        "depths": tree.positions.reshape(tree.parents.shape),
        "next_token": tree.retrieve_next_token,
        "next_sibling": tree.retrieve_next_sibling,
        "ancestor_bits": tree.ancestor_bits.view(np.int64),
    }


def _device_tree(
    batch: RoundBatch, columns: Mapping[str, Tensor], next_relay: Mapping[str, Tensor] | None = None
) -> DeviceTree:
    positions = (batch.lengths[:, None] + columns["depths"]).clamp(max=batch.max_position)
    # Any depth below nd is possible in a proposed tree.
    return DeviceTree(positions=positions, width=positions.shape[1], next_relay=next_relay or {}, **columns)


def _on_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> Relayed:
    return dict(zip(arrays, uploads_to(device).send(*arrays.values()), strict=True))
