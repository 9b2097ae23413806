"""Drafting chains and trees with a network that has KV of its own: a language model, EAGLE, EAGLE-3.

Step 0 was done by the catch-up of the round before: its top-k arrives through the relay. Steps 1 … S − 1 run the
network on the beam, one query per branch, over the shared prefix and the branch's own cells
(`core.kv.moves.draft_branch_layout`):

    unshifted   cell 0: the root, cell s: the beam node of step s            s = 1 … S − 1
    shifted     cell s − 1: the pair (hidden state before, beam node of step s)

The leaves of the last step are never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...core.draws import Purpose
from ...core.tree.build import MAX_TREE_NODES
from ..batch.pools import Chunks, KVPool, PagedAttention
from ..batch.states import BranchStates, TreeStates
from ..batch.uploads import upload
from ..kernels.constants import numbers
from ..kernels.rounds.build_tree import chain_links
from ..kernels.rounds.verify_sampling import sample_torch
from ..types.ops import DecodeBatch, DeviceCandidates, DeviceTree, DrawnDrafts, Ops, VerifyBatch
from .network import DraftNetwork
from .port import Accepted, Draft, Relayed, RoundBatch, SamplingInputs, root_only, round_coins

# The draft's catch-up is one pass over what a round has accepted, a window of columns per row:
#
#     column      0      1      …   a − 1     a …
#     position    len    len+1      len+a−1            a accepted nodes; KV of columns ≥ a goes to the sink


def window_attention(
    ops: Ops, pool: KVPool, batch: RoundBatch, columns: int, beyond: int, accept_lens: Tensor
) -> PagedAttention:
    """Return the attention of a window that keeps the KV of accepted nodes;
    `beyond` of its columns are more than these."""
    places, slots = ops.window(batch.table, batch.rows, batch.lengths, columns, accept_lens)
    positions = places.clamp(max=batch.max_position)
    bits = chain_links(len(batch.row_numbers), columns, batch.rows.device).ancestor_bits  # a window is a chain
    window = VerifyBatch(
        batch.table,
        batch.rows,
        batch.lengths,
        batch.max_len,
        bits,
        planned_rows=batch.padded_rows,
        planned_nodes=min(batch.max_nodes + beyond, MAX_TREE_NODES),
    )
    states = None
    if pool.states is not None:
        states = TreeStates.of_window(pool.states, batch.rows, batch.lengths, columns)
    return PagedAttention(ops, pool, window, positions.view(-1), slots.view(-1), states)


def at_column(values: Tensor, columns: Tensor) -> Tensor:
    """Return the values [bs, w, …] at one column per row (int [bs]) → [bs, …]."""
    rows = numbers(values.shape[0], values.device)
    return values[rows, columns]


@dataclass(frozen=True, slots=True)
class DeviceBeam:
    """The k best candidates of one step, best first, the lowest id first among equals."""

    candidate_ids: Tensor  # int32 [bs, k]
    tokens: Tensor  # int64 [bs, k]
    scores: Tensor  # float32 [bs, k]
    sources: Tensor  # int64 [bs, k]: the parent's place in the beam before
    num_candidates: int
    depth: int  # below the root, from 1


def first_level(tokens: Tensor, probabilities: Tensor) -> tuple[DeviceCandidates, DeviceBeam]:
    """Return the candidates and the beam of step 0, [bs, k] each, from the draft's top-k after the root and
    its probabilities."""
    scores = _clean(probabilities)
    bs, topk = tokens.shape
    ids = torch.arange(topk, dtype=torch.int32, device=tokens.device).expand(bs, topk)
    no_parent = torch.full_like(ids, -1)
    beam = DeviceBeam(ids, tokens, scores, torch.zeros_like(tokens), topk, depth=1)
    return DeviceCandidates(tokens, scores, no_parent, (1,) * topk), beam


def next_level(beam: DeviceBeam, tokens: Tensor, probabilities: Tensor) -> tuple[DeviceCandidates, DeviceBeam]:
    """Return the next step's candidates [bs, k²] and its beam [bs, k], from the draft's top-k after each beam node,
    [bs, k, k] each."""
    bs, topk, _ = tokens.shape
    scores = (beam.scores[:, :, None] * _clean(probabilities)).view(bs, topk * topk)
    tokens = tokens.reshape(bs, topk * topk)
    parents = beam.candidate_ids.repeat_interleave(topk, dim=1)
    best_scores, best = scores.sort(dim=1, descending=True, stable=True)
    best = best[:, :topk]
    following = DeviceBeam(
        candidate_ids=(best + beam.num_candidates).int(),
        tokens=tokens.gather(1, best),
        scores=best_scores[:, :topk],
        sources=best // topk,
        num_candidates=beam.num_candidates + topk * topk,
        depth=beam.depth + 1,
    )
    return DeviceCandidates(tokens, scores, parents, (following.depth,) * topk**2), following


def _clean(probabilities: Tensor) -> Tensor:
    """Replace NaN by 0, so that invalid scores rank last."""
    return torch.nan_to_num(probabilities.float(), nan=0.0, posinf=1.0, neginf=0.0).clamp(0.0, 1.0)


def tree_of(ops: Ops, batch: RoundBatch, levels: list[DeviceCandidates]) -> DeviceTree:
    """Return the trees of the best candidates of all levels."""
    candidates = DeviceCandidates(
        torch.cat([level.tokens for level in levels], dim=1),
        torch.cat([level.scores for level in levels], dim=1),
        torch.cat([level.parents for level in levels], dim=1),
        tuple(depth for level in levels for depth in level.depths),
    )
    return ops.build_tree(batch.roots, candidates, batch.lengths, batch.shape.nodes, batch.max_position)


class BranchDraft(Draft):
    """Drafts chains and trees step by step. Each round relays `relayed_topk` candidates, for any number of steps of the
    next round. With `draws` chains of requests that sample are drawn from these candidates (see
    `core.tree.chains`)."""

    def __init__(
        self, ops: Ops, network: DraftNetwork, pool: KVPool, relayed_topk: int, page_size: int, draws: bool = False
    ) -> None:
        self.aux_layers = network.aux_layers
        self.wants_hidden = network.wants_hidden
        self._ops = ops
        self._network = network
        self._pool = pool
        self._relayed_topk = relayed_topk
        self._page_size = page_size
        self._draws = draws

    # -- prompts --------------------------------------------------------------------------------------------------

    def prefill(self, chunks: Chunks, captured: Tensor | None, sampled: Tensor) -> Relayed:
        tokens, layout = self._prefill_tokens(chunks, sampled)
        hidden_in = None if captured is None else self._network.prepare(captured)
        attention = layout.attention(self._ops, self._pool)
        hidden, logits_hidden = self._network.run(tokens, hidden_in, attention)
        if not len(chunks.last):
            return {}
        places = layout.last_places()
        return self._relay(None if hidden is None else hidden[places], logits_hidden[places])

    def _prefill_tokens(self, chunks: Chunks, sampled: Tensor) -> tuple[Tensor, Chunks]:
        """Return the draft's tokens: the chunk's, then the sample (unshifted); or each one's successor (shifted)."""
        device = chunks.table.device
        if self._network.shifted:
            layout, host = chunks, chunks.shifted_tokens()
        else:
            layout = chunks.extended(1)
            host = np.zeros(layout.num_tokens, np.int64)
            inserted = (layout.ends - layout.lens) - (chunks.ends - chunks.lens)  # samples before each chunk's begin
            host[np.arange(chunks.num_tokens) + np.repeat(inserted, chunks.lens)] = chunks.part.tokens
        tokens = upload(device, host)
        if len(chunks.last):
            tokens = tokens.index_copy(0, layout.last_places(), sampled)
        return tokens, layout

    # -- proposals ------------------------------------------------------------------------------------------------

    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        if batch.shape.steps == 0:
            return root_only(self._ops, batch)
        topk = batch.shape.topk
        ids, probabilities = relayed["topk_ids"][:, :topk], relayed["topk_probabilities"][:, :topk]
        hidden = relayed.get("hidden_states")
        if hidden is not None:
            hidden = hidden.to(self._network.dtype)
        if self._draws and batch.sampling is not None:
            return self._drawn_chain(batch, batch.sampling, relayed["topk_ids"], relayed["topk_probabilities"], hidden)
        if topk == 1:
            return self._chain(batch, ids, probabilities, hidden)
        return self._tree(batch, ids, probabilities, hidden)

    def _chain(self, batch: RoundBatch, first: Tensor, probability: Tensor, hidden: Tensor | None) -> DeviceTree:
        drafts, confidence = [first], [probability]
        branch: _SingleBranch | None = None
        for step in range(1, batch.shape.steps):
            branch = branch or _SingleBranch(self._ops, self._pool, batch, self._network.shifted)
            hidden, logits_hidden = self._step(branch, step, drafts[-1], hidden)
            if batch.budget is None:
                drafts.append(self._network.best(logits_hidden))
            else:
                drafted, probability = self._network.candidates(logits_hidden, 1)
                drafts.append(drafted)
                confidence.append(probability)
        tokens = first if len(drafts) == 1 else torch.cat(drafts, dim=1)
        chain = self._ops.build_chain(batch.roots, tokens, batch.lengths, batch.max_position)
        return chain if batch.budget is None else replace(chain, confidence=torch.cat(confidence, dim=1))

    def _drawn_chain(
        self, batch: RoundBatch, sampling: SamplingInputs, ids: Tensor, probabilities: Tensor, hidden: Tensor | None
    ) -> DeviceTree:
        """Draw each draft from its candidates [bs, K], as the target's tokens are sampled from all."""
        steps, drafts, drawn = batch.shape.steps, list[Tensor](), list[tuple[Tensor, Tensor, Tensor]]()
        coins = round_coins(self._ops, batch, sampling, steps, Purpose.DRAFT_COIN)
        branch = _SingleBranch(self._ops, self._pool, batch, self._network.shifted) if steps > 1 else None
        for step in range(steps):
            if branch is not None and step:
                hidden, logits_hidden = self._step(branch, step, drafts[-1], hidden)
                ids, probabilities = self._network.candidates(logits_hidden, self._relayed_topk)
            parameters = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.filtered)
            probs = self._ops.target_probs(probabilities.log(), *parameters)
            place = sample_torch(probs, coins[:, step]).clamp_(min=0)  # NaN is no distribution, nor verified as one
            drafts.append(ids.gather(1, place.unsqueeze(1)))
            drawn.append((ids, probs, probabilities[:, 0]))
        tree = self._ops.build_chain(batch.roots, torch.cat(drafts, 1), batch.lengths, batch.max_position)
        ids, probs, confidence = (torch.stack(parts, 1) for parts in zip(*drawn, strict=True))
        return replace(tree, drawn=DrawnDrafts(ids, probs), confidence=confidence)

    def _tree(self, batch: RoundBatch, ids: Tensor, probabilities: Tensor, hidden: Tensor | None) -> DeviceTree:
        bs, topk = ids.shape
        level, beam = first_level(ids, probabilities)
        levels = [level]
        branches = _Branches(self._ops, self._pool, batch, self._page_size, self._network.shifted)
        if hidden is not None:
            hidden = hidden.repeat_interleave(topk, dim=0)
        for step in range(1, batch.shape.steps):
            if step > 1:
                branches.follow(beam, step)
                hidden = None if hidden is None else _from_sources(hidden, beam)
            hidden, logits_hidden = self._step(branches, step, beam.tokens, hidden)
            tokens, likely = self._network.candidates(logits_hidden, topk)
            level, beam = next_level(beam, tokens.view(bs, topk, topk), likely.view(bs, topk, topk))
            levels.append(level)
        return tree_of(self._ops, batch, levels)

    def _step(
        self, branches: _Branches | _SingleBranch, step: int, tokens: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Run one pass over the beam's nodes [bs, k];
        return hidden states for the next pass and for logits, [bs · k, H]."""
        with_root = step == 1 and not self._network.shifted
        tokens, attention = branches.at_step(step, tokens, with_root)
        hidden, logits_hidden = self._network.run(tokens, hidden, attention)
        if with_root:
            logits_hidden = logits_hidden[1::2]
        return hidden, logits_hidden

    # -- catch-up -------------------------------------------------------------------------------------------------

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        emitted = accepted.emitted[:, : accepted.longest].clamp(min=0)
        bs, width = emitted.shape
        if self._network.shifted:
            tokens, last = emitted, accepted.accept_lens - 1
            assert accepted.captured is not None, "a head drafts from hidden states"
            captured = accepted.captured[:, :width]
            hidden_in = self._network.prepare(captured.reshape(bs * width, captured.shape[2]))
        else:
            tokens, last, hidden_in = torch.cat([batch.roots[:, None], emitted], dim=1), accepted.accept_lens, None
        columns = tokens.shape[1]
        attention = window_attention(self._ops, self._pool, batch, columns, columns - width, accepted.accept_lens)
        hidden, logits_hidden = self._network.run(tokens.reshape(-1), hidden_in, attention)
        if isinstance(attention.states, TreeStates):
            path = numbers(columns, batch.rows.device).expand(bs, -1)
            attention.states.keep(path, accepted.accept_lens.long())
        if hidden is not None:
            hidden = self._state_at(hidden.view(bs, columns, -1), last)
        return self._relay(hidden, at_column(logits_hidden.view(bs, columns, -1), last))

    @staticmethod
    def _state_at(hidden: Tensor, last: Tensor) -> Tensor:
        """Return the hidden states [bs, H] that the next round drafts from, of those of all columns [bs, w, H]."""
        return at_column(hidden, last)

    def _relay(self, hidden: Tensor | None, logits_hidden: Tensor) -> Relayed:
        ids, probabilities = self._network.candidates(logits_hidden, self._relayed_topk)
        relayed = {"topk_ids": ids, "topk_probabilities": probabilities}
        if hidden is not None:
            relayed["hidden_states"] = hidden
        return relayed


def branch_states(pool: KVPool, batch: RoundBatch) -> BranchStates | None:
    """Return the states of the branches of a round, if the draft has recurrent layers."""
    return None if pool.states is None else BranchStates(pool.states, batch.rows, batch.lengths, batch.shape.topk)


class _SingleBranch:
    """Where a chain keeps its KV: in the places behind its row's prefix, cell 0 at the row's length."""

    def __init__(self, ops: Ops, pool: KVPool, batch: RoundBatch, shifted: bool) -> None:
        self._ops = ops
        self._pool = pool
        self._batch = batch
        self._first_cell = 1 if shifted else 0  # the step whose draft token stands in cell 0
        self._states = branch_states(pool, batch)
        # [steps, bs]: kernels read those of a step one behind the other.
        window = ops.window(batch.table, batch.rows, batch.lengths, batch.shape.steps)
        places, self._slots = (x.t().contiguous() for x in window)
        self._lens = places + 1
        self._positions = places.clamp_(max=batch.max_position)

    def at_step(self, step: int, tokens: Tensor, with_root: bool) -> tuple[Tensor, PagedAttention]:
        """Return the pass's tokens [m] and its attention:
        m = bs, or twice that with the root before each row's first draft."""
        batch = self._batch
        cell, rows, count = step - self._first_cell, batch.rows, 1
        if with_root:
            tokens, rows, count = torch.cat((batch.roots[:, None], tokens), 1), rows.repeat_interleave(2), 2
        lens, positions, slots = (
            x.narrow(0, cell + 1 - count, count).t().reshape(-1) for x in (self._lens, self._positions, self._slots)
        )
        queries = DecodeBatch(
            batch.table, rows, lens, lens, lens, batch.max_len + cell + 1, planned_queries=batch.padded_rows * count
        )
        return tokens.reshape(-1), PagedAttention(self._ops, self._pool, queries, positions, slots, self._states)


class _Branches:
    """Where the branches of a round's trees keep their KV: laid out once, written step by step."""

    def __init__(self, ops: Ops, pool: KVPool, batch: RoundBatch, page_size: int, shifted: bool) -> None:
        self._ops = ops
        self._pool = pool
        self._batch = batch
        self._first_cell = 1 if shifted else 0  # the step whose beam node stands in cell 0
        self._states = branch_states(pool, batch)
        topk, steps, lengths = batch.shape.topk, batch.shape.steps, batch.lengths
        self._row_cells = batch.rows[:, None] * batch.table.shape[1]
        in_page = lengths % page_size
        pages = (in_page + (steps + page_size - 1)).div(page_size, rounding_mode="floor")
        branches = numbers(topk, lengths.device)
        self._starts = lengths[:, None] + (pages * page_size)[:, None] * branches
        self._bases = (lengths - in_page)[:, None].expand(-1, topk)
        self._tails = self._starts - in_page[:, None]
        if page_size > 1 and steps > 1:
            ops.duplicate_tails_(pool.all_layers, batch.table, batch.rows, lengths, page_size, topk, steps)

    def at_step(self, step: int, tokens: Tensor, with_root: bool) -> tuple[Tensor, PagedAttention]:
        """Return the pass's tokens [m] and its attention:
        m = bs · k, or twice that with the root before each first node."""
        bs, topk = tokens.shape
        cell = step - self._first_cell
        cells = [cell]
        if with_root:
            tokens = torch.stack([self._batch.roots[:, None].expand(bs, topk), tokens], dim=2)
            cells = [0, cell]
        places = torch.stack([self._starts + c for c in cells], dim=2).view(bs, -1)
        lens = torch.stack([self._batch.lengths + (c + 1) for c in cells], dim=1).repeat(1, topk).view(-1)
        per_row = topk * len(cells)
        rows = self._batch.rows.repeat_interleave(per_row)
        bases = self._bases.repeat_interleave(len(cells), dim=1).reshape(-1)
        tails = self._tails.repeat_interleave(len(cells), dim=1).reshape(-1)
        batch, positions = self._batch, (lens - 1).clamp(max=self._batch.max_position)
        max_len, planned = batch.max_len + cell + 1, batch.padded_rows * per_row
        queries = DecodeBatch(batch.table, rows, bases, tails, lens, max_len, planned_queries=planned)
        return tokens.reshape(-1), PagedAttention(
            self._ops, self._pool, queries, positions, self._slots(places).view(-1), self._states
        )

    def follow(self, beam: DeviceBeam, step: int) -> None:
        """Copy the KV of each beam node's parent branch into its own, before `step` writes its cell."""
        if self._states is not None:
            self._states.follow(beam.sources)
        cells = range(1 - self._first_cell, step - self._first_cell)  # the root stands in every branch alike
        places = torch.stack([self._starts + c for c in cells], dim=2)
        bs, topk, count = places.shape
        slots = self._slots(places.view(bs, -1)).view(bs, topk, count)
        sources = slots.gather(1, beam.sources[:, :, None].expand(bs, topk, count))
        self._ops.move_slots_(self._pool.all_layers, sources.view(-1), slots.view(-1))

    def _slots(self, places: Tensor) -> Tensor:
        return self._batch.table.view(-1)[self._row_cells + places].long()


def _from_sources(hidden: Tensor, beam: DeviceBeam) -> Tensor:
    """Return the hidden state of each beam node's parent, [bs · k, H]."""
    bs, topk = beam.sources.shape
    by_row = hidden.view(bs, topk, -1)
    return by_row.gather(1, beam.sources[:, :, None].expand(bs, topk, by_row.shape[2])).view(bs * topk, -1)
