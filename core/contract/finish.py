"""When a request ends: one rule, used by every executor (to end a block of rounds) and by the engine (to finish the request).

A verify round emits a *run* of `accept_lens` tokens for a row. The run is cut by the first stop inside it and by what is left of
`max_tokens`, whichever comes first; a stop on the very last allowed token is a stop.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from .request import FinishReason


class SettledRuns(NamedTuple):
    """What is kept of each row's run, as arrays [bs]."""

    kept: np.ndarray  # int64: tokens delivered, 1 … accept_lens
    ended: np.ndarray  # bool: the request is over
    stopped: np.ndarray  # bool: … because of a stop (else: length)


def settle_runs(accept_lens: np.ndarray, stop_index: np.ndarray | None, remaining: np.ndarray) -> SettledRuns:
    """Cut each run at its first stop and at the length cap.

    accept_lens: int [bs], 1 … width. stop_index: int [bs], index inside the run of the first stop, −1 for none (None: no row has one).
    remaining: int [bs], tokens the request may still emit, ≥ 1 for a live row.
    """
    kept = np.minimum(accept_lens, remaining)
    if stop_index is None:
        ended = kept == remaining
        return SettledRuns(kept, ended, np.zeros(len(kept), dtype=bool))
    stopped = (stop_index >= 0) & (stop_index < kept)
    kept = np.where(stopped, stop_index + 1, kept)
    return SettledRuns(kept, stopped | (kept == remaining), stopped)


def finish_reason(stopped: bool) -> FinishReason:
    return FinishReason.STOP if stopped else FinishReason.LENGTH


def first_stop_token(run: np.ndarray, stop_tokens: tuple[int, ...]) -> int:
    """Index in `run` (int [n]) of the first stop token, −1 if there is none."""
    if not stop_tokens:
        return -1
    hits = np.flatnonzero(np.isin(run, stop_tokens))
    return int(hits[0]) if len(hits) else -1


class TextDecoder(Protocol):
    """Turns tokens into text; the engine needs one only when a request has stop strings."""

    def decode(self, tokens: np.ndarray) -> str: ...


def first_stop_string(decoder: TextDecoder, before: np.ndarray, run: np.ndarray, stop_strings: tuple[str, ...]) -> int:
    """Index in `run` of the token that completes the first stop string in the text of the whole output, −1 if none does.

    `before` int [m] are the output tokens already delivered. A stop string may begin in them; it cannot end in them, since the request
    would have ended there. Text is decoded from the start of the output, for a tokenizer may join tokens into one character.
    """
    for length in range(1, len(run) + 1):
        text = decoder.decode(np.concatenate([before, run[:length]]))
        if any(stop in text for stop in stop_strings):
            return length - 1
    return -1
