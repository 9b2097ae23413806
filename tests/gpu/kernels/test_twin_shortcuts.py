"""The shortcuts of the torch twins on a CPU give the same results as the full computation."""

import pytest
import torch
from foredraft.gpu.kernels.layers.rope_write import _joined, rope_write_torch, rotation_of
from foredraft.gpu.kernels.layers.verify_attention import verify_attention_torch, verify_keys
from foredraft.gpu.kernels.padded import keys_of
from foredraft.gpu.types.attention import Softmax


@torch.no_grad()
def test_neighbours_are_rotated_at_once():
    torch.manual_seed(0)
    qkv = torch.randn(4, 2 + 1 + 1, 8, dtype=torch.float64)
    q, k, v = qkv.split_with_sizes((2, 1, 1), 1)
    assert _joined(q, k).data_ptr() == qkv.data_ptr() and _joined(q, k).shape == (4, 3, 8)
    # k and v lie side by side too, v and q do not; nor do copies.
    assert _joined(v, q) is None and _joined(q.clone(), k.clone()) is None and _joined(q, v) is None
    table = torch.rand(9, 8, dtype=torch.float64)
    rotation, slots = rotation_of(table, torch.tensor([3, 4, 8, 0])), torch.tensor([5, 2, 0, 1])
    pools = [torch.zeros(7, 1, 8, dtype=torch.float64) for _ in range(4)]
    together = rope_write_torch(q, k, v, rotation, slots, *pools[:2])
    apart = rope_write_torch(q.clone(), k.clone(), v, rotation, slots, *pools[2:])
    for a, b in zip((*together, *pools[:2]), (*apart, *pools[2:]), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(pools[0][slots], together[1])


@torch.no_grad()
@pytest.mark.parametrize(("rows", "lens"), [([1], [6]), ([2], [6]), ([1, 2], [6, 6])])
def test_slots_in_a_row_are_read_where_they_are(rows, lens):
    """Row 1 has ascending slots, row 2 the same ones but for two exchanged; both read the same keys."""
    torch.manual_seed(0)
    k_pool, v_pool = torch.randn(2, 12, 2, 8, dtype=torch.float64)
    table = torch.zeros((3, 10), dtype=torch.int32)
    table[1, :6] = torch.arange(4, 10)
    table[2, :6] = torch.tensor([4, 5, 7, 6, 8, 9])
    index, prefix = torch.tensor(rows), torch.tensor(lens)
    q, k, v = torch.randn(3, len(rows) * 2, 4, 8, dtype=torch.float64)
    k, v = k[:, :2], v[:, :2]
    bits = torch.tensor([[1, 3]]).expand(len(rows), 2)
    keys = verify_keys(table, index, prefix, bits, 6, 2, 0, torch.float64)
    assert keys.begin == (4 if rows == [1] else None)
    if keys.begin is not None:
        assert keys_of(k_pool, keys, 1).data_ptr() == k_pool[4].data_ptr()
    found = verify_attention_torch(q, k.contiguous(), v.contiguous(), k_pool, v_pool, keys, Softmax(0.3))
    for i in range(len(rows)):
        for node in range(2):
            slots = table[rows[i], : lens[i]].long()
            seen_k = torch.cat((k_pool[slots], k[i * 2 : i * 2 + node + 1])).repeat_interleave(2, 1)
            seen_v = torch.cat((v_pool[slots], v[i * 2 : i * 2 + node + 1])).repeat_interleave(2, 1)
            weights = (torch.einsum("hd,thd->ht", q[i * 2 + node], seen_k) * 0.3).softmax(-1)
            expected = torch.einsum("ht,thd->hd", weights, seen_v)
            assert torch.allclose(found[i * 2 + node], expected, atol=1e-12)
