"""What a device computes with: its operations, and the number formats of a session."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from ...core.errors import ConfigError, nearest, nearest_name
from ...observe.children.cores import idle_cores
from ..types.session_options import AUTO, FLASHINFER, INT8, KEEP, OPS, TORCH, TRITON, UNPACK

if TYPE_CHECKING:
    import torch

    from ..models.config import ModelConfig
    from ..types.ops import Ops

ARGUMENTS = "<arguments>"
DEVICES = ("cpu", "cuda")
MAX_HEAD_DIM = 576  # with which the kernels of a GPU are compiled and compared
ONE_CORE_LAYER_BYTES = 4 << 20
"""Layers of fewer bytes than this are done by one core before two have agreed on who does what."""


def ops_for(device: str, name: str = AUTO) -> Ops:
    """Return the device operations for "cpu" or "cuda" (a number may follow, as in "cuda:1", which then becomes the
    current device). `name`: those that `SessionOptions.ops` chooses.

    Raises `ConfigError` for any other device, for "cuda" where Triton is not installed, and for operations that the
    device does not have or whose package is missing.
    """
    import torch

    from ..ops.torch_ops import TorchOps

    kind = device.partition(":")[0]
    if kind not in DEVICES:
        raise ConfigError.of("device", "device", f"{device!r} is none of {', '.join(DEVICES)}")
    if kind == "cpu":
        return _ops_of_cpu(name)
    from ..kernels.jit import triton

    if triton is None and name != TORCH:
        raise ConfigError.of("device", "device", "cuda needs Triton, which is not installed")
    if device != kind:
        # Triton launches on the current device, and streams, events and graphs belong to it, wherever the tensors are.
        torch.cuda.set_device(device)
    if name == TORCH:
        return TorchOps()
    from ..ops.tilings import read_tilings, take_tilings, tilings_path
    from ..ops.triton_ops import TritonOps

    if torch.cuda.is_available():
        take_tilings(read_tilings(tilings_path(torch.device(device))))
    if name != FLASHINFER:
        return TritonOps()
    from ..ops.flashinfer_ops import FlashInferOps, find_flashinfer

    return FlashInferOps(TritonOps(), find_flashinfer())


def _ops_of_cpu(name: str) -> Ops:
    from ..ops.host_ops import HostOps
    from ..ops.torch_ops import TorchOps

    if name == TORCH:
        return TorchOps()
    if name == FLASHINFER:
        raise ConfigError.of(ARGUMENTS, "ops", f"{name} needs an NVIDIA GPU; a CPU has {AUTO}, {TORCH}, and {TRITON}")
    if name == TRITON:
        if os.environ.get("TRITON_INTERPRET") != "1":
            message = f"{name} on a CPU is interpreted: set TRITON_INTERPRET=1, or name --device cuda"
            raise ConfigError.of(ARGUMENTS, "ops", message)
        from ..kernels.jit import triton
        from ..ops.triton_ops import TritonOps

        if triton is None:
            raise ConfigError.of(ARGUMENTS, "ops", f"{name} needs Triton, which is not installed")
        return TritonOps()
    return HostOps()


def check_ops(name: str, device: str) -> None:
    """Raise ConfigError for operations that are not known or that a device does not have, without a look at the
    device."""
    if name not in OPS:
        raise ConfigError.of(ARGUMENTS, "ops", f"{name!r} is none of {', '.join(OPS)}{nearest(name, OPS)}")
    if device == "cpu":
        _ops_of_cpu(name)
    elif name == FLASHINFER:
        from ..ops.flashinfer_ops import find_flashinfer

        find_flashinfer()


def ops_name(name: str, device: str) -> str:
    """Return the name of the operations that compute, which `SessionOptions.ops` may leave to the device. "meta" stands
    for a GPU."""
    return name if name != AUTO else TORCH if device == "cpu" else TRITON


def can_capture(name: str, device: str) -> bool:
    """Return whether rounds can be CUDA graphs: other operations than the kernels wait for the device."""
    return device != "cpu" and ops_name(name, device) == TRITON


def set_threads(device: str, threads: int | None, target: ModelConfig, weight_bytes: int) -> None:
    """Set how many threads torch computes with on a CPU, in the whole process; None: one for small models, else torch's
    own choice, at most the cores that are idle. More threads than that wait for each other: two for a model of 135 M
    parameters, on two busy cores, took 23.9 s of processor time where one took 5.3.

    NumPy computes with one: its pool waits for every thread even if another process has the core.
    """
    import torch

    if device.partition(":")[0] != "cpu":
        return
    from threadpoolctl import threadpool_limits  # which a machine that only uses its GPU may lack

    threadpool_limits(1, user_api="blas")
    if threads is None:
        is_small = weight_bytes // target.num_layers < ONE_CORE_LAYER_BYTES
        threads = 1 if is_small else min(torch.get_num_threads(), idle_cores())
    torch.set_num_threads(threads)


def resolve_device(name: str) -> str:
    import torch

    if name == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ConfigError.of(ARGUMENTS, "device", f"{name!r} is neither cpu nor cuda{nearest(name, ('cpu', 'cuda'))}")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError.of(ARGUMENTS, "device", f"{name} is not there; torch finds {found} CUDA devices")
    return name


def check_kernels(target: ModelConfig, device: str, source: str, ops: str = AUTO) -> None:
    """Raise ConfigError for operations that the device does not have, and for a model whose heads are wider than those
    of a GPU's kernels."""
    check_ops(ops, device)
    widest = max(target.heads_of(layer).dim for layer in range(target.num_layers))
    if ops_name(ops, device) != TORCH and device != "cpu" and widest > MAX_HEAD_DIM:
        message = (
            f"{widest} channels: a GPU's kernels have at most {MAX_HEAD_DIM}; use a CPU, or the operations {TORCH}"
        )
        raise ConfigError.of(source, "kv_lora_rank" if target.latent is not None else "head_dim", message)


