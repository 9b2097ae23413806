"""Drafting a block of tokens in one pass, with KV that is made of the target's hidden states.

    catch_up   keys and values of every accepted token, from the hidden states of the pass that verified it
    propose    one pass over the last token and masks behind it, in the places behind the row's prefix:

                   place     len      len + 1   …   len + S
                   token     root     mask          mask        each mask drafts the token of its own place

               If places draft the token behind their own (`samples_anchor`), the last mask is not there.

The block's own KV lies where the accepted tokens' KV is written afterwards. Nothing is relayed: the draft KV of a token
depends on the tokens up to it alone, so it serves cached prefixes, too, and travels with pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...core.tree.build import MAX_TREE_NODES
from ..batch.pools import Chunks, KVPool, PagedAttention
from ..kernels.rounds.build_tree import chain_links
from ..models.heads.block import BlockHead
from ..types.attention import PLAIN, BatchAttention, Softmax
from ..types.ops import DeviceTree, Ops, VerifyBatch
from ..types.recurrence import RecurrentWeights, StateShape
from .branches import window_attention
from .port import Accepted, Draft, Relayed, RoundBatch, root_only


class BlockDraft(Draft):
    """Drafts with a block drafter."""

    wants_hidden = True

    def __init__(self, ops: Ops, head: BlockHead, pool: KVPool) -> None:
        self.aux_layers = head.aux_layers
        self._ops, self._head, self._pool = ops, head, pool
        self._causal = tuple(map(head.is_causal, range(head.num_layers)))
        windowed = head.config.model.windowed_layers
        self._is_one_way = len(set(self._causal)) == 1 and (self._causal[0] or not windowed)

    def prefill(self, chunks: Chunks, captured: Tensor | None, sampled: Tensor) -> Relayed:
        assert captured is not None, "a block drafter takes hidden states"
        self._head.keep_context(self._head.prepare_hidden(captured), chunks.attention(self._ops, self._pool))
        return {}

    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        steps, head = batch.shape.steps, self._head
        if steps == 0:
            return root_only(self._ops, batch)
        tokens = batch.roots[:, None]
        if masks := steps - head.parts.samples_anchor:
            tokens = torch.cat((tokens, tokens.new_full((len(tokens), masks), head.mask_token)), 1)
        hidden = head.run_block(tokens, self._attention(batch, tokens.shape[1]))
        hidden = hidden[:, -steps:]
        drafts = head.choose(hidden, batch.roots)
        chain = self._ops.build_chain(batch.roots, drafts, batch.lengths, batch.max_position)
        if batch.budget is None:
            return chain
        return replace(chain, confidence=head.confidences(hidden, batch.roots, drafts).float())

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        assert accepted.captured is not None, "a block drafter takes hidden states"
        captured = accepted.captured[:, : accepted.longest]
        bs, width, size = captured.shape
        attention = window_attention(self._ops, self._pool, batch, width, 0, accepted.accept_lens)
        self._head.keep_context(self._head.prepare_hidden(captured.reshape(bs * width, size)), attention)
        return {}

    def _attention(self, batch: RoundBatch, places: int) -> BatchAttention:
        """Return the attention of blocks of so many places."""
        columns, slots = self._ops.window(batch.table, batch.rows, batch.lengths, places)
        positions = columns.clamp(max=batch.max_position)
        causal = chain_links(len(batch.row_numbers), places, batch.rows.device).ancestor_bits
        block = VerifyBatch(
            batch.table,
            batch.rows,
            batch.lengths,
            batch.max_len,
            causal,
            planned_rows=batch.padded_rows,
            planned_nodes=min(batch.max_nodes, MAX_TREE_NODES),
        )
        whole = replace(block, ancestor_bits=causal[:, -1:].expand(-1, places).contiguous())
        each = [
            PagedAttention(self._ops, self._pool, one, positions.view(-1), slots.view(-1)) for one in (whole, block)
        ]
        return each[self._causal[0]] if self._is_one_way else LayeredAttention(each[0], each[1], self._causal, places)


class LayeredAttention:
    """The attention of blocks whose layers differ: in a causal layer a place sees what stands before it, in the others
    the whole block. Behind a window, all places of a whole block see the context that its first place sees."""

    in_round = True

    def __init__(
        self, whole: PagedAttention, causal: PagedAttention, causal_layers: tuple[bool, ...], places: int
    ) -> None:
        self._parts, self._causal, self._places = (whole, causal), causal_layers, places

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """See `BatchAttention`."""
        is_causal = self._causal[layer]
        if softmax.window and not is_causal:  # kernels count it from the last node that a query sees
            softmax = replace(softmax, window=softmax.window + self._places - 1)
        return self._parts[is_causal].attend(layer, q, k, v, cos_sin, softmax)

    def recur(self, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape) -> Tensor:
        """Refuse: block drafters have no recurrent layers."""
        raise AssertionError("a block drafter has no recurrent layers")
