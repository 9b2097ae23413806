"""What a server takes of a device's memory beside weights and KV, by its release, and the place of what layers with a
window and recurrent layers keep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..hardware import MIB

GRAPH_BYTES = 25 * MIB
CONTEXT_BYTES, GROUP_BYTES = 1150 * MIB, 1024 * MIB
WINDOW_RATIO = 0.8
"""Tokens of the pool of layers with a window for each token of the other pool (SGLang 0.5.23,
--swa-full-tokens-ratio)."""
STATE_RATIO = 0.9
"""Memory of states for each byte of KV (SGLang 0.5.23, --mamba-full-memory-ratio)."""

LayoutRule = Literal["pool", "shares", "reserved"]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The place of what layers with a window and recurrent layers keep of a request.

    "pool": windows and states come from the KV pool when the request runs (vLLM: all groups of layers share one pool of
    blocks). "shares": two pools beside the KV pool, in fixed proportions; that of the states limits how many requests
    run (SGLang). "reserved": windows come from the pool, states are set aside for all requests that may run.
    """

    rule: LayoutRule = "reserved"
    prefix_cache: bool = True
    overlap: bool = True
    window_ratio: float = WINDOW_RATIO  # of "shares"
    state_ratio: float = STATE_RATIO
    state_slots: int | None = None  # of "shares" on a device, given by number
    is_default_limit: bool = False  # max_running is the server's default, so "reserved" lowers it where memory is short

    @property
    def states_per_request(self) -> int:
        """The states of a request, without those for drafts.

        vLLM 0.33 keeps two where it caches prefixes (mamba_cache_mode align), SGLang 0.5.23 five (extra_buffer), or
        three without overlap (no_buffer).
        """
        if not self.prefix_cache or self.rule == "reserved":
            return 1
        return 2 if self.rule == "pool" else 5 if self.overlap else 3

    @property
    def states_of_row(self) -> int:
        """The states of "shares" that a request holds while it runs; the others of `states_per_request` are for the
        prefix cache (SGLang 0.5.23: its state, and with extra_buffer two that take turns)."""
        return 3 if self.prefix_cache and self.overlap else 1


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """What a server takes of a device beside weights and KV, since a release.

    Attributes:
        unseen_bytes, unseen_share: Of the driver's total memory; the server's share is one of the rest.
        context_bytes: What driver and libraries take of its share.
        group_bytes: More of it, where devices communicate.
        utilization: The server's default share.
        sampler_bytes: Of each logit of one row for each request, while it samples; 0: it samples in place.
        flashinfer_bytes: The same where FlashInfer samples; None: it does not.
        sampled_bytes: Once for sampling, whatever the batch.
        hidden_bytes: Of each number of the hidden states of a whole chunk, while it samples.
        keeps_workspace: The experts' workspace stays while it samples.
        expert_multiples: Experts in MXFP4 are padded to multiples of this hidden size and this width.
        counts_graphs: Graphs take of the pool, not of what is left alone.
        graph_bytes: Of one captured graph.
        graphs_base: Of the first graph, beside that.
        captures_twice: Passes are captured whole up to the largest batch, and in pieces up to twice its size.
        counts_by_group: The size of the pool is in tokens, each of which takes a block of every group of layers.
        margin: By how much the server's own pool may differ, as a share of what it may use.
    """

    since: tuple[int, ...] = ()
    unseen_bytes: int = 0
    unseen_share: float = 0.0
    context_bytes: int = CONTEXT_BYTES
    group_bytes: int = GROUP_BYTES
    utilization: float = 0.9
    sampler_bytes: float = 0.0
    flashinfer_bytes: float | None = None
    sampled_bytes: int = 0
    hidden_bytes: float = 0.0
    keeps_workspace: bool = False
    expert_multiples: tuple[int, int] = (1, 1)
    counts_graphs: bool = True
    graph_bytes: int = GRAPH_BYTES
    graphs_base: int = 0
    captures_twice: bool = False
    counts_by_group: bool = False
    margin: float = 0.02

    def unseen(self, memory_bytes: int) -> int:
        """Return the bytes of a device's memory that the server does not see."""
        return self.unseen_bytes + round(self.unseen_share * memory_bytes)

    def num_graphs(self, sizes: Sequence[int], batch: int) -> int:
        """Return the number of graphs of passes of these sizes, in tokens; `batch`: tokens of the largest batch."""
        if not self.captures_twice:
            return len(sizes)
        return sum((size <= 2 * batch) + (size <= batch) for size in sizes)


def release_numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release: (0, 21, 0) for 0.21.0."""
    return tuple(int(number) for number in re.findall(r"\d{1,9}", release))


def rules_of(release: str | None, rules: Sequence[MemoryRules], has_flashinfer: bool = False) -> MemoryRules:
    """Return the rules of a release, of those that are in order; without a release the latest of those that take most
    of the pool, whose size is counted as in the last release. `has_flashinfer`: a release that samples with FlashInfer
    where this is installed does so."""
    if release is None:
        usual = max(reversed(rules), key=lambda each: each.sampler_bytes)
        return replace(usual, counts_by_group=rules[-1].counts_by_group)
    numbers = release_numbers(release)
    found = next(each for each in reversed(rules) if numbers >= each.since)
    if not has_flashinfer or found.flashinfer_bytes is None:
        return found
    return replace(found, sampler_bytes=found.flashinfer_bytes)


def leanest_rules(release: str | None, rules: Sequence[MemoryRules]) -> MemoryRules | None:
    """Return the rules that take least of the pool, where no release says which hold; None if one does."""
    if release is not None or len(rules) == 1:
        return None
    return replace(min(rules, key=lambda each: each.sampler_bytes), counts_by_group=rules[-1].counts_by_group)
