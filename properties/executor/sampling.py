"""How the requests of the executor's trial sample, and how they change logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...core.contract.request import GRAMMAR_KINDS, GREEDY, Grammar, SamplingParams
from ...core.draws import Purpose, hash64, request_key
from .contract import ExecutorCapabilities

SAMPLING = {
    "b": SamplingParams(temperature=9.0, top_k=3, seed=5),
    "c": SamplingParams(temperature=9.0, top_k=1),
    "d": SamplingParams(temperature=9.0, top_p=0.5, seed=6),
}
"""Of requests by name, where they may sample; the others are greedy."""
PENALTIES: dict[str, Any] = {"presence_penalty": 3.0, "frequency_penalty": 2.0, "logit_bias": ((3, 4.0), (7, -9.0))}
GRAMMAR = Grammar(GRAMMAR_KINDS[0], "")
SHAPES: dict[str, dict[str, Any]] = {
    "a": {"repetition_penalty": 1.6, **PENALTIES},
    "b": {"grammar": GRAMMAR},
    "c": {"repetition_penalty": 0.7, "grammar": GRAMMAR},
    "d": PENALTIES,
}
SHAPED_LEN = 12
"""How requests by name change logits, where they may: those of so many tokens."""
RULES = (
    SamplingParams(temperature=4.0),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=8.0, top_k=4),
    SamplingParams(temperature=2.0),  # at which drafts have about half of the mass
    SamplingParams(temperature=1.0, top_p=0.5),  # which leaves few tokens, each of them often
)


def sampling_of(request: str, max_tokens: int, has: ExecutorCapabilities) -> SamplingParams:
    """Return the parameters of a request by its name, as far as the executor can follow them."""
    plain = SAMPLING.get(request, GREEDY) if has.samples else GREEDY
    is_shaped = has.shaped and max_tokens == SHAPED_LEN
    return replace(plain, **SHAPES.get(request, {})) if is_shaped else plain


def tokens_of(name: str, count: int, vocab_size: int) -> np.ndarray:
    """Make a prompt, int64 [count], from the name of its request."""
    bits = hash64(0, Purpose.TOKEN, request_key(name), np.arange(count))
    return (bits % np.uint64(vocab_size)).astype(np.int64)
