"""Examples to learn from: windows of a long row of tokens, drawn by number so that any step can be drawn again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.draws import Purpose, uniform


def corpus_windows(tokens: Tensor, batch_size: int, window: int, seed: int, part: int, step: int) -> Tensor:
    """Return `batch_size` windows of the tokens (int64 [n]) for step `step` of the pair's part `part`, int64 [batch_size, window]."""
    coins = uniform(seed, Purpose.MODEL, np.arange(batch_size), step, lane=part)
    starts = torch.from_numpy((coins * (tokens.shape[0] - window)).astype(np.int64)).to(tokens.device)
    return tokens[starts[:, None] + torch.arange(window, device=tokens.device)]


def rows_of(texts: Tensor, batch_size: int, step: int) -> Tensor:
    """Return the next `batch_size` of the texts [n, window], again from the first after the last."""
    first = step * batch_size
    index = torch.arange(first, first + batch_size, device=texts.device) % texts.shape[0]
    return texts[index]


def spread_prompts(tokens: Tensor, num_prompts: int, prompt_len: int) -> Tensor:
    """Return beginnings of texts, spread evenly over the row of tokens, int64 [num_prompts, prompt_len]."""
    last = tokens.shape[0] - prompt_len
    assert last >= 0, f"{tokens.shape[0]} tokens are fewer than a prompt's {prompt_len}"
    starts = torch.linspace(0, last, num_prompts, dtype=torch.float64, device=tokens.device).long()
    return tokens[starts[:, None] + torch.arange(prompt_len, device=tokens.device)]


def most_frequent(rows: Sequence[Tensor], vocab_size: int, num_tokens: int) -> Tensor:
    """Return the `num_tokens` most frequent tokens over all rows, ascending, int64 [num_tokens]; ties take the lower token."""
    counts = sum(torch.bincount(row.reshape(-1).cpu(), minlength=vocab_size) for row in rows)
    order = torch.sort(counts, descending=True, stable=True).indices
    return torch.sort(order[:num_tokens]).values
