"""Drafting all tokens of a round in one pass, behind mask tokens: P-EAGLE (arXiv 2602.01469), PARD (arXiv 2504.18583).

The pass that catches up goes on over masks, one fewer than a round drafts at most. What stands behind the last accepted
token and behind each mask is relayed, so proposing costs nothing:

    unshifted    root   a₁   …   bonus   mask   mask      the bonus token and the masks say g₁, g₂, g₃
    shifted             a₁   …   bonus   mask   mask      beside hidden states; that of a mask is a learnt one

KV of masks is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..batch.pools import Chunks, KVPool
from ..batch.states import TreeStates
from ..batch.uploads import upload
from ..kernels.constants import numbers
from ..types.ops import DeviceTree, Ops
from .branches import window_attention
from .network import DraftNetwork
from .port import Accepted, Draft, Relayed, RoundBatch, root_only


class MaskedDraft(Draft):
    """Drafts chains of up to `num_drafts` tokens."""

    def __init__(self, ops: Ops, network: DraftNetwork, pool: KVPool, num_drafts: int) -> None:
        self.aux_layers = network.aux_layers
        self.wants_hidden = network.wants_hidden
        self._ops, self._network, self._pool = ops, network, pool
        self._count = max(num_drafts, 1)
        self._mask = network.mask_token

    def prefill(self, chunks: Chunks, captured: Tensor | None, sampled: Tensor) -> Relayed:
        device, shifted, count = chunks.table.device, int(self._network.shifted), self._count
        assert chunks.part.tokens is not None, "an executor with tokens gets them"
        layout = chunks.extended(count - shifted)
        inserted = (layout.ends - layout.lens) - (chunks.ends - chunks.lens)
        places = np.arange(chunks.num_tokens) + np.repeat(inserted, chunks.lens)
        host = np.full(layout.num_tokens, self._mask, np.int64)
        host[places] = chunks.shifted_tokens() if shifted else chunks.part.tokens
        tokens, hidden = upload(device, host), None
        last = upload(device, layout.ends[chunks.last] - count)  # where the sampled tokens stand
        if len(chunks.last):
            tokens = tokens.index_copy(0, last, sampled)
        if captured is not None:
            hidden = self._network.masked_hidden(layout.num_tokens)
            hidden = hidden.index_copy(0, upload(device, places), self._network.prepare(captured))
        _, logits_hidden = self._network.run(tokens, hidden, layout.attention(self._ops, self._pool))
        return self._relay(logits_hidden, last) if len(chunks.last) else {}

    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        if batch.shape.steps == 0:
            return root_only(self._ops, batch)
        drafts, likely = (relayed[name][:, : batch.shape.steps] for name in ("topk_ids", "topk_probabilities"))
        chain = self._ops.build_chain(batch.roots, drafts, batch.lengths, batch.max_position)
        return chain if batch.budget is None else replace(chain, confidence=likely.contiguous())

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        emitted = accepted.emitted[:, : accepted.longest]
        bs, width = emitted.shape
        shifted, masks = int(self._network.shifted), self._count - 1
        tokens = emitted if shifted else torch.cat((batch.roots[:, None], emitted), 1)
        last = accepted.accept_lens.long() - shifted  # the column of the bonus token
        tokens = torch.cat((tokens, tokens.new_empty(bs, masks)), 1)
        columns = tokens.shape[1]
        is_mask = numbers(columns, tokens.device) > last[:, None]
        tokens = torch.where(is_mask, self._mask, tokens)
        hidden = None
        if shifted:
            assert accepted.captured is not None, "a head drafts from hidden states"
            captured = accepted.captured[:, :width]
            known = self._network.prepare(captured.reshape(bs * width, captured.shape[2])).view(bs, width, -1)
            masked = self._network.masked_hidden(bs * columns).view(bs, columns, -1)
            known = torch.cat((known, masked[:, width:]), 1)
            hidden = torch.where(is_mask.unsqueeze(2), masked, known).flatten(0, 1)
        attention = window_attention(self._ops, self._pool, batch, columns, columns - width, accepted.accept_lens)
        _, logits_hidden = self._network.run(tokens.reshape(-1), hidden, attention)
        if isinstance(attention.states, TreeStates):
            path = numbers(columns, batch.rows.device).expand(bs, -1)
            attention.states.keep(path, accepted.accept_lens.long())
        return self._relay(logits_hidden, numbers(bs, tokens.device) * columns + last)

    def _relay(self, logits_hidden: Tensor, last: Tensor) -> Relayed:
        """Return the candidates behind the tokens at `last` int64 [m] and behind the masks that follow."""
        places = (last[:, None] + numbers(self._count, last.device)).flatten()
        ids, probabilities = self._network.candidates(logits_hidden[places], 1)
        shape = (len(last), self._count)
        return {"topk_ids": ids.view(shape), "topk_probabilities": probabilities.view(shape)}