def resolve_dtype(name: str, target: ModelConfig, device: str, quantized: str = AUTO) -> torch.dtype:
    import torch

    from ..models.stored.read_config import DTYPES

    if quantized == INT8:
        return _dtype_beside_integers(name, device)
    if device != "cpu" and (name == "float64" or (name == AUTO and target.dtype is torch.float64)):
        message = "float64 is for a CPU: the GPU's kernels sum in float32; choose float32 or bfloat16"
        raise ConfigError.of(ARGUMENTS, "dtype", message)
    if name == AUTO:
        keeps_dtype = device != "cpu" or target.dtype.itemsize >= 4 or _stays_narrow(target)
        return target.dtype if keeps_dtype else torch.float32
    if name not in DTYPES:
        message = f"{name!r} is none of {AUTO}, {', '.join(DTYPES)}{nearest_name(name, DTYPES)}"
        raise ConfigError.of(ARGUMENTS, "dtype", message)
    return DTYPES[name]


def _dtype_beside_integers(name: str, device: str) -> torch.dtype:
    import torch

    from ..kernels import host
    from ..models.projection import has_integers

    if device != "cpu":
        raise ConfigError.of(ARGUMENTS, "quantized", f"{INT8} is for a CPU; choose {KEEP} or {UNPACK} on {device}")
    if not (host.HAS_NUMBA or has_integers()):
        message = f"{INT8} needs Numba (pip install numba), or a CPU that multiplies 8-bit integers (VNNI)"
        raise ConfigError.of(ARGUMENTS, "quantized", message)
    if name not in (AUTO, "float32"):
        raise ConfigError.of(ARGUMENTS, "dtype", f"{name}: with quantized {INT8} everything else is float32")
    return torch.float32


class QuantizedChoice(Protocol):
    """The options of a session or a benchmark that say what becomes of quantized matrices."""

    @property
    def quantized(self) -> str: ...

    @property
    def tensor_parallel(self) -> int: ...


def keeps_quantized(options: QuantizedChoice, model: ModelConfig, device: str) -> bool:
    """Return whether a model's products take its quantized matrices as they are stored. Parts of a divided model are
    unpacked. The device "meta" stands for a GPU."""
    is_wanted = options.quantized == KEEP or (options.quantized == AUTO and device != "cpu")
    return is_wanted and model.quantization is not None and options.tensor_parallel == 1


def _stays_narrow(target: ModelConfig) -> bool:
    """Return whether a 16-bit model is computed in its own dtype on this CPU.

    It is if that dtype is native and reading the weights takes longer than the calls, which are quicker for 32 bits.
    """
    from ..models.checkpoint import required_bytes
    from ..models.projection import is_native

    layer_bytes = sum(required_bytes(target, target.dtype).values()) // target.num_layers
    return is_native(target.dtype) and layer_bytes >= ONE_CORE_LAYER_BYTES
