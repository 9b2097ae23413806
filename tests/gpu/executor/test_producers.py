"""Outputs of other producers, such as a sparse indexer's choices or a recurrent state, travel like all others: to their own tokens.

The payloads are synthetic: functions of (request, position, token) and of the whole text. A payload at another token is a wrong one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foretoken.checks.driver import Disturbance
from foretoken.core.contract.request import Request, SamplingParams
from foretoken.core.draws import request_key
from foretoken.core.prompt import Prompt
from serving import CONFIG, chain, serve, tree
from torch import Tensor

OUTPUTS = ("indexer_topk", "recurrent_state")
MODULUS = 1_000_003


def choices(key, position, token):
    """What an indexer would choose for a token, [n, 2] of tensors or numbers."""
    first = (key * 7 + position * 31 + token * 3) % 4096
    return torch.stack([first, (first * 5 + position) % 4096], dim=-1).int()


def following(state, token):
    return (state * 31 + token + 7) % MODULUS


class Indexer:
    """Stateless, but for whose row it is."""

    def __init__(self) -> None:
        self.keys = torch.zeros(CONFIG["max_running"] + 1, dtype=torch.int64)

    def open_row(self, join) -> None:
        self.keys[join.row] = request_key(join.request.request_id) % 10_000

    def prompt(self, chunks) -> Tensor:
        part, last = chunks.part, chunks.last
        ends = np.cumsum(part.lens)[last] - 1
        positions = torch.from_numpy((part.starts + part.lens)[last] - 1)
        return choices(self.keys[part.rows[last]], positions, torch.from_numpy(part.tokens[ends].astype(np.int64)))

    def nodes(self, batch, tree) -> Tensor:
        keys = self.keys[batch.rows].repeat_interleave(tree.num_nodes)
        positions = (batch.lengths[:, None] + tree.depths).view(-1)
        return choices(keys, positions, tree.tokens.view(-1))

    def keep(self, batch, values: Tensor) -> None:
        pass


class Recurrence:
    """The state of a row is that of its KV; a node's follows its parent's."""

    def __init__(self) -> None:
        self.states = torch.zeros(CONFIG["max_running"] + 1, dtype=torch.int64)
        self.kept = 0

    def open_row(self, join) -> None:
        self.states[join.row] = 0
        for token in join.cached_tokens.tolist():
            self.states[join.row] = following(self.states[join.row], token)

    def prompt(self, chunks) -> Tensor:
        part = chunks.part
        tokens = iter(part.tokens.tolist())
        for row, length in zip(part.rows.tolist(), part.lens.tolist(), strict=True):
            for _ in range(length):
                self.states[row] = following(self.states[row], next(tokens))
        return self.states[part.rows[chunks.last]].clone()

    def nodes(self, batch, tree) -> Tensor:
        states = torch.zeros_like(tree.tokens)
        rows = torch.arange(tree.batch_size)
        for node in range(tree.num_nodes):
            parents = tree.parents[:, node].long()
            before = self.states[batch.rows] if node == 0 else states[rows, parents.clamp(min=0)]
            states[:, node] = following(before, tree.tokens[:, node])
        return states.view(-1)

    def keep(self, batch, values: Tensor) -> None:
        self.states[batch.rows] = values
        self.kept += 1


def expected(request: Request, tokens: list[int]) -> dict[str, np.ndarray]:
    """The payloads of `tokens`: each belongs to the token before it."""
    prompt = request.prompt.materialize().tolist()
    text, state, states = prompt + tokens[:-1], 0, []
    for token in text:
        state = following(state, token)
        states.append(state)
    n = len(prompt) - 1
    key = torch.tensor(request_key(request.request_id) % 10_000)
    found = choices(key.expand(len(text)), torch.arange(len(text)), torch.tensor(text))
    return {"indexer_topk": found[n:].numpy(), "recurrent_state": np.array(states[n:])}


WAYS = {
    "chain": chain("STANDALONE", 3, prefix_cache=True),
    "tree": tree("STANDALONE", 3, 4, 12, page_size=4, num_pages=120),
    "EAGLE tree, overlap": tree("EAGLE", 2, 5, 9, overlap=True),
    "one at a time": chain("STANDALONE", 0, overlap=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_a_payload_stays_with_its_token(way, temperature):
    """After compaction, in batches that change, and where a retraction computes a text again."""
    requests = [
        Request(
            f"r{i}",
            Prompt.of_tokens([(5 * i + j * j) % 24 for j in range(3 + 4 * i)]),
            18,
            outputs=OUTPUTS if i % 3 else OUTPUTS[i % 2 :],
            sampling=SamplingParams(temperature, seed=i + 1),
        )
        for i in range(6)
    ]
    producers = {"indexer_topk": Indexer(), "recurrent_state": Recurrence()}
    run = serve(WAYS[way], requests, producers=producers, disturbance=Disturbance(submit=50, retract=6))
    assert run.retractions > 1 and producers["recurrent_state"].kept > 10
    for request in requests:
        end = run.finished[request.request_id]
        wanted = expected(request, end.tokens.tolist())
        assert set(end.outputs) == set(request.outputs)
        for name in request.outputs:
            assert np.array_equal(np.stack(end.outputs[name]), wanted[name]), (request.request_id, name)


def test_what_no_producer_makes_is_named():
    run = serve(WAYS["chain"], [Request("r", Prompt.of_tokens([1, 2]), 4, outputs=("indexer_topk",))])
    assert "no output 'indexer_topk'" in run.finished["r"].message
