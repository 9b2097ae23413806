"""The answers of an engine to its driver."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .request import FinishedRequest


class SubmitOutcome(NamedTuple):
    """`refusal` is empty if the request was queued. `replan`: a new plan could differ, so stop the running
    multi-step."""

    refusal: str
    replan: bool


class AbortOutcome(NamedTuple):
    """`finished` is None if no live request has that id (it may have ended just before), or if a multi-step is
    running. Such a request ends when the multi-step is committed, because only then the engine knows what the
    multi-step's earlier rounds delivered."""

    finished: FinishedRequest | None
    replan: bool


class CommitOutcome(NamedTuple):
    """The requests that ended with a committed step, those that got their first token since they entered, and, on a
    prefill worker, those whose computed prompts wait for their transfer. `kept`: tokens delivered by each round of each
    row of its decode part."""

    finished: tuple[FinishedRequest, ...]
    first_tokens: tuple[str, ...]
    computed: tuple[str, ...] = ()
    kept: np.ndarray | None = None  # int64 [rounds, bs], 0 for rows that had left; None without a decode part


class LossOutcome(NamedTuple):
    """The requests that ended with a failed step (the blamed request, if there is one, and those that were leaving),
    and the lost steps."""

    finished: tuple[FinishedRequest, ...]
    step_ids: tuple[int, ...]


class ReserveOutcome(NamedTuple):
    """`refusal`: the request can never run here. `row` 0: not now. Else its row and epoch, and how much of it the
    prefix cache has.

    `replan`: it may be possible without the slots that a running multi-step holds, so stop the multi-step.
    """

    refusal: str
    row: int = 0
    epoch: int = 0
    num_cached: int = 0
    replan: bool = False


class JoinOutcome(NamedTuple):
    """`finished` if the request failed instead of joining.
    `replan`: a new plan could differ, so stop the running multi-step."""

    finished: FinishedRequest | None
    replan: bool
