"""The parts of models, in one process: ranks are threads, and an exchange is a barrier. Every family's parts together
compute what the whole computes, and what cannot be divided is refused before a weight is read."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_shapes import SHAPES, family_of
from foredraft.core.errors import ConfigError
from foredraft.gpu.disaggregation.session import plan_disaggregated
from foredraft.gpu.disaggregation.topology import WorkerCounts
from foredraft.gpu.models import checkpoint
from foredraft.gpu.models.checkpoint import load_target, required_bytes
from foredraft.gpu.models.config import ModelConfig
from foredraft.gpu.models.divided import check_shards, sharded
from foredraft.gpu.models.families import DECODED
from foredraft.gpu.models.stored import tensor_files
from foredraft.gpu.session.devices import ops_for
from foredraft.gpu.session.plan import SessionOptions, plan_session
from foredraft.gpu.tiny.dense import DenseAttention
from foredraft.gpu.types.shards import Shard, ShardCut, cut_of, rank_devices
from small_checkpoint import SHAPE, VOCAB_SIZE, write_target

FAST = {"llama", "phi3", "gemma4", "gpt_oss", "deepseek_v3", "glm4", "qwen3_next", "qwen3_5", "olmo2"}
TOKENS = (torch.arange(23) * 37 + 5) % VOCAB_SIZE


class Together:
    """Runs one function per rank, each in a thread; `Shard` exchanges through it."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size, self.exchanges = size, [0] * size
        self._parts: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(size, timeout=60)
        monkeypatch.setattr(Shard, "_all_of", lambda shard, x: self._all_of(shard, x))

    def _all_of(self, shard: Shard, x: torch.Tensor) -> torch.Tensor:
        self.exchanges[shard.rank] += 1
        self._parts[shard.rank] = x.clone()
        self._barrier.wait()
        parts = torch.stack([self._parts[rank] for rank in range(self.size)])
        self._barrier.wait()
        return parts

    def run(self, function):
        results, errors = [None] * self.size, []

        def of_rank(rank: int) -> None:
            try:
                with torch.inference_mode():
                    results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def divisible(shape: ModelConfig, size: int) -> ModelConfig:
    """Return the shape with as many key heads in its recurrent layers as there are ranks."""
    if (state := shape.state) is None:
        return shape
    return replace(shape, state=replace(state, heads=state.heads * size // state.key_heads, key_heads=size))


def outputs_of(model) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = model.forward(TOKENS, DenseAttention([len(TOKENS)])).hidden
    return hidden, model.logits(hidden)


@pytest.mark.fast("*-2", ci="*")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("label", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in SHAPES])
def test_the_parts_of_a_family_compute_what_the_whole_computes(label, size, tmp_path, monkeypatch):
    directory = write_target(tmp_path, divisible(SHAPES[label], size))

    def load(dtype, shard):
        return load_target(directory, ops_for("cpu"), "cpu", dtype, shard=shard)

    together = Together(size, monkeypatch)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 2e-4)):
        with torch.inference_mode():
            hidden, logits = outputs_of(load(dtype, Shard()))
        parts = together.run(lambda rank, dtype=dtype: outputs_of(load(dtype, Shard(rank, size))))
        for own_hidden, own_logits in parts:
            assert torch.equal(own_hidden, parts[0][0]) and torch.equal(own_logits, parts[0][1]), "ranks differ"
        torch.testing.assert_close(parts[0][0], hidden, atol=bound, rtol=bound)
        torch.testing.assert_close(parts[0][1], logits, atol=bound, rtol=bound)
        if dtype is torch.float64:
            assert torch.equal(parts[0][1].argmax(-1), logits.argmax(-1))


