"""What a relay is asked in a random run: few rows, batches with padding lanes, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..harness.letters import Letter, Vocabulary
from . import operations as ops
from .contract import RelayCapabilities, RelayConfig

WIDTHS = ((), (0,), (0, 3), (2, 0, 1))
HIDDEN_WIDTHS = (0, 0, 4, 1)
ODDITIES = ("hidden", "extra", "missing")
BATCHES = (
    *((1,), (2,), (3,), (4,), (1, 2), (2, 1), (3, 1), (4, 2), (1, 2, 3), (3, 2, 1), (1, 2, 3, 4), (4, 3, 2, 1)),
    *((), (0,), (0, 1), (2, 0), (0, 1, 0, 2), (3, 0, 0, 1), (0, 4, 3, 0, 2, 1, 0)),
)
TWICE = ((1, 1), (2, 1, 2), (0, 3, 3), (1, 2, 3, 4, 1))
AHEAD = (1, -1, 2, 256, -(1 << 16), 1 << 32)


def draw_config(bits: int, capabilities: RelayCapabilities) -> RelayConfig:
    """One to four rows, with or without hidden states, from 32 random bits."""
    widths = WIDTHS[(bits >> 2) % len(WIDTHS)]
    return RelayConfig(1 + bits % 4, widths, HIDDEN_WIDTHS[(bits >> 4) % len(HIDDEN_WIDTHS)])


def simpler_configs(config: RelayConfig) -> Iterator[RelayConfig]:
    """Configurations like this one, but smaller."""
    for rows in range(1, config.num_rows):
        yield replace(config, num_rows=rows)
    for at in range(len(config.widths)):
        yield replace(config, widths=config.widths[:at] + config.widths[at + 1 :])
    for at, width in enumerate(config.widths):
        if width:
            yield replace(config, widths=(*config.widths[:at], 0, *config.widths[at + 1 :]))
    if config.hidden_width:
        yield replace(config, hidden_width=0)
    if config.hidden_width > 1:
        yield replace(config, hidden_width=1)


def vocabulary(config: RelayConfig, capabilities: RelayCapabilities) -> Vocabulary:
    """The letters of one configuration."""
    requests = (1, 2, 3, 4)
    calls = ("resolve", "publish", "stash", "drop")
    few = ((), (1,), (2, 1), (0, 3))
    letters = {
        "": (
            Letter(ops.Open, 8, requests),
            Letter(ops.Write, 14, BATCHES),
            Letter(ops.Publish, 2, BATCHES),
            Letter(ops.Stash, 2, BATCHES),
            Letter(ops.Read, 14, BATCHES),
            Letter(ops.Release, 4, requests),
        ),
        "hostile": (
            Letter(ops.ReadAnyway, 4, BATCHES + TWICE),
            Letter(ops.WriteAnyway, 4, ("lengths", "fields"), BATCHES + TWICE),
            Letter(ops.Stray, 2, calls, (-1, 0, -2, 1, 1 << 16, 1 << 31, 1 << 40), few),
            Letter(ops.StashOddly, 2, ODDITIES, requests),
        ),
        "generations": (
            Letter(ops.Inherit, 2, requests, requests),
            Letter(ops.ReadAs, 3, requests, AHEAD, few),
            Letter(ops.HalfAs, 2, requests, AHEAD),
        ),
    }
    return {name: found for name, found in letters.items() if name in ("", "hostile", *capabilities.declared)}
