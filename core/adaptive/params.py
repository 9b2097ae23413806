"""One EMA slot for each batch-size range, and the routing of batch sizes to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, Problem
from .config import AdaptiveConfig, load_adaptive_config, resolve_initial_steps
from .policy import RangeRouter
from .slot import AdaptiveStepSlot

_MAX_CACHED_BATCH_SIZES = 1 << 14


class AdaptiveSpeculativeParams:
    """The `ema` policy: a batch size is padded to its captured graph size and decided by the slot of its range.

    `config` is what `load_adaptive_config` reads. Raises `ConfigError`, and `InvalidInitialSteps` if `initial_steps` is
    in no range.
    """

    name = "ema"

    def __init__(
        self,
        initial_steps: int | None = None,
        config: str | Mapping[str, Any] | AdaptiveConfig = "default",
    ) -> None:
        self.config = load_adaptive_config(config)
        self.initial_steps = resolve_initial_steps(self.config, initial_steps)
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
        """Go on with another table. A range whose bound and rule are unchanged keeps its state, the others begin anew.

        Raises `ConfigError` and changes nothing if the new table has candidates that the first one had not: nothing
        was built for them.
        """
        config = load_adaptive_config(config)
        unbuilt = sorted(set(config.candidate_steps) - self._built)
        if unbuilt:
            message = f"{unbuilt} were not built at start-up; expected some of {sorted(self._built)}"
            raise ConfigError(config.source, [Problem("candidate_steps", message)])
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
