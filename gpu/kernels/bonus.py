"""The emitted tokens of each row in order, and the last of them: the root of the next tree (`core.tree.finalize`)."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_emitted_torch(predict: Tensor, accept_index: Tensor, accept_lens: Tensor) -> tuple[Tensor, Tensor]:
    index = accept_index.long()
    emitted = torch.where(index >= 0, predict.take(index.clamp(min=0)), -1) if predict.numel() else index
    # The stride is the width of what is read. A failed row relays the valid id 0 instead of a placeholder.
    bonus = emitted.gather(1, accept_lens.long().unsqueeze(1) - 1)
    return emitted, bonus.squeeze(1).clamp_(min=0)


def gather_emitted_bytes(batch_size: int, width: int) -> int:
    """accept_index and the predictions in, emitted and bonus tokens out."""
    return batch_size * (width * (4 + 8 + 8) + 4 + 8)
