"""The use of a device's memory, and the size of the KV pool that is left.

`rules.py`: what each server takes by its release, and where it places windows and states. `plan.py`: the budget of one
device. `pool.py` computes it.
"""

from __future__ import annotations

from .plan import RESERVED, InsufficientMemory, MemoryPlan, MemoryShares, Slot
from .pool import kv_pool_slots
from .rules import GRAPH_BYTES, MemoryRules, StateLayout

__all__ = [
    "GRAPH_BYTES",
    "RESERVED",
    "InsufficientMemory",
    "MemoryPlan",
    "MemoryRules",
    "MemoryShares",
    "Slot",
    "StateLayout",
    "kv_pool_slots",
]