def test_a_vocabulary_of_any_size_is_divided(tmp_path, monkeypatch):
    """Every rank has as many rows. Those of the last rank that lie beyond the vocabulary give no logits."""
    odd = replace(SHAPE, vocab_size=VOCAB_SIZE + 1, tied_embeddings=True)
    directory = write_target(tmp_path, odd)
    whole = load_target(directory, ops_for("cpu"), "cpu", torch.float64)
    parts = Together(4, monkeypatch).run(
        lambda rank: outputs_of(load_target(directory, ops_for("cpu"), "cpu", torch.float64, shard=Shard(rank, 4)))
    )
    with torch.inference_mode():
        hidden, logits = outputs_of(whole)
    assert parts[0][1].shape == logits.shape == (len(TOKENS), VOCAB_SIZE + 1)
    torch.testing.assert_close(parts[3][1], logits, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(parts[3][0], hidden, atol=1e-11, rtol=1e-11)


def test_a_layer_exchanges_twice_and_a_pass_twice_more(tmp_path, monkeypatch):
    """Attention, MLP; embeddings, LM head: also where one MLP stands beside experts."""
    for label in ("llama", "deepseek_v3", "qwen3_next"):
        directory, together = write_target(tmp_path / label, SHAPES[label]), Together(2, monkeypatch)
        together.run(
            lambda rank, directory=directory: outputs_of(load_target(directory, ops_for("cpu"), shard=Shard(rank, 2)))
        )
        assert together.exchanges == [2 * SHAPES[label].num_layers + 2] * 2, label


# -- what a rank reads -------------------------------------------------------------------------------------------------


def test_parts_are_read_without_the_rest(tmp_path, monkeypatch):
    """No tensor that is divided is read whole, and the ranks together read each of its numbers once."""
    directory = write_target(tmp_path)
    whole, read = [], []
    real, real_of = tensor_files.safe_open, ShardCut.of

    class Watched:
        def __init__(self, *arguments, **options):
            self._file = real(*arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def __getattr__(self, name):
            return getattr(self._file, name)

        def get_tensor(self, name):
            whole.append(name)
            return self._file.get_tensor(name)

    def counted(cut, source):
        assert not isinstance(source, torch.Tensor), "a whole tensor was read"
        part = real_of(cut, source)
        read.append(part.numel())
        return part

    monkeypatch.setattr(tensor_files, "safe_open", Watched)
    monkeypatch.setattr(ShardCut, "of", counted)
    for rank in range(2):
        load_target(directory, ops_for("cpu"), shard=Shard(rank, 2))
    assert whole and all("norm" in name for name in whole)
    matrices = [x.numel() for n, x in load_target(directory, ops_for("cpu")).named_parameters() if "norm" not in n]
    assert sum(read) == sum(matrices)


def test_a_rank_has_its_share_of_the_bytes():
    whole, part = required_bytes(SHAPE, torch.float32), required_bytes(SHAPE, torch.float32, Shard(1, 2))
    assert {name: 2 * part[name] for name in ("embeddings", "attention", "mlp")} == {
        name: whole[name] for name in ("embeddings", "attention", "mlp")
    }
    assert part["norms"] == whole["norms"]
    copied = sharded(SHAPE, Shard(3, 4)).kv_shapes
    assert copied[0].heads == 1 and SHAPE.kv_shapes[0].heads == 2, "four ranks share two heads, two by two"


def test_cuts():
    assert cut_of((8, 4), (8, 4), Shard(1, 2)) is None
    assert cut_of((8, 4), (4, 4), Shard(1, 2)) == ShardCut(0, ((4, 8),))
    assert cut_of((8, 4), (8, 2), Shard(1, 2)) == ShardCut(1, ((2, 4),))
    # two heads of three rows among four ranks
    assert [cut_of((6, 4), (3, 4), Shard(r, 4)).ranges for r in range(4)] == [
        ((0, 3),),
        ((0, 3),),
        ((3, 6),),
        ((3, 6),),
    ]
    # queries, keys and values in one tensor
    fused = ((8, 4, 4), (4, 2, 2))
    assert cut_of((16, 5), (8, 5), Shard(1, 2), fused) == ShardCut(0, ((4, 8), (10, 12), (14, 16)))
    assert cut_of((7, 4), (2, 4), Shard(3, 4)) == ShardCut(0, ((6, 7),), 1), "a row of zeros stands behind the last"
    part = ShardCut(0, ((6, 7),), 1).of(torch.arange(28.0).view(7, 4))
    assert part.tolist() == [[24, 25, 26, 27], [0, 0, 0, 0]]


# -- what cannot be divided --------------------------------------------------------------------------------------------


def test_every_family_is_here():
    assert {family_of(label) for label in SHAPES} == set(DECODED)


@pytest.mark.parametrize(
    ("change", "size", "expected"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "num_attention_heads: 6 cannot be divided by 4"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "num_key_value_heads: 3 heads can neither be divided by 2 nor"),
        ({"intermediate_size": 63}, 2, "intermediate_size: 63 cannot be divided by 2"),
        ({"vocab_size": 5}, 4, "vocab_size: 5 tokens are too few"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(change, size, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        check_shards(replace(SHAPE, **change), size, "config.json")
    assert f"LlamaForCausalLM cannot run on {size} ranks" in str(caught.value)


def test_recurrent_heads_that_do_not_fit_the_ranks_are_refused():
    with pytest.raises(ConfigError, match="linear_num_key_heads: 2 cannot be divided by 4"):
        check_shards(SHAPES["qwen3_next"], 4, "config.json")


def test_experts_that_do_not_fit_the_ranks_are_refused():
    shape = SHAPES["deepseek_v3"]
    odd = replace(shape, moe=replace(shape.moe, intermediate_size=25, shared_size=27))
    with pytest.raises(ConfigError) as caught:
        check_shards(odd, 2, "config.json")
    assert "moe_intermediate_size: 25" in str(caught.value) and "shared experts' width: 27" in str(caught.value)


def test_a_misfit_is_found_before_a_weight_is_read(tmp_path, monkeypatch):
    directory = write_target(tmp_path, replace(SHAPE, intermediate_size=66))
    monkeypatch.setattr(checkpoint, "read_unpacked", lambda *given: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="66 cannot be divided by 4"):
        plan_session(SessionOptions(Path(directory), device="cpu", tensor_parallel=4))


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda:1", "cuda:1 is one device; 2 ranks need cuda"), ("cuda", "2 ranks need 2 GPUs, torch finds 1")],
)
def test_more_ranks_than_gpus_are_refused(device, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=expected):
        rank_devices(device, 2)
    assert rank_devices("cpu", 3) == ("cpu",) * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_devices("auto", 2) == ("cuda:0", "cuda:1")


def test_ranks_of_workers_divide_memory_and_need_a_gpu_each(tmp_path, monkeypatch):
    directory, topology = write_target(tmp_path), WorkerCounts(1, 1)
    free = []

    def free_bytes(device):
        return free[0]

    monkeypatch.setattr("foredraft.gpu.session.memory.free_bytes", free_bytes)
    kv_bytes = {}
    for ranks, gib in ((1, 1.0), (2, 1.0), (2, 2.0)):
        free[:] = [int(gib * 2**30)]
        options = SessionOptions(directory, device="cpu", tensor_parallel=ranks, max_running=100_000, dtype="float32")
        plan = plan_disaggregated(options, topology)
        kv_bytes[ranks, gib] = plan.kv_bytes + plan.weight_bytes
    assert kv_bytes[2, 1.0] == pytest.approx(kv_bytes[1, 1.0] / 2, rel=0.01), "four processes share what two shared"
    assert kv_bytes[2, 2.0] == pytest.approx(kv_bytes[1, 1.0], rel=0.01)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="prefill=1,decode=1 needs 4 GPUs, torch finds 3"):
        topology.devices("cuda", 2)
    with pytest.raises(ConfigError, match="cuda:0 is one device; 2 ranks need cuda"):
        plan_disaggregated(SessionOptions(directory, device="cuda:0", tensor_parallel=2), topology)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert topology.devices("auto", 2) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


def test_options_that_contradict_ranks_are_refused(tmp_path):
    directory = write_target(tmp_path)
    for options, expected in (
        ({"tensor_parallel": 0}, "tensor_parallel: must be at least 1"),
        (
            {"tensor_parallel": 2, "multi_step_rounds": 8},
            "multi_step_rounds: 8 rounds; with tensor_parallel a step has one",
        ),
    ):
        with pytest.raises(ConfigError, match=expected):
            plan_session(SessionOptions(directory, device="cpu", **options))
