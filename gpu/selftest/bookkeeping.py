"""The operations of a round beside the forward pass, on the device, equal to torch's on the CPU to the last bit.

On a GPU each runs twice: the second run may not wait for the device, which torch raises an error for.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.jit import cdiv
from ..kernels.rounds.shape_logits import BIASED, MIN_P, NEUTRAL, REPETITION
from ..ops.port import KVTensors, LogitTables, NodeMasks
from ..ops.torch_ops import TorchOps
from .forward import moved
from .steps import Context, Finding, Step
from .trees import (
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
BATCH_SIZES = (0, 1, 7)


def bookkeeping_steps(context: Context) -> Iterator[Step]:
    """Yield the steps in the order of a round."""
    named: dict[str, Callable[[Context], Finding]] = {
        "building trees": trees,
        "verification": verification,
        "coins": coins,
        "changed logits": changed_logits,
        "KV moves": kv_moves,
        "relay cells": relay_cells,
    }
    for name, run in named.items():
        yield Step("kernels", name, partial(run, context))
    yield Step("kernels", "sampling over large vocabularies", partial(large_vocabularies, context), needs_gpu=True)
    yield Step("kernels", "a round's bookkeeping in a CUDA graph", partial(in_a_graph, context), needs_gpu=True)


@contextlib.contextmanager
def no_synchronisation(context: Context) -> Iterator[None]:
    """Let torch raise an error where the host waits for the GPU."""
    if not context.on_gpu:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Compared:
    """Calls operations by name, on the device and of the twins, and counts how many calls were equal."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.count = 0

    def __call__(self, name: str, *arguments: Any) -> Any:
        expected = getattr(TWINS, name)(*arguments)
        there = moved(arguments, self._context.device)
        operation = getattr(self._context.ops, name)
        if self._context.on_gpu:
            operation(*there)  # compiles, and makes its constants
        with no_synchronisation(self._context):
            found = operation(*there)
        assert_same(found, expected)
        self.count += 1
        return expected

    def in_place(self, name: str, pools: list[Tensor], *arguments: Any) -> None:
        """Compare pools afterwards, but for the sink; on a GPU several times, since a race does not always show."""
        expected = [pool.clone() for pool in pools]
        getattr(TWINS, name)(KVTensors(*expected), *arguments)
        there = moved(arguments, self._context.device)
        for _ in range(5 if self._context.on_gpu else 1):
            found = [pool.to(self._context.device, copy=True) for pool in pools]
            getattr(self._context.ops, name)(KVTensors(*found), *there)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours.cpu()[:, 1:], theirs[:, 1:]), f"{name}: another pool"
        self.count += 1

    @property
    def finding(self) -> Finding:
        return Finding(f"{self.count} calls are equal to the last bit")


def trees(context: Context) -> Finding:
    compare = Compared(context)
    for topk, steps, nodes in ((1, 3, 4), (4, 4, 20), (2, 2, 1), (16, 7, 64), (8, 5, 64)):
        rng = np.random.default_rng(topk)
        for bs in BATCH_SIZES:
            candidates = flat_candidates(random_candidates(rng, bs, topk, steps), bs)
            roots, lengths = (torch.from_numpy(rng.integers(1, MAX_POSITION, bs)) for _ in range(2))
            compare("build_tree", roots, *candidates, lengths, nodes, MAX_POSITION)
            drafts = torch.from_numpy(rng.integers(-1, VOCAB, (bs, steps)))
            compare("build_chain", roots, drafts, lengths, MAX_POSITION)
    return compare.finding


def verification(context: Context) -> Finding:
    compare = Compared(context)
    rng = np.random.default_rng(7)
    for kind in KINDS:
        for bs in BATCH_SIZES * (5 if context.on_gpu else 1):
            tree = random_tree(rng, bs, kind)
            here, targets = on_device(tree), torch.from_numpy(random_targets(rng, tree)).long()
            verified = compare("verify_greedy", here, targets)
            compare("gather_emitted", verified.predict, verified.accept_index, verified.accept_lens)
            values = torch.from_numpy(rng.random((tree.parents.size, 3))).to(torch.bfloat16)
            compare("compact", values, verified.accept_index, tree.num_draft_tokens)
            probs = torch.from_numpy(random_probs(rng, tree)).float()
            drawn = [torch.from_numpy(rng.random((bs, tree.width))) for _ in range(2)]
            compare("verify_sampling", here, probs, *drawn)
    return compare.finding


