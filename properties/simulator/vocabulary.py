"""What a simulator is asked in a random run: services of a handful of requests, in pools that barely hold them or hold them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..harness.letters import Letter, Vocabulary
from . import operations as ops
from .contract import FAULTS, SimulatorCapabilities, SimulatorConfig
from .impossible import IMPOSSIBLE, IMPOSSIBLE_DEMANDS, IMPOSSIBLE_FAULTS

PAGE_SIZES = (1, 4, 16)
STEPS = (0, 3, 1, 5)
PROMPTS = ((5,), (3, 17), (40,), (1, 9, 30, 64))
OUTPUTS = ((4,), (1,), (1, 12), (30,), (2, 7, 20))
GAPS_MS = (50, 5, 200, 1)
POOLS = (64, 4, 8, 16)
SEEDS = tuple(range(1, 33))
QUIET_FAULTS = ("device.slow", "device.raises", "device.restarts", "link.late", "pool.denied", "pool.retraction")
"""Faults that change nothing of what is asked, only what comes of it."""


def draw_config(bits: int, capabilities: SimulatorCapabilities) -> SimulatorConfig:
    """From 32 random bits; 0 is the simplest."""
    return SimulatorConfig(PAGE_SIZES[bits % 3], STEPS[(bits >> 8) & 3], bool(bits >> 12 & 1))


def simpler_configs(config: SimulatorConfig) -> Iterator[SimulatorConfig]:
    """Configurations like this one, but simpler."""
    if config.overlap:
        yield replace(config, overlap=False)
    if config.page_size > 1:
        yield replace(config, page_size=1)
    for steps in sorted({0, 1} & set(range(config.steps))):
        yield replace(config, steps=steps)


def vocabulary(config: SimulatorConfig, capabilities: SimulatorCapabilities) -> Vocabulary:
    """The letters of one configuration."""
    impossible = [*IMPOSSIBLE]
    impossible += IMPOSSIBLE_FAULTS if capabilities.faults else ()
    impossible += IMPOSSIBLE_DEMANDS if capabilities.goodput else ()
    letters = {
        "": (
            Letter(ops.Load, 14, (4, 1, 8, 12), ("poisson", "even"), GAPS_MS, PROMPTS, OUTPUTS, SEEDS),
            Letter(ops.Size, 6, POOLS, (4, 1, 2), (1, 1, 2, 3)),
            Letter(ops.Run, 4),
            Letter(ops.Twice, 5),
            Letter(ops.OneMoreRequest, 5),
            Letter(ops.MorePages, 7, (1, 4, 8, 16, 64)),
            Letter(ops.Queue, 2, ("constant", "exponential"), range(1, 9)),
        ),
        "hostile": (Letter(ops.Impossible, 12, impossible),),
        "faults": (
            Letter(ops.Plan, 6, FAULTS, (10, 30, 0, 2)),
            Letter(ops.Calm, 3),
            Letter(ops.OneMoreFault, 8, QUIET_FAULTS, (20, 5)),
            Letter(ops.NoProbability, 4, FAULTS),
        ),
        "traces": (Letter(ops.Replay, 5),),
        "goodput": (Letter(ops.Demand, 4, (0, 10, 20, 50), (0, 20, 50, 100)),),
    }
    return {name: found for name, found in letters.items() if name in ("", "hostile", *capabilities.declared)}
