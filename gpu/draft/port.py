"""The base of drafters, and the batches that they work on.

prefill   the draft's own pass over prompt chunks             → what finished prompts relay to their first round
propose   relayed values → a verify tree                      (S − 1 draft passes; none for look-up or one head per
                                                              step)
catch_up  draft KV of every accepted position, one pass       → what this round relays to the next one
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.adaptive.graphs import GraphKey
from ...core.algorithm.host_drafts import HostDrafts
from ...core.contract.future_map import RelayField
from ...core.contract.step import RoundShape
from ...core.draws import Purpose
from ...core.tree.build import MAX_TREE_NODES, build_proposed_tree
from ..batch.pools import Chunks
from ..batch.uploads import uploads_to
from ..kernels.constants import numbers
from ..types.ops import DeviceTree, Ops

Relayed = dict[str, Tensor]
"""Relay fields beside the bonus token, [rows, …]."""


@dataclass(frozen=True, slots=True)
class BudgetInputs:
    """By which the device chooses the nodes of rows (`core.contract.step.DraftBudget`)."""

    drafts: Tensor  # int64 [1]
    weights: Tensor  # float64 [2, steps]: the slope and the bias of each position


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How each of n rows turns logits into tokens; absent where every row is greedy."""

    temperature: Tensor  # float64 [n]
    top_p: Tensor  # float64 [n]
    top_k: Tensor  # int64 [n]
    keys: Tensor  # int64 [n]: the bits of a uint64, of the request's draws
    filtered: bool  # some row has top-p or top-k
    seed: int

    def repeated(self, times: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return temperature, top-p and top-k of every node where each row has `times` nodes."""
        temperature, top_p, top_k = (x.repeat_interleave(times) for x in (self.temperature, self.top_p, self.top_k))
        return temperature, top_p, top_k


@dataclass(frozen=True, slots=True)
class RoundBatch:
    """One decode round of bs rows. `row_numbers` is the host's copy of `rows`;
    `table` is the device's request table."""

    row_numbers: np.ndarray  # int [bs]
    rows: Tensor  # int64 [bs]
    lengths: Tensor  # int64 [bs]: KV length of target and draft
    roots: Tensor  # int64 [bs]: last emitted tokens, which have no KV yet
    table: Tensor  # int32 [num_rows + 1, row width]
    shape: RoundShape
    max_len: int  # host's bound of lengths
    padded_rows: int  # bs of the captured batch that holds these rows, captured or not
    max_nodes: int  # the most nodes, and accepted nodes, of any round that the engine may plan
    max_position: int  # last position of the context
    proposed: Mapping[str, Tensor] | None = None  # what `propose_on_host` gave, in a captured round
    # int64 [bs]: nodes that each row verifies, with a budget at most; 0 in padding rows; None: all nodes
    row_nodes: Tensor | None = None
    budget: BudgetInputs | None = None
    num_tokens: int = 0  # of the target's pass where rows have `row_nodes`; as many or more
    sampling: SamplingInputs | None = None


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """What all rounds of one executor have in common, so that a captured round holds for every length."""

    table: Tensor  # the device's request table
    max_len: int  # the greatest length at which a round begins
    max_nodes: int
    max_position: int

    def batch(
        self, row_numbers: np.ndarray, rows: Tensor, lengths: Tensor, roots: Tensor, shape: RoundShape
    ) -> RoundBatch:
        """Return the batch of a round whose padded size is its number of rows."""
        return RoundBatch(
            row_numbers=row_numbers,
            rows=rows,
            lengths=lengths,
            roots=roots,
            table=self.table,
            shape=shape.computed,
            max_len=self.max_len,
            padded_rows=len(row_numbers),
            max_nodes=self.max_nodes,
            max_position=self.max_position,
        )

    def padding(self, key: GraphKey) -> RoundBatch:
        """Return a batch of padding rows: row 0, of length 0."""
        zeros = torch.zeros(key.batch_size, dtype=torch.int64, device=self.table.device)
        batch = self.batch(np.zeros(key.batch_size, np.int64), zeros, zeros, zeros, key.shape)
        return replace(batch, num_tokens=key.num_tokens or 0)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of verification, for the draft's catch-up. The last `emitted` token of a row is its bonus token."""

    emitted: Tensor  # int64 [bs, width], −1 past the end
    accept_lens: Tensor  # int32 [bs]
    captured: Tensor | None  # [bs, nd, C]: target hidden states, entry j belongs to the j-th accepted node
    longest: int  # host's bound of accept_lens
    # [bs, …]: the tree's, of each row's last accepted node
    next_relay: Mapping[str, Tensor] = field(default_factory=dict)


class Draft(ABC):
    """A drafter on a device. `aux_layers` and `wants_hidden` say what the target's forward passes capture for it."""

    aux_layers: tuple[int, ...] = ()
    wants_hidden: bool = False
    on_host: bool = False  # proposals need the tokens of earlier rounds on the host, so rounds wait for each other
    has_branches: bool = False  # trees may have several branches where the round's shape has one

    @property
    def is_captured(self) -> bool:
        """Whether rounds may be; those of a draft on the host from what `propose_on_host` gives."""
        return True

    def open_row(self, row: int, cached: np.ndarray) -> None:  # noqa: B027 - most drafts keep nothing per row
        """Begin a request in `row`; `cached` int64 [n] is the part of its text that is not prefilled again."""

    def observe(self, row: int, tokens: np.ndarray) -> None:  # noqa: B027
        """Take in tokens int64 [n] that `row` has prefilled or emitted (drafts on the host only)."""

    def close_rows(self, rows: Sequence[int] | None) -> None:  # noqa: B027
        """Complete the KV of rows that are about to be given up, since the prefix cache may keep it. None: all rows are
        gone, with all KV."""

    def prefill(self, chunks: Chunks, captured: Tensor | None, sampled: Tensor) -> Relayed:
        """Run the draft's pass over the chunks; `captured` [t, C] like the target's tokens, `sampled` int64 [m] for
        the m last chunks."""
        return {}

    def propose_on_host(self, rows: np.ndarray, shape: RoundShape, size: int) -> dict[str, np.ndarray]:
        """Return the trees of `rows` and of padding up to `size` rows, as the fields of `DeviceTree` that the host
        knows, [size, nd]."""
        return {}

    @abstractmethod
    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        """Return the trees that the target verifies in this round; `relayed` has the values from the round before."""

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        """Run the draft over the accepted tokens and return the start values of the next round; `relayed` has those of
        this round."""
        return {}


class NoDraft(Draft):
    """Plain decoding: a tree is its root."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        return root_only(self._ops, batch)


class ParkedDraft(NoDraft):
    """Stands in for a draft that is parked: no pass of it runs. It relays zeros in `fields`, which no round reads: the
    rows begin anew before the draft returns."""

    def __init__(self, ops: Ops, fields: Sequence[RelayField]) -> None:
        super().__init__(ops)
        self._fields = fields

    def prefill(self, chunks: Chunks, captured: Tensor | None, sampled: Tensor) -> Relayed:
        return zeros_of(self._fields, len(chunks.last), sampled.device)

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        return zeros_of(self._fields, len(batch.row_numbers), batch.rows.device)


def zeros_of(fields: Sequence[RelayField], num_rows: int, device: torch.device) -> Relayed:
    """Return zeros [num_rows, …] for each relay field."""
    return {
        f.name: torch.zeros((num_rows, *f.shape_suffix), dtype=getattr(torch, f.dtype), device=device) for f in fields
    }


def root_only(ops: Ops, batch: RoundBatch) -> DeviceTree:
    """Return the tree of a round without drafts."""
    drafts = torch.empty((len(batch.row_numbers), 0), dtype=torch.int64, device=batch.roots.device)
    return ops.build_chain(batch.roots, drafts, batch.lengths, batch.max_position)


def round_coins(ops: Ops, batch: RoundBatch, sampling: SamplingInputs, columns: int, purpose: Purpose) -> Tensor:
    """Return coins float64 [bs, columns] that no other round has: keyed by the root's position and the depth
    (`core.tree.chains.draw_chain_coins`)."""
    places = batch.lengths[:, None] * MAX_TREE_NODES + numbers(columns, batch.lengths.device)
    return ops.coins(sampling.keys, places, sampling.seed, purpose)


def top_candidates(logits: Tensor, topk: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the draft's `topk` tokens of logits [m, V], best first, and their probabilities: int64 and float32
    [m, topk]. `ids` int64 [V]: the target's id of each token; None: they are the same, as in `Ops.best_drafts`."""
    if topk == 1:
        best, tokens = logits.max(dim=-1, keepdim=True)
    else:
        best, tokens = logits.topk(topk, dim=-1)
    return tokens if ids is None else ids[tokens], (best - logits.logsumexp(dim=-1, keepdim=True)).exp().float()


class ProposedDraft(Draft):
    """Works on the host, so a round begins when the tokens of the one before it are known there."""

    on_host = True
    has_branches = True

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
        if batch.shape.nodes == 1 and not self._drafts.own_fields:
            return root_only(self._ops, batch)
        own = {f.name: relayed[f.name].cpu().numpy() for f in self._drafts.own_fields}
        proposal = self._drafts.propose(batch.row_numbers, batch.shape, own)
        columns = _columns_of(self._drafts.roots(batch.row_numbers), proposal.tokens, proposal.parents)
        device = batch.rows.device
        return _device_tree(batch, _on_device(columns, device), _on_device(proposal.next_relay, device))

    @property
    def is_captured(self) -> bool:
        # Own fields are read on the host, where a captured round leaves nothing.
        return not self._drafts.own_fields

    def propose_on_host(self, rows: np.ndarray, shape: RoundShape, size: int) -> dict[str, np.ndarray]:
        if shape.nodes == 1:
            return {}
        padding = size - len(rows)
        tokens, parents = (np.full((padding, shape.nodes - 1), fill, np.int64) for fill in (0, -1))
        roots = np.zeros(padding, np.int64)
        if len(rows):
            proposal = self._drafts.propose(rows, shape, {})
            roots = np.concatenate([self._drafts.roots(rows), roots])
            tokens, parents = (
                np.concatenate(both) for both in ((proposal.tokens, tokens), (proposal.parents, parents))
            )
        return _columns_of(roots, tokens, parents)

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        return dict(accepted.next_relay)


def _columns_of(roots: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> dict[str, np.ndarray]:
    """Return the fields of proposed trees [bs, nd] that the host knows:
    depths in place of positions, which follow from the lengths."""
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
    batch: RoundBatch, columns: Mapping[str, Any], next_relay: Mapping[str, Tensor] | None = None
) -> DeviceTree:
    positions = (batch.lengths[:, None] + columns["depths"]).clamp(max=batch.max_position)
    # Any depth below nd is possible in a proposed tree.
    return DeviceTree(positions=positions, width=positions.shape[1], next_relay=next_relay or {}, drawn=None, **columns)


def _on_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> Relayed:
    return dict(zip(arrays, uploads_to(device).send(*arrays.values()), strict=True))
