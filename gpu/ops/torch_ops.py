"""The device operations in plain torch: the product on a CPU, and what the Triton kernels are tested against."""

from __future__ import annotations

from ..kernels.layers.forward import TorchForward
from ..kernels.rounds.bookkeeping import TorchBookkeeping


class TorchOps(TorchForward, TorchBookkeeping):
    """`Ops` with the kernels' torch twins, in any floating dtype, float64 included."""

    layers_on_host = True
