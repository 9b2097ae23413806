"""Hidden states are optional by type: an array for algorithms that need them, `None` from end to end for the others.

An algorithm says once whether it needs hidden states. Code that captures, merges, relays or transfers them asks
`capture_mode` for its phase, so that a batch without hidden states cannot get rows that have some.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import numpy as np

from ..errors import ForedraftError, InvariantViolation
from .arrays import Shaped


class CaptureHiddenMode(IntEnum):
    """How much of the target's hidden states a forward pass keeps. The modes are ordered: a wider mode also serves a
    narrower need."""

    NULL = 0
    LAST = 1
    FULL = 2


class ForwardPhase(StrEnum):
    """The producers of hidden states: the kinds of forward pass around one decode round."""

    PREFILL = "prefill"
    VERIFY = "verify"
    DRAFT_EXTEND = "draft_extend"
    DRAFT = "draft"
    IDLE = "idle"


_CAPTURE_WHEN_NEEDED = {
    ForwardPhase.PREFILL: CaptureHiddenMode.FULL,
    ForwardPhase.VERIFY: CaptureHiddenMode.FULL,
    ForwardPhase.DRAFT_EXTEND: CaptureHiddenMode.FULL,
    ForwardPhase.DRAFT: CaptureHiddenMode.LAST,
    ForwardPhase.IDLE: CaptureHiddenMode.LAST,
}


def capture_mode(phase: ForwardPhase, needs_hidden_states: bool) -> CaptureHiddenMode:
    """Return what a forward pass of this phase captures for the draft;
    NULL in every phase if the algorithm needs none."""
    return _CAPTURE_WHEN_NEEDED[phase] if needs_hidden_states else CaptureHiddenMode.NULL


def merge_hidden(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    """Join the hidden states of two batches along axis 0: [n, …] and [m, …] → [n + m, …], or None for two Nones.

    One None beside one array, even an empty one, means that two algorithms' rows met in one batch: ACCEPT-17.
    """
    if first is None or second is None:
        present = second if first is None else first
        if present is None:
            return None
        message = f"hidden states of shape {present.shape} cannot be merged with a batch that has none"
        raise InvariantViolation("ACCEPT-17", message)
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        message = f"hidden states differ: {first.dtype}{list(first.shape)} and {second.dtype}{list(second.shape)}"
        raise InvariantViolation("ACCEPT-17", message)
    return np.concatenate((first, second))


def check_hidden(hidden_states: Shaped | None, mode: CaptureHiddenMode, where: str) -> None:
    """Raise InvariantViolation ACCEPT-17 unless hidden states are present exactly if `mode` keeps any;
    `where` names the place."""
    if mode is not CaptureHiddenMode.NULL and hidden_states is None:
        raise InvariantViolation("ACCEPT-17", f"{where}: the algorithm needs hidden states, but there are none")
    if mode is CaptureHiddenMode.NULL and hidden_states is not None:
        message = f"{where}: hidden states of shape {hidden_states.shape}, but the algorithm needs none"
        raise InvariantViolation("ACCEPT-17", message)


class MissingHiddenState(ForedraftError):
    """A request arrived from a prefill worker without the hidden state that its algorithm needs."""

    @classmethod
    def of(cls, request_id: str, algorithm: str) -> MissingHiddenState:
        return cls(f"request {request_id!r}: {algorithm} needs a hidden state, the handoff has none")
