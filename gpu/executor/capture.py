"""A function's device work as a CUDA graph, and a round with masks as two."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from ..types.ops import DeviceTree
from .round import Passed, RoundResult
from .shaping import MaskPlace

WARM_UP_RUNS = 2  # kernels are compiled and libraries initialised before anything is captured

MakeMasks = Callable[[DeviceTree], tuple[np.ndarray, np.ndarray]]
"""Makes what `MaskPlace.fill` sends for the nodes of a batch of trees, padding included."""


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of the process on which graphs are warmed up and captured:
    cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


T = TypeVar("T")


class GraphCapture(Protocol):
    """`capture` with its memory pool and its device."""

    def __call__(self, run: Callable[[], T], /) -> Callable[[], T]: ...


def without_masks(replay: Callable[[], T]) -> Callable[[object], T]:
    """Return `replay` as what takes a maker of masks, and asks it for none."""
    return lambda unused: replay()


def capture_halves(
    begin: Callable[[], Passed],
    finish: Callable[[Passed], RoundResult],
    capture: GraphCapture,
    masks: MaskPlace,
) -> Callable[[MakeMasks], RoundResult]:
    """Capture both halves of a round; tensors between them stay in place."""
    passes = capture(begin)
    passed = passes()  # the second half is warmed up with numbers, not with memory that nothing has written
    choice = capture(lambda: finish(passed))

    def replay(make_masks: MakeMasks) -> RoundResult:
        passes()
        masks.fill(*make_masks(passed.tree))
        return choice()

    return replay


def capture(run: Callable[[], T], memory_pool: Any, device: torch.device) -> Callable[[], T]:
    """Warm `run` up, capture it, and return what replays it. Its result stays in place. Raises RuntimeError where
    memory runs out."""
    side = capture_stream(device)
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                run()
    finally:  # a round without a graph follows where memory runs out, and shares the constants made here
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory_pool, stream=side, capture_error_mode="thread_local"):
        result = run()

    def replay() -> T:
        graph.replay()
        return result

    return replay
