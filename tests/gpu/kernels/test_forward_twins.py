"""The forward pass's torch operations in float64;
the tests of the kernels compare both with sums over one query at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.selftest.batches import decode_view, make_batch, random_tree_bits, rotary_table
from forward_cases import dense_decode, dense_extend, dense_verify, rotate_one


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_silu_mul_gates_the_second_half():
    x = torch.randn(5, 14, dtype=torch.float64)
    close(TorchOps().silu_mul(x), x[:, :7] / (1 + torch.exp(-x[:, :7])) * x[:, 7:])


def test_norms_and_gate_are_differentiable():
    ops = TorchOps()
    x, y, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 8), (3, 8), (8,)))
    assert torch.autograd.gradcheck(lambda a, w: ops.rms_norm(a, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda a, b, w: ops.add_rms_norm(a, b, w, 1e-5), (x, y, weight))
    assert torch.autograd.gradcheck(ops.silu_mul, (x,))


def extend(ops: TorchOps, batch) -> torch.Tensor:
    return ops.extend_attention(
        batch.q, batch.k, batch.v, batch.kv, batch.chunks(batch.max_prefix_len, batch.max_new_len)
    )


@pytest.mark.parametrize("kind", ["decode", "verify", "extend"])
def test_what_is_kept_between_layers_follows_writes_to_the_index_tensors(kind: str):
    """Same tensors, new content: as when a batch is copied into buffers that stay."""
    ops = TorchOps()
    batch = make_batch(7, [6, 3], [2, 2])
    view = decode_view(batch, [4, 3, 4, 3])
    view = type(view)(batch.table, batch.rows.repeat(2), view.lens, view.tails, view.lens, 8)
    bits = random_tree_bits(0, 2, 2)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        if kind == "decode":
            return ops.decode_attention(batch.q, batch.kv, view), dense_decode(batch, view)
        tokens = (batch.q, batch.k, batch.v, batch.kv)
        if kind == "verify":
            return ops.verify_attention(*tokens, batch.tree(bits, 8)), dense_verify(batch, bits)
        return ops.extend_attention(*tokens, batch.chunks(8, 4)), dense_extend(batch)

    before = run()
    close(*before)
    for change in (
        lambda: batch.table.copy_(batch.table.flip(1)),
        lambda: batch.prefix_lens.sub_(1),
        lambda: view.lens.sub_(1),
        lambda: bits.fill_(1),
    ):
        change()
        close(*run())
    assert not torch.equal(before[0], run()[0])


def test_the_rotation_kept_between_layers_follows_the_positions():
    ops, batch, table = TorchOps(), make_batch(7, [0], [2]), rotary_table(16)
    positions, slots = torch.tensor([4, 5]), torch.tensor([1, 2])
    for _ in range(2):
        q, _, _ = ops.rope_write(batch.q, batch.k, batch.v, table, positions, slots, batch.kv)
        for i in range(2):
            close(q[i], rotate_one(batch.q[i], table, int(positions[i])))
        positions += 7


def test_inference_tensors_have_no_versions_so_nothing_is_kept():
    ops, batch = TorchOps(), make_batch(8, [6, 3], [1, 1])
    with torch.inference_mode():
        view = decode_view(batch, [6, 3])
        view = type(view)(view.table, view.rows, view.lens, view.tails, view.lens, 6)
        for _ in range(2):
            actual = ops.decode_attention(batch.q, batch.kv, view)
            close(actual, dense_decode(batch, view))
            view.lens.sub_(1)


def test_float64_takes_no_detour():
    """A difference that float32 cannot hold must come through."""
    ops = TorchOps()
    for prefix, new in itertools.product([[0], [40]], [[1], [3]]):
        batch = make_batch(9, prefix, new)
        batch.v_pool[:], batch.v[:] = 1 + 2.0**-40, 1 + 2.0**-40
        assert (extend(ops, batch) - 1 - 2.0**-40).abs().max() < 1e-15
