"""A scenario: everything that a simulated run depends on, validated all at once."""

from .engine_table import EngineTable
from .hardware import Hardware, PoolHardware
from .model import Model
from .scenario import FrontEndTable, Scenario
from .speculation import Acceptance, Speculation
from .workload import Clients, Length, Workload

__all__ = [
    "Acceptance",
    "Clients",
    "EngineTable",
    "FrontEndTable",
    "Hardware",
    "Model",
    "Length",
    "PoolHardware",
    "Scenario",
    "Speculation",
    "Workload",
]
