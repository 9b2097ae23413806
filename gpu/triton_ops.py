"""The device operations as Triton kernels."""

from __future__ import annotations

from .kernels.bookkeeping import TritonBookkeeping
from .kernels.forward import TritonForward


class TritonOps(TritonForward, TritonBookkeeping):
    """`Ops` with Triton kernels, on CUDA tensors; every method may be captured in a CUDA graph."""

    layers_on_host = False
