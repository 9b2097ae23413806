"""The `ema` policy: one slot per range of batch sizes.

Its rule lowers and raises the steps, bounds them from above, and tries drafts again after 0 steps. A slot looks at its
EMA only at a recompute. Each recompute is one event, and `SLOT_TRANSITIONS` says which is possible in which state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from ..errors import ConfigError, ForedraftError
from .config import AdaptiveConfig, SlotConfig, load_adaptive_config, resolve_initial_steps, slot_config
from .parking import NEVER_PARKED, Parking
from .policy import NEVER, GateState, RangeRouter, SwitchGate

_MAX_PROBE_WAIT = 32


class SlotState(Enum):
    SETTLED = "settled"  # drafts, as many steps as the EMA justifies
    RESTING = "resting"  # 0 steps, since the EMA fell so low
    PROBING = "probing"  # drafts again, to see whether that pays
    BACKING_OFF = "backing_off"  # 0 steps, since a probe failed; the next one waits longer


class SlotEvent(Enum):
    CHOOSE = "choose"  # the EMA chooses some steps, often the same
    HOLD = "hold"  # the EMA chooses others, but the gate does not allow a switch yet
    REST = "rest"  # the EMA chooses 0 steps
    WAIT = "wait"  # no probe is due, or the gate does not allow one yet
    PROBE = "probe"


S, E = SlotState, SlotEvent
SLOT_TRANSITIONS: dict[SlotState, dict[SlotEvent, SlotState]] = {
    S.SETTLED: {E.CHOOSE: S.SETTLED, E.HOLD: S.SETTLED, E.REST: S.RESTING},
    S.RESTING: {E.WAIT: S.RESTING, E.PROBE: S.PROBING},
    S.PROBING: {E.CHOOSE: S.SETTLED, E.HOLD: S.SETTLED, E.REST: S.BACKING_OFF},
    S.BACKING_OFF: {E.WAIT: S.BACKING_OFF, E.PROBE: S.PROBING},
}


class InvalidObservation(ForedraftError, ValueError):
    """A number of correct drafts that no verify can produce: NaN, negative, or more than the executed steps allow."""


class AdaptiveStepSlot:
    """Chooses among the candidates of one range from an EMA of correct drafts per request.

    `update` takes one verify result at a time. The choice changes only at a recompute: every `update_interval` results
    once `warmup_batches` have been seen. Its thresholds lie half a token below the candidates, shifted by the
    hystereses. Because up >= down, a constant input leads to a constant choice.
    """

    def __init__(self, initial_steps: int | None, cfg: SlotConfig | Mapping[str, Any]) -> None:
        self.config: SlotConfig = slot_config(cfg)
        self.candidate_steps: tuple[int, ...] = self.config.candidate_steps
        if initial_steps not in self.candidate_steps:
            initial_steps = self.candidate_steps[len(self.candidate_steps) // 2]
        self._index = self.candidate_steps.index(initial_steps)
        self.current_steps: int = self.candidate_steps[self._index]
        self.ema_accept_len: float = float(self.current_steps - 1)
        self.is_measured: bool = False  # whether a verify result is in the EMA
        self._count = 0
        self._until_recompute = self.config.warmup_batches + self.config.update_interval
        self.state: SlotState = SlotState.SETTLED if self.current_steps else SlotState.RESTING
        self._failed_probes = 0
        self._wait = 1  # recomputes at 0 steps until the next probe
        self.switches: int = 0
        self._gate = SwitchGate(self.config.min_dwell_batches)

    def update(self, correct_drafts: Iterable[float]) -> None:
        """Take one verify result: the correct drafts of each request, produced with `current_steps`.

        An empty list changes nothing. Raises `InvalidObservation`, and changes nothing, for a value that is NaN,
        negative or greater than `current_steps`.
        """
        total, rows = checked_total(correct_drafts, self.current_steps)
        if rows:
            self.observe(total, rows)

    def observe(self, total: float, rows: int) -> None:
        """Update as `update` does, for a caller that has already checked its values.

        Takes their sum and their number (> 0).
        """
        if self.current_steps > 0:
            alpha = self.config.ema_alpha
            self.is_measured = True
            self.ema_accept_len = (1.0 - alpha) * self.ema_accept_len + alpha * (total / rows)
        self._count += 1
        self._until_recompute -= 1
        if self._until_recompute == 0:
            self._until_recompute = self.config.update_interval
            self._recompute()

    def rounds_to_next_decision(self) -> int:
        """Return the number of results after which the choice may change; fewer results never change it."""
        if len(self.candidate_steps) == 1:
            return NEVER
        interval = self.config.update_interval
        rounds = self._until_recompute
        if self.current_steps == 0:
            rounds += (self._wait - 1) * interval
            allowed = self._gate.earliest(self._count, switches=2)
        elif self.state is SlotState.PROBING:
            allowed = self._count
        else:
            allowed = self._gate.earliest(self._count)
        blocked = allowed - self._count - rounds
        if blocked > 0:
            rounds += -(-blocked // interval) * interval
        return rounds

    def _recompute(self) -> None:
        """Find the event of this recompute, take its transition, and do what it means."""
        if self.current_steps == 0:
            target = self._index
            event = SlotEvent.PROBE if self._is_probe_due() else SlotEvent.WAIT
        else:
            target = self._apply_ceiling(self._target_index())
            event = self._choice(target)
        was_probing = self.state is SlotState.PROBING
        self.state = SLOT_TRANSITIONS[self.state][event]
        match event:
            case SlotEvent.WAIT:
                self._wait = max(1, self._wait - 1)
            case SlotEvent.PROBE:
                self._probe()
            case SlotEvent.CHOOSE:
                self._failed_probes = 0 if was_probing else self._failed_probes
                self._switch(target)
            case SlotEvent.REST:
                self._set_wait(was_probing)
                self._switch(target)

    def _choice(self, target: int) -> SlotEvent:
        """Return what the choice of candidate `target` is. The gate never delays the return from a probe."""
        rests = self.candidate_steps[target] == 0
        if rests and self.state is SlotState.PROBING:
            return SlotEvent.REST
        if target != self._index and self._gate.state(self._count) is not GateState.OPEN:
            return SlotEvent.HOLD
        return SlotEvent.REST if rests else SlotEvent.CHOOSE

    def _set_wait(self, probe_failed: bool) -> None:
        """Set after how many recomputes a slot that goes to 0 steps probes."""
        if not probe_failed:
            self._wait = 1
        elif self.config.probe_backoff is not False:
            self._failed_probes += 1
            self._wait = min(1 << min(self._failed_probes, 10), _MAX_PROBE_WAIT)

    def _target_index(self) -> int:
        """Return the candidate that the thresholds choose for the current EMA. A fall is tried before a rise."""
        c, ema, index = self.candidate_steps, self.ema_accept_len, self._index
        while index > 0 and ema <= (c[index - 1] or 1) - 0.5 + self.config.down_hysteresis:
            index -= 1
        if index < self._index:
            return index
        while index + 1 < len(c) and ema > c[index] - 0.5 + self.config.up_hysteresis:
            index += 1
        return index

    def _apply_ceiling(self, target: int) -> int:
        """Unless the target is a rise, lower it to the largest candidate that the EMA justifies."""
        if self.config.ceiling_coeff <= 0 or target > self._index:
            return target
        ceiling = max(1, math.ceil(self.ema_accept_len * self.config.ceiling_coeff))
        while target > 0 and self.candidate_steps[target] > ceiling:
            target -= 1
        return target

    def _is_probe_due(self) -> bool:
        if len(self.candidate_steps) == 1:
            return False
        if self._wait > 1:
            return False
        # If the gate refuses, the wait stays used up: the probe comes at the first recompute that the gate allows.
        return self._gate.earliest(self._count, switches=2) <= self._count

    def _probe(self) -> None:
        self._switch(self._index + 1)
        if self.ema_accept_len < 0:  # cold: no result has been measured yet, so begin from a neutral value
            self.ema_accept_len = float(self.current_steps - 1)

    def _switch(self, index: int) -> None:
        if index == self._index:
            return
        old = self.current_steps
        self._index = index
        self.current_steps = self.candidate_steps[index]
        self.switches += 1
        self._gate.record(self._count, old, self.current_steps)

    def snapshot(self) -> dict[str, object]:
        """Return the whole state as plain data: two slots with equal snapshots and rules always choose alike."""
        return {
            "steps": self.current_steps,
            "ema_accept_len": self.ema_accept_len,
            "count": self._count,
            "until_recompute": self._until_recompute,
            "probing": self.state is SlotState.PROBING,
            "failed_probes": self._failed_probes,
            "wait": self._wait,
            "switches": self.switches,
            "gate": self._gate.snapshot(),
        }


def checked_counts(correct_drafts: Iterable[float], limit: int) -> list[int]:
    """Return how many requests had 0, 1, … `limit` correct drafts (fractions count at their floor).

    Raises `InvalidObservation` for a value that is NaN, negative or greater than `limit`.
    """
    if type(correct_drafts) is np.ndarray and correct_drafts.dtype.kind in "iu" and correct_drafts.ndim == 1:
        if not len(correct_drafts):
            return [0] * (limit + 1)
        if not limit and not np.count_nonzero(correct_drafts):  # as after each plain round
            return [len(correct_drafts)]
        # The maximum comes first: bincount itself would allocate as much as the greatest value says.
        if np.maximum.reduce(correct_drafts) <= limit:
            try:
                counts: list[int] = np.bincount(correct_drafts, minlength=limit + 1).tolist()
                return counts
            except (ValueError, TypeError):  # a negative value, or uint64: the slow path says which
                pass
    values = list(correct_drafts)
    checked_total(values, limit)
    counts = [0] * (limit + 1)
    for value in values:
        counts[int(value)] += 1
    return counts


def checked_total(correct_drafts: Iterable[float], limit: int) -> tuple[float, int]:
    """Return sum and number of the values. Raises `InvalidObservation` as `checked_counts` does."""
    values = list(correct_drafts)
    for value in values:
        if not 0 <= value <= limit:  # False for NaN too
            raise InvalidObservation(f"correct drafts {value}; expected a number from 0 to {limit}, the executed steps")
    return sum(values), len(values)


_MAX_CACHED_BATCH_SIZES = 1 << 14


class AdaptiveSpeculativeParams:
    """The `ema` policy: a batch size is padded to its captured graph size and decided by the slot of its range.

    `config` is what `load_adaptive_config` reads. Raises `ConfigError`, and `InvalidInitialSteps` if `initial_steps` is
    in no range.
    """

    name = "ema"
    parking: Parking = NEVER_PARKED

    def __init__(
        self,
        initial_steps: int | None = None,
        config: str | Mapping[str, Any] | AdaptiveConfig = "default",
    ) -> None:
        self.config: AdaptiveConfig = load_adaptive_config(config)
        self.initial_steps: int = resolve_initial_steps(self.config, initial_steps)
        self._slots = [AdaptiveStepSlot(self.initial_steps, cfg) for cfg in self.config.slots]
        self._router = RangeRouter(self.config)
        self._slot_of: dict[int, AdaptiveStepSlot] = {}
        self._retired_switches = 0
        self._built = frozenset(self.config.candidate_steps)

    @property
    def slots(self) -> tuple[AdaptiveStepSlot, ...]:
        """One slot per range, in the order of `config.bounds`."""
        return tuple(self._slots)

    @property
    def switches(self) -> int:
        return self._retired_switches + sum(slot.switches for slot in self._slots)

    def set_cuda_graph_bs(self, sizes: Sequence[int] | None) -> None:
        """Route by these captured batch sizes, or None when graphs are off. Raises `InvalidGraphSizes`."""
        self._router = RangeRouter(self.config, sizes)
        self._slot_of.clear()

    def slot_for_batch(self, bs: int) -> AdaptiveStepSlot:
        slot = self._slot_of.get(bs)
        if slot is None:
            slot = self._slots[self._router.range_index(bs)]
            if len(self._slot_of) < _MAX_CACHED_BATCH_SIZES:
                self._slot_of[bs] = slot
        return slot

    def reload(self, config: AdaptiveConfig) -> None:
        """Continue with another table. A range whose bound and rule are unchanged keeps its state, the others begin
        anew.

        Raises `ConfigError` and changes nothing if the new table has candidates that the first table lacks, because
        nothing was built for them.
        """
        config = load_adaptive_config(config)
        unbuilt = sorted(set(config.candidate_steps) - self._built)
        if unbuilt:
            message = f"{unbuilt} were not built at start-up; expected some of {sorted(self._built)}"
            raise ConfigError.of(config.source, "candidate_steps", message)
        kept = dict(zip(self.config.bounds, self._slots, strict=True))
        slots = []
        for bound, cfg in zip(config.bounds, config.slots, strict=True):
            old = kept.get(bound)
            if old is not None and old.config == cfg:
                slots.append(kept.pop(bound))
            else:
                slots.append(AdaptiveStepSlot(old.current_steps if old else self.initial_steps, cfg))
        self._retired_switches += sum(slot.switches for slot in kept.values())
        sizes = self._router.sizes
        self.config, self._slots = config, slots
        self.set_cuda_graph_bs(sizes or None)

    # --- the policy protocol ---

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        slot = self._slot_of.get(batch_size)
        return (slot or self.slot_for_batch(batch_size)).current_steps

    def observe(self, counts: Sequence[int], total: float, rows: int, batch_size: int, executed_steps: int) -> None:
        slot = self._slot_of.get(batch_size) or self.slot_for_batch(batch_size)
        if executed_steps == slot.current_steps:
            slot.observe(total, rows)

    def rounds_to_next_decision(self, batch_size: int) -> int:
        return self.slot_for_batch(batch_size).rounds_to_next_decision()

    def snapshot(self) -> dict[str, object]:
        return {
            "policy": self.name,
            "slots": {bound: slot.snapshot() for bound, slot in zip(self.config.bounds, self._slots, strict=True)},
        }
