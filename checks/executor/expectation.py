"""What a toy draft and a toy target make of every round, token by token: the run that must be emitted, and no draft less.

A defect of drafting loses no token: verification repairs it, and only the accept lengths get smaller. So they are recomputed, from the
texts alone, by searches that look at one path at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np

from ...core.algorithm.algorithm import Drafter, SpecAlgorithm
from ...core.contract.step import Step, StepResult
from ...properties.reference import HashDraft
from ...properties.reference.language_model import extend_hash, namespace_salt, prefix_hashes

Path = tuple[int, ...]
MAX_MATCH, MAX_EXAMINED = 8, 32
"""Of look-up drafting: the longest suffix that is looked for, and how many occurrences are looked at for each branch."""


class Expectation:
    """Follows the rows of one executor. `collect` compares each result with what must be."""

    def __init__(self, algorithm: SpecAlgorithm, draft: HashDraft) -> None:
        self.algorithm = algorithm
        self.draft = draft
        self.texts: dict[int, list[int]] = {}  # by row: prompt and output, the last token without KV
        self._hashes: dict[Path, int] = {}
        self._steps: deque[Step] = deque()

    def launch(self, step: Step) -> None:
        """Keep a step as it was launched, because the executor may write into its arrays."""
        self._steps.append(replace(step, prefill=deepcopy(step.prefill), decode=deepcopy(step.decode)))

    def collect(self, result: StepResult, ended: set[int]) -> tuple[str, str] | None:
        """Return what the result of the oldest step says and what it should, None if it is right. `ended` are the rows that had ended."""
        step = self._steps.popleft()
        for join in step.joins:
            self.texts[join.row] = [] if join.cached_tokens is None else join.cached_tokens.tolist()
        failed = {row for row, _ in result.failures}
        if step.prefill is not None:
            self._prefill(step, result)
        part, decoded = step.decode, result.decode
        if part is not None:
            bounds = zip(part.rows.tolist(), part.seq_lens.tolist(), part.max_seq_lens.tolist(), strict=True)
            for row, least, most in bounds:
                length = len(self.texts[row]) - 1
                if row not in ended and row not in failed and not least <= length <= most:
                    return f"the step begins row {row} at {least} … {most}", f"at {length}: so many positions have KV"
        for number in range(decoded.rounds if part is not None else 0):
            for column, row in enumerate(part.rows.tolist()):
                if row in ended or row in failed:
                    continue
                run = decoded.tokens[number, column, : decoded.accept_lens[number, column]].tolist()
                text = self.texts[row]
                should = self.run(tuple(text), part.steps, part.topk, part.num_draft_tokens)
                if run != should:
                    was = f"row {row} emits {run} in round {number + 1}, with S = {part.steps}, k = {part.topk}"
                    return was, f"{should}: what the draft proposes and the target says"
                text += run
        return None

    def _prefill(self, step: Step, result: StepResult) -> None:
        part, at = step.prefill, 0
        columns = (part.rows.tolist(), part.lens.tolist(), part.is_last.tolist(), result.prefill.tokens.tolist())
        for row, length, is_last, token in zip(*columns, strict=True):
            self.texts[row] += part.tokens[at : at + length].tolist()
            at += length
            if is_last:
                self.texts[row].append(token)

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
        """Return the best nodes of a beam search: k per step are followed, the best of all steps are kept."""
        beam: list[tuple[np.float32, Path]] = [(np.float32(1.0), ())]
        candidates: list[tuple[np.float32, Path]] = []
        for level in range(steps):
            head = level if self.algorithm.drafter is Drafter.HEADS else 0
            found: list[tuple[np.float32, Path]] = []
            for score, path in beam:
                whole = text + path
                hashes = np.array([self.hash(whole)], np.uint64)
                tokens, shares = self.draft.top_k(hashes, np.array(whole[-1:]), topk, head)
                found += [
                    (score * share, (*path, int(token))) for token, share in zip(tokens[0], shares[0], strict=True)
                ]
            candidates += found
            beam = sorted(found, key=lambda item: -item[0])[:topk]
        return {path for _, path in sorted(candidates, key=lambda item: -item[0])[: num_nodes - 1]}


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
