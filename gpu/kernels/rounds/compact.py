"""Compaction: every per-node output of the j-th accepted node goes to place j of its row (`core.tree.outputs`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..constants import node_numbers, words
from ..jit import cdiv, jit, tl


def compact_torch(values: Tensor, accept_index: Tensor, num_draft_tokens: int) -> Tensor:
    return values.index_select(0, compaction_index(accept_index, num_draft_tokens))


def compaction_index(accept_index: Tensor, num_draft_tokens: int) -> Tensor:
    """Return the flat node that each place reads from, int32 [bs · nd];
    places without an accepted node read themselves."""
    batch_size, width = accept_index.shape
    columns = min(width, num_draft_tokens)
    own = node_numbers(batch_size, num_draft_tokens, num_draft_tokens, accept_index.device, accept_index.dtype)
    accepted = accept_index[:, :columns]
    source = torch.where(accepted >= 0, accepted, own[:, :columns])
    if columns < num_draft_tokens:
        source = torch.cat((source, own[:, columns:]), 1)
    return source.view(-1)


BLOCK = 1024
"""Words that one program copies."""


@jit
def _compact_kernel(values, accept_index, out, nodes, width, row_words, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row, lane = place // nodes, place % nodes
    # Places past the width or past the path keep their own.
    accepted = tl.load(accept_index + row * width + lane, mask=lane < width, other=-1).to(tl.int64)
    source = tl.where(accepted >= 0, accepted, place)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < row_words
    tl.store(out + place * row_words + word, tl.load(values + source * row_words + word, mask=inside), mask=inside)


def compact_triton(values: Tensor, accept_index: Tensor, num_draft_tokens: int) -> Tensor:
    values = values.contiguous()
    out = torch.empty_like(values)
    if out.numel():
        source, target = words(values, out)
        num_places, row_words = source.shape
        _compact_kernel[(num_places, cdiv(row_words, BLOCK))](
            source, accept_index, target, num_draft_tokens, accept_index.shape[1], row_words, BLOCK=BLOCK
        )
    return out
