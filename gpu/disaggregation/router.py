"""Which workers serve a request, and how it goes on when one of them dies. No I/O.

A request is placed on a prefill and a decode worker, the ones with the least to do. When a worker is lost, the other one of each request
that it had is asked to drop it; once it has answered, the old attempt can have no further effect, and the verdict is given:

    the request had joined a decode worker that lives    it goes on
    it had joined the one that died                      it fails: its tokens were shown, its KV is gone
    it had not joined                                    it begins anew on living workers, once; else it fails
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.contract.request import Request

MAX_TRIES = 2


@dataclass(slots=True)
class Placement:
    """Where a request is."""

    request: Request
    prefill: str
    decode: str
    tries: int = 1
    is_handed_over: bool = False  # the prefill worker has nothing of it any more
    has_joined: bool = False  # the decode worker decodes it
    waits_for: str = ""  # the worker that must drop the request before it can begin anew
    lost: str = ""  # the worker that died
    loss: str = ""  # how


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a loss means for a request: a new placement, or its end with `failure`."""

    request_id: str
    placement: Placement | None
    failure: str = ""


class Router:
    """Places requests on the living workers that have the least to do."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._prefill = dict.fromkeys(prefill, 0)  # tokens of prompts that are still to be handed over
        self._decode = dict.fromkeys(decode, 0)  # requests that are not over
        self._placements: dict[str, Placement] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._placements

    def __getitem__(self, request_id: str) -> Placement:
        return self._placements[request_id]

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._placements)

    def place(self, request: Request) -> Placement | None:
        """Workers for a new request; None if there is none of one kind."""
        if not self._prefill or not self._decode:
            return None
        placement = Placement(request, _least(self._prefill), _least(self._decode))
        self._placements[request.request_id] = placement
        self._count(placement, 1)
        return placement

    def handed_over(self, request_id: str) -> None:
        placement = self._placements[request_id]
        if not placement.is_handed_over:
            self._count_prefill(placement, -1)
            placement.is_handed_over = True

    def joined(self, request_id: str) -> None:
        self._placements[request_id].has_joined = True

    def end(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._count(self._placements.pop(request_id), -1)

    def lose(self, name: str, why: str) -> tuple[list[str], list[Verdict]]:
        """Take a worker for dead; return the workers to ask to drop what they share with it, and the verdicts that need no answer."""
        asked = list(self._decode if name in self._prefill else self._prefill)
        self._prefill.pop(name, None)
        self._decode.pop(name, None)
        clear = []
        for placement in self._placements.values():
            if placement.waits_for == name:
                placement.waits_for = ""
                clear.append(placement)
            elif name == placement.decode or (name == placement.prefill and not placement.is_handed_over):
                placement.lost, placement.loss = name, why
                other = placement.decode if name == placement.prefill else placement.prefill
                if other in self._prefill or other in self._decode:
                    placement.waits_for = other
                else:
                    clear.append(placement)
        return asked, self._judge_all(clear)

    def let_go(self, name: str, lost: str) -> list[Verdict]:
        """Note that `name` has dropped all that it shared with `lost`, and return the verdicts."""
        waiting = [p for p in self._placements.values() if (p.waits_for, p.lost) == (name, lost)]
        for placement in waiting:
            placement.waits_for = ""
        return self._judge_all(waiting)

    def _judge_all(self, placements: list[Placement]) -> list[Verdict]:
        return [verdict for placement in placements if (verdict := self._judge(placement)) is not None]

    def _judge(self, placement: Placement) -> Verdict | None:
        request = placement.request
        if placement.has_joined and placement.decode in self._decode:
            placement.is_handed_over, placement.lost, placement.loss = True, "", ""
            return None
        tries, loss = placement.tries, placement.loss
        self.end(request.request_id)
        if placement.has_joined:
            return Verdict(request.request_id, None, f"{loss}; what it had decoded of the request is lost")
        if tries >= MAX_TRIES:
            return Verdict(request.request_id, None, f"{loss}; the request was tried {tries} times")
        again = self.place(request)
        if again is None:
            return Verdict(request.request_id, None, f"{loss}; there is no other worker for the request")
        again.tries = tries + 1
        return Verdict(request.request_id, again)

    def _count(self, placement: Placement, sign: int) -> None:
        if not placement.is_handed_over:
            self._count_prefill(placement, sign)
        if placement.decode in self._decode:
            self._decode[placement.decode] += sign

    def _count_prefill(self, placement: Placement, sign: int) -> None:
        if placement.prefill in self._prefill:
            self._prefill[placement.prefill] += sign * placement.request.prompt.length


def _least(loads: dict[str, int]) -> str:
    return min(loads, key=loads.__getitem__)
