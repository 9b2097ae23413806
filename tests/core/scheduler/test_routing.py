"""The mode of an engine: overlap wherever nothing forbids it, and a reason that says who decided."""

from __future__ import annotations

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.scheduler.config import choose_mode
from hypothesis import given
from hypothesis import strategies as st


def route(asked_for=None, page_size=1, topk=1, paged_trees=True, overlap=True):
    return choose_mode(
        asked_for,
        page_size=page_size,
        topk=topk,
        backend="triton",
        backend_supports_paged_trees=paged_trees,
        algorithm="EAGLE",
        algorithm_supports_overlap=overlap,
    )


sizes = st.sampled_from([1, 2, 16])


@given(st.sampled_from([None, "overlap", "synchronous"]), sizes, sizes, st.booleans(), st.booleans())
def test_what_forbids_overlap_is_named_and_nothing_else_forbids_it(asked_for, page_size, topk, paged_trees, overlap):
    chosen = route(asked_for, page_size, topk, paged_trees, overlap)
    obstacles = {
        "was asked for": asked_for == "synchronous",
        "algorithm EAGLE": not overlap,
        f"trees (topk = {topk}) with pages (page_size = {page_size})": min(page_size, topk) > 1 and not paged_trees,
    }
    assert (chosen.mode == "synchronous") == any(obstacles.values())
    if any(obstacles.values()):
        assert any(words in chosen.reason for words, there in obstacles.items() if there)
    else:
        assert ("default" in chosen.reason) == (asked_for is None)


def test_arguments_that_are_not_resolved_are_refused_all_at_once():
    with pytest.raises(ConfigError) as caught:
        route("overlapp", page_size=0, topk=0)
    assert [problem.key for problem in caught.value.problems] == ["mode", "page_size", "topk"]
    assert "did you mean 'overlap'" in str(caught.value)
