"""The use of a device's memory, and the number of KV slots that are left.

    total = reserved + context + weights (target, draft) + activations + captured graphs + recurrent states + KV pool

All terms are bytes on one device of the tensor-parallel group. Each slot of the pool holds one token's KV of the target
and of the draft. The draft's is one layer for an EAGLE head, all layers for a STANDALONE model, nothing for look-up.

Layers with a window keep only the last tokens of a request, and recurrent layers a state. `StateLayout` says where a
server places them: each is a group of layers of its own (`core/kv/groups.py`), which takes of the pool what a request
needs while it runs, or has a pool of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ....core.errors import ForedraftError
from ....core.kv.groups import GroupSizes, KVGroup
from ....core.model_shape import ModelShape
from ....core.scheduler.config import EngineConfig
from ..hardware import MIB
from .rules import StateLayout

RESERVED = 0.10
"""The share of a device's memory that servers leave alone by default, those with a static share apart."""

_SOURCES = {
    "reserved": "memory that the engine must leave alone",
    "context": "what driver, libraries and communicators take before weights are loaded: SGLang logs 78.3 … 78.8 GiB left of 79.65 on one "
    "H100, 77.2 … 78.8 on each of several, 137.3 of 140.4 on each of eight H200 (sgl-project/sglang pull 11716)",
    "target_weights": "computed from the shape",
    "draft_weights": "computed from the shape",
    "activations": "computed: widest layer and logits of the largest batch of tokens",
    "hidden_states": "computed: what the target hands to the draft, for the largest batch of tokens",
    "graphs": "assumption: 25 MiB per captured (steps, batch size) pair, the middle of 24-26 MiB seen on 8B models",
    "recurrent_states": "computed: states that the server sets aside, by its rule (docs/servers.md)",
    "kv_pool": "the rest, in whole pages",
}


class InsufficientMemory(ForedraftError):
    """The model, its draft and its buffers leave no room for a KV pool; the message says how much each part needs."""


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """How much of a device's memory the KV pool gets; None: not given.

    `reserved`: the share of the memory that is left alone; 0.10 is an engine's "memory utilisation 0.9". `static`:
    instead of it, the share of the memory beside the driver's context that weights and pool may have. `free`: instead
    of both, the share of what all but the pool leave that the pool may have. `kv_bytes`: instead of the first two, the
    memory of the pool; beside the third the most that it may have.
    """

    reserved: float | None = None  # None: RESERVED
    static: float | None = None
    free: float | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.reserved is not None and not 0.0 <= self.reserved < 1.0:
            raise InsufficientMemory(f"the reserved share must be in [0, 1), not {self.reserved}")

    @property
    def are_given(self) -> bool:
        return any(each is not None for each in (self.reserved, self.static, self.free, self.kv_bytes))

    def unused(self, seen: int, fixed: Mapping[str, int]) -> int:
        """Return the bytes that stay free beside the pool and `fixed`, of `seen` that the server sees."""
        if self.free is not None or self.kv_bytes is not None:
            left = seen - sum(fixed.values())
            by_share = 0 if self.free is None else max(0, int((1 - self.free) * left))
            return by_share if self.kv_bytes is None else max(by_share, left - self.kv_bytes)
        if self.static is not None:
            rest = (1 - self.static) * (seen - fixed["context_bytes"])
            beside = sum(fixed[name] for name in ("activations_bytes", "hidden_states_bytes", "graphs_bytes"))
            return max(0, int(rest) - beside)
        return int(seen * (RESERVED if self.reserved is None else self.reserved))


class PoolBlocks(NamedTuple):
    """Bytes of the blocks of a server whose layers of all kinds share one pool.

    Attributes:
        token: Of a token in a block of every group of layers, if the server counts the tokens of its pool so; None:
            it counts those of requests that fill the context.
        block: Of a block, if a state takes one.
    """

    token: int | None = None
    block: int | None = None


