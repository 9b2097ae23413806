"""Every invariant: its id, its sentence, its checker.
A file per group; each registers its checkers when it is loaded."""

from . import (  # noqa: F401
    accept,
    accept_moves,
    allocator,
    engine_kv,
    engine_order,
    engine_progress,
    engine_requests,
    engine_twins,
    prefix_cache,
    relay,
    simulator,
    steps,
)
from .registry import Finding, Invariant, all_invariants, invariant, of_contract

__all__ = ["Finding", "Invariant", "all_invariants", "invariant", "of_contract"]
