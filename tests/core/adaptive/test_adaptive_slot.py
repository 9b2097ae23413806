"""The EMA rule against a literal reading of it, and its probes from zero steps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from foredraft.core.adaptive.config import SlotConfig
from foredraft.core.adaptive.slot import (
    NEVER,
    SLOT_TRANSITIONS,
    AdaptiveStepSlot,
    InvalidObservation,
    SlotState,
    checked_counts,
)
from foredraft.core.errors import ConfigError, ForedraftError
from hypothesis import given
from hypothesis import strategies as st


def make(steps, initial=None, **knobs) -> AdaptiveStepSlot:
    knobs = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0, "down_hysteresis": 0.0, **knobs}
    return AdaptiveStepSlot(initial, {"candidate_steps": steps, **knobs})


class PlainSlot:
    """Apply the rule literally: no gate, no countdown, every threshold written out."""

    def __init__(self, initial, cfg: SlotConfig):
        c = cfg.candidate_steps
        self.cfg, self.c, self.count = cfg, c, 0
        self.s = initial if initial in c else c[len(c) // 2]
        self.ema = self.s - 1.0
        self.probing, self.failed, self.wait = False, 0, 1

    def update(self, drafts):
        if not drafts:
            return
        cfg = self.cfg
        if self.s > 0:
            mean = sum(drafts) / len(drafts)
            self.ema = (1 - cfg.ema_alpha) * self.ema + cfg.ema_alpha * mean
        self.count += 1
        after = self.count - cfg.warmup_batches
        if after <= 0 or after % cfg.update_interval:
            return
        if self.s == 0:
            if len(self.c) > 1:
                self.wait -= 1
                if self.wait == 0:
                    self.s, self.probing = self.c[1], True
                    if self.ema < 0:
                        self.ema = self.s - 1.0
            return
        old = i = self.c.index(self.s)
        while i > 0:
            below = self.c[i - 1]
            threshold = (below - 0.5 if below > 0 else 0.5) + cfg.down_hysteresis
            if not self.ema <= threshold:
                break
            i -= 1
        if i == old:
            while i + 1 < len(self.c) and self.ema > self.c[i] - 0.5 + cfg.up_hysteresis:
                i += 1
        if cfg.ceiling_coeff > 0 and i <= old:
            ceiling = max(1, math.ceil(self.ema * cfg.ceiling_coeff))
            allowed = [j for j in range(i + 1) if self.c[j] <= ceiling]
            i = max(allowed) if allowed else 0
        self.s = self.c[i]
        if self.s == 0:
            self.failed = self.failed + 1 if self.probing else self.failed
            self.wait = min(2**self.failed, 32) if self.probing and cfg.probe_backoff is not False else 1
        elif self.probing:
            self.failed = 0
        self.probing = False


slot_configs = st.builds(
    lambda steps, alpha, interval, warmup, down, gap, ceiling, backs_off: SlotConfig(
        tuple(sorted(steps)), alpha, interval, warmup, down + gap, down, ceiling, probe_backoff=backs_off
    ),
    st.sets(st.integers(0, 9), min_size=1, max_size=5),
    st.sampled_from([0.2, 0.5, 1.0]),
    st.integers(1, 6),
    st.integers(0, 12),
    st.sampled_from([-0.5, -0.25, 0.0, 0.25]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([None, True, False]),
)


@given(slot_configs, st.integers(0, 9), st.lists(st.lists(st.floats(0, 1), max_size=3), max_size=120))
def test_equals_the_plain_reading(cfg, initial, rounds):
    slot, plain = AdaptiveStepSlot(initial, cfg), PlainSlot(initial, cfg)
    for shares in rounds:
        drafts = [round(share * slot.current_steps) for share in shares]
        slot.update(drafts)
        plain.update(drafts)
        assert slot.current_steps == plain.s
        assert slot.ema_accept_len == plain.ema


def test_probe_from_zero_waits_twice_as_long_after_each_failure():
    slot = make([0, 2], 2)
    probes = []
    for round_number in range(200):
        before = slot.current_steps
        slot.update([0])
        if before == 0 and slot.current_steps == 2:
            probes.append(round_number)
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert gaps == [3, 5, 9, 17, 33, 33, 33, 33]  # min(2**n, 32) recomputes at 0, and one at 2


def test_without_backoff_every_decision_at_zero_steps_tries_drafts():
    slot = make([0, 2], 2, probe_backoff=False)
    steps = []
    for _ in range(41):
        slot.update([0])
        steps.append(slot.current_steps)
    first = steps.index(0)
    assert steps[first:] == [0, 2] * ((41 - first) // 2) + [0] * ((41 - first) % 2)


def test_a_probe_that_pays_stays_and_forgives_failures():
    slot = make([0, 2], 2)
    for _ in range(20):
        slot.update([0])
    while slot.current_steps == 0:
        slot.update([0])
    for _ in range(30):
        slot.update([2])
        assert slot.current_steps == 2
    slot.update([0])
    assert slot.current_steps == 0
    slot.update([0])
    assert slot.current_steps == 2  # no failed probe in a row: the next one comes at once
    steps = []
    for _ in range(4):
        slot.update([0])
        steps.append(slot.current_steps)
    assert steps == [0, 0, 2, 0]  # and the one after that counts as the first failure again


@pytest.mark.parametrize("bad", [[math.nan], [1, -1], [4], [math.inf], [10**30], [-math.inf]])
@pytest.mark.parametrize("as_array", [False, True])
def test_impossible_observations_are_refused_and_change_nothing(bad, as_array):
    slot = make([1, 3], 3)
    slot.update([1])
    before = slot.snapshot()
    with pytest.raises(InvalidObservation, match="expected a number from 0 to 3") as caught:
        slot.update(np.array(bad, dtype=float) if as_array else bad)
    assert isinstance(caught.value, ForedraftError)
    assert slot.snapshot() == before


def test_bad_rules_are_refused():
    with pytest.raises(ConfigError, match="candidate_steps"):
        AdaptiveStepSlot(1, {"candidate_steps": []})


def test_dwell_bounds_the_switches_of_a_hostile_input():
    def switches(dwell: int) -> int:
        slot = make([0, 1, 3], 1, min_dwell_batches=dwell)
        for _ in range(10_000):
            top = slot.current_steps
            slot.update([top if top < 3 else 0])  # up whenever low, down whenever high
        return slot.switches

    assert switches(0) > 1000
    assert 2 <= switches(50) <= 10
    assert 2 <= switches(1) <= 10


def test_fixed_slot_never_decides():
    assert make([3]).rounds_to_next_decision() == NEVER
    assert make([0]).rounds_to_next_decision() == NEVER


class TestCheckedCounts:
    @pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.uint64, np.float64])
    def test_arrays_and_lists_agree(self, dtype):
        values = [0, 2, 3, 3, 1]
        assert checked_counts(np.array(values, dtype=dtype), 3) == checked_counts(values, 3) == [1, 1, 1, 2]

    def test_fractions_count_at_their_floor(self):
        assert checked_counts([0.5, 1.9], 2) == [1, 1, 0]


def test_every_transition_of_the_table_is_walked_and_no_other(monkeypatch):
    walked = set()

    class Watched(dict):
        def __init__(self, state, events):
            super().__init__(events)
            self.state = state

        def __getitem__(self, event):
            walked.add((self.state, event))
            return super().__getitem__(event)  # KeyError: an event that the table does not have

    watched = {state: Watched(state, events) for state, events in SLOT_TRANSITIONS.items()}
    monkeypatch.setattr("foredraft.core.adaptive.slot.SLOT_TRANSITIONS", watched)
    for dwell in (0, 4):
        slot = make([0, 1, 3], 3, min_dwell_batches=dwell)
        for phase in (0.0, 1.0, 0.0, 3.0):
            for _ in range(60):
                slot.update([min(phase, slot.current_steps)])
                assert (slot.current_steps == 0) == (slot.state in (SlotState.RESTING, SlotState.BACKING_OFF))
    assert walked == {(state, event) for state, events in SLOT_TRANSITIONS.items() for event in events}
