"""What a transport is asked in a random run: few requests, small pools, a link that is mostly good."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...properties.harness.letters import Letter, Vocabulary
from . import operations as ops
from .contract import DECODE, PREFILL, SIDES, TransportCapabilities, TransportConfig

GENERATIONS = ((1, 1), (1, 1), ((1 << 31) - 1, 1), (1, 1 << 32), ((1 << 63) + 5, 1 << 40))


def draw_config(bits: int, capabilities: TransportCapabilities) -> TransportConfig:
    """Pages of 1 to 4 tokens, pools that one prompt or several fill, from 32 random bits."""
    page_size = (1, 2, 4)[bits % 3]
    generation, step = GENERATIONS[(bits >> 8) % len(GENERATIONS)]
    return TransportConfig(
        page_size=page_size,
        prefill_pages=(24, 12, 40)[(bits >> 2) % 3] // page_size + 2,
        decode_pages=(40, 28, 60)[(bits >> 4) % 3] // page_size + 6,
        chunk_size=(4, 2, 16)[(bits >> 6) % 3],
        num_output=(3, 2, 6)[(bits >> 12) % 3],
        hidden=bool((bits >> 14) & 1),
        generation=generation,
        generation_step=step,
    )


def simpler_configs(config: TransportConfig) -> Iterator[TransportConfig]:
    """Configurations like this one, but plainer."""
    plain = TransportConfig(prefill_pages=30, decode_pages=50)
    for name in ("page_size", "num_output", "hidden", "generation", "generation_step", "chunk_size"):
        if getattr(config, name) != getattr(plain, name):
            yield replace(config, **{name: getattr(plain, name)})


def vocabulary(config: TransportConfig, capabilities: TransportCapabilities) -> Vocabulary:
    """The letters of one configuration."""
    requests, places = (1, 2, 3, 4), (0, 0, 0, 1, 2, 5)
    times = (1, config.fence_ns, config.lease_ns // 2, config.lease_ns, config.hold_ns)
    letters = {
        "": (
            Letter(ops.Start, 8, requests, (0, 0, 1), (3, 1, 2, 5, 8, 4)),
            Letter(ops.Compute, 10),
            Letter(ops.Decode, 6),
            Letter(ops.Deliver, 12, SIDES, places),
            Letter(ops.DeliverAll, 12, SIDES),
            Letter(ops.Advance, 3, times),
            Letter(ops.Quiet, 1),
        ),
        "hostile": (
            Letter(ops.Drop, 3, SIDES, places),
            Letter(ops.Duplicate, 2, SIDES, places),
            Letter(ops.Again, 6, (DECODE, DECODE, PREFILL), (0, 1, 2, 3, 5, 7)),
            Letter(ops.Damage, 4, places, (3, 0, 1, 2, 3)),
            Letter(ops.Cancel, 2, SIDES, requests),
            Letter(ops.Kill, 1, (DECODE, PREFILL), (True, False)),
            Letter(ops.Restart, 1, SIDES),
        ),
        "roles": (Letter(ops.ChangeRole, 2, SIDES),),
    }
    return {name: found for name, found in letters.items() if name in ("", "hostile", *capabilities.declared)}
