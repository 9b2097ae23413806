"""A request, and its life as a table.

Theory of operation. A request is WAITING until the engine admits it to a row; then its prompt is computed in chunks (PREFILL); when
the last chunk is *launched* it joins the decode batch (DECODE). Under memory pressure it is retracted: all that it holds is
released and it is WAITING again, with what it has emitted so far as part of its prompt. FINISHED, ABORTED, FAILED and REFUSED absorb.

Where prefill and decode are two engines, a request is TRANSFERRING on both while its KV is on its way: on the prefill side from the
commit of its last chunk until the other side has it all (TRANSFERRED, which absorbs), on the decode side from the reservation of its
slots until it joins the batch.

Every event passes through `advance`: first the table accepts or refuses, then the effects happen. A refused event changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ..contract.request import Request
from ..errors import InvariantViolation


class RequestState(Enum):
    NEW = "new"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFERRING = "transferring"
    TRANSFERRED = "transferred"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    REFUSED = "refused"


class RequestEvent(Enum):
    QUEUE = "queue"  # accepted at the door
    REFUSE = "refuse"  # can never fit, or the queue is full
    ADMIT = "admit"  # given a row
    PREFILLED = "prefilled"  # the last chunk of the prompt is launched
    HAND_OVER = "hand_over"  # prefill side: the prompt is computed, its KV is to be sent
    TRANSFER = "transfer"  # prefill side: the decode side has it all
    RESERVE = "reserve"  # decode side: given a row for KV that is still to arrive
    JOIN = "join"  # decode side: the KV has arrived and is verified
    RETRACT = "retract"  # gives everything back, waits again
    FINISH = "finish"  # stop or length
    ABORT = "abort"  # the client is gone
    FAIL = "fail"  # the executor reported an error for this request alone, or the worker that it was to go to is gone


S, E = RequestState, RequestEvent
TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    S.NEW: {E.QUEUE: S.WAITING, E.REFUSE: S.REFUSED, E.RESERVE: S.TRANSFERRING},
    S.WAITING: {E.ADMIT: S.PREFILL, E.ABORT: S.ABORTED, E.FAIL: S.FAILED},
    S.PREFILL: {
        E.PREFILLED: S.DECODE,
        E.HAND_OVER: S.TRANSFERRING,
        E.RETRACT: S.WAITING,
        E.ABORT: S.ABORTED,
        E.FAIL: S.FAILED,
    },
    S.DECODE: {E.FINISH: S.FINISHED, E.RETRACT: S.WAITING, E.ABORT: S.ABORTED, E.FAIL: S.FAILED},
    S.TRANSFERRING: {
        E.TRANSFER: S.TRANSFERRED,
        E.JOIN: S.DECODE,
        E.FINISH: S.FINISHED,
        E.ABORT: S.ABORTED,
        E.FAIL: S.FAILED,
    },
    S.TRANSFERRED: {},
    S.FINISHED: {},
    S.ABORTED: {},
    S.FAILED: {},
    S.REFUSED: {},
}
TERMINAL_STATES = tuple(state for state, events in TRANSITIONS.items() if not events)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The engine's view of one live request.

    ```
    prompt tokens        0 ──────────── prompt_len
    context to prefill   0 ──────────── prompt_len + emitted        (emitted > 0 only after a retraction)
    KV when decoding     0 ──────────── prompt_len + emitted - 1    (the last emitted token has no KV yet)
    ```
    """

    request: Request
    arrival_number: int  # order of submission; FCFS within a priority
    max_tokens: int  # the request's own, capped by context and pool
    state: RequestState = RequestState.NEW
    row: int = 0  # request-table row; 0 while it has none
    epoch: int = 0  # the row's epoch at admission
    prefill_len: int = 0  # tokens to compute before decoding, fixed at admission
    prefill_launched: int = 0  # KV length that launched chunks reach
    prefill_committed: int = 0  # KV length that committed chunks reach
    num_cached: int = 0  # KV tokens taken from the prefix cache at the last admission
    emitted_before: int = 0  # tokens emitted before the last admission
    retractions: int = 0
    overtaken: int = 0  # admissions of later arrivals while this one waited
    context: np.ndarray | None = None  # int64 [prompt_len + emitted_before]; None if the content is unknown
    outputs: dict[str, list] = field(default_factory=dict)  # per-token user outputs, one entry per emitted token

    @property
    def prompt_len(self) -> int:
        return self.request.prompt.length

    @property
    def is_terminal(self) -> bool:
        return not TRANSITIONS[self.state]

    def advance(self, event: RequestEvent) -> None:
        """Take `event`, or raise InvariantViolation ENGINE-02 and change nothing."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise InvariantViolation(
                "ENGINE-02", f"request {self.request.request_id!r} is {self.state.value} and cannot {event.value}"
            )
        self.state = following
