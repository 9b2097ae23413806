"""What faults have to know of an engine's place in the service: it does all of a request, or it is in a pool of prefill
or decode engines."""

from __future__ import annotations

from ...core.contract.request import Request
from ...core.handoff import PrefillSide
from ..actors.engine import EngineActor
from ..disaggregation.cluster import Cluster
from ..disaggregation.endpoint import HandoffEndpoint


class WholeEngine:
    """The place of an engine that prefills and decodes."""

    @property
    def is_entrance(self) -> bool:
        """Whether clients send their requests and cancels to this engine."""
        return True

    def name_of_try(self, request: Request) -> str | None:
        """Return the name of this try to place a request; None for a late copy of a try that is over."""
        return request.request_id

    def was_left(self, request: Request) -> bool:
        """Return whether its client left before a request was placed anew."""
        return False

    def abort(self, request_id: str, actor: EngineActor) -> EngineActor:
        """Note that a client leaves. Returns the actor that gets its cancel: `actor`, if it is placed nowhere else."""
        return actor

    def state_elsewhere(self, request_id: str, is_here: bool) -> str:
        """Describe the state of a request on its way to another engine; empty if it is not. `is_here`: this engine has
        it."""
        return ""

    def check(self) -> None:
        """Recount the transfers. Raises InvariantViolation."""

    @property
    def left_over(self) -> str:
        """Describe the transfers that are not over; empty if there are none."""
        return ""


class PooledEngine(WholeEngine):
    """The place of an engine that hands requests over, or takes them."""

    def __init__(self, cluster: Cluster, replica: int) -> None:
        self._cluster = cluster
        self._replica = replica

    @property
    def endpoint(self) -> HandoffEndpoint:
        return self._cluster.endpoints[self._replica]

    @property
    def is_entrance(self) -> bool:
        return self.endpoint.is_prefill

    def name_of_try(self, request: Request) -> str | None:
        placement = self._cluster.placements.get(request.request_id)
        if placement is None or placement.request is not request:
            return None  # the request has ended, or was placed anew
        return f"{request.request_id} again" if placement.tries > 1 else request.request_id

    def was_left(self, request: Request) -> bool:
        placement = self._cluster.placements.get(request.request_id)
        if placement is None or placement.request is not request:
            return False
        return placement.tries > 1 and placement.is_aborted

    def abort(self, request_id: str, actor: EngineActor) -> EngineActor:
        placement = self._cluster.placements.abort(request_id)
        return actor if placement is None else self._cluster.endpoint_of(placement.prefill).actor

    def state_elsewhere(self, request_id: str, is_here: bool) -> str:
        side = self.endpoint.side
        transfer = side.state_of(request_id) if isinstance(side, PrefillSide) else None
        if transfer is not None:
            return f"transfer {transfer.value}"
        placement = self._cluster.placements.get(request_id)
        if is_here or placement is None:
            return ""
        there = self._cluster.endpoint_of(placement.decode).engine.state_of(request_id)
        return "" if there is None else f"{there.value}, handed over"

    def check(self) -> None:
        self.endpoint.side.check()

    @property
    def left_over(self) -> str:
        side = self.endpoint.side
        return "" if side.is_idle else f"{side.num_in_flight} transfers are not over"

    def tell_of_death(self) -> None:
        """Let the engines of the other pool know that this one has died."""
        dead = self.endpoint
        for endpoint in self._cluster.endpoints:
            if endpoint.is_prefill != dead.is_prefill and endpoint.is_alive:
                endpoint.handoff.peer_lost(dead.name, endpoint.now_ns)