NO_BLOCKS = PoolBlocks()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A device's memory budget in bytes per device, and the number of KV slots (tokens) that it leaves.

    `slots` is a multiple of the page size and excludes the padding page. `groups`: what a request keeps beside them.
    `most_running`: the requests for which there are states; None: no limit.
    """

    total_bytes: int
    reserved_bytes: int
    context_bytes: int
    target_weights_bytes: int
    draft_weights_bytes: int
    activations_bytes: int
    hidden_states_bytes: int
    graphs_bytes: int
    recurrent_states_bytes: int
    kv_pool_bytes: int
    target_slot_bytes: int
    draft_slot_bytes: int
    window_slot_bytes: int  # in the pool of layers with a window, where they have one of their own
    slots: int
    groups: tuple[KVGroup, ...] = ()
    most_running: int | None = None
    blocks: PoolBlocks = NO_BLOCKS
    margin_bytes: int = 0
    may_not_start: bool = False

    @property
    def slot_bytes(self) -> int:
        return self.target_slot_bytes + self.draft_slot_bytes + self.window_slot_bytes

    def holds(self, config: EngineConfig) -> bool:
        """Whether the pool holds a request of the whole context, while its last chunk is computed."""
        sizes = GroupSizes(self.groups, config.page_size)
        return sizes.longest_in(self.slots, config.chunk_size) >= config.context_len

    def terms(self) -> dict[str, int]:
        """Return the terms in bytes; they sum to at most `total_bytes`, short of it by less than a page of the pool."""
        return {name: getattr(self, f"{name}_bytes") for name in _SOURCES}

    def explain(self, config: EngineConfig) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`. `config`: of the engine that has this pool."""
        rows: list[tuple[str, float, str, str]] = [
            (f"memory: {name}", value / MIB, "MiB", _SOURCES[name])
            for name, value in self.terms().items()
            if value or name != "recurrent_states"
        ]
        source = "the server's own pool may be so much larger or smaller (docs/servers.md)"
        rows.append(("memory: kv_pool, give or take", self.margin_bytes / MIB, "MiB", source))
        rows += [
            ("KV per slot, target", self.target_slot_bytes, "B", "computed from the shape"),
            ("KV per slot, draft", self.draft_slot_bytes, "B", "computed from the shape"),
        ]
        if self.window_slot_bytes:
            source = "the server's rule: tokens in layers with a window for each slot (hardware.window_ratio)"
            rows.append(("KV per slot, windows", self.window_slot_bytes, "B", source))
        for group in self.groups:
            rows.append(_explain_group(group, config.page_size))
        if self.most_running is not None:
            rows.append(("requests for which there are states", self.most_running, "", _SOURCES["recurrent_states"]))
        return rows + self._explain_capacity(config)

    def capacity(self, config: EngineConfig) -> tuple[int, float]:
        """Return the size of the KV pool in tokens as servers print it, those of requests that fill the context, and
        how many such requests it holds."""
        context, pool = config.context_len, config.num_pages * config.page_size
        windows = GroupSizes([group for group in config.groups if self._counts(group)], config.page_size)
        most = windows.most_of(pool, context, config.chunk_size)
        if not self._is_one_pool:
            return pool, most
        return int(most * context) if self.blocks.token is None else self.kv_pool_bytes // self.blocks.token, most

    @staticmethod
    def _counts(group: KVGroup) -> bool:
        """Return whether servers count a group in the requests that their pool holds: states of a pool of their own
        limit the requests that run instead."""
        return group.capacity is None or not group.has_states

    @property
    def _is_one_pool(self) -> bool:
        return any(group.capacity is None for group in self.groups)

    def _explain_capacity(self, config: EngineConfig) -> list[tuple[str, float, str, str]]:
        """Return the size of the KV pool in tokens, as servers print it when they start."""
        context, pool = config.context_len, config.num_pages * config.page_size
        tokens, most = self.capacity(config)
        rows: list[tuple[str, float, str, str]] = [("KV slots", pool, "tokens", "KV pool / KV per slot")]
        if self._is_one_pool:
            source = "KV pool / what a request of the whole context takes"
            if self.blocks.token is not None:
                source = "KV pool / a token in a block of every group of layers, as this release of the server counts"
            rows = [("KV slots without windows and states", *rows[0][1:])]
            rows.append(("KV slots", tokens, "tokens", source))
        return [*rows, (f"requests of {context:,} tokens that the KV pool holds", most, "", "KV pool / such a request")]


def _explain_group(group: KVGroup, page_size: int) -> tuple[str, float, str, str]:
    """Return what a request takes of a group of layers, as a row of `--explain`."""
    if group.capacity is not None:
        what = "states" if group.has_states else f"pages of {page_size} tokens in layers with a window"
        return f"{what}, in a pool of their own", group.capacity, "", "the server's proportions of its pools"
    if group.has_states:
        slots = group.pages_of(group.states) * page_size
        return "slots of a running request for its states", slots, "", "states / KV per slot, in whole pages"
    source = f"of each of its last {group.window:,} tokens, for layers with a window"
    return "slots of a running request beside its own", group.pages, "", source


class Slot(NamedTuple):
    """The bytes of a slot of the pool on one device. `window`: of its share of the pool of layers with a window, where
    they have one; `beside`: the slots that a token takes more while it is in a window."""

    target: int
    draft: int
    window: int
    beside: float

    @property
    def of_full_layers(self) -> int:
        return self.target + self.draft

    @property
    def num_bytes(self) -> int:
        return self.target + self.draft + self.window

    @classmethod
    def of(cls, target: ModelShape, tp: int, draft: int, layout: StateLayout) -> Slot:
        """Return the slot of a target with a draft of so many bytes. Raises `InsufficientMemory` if nothing is cached.

        If every layer has a window, a slot counts them all.
        """
        full, windows = target.token_bytes(tp, windowed=False), target.token_bytes(tp, windowed=True)
        if not full + draft:
            full, windows = windows, 0
        if not full + draft:
            message = f"{target.name} caches nothing of its tokens; engine.kv_slots gives the size of the pool"
            raise InsufficientMemory(message)
        if layout.rule == "shares" and windows:
            return cls(full, draft, math.ceil(layout.window_ratio * windows), 0.0)
        return cls(full, draft, 0, windows / (full + draft))
