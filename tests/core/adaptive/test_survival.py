"""Confidences, the survival of drafts, and which of them a batch verifies."""

from __future__ import annotations

import json

import numpy as np
import pytest
from foredraft.core.adaptive.lengths.survival import acceptance_of, are_valid, choose_nodes, log_odds
from foredraft.observe.encoding import _encode_confidence


def test_log_odds_are_bounded():
    assert log_odds(np.array([0.5, 0.0, 1.0, np.nan])).tolist() == [0.0, -40.0, 40.0, 40.0]
    assert log_odds(np.array([0.9], np.float32))[0] == pytest.approx(np.log(9), rel=1e-6)


def test_the_surest_drafts_are_chosen_and_stay_contiguous():
    survival = np.array([[0.9, 0.8, 0.1], [0.5, 0.4, 0.3], [0.95, 0.05, 0.01]])
    nodes = {drafts: choose_nodes(survival, np.array([4, 4, 4]), drafts).tolist() for drafts in (0, 1, 3, 5, 9, 50)}
    assert nodes == {0: [1, 1, 1], 1: [1, 1, 2], 3: [3, 1, 2], 5: [3, 3, 2], 9: [4, 4, 4], 50: [4, 4, 4]}
    assert choose_nodes(survival, np.array([2, 1, 4]), 3).tolist() == [2, 1, 3]


@pytest.mark.parametrize(("drafts", "nodes"), [(1, [2, 1, 1]), (2, [2, 2, 1]), (4, [3, 2, 2]), (6, [3, 3, 3])])
def test_equal_drafts_come_by_position_and_then_by_row(drafts: int, nodes: list[int]):
    assert choose_nodes(np.ones((3, 2)), np.full(3, 3), drafts).tolist() == nodes


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -0.1, 1.1])
def test_a_row_without_confidences_counts_as_certain(wrong: float):
    confidence = np.array([[0.9, wrong], [0.9, 0.9]], np.float32)
    assert are_valid(confidence).tolist() == [False, True]
    p = acceptance_of(confidence, 0.5, (-0.2, -0.2, -0.2))
    assert p[0].tolist() == [1.0, 1.0] and 0 < p[1].max() < 1
    assert choose_nodes(np.cumprod(p, axis=1), np.array([3, 3]), 2).tolist() == [3, 1]


def test_the_log_has_confidences_exactly():
    values = np.array([[0.1, 0.3333333, 1 - 2**-24, 1e-30, np.nan, np.inf]], np.float32)
    found = np.array(json.loads(_encode_confidence(values)), np.float32)
    assert np.array_equal(found[:4], values[0, :4]) and np.isnan(found[4:]).all()
