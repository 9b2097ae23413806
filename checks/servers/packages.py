"""The components of other servers that are checked: their contracts, what they do otherwise by design, their defects.

A component whose part cannot run without a device is named with the reason. It is not imitated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...core.errors import ConfigError, nearest
from ...properties.harness.importing import load_make
from .release import Release, installed_version
from .sglang import RELEASES as SGLANG
from .sglang import open_sglang
from .vllm import RELEASES as VLLM
from .vllm import open_vllm

_HERE = "foredraft.checks.servers"


class Defect(NamedTuple):
    """A known defect: the invariants that may show it, and the releases that have it, all if none are given."""

    invariants: tuple[str, ...]
    text: str
    releases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerComponent:
    """A component of another server. `subject`: its adapter; `operations`: those of a check of a few seconds.

    `otherwise`: capability or invariant -> what the component does by design and the contract does not ask for. An
    invariant there, or of one of the `defects`, may be broken.
    """

    name: str
    contract: str
    subject: str
    operations: int
    otherwise: Mapping[str, str] = field(default_factory=dict)
    defects: tuple[Defect, ...] = ()

    def defects_of(self, version: str) -> dict[str, str]:
        """Return invariant -> the defect of this release that it shows."""
        known = (defect for defect in self.defects if not defect.releases or version in defect.releases)
        return {id: defect.text for defect in known for id in defect.invariants}

    @property
    def relaxed(self) -> list[str]:
        """The capabilities that it declares since it does something otherwise by design."""
        return [name for name in self.otherwise if not name.isupper()]

    def may_break(self, version: str) -> tuple[str, ...]:
        """Return the invariants that this release may break."""
        return (*filter(str.isupper, self.otherwise), *self.defects_of(version))

    def made(self, config: Any) -> str:
        """Return how the component is made, in its own words; empty if its adapter does not say."""
        return str(getattr(load_make(self.subject)(config), "made", ""))


@dataclass(frozen=True, slots=True)
class ServerPackage:
    """A package with its components. `absent`: component -> why it cannot run here."""

    name: str
    releases: tuple[str, ...]
    open: Callable[[], Release]
    components: tuple[ServerComponent, ...]
    absent: Mapping[str, str] = field(default_factory=dict)


def _allocator(name: str, make: str, operations: int) -> ServerComponent:
    return ServerComponent(name, "allocator", f"{_HERE}.sglang_allocators:{make}", operations)


_RADIX = {
    "unchecked_locks": "the scheduler locks what it has just matched, so a lock of an evicted node is not refused",
}
_SGLANG = (
    _allocator("TokenToKVPoolAllocator", "make_token", 30_000),
    _allocator("TokenToKVPoolAllocator, need_sort", "make_token_sorted", 30_000),
    _allocator("PagedTokenToKVPoolAllocator", "make_paged", 20_000),
    _allocator("PagedTokenToKVPoolAllocator, need_sort", "make_paged_sorted", 20_000),
    ServerComponent("RadixCache", "prefix-cache", f"{_HERE}.sglang_radix:make", 25_000, _RADIX),
    ServerComponent(
        "RadixCache, lru",
        "prefix-cache",
        f"{_HERE}.sglang_radix:make_lru",
        15_000,
        _RADIX,
        (Defect(("RADIX-08",), "a match of a part of a node counts as a use of all of it, as it is split only then"),),
    ),
    ServerComponent(
        "RadixCache, fifo",
        "prefix-cache",
        f"{_HERE}.sglang_radix:make_fifo",
        15_000,
        _RADIX,
        (Defect(("RADIX-08",), "a split makes the front part of a node as new as the split"),),
    ),
    ServerComponent(
        "AdaptiveSpeculativeParams",
        "step-controller",
        f"{_HERE}.sglang_steps:make",
        12_000,
        {"untold_steps": "a result does not say with how many steps it ran, so a late one counts as well"},
    ),
)

_SCHEDULER = {
    "caches_at_allocation": "a block is in the prefix cache when it is allocated, for requests of the same step, too",
    "own_victims": "the request that was admitted last gives way, or the lowest priority that came last",
    "ordered_reuse": "the device runs steps in order, so a block can go on at once",
}
_DRAFTS = _SCHEDULER | {"ragged_drafts": "a row has fewer drafts near the end of the context, and behind its prompt"}
_LOOKAHEAD = _DRAFTS | {"lookahead": "a step has slots for the next drafts behind its verify window"}
_PRIORITY = _SCHEDULER | {"strict_priorities": "there is no ageing"}
_UNCOMPUTED = Defect(
    ("RADIX-09", "ACCEPT-03"),
    "blocks of a request that is preempted in the step that should compute them stay in the prefix cache",
)
_EMPTY_STEP = Defect(
    ("ENGINE-11",),
    "a request that gives way to itself ends the plan, and the requests behind it miss the step",
    ("0.32.0",),
)


_PADDED = Defect(
    ("ENGINE-07", "ENGINE-11", "ENGINE-01"),
    "a request with one token left to compute is padded to a verify window: it waits while less of the budget is left, "
    "and for ever where the whole budget is smaller",
)


def _stale(*releases: str) -> Defect:
    text = "a hit may have draft KV that was made before another token: equal blocks of other texts have the same hash"
    return Defect(("RADIX-12",), text, releases)


def _scheduler(name: str, make: str, otherwise: Mapping[str, str], defects: tuple[Defect, ...] = ()) -> ServerComponent:
    return ServerComponent(name, "engine", f"{_HERE}.vllm_scheduler:{make}", 30_000, otherwise, defects)


def _manager(name: str, make: str, *defects: Defect, **otherwise: str) -> ServerComponent:
    return ServerComponent(name, "block-manager", f"{_HERE}.vllm_manager:{make}", 20_000, otherwise, defects)


_EAGLE = {"drops_last_page": "the last block of a hit is computed again, for the hidden states that the head needs"}
_UNSALTED = Defect(
    ("BLOCKS-08",),
    "a BlockStored of a Mamba group has the tokens of blocks that it passes over, but not their extra keys: the salt "
    "of the text is missing",
)

_VLLM = (
    _manager("KVCacheManager", "make"),
    _manager("KVCacheManager, use_eagle", "make_eagle", **_EAGLE),
    _manager("KVCacheManager, Mamba none", "make_one_state"),
    _manager("KVCacheManager, Mamba align", "make_states"),
    _manager("KVCacheManager, Mamba align, use_eagle", "make_states_eagle", **_EAGLE),
    _manager("KVCacheManager, Mamba align, salts", "make_states_salted", _UNSALTED),
    _scheduler("Scheduler, fcfs", "make", _SCHEDULER),
    _scheduler("Scheduler, priority", "make_by_priority", _PRIORITY, (_EMPTY_STEP,)),
    _scheduler("Scheduler, priority, long prefills capped", "make_capped", _PRIORITY, (_UNCOMPUTED, _EMPTY_STEP)),
    _scheduler("Scheduler, draft tokens", "make_drafts", _DRAFTS),
    _scheduler("Scheduler, draft tokens, small budget", "make_drafts_in_less", _DRAFTS, (_PADDED,)),
    ServerComponent(
        "Scheduler, adaptive verification",
        "engine",
        f"{_HERE}.vllm_verification:make",
        6_000,
        _DRAFTS | {"own_ties": "among drafts of equal survival its sort takes any"},
        (
            Defect(
                ("DRAFT-08",),
                "a prompt of several chunks: the first budget with its request takes it by the confidences of drafts "
                "behind a middle chunk, which are never verified",
            ),
            Defect(
                ("DRAFT-06", "DRAFT-09"),
                "a request with one token left to compute is padded with drafts that are none: they count as certain "
                "and take the budget of the others",
            ),
        ),
    ),
    _scheduler("Scheduler, EAGLE", "make_eagle", _LOOKAHEAD, (_stale("0.32.0"),)),
    _scheduler("Scheduler, EAGLE, dropped block", "make_eagle_drops", _LOOKAHEAD, (_stale(),)),
    _scheduler(
        "AsyncScheduler, fcfs",
        "make_async",
        _SCHEDULER | {"late_tokens": "a request that is preempted still gets the token that is in flight"},
    ),
)

_TRANSFORMERS = (
    ServerComponent("CachePool, BlockLedger", "allocator", "transformers-blocks", 20_000),
    ServerComponent(
        "FIFOScheduler",
        "engine",
        "transformers-scheduler",
        12_000,
        {
            "ENGINE-05": "its limit is on the requests of a batch; one that waits for a block runs beside them",
            "ENGINE-10": "the request that finds no block gives way, also if it is the oldest",
            "ENGINE-16": "a request that does not fit is passed over by later ones that do",
            "ENGINE-09": "as often as such requests come",
        },
        (Defect(("ENGINE-11",), "after a request was put back, none is admitted until one ends by itself"),),
    ),
)

TRANSFORMERS = ("5.23.0",)
_NEEDS_DEVICE = "its loop owns worker processes and a model on a device"

PACKAGES: dict[str, ServerPackage] = {
    "vllm": ServerPackage(
        "vllm",
        VLLM,
        open_vllm,
        _VLLM,
        {"EngineCore": _NEEDS_DEVICE},
    ),
    "sglang": ServerPackage(
        "sglang",
        SGLANG,
        open_sglang,
        _SGLANG,
        {
            "Scheduler": f"{_NEEDS_DEVICE}; docs/servers.md compares single decisions",
            "AdaptiveController": "it swaps the graphs and attention backends of a draft worker",
        },
    ),
    "transformers": ServerPackage(
        "transformers", TRANSFORMERS, lambda: installed_version("transformers", TRANSFORMERS), _TRANSFORMERS
    ),
}
"""Name -> the packages that `foredraft check` knows."""


def package_of(name: str) -> ServerPackage:
    """Return a package. Raises ConfigError for one that is not known."""
    if name not in PACKAGES:
        what = f"there are no adapters for it{nearest(name, PACKAGES)}; there are {', '.join(PACKAGES)}"
        raise ConfigError.of(name, "", what)
    return PACKAGES[name]
