"""The Triton kernels that build, verify, compact, move and relay, against their torch twins, with every
memory access checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import round_cases
import torch
from foredraft.gpu.kernels.rounds import best, target_probs, verify_sampling
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.types.ops import DeviceCandidates, KVTensors
from memory_checker import checked_memory
from tree_cases import KINDS, MAX_POSITION, VOCAB, assert_same, on_device, random_probs, random_targets, random_tree

TWINS, KERNELS = TorchOps(), TritonOps()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


@contextlib.contextmanager
def inputs_only_read(*inputs: torch.Tensor, **more) -> Iterator[None]:
    with checked_memory(read_only=inputs, shuffle=1, **more) as seen:
        yield
    assert bool(seen.launches) == bool(seen.accesses) == bool(inputs[0].numel()), "an idle batch launches nothing"


class CheckedOps:
    """Calls kernels; what ends with an underscore may write to its first argument alone, slot 0 of whose
    pools all rows share."""

    def __getattr__(self, name: str) -> Any:
        def checked(*arguments: Any) -> Any:
            written = arguments[0] if name.endswith("_") else None
            sinks = [pool[:, 0] for pool in written] if isinstance(written, KVTensors) else ()
            with inputs_only_read(*tensors_in(arguments[written is not None :]), sinks=sinks):
                return getattr(KERNELS, name)(*arguments)

        return checked


CASES = (
    round_cases.trees,
    round_cases.verification,
    round_cases.coins,
    round_cases.changed_logits,
    round_cases.kv_moves,
    round_cases.relay_cells,
)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_operation_is_its_twin(case, dtype):
    case(round_cases.Compared(CheckedOps(), [dtype]))


@pytest.mark.ci
def test_changed_logits_of_64_bits_are_their_twins():
    round_cases.changed_logits(round_cases.Compared(CheckedOps(), [torch.float64]))


@pytest.mark.fast("beam-1024-*")
@pytest.mark.parametrize(
    ("kind", "chunk", "dtype"),
    [(kind, chunk, dtype) for chunk, dtype in ((1024, np.float32), (2, np.float64)) for kind in KINDS],
)
def test_sampling_verification_is_the_twins(kind, chunk, dtype, monkeypatch):
    """`chunk` 2 spreads five tokens over three parts."""
    monkeypatch.setattr(verify_sampling, "MIN_CHUNK", chunk)
    rng = np.random.default_rng(11)
    lengths, failures = set(), 0
    for bs in (1, 5) * (4 if kind == "chain" else 1):  # a chain seldom accepts a draft
        tree = random_tree(rng, bs, kind)
        ours, probs = on_device(tree), torch.from_numpy(random_probs(rng, tree).astype(dtype))
        accept, bonus = (torch.from_numpy(rng.random((bs, tree.width))) for _ in range(2))
        accept[torch.from_numpy(rng.random(accept.shape) < 0.1)] = 1.0 - 2.0**-53
        bonus[torch.from_numpy(rng.random(accept.shape) < 0.1)] = 1.0 - 2.0**-53
        with inputs_only_read(probs, accept, bonus, *tensors_in(ours)):
            found = KERNELS.verify_sampling(ours, probs, accept, bonus)
        expected = TWINS.verify_sampling(ours, probs, accept, bonus)
        assert_same(found, expected)
        lengths.update(expected.accept_lens.tolist())
        failures += int(expected.failed.sum())
    assert len(lengths) >= 2 and failures > 0


@pytest.mark.parametrize("chunk", [1024, 2])
def test_an_exhausted_residual_takes_the_last_possible_child(chunk, monkeypatch):
    monkeypatch.setattr(verify_sampling, "MIN_CHUNK", chunk)
    tree = TWINS.build_tree(
        torch.tensor([4]),
        DeviceCandidates(
            torch.tensor([[0, 1, 2]]), torch.full((1, 3), 0.5), torch.full((1, 3), -1, dtype=torch.int32), (1, 1, 1)
        ),
        torch.tensor([3]),
        4,
        MAX_POSITION,
    )
    probs = torch.zeros(4, VOCAB, dtype=torch.float64)
    probs[:, :3] = 1.0 / 3.0
    ones = torch.ones(1, 2, dtype=torch.float64)  # no coin is 1; it stands for every coin that misses a sum by rounding
    found = KERNELS.verify_sampling(tree, probs, ones, ones)
    assert found.accept_index.tolist() == [[0, 3]]
    assert_same(found, TWINS.verify_sampling(tree, probs, ones, ones))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.int64), ((3,), torch.float16), ((2, 2), torch.bfloat16), ((5,), torch.bool), ((1200,), torch.float64)],
)
def test_compaction_is_the_twins(shape, dtype):
    rng = np.random.default_rng(2)
    for kind in KINDS:
        tree = random_tree(rng, 3, kind)
        accepted = TWINS.verify_greedy(on_device(tree), torch.from_numpy(random_targets(rng, tree)).long()).accept_index
        values = torch.from_numpy(rng.integers(0, 100, (tree.parents.size, *shape))).to(dtype)
        with inputs_only_read(values, accepted):
            found = KERNELS.compact(values, accepted, tree.num_draft_tokens)
        assert found.dtype == dtype
        assert torch.equal(found, TWINS.compact(values, accepted, tree.num_draft_tokens))


def pools(rng: np.random.Generator, slots: int, dtype=torch.float16, width: int = 6) -> list[torch.Tensor]:
    return [torch.from_numpy(rng.random((2, slots, 2, width))).to(dtype) for _ in range(2)]


def test_what_stands_where_it_belongs_is_not_moved():
    k, v = pools(np.random.default_rng(0), 8)
    windows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    accept_index, accept_lens = torch.tensor([[0, 1, 2], [3, 4, -1]]).int(), torch.tensor([3, 2]).int()
    with inputs_only_read(k, v):
        KERNELS.move_accepted_(KVTensors(k, v), windows, accept_index, accept_lens)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), torch.int64), ((3,), torch.float32), ((5,), torch.bfloat16), ((600,), torch.float64)]
)
def test_relay_cells_are_the_twins(shape, dtype):
    rng = np.random.default_rng(0)
    rows = torch.tensor([3, 0, 1, 0])
    values = torch.from_numpy(rng.random((4, *shape)) * 9 + 1).to(dtype)
    buffer, whole = torch.zeros(5, *shape, dtype=dtype), torch.arange(10).view(5, 2)
    expected = buffer.clone()
    TWINS.relay_scatter_([expected], rows, [values])
    with inputs_only_read(rows, values, buffer[0]):  # row 0 is never written
        KERNELS.relay_scatter_([buffer], rows, [values])
    assert torch.equal(buffer, expected)
    with inputs_only_read(rows, buffer):
        found = KERNELS.relay_gather([buffer, whole, buffer, whole[:, :1].contiguous()], rows)
    for copied, source in zip(found, (expected, whole, expected, whole[:, :1]), strict=True):
        assert torch.equal(copied, source[rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_best_tokens_are_the_twins(dtype, monkeypatch):
    """Equals in two chunks, and rows without an answer."""
    monkeypatch.setattr(best, "CHUNK", 16)
    logits = torch.randint(0, 9, (7, 70)).to(dtype)
    logits[1], logits[2, 40], logits[3, 3] = float("-inf"), float("nan"), float("inf")
    logits[4, 5] = logits[4, 69] = 10.0
    logits[5, :69] = float("-inf")
    ids = torch.randperm(70)
    with inputs_only_read(logits, ids):
        found, drafts = KERNELS.best_tokens(logits), KERNELS.best_drafts(logits, ids)
    assert found.tolist() == TWINS.best_tokens(logits).tolist() and found[4:6].tolist() == [5, 69]
    assert torch.equal(drafts, TWINS.best_drafts(logits, ids))


@pytest.mark.fast("dtype1-False", "dtype2-True", ci="*")
@pytest.mark.parametrize(
    ("dtype", "filtered"), [(torch.float16, True), (torch.float32, False), (torch.float32, True), (torch.float64, True)]
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf − inf
def test_distributions_are_the_twins(dtype, filtered, monkeypatch):
    """Several blocks of logits, ties at every edge, −0 beside 0, rows without an answer, in rows with a stride."""
    monkeypatch.setattr(target_probs, "BLOCK", 32)
    rng = np.random.default_rng(0)
    n, vocab = 12, 70
    wide = torch.from_numpy(rng.choice(np.linspace(-4, 4, 17), (n, vocab + 2))).to(dtype)
    logits = wide[:, :vocab]
    logits[rng.random((n, vocab)) < 0.1] = -0.0
    logits[rng.random((n, vocab)) < 0.2] = float("-inf")
    logits[1], logits[2, 40], logits[3, 3], logits[4] = float("-inf"), float("nan"), float("inf"), 1.0
    temperature = torch.from_numpy(rng.choice([0.0, 0.5, 1.0, 2.0], n, p=[0.1, 0.3, 0.3, 0.3]))
    top_p = torch.from_numpy(rng.permutation([0.0, 0.1, 0.5, 0.9, 0.9, 1.0] * 2) if filtered else np.ones(n))
    top_k = torch.from_numpy(
        rng.permutation([0, 0, 0, -1, 1, 2, 5, 20, 50, 50, 70, 90]) if filtered else np.zeros(n, np.int64)
    )
    with inputs_only_read(wide, temperature, top_p, top_k):
        found = KERNELS.target_probs(logits, temperature, top_p, top_k, filtered)
    expected = TWINS.target_probs(logits, temperature, top_p, top_k, filtered)
    torch.testing.assert_close(found, expected, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("kept", [None, torch.tensor([2, 0, 5]).int()])
def test_windows_are_the_twins(kept):
    table, rows, lengths = (
        torch.arange(200, dtype=torch.int32).view(4, 50),
        torch.tensor([3, 0, 1]),
        torch.arange(45, 48),
    )
    with inputs_only_read(table, rows, lengths):
        found = KERNELS.window(table, rows, lengths, 5, kept)
    for ours, theirs in zip(found, TWINS.window(table, rows, lengths, 5, kept), strict=True):
        assert torch.equal(ours, theirs)


def test_an_idle_batch_launches_nothing():
    none, pairs = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64)
    short, coins = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.float64)
    k, v = pools(np.random.default_rng(0), 3)
    table = torch.zeros(2, 4, dtype=torch.int32)
    with checked_memory() as seen:
        chain = KERNELS.build_chain(none, pairs[:, :1], none, MAX_POSITION)
        candidates = DeviceCandidates(pairs, coins.float(), pairs.int(), (1, 1))
        tree = KERNELS.build_tree(none, candidates, none, 2, MAX_POSITION)
        assert_same(chain, TWINS.build_chain(none, pairs[:, :1], none, MAX_POSITION))
        assert_same(tree, chain)
        greedy = KERNELS.verify_greedy(chain, none)
        assert_same(greedy, TWINS.verify_greedy(chain, none))
        sampled = KERNELS.verify_sampling(chain, torch.zeros(0, VOCAB), coins, coins)
        assert_same(sampled, TWINS.verify_sampling(chain, torch.zeros(0, VOCAB), coins, coins))
        assert KERNELS.coins(none, pairs, 1, 1).shape == (0, 2)
        assert [x.shape for x in KERNELS.gather_emitted(none, pairs.int(), short)] == [(0, 2), (0,)]
        assert KERNELS.compact(torch.zeros(0, 3), pairs.int(), 2).shape == (0, 3)
        KERNELS.move_accepted_(KVTensors(k, v), pairs, pairs.int(), short)
        KERNELS.move_slots_(KVTensors(k, v), none, none)
        KERNELS.duplicate_tails_(KVTensors(k, v), table, none, none, 4, 2, 2)
        assert KERNELS.relay_gather([table], none)[0].shape == (0, 4)
        KERNELS.relay_scatter_([table], none, [table[:0]])
    assert seen.launches == 0
