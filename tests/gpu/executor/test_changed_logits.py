"""The tables that change logits, over the life of rows, against the parameters' definitions over whole texts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.contract.step import Join
from foredraft.core.prompt import Prompt
from foredraft.gpu.executor.shaping import Changed, Shaping, paths_of
from foredraft.gpu.ops.torch_ops import TorchOps
from serving import chain, serve
from serving_matrix import VOCAB_SIZE
from shaped import TOY, ToyMatcher, held_ends, permitted, shaped
from tree_cases import on_device
from tree_cases import random_tree as tree_of_kind

OPS, ROWS = TorchOps(), 4


@dataclass
class Row:
    """What a row's text is, for the definitions."""

    request: Request
    output: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt.materialize().tolist()


def random_request(rng: np.random.Generator, name: str) -> Request:
    def some(value):
        return value if rng.random() < 0.5 else 0.0

    bias = tuple((int(token), float(rng.choice([1.5, -2.25, 4.0]))) for token in rng.permutation(VOCAB_SIZE)[:3])
    sampling = SamplingParams(
        temperature=some(0.7),
        min_p=some(0.05),
        presence_penalty=some(0.37),
        frequency_penalty=some(-0.21),
        repetition_penalty=some(1.37) or 1.0,
        logit_bias=bias if rng.random() < 0.5 else (),
        grammar=TOY if rng.random() < 0.4 else None,
    )
    prompt = Prompt.of_tokens(rng.integers(0, VOCAB_SIZE, rng.integers(1, 9)))
    min_tokens = int(rng.integers(0, 20)) if sampling.grammar is None else 0
    ends = tuple(rng.permutation(VOCAB_SIZE)[:2].tolist())
    return Request(name, prompt, 1000, sampling=sampling, stop_tokens=ends, min_tokens=min_tokens)


