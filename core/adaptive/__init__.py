"""Adaptive speculative steps: the number of drafted tokens per batch size, chosen from the acceptance so far."""

from .config import AdaptiveConfig, SlotConfig, load_adaptive_config
from .controller import AdaptiveController, build_controller, fixed_controller
from .cost_table import CostTable
from .goodput import GoodputPolicy
from .lengths.pass_costs import Costs, costs_from_json
from .slot import AdaptiveSpeculativeParams, AdaptiveStepSlot, InvalidObservation

__all__ = [
    "AdaptiveConfig",
    "AdaptiveController",
    "AdaptiveSpeculativeParams",
    "AdaptiveStepSlot",
    "CostTable",
    "Costs",
    "GoodputPolicy",
    "InvalidObservation",
    "SlotConfig",
    "build_controller",
    "costs_from_json",
    "fixed_controller",
    "load_adaptive_config",
]
