"""A plugin that knows whether it is told the truth: it relays how long the text is, and what its last tokens are.

Between its good drafts it proposes nonsense: ids that are no tokens, and siblings twice.
"""

from __future__ import annotations

import numpy as np
from foredraft.core.algorithm.builtin import LookupDrafting
from foredraft.core.algorithm.ngram import NgramIndex
from foredraft.core.algorithm.proposer import Proposal
from foredraft.core.contract.future_map import RelayField
from foredraft.core.tree.build import trie_of_paths

NO_TOKEN = 1 << 40
TAIL = 3


class NotTheTruth(Exception):
    """The proposer was told something else than what it had said."""


class Witness(LookupDrafting):
    """Drafts like NGRAM. Rounds that saw a relayed value are counted over all proposers, so that a test knows that
    there were some."""

    rounds_witnessed = 0

    def relay_fields(self, shape):
        tail = RelayField("tail", (TAIL,), "float32")
        return (*super().relay_fields(shape), RelayField("text_len", (), "int64"), tail)

    def make_proposer(self, shape):
        return WitnessProposer()


class WitnessProposer:
    def __init__(self):
        self.texts: dict[int, list[int]] = {}

    def open_row(self, row):
        self.texts[row] = []

    def observe(self, row, tokens):
        self.texts[row] += tokens.tolist()

    def first_relay(self, rows):
        texts = [self.texts[row] for row in rows.tolist()]
        return {"text_len": np.array([len(text) for text in texts]), "tail": np.array([tail_of(t) for t in texts])}

    def propose(self, request):
        nodes = request.num_draft_tokens
        paths = []
        for i, row in enumerate(request.rows.tolist()):
            text = self.texts[row]
            before = text[:-1]  # up to the last accepted node; the root came after it
            if request.relayed["text_len"][i] != len(before) or (request.relayed["tail"][i] != tail_of(before)).any():
                found = request.relayed["text_len"][i], request.relayed["tail"][i].tolist()
                raise NotTheTruth(f"row {row}: {found}, where the text is {before}")
            Witness.rounds_witnessed += 1
            index = NgramIndex()
            index.append(text)
            found = [path.tolist() for path in index.draft(nodes, num_branches=max(1, min(request.topk, nodes - 1)))]
            paths.append(spoiled(found, len(text)))
        tokens, parents = trie_of_paths(paths, nodes)
        if nodes > 3:
            tokens[:, -1], parents[:, -1] = tokens[:, 0], parents[:, 0]  # the first draft twice
        text_len = np.zeros((len(paths), nodes), np.int64)
        tails = np.zeros((len(paths), nodes, TAIL), np.float32)
        for i, row in enumerate(request.rows.tolist()):
            texts = [self.texts[row]]
            for token, parent in zip(tokens[i].tolist(), parents[i].tolist(), strict=True):
                texts.append([*texts[max(parent, 0)], token])
            text_len[i] = [len(text) for text in texts]
            tails[i] = [tail_of(text) for text in texts]
        return Proposal(tokens, parents, {"text_len": text_len, "tail": tails})


def tail_of(text: list[int]) -> np.ndarray:
    return np.array(([-1] * TAIL + text)[-TAIL:], np.float32)


def spoiled(paths: list[list[int]], number: int) -> list[list[int]]:
    """Good paths, and now and then one that leads out of the vocabulary, in front of them or between."""
    if number % 3 == 0:
        return [[NO_TOKEN, 1], *paths]
    if number % 3 == 1 and paths and len(paths[0]) > 1:
        return [[paths[0][0], -7, 2], *paths]
    return paths
