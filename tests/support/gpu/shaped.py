"""Changed logits, computed plainly from a whole text:
what the executor's shaping must come to at every node of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from foredraft.core.contract.request import Grammar, Request, SamplingParams
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.tiny.dense import DenseAttention

TOY = Grammar("lark", "each token differs from the one before by 1, 2 or 7, modulo the vocabulary")
STEPS = (1, 2, 7)


def permitted(output: list[int], vocab_size: int) -> np.ndarray:
    """Return bool [V]: what the toy grammar lets follow an output; anything may begin it."""
    if not output:
        return np.ones(vocab_size, bool)
    allowed = np.zeros(vocab_size, bool)
    allowed[[(output[-1] + step) % vocab_size for step in STEPS]] = True
    return allowed


class ToyMatcher:
    """The toy grammar as the executor follows it."""

    is_over, problem = False, ""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._output: list[int] = []

    def advance(self, tokens: np.ndarray) -> None:
        self._output += tokens.tolist()

    def allowed(self, path: list[int]) -> np.ndarray | None:
        text = self._output
        for token in path:
            if not permitted(text, self._vocab_size)[token]:
                return None
            text = [*text, token]
        return np.packbits(permitted(text, self._vocab_size), bitorder="little")


def shaped(
    logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams, held: Sequence[int] = ()
) -> np.ndarray:
    """Return logits float64 [V] as the parameters' definitions say, token by token; `held` tokens cannot be drawn."""
    logits = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in range(len(logits)):
        count = output.count(token)
        if count or token in prompt:
            penalty = params.repetition_penalty
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.grammar is not None:
        logits[~permitted(output, len(logits))] = -np.inf
    logits[list(held)] = -np.inf
    if params.min_p and params.temperature:
        likely = np.exp((logits - logits.max()) / params.temperature)
        logits[likely < params.min_p] = -np.inf
    return logits


def held_ends(request: Request, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens that cannot follow so many tokens of output."""
    return request.stop_tokens if num_tokens < request.min_tokens else ()


def plain_text(target: Decoder, request: Request) -> list[int]:
    """Return the greedy output of a request, one dense pass over the whole text per token."""
    prompt, output = request.prompt.materialize().tolist(), []
    while len(output) < request.max_tokens:
        text = torch.tensor(prompt + output)
        logits = target.logits(target.forward(text, DenseAttention([len(text)])).hidden[-1:])[0].detach().numpy()
        output.append(int(shaped(logits, prompt, output, request.sampling, held_ends(request, len(output))).argmax()))
        if output[-1] in request.stop_tokens:
            break
    return output
