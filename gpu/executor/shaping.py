"""Changes of the target's logits: biases, penalties, min-p, grammars and ends that are held back, at every node of a
verify tree.

    row's text    prompt · output … root │ node ─ node        what changes a node's logits: the text up to the node,
                  counted on the device  └ node ─ node        as if its path had been emitted already

So a node gets the distribution that plain decoding would have there, and verification stays lossless: what a grammar
forbids has probability 0 and is never accepted. The tokens of a text are counted on the device, by the round that emits
them, so penalties need no host. A grammar does: it needs the tokens of the round before and the drafts of this one,
between the target's pass and the choice of tokens, so a captured round of such rows is two graphs. An end that is held
back (`min_tokens`) is masked in the same way, until enough tokens have been emitted. The logits of rows that ask for
none of this do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...core.contract.request import Grammar, Request, SamplingParams
from ...core.contract.step import Join
from ...core.errors import ForedraftError
from ..batch.uploads import layout, upload, uploads_to, views
from ..kernels.jit import cdiv
from ..kernels.rounds.shape_logits import NEUTRAL
from ..types.ops import DeviceTree, LogitTables, NodeMasks


class Changed(StrEnum):
    """Who changes the logits of a round's rows: nothing does, the device by what it has counted, or the device with
    masks that the host makes between the target's pass and the choice of tokens."""

    NOWHERE = "nowhere"
    ON_DEVICE = "on the device"
    WITH_MASKS = "with masks"


@dataclass(frozen=True, slots=True)
class Changes:
    """How a batch changes its logits before a token is chosen, and where it counts what it emits."""

    tables: LogitTables
    masks: NodeMasks | None = None


class Matcher(Protocol):
    """The state of what masks tokens behind one output: of a grammar, or of an end that is held back."""

    @property
    def is_over(self) -> bool:
        """Whether it masks nothing any more."""

    @property
    def problem(self) -> str:
        """Why it can make no mask any more; empty if it can."""

    def advance(self, tokens: np.ndarray) -> None:
        """Take in int64 [n] tokens that were emitted."""

    def allowed(self, path: list[int]) -> np.ndarray | None:
        """Return a bit for each token that may follow the output and `path`, uint8 [⌈V / 8⌉ or more], the lowest bit
        first; None if all may, or if the path itself is not allowed."""


class HeldEnds:
    """The mask of an output that may not end yet, as `Matcher`: no stop token behind fewer than `min_tokens` tokens."""

    problem: str = ""

    def __init__(self, request: Request, vocab_size: int) -> None:
        self._left = request.min_tokens  # tokens until an end may come
        is_open = np.ones(vocab_size, bool)
        is_open[[token for token in request.stop_tokens if token < vocab_size]] = False
        self._open = np.packbits(is_open, bitorder="little")

    @property
    def is_over(self) -> bool:
        """Whether nothing is masked any more."""
        return self._left <= 0

    def advance(self, tokens: np.ndarray) -> None:
        self._left -= len(tokens)

    def allowed(self, path: list[int]) -> np.ndarray | None:
        return self._open if len(path) < self._left else None


MakeMatcher = Callable[[Grammar], Matcher]


