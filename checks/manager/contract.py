"""The contract of a block manager: it looks up the cached prefix of a text, allocates the rest, and takes everything
back at the end.

That is the shape of vLLM's `KVCacheManager` (get_computed_blocks with allocate_slots, free). Nothing is locked or
evicted from outside, and blocks of equal text may be kept twice. A block may be cached as soon as it is allocated: its
content is computed in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ...properties.harness.contract import Capabilities
from ...properties.harness.letters import Choices


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """What `make(config)` builds: `num_pages` pages of `page_size` slots, and a padding page of the manager's own
    where it has one."""

    num_pages: int
    page_size: int = 1

    def __post_init__(self) -> None:
        assert self.num_pages >= 1 and self.page_size >= 1

    @classmethod
    def draw(cls, choose: Choices, has: ManagerCapabilities) -> ManagerConfig:
        """Choose a pool of a few pages."""
        return cls(num_pages=choose(range(1, 10)), page_size=choose((1, 2, 2, 3, 4, 4, 8, 16)))


@dataclass(frozen=True, slots=True)
class ManagerCapabilities(Capabilities):
    """What a manager declares."""

    caching: bool = False  # what was released is found again, until its pages are handed out
    namespaces: bool = False  # namespaces other than "" are kept apart
    # It refuses what no caller should do: to grow or release a request that is not there, to admit one that is
    misuse: bool = False

    FOUNDATIONS: ClassVar = {"namespaces": ("caching",)}


class BlockManager(Protocol):
    """A manager of KV blocks. A slot is one token's place, a page is `page_size` neighbouring slots from a multiple of
    it.

    To refuse is to return None or False, or to raise one of `REFUSALS`; nothing may have changed then.
    """

    def admit(self, request: str, tokens: Sequence[int], namespace: str, num_tokens: int) -> int | None:
        """Start a request: find the longest cached prefix of `tokens`, in whole pages and less than all of it, and
        allocate for the `num_tokens` positions behind it, or for as many as are left. Returns the length of that
        prefix."""

    def grow(self, request: str, tokens: Sequence[int], num_tokens: int) -> bool:
        """Allocate for `num_tokens` positions more.
        `tokens` is the whole text of the request by now; what was sampled is at its end."""

    def release(self, request: str) -> None:
        """End a request: it holds nothing any more."""

    def slots_of(self, request: str) -> Sequence[int]:
        """Return the slots of a request's positions, in whole pages."""

    def num_free(self) -> int:
        """Count the pages that no request holds, cached or not."""
