"""The self-test's drafters of one pass with only interpreted Triton kernels, which a GPU runs."""

from __future__ import annotations

import pytest
from foredraft.gpu.selftest.sessions import IN_ONE_PASS, same_drafts
from foredraft.gpu.selftest.steps import Context
from foredraft.gpu.types.session_options import TRITON


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ONE_PASS)
def test_drafts_are_those_of_float64(tmp_path, name):
    assert "drafts are those of float64" in same_drafts(Context("cpu", tmp_path, TRITON), name).text
