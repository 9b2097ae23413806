"""Adaptive speculative steps: the number of drafted tokens per batch size, chosen from the acceptance so far."""

from .config import AdaptiveConfig, SlotConfig, load_adaptive_config
from .controller import AdaptiveController, build_controller, fixed_controller
from .cost_table import CostTable
from .goodput import GoodputPolicy
from .slot import AdaptiveSpeculativeParams, AdaptiveStepSlot, InvalidObservation

__all__ = [
    "AdaptiveConfig",
    "AdaptiveController",
    "AdaptiveSpeculativeParams",
    "AdaptiveStepSlot",
    "CostTable",
    "GoodputPolicy",
    "InvalidObservation",
    "SlotConfig",
    "build_controller",
    "fixed_controller",
    "load_adaptive_config",
]
