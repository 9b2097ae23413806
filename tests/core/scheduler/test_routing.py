"""The whole table of the mode, checked against the sentence that specifies it."""

from __future__ import annotations

from itertools import product

import pytest
from foretoken.core.errors import ConfigError
from foretoken.core.scheduler.overlap_mode import choose_mode


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


@pytest.mark.parametrize(
    ("asked_for", "page_size", "topk", "paged_trees", "overlap"),
    list(product([None, "overlap", "synchronous"], [1, 2, 16], [1, 2, 16], [True, False], [True, False])),
)
def test_the_whole_table(asked_for, page_size, topk, paged_trees, overlap):
    routing = route(asked_for, page_size, topk, paged_trees, overlap)
    if asked_for == "synchronous":
        expected = ("synchronous", "synchronous mode was asked for")
    elif not overlap:
        expected = ("synchronous", "algorithm EAGLE does not support overlap mode")
    elif page_size > 1 and topk > 1 and not paged_trees:
        trees = f"trees (topk = {topk}) with pages (page_size = {page_size})"
        expected = ("synchronous", f"backend triton does not support {trees} in overlap mode")
    else:
        expected = ("overlap", "overlap mode was asked for" if asked_for else "overlap mode is the default")
    assert (routing.mode, routing.reason) == expected
    assert routing.pipeline_depth == {"overlap": 2, "synchronous": 1}[routing.mode]


def test_arguments_that_are_not_resolved_are_refused_all_at_once():
    with pytest.raises(ConfigError) as caught:
        route("overlapp", page_size=0, topk=0)
    assert [problem.key for problem in caught.value.problems] == ["mode", "page_size", "topk"]
    assert "did you mean 'overlap'" in str(caught.value)
