"""The device operations in plain torch: the product on a CPU, and what the Triton kernels are tested against."""

from __future__ import annotations

from .kernels.bookkeeping import TorchBookkeeping
from .kernels.forward import TorchForward


class TorchOps(TorchForward, TorchBookkeeping):
    """`Ops` with the kernels' torch twins, in any floating dtype, float64 included."""

    layers_on_host = True
