"""Retracts running requests: for memory, to let one of greater priority in (`EngineConfig.preempt`), or so that a
parked draft computes their contexts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial

from ..adaptive.parking import Parking
from ..errors import InvariantViolation
from .admission import Admission
from .config import EngineRole
from .life import RequestRecord
from .requests import Requests
from .rules.room import Entrance


class Preemption:
    """Chooses the requests that give way."""

    def __init__(self, admission: Admission, requests: Requests) -> None:
        self.admission = admission
        self.room = admission.room
        self.requests = requests
        self.store = requests.store

    def retract_for_memory(self) -> None:
        """Retract a running request, because no round of all fits. Raises ENGINE-08 for a single one: it must fit."""
        requests, running = self.requests, self.requests.running
        if len(running) > 1:
            requests.retract(self.room.rules.victim(running.values(), requests.output.num_delivered))
            self.room.estimate_share()
        elif self.store.num_denied:
            requests.retract(next(iter(running.values())))  # it fits, but for an injected denial
        else:
            raise InvariantViolation("ENGINE-08", "a request alone does not fit the pool that it was admitted to")

    def preempt(self) -> None:
        """Retract requests of lower priority, the least entitled first, if that lets the head of the queue in.

        It enters in this plan or, where a step in flight may touch the slots of a victim, in the one after its commit.
        """
        requests, head = self.requests, self.requests.waiting.head
        if head is None or self.admission.limits.are_reduced:
            return
        if requests.in_progress is not None or requests.is_admission_paused:
            return
        if self.store.has_fenced or requests.leaving:
            return  # the slots of an earlier victim will be released soon
        lower = requests.lower_than(head)
        for victim in lower[: self._num_victims(head, lower)]:
            requests.retract(victim, for_priority=True)

    def return_draft(self, parking: Parking) -> None:
        """Retract all running requests if the draft is to return: its KV of their contexts is incomplete, and so is
        that of what the prefix cache has. Until the last request is out of its multi-step, the draft stays parked."""
        requests = self.requests
        if self.admission.role is EngineRole.PREFILL:
            parking.ask_back()  # its prompts go to engines that draft
        if not parking.is_returning:
            return
        for record in requests.running.values():
            requests.retraction_demands[record.request.request_id] = record
        requests.apply_retractions()
        if not requests.running:
            self.store.cache.begin_generation()
            parking.returned()

    def _num_victims(self, head: RequestRecord, lower: Sequence[RequestRecord]) -> int:
        """Return how many of `lower` must give way so that `head` enters; 0 if it needs none of them, or if all of them
        are too few."""
        if not lower:
            return 0
        num_decoding = len(self.requests.rounds.rows)
        entrance = self.room.measure(head, self.admission.limits.prefill_budget, num_decoding)
        with self.store.locked(entrance.prefix):
            fits = partial(self._fits_without, lower, entrance)
            if fits(0) or not fits(len(lower)):
                return 0
            return bisect_left(range(len(lower)), True, lo=1, key=fits)

    def _fits_without(self, lower: Sequence[RequestRecord], entrance: Entrance, num_victims: int) -> bool:
        """Return whether a request could enter if so many of `lower` gave way."""
        victims, num_decoding = lower[:num_victims], len(self.requests.rounds.rows)
        has_row = bool(num_victims) or self.admission.has_row
        if not has_row or entrance.num_slots > self._free_without(victims):
            return False
        return self.room.has_own_room(entrance, num_decoding - num_victims, [victim.row for victim in victims])

    def _free_without(self, victims: Sequence[RequestRecord]) -> int:
        """Return the slots that a newcomer could take if these requests gave way, beside those that it must leave free.

        The others grow until it is tried: by the rounds that are reserved in this plan and, where the slots of a victim
        are fenced, by those of the next one.
        """
        rounds, config = self.requests.rounds, self.room.config
        out, rows = {victim.row for victim in victims}, rounds.rows.tolist()
        is_fenced = bool(victims and self.requests.in_flight) and not self.store.at_once
        targets = rounds.targets_after(config.mixed + is_fenced).tolist()
        least: dict[int, int] = dict(zip(rows, targets, strict=True))
        held = {row: max(slots, least.get(row, 0)) for row, slots in self.room.held_rows().items() if row not in out}
        free = self.store.available_slots + self.store.slots_gained_without(out) - self._growth_to(held)
        return free - self.room.to_leave(sum(row in held for row in rows), held=held)

    def _growth_to(self, held: Mapping[int, int]) -> int:
        """Return the slots that the rows take until they have `held`."""
        num_slots = sum(slots - int(self.store.allocated[row]) for row, slots in held.items())
        return num_slots + math.ceil(num_slots * self.room.groups.per_slot)
