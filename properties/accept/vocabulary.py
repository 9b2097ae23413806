"""What acceptance is asked in a random run: shapes at the edges, several rounds in flight, drafts and targets that agree more or less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..harness.letters import Letter, Vocabulary
from . import inputs
from . import operations as ops
from .contract import AcceptCapabilities, AcceptConfig

VOCAB_SIZES = (3, 2, 4, 5, 8, 8, 17, 17)
PAGE_SIZES = (1, 1, 2, 3, 4, 16)
CONTEXTS = (16, 5, 9, 24, 40)
ROUNDS = ("a", "b", "c")
CHAINS = ((1, 1, 2), (0, 1, 1), (2, 1, 3), (3, 1, 4), (5, 1, 6), (8, 1, 9))
# k = 1 with fewer nodes than steps; nd below, at and above S + 1; all that there is; the largest; one wide step; several 0 steps.
TREES = (
    *((1, 2, 3), (2, 2, 3), (2, 2, 4), (2, 2, 7), (3, 2, 6), (3, 2, 9), (3, 1, 3), (2, 3, 8), (4, 4, 10), (5, 2, 5)),
    *((0, 2, 1), (1, 2, 2), (3, 8, 33), (8, 4, 64), (1, 16, 17), (2, 16, 40)),
)
ROWS = ((0,), (0,), (1,), (2,), (3,), (0, 1), (1, 0), (0, 2), (2, 1, 0), (0, 1, 2, 3), (0, 1, 2, 3), ())
SEEDS = tuple(range(24))
AGREEMENTS = (3, 2, 4, 1, 0)


def draw_config(bits: int, capabilities: AcceptCapabilities) -> AcceptConfig:
    """A few rows and a small vocabulary, from 32 random bits."""
    return AcceptConfig(
        vocab_size=VOCAB_SIZES[bits & 7],
        page_size=PAGE_SIZES[(bits >> 3) % len(PAGE_SIZES)],
        context_len=CONTEXTS[(bits >> 8) % len(CONTEXTS)],
        num_rows=1 + (bits >> 12) % 4,
    )


def simpler_configs(config: AcceptConfig) -> Iterator[AcceptConfig]:
    """Configurations like this one, but smaller."""
    if config.num_rows > 1:
        yield replace(config, num_rows=config.num_rows - 1)
    for name, values in (("page_size", PAGE_SIZES), ("vocab_size", VOCAB_SIZES), ("context_len", CONTEXTS)):
        for value in sorted(set(values)):
            if value < getattr(config, name):
                yield replace(config, **{name: value})


def twin_config(kind: str, config: AcceptConfig) -> AcceptConfig:
    """The twin is the same component on another rank."""
    return replace(config, rank=config.rank + 1)


def vocabulary(config: AcceptConfig, capabilities: AcceptCapabilities) -> Vocabulary:
    """The letters of one configuration."""
    shapes = CHAINS + (TREES if capabilities.trees else ())
    fitting = [shape for shape in shapes if shape[1] <= config.vocab_size]
    garbage = inputs.GARBAGE_SCORES + (inputs.GARBAGE_IDS if capabilities.raw_drafts else ())
    targets = (ROUNDS, SEEDS, AGREEMENTS)
    letters = {
        "": (
            Letter(ops.Configure, 10, fitting),
            Letter(ops.Replace, 2, range(config.num_rows), (1, 2, 3, config.context_len - 2)),
            Letter(ops.Launch, 20, ROUNDS, ROWS, SEEDS, (0, 0, 0, 1, 2)),
            Letter(ops.Greedy, 16, *targets),
            Letter(ops.Abandon, 2, ROUNDS),
        ),
        "hostile": (Letter(ops.LaunchGarbage, 8, ROUNDS, ROWS, SEEDS, garbage),),
        "proposals": (Letter(ops.Propose, 6, ROUNDS, ROWS, SEEDS),),
        "sampling": (Letter(ops.Sample, 14, *targets), Letter(ops.Distribution, 1, SEEDS, (1, 2, 3))),
        "draft_probabilities": (
            Letter(ops.SampleDrafted, 10, *targets, inputs.BROKEN_DRAFTS),
            Letter(ops.DistributionDrafted, 1, SEEDS),
        ),
        "constraints": (Letter(ops.Constrain, 8, ROUNDS, SEEDS[:8]),),
        "target_failures": (Letter(ops.FailTarget, 4, ROUNDS, SEEDS, (False, True)),),
    }
    return {name: found for name, found in letters.items() if name in ("", "hostile", *capabilities.declared)}
