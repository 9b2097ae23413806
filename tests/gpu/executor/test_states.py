"""The recurrent states of requests: what a pass computes, what enters a row's state, and what never does."""

from __future__ import annotations

import random

import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.errors import ConfigError, InvariantViolation
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.spec import resolve_spec
from foredraft.gpu.batch.states import BranchStates, ChunkStates, StatePool, TreeStates
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.models.checkpoint import random_weights
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.types.recurrence import Inputs, Links, StateShape
from torch import Tensor

SHAPE = StateShape(heads=4, key_heads=2, key_dim=3, value_dim=5, kernel=4)
KERNEL = torch.randn(SHAPE.channels, SHAPE.kernel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def inputs_of(n: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return Inputs(normal(n, SHAPE.channels), -normal(n, SHAPE.heads).exp(), normal(n, SHAPE.heads).sigmoid())


def part(inputs: Inputs, places: list[int]) -> Inputs:
    return inputs.at(torch.tensor(places, dtype=torch.int64))


def one_by_one(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The outputs of a text's tokens [n, H, Dv] and the state after it [H, Dk, Dv], by the rule as it is defined."""
    state = torch.zeros(SHAPE.heads, SHAPE.key_dim, SHAPE.value_dim, dtype=torch.float64)
    padded = torch.cat((torch.zeros(SHAPE.kernel - 1, SHAPE.channels), inputs.mixed))
    outputs, size = [], SHAPE.key_heads * SHAPE.key_dim
    for i in range(len(inputs.mixed)):
        mixed = (padded[i : i + SHAPE.kernel].T * KERNEL).sum(1)
        mixed = mixed * mixed.sigmoid()
        q, k = (x.view(SHAPE.key_heads, -1) for x in (mixed[:size], mixed[size : 2 * size]))
        q, k = ((x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(2, 0) for x in (q, k))
        v = mixed[2 * size :].view(SHAPE.heads, -1)
        state = state * inputs.log_decay[i].exp()[:, None, None]
        change = (v - torch.einsum("hkv,hk->hv", state, k)) * inputs.beta[i][:, None]
        state = state + k[:, :, None] * change[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q) * SHAPE.key_dim**-0.5)
    return torch.stack(outputs), state


def pool_of(num_rows: int = 3) -> StatePool:
    return StatePool([SHAPE], num_rows, torch.float64, torch.device("cpu"), debug=True)


def prefill(pool: StatePool, texts: dict[int, Inputs], starts: dict[int, int], kept: dict[int, int]) -> Tensor:
    """One pass over a chunk of each row."""
    rows = torch.tensor(list(texts))
    lens = torch.tensor([len(text.mixed) for text in texts.values()])
    ends = torch.cat((lens.new_zeros(1), lens.cumsum(0)))
    chunks = ChunkStates(
        pool, rows, torch.tensor([starts[row] for row in texts]), ends, torch.tensor([kept[row] for row in texts]),
        int(lens.max()),
    )  # fmt: skip
    joined = Inputs(*(torch.cat([getattr(t, n) for t in texts.values()]) for n in ("mixed", "log_decay", "beta")))
    return chunks.run(0, joined, KERNEL, SHAPE)


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 130, 149])
def test_chunks_of_any_length_give_the_outputs_and_the_state_of_the_whole_text(cut: int):
    pool, texts = pool_of(), {2: inputs_of(150, 1), 1: inputs_of(151, 2)}
    found: dict[int, list[Tensor]] = {1: [], 2: []}
    for start, stop in ((0, cut), (cut, 150)):
        now = {row: part(text, list(range(start, stop))) for row, text in texts.items()}
        out = prefill(pool, now, {1: start, 2: start}, {1: stop - start, 2: stop - start})
        for row, piece in zip(now, out.split(stop - start), strict=True):
            found[row].append(piece)
    for row, text in texts.items():
        outputs, state = one_by_one(part(text, list(range(150))))
        torch.testing.assert_close(torch.cat(found[row]), outputs)
        torch.testing.assert_close(pool.layers[0].matrices[row], state)
    assert not pool.layers[0].matrices[3].any() and pool.lengths.tolist() == [0, 150, 150, 0]


def test_a_row_that_begins_again_begins_from_nothing():
    pool, first, second = pool_of(), inputs_of(20, 1), inputs_of(9, 2)
    prefill(pool, {1: first}, {1: 0}, {1: 20})
    pool.layers[0].matrices[1, 0] = torch.nan  # a request that failed leaves anything
    prefill(pool, {1: second}, {1: 0}, {1: 9})
    torch.testing.assert_close(pool.layers[0].matrices[1], one_by_one(second)[1])


def test_a_token_whose_kv_is_not_kept_does_not_enter_the_state():
    pool, text = pool_of(), inputs_of(8, 3)
    out = prefill(pool, {1: text}, {1: 0}, {1: 7})
    torch.testing.assert_close(out, one_by_one(text)[0])
    torch.testing.assert_close(pool.layers[0].matrices[1], one_by_one(part(text, list(range(7))))[1])


def random_tree(rng: random.Random, nodes: int) -> list[int]:
    return [-1, *(rng.randrange(i) for i in range(1, nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def links_of(trees: list[list[int]]) -> Links:
    paths = [[path_to(parents, node) for node in range(len(parents))] for parents in trees]
    ancestors = [[[j in path for j in range(len(rows))] for path in rows] for rows in paths]
    return Links(torch.tensor(trees), torch.tensor(ancestors))


@pytest.mark.fast("1", "2", "12", ci="*")
@pytest.mark.parametrize("nodes", [1, 2, 12, 64])
def test_a_node_sees_its_own_path_and_a_round_keeps_the_accepted_one(nodes: int):
    rng, pool = random.Random(nodes), pool_of()
    texts = {1: inputs_of(11, 5), 3: inputs_of(2, 6)}  # one is shorter than the convolution
    prefill(pool, {row: texts[row] for row in (1, 3)}, {1: 0, 3: 0}, {1: 11, 3: 2})
    for _ in range(3):
        trees, drafted = [random_tree(rng, nodes) for _ in texts], inputs_of(2 * nodes, rng.randrange(99))
        lengths = torch.tensor([len(text.mixed) for text in texts.values()])
        states = TreeStates(pool, torch.tensor([1, 3]), lengths, links_of(trees))
        out = states.run(0, drafted, KERNEL, SHAPE).view(2, nodes, SHAPE.heads, -1)
        ends = [rng.randrange(nodes) for _ in trees]
        paths = [path_to(parents, end) for parents, end in zip(trees, ends, strict=True)]
        for i, (row, text) in enumerate(texts.items()):

            def after(path: list[int], i: int = i, text: Inputs = text, drafted: Inputs = drafted) -> Inputs:
                own = part(drafted, [i * nodes + node for node in path])
                return Inputs(*(torch.cat((getattr(text, n), getattr(own, n))) for n in ("mixed", "log_decay", "beta")))

            for node in range(nodes):
                torch.testing.assert_close(out[i, node], one_by_one(after(path_to(trees[i], node)))[0][-1])
            texts[row] = after(paths[i])
        padded = torch.tensor([path + [-7] * (nodes - len(path)) for path in paths])
        states.keep(padded, torch.tensor([len(path) for path in paths]))
        for row, text in texts.items():
            torch.testing.assert_close(pool.layers[0].matrices[row], one_by_one(text)[1])
            assert pool.lengths[row] == len(text.mixed)


def test_branches_go_on_from_copies_and_leave_the_rows_state():
    pool, text = pool_of(), inputs_of(6, 7)
    prefill(pool, {2: text}, {2: 0}, {2: 6})
    before = pool.layers[0].matrices.clone()
    branches, drafted = BranchStates(pool, torch.tensor([2]), torch.tensor([6]), 2), inputs_of(6, 8)

    def expected(path: list[int]) -> Tensor:
        own = part(drafted, path)
        whole = [torch.cat((getattr(text, n), getattr(own, n))) for n in ("mixed", "log_decay", "beta")]
        return one_by_one(Inputs(*whole))[0][-1]

    first = branches.run(0, part(drafted, [0, 1, 2, 3]), KERNEL, SHAPE)  # two tokens of each branch
    torch.testing.assert_close(first[1::2], torch.stack([expected([0, 1]), expected([2, 3])]))
    branches.follow(torch.tensor([[1, 1]]))
    second = branches.run(0, part(drafted, [4, 5]), KERNEL, SHAPE)
    torch.testing.assert_close(second, torch.stack([expected([2, 3, 4]), expected([2, 3, 5])]))
    assert torch.equal(pool.layers[0].matrices, before)


def test_a_state_of_another_length_is_refused():
    pool = pool_of()
    prefill(pool, {1: inputs_of(5, 1)}, {1: 0}, {1: 5})
    links = links_of([[-1]])
    with pytest.raises(InvariantViolation, match="RELAY-03"):
        TreeStates(pool, torch.tensor([1]), torch.tensor([4]), links)
    with pytest.raises(InvariantViolation, match="RELAY-03"):
        prefill(pool, {1: inputs_of(1, 1)}, {1: 6}, {1: 1})
    TreeStates(pool, torch.tensor([0, 0]), torch.tensor([3, 4]), links_of([[-1], [-1]]))  # padding has no length


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_engine_that_shares_prefixes_is_refused(prefix_cache: bool):
    model = random_weights(SHAPES["qwen3_5"], TorchOps(), "cpu", torch.float64)
    config = EngineConfig(
        num_pages=8, context_len=16, page_size=4, max_running=2, prefix_cache=prefix_cache, track_tokens=True
    )
    engine = resolve_spec(config, get_algorithm("NONE")).make_engine()
    if not prefix_cache:
        build_executor(engine, model, None, TorchOps())
        return
    with pytest.raises(ConfigError, match="prefix_cache: must be off: a model with recurrent layers"):
        build_executor(engine, model, None, TorchOps())
