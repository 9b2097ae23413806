"""A3, A5 and A10: routing by batch size, the graphs that it can reach, and the shapes of drafts."""

from __future__ import annotations

import pytest
from foredraft.core.adaptive.config import InvalidInitialSteps, load_adaptive_config
from foredraft.core.adaptive.draft_shape import DraftTreeShape, InfeasibleDraftShape
from foredraft.core.adaptive.graphs import graph_plan
from foredraft.core.adaptive.policy import InvalidGraphSizes, RangeRouter
from foredraft.core.adaptive.slot import AdaptiveSpeculativeParams
from foredraft.core.contract.step import RoundShape
from foredraft.core.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st

RANGES = {"4": {"candidate_steps": [1, 3, 7]}, "8": {"candidate_steps": [1, 3]}, "32": {"candidate_steps": [0, 1]}}


def test_routing_without_graphs():
    params = AdaptiveSpeculativeParams(3, RANGES)
    # 3 is no candidate of the last range, which starts at its own middle.
    steps = {bs: params.slot_for_batch(bs).current_steps for bs in (0, 1, 4, 7, 8, 31, 32, 33, 10_000)}
    assert steps == {0: 3, 1: 3, 4: 3, 7: 3, 8: 3, 31: 3, 32: 1, 33: 1, 10_000: 1}


def test_routing_pads_to_the_captured_size_first():
    params = AdaptiveSpeculativeParams(3, RANGES)
    params.set_cuda_graph_bs([32, 2, 8])
    assert params.steps_for(8, 0) == 3
    assert params.steps_for(9, 0) == 1  # runs at 32, so range 32 decides
    assert params.steps_for(31, 0) == 1
    assert params.steps_for(40, 0) == 1  # no graph is large enough: the batch size itself
    slot = params.slot_for_batch(5)
    assert slot is params.slots[1]  # 5 runs at 8
    params.set_cuda_graph_bs(None)
    assert params.slot_for_batch(5) is params.slots[0]
    with pytest.raises(InvalidGraphSizes, match="0"):
        params.set_cuda_graph_bs([0, 4])


def test_initial_steps_must_be_in_the_union():
    assert AdaptiveSpeculativeParams(None, RANGES).initial_steps == 3
    with pytest.raises(InvalidInitialSteps, match="2"):
        AdaptiveSpeculativeParams(2, RANGES)


def test_feedback_reaches_the_slot_of_its_batch_size_only():
    params = AdaptiveSpeculativeParams(3, RANGES)
    params.observe((), 6, 2, 4, 3)
    assert [slot.ema_accept_len for slot in params.slots] == [2.2, 2.0, 0.0]


def test_reload_keeps_the_state_of_unchanged_ranges():
    params = AdaptiveSpeculativeParams(3, RANGES)
    params.observe((), 3, 1, 4, 3)
    params.observe((), 3, 1, 8, 3)
    kept = params.slots[0]
    params.reload(load_adaptive_config({**RANGES, "8": {"candidate_steps": [1, 3], "ema_alpha": 0.5}}))
    assert params.slots[0] is kept and kept.ema_accept_len == 2.2
    assert params.steps_for(8, 0) == 3 and params.slots[1].ema_accept_len == 2.0
    before = params.snapshot()
    with pytest.raises(ConfigError, match=r"\[5\] were not built"):
        params.reload(load_adaptive_config({"1": {"candidate_steps": [1, 5]}}))
    assert params.snapshot() == before


tables = st.dictionaries(
    st.integers(1, 40).map(str),
    st.sets(st.integers(0, 8), min_size=1, max_size=4).map(lambda steps: {"candidate_steps": sorted(steps)}),
    min_size=1,
    max_size=4,
)


@given(tables, st.sets(st.integers(1, 64), min_size=1, max_size=8))
def test_captured_pairs_are_exactly_those_that_routing_reaches(table, sizes):
    config = load_adaptive_config(table)
    router = RangeRouter(config, sizes)
    reachable = set()
    for batch_size in range(1, max(sizes) + 1):
        size = min(size for size in sizes if size >= batch_size)
        bound = max((bound for bound in config.bounds if bound <= size), default=config.bounds[0])
        for step in config.slots[config.bounds.index(bound)].candidate_steps:
            reachable.add((step, size))
        assert router.range_index(batch_size) == config.bounds.index(bound)
    plan = graph_plan(config, sorted(sizes))
    assert set(plan.pairs) == reachable and len(plan.pairs) == plan.num_graphs


