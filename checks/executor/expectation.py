"""What a toy draft and a toy target make of every round, token by token: the run that must be emitted, and no draft less.

A defect of drafting loses no token: verification repairs it, and only the accept lengths get smaller. So they are recomputed, from the
texts alone, by searches that look at one path at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.algorithm.algorithm import Drafter, SpecAlgorithm
from ...properties.accept.expected import best_nodes
from ...properties.reference import HashDraft
from ...properties.reference.language_model import extend_hash, namespace_salt, prefix_hashes
from .judge import Served, Wrong

Path = tuple[int, ...]
MAX_MATCH, MAX_EXAMINED = 8, 32
"""Of look-up drafting: the longest suffix that is looked for, and how many occurrences are looked at for each branch."""


class ToyJudge:
    """Judges the runs of an executor whose draft and target are the suite's, as `Judge` does for a model of the executor's own."""

    def __init__(self, algorithm: SpecAlgorithm, draft: HashDraft) -> None:
        self.algorithm = algorithm
        self.draft = draft
        self._hashes: dict[Path, int] = {}

    def first_token(self, row: Served, token: int, shown: Mapping[str, Any], what: str) -> None:
        should = self.target(tuple(row.text))
        if token != should:
            raise Wrong(f"{what} is {token}", f"{should}: what the target says")

    def round(
        self, row: Served, run: Sequence[int], tree: tuple[int, int, int], shown: Mapping[str, Any], what: str
    ) -> None:
        """Compare what a round with a tree of these steps, top-k and nodes emitted behind the row's text."""
        should = self.run(tuple(row.text), *tree)
        if run != should:
            was = f"{what} emits {run}, with S = {tree[0]}, k = {tree[1]}"
            raise Wrong(was, f"{should}: what the draft proposes and the target says")

    # -- one round ----------------------------------------------------------------------------------------------------

    def run(self, text: Path, steps: int, topk: int, num_nodes: int) -> list[int]:
        """Return what a round emits after a text: the target's tokens for as long as they are nodes of the tree, and one more."""
        if num_nodes == 1 or self.algorithm.drafter is Drafter.NONE:
            nodes: set[Path] = set()
        elif self.algorithm.drafter is Drafter.LOOKUP:
            nodes = looked_up(text, num_nodes, max(1, min(topk, num_nodes - 1)))
        else:
            nodes = self.drafted(text, steps, topk, num_nodes)
        run: list[int] = []
        while not run or tuple(run) in nodes:
            run.append(self.target(text + tuple(run)))
        return run

    def hash(self, text: Path) -> int:
        """Return the hash of a text."""
        found = self._hashes.get(text)
        if found is None:
            before = self._hashes.get(text[:-1])
            if before is None:
                found = int(prefix_hashes(namespace_salt(""), text)[-1])
            else:
                found = int(extend_hash(before, text[-1]))
            self._hashes[text] = found
        return found

    def target(self, text: Path) -> int:
        """Return the target's token after a text."""
        logits = self.draft.target.logits(np.array([self.hash(text)], np.uint64), np.array(text[-1:]))
        return int(logits[0].argmax())

    def drafted(self, text: Path, steps: int, topk: int, num_nodes: int) -> set[Path]:
        """Return the nodes of the draft's tree behind a text."""

        def after(level: int, path: Path) -> list[tuple[int, np.float32]]:
            whole, head = text + path, level if self.algorithm.drafter is Drafter.HEADS else 0
            hashes = np.array([self.hash(whole)], np.uint64)
            tokens, shares = self.draft.top_k(hashes, np.array(whole[-1:]), topk, head)
            return list(zip(tokens[0].tolist(), shares[0], strict=True))

        return best_nodes(after, steps, topk, num_nodes)


def looked_up(text: Sequence[int], num_nodes: int, num_branches: int) -> set[Path]:
    """Return what followed the last tokens of a text where they occurred before: the longest match first, then the most recent.

    The branches share the nodes equally; what common beginnings save extends the best of them."""
    size, budget = len(text), num_nodes - 1
    found = []
    for end in range(1, size):
        length = 0
        while length < min(MAX_MATCH, end) and text[end - 1 - length] == text[size - 1 - length]:
            length += 1
        if length:
            found.append((-length, -end))
    paths: list[Path] = []
    share = max(1, budget // num_branches)
    for _, minus_end in sorted(found)[: MAX_EXAMINED * num_branches]:
        period = size + minus_end
        path = tuple(text[at % period - minus_end] for at in range(budget))
        if path[:share] not in [other[:share] for other in paths] and len(paths) < min(num_branches, budget):
            paths.append(path)
    if not paths:
        return set()
    lengths = [budget // len(paths)] * len(paths)
    nodes = {path[:depth] for path, length in zip(paths, lengths, strict=True) for depth in range(1, length + 1)}
    for path, length in zip(paths, lengths, strict=True):
        depth = length + 1
        while depth <= budget and (path[:depth] in nodes or len(nodes) < budget):
            nodes.add(path[:depth])
            depth += 1
    return nodes
