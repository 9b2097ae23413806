"""Which operations a device gets, and that the CPU's need no Triton."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foredraft.core.errors import ConfigError
from foredraft.gpu.models.config import LLAMA, ModelConfig
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.session import devices
from foredraft.gpu.session.devices import ONE_CORE_LAYER_BYTES, ops_for, set_threads
from foredraft.gpu.types.ops import Ops
from threadpoolctl import threadpool_info, threadpool_limits

SMALL = ModelConfig(LLAMA, 32, 16, 16, 2, 2, 1, 8)


@pytest.mark.parametrize("implementation", [TorchOps, TritonOps])
def test_every_operation_is_there_with_the_ports_parameters(implementation: type):
    for name, asked in inspect.getmembers(Ops, inspect.isfunction):
        if not name.startswith("_"):
            found, expected = (
                inspect.signature(getattr(implementation(), name)).parameters,
                inspect.signature(asked).parameters,
            )
            assert ["self", *found][: len(expected)] == list(expected), name
            further = [*found.values()][len(expected) - 1 :]
            assert all(one.default is not one.empty for one in further), f"{name} needs more than the port gives"


@pytest.mark.parametrize("device", ["tpu", "", "cud"])
def test_an_unknown_device_is_refused(device: str):
    with pytest.raises(ConfigError, match="cpu, cuda"):
        ops_for(device)


@pytest.mark.slow
def test_without_triton_a_cpu_works_and_cuda_is_refused():
    program = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
from foredraft.core.errors import ConfigError
from foredraft.gpu.session.devices import ops_for
print(ops_for("cpu").silu_mul(torch.zeros(1, 4)).shape[1])
try:
    ops_for("cuda")
except ConfigError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines() == ["2", "device: device: cuda needs Triton, which is not installed"], run.stderr


def test_a_numbered_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch):
    chosen = []
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    assert isinstance(ops_for("cuda:1"), TritonOps) and isinstance(ops_for("cuda"), TritonOps)
    assert chosen == ["cuda:1"]


@pytest.mark.parametrize(
    ("device", "asked", "layer_bytes", "expected"),
    [
        ("cpu", None, ONE_CORE_LAYER_BYTES - 1, [1]),
        ("cpu", None, ONE_CORE_LAYER_BYTES, [5]),
        ("cpu", 3, 1, [3]),
        ("cuda:0", 3, 1, []),
    ],
)
def test_small_models_get_one_thread_and_large_ones_idle_cores(device, asked, layer_bytes, expected, monkeypatch):
    chosen = []
    monkeypatch.setattr(devices, "idle_cores", lambda: 5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    set_threads(device, asked, SMALL, 2 * layer_bytes)
    assert chosen == expected


@pytest.mark.parametrize(("device", "expected"), [("cpu", 1), ("cuda:0", 2)])
def test_numpy_waits_for_no_other_thread_on_a_cpu(device: str, expected: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    with threadpool_limits(2, user_api="blas"):
        set_threads(device, 2, SMALL, 1)
        assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {expected}


def test_no_file_names_a_gpu_but_the_one_that_a_session_is_given():
    """Nothing is made on "cuda" as such, and the current device is chosen in three places:
    for a block, for a command's process, and for that of a rank."""
    root = Path(inspect.getfile(ops_for)).parents[1]
    made = re.compile(r"device=[\"']cuda|\.to\([\"']cuda|\.cuda\(\)|torch\.device\([\"']cuda")
    chosen = re.compile(r"torch\.cuda\.(set_device|device\(|current_device)")
    found = {
        (path.name, match)
        for path in root.rglob("*.py")
        for pattern in (made, chosen)
        for match in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert found == {
        ("uploads.py", 'torch.device("cuda'), ("uploads.py", "device("), ("uploads.py", "current_device"),
        ("devices.py", "set_device"), ("rank.py", "set_device"),
    }  # fmt: skip
