"""The Triton kernels on a GPU behind the acceptance contract."""

import pytest
import torch
from foredraft.checks.adapters.torch_accept import make_cuda
from foredraft.properties.conformance import check_accept

pytestmark = pytest.mark.gpu


def test_the_kernels_hold_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    report = check_accept(make_cuda, budget=3_000)
    assert report.ok and report.num_operations >= 3_000
