"""No twin waits for the device: on tensors without data (`meta`) everything that asks for a value fails."""

from __future__ import annotations

import pytest
import torch
from foretoken.gpu.batch.tree import DeviceTree
from foretoken.gpu.executor.sampling import target_probs
from foretoken.gpu.kernels.rounds.verify_sampling import sample_torch
from foretoken.gpu.ops.port import KVTensors
from foretoken.gpu.ops.torch_ops import TorchOps

OPS = TorchOps()
BS, NODES, WIDTH, VOCAB, SLOTS = 2, 4, 3, 7, 9


def shaped(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def tree() -> DeviceTree:
    return OPS.build_tree(
        shaped(BS),
        shaped(BS, 6),
        shaped(BS, 6, dtype=torch.float32),
        shaped(BS, 6, dtype=torch.int32),
        (1, 1, 2, 2, 2, 2),
        shaped(BS),
        NODES,
        99,
    )


def chain() -> DeviceTree:
    return OPS.build_chain(shaped(BS), shaped(BS, NODES - 1), shaped(BS), 99)


def verify_sampling(verified: DeviceTree):
    coins = shaped(BS, verified.width, dtype=torch.float64)
    return OPS.verify_sampling(verified, shaped(BS * NODES, VOCAB, dtype=torch.float32), coins, coins)


def pools() -> KVTensors:
    return KVTensors(*(shaped(2, SLOTS, 1, 4, dtype=torch.float32) for _ in range(2)))


PATH = (shaped(BS, WIDTH, dtype=torch.int32), shaped(BS, dtype=torch.int32))
ROW_VALUES = shaped(BS, dtype=torch.float32)
CALLS = {
    "build_tree": tree,
    "build_chain": chain,
    "verify_greedy on a tree": lambda: OPS.verify_greedy(tree(), shaped(BS * NODES)),
    "verify_greedy on a chain": lambda: OPS.verify_greedy(chain(), shaped(BS * NODES)),
    "verify_sampling on a tree": lambda: verify_sampling(tree()),
    "verify_sampling on a chain": lambda: verify_sampling(chain()),
    "coins": lambda: OPS.coins(shaped(BS), shaped(BS, WIDTH), 1, 2),
    "gather_emitted": lambda: OPS.gather_emitted(shaped(BS * NODES), *PATH),
    "compact": lambda: OPS.compact(shaped(BS * NODES, 3), PATH[0], NODES),
    "move_accepted_": lambda: OPS.move_accepted_(pools(), shaped(BS, NODES), *PATH),
    "move_slots_": lambda: OPS.move_slots_(pools(), shaped(3), shaped(3)),
    "duplicate_tails_": lambda: OPS.duplicate_tails_(
        pools(), shaped(3, 20, dtype=torch.int32), shaped(BS), shaped(BS), 4, 2, 3
    ),
    "relay_gather": lambda: OPS.relay_gather(shaped(3, 2), shaped(BS)),
    "relay_scatter_": lambda: OPS.relay_scatter_(shaped(3, 2), shaped(BS), shaped(BS, 2)),
    "target_probs": lambda: target_probs(shaped(BS, VOCAB, dtype=torch.float32), ROW_VALUES, ROW_VALUES, shaped(BS)),
    "sample": lambda: sample_torch(shaped(BS, VOCAB, dtype=torch.float32), shaped(BS, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_asks_for_a_value(name):
    CALLS[name]()


def test_a_question_would_fail():
    with pytest.raises((RuntimeError, NotImplementedError)):
        shaped(1).item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        shaped(2)[shaped(2, dtype=torch.bool)]
