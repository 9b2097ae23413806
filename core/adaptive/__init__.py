"""Adaptive speculative steps: how many tokens to draft, per batch size, from what was accepted so far."""

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
