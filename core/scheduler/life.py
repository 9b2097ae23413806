"""The life of a request, as two tables.

A request is WAITING until the engine admits it to a row; then its prompt is computed in chunks (PREFILL). When the last
chunk is *launched* the request joins the decode batch (DECODE). Under memory pressure the engine retracts it: the
engine releases everything that the request holds, and the request is WAITING again. Its emitted tokens are now part of
its prompt.

Where prefill and decode are two engines, a request is TRANSFERRING on both while its KV is on its way. On the prefill
side this lasts from the commit of its last chunk until the other side has all of its KV (TRANSFERRED). On the decode
side it lasts from the reservation of its slots until it joins the batch. The two sides in `core/handoff/` decide when
these states change, and when a row that a transfer holds is released (`transfers.py`).

`TRANSITIONS` says which event is possible in which state. `RequestRecord.advance` asks it first: a refused event
changes nothing.

A demand (finish, give up, retract) may come while steps are in flight. Outside a multi-step it takes effect at once:
the engine drops the results that a step in flight still computes for the request, and the row's slots stay fenced until
the step is committed. Inside a running *multi-step* it waits, because the rounds before the last one are delivered as
if committed singly, and their number is known only when the multi-step ends. Until then a request that is given up is
LEAVING. `JOINT_RULES` says for every state what a demand does, outside a running multi-step and inside one. `Requests`
applies them until a rule does not change the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..contract.request import FinishReason, Request
from ..contract.text import StreamDecoder
from ..errors import InvariantViolation


class _Key(Enum):
    """Base of enumerations that are dictionary keys in every step.

    Hashes by identity, because `Enum.__hash__` is a slow Python call.
    """

    __hash__: ClassVar[Callable[[Enum], int]] = object.__hash__


class RequestState(_Key):
    NEW = "new"
    WAITING = "waiting"
    PREFILL = "prefill"  # has a row; chunks of its prompt are planned or still to come
    DECODE = "decode"  # its last chunk is launched: it takes part in decode rounds
    LEAVING = "leaving"  # aborted or failed; ends when the running multi-step is committed or lost
    TRANSFERRING = "transferring"  # has a row, and its KV is on its way to or from that row
    TRANSFERRED = "transferred"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class RequestEvent(_Key):
    QUEUE = "queue"  # accepted
    ADMIT = "admit"  # given a row
    PREFILLED = "prefilled"  # the last chunk of the prompt is launched
    HAND_OVER = "hand_over"  # prefill side: the prompt is computed, its KV is to be sent
    TRANSFER = "transfer"  # prefill side: the decode side has all of it
    RESERVE = "reserve"  # decode side: given a row for KV that is still to arrive
    JOIN = "join"  # decode side: the KV has arrived and is verified
    RETRACT = "retract"  # gives row and slots back and waits again
    LEAVE = "leave"  # must end, but a multi-step is running
    FINISH = "finish"  # stop or length
    ABORT = "abort"  # the client gave the request up
    FAIL = "fail"  # an executor's error for this request alone, or its transfer failed
    MOVE = "move"  # other workers continue it, because one that it was placed on was lost


S, E = RequestState, RequestEvent
TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    S.NEW: {E.QUEUE: S.WAITING, E.RESERVE: S.TRANSFERRING},
    S.WAITING: {E.ADMIT: S.PREFILL, E.FINISH: S.FINISHED, E.ABORT: S.ABORTED, E.FAIL: S.FAILED, E.MOVE: S.TRANSFERRED},
    S.PREFILL: {
        E.PREFILLED: S.DECODE,
        E.HAND_OVER: S.TRANSFERRING,
        E.RETRACT: S.WAITING,
        E.ABORT: S.ABORTED,
        E.FAIL: S.FAILED,
        E.MOVE: S.TRANSFERRED,
    },
    S.DECODE: {
        E.FINISH: S.FINISHED,
        E.RETRACT: S.WAITING,
        E.LEAVE: S.LEAVING,
        E.ABORT: S.ABORTED,
        E.FAIL: S.FAILED,
        E.MOVE: S.TRANSFERRED,
    },
    S.LEAVING: {E.ABORT: S.ABORTED, E.FAIL: S.FAILED},
    S.TRANSFERRING: {
        E.TRANSFER: S.TRANSFERRED,
        E.JOIN: S.DECODE,
        E.FINISH: S.FINISHED,
        E.ABORT: S.ABORTED,
        E.FAIL: S.FAILED,
        E.MOVE: S.TRANSFERRED,
    },
    S.TRANSFERRED: {},
    S.FINISHED: {},
    S.ABORTED: {},
    S.FAILED: {},
}

ENDINGS = {
    FinishReason.STOP: E.FINISH,
    FinishReason.LENGTH: E.FINISH,
    FinishReason.ABORT: E.ABORT,
    FinishReason.ERROR: E.FAIL,
    FinishReason.TRANSFERRED: E.TRANSFER,
    FinishReason.MOVED: E.MOVE,
}


class Demand(_Key):
    """A demand on a request while steps are in flight."""

    FINISH = "finish"  # it has its last token, or the decode side has it
    GIVE_UP = "give_up"  # the client aborted it, or it failed
    RETRACT = "retract"  # it is asked to give its memory back


class Response(Enum):
    """The response of a joint rule to a demand."""

    END = "end"  # the request ends for the reason that was given; its row is closed behind its fence
    LEAVE = "leave"  # the request takes part in no later plan
    RETRACT = "retract"  # the row is closed behind its fence, the request waits again
    WAIT = "wait"  # no effect until the multi-step is committed or lost
    DROP = "drop"  # the demand is forgotten


class JointRule(NamedTuple):
    """The response outside and inside a running multi-step; None: this combination is impossible."""

    outside: Response | None
    inside: Response | None


R = Response
JOINT_RULES: dict[Demand, dict[RequestState, JointRule]] = {
    Demand.FINISH: {
        S.WAITING: JointRule(R.END, R.END),  # its last token came late (`ServerRules.delivers_late_tokens`)
        S.PREFILL: JointRule(None, None),
        S.DECODE: JointRule(R.END, R.END),  # the step before the multi-step ended it: what follows is dropped
        S.LEAVING: JointRule(None, None),
        S.TRANSFERRING: JointRule(R.END, None),
    },
    Demand.GIVE_UP: {
        S.WAITING: JointRule(R.END, None),
        S.PREFILL: JointRule(R.END, None),  # a step with chunks is no multi-step
        S.DECODE: JointRule(R.END, R.LEAVE),
        S.LEAVING: JointRule(R.END, R.WAIT),
        S.TRANSFERRING: JointRule(R.END, None),
    },
    Demand.RETRACT: {
        S.WAITING: JointRule(R.DROP, None),  # it holds no memory that it could give back
        S.PREFILL: JointRule(R.RETRACT, None),
        S.DECODE: JointRule(R.RETRACT, R.WAIT),  # the tokens of its rounds are known when the multi-step is committed
        S.LEAVING: JointRule(R.DROP, R.DROP),  # it gives its memory back when it ends
        S.TRANSFERRING: JointRule(R.DROP, None),  # its KV is being read or written
    },
}


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The engine's view of one live request.

    ```
    prompt tokens        0 ──────────── prompt_len
    context to prefill   0 ──────────── prompt_len + emitted_before (> 0 after a retraction or a lost worker)
    KV when decoding     0 ──────────── prompt_len + emitted - 1    (the last emitted token has no KV yet)
    ```
    """

    request: Request
    # order of submission; first come, first served within a priority. `waits_at_tail` gives it a new number.
    arrival_number: int
    max_tokens: int  # the request's own, capped by context and pool
    state: RequestState = RequestState.NEW
    row: int = 0  # request-table row; 0 while it has none
    epoch: int = 0  # the row's epoch at admission
    prefill_len: int = 0  # tokens to compute before decoding, fixed at admission
    prefill_launched: int = 0  # KV length that launched chunks reach
    prefill_committed: int = 0  # KV length that committed chunks reach
    namespace: str = ""  # by which its row finds and leaves prefixes in the cache
    num_cached: int = 0  # KV tokens taken from the prefix cache at the last admission, and from host memory
    num_loaded: int = 0  # those of them that come from host memory
    emitted_before: int = 0  # tokens emitted before the last admission: the prefill computes their KV, too
    has_first_token: bool = False  # a worker that was lost later has delivered the token after the prefill
    overtaken: int = 0  # admissions of later arrivals while this one waited
    # int64 [prompt_len + emitted_before + has_first_token]; None if the content is unknown
    context: np.ndarray | None = None
    outputs: dict[str, list[Any]] = field(default_factory=dict)  # per-token user outputs, one entry per emitted token
    ending: tuple[FinishReason, str] | None = None  # reason and message of an end that was demanded
    text: StreamDecoder | None = None  # of the output, if stop strings are looked for in it

    @property
    def prompt_len(self) -> int:
        return self.request.prompt.length

    @property
    def end_len(self) -> int:
        """The KV length at which the request has all its tokens."""
        return self.request.prompt.length + self.max_tokens - 1

    @property
    def has_whole_prompt(self) -> bool:
        """Whether the last chunk is committed."""
        return self.prefill_committed == self.prefill_len

    @property
    def has_committed_nothing(self) -> bool:
        """Whether no step has computed any token for it since its last admission."""
        return self.prefill_committed == self.num_cached

    @property
    def is_terminal(self) -> bool:
        return not TRANSITIONS[self.state]

    def known_context(self) -> np.ndarray:
        """Return `context` of a request with a row, for an executor that has tokens."""
        assert self.context is not None, "an executor with tokens needs prompts with tokens"
        return self.context

    def advance(self, event: RequestEvent) -> None:
        """Take `event`, or raise InvariantViolation ENGINE-02 and change nothing."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            message = f"request {self.request.request_id!r} is {self.state.value} and cannot {event.value}"
            raise InvariantViolation("ENGINE-02", message)
        self.state = following
