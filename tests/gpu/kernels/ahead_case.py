"""What one specialisation of a kernel is compiled with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.gpu.kernels.layers.flash import DeviceTraits

KIB = 1 << 10
SHARED_BYTES = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB, 121: 99 * KIB}
"""What a block may have of shared memory on the GPUs that cases are compiled for, by ten times their capability."""
ARCHITECTURES = tuple(SHARED_BYTES)


def traits_of(architecture: int) -> DeviceTraits:
    return DeviceTraits(128, architecture, SHARED_BYTES[architecture])


@dataclass(frozen=True, slots=True)
class AotCase:
    """One specialisation of a kernel, at a realistic shape.

    `types` lists the parameters of each type in Triton's words ("*bf16", "*i64", "i32", "fp32"), `constexprs` has the
    values of the constant ones. Pointers are taken to be 16-byte aligned, as torch allocates them, and so are the
    integers in `divisible_by_16`.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]  # names with spaces between them
    constexprs: Mapping[str, Any]
    divisible_by_16: str = ""
    num_warps: int = 4
    num_stages: int = 3
    tensor_cores: bool = False  # the compiled code must use them
    may_spill: bool = False  # where no choice of blocks and warps fits the registers
    architectures: tuple[int, ...] = ARCHITECTURES  # of the GPUs that it is launched on
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def signature(self) -> dict[str, str]:
        """Return the type of each parameter that is not constant."""
        return {name: kind for kind, names in self.types.items() for name in names.split()}
