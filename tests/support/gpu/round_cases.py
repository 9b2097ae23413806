"""Random calls of a round's operations beside the forward pass, compared with torch's to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from foredraft.gpu.kernels.jit import cdiv
from foredraft.gpu.kernels.rounds.shape_logits import BIASED, MIN_P, NEUTRAL, REPETITION
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.types.ops import KVTensors, LogitTables, NodeMasks
from torch import Tensor
from tree_cases import (
    KINDS,
    MAX_POSITION,
    VOCAB,
    assert_same,
    flat_candidates,
    on_device,
    random_candidates,
    random_probs,
    random_targets,
    random_tree,
)

TWINS = TorchOps()
BATCH_SIZES = (0, 1, 3)


class Compared:
    """Calls operations of `ops` and of the twins by name. `dtypes` are those of logits and KV."""

    def __init__(self, ops: Any, dtypes: Sequence[torch.dtype]) -> None:
        self.ops, self.dtypes = ops, tuple(dtypes)

    def __call__(self, name: str, *arguments: Any) -> Any:
        expected = getattr(TWINS, name)(*arguments)
        assert_same(getattr(self.ops, name)(*arguments), expected)
        return expected

    def in_place(self, name: str, pools: list[Tensor], *arguments: Any) -> None:
        """Compare pools afterwards, but for the sink."""
        expected, found = ([pool.clone() for pool in pools] for _ in range(2))
        getattr(TWINS, name)(KVTensors(*expected), *arguments)
        getattr(self.ops, name)(KVTensors(*found), *arguments)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours[:, 1:], theirs[:, 1:]), f"{name}: another pool"


def trees(compare: Compared) -> None:
    for topk, steps, nodes in ((1, 3, 4), (4, 4, 20), (2, 2, 1), (16, 7, 64), (8, 5, 64)):
        rng = np.random.default_rng(topk)
        for bs in BATCH_SIZES:
            candidates = flat_candidates(random_candidates(rng, bs, topk, steps), bs)
            roots, lengths = (torch.from_numpy(rng.integers(1, MAX_POSITION, bs)) for _ in range(2))
            compare("build_tree", roots, candidates, lengths, nodes, MAX_POSITION)
            drafts = torch.from_numpy(rng.integers(-1, VOCAB, (bs, steps)))
            compare("build_chain", roots, drafts, lengths, MAX_POSITION)


def verification(compare: Compared) -> None:
    rng = np.random.default_rng(7)
    for kind in KINDS:
        for bs in BATCH_SIZES:
            tree = random_tree(rng, bs, kind)
            here, targets = on_device(tree), torch.from_numpy(random_targets(rng, tree)).long()
            verified = compare("verify_greedy", here, targets)
            compare("gather_emitted", verified.predict, verified.accept_index, verified.accept_lens)
            values = torch.from_numpy(rng.random((tree.parents.size, 3))).to(torch.bfloat16)
            compare("compact", values, verified.accept_index, tree.num_draft_tokens)
            probs = torch.from_numpy(random_probs(rng, tree)).float()
            drawn = [torch.from_numpy(rng.random((bs, tree.width))) for _ in range(2)]
            compare("verify_sampling", here, probs, *drawn)


def coins(compare: Compared) -> None:
    rng = np.random.default_rng(3)
    keys = torch.from_numpy(rng.integers(-(2**63), 2**63, 300))
    positions = torch.from_numpy(rng.integers(0, 2**40, (300, 5)))
    for seed, purpose in ((0, 1), (2**63 + 5, 2), (-3, 4)):
        compare("coins", keys, positions, seed, purpose)


def changed_logits(compare: Compared) -> None:
    """Biases, penalties, masks and min-p of some rows, all of them or none; and the counts behind a round."""
    rng = np.random.default_rng(36)  # its trees are small: comparing is quadratic in their nodes
    for dtype, vocab in itertools.product(compare.dtypes, (VOCAB, 1030)):
        tables = random_tables(rng, 5, vocab)
        for kind in KINDS:
            for bs in BATCH_SIZES:
                tree = on_device(random_tree(rng, bs, kind))
                rows = torch.from_numpy(rng.integers(0, 6, bs))
                logits = torch.from_numpy(rng.normal(size=(bs * tree.num_nodes, vocab)) * 4).to(dtype)
                masks = random_masks(rng, len(logits), vocab)
                compare("shape_logits", logits, rows, tables, tree, masks)
                if vocab == VOCAB:
                    compare("shape_logits", logits, rows, tables, tree)
                    compare("shape_logits", logits[:bs], rows, tables)
    seen, rows, lens = tables.seen, torch.tensor([4, 0, 1]), torch.tensor([3, 2, 1], dtype=torch.int32)
    tokens = torch.tensor([[7, 1029, 7, 8], [5, 6, -1, -1], [-1, 3, 3, 3]])
    found, expected = seen.clone(), seen.clone()
    compare.ops.count_tokens_(found, rows, tokens, lens)
    TWINS.count_tokens_(expected, rows, tokens, lens)
    assert_same(found, expected)
    assert (expected - seen).sum() == 6


def random_tables(rng: np.random.Generator, num_rows: int, vocab: int) -> LogitTables:
    """Return tables of rows that ask for everything, for one thing each, and for nothing."""
    seen = rng.integers(0, 7, (num_rows + 1, vocab)) * (rng.random((num_rows + 1, vocab)) < 0.5)
    bias = rng.choice([0.0, 0.0, 1.5, -100.0], (num_rows + 1, vocab))
    params = np.tile(NEUTRAL, (num_rows + 1, 1))
    params[1] = 1.3, 0.3, -0.7, 1.0, -0.9
    params[2, REPETITION], params[3, BIASED], params[4, MIN_P] = 0.8, 1.0, -2.0
    return LogitTables(torch.from_numpy(seen).int(), torch.from_numpy(bias).float(), torch.from_numpy(params))


def random_masks(rng: np.random.Generator, nodes: int, vocab: int) -> NodeMasks:
    """Return masks of some nodes, several of them the same."""
    bits = rng.integers(-(2**31), 2**31, (3, cdiv(vocab, 32)))
    return NodeMasks(torch.from_numpy(rng.integers(-1, 3, nodes)).int(), torch.from_numpy(bits).int())


def kv_moves(compare: Compared) -> None:
    rng, bs = np.random.default_rng(5), 6
    heads, d = 2, 4
    for dtype in compare.dtypes:
        for kind in KINDS:
            tree = random_tree(rng, bs, kind)
            nodes = tree.num_draft_tokens
            verified = TWINS.verify_greedy(on_device(tree), torch.from_numpy(random_targets(rng, tree)).long())
            windows = torch.from_numpy(rng.permutation(bs * nodes) + 1).view(bs, nodes)
            pools = [torch.from_numpy(rng.random((3, bs * nodes + 2, heads, d))).to(dtype) for _ in range(2)]
            compare.in_place("move_accepted_", pools, windows, verified.accept_index, verified.accept_lens)
            targets = torch.from_numpy(rng.permutation(bs * nodes) + 1)
            compare.in_place("move_slots_", pools, targets.roll(1), targets)
        table = torch.arange(4 * 60, dtype=torch.int32).view(4, 60)
        pools = [torch.from_numpy(rng.random((1, 240, 2, 64))).to(dtype) for _ in range(2)]
        rows, lengths = torch.tensor([3, 1]), torch.tensor([14, 5])
        compare.in_place("duplicate_tails_", pools, table, rows, lengths, 8, 3, 4)


def relay_cells(compare: Compared) -> None:
    rng = np.random.default_rng(0)
    buffer = torch.from_numpy(rng.random((9, 130))).to(torch.bfloat16)
    rows, values = torch.tensor([3, 0, 8, 0]), torch.from_numpy(rng.random((4, 130)))
    buffer[0] = 0
    rows_of = torch.arange(9)
    compare("relay_gather", (buffer, rows_of), rows)
    found, expected = buffer.clone(), buffer.clone()
    compare.ops.relay_scatter_((found,), rows, (values,))
    TWINS.relay_scatter_((expected,), rows, (values,))
    assert_same(found, expected)
