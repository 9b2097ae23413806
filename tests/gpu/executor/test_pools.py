"""The memory of KV pools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foredraft.gpu.batch.pools import KVPool
from foredraft.gpu.types.attention import KVShape

CPU = torch.device("cpu")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says how much memory a process has")
def test_a_pool_on_a_cpu_takes_memory_where_it_is_written():
    before = resident_bytes()
    pool = KVPool([KVShape(8, 64, 64)] * 4, 65_536, torch.bfloat16, CPU)
    assert pool.num_bytes == 1 << 29 and resident_bytes() - before < 1 << 25
    pool.keys[:, :1024] = 1
    assert pool.keys[0, 1023, 0, 0] == 1 and pool.keys[3, 1024, 7, 63] == 0
    assert 1 << 22 <= resident_bytes() - before < 1 << 26


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_pool_begins_with_zeros_of_its_dtype(dtype):
    pool = KVPool([KVShape(2, 8, 4)], 3, dtype, CPU)
    assert pool.keys.shape == (1, 3, 2, 8) and pool.values.shape == (1, 3, 2, 4)
    assert pool.keys.dtype == pool.values.dtype == dtype and pool.keys.data_ptr() % 64 == 0
    assert not pool.keys.float().any() and not pool.values.float().any()
