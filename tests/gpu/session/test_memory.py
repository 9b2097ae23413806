"""What passes need beside weights and KV is counted: by what torch really holds, and in the pool's size on a GPU."""

from __future__ import annotations

import weakref

import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.model_shape import built_in_config, read_model_shape
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.spec import (
    UNSIZED_POOL,
    BackendOffer,
    EngineSpec,
    SpeculationChoice,
    default_graph_sizes,
    resolve_spec,
)
from foredraft.gpu.batch.pools import bytes_per_slot
from foredraft.gpu.executor.graphs import variants_of
from foredraft.gpu.kernels.rounds.verify_sampling import sample_torch
from foredraft.gpu.measure.shapes import draft_shape
from foredraft.gpu.models.config import ModelConfig
from foredraft.gpu.session.memory import (
    FIRST_TOKEN_BYTES,
    FP8,
    GRAPH_BYTES,
    MIB,
    SAMPLING_BYTES,
    NotEnoughMemory,
    size_pool,
    state_bytes,
    working_bytes,
)
from foredraft.gpu.types.attention import E4M3
from torch.utils._python_dispatch import TorchDispatchMode


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage) -> None:
        place = storage.data_ptr()
        if place in self._known or not storage.nbytes():
            return
        self._known.add(place)
        self.now += (size := storage.nbytes())
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, place, size)

    def _freed(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def test_the_bytes_of_a_logit_while_first_tokens_are_drawn():
    probs = torch.rand(3, 4096)
    with Held() as held:
        sample_torch(probs, torch.rand(3, dtype=torch.float64))
    found = held.most / probs.numel() + SAMPLING_BYTES
    assert FIRST_TOKEN_BYTES - 1 < found <= FIRST_TOKEN_BYTES


def spec_of(max_running: int = 32, graphs: bool = True) -> EngineSpec:
    config = EngineConfig(num_pages=UNSIZED_POOL, context_len=8192, max_running=max_running, track_tokens=True)
    sizes = default_graph_sizes(max_running) if graphs else None
    choice = SpeculationChoice(policy="fixed", steps=3, source="test")
    return resolve_spec(config, get_algorithm("EAGLE3"), choice, BackendOffer("triton", graph_sizes=sizes))


def test_more_rows_and_graphs_need_more_and_the_pool_shrinks(monkeypatch):
    target = ModelConfig.from_dict(built_in_config("llama-3.1-8b")[1], "llama-3.1-8b")
    draft = draft_shape(target, get_algorithm("EAGLE3"), 3)

    def working(spec: EngineSpec, total: int = 24 << 30) -> int:
        monkeypatch.setattr("foredraft.gpu.session.memory.total_bytes", lambda device: total)
        return working_bytes(target, draft, spec, torch.bfloat16, "cuda")

    full, fewer, eager = working(spec_of()), working(spec_of(8)), working(spec_of(graphs=False))
    graphs = len(default_graph_sizes(32)) * GRAPH_BYTES
    assert full - eager == (24 << 30) // 16  # of a small device a share
    assert working(spec_of(), 80 << 30) - eager == len(variants_of()) * graphs
    assert working(spec_of(), 1 << 30) - eager == graphs  # those of plain requests in any case
    # 32 rows of 4 nodes: logits in 16 and 32 bits, and their distributions
    assert full - fewer > 24 * 4 * target.vocab_size * SAMPLING_BYTES
    assert 64 * MIB < fewer < full < 4096 * MIB
    monkeypatch.setattr("foredraft.gpu.session.memory.free_bytes", lambda device: 24 << 30)
    pages = [size_pool(None, 0.85, 131072, "cuda", spec_of(), 16 << 30, working)[0] for working in (0, full)]
    assert pages[0] - pages[1] == pytest.approx(full / 131072, abs=2)
    with pytest.raises(NotEnoughMemory, match=r"activations, logits and graphs 4\.00 GiB"):
        size_pool(10_000, 0.85, 131072, "cuda", spec_of(), 16 << 30, 4 << 30)


@pytest.mark.parametrize("label", SHAPES)
def test_a_token_takes_the_memory_that_the_simulator_prices(label: str):
    """Latent attention keeps one vector. Cells of a pool are as wide as the widest layer of Gemma 4 needs."""
    shape = SHAPES[label]
    of_simulator = read_model_shape({**shape.to_dict(), "torch_dtype": "bfloat16"}, "config.json", label)
    priced = of_simulator.kv_bytes_per_token
    found = bytes_per_slot(shape.kv_shapes, torch.bfloat16)
    widest = max(kept.elements for kept in shape.kv_shapes) * len(shape.kv_shapes) * 2
    assert found == widest and sum(kept.elements for kept in shape.kv_shapes) * 2 == priced
    in_8_bits = of_simulator.with_dtypes(kv_dtype=FP8).kv_bytes_per_token
    assert bytes_per_slot(shape.kv_shapes, E4M3) * priced == found * in_8_bits and in_8_bits * 2 == priced
    assert sum(kept.num_bytes(torch.bfloat16) for kept in shape.state_shapes) == of_simulator.recurrent_state_bytes
    assert (found == priced) == (label != "gemma4")


def test_recurrent_states_are_planned_before_a_weight_is_read():
    shape, spec = SHAPES["qwen3_next"], spec_of()
    states = state_bytes(shape, None, spec, torch.bfloat16)
    assert state_bytes(SHAPES["llama"], None, spec, torch.bfloat16) == 0
    assert states > sum(kept.num_bytes(torch.bfloat16) for kept in shape.state_shapes) * spec.config.max_running
    assert state_bytes(shape, shape, spec, torch.bfloat16) > states
    with pytest.raises(NotEnoughMemory, match=r"recurrent states 900\.00 GiB, .*fewer requests at once"):
        size_pool(10, 0.85, 131072, "cpu", spec, 0, 0, {"recurrent states": 900 << 30})