class Texts:
    """Rows of requests that begin, emit, are retracted and end, in `Shaping` and for the definitions."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.shaping = Shaping(ROWS, VOCAB_SIZE, torch.device("cpu"), lambda grammar: ToyMatcher(VOCAB_SIZE))
        self.rows: dict[int, Row] = {}
        self.waiting: list[Row] = []

    def change_rows(self) -> None:
        """End, retract, or begin one row, with a part of its text from a cache and the rest in chunks."""
        row = int(self.rng.integers(1, ROWS + 1))
        if row in self.rows:
            before = self.rows.pop(row)
            self.shaping.close(row)
            if self.rng.random() < 0.6:
                self.waiting.append(before)
            return
        new = Row(random_request(self.rng, str(self.rng.random())))
        self.rows[row] = begun = self.waiting.pop() if self.waiting else new
        text = np.array(begun.prompt + begun.output, np.int64)
        cached, chunk = (int(self.rng.integers(0, len(text))) for _ in range(2))
        join = Join(row, 1, begun.request, 1000, len(begun.output), cached, text[:cached] if cached else None)
        assert not self.shaping.open(join)
        for begin in range(cached, len(text), chunk + 1):
            self.shaping.observe(row, text[begin : begin + chunk + 1])
        if not begun.output:  # a grammar and the definitions look at what is behind the prompt
            self.emit(np.array([row]), torch.tensor([[int(self.rng.integers(VOCAB_SIZE))]]), torch.ones(1))

    def emit(self, rows: np.ndarray, tokens: torch.Tensor, lens: torch.Tensor) -> None:
        OPS.count_tokens_(self.shaping.tables.seen, torch.from_numpy(rows), tokens, lens.int())
        for row, run, count in zip(rows.tolist(), tokens.tolist(), lens.int().tolist(), strict=True):
            self.shaping.emitted(row, np.array(run[:count]))
            self.rows[row].output += run[:count]


@pytest.mark.parametrize("kind", ["chain", "beam", "lookup"])
@pytest.mark.parametrize("seed", range(3))
def test_every_node_gets_the_logits_of_its_text_to_the_last_bit(kind, seed):
    """Random requests, trees and retractions, in float64."""
    texts, seen = Texts(seed), set()
    for _ in range(60):
        texts.change_rows()
        rows = np.array(sorted(texts.rows), np.int64)
        if not len(rows):
            continue
        tree = on_device(tree_of_kind(texts.rng, len(rows), kind))
        nodes = tree.num_nodes
        logits = torch.from_numpy(texts.rng.normal(size=(len(rows) * nodes, VOCAB_SIZE)) * 3)
        changes = texts.shaping.changes(rows, tree)
        seen.add(texts.shaping.changed(rows))
        assert (changes is None) == (texts.shaping.changed(rows) is Changed.NOWHERE)
        if changes is None:
            continue
        found = OPS.shape_logits(logits, torch.from_numpy(rows), changes.tables, tree, changes.masks)
        for i, row in enumerate(rows.tolist()):
            text = texts.rows[row]
            paths = paths_of(tree.tokens[i].tolist(), tree.parents[i].tolist())
            for node, path in enumerate(paths, i * nodes):
                is_padding = node > i * nodes and not path
                if is_padding or not all(0 <= token < VOCAB_SIZE for token in path):
                    continue  # nothing behind such a token is ever accepted
                if text.request.sampling.grammar is not None and not follows(text.output, path):
                    continue
                asked = text.request.sampling
                held = held_ends(text.request, len(text.output) + len(path))
                expected = shaped(logits[node].numpy(), text.prompt, [*text.output, *path], asked, held)
                assert found[node].tolist() == expected.tolist(), (asked, path)
        lens = torch.from_numpy(texts.rng.integers(1, 4, len(rows)))
        texts.emit(rows, torch.from_numpy(texts.rng.integers(0, VOCAB_SIZE, (len(rows), 3))), lens)
    assert seen >= {Changed.ON_DEVICE, Changed.WITH_MASKS}


def follows(output: list[int], path: list[int]) -> bool:
    return all(permitted([*output, *path[:i]], VOCAB_SIZE)[token] for i, token in enumerate(path))


@pytest.mark.parametrize("grammar", [None, TOY])
def test_penalties_let_the_next_step_begin_and_grammars_wait(grammar):
    """With penalties a launched step begins behind another that has not been read; a grammar needs its tokens."""
    begun = []

    def watch(executor):
        executor._eager = True
        enqueue = executor._rounds.enqueue

        def counting(*arguments):
            begun.append(sum(running.pending is not None for running in executor._queue))
            return enqueue(*arguments)

        executor._rounds.enqueue = counting

    asked = SamplingParams(presence_penalty=0.4, repetition_penalty=1.2, grammar=grammar)
    requests = [Request("r", Prompt.of_tokens([3, 5, 8]), 20, sampling=asked)]
    way = chain("STANDALONE", 3, overlap=True, multi_step_rounds=1)
    run = serve(way, requests, make_matcher=lambda grammar: ToyMatcher(VOCAB_SIZE), before=watch)
    assert len(run.tokens["r"]) == 20
    assert max(begun) == (1 if grammar is None else 0)


def test_a_row_that_asks_for_nothing_keeps_its_logits_beside_others():
    texts = Texts(5)
    texts.rows[1] = Row(replace(random_request(texts.rng, "shaped"), sampling=SamplingParams(repetition_penalty=2.0)))
    assert not texts.shaping.open(Join(1, 1, texts.rows[1].request, 1000, 0, 2, np.array([3, 4])))
    logits = torch.randn(2, VOCAB_SIZE, dtype=torch.float64)
    rows = np.array([1, 2])
    found = OPS.shape_logits(logits, torch.from_numpy(rows), texts.shaping.changes(rows).tables)
    assert torch.equal(found[1], logits[1]) and not torch.equal(found[0], logits[0])
    texts.shaping.close(1)
    assert texts.shaping.changes(rows) is None and texts.shaping.tables.params[1].tolist()[:4] == [1.0, 0.0, 0.0, 0.0]
