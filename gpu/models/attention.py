"""What a model's layers need from outside: rotate, write KV, attend. A model knows no pool and no batch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """One forward pass's attention over its batch of n tokens; paged in the executor, dense in training."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
        """q [n, Hq, d], k and v [n, Hk, d], not rotated yet → [n, Hq, d]. `layer` counts the model's own layers from 0.

        cos_sin float32 [positions, d]: the model's rotary table, d/2 cosines, then d/2 sines.
        """