def large_vocabularies(context: Context) -> Finding:
    compare = Compared(context)
    for vocab in (32_000, 151_936):
        rng = np.random.default_rng(vocab)
        drafts = torch.from_numpy(rng.integers(0, vocab, (3, 4)))
        tree = TWINS.build_chain(drafts[:, 0], drafts, torch.full((3,), 9), MAX_POSITION)
        for peak in (0.0, 0.7):
            probs = torch.from_numpy(rng.random((15, vocab))) ** 40
            probs = (1 - peak) * probs / probs.sum(1, keepdim=True)
            probs.view(3, 5, vocab)[:, :4].scatter_add_(2, drafts.unsqueeze(2), torch.full((3, 4, 1), peak).double())
            compare("verify_sampling", tree, probs.float(), *(torch.from_numpy(rng.random((3, 5))) for _ in range(2)))
    return compare.finding


def coins(context: Context) -> Finding:
    compare, rng = Compared(context), np.random.default_rng(3)
    keys = torch.from_numpy(rng.integers(-(2**63), 2**63, 300))
    positions = torch.from_numpy(rng.integers(0, 2**40, (300, 5)))
    for seed, purpose in ((0, 1), (2**63 + 5, 2), (-3, 4)):
        compare("coins", keys, positions, seed, purpose)
    return compare.finding


def changed_logits(context: Context) -> Finding:
    """Biases, penalties, masks and min-p of some rows, all of them or none; and the counts behind a round."""
    compare, rng = Compared(context), np.random.default_rng(9)
    for dtype, vocab in itertools.product((torch.float64, *context.dtypes), (VOCAB, 1030)):
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
    found, expected = seen.to(context.device, copy=True), seen.clone()
    context.ops.count_tokens_(found, *moved((rows, tokens, lens), context.device))
    TWINS.count_tokens_(expected, rows, tokens, lens)
    assert_same(found, expected)
    assert (expected - seen).sum() == 6
    compare.count += 1
    return compare.finding


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


def kv_moves(context: Context) -> Finding:
    compare, rng, bs = Compared(context), np.random.default_rng(5), 6
    heads, d = (8, 128) if context.on_gpu else (2, 4)
    for dtype in context.dtypes:
        for kind in KINDS * (4 if context.on_gpu else 1):
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
    return compare.finding


def relay_cells(context: Context) -> Finding:
    compare, rng = Compared(context), np.random.default_rng(0)
    buffer = torch.from_numpy(rng.random((9, 130))).to(torch.bfloat16)
    rows, values = torch.tensor([3, 0, 8, 0]), torch.from_numpy(rng.random((4, 130)))
    buffer[0] = 0
    rows_of = torch.arange(9)
    compare("relay_gather", (buffer, rows_of), rows)
    found, expected = buffer.to(context.device, copy=True), buffer.clone()
    there, stored = moved((rows, values), context.device)
    context.ops.relay_scatter_((found,), there, (stored,))
    TWINS.relay_scatter_((expected,), rows, (values,))
    assert_same(found, expected)
    compare.count += 1
    return compare.finding


def in_a_graph(context: Context) -> Finding:
    """Capture build, verify, move and compact once, and replay them on other inputs."""
    rng = np.random.default_rng(1)
    bs, topk, steps, nodes, replays = 4, 3, 3, 8, 3
    depths = flat_candidates(random_candidates(rng, bs, topk, steps), bs)[3]

    def inputs() -> list[Tensor]:
        candidates = flat_candidates(random_candidates(rng, bs, topk, steps), bs)
        roots, lengths = (torch.from_numpy(rng.integers(1, MAX_POSITION, bs)) for _ in range(2))
        targets = torch.from_numpy(rng.integers(0, VOCAB, bs * nodes))
        windows = torch.from_numpy(rng.permutation(bs * nodes) + 1).view(bs, nodes)
        return [roots, *candidates[:3], lengths, targets, windows, torch.from_numpy(rng.random((bs * nodes, 16)))]

    def round_of(ops, roots, tokens, scores, parents, lengths, targets, windows, values, k, v):
        tree = ops.build_tree(roots, tokens, scores, parents, depths, lengths, nodes, MAX_POSITION)
        verified = ops.verify_greedy(tree, targets)
        ops.move_accepted_(KVTensors(k, v), windows, verified.accept_index, verified.accept_lens)
        emitted = ops.gather_emitted(verified.predict, verified.accept_index, verified.accept_lens)
        return tree, verified, *emitted, ops.compact(values, verified.accept_index, nodes)

    pools = [torch.from_numpy(rng.random((2, bs * nodes + 1, 2, 64))) for _ in range(2)]
    static = [x.to(context.device) for x in (*inputs(), *pools)]
    round_of(context.ops, *static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = round_of(context.ops, *static)
    for _ in range(replays):
        fresh, here = inputs(), [pool.clone() for pool in pools]
        for old, new in zip(static, [*fresh, *pools], strict=True):
            old.copy_(new)
        graph.replay()
        assert_same(captured, round_of(TWINS, *fresh, *here))
        assert_same(tuple(static[-2:]), tuple(here))
    return Finding(f"{replays} replays are equal to the last bit")
