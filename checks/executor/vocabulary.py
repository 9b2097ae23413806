"""What an executor is asked in a random run: an engine of a few rows, steps and branches, and requests at the edges of pages and chunks.

S is never 3 or 4 and k never 2 or 4, nor a product of both: the reference's hidden states are 4 wide, and no row of candidates, drafts or
accepted tokens may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from ...core.errors import ConfigError
from ...core.scheduler.config import EngineSizes
from ...properties.harness.letters import Letter, Vocabulary
from . import operations as ops
from .contract import ExecutorCapabilities, ExecutorConfig

REQUESTS = ("a", "b", "c", "d")
ALGORITHMS = ("STANDALONE", "STANDALONE", "NONE", "STANDALONE", "NGRAM", "STANDALONE", "NONE", "NGRAM")
WITH_HEADS = ("STANDALONE", "EAGLE", "NONE", "STANDALONE", "NGRAM", "EAGLE3", "STANDALONE", "MULTI_LAYER_EAGLE")
STEPS = (1, 2, 5, 0, 1, 2, 5, 7)
TOPK = (1, 3, 1, 5)
TREE_SIZES = (3, 6, 9, 13)
PAGE_SIZES = (1, 2, 4, 16)
TEXT_LEN = 48
PROMPT_LENS = (1, 2, 3, 7, 8, 9, 16, 17, 25)


def draw_config(bits: int, capabilities: ExecutorCapabilities) -> ExecutorConfig:
    """A small engine, from 32 random bits."""
    algorithm = (WITH_HEADS if capabilities.hidden_states else ALGORITHMS)[bits & 7]
    steps = 0 if algorithm == "NONE" else STEPS[(bits >> 3) & 7]
    topk = TOPK[(bits >> 6) & 3] if capabilities.trees and steps > 0 and algorithm != "NONE" else 1
    nodes = 0
    if topk > 1:
        nodes = min(TREE_SIZES[(bits >> 8) & 3], 1 + topk + (steps - 1) * topk**2)
    config = ExecutorConfig(
        algorithm=algorithm,
        steps=steps,
        topk=topk,
        num_draft_tokens=nodes,
        adaptive=steps > 0 and (bits >> 10) & 3 == 3,
        num_pages=1 << 16,
        page_size=PAGE_SIZES[(bits >> 12) & 3],
        max_running=1 + ((bits >> 14) & 3) % 3,
        chunk_size=(64, 5, 8, 64)[(bits >> 16) & 3],
        block_rounds=(1, 8, 3, 1)[(bits >> 18) & 3],
        overlap=bool((bits >> 20) & 1),
        mixed=not (bits >> 21) & 1,
        prefix_cache=bool((bits >> 22) & 1),
        tokens=capabilities.tokens,
    )
    return _with_pool(config, (bits >> 23) & 3)


def _with_pool(config: ExecutorConfig, pool: int) -> ExecutorConfig:
    """The context and a KV pool for it: hardly more than the longest request, a few, or so many that blocks of rounds fit."""
    controller = config.make_controller()
    overshoot = max(controller.max_steps * controller.topk, controller.max_num_draft_tokens)
    config = replace(config, context_len=TEXT_LEN + overshoot)
    engine = config.make_engine()
    sizes = EngineSizes.resolve(engine.config, engine.algorithm, engine.controller)
    longest = TEXT_LEN + sizes.reserve + 2 * config.page_size
    slots = (4 * longest, 2 * longest, longest + 8, 30 * longest)[pool]
    return replace(config, num_pages=-(-slots // config.page_size))


_SIMPLEST = {"adaptive": False, "overlap": False, "mixed": True, "prefix_cache": False, "block_rounds": 1}


def simpler_configs(config: ExecutorConfig) -> Iterator[ExecutorConfig]:
    """Configurations like this one, but smaller; the algorithm stays."""
    candidates = [replace(config, **{name: value}) for name, value in _SIMPLEST.items()]
    candidates += [replace(config, topk=1, num_draft_tokens=0), replace(config, steps=1, topk=1, num_draft_tokens=0)]
    candidates += [replace(config, page_size=1), replace(config, max_running=1), replace(config, chunk_size=64)]
    candidates += [replace(config, num_pages=64)]
    for simpler in candidates:
        changed = [f.name for f in fields(config) if getattr(simpler, f.name) != getattr(config, f.name)]
        if not changed or (config.steps == 0 and "steps" in changed):
            continue
        try:
            simpler.make_engine()
        except ConfigError:
            continue
        yield simpler


def vocabulary(config: ExecutorConfig, capabilities: ExecutorCapabilities) -> Vocabulary:
    """The letters of one configuration."""
    asks = (False, False, True) if capabilities.tokens else (False,)
    letters = {
        "": (
            Letter(ops.Submit, 6, REQUESTS, PROMPT_LENS, (1, 2, 5, 12, 20), (0, 0, 1, 9), asks, asks),
            Letter(ops.Launch, 12),
            Letter(ops.Collect, 12),
        ),
        "hostile": (Letter(ops.Abort, 1, REQUESTS), Letter(ops.Retract, 1, REQUESTS), Letter(ops.Stop, 1)),
        "rounds": (Letter(ops.Advance, 3, (1, 1, 2, 3)),),
        "merging": (Letter(ops.Merge, 1, (-1, 0, 1, 3), (-1, 0, 2)),),
        "handoff": (Letter(ops.Arrive, 1, ((0,), (1,), (), (0, 0), (1, 1), (0, 1), (1, 0, 1))),),
    }
    return {name: found for name, found in letters.items() if name in ("", "hostile", *capabilities.declared)}
