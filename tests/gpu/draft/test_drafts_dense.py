"""What drafts propose is what the same network drafts from the row's whole text without any KV pool.

Greedy output cannot show it: the target corrects every wrong draft. Here each proposal, and each value that is relayed
to it, is compared with `dense_drafting`; so draft KV of every accepted position, KV and hidden states that follow their
branch, duplicated page tails, chunk ends, cached prefixes and carried hidden states must be right to the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from cells import MatrixCell
from foredraft.checks.adapters.dense_drafting import (
    DenseHead,
    DenseModel,
    DenseProposal,
    DenseRelay,
    Shape,
    best,
    captured_states,
    dense_masked,
    dense_tree,
)
from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.core.algorithm.ngram import NgramIndex
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.request import SamplingParams
from foredraft.core.scheduler.engine import Engine
from foredraft.core.tree.build import (
    Candidates,
    VerifyTree,
    build_chain,
    build_lookup_tree,
    build_tree,
    expand_topk,
    first_candidates,
)
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.executor.parts import DraftModel, ExecutorOptions
from foredraft.gpu.kernels.rounds.window import window_torch
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.eagle import MultiLayerEagleHeads
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.tiny.dense import DenseAttention
from foredraft.gpu.types.ops import DeviceTree
from hostile_driver import Dice, Disturbance, HostileDriver
from matrix_cells import count_retractions, draft_of, small_head, small_model
from serving_matrix import config_of, controller_of, requests_of
from torch import Tensor


def looked_up(text: list[int], shape: Shape) -> VerifyTree:
    """Return what earlier occurrences in the whole text propose, output before a retraction included."""
    index = NgramIndex()
    index.append(np.array(text))
    branches = max(1, min(shape.topk, shape.num_draft_tokens - 1))
    paths = [] if shape.steps == 0 else index.draft(shape.num_draft_tokens, num_branches=branches)
    return build_lookup_tree(
        np.array(text[-1:]), [list(paths)], np.array([len(text) - 1]), shape.num_draft_tokens, shape.max_position
    )


def exactly_relayed(name: str):
    """The algorithm, relaying hidden states in float64: the comparison is then one of equals.
    (It is a plugin, so to say.)"""
    built_in = type(get_algorithm(name))

    class Exact(built_in):
        def relay_fields(self, shape):
            fields = super().relay_fields(shape)
            return tuple(replace(f, dtype="float64") if f.name == "hidden_states" else f for f in fields)

    return Exact()


def dense_heads(
    heads: MultiLayerEagleHeads, target: Decoder, text: list[int], begins: np.ndarray, relayed_topk: int
) -> DenseRelay:
    """Multi-layer EAGLE, head after head. `begins` bool [n]:
    nothing was known of the slot before, as at the start of a text."""
    hidden = heads.prepare_hidden(captured_states(target, text[:-1], heads.aux_layers))
    tokens = torch.tensor(text[1:])
    n = len(tokens)
    found, carried = [], []
    for head in range(heads.num_heads):
        if head:
            hidden = torch.cat([torch.zeros_like(hidden[:1]), hidden])
            hidden[:n][torch.from_numpy(begins)] = 0
            tokens = torch.cat([tokens, torch.tensor(found[-1][0][:1])])
        out = heads.forward(tokens, hidden, DenseAttention([len(tokens)]), head)
        hidden = out.hidden
        carried.append(hidden[n - 1])
        found.append(best(heads.logits(out.logits_hidden[-1:])[0], relayed_topk))
    carry = torch.cat(carried[:-1]).numpy() if len(carried) > 1 else np.zeros(heads.hidden_size)
    return DenseRelay(np.concatenate([ids for ids, _ in found]), np.concatenate([p for _, p in found]), carry)


def heads_tree(relay: DenseRelay, text: list[int], shape: Shape, relayed_topk: int) -> DenseProposal:
    """A head knows no branch: all branches of a step go on with the same candidates."""
    root, lengths, k = np.array(text[-1:]), np.array([len(text) - 1]), shape.topk
    ids = relay.topk_ids.reshape(-1, relayed_topk)[: shape.steps, :k]
    probabilities = relay.topk_probabilities.reshape(-1, relayed_topk)[: shape.steps, :k]
    if shape.steps == 0 or k == 1:
        return DenseProposal(relay, [], build_chain(root, ids[:, :1].T, lengths, shape.max_position))
    level, beam = first_candidates(ids[:1], probabilities[:1])
    levels = [level]
    for step in range(1, shape.steps):
        again = (np.broadcast_to(x[step], (1, k, k)) for x in (ids, probabilities))
        level, beam = expand_topk(beam, *again)
        levels.append(level)
    return DenseProposal(relay, levels, build_tree(root, levels, lengths, shape.num_draft_tokens, shape.max_position))


class RecordingOps(TorchOps):
    """Keeps what the last tree was built from."""

    candidates: tuple[Tensor, ...] = ()

    def build_tree(self, roots, candidates, *rest) -> DeviceTree:
        self.candidates = (candidates.tokens, candidates.scores, candidates.parents)
        return super().build_tree(roots, candidates, *rest)


class Watched:
    """Stands before an executor's draft, knows each row's text, and compares every proposal."""

    def __init__(self, executor, ops: RecordingOps, target, draft_model, relayed_topk: int, by_hand) -> None:
        self._draft, self._ops, self._by_hand = executor.draft, ops, by_hand
        self._at_once = executor.algorithm.in_one_pass
        self._target, self._model, self._topk = target, draft_model, relayed_topk
        self._is_heads = isinstance(draft_model, MultiLayerEagleHeads)
        if draft_model is not None and not self._is_heads and by_hand is None:
            is_head = self._draft.wants_hidden
            self._drafter = DenseHead(draft_model, target) if is_head else DenseModel(draft_model)
        self._texts: dict[int, list[int]] = {}
        self._begin_of: dict[int, int] = {}
        self._begins = np.zeros(executor.pool.num_slots, bool)
        self.proposals = self.nodes = self.cached = self.partly = self.fully = 0
        for name in ("open_row", "prefill", "propose", "catch_up"):
            self._wrap(name, getattr(self, name), getattr(self._draft, name))

    def _wrap(self, name, watch, real) -> None:
        def watched(*arguments):
            answer = real(*arguments)
            watch(*arguments, answer)
            return answer

        setattr(self._draft, name, watched)

    def open_row(self, row, cached, _) -> None:
        self._texts[row] = cached.tolist()
        self._begin_of[row] = len(cached)
        self.cached += len(cached) > 0

    def prefill(self, chunks, captured, sampled, _) -> None:
        part = chunks.part
        rows = np.repeat(part.rows, part.lens)
        first = np.repeat(np.cumsum(part.lens) - part.lens, part.lens)
        positions = np.repeat(part.starts, part.lens) + np.arange(len(rows)) - first
        at_begin = positions == np.array([self._begin_of[row] for row in rows.tolist()])
        self._begins[chunks.slots.numpy()] = at_begin
        for row, token in zip(rows.tolist(), part.tokens.tolist(), strict=True):
            self._texts[row].append(token)
        for row, token in zip(part.rows[chunks.last].tolist(), sampled.tolist(), strict=True):
            self._texts[row].append(token)

    def propose(self, batch, relayed, tree) -> None:
        shape = Shape(batch.shape.steps, batch.shape.topk, batch.shape.nodes, batch.max_position)
        for i, row in enumerate(batch.row_numbers.tolist()):
            text = self._texts[row]
            assert (len(text) - 1, text[-1]) == (int(batch.lengths[i]), int(batch.roots[i]))
            self.proposals += batch.shape.steps > 0
            self.nodes += batch.shape.nodes - 1
            if self._by_hand is not None:
                states = captured_states(self._target, text[:-1], self._draft.aux_layers)
                drafts = self._by_hand(text, states, shape.steps) if shape.steps else []
                assert tree.tokens[i].tolist() == [text[-1], *drafts]
                continue
            if self._at_once:
                drafts = dense_masked(self._model, self._target, text, shape.steps) if shape.steps else []
                assert tree.tokens[i].tolist() == [text[-1], *drafts]
                continue
            if self._model is None:
                compare_tree(looked_up(text, shape), tree, i)
                continue
            if self._is_heads:
                begins = self._begins[batch.table[row, : len(text) - 1].numpy()]
                relay = dense_heads(self._model, self._target, text, begins, self._topk)
                wanted = heads_tree(relay, text, shape, self._topk)
            else:
                wanted = dense_tree(self._drafter, text, shape, self._topk)
            compare_relay(wanted.relay, {name: values[i].numpy() for name, values in relayed.items()})
            if batch.shape.topk > 1 and batch.shape.steps:
                compare_candidates(wanted.levels, *(values[i].numpy() for values in self._ops.candidates))
            compare_tree(wanted.tree, tree, i)

    def catch_up(self, batch, accepted, relayed, _) -> None:
        slots = window_torch(batch.table, batch.rows, batch.lengths, accepted.longest)[1].numpy()
        for i, row in enumerate(batch.row_numbers.tolist()):
            count = int(accepted.accept_lens[i])
            self._texts[row] += accepted.emitted[i, :count].tolist()
            self._begins[slots[i, :count]] = False
            self.partly += 1 < count <= batch.shape.steps
            self.fully += count == batch.shape.steps + 1 > 1


def compare_relay(wanted: DenseRelay, got: dict[str, np.ndarray]) -> None:
    assert got["topk_ids"].tolist() == wanted.topk_ids.tolist()
    np.testing.assert_allclose(got["topk_probabilities"], wanted.topk_probabilities, rtol=1e-5, atol=1e-30)
    assert ("hidden_states" in got) == (wanted.hidden is not None)
    if wanted.hidden is not None:
        np.testing.assert_allclose(got["hidden_states"], wanted.hidden, rtol=1e-7, atol=1e-9)


def compare_candidates(levels: list[Candidates], tokens: np.ndarray, scores: np.ndarray, parents: np.ndarray) -> None:
    """All that was drafted, the many candidates that the tree has no room for included."""
    wanted = {name: np.concatenate([getattr(level, name)[0] for level in levels]) for name in Candidates.__slots__}
    assert parents.tolist() == wanted["parents"].tolist()
    assert tokens.tolist() == wanted["tokens"].tolist()
    np.testing.assert_allclose(scores, wanted["scores"], rtol=1e-5, atol=1e-30)


def compare_tree(wanted: VerifyTree, got: DeviceTree, i: int) -> None:
    assert got.tokens[i].tolist() == wanted.tokens.tolist()
    assert got.parents[i].tolist() == wanted.parents[0].tolist()
    assert got.positions[i].tolist() == wanted.positions.tolist()
    assert got.next_token[i].tolist() == wanted.retrieve_next_token[0].tolist()
    assert got.next_sibling[i].tolist() == wanted.retrieve_next_sibling[0].tolist()
    assert got.ancestor_bits[i].numpy().view(np.uint64).tolist() == wanted.ancestor_bits[0].tolist()


def serve_watched(
    cell: MatrixCell, draft_model: DraftModel | None = None, by_hand: Callable[..., list[int]] | None = None
) -> tuple[Watched, int]:
    """Serve a cell, half of its requests sampled hot, so that any branch may be accepted;
    also says how many were retracted. `by_hand`: drafts behind a text, of its target's hidden states."""
    dice = Dice(cell.seed * 1_000_003 + 17)
    algorithm, controller = exactly_relayed(cell.algorithm), controller_of(cell)
    events: list = []
    engine = Engine(config_of(cell, algorithm, controller), algorithm, controller, events=events.append)
    target, draft_model = small_model(cell.seed % 3), draft_model or draft_of(cell)
    acceptance = GaussianAcceptance((0.8,) * 8, seed=cell.seed) if cell.drafts == "simulated" else None
    ops = RecordingOps()
    executor = build_executor(engine, target, draft_model, ops, ExecutorOptions(acceptance=acceptance, debug=True))
    watched = Watched(executor, ops, target, draft_model, controller.topk, by_hand)
    requests = [
        replace(request, sampling=SamplingParams(4.0, seed=i + 1)) if i % 2 else request
        for i, request in enumerate(requests_of(cell, dice))
    ]
    retract = 5 if cell.disturbance == "retract" else 0
    with torch.no_grad():
        HostileDriver(engine, executor, requests, dice, Disturbance(submit=60, retract=retract, idle=20)).run()
    return watched, count_retractions(events)


