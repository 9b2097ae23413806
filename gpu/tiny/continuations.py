"""Texts that the target continues itself: the drafts learn from them, as they will have to predict them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models.decoder import Decoder
from ..types.attention import PLAIN, Softmax
from ..types.recurrence import RecurrentWeights, StateShape
from .dense import rotate

ROWS_AT_ONCE = 64  # bounds the keys and values held


class GrowingAttention:
    """An `Attention` over rows of equal length that remembers what it has seen: [layers, rows, Hk, positions, d]."""

    in_round = False

    def __init__(self, decoder: Decoder, num_rows: int, num_positions: int) -> None:
        config = decoder.config
        shape = (config.num_layers, num_rows, config.num_kv_heads, num_positions, config.head_dim)
        self._keys = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self._values = torch.zeros_like(self._keys)
        self._num_rows = num_rows
        self._seen = self._end = 0

    def advance(self, num_new: int) -> None:
        """Begin the next pass, which brings `num_new` tokens per row."""
        self._seen, self._end = self._end, self._end + num_new

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        assert softmax is PLAIN, "a target that is trained has plain attention"
        rows, new = self._num_rows, slice(self._seen, self._end)
        turns = cos_sin[new].to(q.dtype).repeat(rows, 1)
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (rotate(q, turns), rotate(k, turns), v))
        self._keys[layer, :, :, new] = k
        self._values[layer, :, :, new] = v
        out = F.scaled_dot_product_attention(
            q,
            self._keys[layer, :, :, : self._end],
            self._values[layer, :, :, : self._end],
            is_causal=self._seen == 0,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1)

    def recur(self, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape) -> Tensor:
        """Refuse: what is trained has no recurrent layers."""
        raise AssertionError("a target that is trained has no recurrent layers")


@torch.no_grad()
def continue_texts(target: Decoder, prompts: Tensor, length: int, temperature: float = 0.0, seed: int = 0) -> Tensor:
    """Return the prompts int64 [n, p] with the target's own tokens behind them, int64 [n, length]; temperature 0 is
    greedy."""
    return torch.cat([_continue(target, rows, length, temperature, seed) for rows in prompts.split(ROWS_AT_ONCE)])


def _continue(target: Decoder, prompts: Tensor, length: int, temperature: float, seed: int) -> Tensor:
    num_rows, prompt_len = prompts.shape
    attention = GrowingAttention(target, num_rows, length)
    texts = torch.empty(num_rows, length, dtype=torch.int64, device=prompts.device)
    texts[:, :prompt_len] = prompts
    generator = torch.Generator(device=prompts.device)
    generator.manual_seed(seed)
    new = prompts
    for position in range(prompt_len, length):
        attention.advance(new.shape[1])
        hidden = target.forward(new.reshape(-1), attention).hidden
        logits = target.logits(hidden.view(num_rows, -1, hidden.shape[-1])[:, -1])
        if temperature > 0:
            # The largest of logits with Gumbel noise is a draw from their softmax.
            noise = torch.empty_like(logits).exponential_(generator=generator).log()
            logits = logits / temperature - noise
        new = logits.argmax(-1, keepdim=True)
        texts[:, position] = new[:, 0]
    return texts
