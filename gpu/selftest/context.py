"""What the steps of a self-test share: the device, a folder for what they make, and how large they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..ops.port import Ops
from ..session.devices import ops_for


@dataclass(slots=True)
class Context:
    """`directory` is empty at first and given to every process of the test. Sizes are small on a CPU."""

    device: str
    directory: Path
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """In the order of risk: sums in float32 first."""
        return (torch.float32, torch.bfloat16)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return make()'s value, made by the first step that asks."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    @property
    def ops(self) -> Ops:
        """The device's operations: what is tested."""
        return self.once("ops", lambda: ops_for(self.device))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
