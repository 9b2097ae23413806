"""The prompts of a benchmark: Python source, or tokens as frequent as words are."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...core.draws import Purpose, uniform
from ..session.text import Tokenizer

# Tests repeat themselves, and not every installation has them; site-packages is not the standard library.
LEFT_OUT = frozenset({"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "__pycache__"})
KEPT_EVERY = 10  # files
MIN_FILE_BYTES = 400  # shorter files are empty packages
MAX_FILE_BYTES = 60_000  # a longer one would be a large part of a small corpus
CORPUS_BYTES = 4_000_000  # of all files, of which each tenth is kept
ZIPF_SHIFT = 2.7  # Mandelbrot's, for words of English text


def bench_prompts(
    tokenizer: Tokenizer | None, vocab_size: int, num_prompts: int, length: int, seed: int
) -> list[np.ndarray]:
    """Return `num_prompts` different prompts of exactly `length` tokens, int64; the same ones for the same arguments.

    They are windows of the Python source that every machine has, the standard library's, each drawn by the seed from
    its own part of it; without a tokenizer tokens as frequent as words are. Equal tokens would not do: they make equal
    keys and values, look-up drafts always find them, and experts are all the same.
    """
    text = _text_tokens(tokenizer) if tokenizer is not None else None
    if tokenizer is None or text is None or len(text) < 2:
        return [_word_like(vocab_size, row, length, seed) for row in range(num_prompts)]
    drawn = np.arange(num_prompts) + uniform(seed, Purpose.WINDOW, np.arange(num_prompts), 0)
    begins = (drawn * len(text) / num_prompts).astype(np.int64)
    prompts = [text[(begin + np.arange(length)) % len(text)] for begin in begins.tolist()]
    if tokenizer.bos_id is not None:
        for prompt in prompts:
            prompt[0] = tokenizer.bos_id
    return prompts


def _text_tokens(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return Python source as one row of tokens; None on a machine without it."""
    texts = read_source(Path(sysconfig.get_path("stdlib")))
    if not texts:
        return None
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return np.concatenate(encoded).astype(np.int64)


def read_source(root: Path) -> list[str]:
    """Return every tenth file of Python source below `root`, of the first ones by name."""
    texts, left = [], CORPUS_BYTES
    for number, text in enumerate(_files(root)):
        left -= len(text.encode())
        if left < 0:
            break
        if number % KEPT_EVERY == KEPT_EVERY - 1:
            texts.append(text)
    return texts


def _files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("config-"))
        for name in sorted(names):
            path = Path(folder, name)
            # Files named after the machine that built this Python differ from one machine to the next.
            if path.suffix != ".py" or name.startswith("_sysconfigdata"):
                continue
            if not MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
                continue
            try:
                yield path.read_text(encoding="utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:  # a few files declare another encoding
                continue


def _word_like(vocab_size: int, row: int, length: int, seed: int) -> np.ndarray:
    """Draw tokens of Zipf–Mandelbrot frequencies, 1 / (rank + 2.7);
    which token has which rank is scattered over the vocabulary."""
    weights = 1.0 / (np.arange(1, vocab_size) + ZIPF_SHIFT)
    edges = np.cumsum(weights) / weights.sum()
    ranks = np.searchsorted(edges, uniform(seed, Purpose.TOKEN, row, np.arange(length)))
    num_ranks = vocab_size - 1  # token 0 is left out
    stride = next(n for n in range(max(1, int(num_ranks * 0.618)), 2 * num_ranks) if np.gcd(n, num_ranks) == 1)
    return 1 + (np.minimum(ranks, num_ranks - 1).astype(np.int64) * stride) % num_ranks
