"""Planted defects of simulators. They stand beside the component that they are made of, which this package does not import."""

from __future__ import annotations

import importlib

from ...properties.harness.mutants import Mutant

BESIDE_ITS_ADAPTER = "foretoken.checks.mutants.simulated_service"
"""Where `DEFECTS` are: (name, defect, make, caught by)."""

MUTANTS = tuple(
    Mutant(name, defect, "simulator", make, caught_by)
    for name, defect, make, caught_by in importlib.import_module(BESIDE_ITS_ADAPTER).DEFECTS
)
