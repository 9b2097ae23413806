"""Multi-layer EAGLE: one head per step, all of them run in the catch-up, so that proposing costs nothing.

At slot j head 0 takes the target's hidden state j and token j + 1. Head s ≥ 1 takes the output of head s − 1 at slot j
− 1 and token j + 1. Behind the last accepted slot n − 1 head s goes on with the first choices of the heads before it:

    slot      …    n − 2      n − 1      n          n + 1
    head 0         t(n−1)     t(n)                              → g₁, the best token n + 1
    head 1         t(n−1)     t(n)       g₁                     → g₂
    head 2         t(n−1)     t(n)       g₁         g₂          → g₃

KV is kept up to slot n − 1 and therefore always belongs to emitted tokens. The output of head s − 1 at slot n − 1 is
relayed, because head s needs it where the next window begins. Between chunks of a prompt it waits in a buffer by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm.builtin import carried_hidden_size
from ..batch.pools import Chunks, KVPool
from ..batch.uploads import upload
from ..kernels.constants import numbers
from ..models.eagle import MultiLayerEagleHeads
from ..types.ops import DeviceTree, Ops
from .branches import at_column, first_level, next_level, tree_of, window_attention
from .port import Accepted, Draft, Relayed, RoundBatch, root_only, top_candidates


class HeadsDraft(Draft):
    """`relayed_topk` candidates per head travel to the next round."""

    wants_hidden = True

    def __init__(self, ops: Ops, heads: MultiLayerEagleHeads, pool: KVPool, relayed_topk: int, num_rows: int) -> None:
        self.aux_layers = heads.aux_layers
        self._ops = ops
        self._heads = heads
        self._pool = pool
        self._topk = relayed_topk
        self.carried_size = carried_size(heads)
        weight = next(heads.parameters())
        self._carry = torch.zeros((num_rows + 1, self.carried_size), dtype=weight.dtype, device=weight.device)

    def open_row(self, row: int, cached: np.ndarray) -> None:
        # Nothing is known of the slot before the first chunk, be it the begin of the prompt or a cached prefix.
        self._carry[row] = 0

    # -- prompts --------------------------------------------------------------------------------------------------

    def prefill(self, chunks: Chunks, captured: Tensor | None, sampled: Tensor) -> Relayed:
        device = chunks.table.device
        last = chunks.last
        host_tokens = chunks.shifted_tokens()
        assert captured is not None, "heads draft from hidden states"
        hidden = self._heads.prepare_hidden(captured)
        carried = self._carry[chunks.rows].unflatten(1, (-1, self._heads.hidden_size))
        ends = upload(device, chunks.ends - 1)
        guesses: list[Tensor] = [sampled]
        relayed: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for head in range(self._heads.num_layers):
            layout = chunks.extended(head) if head else chunks
            if head:
                hidden = _after_carry(carried[:, head - 1], hidden, chunks, head)
            own = (layout.ends - layout.lens) - (chunks.ends - chunks.lens)
            places = np.arange(chunks.num_tokens) + np.repeat(own, chunks.lens)
            host = np.zeros(layout.num_tokens, np.int64)
            host[places] = host_tokens
            tokens = upload(device, host)
            for i, guess in enumerate(guesses):
                at = upload(device, (layout.ends - 1)[last] - head + i)
                tokens = tokens.index_copy(0, at, guess)
            attention = layout.attention(self._ops, self._pool)
            out = self._heads.forward(tokens, hidden, attention, head)
            hidden = out.hidden
            kept = ends + upload(device, own)
            outputs.append(hidden[kept])
            ids, probabilities = self._candidates(out.logits_hidden[layout.last_places()])
            relayed.append((ids, probabilities))
            guesses.append(ids[:, 0])
        carry = self._carried(outputs)
        self._carry[chunks.rows] = carry
        if not len(last):
            return {}
        return self._relay(relayed, carry[upload(device, last)])

    # -- rounds ---------------------------------------------------------------------------------------------------

    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        if batch.shape.steps == 0:
            return root_only(self._ops, batch)
        bs, topk = len(batch.row_numbers), batch.shape.topk
        shape = (bs, self._heads.num_layers, self._topk)
        ids = relayed["topk_ids"].view(shape)[:, : batch.shape.steps, :topk]
        probabilities = relayed["topk_probabilities"].view(shape)[:, : batch.shape.steps, :topk]
        if topk == 1:
            chain = self._ops.build_chain(batch.roots, ids[:, :, 0], batch.lengths, batch.max_position)
            return chain if batch.budget is None else replace(chain, confidence=probabilities[:, :, 0].contiguous())
        level, beam = first_level(ids[:, 0], probabilities[:, 0])
        levels = [level]
        for step in range(1, batch.shape.steps):
            # A head knows the first choices before it, not the branch: every branch goes on with the same candidates.
            tokens, likely = (x[:, step, None, :].expand(bs, topk, topk) for x in (ids, probabilities))
            level, beam = next_level(beam, tokens, likely)
            levels.append(level)
        return tree_of(self._ops, batch, levels)

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        emitted = accepted.emitted[:, : accepted.longest].clamp(min=0)
        bs, width = emitted.shape
        accept_lens = accepted.accept_lens.long()
        assert accepted.captured is not None, "heads draft from hidden states"
        captured = accepted.captured[:, :width]
        hidden = self._heads.prepare_hidden(captured.reshape(bs * width, captured.shape[2])).view(bs, width, -1)
        carried = relayed["hidden_states"].to(hidden.dtype).unflatten(1, (-1, self._heads.hidden_size))
        tokens = torch.cat([emitted, emitted.new_zeros((bs, self._heads.num_layers - 1))], dim=1)
        rows = numbers(bs, emitted.device)
        found: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for head in range(self._heads.num_layers):
            columns = width + head
            if head:
                hidden = torch.cat([carried[:, head - 1, None], hidden], dim=1)
                # The guess stands behind the accepted tokens and the guesses before it.
                tokens[rows, accept_lens + (head - 1)] = found[-1][0][:, 0]
            attention = window_attention(self._ops, self._pool, batch, columns, head, accepted.accept_lens)
            out = self._heads.forward(
                tokens[:, :columns].reshape(-1), hidden.reshape(bs * columns, -1), attention, head
            )
            hidden = out.hidden.view(bs, columns, -1)
            outputs.append(at_column(hidden, accept_lens - 1))
            found.append(self._guesses(head, out.logits_hidden.view(bs, columns, -1), accept_lens - 1))
        return self._relay(found, self._carried(outputs))

    def _guesses(self, head: int, logits_hidden: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates of a head behind the guesses of the heads before it, of which the first stands behind
        the accepted tokens: `last` is the column of the last one."""
        return self._candidates(at_column(logits_hidden, last + head))

    def _candidates(self, logits_hidden: Tensor) -> tuple[Tensor, Tensor]:
        return top_candidates(self._heads.logits(logits_hidden), self._topk, self._heads.target_ids)

    def _carried(self, outputs: list[Tensor]) -> Tensor:
        """Return what heads 0 … n − 2 said at the last kept slot, [rows, (n − 1) · H] (or one empty place
        for a single head)."""
        if len(outputs) == 1:
            return torch.zeros((len(outputs[0]), self.carried_size), dtype=self._carry.dtype, device=self._carry.device)
        return torch.cat(outputs[:-1], dim=1)

    def _relay(self, found: list[tuple[Tensor, Tensor]], carry: Tensor) -> Relayed:
        return {
            "topk_ids": torch.cat([ids for ids, _ in found], dim=1),
            "topk_probabilities": torch.cat([probabilities for _, probabilities in found], dim=1),
            "hidden_states": carry,
        }


def carried_size(heads: MultiLayerEagleHeads) -> int:
    """Return the values per row that heads hand to their successors across rounds."""
    return carried_hidden_size(heads.hidden_size, heads.num_layers)


def _after_carry(carried: Tensor, hidden: Tensor, chunks: Chunks, head: int) -> Tensor:
    """Return head `head`'s input at slot j, what head − 1 said at slot j − 1:
    each row's carry, then `hidden`, cut to the new layout."""
    before = chunks.extended(head - 1).lens if head > 1 else chunks.lens
    after = chunks.lens + head * chunks.part.is_last
    n = len(after)
    begins = n + np.cumsum(before) - before  # in [carries, hidden states]
    offsets = np.arange(after.sum()) - np.repeat(np.cumsum(after) - after, after)
    source = np.where(offsets == 0, np.repeat(np.arange(n), after), np.repeat(begins, after) + offsets - 1)
    return torch.cat([carried, hidden])[upload(hidden.device, source)]
