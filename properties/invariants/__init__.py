"""Every invariant: its id, its sentence, its checker. A file per group; each registers its checkers when it is loaded."""

import importlib
import pkgutil

from .registry import Finding, Invariant, all_invariants, invariant, of_contract

__all__ = ["Finding", "Invariant", "all_invariants", "invariant", "of_contract"]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_file.name}", __name__)
