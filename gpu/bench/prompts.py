"""Prompts of a given length to time decoding with: text where there is a tokenizer, else tokens as frequent as words are.

Zeros would do for no one: equal tokens make equal keys and values, look-up drafts always find them, and experts are all the same.
"""

from __future__ import annotations

import numpy as np

from ...core.draws import Purpose, uniform
from ..session.text import Tokenizer
from ..tiny.corpus import NoCorpus, read_corpus

CORPUS_BYTES = 4_000_000
ZIPF_SHIFT = 2.7  # Mandelbrot's, for words of English text


def bench_prompts(
    tokenizer: Tokenizer | None, vocab_size: int, num_prompts: int, length: int, seed: int
) -> list[np.ndarray]:
    """Return `num_prompts` different prompts of exactly `length` tokens, int64; the same ones for the same arguments.

    They are windows of Python source (of the standard library's files from which a tiny pair learns nothing), spread evenly.
    """
    text = _text_tokens(tokenizer) if tokenizer is not None else None
    if text is None or len(text) < 2:
        return [_word_like(vocab_size, row, length, seed) for row in range(num_prompts)]
    begins = (np.arange(num_prompts) * len(text) // num_prompts + seed) % len(text)
    prompts = [text[(begin + np.arange(length)) % len(text)] for begin in begins.tolist()]
    if tokenizer.bos_id is not None:
        for prompt in prompts:
            prompt[0] = tokenizer.bos_id
    return prompts


def _text_tokens(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return Python source as one row of tokens; None on a machine without it."""
    try:
        corpus = read_corpus(CORPUS_BYTES)
    except NoCorpus:
        return None
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in corpus.held_out]
    return np.concatenate(encoded).astype(np.int64)


def _word_like(vocab_size: int, row: int, length: int, seed: int) -> np.ndarray:
    """Draw tokens of Zipf–Mandelbrot frequencies, 1 / (rank + 2.7); which token has which rank is scattered over the vocabulary."""
    weights = 1.0 / (np.arange(1, vocab_size) + ZIPF_SHIFT)
    edges = np.cumsum(weights) / weights.sum()
    ranks = np.searchsorted(edges, uniform(seed, Purpose.TOKEN, row, np.arange(length)))
    num_ranks = vocab_size - 1  # token 0 is left out
    stride = next(n for n in range(max(1, int(num_ranks * 0.618)), 2 * num_ranks) if np.gcd(n, num_ranks) == 1)
    return 1 + (np.minimum(ranks, num_ranks - 1).astype(np.int64) * stride) % num_ranks
