"""A scenario: everything that a simulated run depends on, validated all at once."""

from .engine_table import EngineTable
from .scenario import Acceptance, FrontEndTable, Hardware, PoolHardware, Scenario, Speculation
from .workload import Clients, Length, Workload

__all__ = [
    "Acceptance",
    "Clients",
    "EngineTable",
    "FrontEndTable",
    "Hardware",
    "Length",
    "PoolHardware",
    "Scenario",
    "Speculation",
    "Workload",
]
