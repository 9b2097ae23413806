"""Every invariant: its id, its sentence, its checker."""

from . import allocator as allocator
from .registry import Finding, Invariant, all_invariants, invariant, of_contract

__all__ = ["Finding", "Invariant", "all_invariants", "invariant", "of_contract"]