def test_graph_plan_says_what_pruning_saves():
    plan = graph_plan(load_adaptive_config("default"), [1, 8, 32, 64], lambda steps, size: steps * size)
    assert plan.pairs == ((1, 1), (1, 8), (1, 32), (1, 64), (3, 1), (3, 8), (7, 1))
    assert (plan.num_graphs, plan.num_graphs_unpruned) == (7, 12)
    assert (plan.num_bytes, plan.num_bytes_unpruned) == (105 + 27 + 7, 11 * 105)


class TestDraftShape:
    CONFIG = load_adaptive_config({"1": {"candidate_steps": [0, 2, 4]}, "8": {"candidate_steps": [1]}})

    def test_chains(self):
        shape = DraftTreeShape(self.CONFIG)
        assert [shape.round_shape(steps, 1).nodes for steps in (0, 1, 4)] == [1, 2, 5]
        assert shape.max_num_draft_tokens == 5
        assert shape.round_shapes() == tuple(map(RoundShape.chain, (0, 1, 2, 4)))

    def test_trees_have_the_nodes_of_their_range(self):
        shape = DraftTreeShape(self.with_nodes({"2": 7, "4": 9}, 3), topk=2)
        assert [shape.round_shape(steps, 7).nodes for steps in (0, 2, 4)] == [1, 7, 9]
        assert [shape.round_shape(steps, 8).nodes for steps in (0, 1)] == [1, 3]
        assert shape.max_num_draft_tokens == 9
        assert shape.round_shapes() == ((0, 2, 1), (1, 2, 3), (2, 2, 7), (4, 2, 9))

    def test_nodes_by_steps_hold_for_all_ranges_without_their_own(self):
        shape = DraftTreeShape(self.with_nodes(6, None), topk=2, num_draft_tokens={1: 3, 2: 7, 4: 9})
        assert shape.round_shapes() == ((0, 2, 1), (1, 2, 3), (2, 2, 6), (4, 2, 6))

    def test_each_candidate_must_fill_its_tree(self):
        # k + (S - 1)k² = 2 + 1·4 = 6 candidates at 2 steps, 2 at 1 step.
        DraftTreeShape(self.with_nodes({"2": 7, "4": 15}, 3), topk=2)
        with pytest.raises(InfeasibleDraftShape, match=r"range 1: .* 8 .* = 6; expected at most 7"):
            DraftTreeShape(self.with_nodes({"2": 8, "4": 15}, 3), topk=2)
        with pytest.raises(InfeasibleDraftShape, match="range 8"):
            DraftTreeShape(self.CONFIG, topk=2, num_draft_tokens=4)
        only_zero = load_adaptive_config({"1": {"candidate_steps": [0]}})
        assert DraftTreeShape(only_zero, topk=4, num_draft_tokens=64).round_shape(0, 1).nodes == 1

    def test_contradictions(self):
        for arguments in (
            {"topk": 0},
            {"topk": 2},
            {"topk": 2, "num_draft_tokens": 0},
            {"topk": 2, "num_draft_tokens": {1: 3}},
            {"topk": 1, "num_draft_tokens": 5},
        ):
            with pytest.raises(InfeasibleDraftShape):
                DraftTreeShape(self.CONFIG, **arguments)

    @staticmethod
    def with_nodes(first, second):
        entries = {"1": {"candidate_steps": [0, 2, 4]}, "8": {"candidate_steps": [1]}}
        for key, nodes in (("1", first), ("8", second)):
            if nodes is not None:
                entries[key]["num_draft_tokens"] = nodes
        return load_adaptive_config(entries)

    def test_look_up_drafts_run_as_deep_as_the_tree(self):
        shape = DraftTreeShape(self.CONFIG, topk=1, num_draft_tokens=12, depth_limited=False)
        assert shape.round_shape(2, 1).nodes == 12
