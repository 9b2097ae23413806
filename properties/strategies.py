"""Hypothesis strategies: configurations and operations of a contract, for tests of other people's own."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .allocator_draws import HOLDERS, PAGE_SIZES, REQUESTS
from .contracts import AllocatorCapabilities, AllocatorConfig
from .operations import (
    Alloc,
    Close,
    Commit,
    Complete,
    Evict,
    Fork,
    Free,
    FreeAfter,
    FreeStray,
    FreeTwice,
    Grow,
    Launch,
    Open,
    Operation,
    Restore,
    Retire,
    Reuse,
    Snapshot,
    Trim,
)
from .suites import ALLOCATOR


@st.composite
def allocator_configs(draw: Any, capabilities: AllocatorCapabilities) -> AllocatorConfig:
    """Pools of 1 to 8 pages, with rows if there is a table."""
    page_size = draw(st.sampled_from(sorted(set(PAGE_SIZES)))) if capabilities.paged else 1
    num_pages = draw(st.integers(1, 8))
    if not capabilities.table:
        return AllocatorConfig(num_pages, page_size)
    return AllocatorConfig(
        num_pages, page_size, draw(st.integers(1, 3)), draw(st.integers(1, num_pages + 1)) * page_size
    )


def allocator_operations(config: AllocatorConfig, capabilities: AllocatorCapabilities) -> st.SearchStrategy[Operation]:
    """Any operation that makes sense for these capabilities, hostile ones included."""
    size, pages = config.page_size, config.num_pages
    holders, requests = st.sampled_from(HOLDERS), st.sampled_from(REQUESTS)
    names = st.sampled_from(("s", "t"))
    few = st.integers(1, max(pages, 1))
    slots = st.integers(0, pages + 1).map(lambda n: n * size) | st.integers(-size, size * (pages + 1))
    tokens = st.integers(0, config.row_width + 1)
    how = {
        Alloc: st.builds(Alloc, holders, slots),
        Free: st.builds(Free, holders, few),
        FreeStray: st.builds(FreeStray, st.lists(st.integers(-1, pages + 1), min_size=1, max_size=3).map(tuple)),
        FreeTwice: st.builds(FreeTwice, holders),
        Fork: st.builds(Fork, holders, holders, few),
        Retire: st.builds(Retire, holders, few),
        Reuse: st.builds(Reuse, holders, few),
        Evict: st.builds(Evict, st.integers(0, pages)),
        Launch: st.just(Launch()),
        Complete: st.just(Complete()),
        FreeAfter: st.builds(FreeAfter, holders),
        Snapshot: st.builds(Snapshot, names),
        Restore: st.builds(Restore, names),
        Open: st.builds(Open, requests),
        Grow: st.builds(Grow, requests, tokens),
        Commit: st.builds(Commit, requests, st.integers(1, 2 * size)),
        Trim: st.builds(Trim, requests, st.integers(0, 2 * size)),
        Close: st.builds(Close, requests),
    }
    return st.one_of([how[kind] for kind in ALLOCATOR.operations(capabilities)])


@st.composite
def allocator_histories(
    draw: Any, capabilities: AllocatorCapabilities, max_size: int = 30
) -> tuple[AllocatorConfig, list[Operation]]:
    """A configuration and a sequence of operations for it."""
    config = draw(allocator_configs(capabilities))
    return config, draw(st.lists(allocator_operations(config, capabilities), max_size=max_size))
