"""The self-test's drafters of one pass with only interpreted Triton kernels, which a GPU runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.selftest.sessions import IN_ONE_PASS, same_drafts
from foredraft.gpu.selftest.steps import Context
from foredraft.gpu.session import devices


@pytest.fixture
def context(tmp_path, monkeypatch) -> Iterator[Context]:
    """A context whose first session, that in float32, has the kernels of a GPU."""
    own, ops_of_gpu = devices.ops_for, [TritonOps()]
    monkeypatch.setattr(devices, "ops_for", lambda device: ops_of_gpu.pop() if ops_of_gpu else own(device))
    yield Context("cpu", tmp_path)
    assert not ops_of_gpu


@pytest.mark.fast(ci="DFLASH")
@pytest.mark.parametrize("name", IN_ONE_PASS)
def test_drafts_are_those_of_float64(context, name):
    assert "drafts are those of float64" in same_drafts(context, name).text
