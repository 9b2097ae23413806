"""What an engine asks the rules of a server, with the answers that most servers give.

```
admission   slots to find + slots to leave ──► head refused ──► tried again: after a change, or after a departure
memory      no round fits ──► victim ──► waits at its old place, or at the tail ──► pause: to a plan, launch or commit
row         slots of its rounds ──► request leaves ──► slots free: behind a fence, or at once
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ...errors import Problem
from ...kv.store import KVStore
from ..life import RequestRecord
from .admission_state import AdmissionPause, BatchWait, GuaranteedShare, NumOutputs, PauseEnd
from .late import LateTokens


class Newcomer(NamedTuple):
    """A waiting request, in tokens."""

    context: int  # its prompt, and its output before a retraction
    first_chunk: int  # the end of its first chunk in the context, with what a round takes beside it
    remaining: int  # output tokens that it may still emit
    reserve: int  # R, what a round may write; 0 on an engine that does not decode


class Growth(NamedTuple):
    """A request with a row, and the slots that it takes until it has its whole output."""

    record: RequestRecord
    slots: int
    enters_now: bool  # in the same step as the newcomer


class Others(NamedTuple):
    """The requests beside a newcomer, in slots."""

    num_decoding: int  # those that take part in the rounds after this step
    round_slots: int  # R of one of them, page aligned
    watermark: int
    share: float  # of the remaining outputs, as `ServerRules.share` has it now
    growth: Callable[[], Iterator[Growth]]  # of each request with a row

    @property
    def next_rounds(self) -> int:
        """The watermark, and R of each request that decodes; 0 if none decodes."""
        return self.watermark + self.round_slots * self.num_decoding if self.num_decoding else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRules(ABC):
    """The rules of one server. Its fields are what that server lets a user set, and its class constants the rest. The
    engine asks the methods, which say what follows from them."""

    name: ClassVar[str]
    watermark: float = 0.01  # share of the pool that admission leaves free for running requests to grow into

    # -- admission ----------------------------------------------------------------------------------------------------

    retries_after_departure: ClassVar[bool] = False
    """A refused request is tried again when a running one has left; False: after any event that may have made room."""

    pause_ends: ClassVar[PauseEnd] = PauseEnd.COMMIT
    """When requests may enter again after a retraction."""

    pads_lone_tokens: ClassVar[bool] = False
    """A newcomer with one token left to compute takes a round with drafts, so that the step remains one of rounds."""

    caches_at_launch: ClassVar[bool] = False
    """The computed part of a prompt is in the prefix cache once its step is launched; False: once it is committed."""

    @abstractmethod
    def tokens_to_find(self, newcomer: Newcomer) -> int:
        """Return the tokens for which a newcomer must find slots, those in the prefix cache included."""

    @abstractmethod
    def slots_to_leave(self, others: Others) -> int:
        """Return the slots that a newcomer must leave free so that the others can grow."""

    @property
    def guarantee_output(self) -> float:
        """The share of the remaining outputs that a newcomer leaves free; 0: only the next rounds."""
        return 0.0

    def without_guarantee(self) -> ServerRules:
        """Return the rules of an engine that computes prompts alone: no output grows there."""
        return self

    def share(self) -> GuaranteedShare:
        """Return the share of `guarantee_output` as it is when an engine starts."""
        return GuaranteedShare(self.guarantee_output)

    def batch_wait(self, chunk_size: int) -> BatchWait:
        """Return how newcomers wait for more of them."""
        return BatchWait()

    def pause(self) -> AdmissionPause:
        """Return how admission pauses after a retraction."""
        return AdmissionPause(self.pause_ends)

    def refused(self, head: RequestRecord, may_wait: bool) -> RequestRecord | None:
        """Return which request is not tried again before an event that may make room; None: no request is, until a
        running one has left. `may_wait`: there are such, and none gives way to `head`."""
        return None if self.retries_after_departure and may_wait else head

    def padding(self, num_nodes: int) -> int:
        """Return the tokens that a newcomer with one token left takes beside it, where a round verifies `num_nodes`."""
        return num_nodes - 1 if self.pads_lone_tokens else 0

    def shared_at_launch(self, record: RequestRecord) -> int:
        """Return how many tokens of a prompt enter the prefix cache when its chunk is launched."""
        return record.prefill_launched if self.caches_at_launch else 0

    # -- a request gives way ------------------------------------------------------------------------------------------

    waits_at_tail: ClassVar[bool] = False
    """A retracted request waits behind all others of its priority; False: at its place by arrival."""

    caches_retracted: ClassVar[bool] = True
    """The KV of a retracted request stays in the prefix cache, until it is evicted."""

    delivers_late_tokens: ClassVar[bool] = False
    """Tokens that a step in flight computes for a retracted request are delivered; False: they are computed again."""

    retracts_short_prompts: ClassVar[bool] = False
    """A prompt in progress whose next chunk does not fit is retracted; False: it waits."""

    def late_tokens(self) -> LateTokens:
        """Return the requests whose tokens may come late: none yet."""
        return LateTokens(self.delivers_late_tokens)

    def place_of_retracted(self, own: int, next_place: Callable[[], int]) -> int:
        """Return the place at which a retracted request waits, whose own place by arrival is `own`."""
        return next_place() if self.waits_at_tail else own

    def kept_of_retracted(self, context: Callable[[], np.ndarray | None]) -> np.ndarray | None:
        """Return what of the context of a retracted request stays in the prefix cache; None: nothing."""
        return context() if self.caches_retracted else None

    @abstractmethod
    def victim(self, running: Collection[RequestRecord], num_outputs: NumOutputs) -> RequestRecord:
        """Return which of these requests, two at least, memory pressure retracts."""

    # -- rows ---------------------------------------------------------------------------------------------------------

    has_launched_slots_alone: ClassVar[bool] = False
    """A decoding row has slots for its launched rounds and a draft, given to one row after the other; False: for all
    rounds that the pipeline may have, given to all rows or none."""

    frees_at_departure: ClassVar[bool] = False
    """The slots of a row that leaves are free at once; False: behind the last step in flight that may touch them."""

    rests_at_sure_end: ClassVar[bool] = False
    """A row that surely ends with a round in flight takes part in no later step."""

    def num_rows(self, max_running: int) -> int:
        """Return the rows of the request table. Where slots are free at once, rows that have left stay fenced."""
        return 2 * max_running if self.frees_at_departure else max_running

    def chunks_ahead(self, overlap: bool) -> int:
        """Return of how many chunks behind the committed tokens of a prompt the slots may be held."""
        return 2 if overlap and not self.frees_at_departure else 1

    def tokens_passed(self, record: RequestRecord) -> int:
        """Return the tokens of a prompt before which windows may be given back: the chunk of a step in flight may read
        those before it, if slots are not free at once."""
        return record.prefill_launched if self.frees_at_departure else record.prefill_committed

    def lookahead(self, max_steps: int) -> int:
        """Return the slots for drafts that a row has behind its launched tokens."""
        return max_steps if self.has_launched_slots_alone else 0

    def grow(self, store: KVStore, rows: np.ndarray, targets: np.ndarray) -> bool:
        """Give rows, intp [n], the slots of a round, int64 [n]. Returns whether all have them; if not, no row got any,
        or one row after the other while there were some."""
        if store.grow(rows, targets):
            return True
        if self.has_launched_slots_alone:
            store.grow_some(rows, targets)
        return False

    # -- settings -----------------------------------------------------------------------------------------------------

    def problems(self, preempt: bool) -> list[Problem]:
        """Return the problems of each setting, and those beside preemption by priority."""
        return [] if 0.0 <= self.watermark < 1.0 else [Problem("watermark", f"must be in [0, 1), got {self.watermark}")]


def share_problems(values: dict[str, float]) -> list[Problem]:
    """Return the problems of settings that are shares."""
    return [Problem(key, f"must be in [0, 1], got {value}") for key, value in values.items() if not 0.0 <= value <= 1.0]
