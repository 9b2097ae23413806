"""Changes of the target's logits: biases, penalties, min-p, and grammars, at every node of a verify tree.

    row's text    prompt · output … root │ node ─ node        what changes a node's logits: the text up to the node,
                  known on the host      └ node ─ node        as if its path had been emitted already

So a node gets the distribution that plain decoding would have there, and verification stays lossless: what a grammar
forbids has probability 0 and is never accepted. The host must have the tokens of the round before, and it changes the
logits between the target's pass and the choice of tokens, so a captured round is two graphs. The logits of rows that
ask for none of this do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...core.contract.request import Grammar, Request, SamplingParams
from ...core.contract.step import Join
from ...core.errors import ForedraftError
from ..kernels.constants import numbers
from ..ops.port import DeviceTree


def target_probs(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool = True) -> Tensor:
    """Return the distribution that sampling parameters, one per row [n], make of logits [n, V]; float64 for float64
    logits, else float32.

    temperature 0 is greedy: all mass on the lowest id of the greatest logit. top_k ≤ 0 keeps all. Among equal logits at
    the edge the lowest ids stay. top_k is applied before top_p. top_p keeps the shortest prefix, in descending order,
    whose mass reaches top_p. A row with NaN, with +inf, or without a finite logit becomes NaN. `filtered=False` is the
    host's word that every row has top_p ≥ 1 and top_k ≤ 0: nothing is sorted.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    greatest, best = logits.max(1, keepdim=True)
    failed = ~greatest.isfinite()
    greedy = (temperature <= 0).unsqueeze(1)
    scale = torch.where(greedy, 1.0, temperature.unsqueeze(1)).to(logits.dtype)
    # A failed row turns into NaN by itself: inf − inf, or NaN − anything; its greatest entry decides for the whole row.
    probs = ((logits - greatest) / scale).exp_()
    if filtered:
        probs = _filter(logits, probs, top_p.unsqueeze(1), top_k.unsqueeze(1))
    probs = probs / probs.sum(1, keepdim=True)
    one_hot = (numbers(logits.shape[1], logits.device) == best).to(logits.dtype)
    return torch.where(greedy, one_hot, probs).masked_fill_(failed, torch.nan)


