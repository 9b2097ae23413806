"""What an engine is asked in a random run: small pools, requests at the edges of pages and chunks, and a device that answers late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...core.kv.sizing import ceil_to_page
from ..harness.letters import Letter, Vocabulary
from . import operations as ops
from .contract import EngineCapabilities, ServingConfig

PAGE_SIZES = (1, 2, 4, 1, 3, 2, 8, 16)
REQUESTS = ("a", "b", "c", "d", "e", "f")

# (candidates, top-k, nodes of a tree or 0 for a chain); S + 1 is not nd where there are branches.
SHAPES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    *(((0,), 1, 0), ((1,), 1, 0), ((2,), 1, 0), ((0, 2), 1, 0), ((3,), 1, 0), ((1, 3), 1, 0), ((0, 1, 4), 1, 0)),
    *(((5,), 1, 0), ((8,), 1, 0), ((2, 8), 1, 0), ((2,), 2, 4), ((1, 3), 2, 3), ((0, 3), 2, 6), ((3,), 4, 8)),
    *(((1,), 16, 9), ((2,), 16, 20), ((0,), 1, 0), ((0,), 1, 0), ((0,), 1, 0)),
)


class _Choices:
    """Choices from the bits of one number; all first ones for 0."""

    def __init__(self, bits: int) -> None:
        self._bits = bits & 0xFFFFFFFF

    def of(self, options: Sequence):
        """One of these."""
        chosen = options[(self._bits >> 33) % len(options)] if self._bits >> 32 else options[self._bits % len(options)]
        self._bits = (self._bits * 0x9E3779B97F4A7C15 + (self._bits >> 29)) & 0xFFFFFFFFFFFFFFFF
        return chosen


def draw_config(bits: int, capabilities: EngineCapabilities) -> ServingConfig:
    """A configuration in which one request fits, and two may not, from 32 random bits."""
    choices = _Choices(bits)
    page_size = choices.of(PAGE_SIZES)
    candidates, topk, tree_nodes = choices.of(SHAPES)
    if topk > 4 or (topk > 1 and len(candidates) == 1):
        page_size = min(page_size, 4)  # every branch fills pages of its own: larger ones only cost time
    if not capabilities.adaptive:
        candidates = candidates[-1:]
    algorithm = choices.of(("none", "draft", "head", "draft") if candidates == (0,) else ("draft", "head"))
    has = capabilities
    config = ServingConfig(
        num_pages=1,
        page_size=page_size,
        context_len=1,
        max_running=choices.of((1, 2, 3, 4)),
        max_queue=choices.of((0, 0, 0, 2)),
        chunk_size=1,
        step_tokens=0,
        algorithm=algorithm,
        candidates=candidates,
        topk=topk,
        tree_nodes=tree_nodes,
        overlap=has.overlap and choices.of((False, True, True)),
        block_rounds=choices.of((1, 1, 3, 8)) if has.blocks else 1,
        mixed=has.mixed and choices.of((False, True, True)),
        prefix_cache=has.prefix_cache and choices.of((False, True, True)),
        preempt=has.priorities and choices.of((False, True)),
        ageing=choices.of((1, 2, 16)),
        accept=choices.of((4, 0, 8, 6)),
        model=choices.of((0, 1, 2)),
    )
    limit = choices.of((6, 10, 16, 30))
    longest = limit + config.round_slots
    smallest = ceil_to_page(limit + config.reserve, page_size) + page_size
    # Barely one request, one and a half, or several.
    slots = choices.of((smallest, smallest * 3 // 2, smallest * 5 // 2, smallest * 5, smallest - limit // 2))
    chunk_size = choices.of((3, 2, 8, 64)) if has.chunked_prefill else longest
    step_tokens = 0
    if config.mixed and choices.of((False, True)):
        step_tokens = config.max_running * max(config.nodes(steps) for steps in candidates) + choices.of((1, 2, 5))
    return replace(
        config,
        num_pages=max(-(-slots // page_size), 1),
        context_len=longest,
        chunk_size=chunk_size,
        step_tokens=step_tokens,
    )


def simpler_configs(config: ServingConfig) -> Iterator[ServingConfig]:
    """Configurations like this one, but simpler."""
    plainer = {"overlap": False, "mixed": False, "prefix_cache": False, "preempt": False, "block_rounds": 1}
    plainer |= {
        "step_tokens": 0,
        "max_queue": 0,
        "model": 0,
        "chunk_size": 64,
        "max_running": 2,
        "accept": 0,
        "ageing": 1,
    }
    for name, value in plainer.items():
        if getattr(config, name) != value and not (name == "max_running" and config.max_running < 2):
            yield replace(config, **{name: value})
    if config.topk > 1:
        yield replace(config, topk=1, tree_nodes=0)
    for steps in config.candidates if len(config.candidates) > 1 else ():
        yield replace(config, candidates=(steps,))
    if config.max_steps > 1:
        yield replace(config, candidates=(1,), topk=1, tree_nodes=0)
    if config.page_size > 1:
        for size in sorted({1, 2, config.page_size // 2}):
            if size < config.page_size:
                yield replace(config, page_size=size, num_pages=-(-config.num_slots // size))


def vocabulary(config: ServingConfig, capabilities: EngineCapabilities) -> Vocabulary:
    """The letters of one configuration. A quarter of the optional ones is left out of a run."""
    size = config.page_size
    room = config.context_len - config.round_slots
    # At the edges of pages and chunks, and all that the context takes.
    lengths = {
        1,
        2,
        3,
        5,
        size - 1,
        size,
        size + 1,
        2 * size,
        config.chunk_size,
        config.chunk_size + 1,
        room - 1,
        room - 3,
    }
    lengths = sorted(length for length in lengths if 1 <= length < config.context_len)
    submit = (REQUESTS, lengths, (1, 2, 3, 5, 8, 30), (0, 0, 1), (0, 0, 1))
    off, both = (False,), (False, True)
    marks = both if capabilities.marks else off
    some_priorities = (0, 0, 1, 2) if capabilities.priorities else (0,)
    letters = {
        "": (
            Letter(ops.Submit, 12, *submit, (0,), (0, 0, 1), both, marks),
            Letter(ops.Plan, 10),
            Letter(ops.Commit, 8, (1_000,)),
            Letter(ops.Run, 6, (1, 2, 3, 6)),
        ),
        "hostile": (
            Letter(ops.SubmitAgain, 2, REQUESTS),
            Letter(ops.SubmitImpossible, 1, (0, 1, 2, 3, 4)),
            Letter(ops.AbortUnknown, 1, REQUESTS),
            Letter(ops.CommitAgain, 1),
        ),
        "aborts": (Letter(ops.Abort, 5, REQUESTS),),
        "priorities": (Letter(ops.Submit, 6, *submit, some_priorities, (0, 1), both, marks),),
        "overlap": (Letter(ops.CommitEarly, 1),),
        "blocks": (Letter(ops.Commit, 3, (1, 2, 3)),),
        "adaptive": (Letter(ops.SetSteps, 4, (0, 1, 2)),),
        "retraction": (Letter(ops.Retract, 3, REQUESTS),),
        "denial": (Letter(ops.Deny, 1, (1, 2)),),
        "losses": (Letter(ops.Lose, 2), Letter(ops.Resume, 3)),
        "failures": (Letter(ops.Fail, 2, REQUESTS),),
    }
    return {name: found for name, found in letters.items() if name in ("", "hostile", "aborts", *capabilities.declared)}
