"""The emitted tokens of each row in order, and the last of them: the root of the next tree (`core.tree.outputs`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..jit import jit, next_power_of_2, tl


def gather_emitted_torch(predict: Tensor, accept_index: Tensor, accept_lens: Tensor) -> tuple[Tensor, Tensor]:
    index = accept_index.long()
    emitted = torch.where(index >= 0, predict.take(index.clamp(min=0)), -1) if predict.numel() else index
    # The stride is the width of what is read. A failed row relays the valid id 0 instead of a placeholder.
    bonus = emitted.gather(1, accept_lens.long().unsqueeze(1) - 1)
    return emitted, bonus.squeeze(1).clamp_(min=0)


@jit
def _gather_kernel(predict, accept_index, accept_lens, emitted, bonus, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    inside = lane < width
    node = tl.load(accept_index + row * width + lane, mask=inside, other=-1)
    token = tl.load(predict + node, mask=node >= 0, other=-1)
    tl.store(emitted + row * width + lane, token, mask=inside)
    last = tl.max(tl.where(lane == tl.load(accept_lens + row) - 1, token, -1), 0)
    tl.store(bonus + row, tl.maximum(last, 0))


def gather_emitted_triton(predict: Tensor, accept_index: Tensor, accept_lens: Tensor) -> tuple[Tensor, Tensor]:
    batch_size, width = accept_index.shape
    emitted = torch.empty(batch_size, width, dtype=torch.int64, device=predict.device)
    bonus = torch.empty(batch_size, dtype=torch.int64, device=predict.device)
    if batch_size:
        _gather_kernel[(batch_size,)](
            predict, accept_index, accept_lens, emitted, bonus, width, WIDTH=next_power_of_2(width), num_warps=1
        )
    return emitted, bonus
