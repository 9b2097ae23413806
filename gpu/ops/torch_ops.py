"""The device operations in plain torch: what a CPU uses for batches and prompts, and what the Triton kernels are tested against."""

from __future__ import annotations

from ..kernels.layers.forward import TorchForward
from ..kernels.rounds.bookkeeping import TorchBookkeeping
from ..models.layer import run_layers


class TorchOps(TorchForward, TorchBookkeeping):
    """`Ops` with the kernels' torch twins, in any floating dtype, float64 included."""

    run_layers = staticmethod(run_layers)
