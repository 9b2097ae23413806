"""Hidden states are an array for all rows or None for all rows (C1, ACCEPT-17)."""

from __future__ import annotations

import numpy as np
import pytest
from foredraft.core.contract.hidden import CaptureHiddenMode, ForwardPhase, capture_mode, check_hidden, merge_hidden
from foredraft.core.errors import InvariantViolation


@pytest.mark.parametrize("phase", ForwardPhase)
def test_what_each_phase_captures(phase):
    full = {ForwardPhase.PREFILL, ForwardPhase.VERIFY, ForwardPhase.DRAFT_EXTEND}
    expected = CaptureHiddenMode.FULL if phase in full else CaptureHiddenMode.LAST
    assert capture_mode(phase, needs_hidden_states=True) is expected
    assert capture_mode(phase, needs_hidden_states=False) is CaptureHiddenMode.NULL


def test_merge():
    states = np.arange(6.0).reshape(3, 2)
    assert merge_hidden(None, None) is None
    assert merge_hidden(states, states[:1]).tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert merge_hidden(states[:0], states[:0]).shape == (0, 2)


@pytest.mark.parametrize("array", [np.zeros((2, 4)), np.zeros((0, 4))])
def test_none_never_merges_with_an_array(array):
    for pair in [(None, array), (array, None)]:
        with pytest.raises(InvariantViolation) as caught:
            merge_hidden(*pair)
        assert caught.value.invariant == "ACCEPT-17"


@pytest.mark.parametrize("other", [np.zeros((2, 5)), np.zeros((2, 4), np.float32)])
def test_states_of_different_models_never_merge(other):
    own = np.zeros((2, 4))
    for pair in [(own, other), (other, own)]:
        with pytest.raises(InvariantViolation, match="ACCEPT-17"):
            merge_hidden(*pair)


def test_presence_is_asserted_both_ways():
    check_hidden(None, CaptureHiddenMode.NULL, "relay")
    check_hidden(np.zeros((1, 2)), CaptureHiddenMode.LAST, "relay")
    with pytest.raises(InvariantViolation, match="ACCEPT-17: relay"):
        check_hidden(None, CaptureHiddenMode.FULL, "relay")
    with pytest.raises(InvariantViolation, match="ACCEPT-17: relay"):
        check_hidden(np.zeros((0, 2)), CaptureHiddenMode.NULL, "relay")