def _filter(logits: Tensor, probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return `probs`, not normalised, with 0 for tokens that top-k and top-p leave out."""
    vocab = logits.shape[1]
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    ranks = numbers(vocab, logits.device)
    ranked = probs.gather(1, order).masked_fill_(ranks >= torch.where(top_k > 0, top_k, vocab), 0.0)
    mass_before = ranked.cumsum(1) - ranked
    keep = (mass_before < top_p * ranked.sum(1, keepdim=True)) | (top_p >= 1.0) | (ranks == 0)
    return torch.zeros_like(probs).scatter_(1, order, ranked.masked_fill_(~keep, 0.0))


class Matcher(Protocol):
    """The state of one grammar behind one output."""

    def advance(self, tokens: np.ndarray) -> None:
        """Take in int64 [n] tokens that were emitted."""

    def allowed(self, path: list[int]) -> np.ndarray | None:
        """Return bool [V], which tokens may follow the output and `path`; None if the path itself is not allowed."""


MakeMatcher = Callable[[Grammar], Matcher]


class RowShaping:
    """One row: its text as counts, and the state of its grammar."""

    def __init__(self, request: Request, matcher: Matcher | None) -> None:
        self.params = request.sampling
        self._prompt_left = request.prompt.length  # tokens of the prompt that are still to come
        self._matcher = matcher
        self._in_prompt: dict[int, None] = {}
        self._counts: dict[int, int] = {}  # of the output
        # tokens int64 [n] and what is added to their logits, on their device
        self._bias: tuple[Tensor, Tensor] | None = None

    def observe(self, tokens: np.ndarray) -> None:
        """Take in the next tokens of the text."""
        prompt, output = tokens[: self._prompt_left], tokens[self._prompt_left :]
        self._prompt_left -= len(prompt)
        self._in_prompt.update(dict.fromkeys(prompt.tolist()))
        for token in output.tolist():
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._matcher is not None and len(output):
            self._matcher.advance(output)

    def apply(self, logits: Tensor, path: list[int]) -> None:
        """Change logits [V] behind the text and `path`, in place:
        bias, repetition, frequency, presence, grammar, min-p."""
        params = self.params
        if params.logit_bias:
            if self._bias is None:
                tokens, biases = zip(*params.logit_bias, strict=True)
                self._bias = torch.tensor(tokens, device=logits.device), torch.tensor(biases).to(logits)
            logits[self._bias[0]] += self._bias[1]
        if params.has_penalties:
            counts = dict(self._counts)
            for token in path:
                counts[token] = counts.get(token, 0) + 1
            _penalise(logits, params, counts, self._in_prompt)
        if self._matcher is not None:
            allowed = self._matcher.allowed(path)
            if allowed is not None:  # else nothing behind this node is ever accepted
                logits[~torch.from_numpy(allowed).to(logits.device)] = -torch.inf
        if params.min_p > 0 and not params.is_greedy:
            # Probabilities at this temperature are at least min_p times the greatest.
            logits[logits < logits.max() + params.temperature * math.log(params.min_p)] = -torch.inf


def _penalise(logits: Tensor, params: SamplingParams, counts: dict[int, int], in_prompt: dict[int, None]) -> None:
    def numbers(values, dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=logits.device)

    if params.repetition_penalty != 1.0:
        seen = numbers({**in_prompt, **counts}, torch.int64)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if counts and (params.frequency_penalty or params.presence_penalty):
        seen, times = numbers(counts, torch.int64), numbers(counts.values(), logits.dtype)
        logits[seen] -= params.frequency_penalty * times + params.presence_penalty


class Shaping:
    """The rows of an executor that ask for changed logits.
    `make_matcher` None: there is no grammar library or no tokenizer."""

    def __init__(self, make_matcher: MakeMatcher | None = None) -> None:
        self._make_matcher = make_matcher
        self._rows: dict[int, RowShaping] = {}

    def open(self, join: Join) -> str:
        """Begin the row of a request. Returns why it cannot be, empty if it can."""
        self._rows.pop(join.row, None)
        request = join.request
        if not request.sampling.is_shaped:
            return ""
        matcher = None
        if request.sampling.grammar is not None:
            if self._make_matcher is None:
                return "this executor has no grammars: it was built without a tokenizer"
            try:
                matcher = self._make_matcher(request.sampling.grammar)
            except ForedraftError as error:  # of a caller that checks nothing before it submits
                return str(error)
        row = self._rows[join.row] = RowShaping(request, matcher)
        if join.cached_tokens is not None:
            row.observe(join.cached_tokens)
        return ""

    def close(self, row: int) -> None:
        self._rows.pop(row, None)

    def forget(self) -> None:
        self._rows.clear()

    def covers(self, rows: np.ndarray) -> bool:
        return bool(self._rows) and any(row in self._rows for row in rows.tolist())

    def observe(self, row: int, tokens: np.ndarray) -> None:
        """Add the next tokens to the text of a row: tokens of the prompt, and then emitted tokens."""
        if (shaped := self._rows.get(row)) is not None:
            shaped.observe(tokens)

    def after_prompts(self, rows: np.ndarray, logits: Tensor) -> Tensor:
        """Return logits [n, V] at the ends of the rows' prompts, changed."""
        return self._changed(rows, logits, [[[]]] * len(rows))

    def at_nodes(self, rows: np.ndarray, tree: DeviceTree, logits: Tensor) -> Tensor:
        """Return logits [bs · nd, V] at the nodes of the rows' trees, changed.
        Waits for the device: the paths are needed on the host."""
        tokens, parents = (x[: len(rows)].tolist() for x in (tree.tokens, tree.parents))
        return self._changed(rows, logits, [paths_of(*row) for row in zip(tokens, parents, strict=True)])

    def _changed(self, rows: np.ndarray, logits: Tensor, paths: list[list[list[int]]]) -> Tensor:
        logits = logits.clone()
        for i, row in enumerate(rows.tolist()):
            shaped = self._rows.get(row)
            if shaped is not None:
                for node, path in enumerate(paths[i], i * len(paths[i])):
                    shaped.apply(logits[node], path)
        return logits


def paths_of(tokens: list[int], parents: list[int]) -> list[list[int]]:
    """Return the tokens from the root, which is a part of the text already, to each node.
    Parents come before their children."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([] if node == 0 or parent < 0 else [*paths[parent], tokens[node]])
    return paths
