"""The device operations as Triton kernels."""

from __future__ import annotations

from ..kernels.layers.forward import TritonForward
from ..kernels.rounds.bookkeeping import TritonBookkeeping
from ..models.layer import run_layers


class TritonOps(TritonForward, TritonBookkeeping):
    """`Ops` with Triton kernels, on CUDA tensors; every method may be captured in a CUDA graph."""

    run_layers = staticmethod(run_layers)
