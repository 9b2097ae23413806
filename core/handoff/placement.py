"""Chooses the workers that serve a request, and new ones when a worker is lost. There is no I/O; the parent of real
workers and the simulated cluster drive it.

A request is placed on a prefill and a decode worker. When a worker is lost, every living worker drops everything that
it shares with the lost one, and answers. Only then are the affected requests judged, so that no message of an old
attempt can have an effect. Nothing waits for workers that die meanwhile; they count as the same loss.

The verdict:

    the request had joined a decode worker that lives    it goes on there
    else                                                 it begins again on living workers, behind the tokens that its
                                                         client has been shown (`Request.shown`): once; then it fails

Draws are keyed by position, so the output is the one that the client would have had without the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from ..contract.request import Request
from ..prompt import Prompt

MAX_TRIES = 2
"""The number of times that a request is placed. Then it fails, because it may be the cause of the losses."""


Name = str | int


class WorkerPool(Protocol):
    """The workers of one role: it chooses among the living ones, and counts what each has to do."""

    def __iter__(self) -> Iterator[Name]:
        """Yield the workers of this role that live."""
        ...

    def assign(self, request: Request) -> Name | None:
        """Choose a worker for a request, and count the request there. Returns None if none is left."""

    def release(self, name: Name, request: Request) -> None:
        """Take a request off the load of `name`: it has ended there, or the worker was lost."""

    def lose(self, name: Name) -> None:
        """Take a worker for dead; one of another role changes nothing."""


class LeastLoaded:
    """A pool whose requests go to the worker with the least to do. `load_of` says how much a request is."""

    def __init__(self, names: Iterable[Name], load_of: Callable[[Request], int]) -> None:
        self._loads: dict[Name, int] = dict.fromkeys(names, 0)
        self._load_of = load_of

    def __iter__(self) -> Iterator[Name]:
        return iter(self._loads)

    def assign(self, request: Request) -> Name | None:
        if not self._loads:
            return None
        name = min(self._loads, key=self._loads.__getitem__)
        self._loads[name] += self._load_of(request)
        return name

    def release(self, name: Name, request: Request) -> None:
        if name in self._loads:
            self._loads[name] -= self._load_of(request)

    def lose(self, name: Name) -> None:
        self._loads.pop(name, None)


@dataclass(slots=True)
class Placement:
    """Where a request is."""

    request: Request
    prefill: Name
    decode: Name
    tries: int = 1
    is_handed_over: bool = False  # the prefill worker has nothing of it any more
    has_joined: bool = False  # the decode worker decodes it
    is_aborted: bool = False  # its client has given it up
    lost: Name | None = None  # the worker that was lost last, until the verdict
    loss: str = ""  # how


@dataclass(frozen=True, slots=True)
class Verdict:
    """The consequence of a loss for a request: a new placement, or its end. If both `placement` and `failure` are
    missing, its client had aborted it."""

    request_id: str
    placement: Placement | None
    failure: str = ""


class Placements:
    """Places requests on the workers of two pools.
    `shown_of` returns the output that the client of a request has by now."""

    def __init__(self, prefill: WorkerPool, decode: WorkerPool, shown_of: Callable[[str], Prompt]) -> None:
        self._prefill = prefill
        self._decode = decode
        self._shown_of = shown_of
        self._placements: dict[str, Placement] = {}
        self._awaited: dict[Name, dict[Name, None]] = {}  # lost worker -> the living ones that have not answered yet

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._placements

    def __getitem__(self, request_id: str) -> Placement:
        return self._placements[request_id]

    def get(self, request_id: str) -> Placement | None:
        """Return where a request is; None if it is over."""
        return self._placements.get(request_id)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._placements)

    def place(self, request: Request, tries: int = 1) -> Placement | None:
        """Choose the workers of a request; returns None if there is none of one role."""
        prefill = self._prefill.assign(request)
        if prefill is None:
            return None
        decode = self._decode.assign(request)
        if decode is None:
            self._prefill.release(prefill, request)
            return None
        placement = self._placements[request.request_id] = Placement(request, prefill, decode, tries)
        return placement

    def handed_over(self, request_id: str) -> None:
        """Note that the prefill worker is done with a request."""
        placement = self._placements[request_id]
        if not placement.is_handed_over:
            self._prefill.release(placement.prefill, placement.request)
            placement.is_handed_over = True

    def joined(self, request_id: str) -> None:
        """Note that the decode worker decodes a request."""
        self._placements[request_id].has_joined = True

    def abort(self, request_id: str) -> Placement | None:
        """Note that a request's client gives it up: whatever is lost, it does not begin again.
        Returns where it is; None if it is over."""
        placement = self.get(request_id)
        if placement is not None:
            placement.is_aborted = True
        return placement

    def end(self, request_id: str) -> None:
        """Forget a request that is over."""
        placement = self._placements.pop(request_id)
        if not placement.is_handed_over:
            self._prefill.release(placement.prefill, placement.request)
        self._decode.release(placement.decode, placement.request)

    def awaits_answers(self, lost: Name) -> bool:
        """Return whether the verdicts on the requests of a lost worker are still to come."""
        return lost in self._awaited

    def lose(self, name: Name, why: str) -> list[Verdict]:
        """Take a worker for dead; all living ones must `acknowledge_loss`.
        Returns the verdicts that waited for this worker alone."""
        for pool in (self._prefill, self._decode):
            pool.lose(name)
        for placement in self._placements.values():
            if name == placement.decode or (name == placement.prefill and not placement.is_handed_over):
                placement.lost, placement.loss = name, why
        self._awaited[name] = dict.fromkeys([*self._prefill, *self._decode])
        return [verdict for lost in list(self._awaited) for verdict in self.acknowledge_loss(name, lost)]

    def acknowledge_loss(self, name: Name, lost: Name) -> list[Verdict]:
        """Note that `name` has dropped all that it shared with `lost`, and return the verdicts if it was the
        last one to do so."""
        awaited = self._awaited.get(lost)
        if awaited is None:
            return []
        awaited.pop(name, None)
        if awaited:
            return []
        del self._awaited[lost]
        judged = [self._judge(p) for p in list(self._placements.values()) if p.lost == lost]
        return [verdict for verdict in judged if verdict is not None]

    def _judge(self, placement: Placement) -> Verdict | None:
        request_id, loss = placement.request.request_id, placement.loss
        if placement.has_joined and placement.decode in self._decode:
            self.handed_over(request_id)
            placement.lost, placement.loss = None, ""
            return None
        self.end(request_id)
        if placement.is_aborted:
            return Verdict(request_id, None)
        if placement.tries >= MAX_TRIES:
            return Verdict(request_id, None, f"{loss}; the request was tried {placement.tries} times")
        request = replace(placement.request, shown=self._shown_of(request_id))
        again = self.place(request, placement.tries + 1)
        failure = "" if again is not None else f"{loss}; there is no other worker for the request"
        return Verdict(request_id, again, failure)