class RowShaping:
    """One row: how much of its prompt is still to come, and the state of its grammar."""

    def __init__(self, request: Request, matcher: Matcher | None) -> None:
        self.has_penalties: bool = request.sampling.has_penalties
        self.matcher = matcher
        self._prompt_left = request.prompt.length

    def split(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the parts of the next tokens of the text that belong to the prompt and to the output."""
        prompt, output = tokens[: self._prompt_left], tokens[self._prompt_left :]
        self._prompt_left -= len(prompt)
        return prompt, output

    def emitted(self, tokens: np.ndarray) -> None:
        if self.matcher is not None and len(tokens):
            self.matcher.advance(tokens)
            if self.matcher.is_over:
                self.matcher = None


class Shaping:
    """The rows of an executor that ask for changed logits, and the tables of all `num_rows` rows on `device`, which are
    allocated for the first of them. `make_matcher` None: there is no grammar library or no tokenizer."""

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, make_matcher: MakeMatcher | None = None
    ) -> None:
        self._num_rows, self._vocab_size, self._device = num_rows, vocab_size, device
        self._make_matcher = make_matcher
        self._rows: dict[int, RowShaping] = {}

    @cached_property
    def tables(self) -> LogitTables:
        shape = (self._num_rows + 1, self._vocab_size)
        return LogitTables(
            seen=torch.zeros(shape, dtype=torch.int32, device=self._device),
            bias=torch.zeros(shape, dtype=torch.float32, device=self._device),
            params=torch.tensor(NEUTRAL, dtype=torch.float64, device=self._device).repeat(self._num_rows + 1, 1),
        )

    @property
    def mask_words(self) -> int:
        """The words of a node's mask."""
        return cdiv(self._vocab_size, 32)

    def open(self, join: Join) -> str:
        """Begin the row of a request. Returns why it cannot be, empty if it can."""
        self.close(join.row)
        request = join.request
        if not request.sampling.is_shaped and not request.holds_ends:
            return ""
        matcher: Matcher | None = HeldEnds(request, self._vocab_size) if request.holds_ends else None
        if request.sampling.grammar is not None:
            if self._make_matcher is None:
                return "this executor has no grammars: it was built without a tokenizer"
            try:
                matcher = self._make_matcher(request.sampling.grammar)
            except ForedraftError as error:  # of a caller that checks nothing before it submits
                return str(error)
        self._rows[join.row] = RowShaping(request, matcher)
        self._write(join.row, request.sampling)
        if join.cached_tokens is not None:
            self.observe(join.row, join.cached_tokens)
        return ""

    def _write(self, row: int, params: SamplingParams) -> None:
        """Write the parameters of a row that begins, and forget the text of the row before."""
        tables = self.tables
        cut = -math.inf
        if params.min_p > 0 and not params.is_greedy:
            # Probabilities at this temperature are at least min_p times the greatest.
            cut = params.temperature * math.log(params.min_p)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        arrays = (
            np.array([*penalties, bool(params.logit_bias), cut], np.float64),
            np.array([token for token, _ in params.logit_bias], np.int64),
            np.array([bias for _, bias in params.logit_bias], np.float32),
        )
        written, biased, values = uploads_to(self._device).send(*arrays)
        tables.params[row] = written
        tables.seen[row].zero_()
        if params.logit_bias:
            tables.bias[row].zero_().index_copy_(0, biased, values)

    def close(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self.tables.params[row] = self.tables.params[0]

    def forget(self) -> None:
        for row in list(self._rows):
            self.close(row)

    def changed(self, rows: np.ndarray) -> Changed:
        """Return who changes the logits of a batch of these rows."""
        shaped = [self._rows[row] for row in rows.tolist() if row in self._rows] if self._rows else []
        if not shaped:
            return Changed.NOWHERE
        return Changed.WITH_MASKS if any(row.matcher is not None for row in shaped) else Changed.ON_DEVICE

    def problems(self, rows: np.ndarray) -> dict[int, str]:
        """Return why rows among these cannot be masked any more, by their places in `rows`."""
        if not self._rows:
            return {}
        matchers = {i: self._rows[row].matcher for i, row in enumerate(rows.tolist()) if row in self._rows}
        return {i: matcher.problem for i, matcher in matchers.items() if matcher is not None and matcher.problem}

    def observe(self, row: int, tokens: np.ndarray) -> None:
        """Add the next tokens to the text of a row: tokens of the prompt, and then of the output."""
        if (shaped := self._rows.get(row)) is None:
            return
        prompt, output = shaped.split(tokens)
        if shaped.has_penalties and len(tokens):
            seen = self.tables.seen[row]
            text = upload(self._device, tokens.astype(np.int64))
            seen.index_fill_(0, text[: len(prompt)], 1)
            twice = torch.full((len(output),), 2, dtype=seen.dtype, device=seen.device)
            seen.index_add_(0, text[len(prompt) :], twice)
        shaped.emitted(output)

    def emitted(self, row: int, tokens: np.ndarray) -> None:
        """Pass tokens that a round has emitted, and the device has counted, to the grammar of a row."""
        if (shaped := self._rows.get(row)) is not None:
            shaped.emitted(tokens)

    def changes(self, rows: np.ndarray, tree: DeviceTree | None = None) -> Changes | None:
        """Return the changes for a batch of these rows, None if there are none; see `masks` for the tree."""
        changed = self.changed(rows)
        if changed is Changed.NOWHERE:
            return None
        masks = None
        if changed is Changed.WITH_MASKS:
            masks = NodeMasks(*uploads_to(self._device).send(*self.masks(rows, tree)))
        return Changes(self.tables, masks)

    def masks(self, rows: np.ndarray, tree: DeviceTree | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return what `NodeMasks` is made of, index int32 [n] and bits int32 [m, words], for the nodes of the rows'
        trees; rows of the tree beyond `rows` are padding. Without a tree there is a node for each row.

        Waits for the device: a grammar needs the drafted tokens.
        """
        batch_size, nodes = (len(rows), 1) if tree is None else tree.tokens.shape
        index = np.full(batch_size * nodes, -1, np.int32)
        found: list[np.ndarray] = []
        trees = None if tree is None else torch.stack((tree.tokens, tree.parents.long()))[:, : len(rows)].tolist()
        for i, row in enumerate(rows.tolist()):
            matcher = self._rows[row].matcher if row in self._rows else None
            if matcher is not None:
                paths = [[]] if trees is None else paths_of(trees[0][i], trees[1][i])
                for node, path in enumerate(paths, i * nodes):
                    allowed = matcher.allowed(path)
                    if allowed is None:  # nothing is masked, or nothing behind this node is ever accepted
                        continue
                    if not found or found[-1] is not allowed:
                        found.append(allowed)
                    index[node] = len(found) - 1
        bits = np.zeros((len(found), 4 * self.mask_words), np.uint8)
        for mask, allowed in zip(bits, found, strict=True):
            mask[: len(allowed)] = allowed[: len(mask)]
        return index, bits.view(np.int32)


class MaskPlace:
    """The masks of `nodes` nodes in device memory that a graph reads: the first part of `memory`, uint8 [`size` or
    more]. They come with one copy."""

    def __init__(self, nodes: int, words: int, memory: Tensor) -> None:
        arrays = [np.zeros(nodes, np.int32), np.zeros((nodes, words), np.int32)]
        self._memory = memory
        self.masks: NodeMasks = NodeMasks(*views(memory, arrays, layout(arrays)[0]))

    @staticmethod
    def size(nodes: int, words: int) -> int:
        """Return how many bytes the masks of so many nodes need."""
        return layout([np.zeros(nodes, np.int32), np.zeros((nodes, words), np.int32)])[1]

    def fill(self, index: np.ndarray, bits: np.ndarray) -> None:
        """Send what `Shaping.masks` has made."""
        arrays = [index, bits]
        uploads_to(self._memory.device).fill(self._memory[: layout(arrays)[1]], arrays)


def paths_of(tokens: list[int], parents: list[int]) -> list[list[int]]:
    """Return the tokens from the root, which is a part of the text already, to each node.
    Parents come before their children."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([] if node == 0 or parent < 0 else [*paths[parent], tokens[node]])
    return paths
