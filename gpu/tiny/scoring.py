"""The log-probabilities of a prompt's own tokens, by one pass of the target beside the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ...core.contract.text import PromptScores
from .dense import DenseAttention

if TYPE_CHECKING:
    from ..models.decoder import Decoder

ROWS = 256
"""Tokens whose logits are there at a time: of a vocabulary of 256,000 they take 256 MB."""


@torch.no_grad()
def score_prompt(target: Decoder, tokens: np.ndarray, num_top: int) -> PromptScores:
    """Return the log-probabilities of `tokens` int [n] under the target, and the `num_top` most likely tokens at each
    place. The pass needs neither pages of the engine's pool nor one of its steps."""
    prompt = torch.from_numpy(np.asarray(tokens, dtype=np.int64)).to(target.device)
    hidden = target.forward(prompt, DenseAttention([len(prompt)], device=target.device)).hidden
    logprobs: list[float] = []
    tops: list[list[tuple[int, float]]] = []
    for first in range(0, len(prompt) - 1, ROWS):
        following = prompt[first + 1 : first + 1 + ROWS]
        rows = target.logits(hidden[first : first + len(following)]).log_softmax(dim=-1)
        logprobs += rows.gather(1, following[:, None])[:, 0].tolist()
        values, ids = rows.topk(min(num_top, rows.shape[-1]), dim=-1)
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        tops += [list(zip(*pair, strict=True)) for pair in pairs]
    return PromptScores(logprobs, tops)
