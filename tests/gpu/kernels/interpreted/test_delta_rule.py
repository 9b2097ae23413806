"""The kernels of recurrent layers against torch's operations: trees, accepted paths, every memory access checked."""

from __future__ import annotations

import pytest
import torch
from foredraft.gpu.batch.states import StatePool, TreeStates
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.types.recurrence import Links, RecurrentWeights, StateShape
from forward_cases import close
from memory_checker import checked_memory
from torch import Tensor

SHAPES = [StateShape(4, 2, 6, 5, 4), StateShape(3, 3, 16, 32, 2)]
LAYERS, ROWS = 2, torch.tensor([3, 1, 0])  # row 0 is padding


def random_links(seed: int, width: int) -> Links:
    """Trees whose nodes follow any node before them, or the state."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.stack([
        torch.tensor([int(torch.randint(-1, max(i, 1), (), generator=generator)) if i else -1 for i in range(width)])
        for _ in ROWS
    ])  # fmt: skip
    ancestors = torch.zeros(len(ROWS), width, width, dtype=torch.bool)
    for row in range(len(ROWS)):
        for i in range(width):
            node = i
            while node >= 0:
                ancestors[row, i, node] = True
                node = int(parents[row, node])
    return Links(parents, ancestors)


def path_to(links: Links, row: int, node: int) -> list[int]:
    return [j for j in range(node + 1) if links.ancestors[row, node, j]]


@pytest.mark.fast("shape0-[147]", ci="*")
@pytest.mark.parametrize("width", [1, 4, 7, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_nodes_and_accepted_paths(shape: StateShape, width: int):
    generator = torch.Generator().manual_seed(width)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    links = random_links(width, width)
    projected = [normal(len(ROWS) * width, sum(shape.projected) + 3)[:, :-3] for _ in range(LAYERS)]  # of wider rows
    weights = [
        RecurrentWeights(
            normal(shape.channels, shape.kernel), normal(shape.heads), normal(shape.heads), normal(shape.value_dim), 1e-6
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    states = StatePool([shape] * LAYERS, 3, torch.float32, torch.device("cpu")).all_layers
    before = normal(*states.matrices.shape), normal(*states.inputs.shape)
    path = torch.full((len(ROWS), width), -1)
    lens = torch.tensor([width // 2, 1, width])
    for row, last in enumerate((width - 1, 0, width - 1)):
        nodes = path_to(links, row, last)[: int(lens[row])]
        path[row, : len(nodes)], lens[row] = torch.tensor(nodes), len(nodes)

    def run(ops: TorchOps | TritonOps) -> tuple[list[Tensor], StatePool]:
        pool = StatePool([shape] * LAYERS, 3, torch.float32, torch.device("cpu"))
        pool.all_layers.matrices.copy_(before[0])
        pool.all_layers.inputs.copy_(before[1])
        passed = TreeStates(pool, ROWS, torch.tensor([5, 6, 0]), links)
        outputs = [ops.recur(passed, layer, projected[layer], weights[layer], shape) for layer in range(LAYERS)]
        for layer in range(LAYERS):
            assert torch.equal(pool.layers[layer].matrices, before[0][layer]), "a round reads the states alone"
        passed.keep(path, lens)
        return outputs, pool

    expected, torchs = run(TorchOps())
    with checked_memory(read_only=[*projected, links.parents, path], shuffle=width) as seen:
        found, kernels = run(TritonOps())
    assert seen.launches == LAYERS + 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name in ("matrices", "inputs"):
        ours, theirs = (getattr(pool.all_layers, name) for pool in (kernels, torchs))
        torch.testing.assert_close(ours[:, 1:], theirs[:, 1:], rtol=1e-4, atol=1e-5)
    close(kernels.all_layers.matrices[:, 2], before[0][:, 2])


def test_more_nodes_than_fit_the_registers_are_left_to_torch():
    shape, width = SHAPES[0], 17
    pool = StatePool([shape], 3, torch.float32, torch.device("cpu"))
    passed = TreeStates(pool, ROWS, torch.zeros(3, dtype=torch.int64), random_links(1, width))
    vectors = (torch.zeros(shape.heads), torch.zeros(shape.heads), torch.ones(shape.value_dim))
    weights = RecurrentWeights(torch.ones(shape.channels, shape.kernel), *vectors, 1e-6)
    with checked_memory() as seen:
        TritonOps().recur(passed, 0, torch.ones(3 * width, sum(shape.projected)), weights, shape)
    assert not seen.launches