CASES = [
    *product(("STANDALONE", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE"), (1, 4), (1, 4)),
    *product(("P_EAGLE", "PARD"), (1,), (1, 4)),
]


@pytest.mark.fast("EAGLE3-1-4", ci=["MULTI_LAYER_EAGLE-4-1", "P_EAGLE-1-4", "PARD-1-1"])
@pytest.mark.parametrize(("algorithm", "topk", "page_size"), CASES)
def test_proposals_are_those_of_dense_drafting(algorithm, topk, page_size, record_property):
    common = {"algorithm": algorithm, "topk": topk, "page_size": page_size, "chunk_size": 3, "prefixes": "shared"}
    cells = [
        MatrixCell(**common, mode="overlap", steps=4, multi_step_rounds=3, pool="tight", disturbance="retract", seed=5),
        MatrixCell(**common, mode="synchronous", steps=5, policy="ema", mixed=False, agreement=0.0, seed=1),
    ]
    if topk == 1:
        # Random heads are never right twice in a row; this target is told to agree. (In a tree it may be told to agree
        # to what is no path.)
        cells.append(MatrixCell(**common, mode="overlap", steps=3, multi_step_rounds=2, drafts="simulated", seed=2))
    watched = [serve_watched(cell) for cell in cells]
    counts = {
        name: sum(getattr(watcher, name) for watcher, _ in watched)
        for name in ("proposals", "nodes", "cached", "partly", "fully")
    }
    counts["retractions"] = sum(retractions for _, retractions in watched)
    record_property("note", f"dense drafting, {algorithm}, k {topk}, page size {page_size}: {counts}")
    assert counts["proposals"] > 50 and min(counts[name] for name in ("cached", "partly", "retractions")) > 3, counts
    assert counts["fully"] > 3 or topk > 1, counts  # a tree of few nodes seldom has a path of full depth


@pytest.mark.fast("2-3")
@pytest.mark.parametrize(("num_heads", "topk"), [(1, 1), (1, 4), (2, 3)])
def test_few_heads_draft_like_many(num_heads, topk):
    """A single head carries nothing from round to round."""
    common = {"algorithm": "MULTI_LAYER_EAGLE", "topk": topk, "chunk_size": 3, "prefixes": "shared"}
    cell = MatrixCell(**common, mode="overlap", steps=num_heads, disturbance="retract", pool="tight", seed=5)
    watched, retractions = serve_watched(cell, small_head(cell.seed % 3, cell.algorithm, num_heads))
    assert watched.proposals > 20 and watched.cached > 3 and retractions > 3


@pytest.mark.parametrize("topk", [1, 4])
def test_look_up_knows_the_whole_text(topk):
    common = {"algorithm": "NGRAM", "topk": topk, "chunk_size": 3, "prefixes": "shared", "disturbance": "retract"}
    watched, retractions = serve_watched(MatrixCell(**common, mode="overlap", steps=4, pool="tight", seed=5))
    assert watched.proposals > 20 and watched.cached > 3 and watched.partly > 1 and retractions > 3
