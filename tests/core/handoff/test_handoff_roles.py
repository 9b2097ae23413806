"""An engine's roles, and its moves for a handoff, one at a time."""

import numpy as np
import pytest
from foredraft.core.adaptive import fixed_controller
from foredraft.core.algorithm.arrival import Arrival, DraftPayload
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.request import FinishReason, Request
from foredraft.core.errors import ConfigError, InvariantViolation
from foredraft.core.handoff import DecodeDriver, DecodeSide, HandoffTiming, PageFormat, PrefillDriver, make_driver
from foredraft.core.handoff.life import (
    DECODE_TRANSITIONS,
    ENDED,
    PREFILL_TRANSITIONS,
    TransferCounts,
    TransferEvent,
    TransferState,
)
from foredraft.core.handoff.messages import Accept, Ack, Cancel, CancelAck, Manifest, Offer, Page, PageSeal, TransferKey
from foredraft.core.handoff.side import Deadlines, WritePage
from foredraft.core.handoff.transfer import Incoming, Outgoing
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig, EngineRole
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.rules import OurRules


def engine_of(role, algorithm="STANDALONE", **config):
    defaults = {
        "num_pages": 60,
        "context_len": 64,
        "max_running": 3,
        "overlap": False,
        "rules": OurRules(watermark=0.0),
    }
    steps = 0 if algorithm == "NONE" else 2
    config = EngineConfig(**{**defaults, **config}, track_tokens=True, role=role)
    return Engine(config, get_algorithm(algorithm), fixed_controller(steps))


def ask(name="a", length=8, max_tokens=6, **fields):
    return Request(name, Prompt.of_tokens(np.arange(length) + 1), max_tokens, **fields)


def arrival(algorithm="STANDALONE", hidden=None):
    values = {"topk_ids": np.array([2**40], np.int64), "topk_probabilities": np.array([0.5], np.float32)}
    needs = get_algorithm(algorithm).needs_hidden_states
    return Arrival(77, DraftPayload(values, hidden, needs))


def test_a_worker_takes_what_its_role_lets_it_take():
    assert "only decodes" in engine_of("decode").submit(ask(), 0).refusal
    assert "only computes prompts" in engine_of("prefill").transfers.reserve(ask(), 0).refusal
    both = engine_of("both")
    assert not both.submit(ask(), 0).refusal and both.transfers.reserve(ask("b"), 0).row == 0  # a request waits already
    with pytest.raises(ConfigError, match="none of both, prefill, decode"):
        engine_of("cook")


class Recording:
    """A transport that notes what it is asked to do."""

    def __init__(self):
        self.done = []

    def send(self, peer, message):
        self.done.append(type(message).__name__)

    def report(self, finished):
        self.done.append(finished.reason)

    def transfer_ended(self, outcome):
        self.done.append(outcome.state)

    def flush(self, replan):
        self.done.append("flush")


def test_each_driver_takes_what_its_role_takes():
    page_format = PageFormat(1, 64, 0)
    prefill, decode = (make_driver(engine_of(role), page_format, 1, Recording()) for role in ("prefill", "decode"))
    assert isinstance(prefill, PrefillDriver) and isinstance(decode, DecodeDriver)
    assert not prefill.submit(ask(), "there", 0).refusal
    assert "only decodes" in decode.submit(ask(), "there", 0).refusal and decode.side.is_idle
    page = Page(TransferKey("a", 1, 1), 1, 0, PageSeal(64, 7, 0, 0))
    for driver in (prefill, decode):  # of no transfer that they know
        driver.launched(0)
        driver.receive("there", [(page, page.seal)], 0)
        assert driver.side.counts.ignored == 1
        assert driver._transport.done[-1] == "flush"


def test_a_role_changes_when_there_is_nothing_and_never_otherwise():
    engine = engine_of("decode")
    engine.transfers.change_role(EngineRole.PREFILL, 0)
    assert not engine.submit(ask(), 0).refusal
    with pytest.raises(InvariantViolation, match="HANDOFF-10"):
        engine.transfers.change_role(EngineRole.DECODE, 0)
    engine.abort("a", 0)
    engine.transfers.change_role(EngineRole.DECODE, 0)
    row = engine.transfers.reserve(ask(), 0).row
    engine.abort("a", 0)
    with pytest.raises(InvariantViolation, match="HANDOFF-10"):
        engine.transfers.change_role(EngineRole.PREFILL, 0)  # the row is still held
    engine.transfers.release_hold(row, 0)
    engine.transfers.change_role(EngineRole.PREFILL, 0)


def test_a_reservation_counts_as_transferring_and_joins_with_the_next_step():
    engine = engine_of("decode")
    outcome = engine.transfers.reserve(ask(), 0)
    assert (
        outcome.row
        and len(engine.requests.transferring) == 1
        and engine.requests.num_with_row == 0
        and engine.plan(0) is None
    )
    engine.check()
    assert engine.transfers.join("a", arrival(), 0).replan
    engine.transfers.release_hold(outcome.row, 0)
    assert len(engine.requests.transferring) == 0 and engine.requests.num_with_row == 1
    engine.check()
    step = engine.plan(0)
    (join,) = step.joins
    assert (join.row, join.epoch, join.num_emitted, join.num_received) == (outcome.row, outcome.epoch, 1, 8)
    assert step.prefill is None and step.decode.rows.tolist() == [outcome.row] and step.decode.seq_lens.tolist() == [8]
    assert step.arrivals.first_tokens.tolist() == [77] and step.arrivals.batch.token_ids.tolist() == [[2**40]]
    written = step.table_writes.columns[step.table_writes.rows == outcome.row]
    assert sorted(set(written.tolist())) == list(range(int(engine.store.allocated[outcome.row])))


def test_a_prefix_is_cached_when_its_request_joins_and_not_before():
    engine = engine_of("decode")
    engine.transfers.reserve(ask("a"), 0)
    assert engine.store.cache.peek(np.arange(8) + 1) == 0
    engine.transfers.join("a", arrival(), 0)
    assert engine.store.cache.peek(np.arange(8) + 1) == 8
    assert engine.transfers.reserve(ask("b", 9), 0).num_cached == 8


def test_a_missing_hidden_state_fails_its_request_and_caches_nothing():
    engine = engine_of("decode", "EAGLE")
    row = engine.transfers.reserve(ask(), 0).row
    finished = engine.transfers.join("a", arrival("EAGLE"), 0).finished
    engine.transfers.release_hold(row, 0)
    assert finished.reason is FinishReason.ERROR and "hidden state" in finished.message
    assert engine.is_idle and engine.store.allocator.num_held_slots == 0
    engine.check()


def test_what_never_fits_is_refused_and_what_does_not_fit_now_waits():
    engine = engine_of("decode", num_pages=30)
    assert "too long" in engine.transfers.reserve(ask("a", 60), 0).refusal
    assert "too long" in engine.transfers.reserve(ask("a", 8, 1), 0).refusal
    assert engine.transfers.reserve(ask("a", 14), 0).row
    assert "duplicate" in engine.transfers.reserve(ask("a", 14), 0).refusal
    assert engine.transfers.reserve(ask("b", 14), 0) == ("", 0, 0, 0, False)
    engine.check()


def test_a_reservation_that_a_running_block_leaves_no_slots_asks_for_its_end():
    engine = engine_of("decode", num_pages=50, multi_step_rounds=8)
    row = engine.transfers.reserve(ask("a", 8, 30), 0).row
    engine.transfers.join("a", arrival(), 0)
    engine.transfers.release_hold(row, 0)
    assert engine.plan(0).max_rounds > 1
    assert engine.transfers.reserve(ask("b", 20), 0) == ("", 0, 0, 0, True)


def test_a_prefill_worker_reserves_nothing_for_output():
    engine = engine_of("prefill", num_pages=8)
    assert not engine.submit(ask("a", 8), 0).refusal
    assert engine.plan(0).prefill.lens.tolist() == [8]
    assert "too long" in engine.submit(ask("b", 9), 0).refusal


# -- room at the decode side -----------------------------------------------------------------------------------------


def crowded(*lengths):
    """Return a decode side to which prompts "0", "1", … of these lengths were offered, by a prefill worker
    of that name each."""
    side = DecodeSide(engine_of("decode", num_pages=30), PageFormat(1, 8, 8, 0, "canary"), 1)
    for n, length in enumerate(lengths):
        offer = Offer(TransferKey(str(n), 2, 1), 2, ask(str(n), length), "STANDALONE", side.page_format, 9)
        side.receive(f"prefill{n}", offer, 0)
    return side


def accepted(side):
    return [send.message.key.request_id for send in side.take_actions() if isinstance(send.message, Accept)]


def test_room_is_given_when_it_is_made():
    side = crowded(14, 17, 10)
    assert accepted(side) == ["0"]  # "2" would fit, and waits behind "1"
    side.abort("1", 1)
    assert accepted(side) == ["2"]
    side = crowded(14, 17, 10)
    accepted(side)
    side.peer_lost("prefill1", 1)
    assert accepted(side) == ["2"]


def test_a_late_message_gives_no_room_that_something_else_has_made():
    """A cancel of an attempt before the one that has ended began the transfer that waited for room."""
    side = crowded(14, 17)
    side.worker_lost(2, 1)
    assert accepted(side) == ["0"]  # and has ended
    side.receive("prefill0", Cancel(TransferKey("0", 1, 1), 1, False, "no such transfer"), 2)
    assert [type(send.message) for send in side.take_actions()] == [CancelAck] and side.counts.ignored == 1
    side.tick(3)
    assert accepted(side) == ["1"]


def test_a_page_counts_once():
    side = crowded(14)
    key, seal = TransferKey("0", 2, 1), PageSeal(8, 1, 8, 1)
    assert accepted(side) == ["0"]
    for _ in range(2):
        side.receive_pages("prefill0", [(Page(key, 1, 0, seal), seal)], 1)
    assert side.counts.ignored == 1
    assert [type(action) for action in side.take_actions()] == [WritePage]


def test_a_repeated_manifest_is_acknowledged_in_its_own_epoch():
    """With a newer epoch, the prefill side would ignore the ack and keep its pages."""
    side = crowded(1)
    key, seal = TransferKey("0", 2, 1), PageSeal(8, 1, 8, 1)
    assert accepted(side) == ["0"]
    side.receive_pages("prefill0", [(Page(key, 1, 0, seal), seal)], 1)
    manifest = Manifest(key, 1, 0, (seal,), arrival())
    side.receive("prefill0", manifest, 1)
    assert [action.message for action in side.take_actions()[1:]] == [Ack(key, 1)]
    side.worker_lost(2, 2)
    side.receive("prefill0", manifest, 3)
    assert [action.message for action in side.take_actions()] == [Ack(key, 1)]


# -- tables, deadlines, counters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [PREFILL_TRANSITIONS, DECODE_TRANSITIONS])
def test_every_transfer_can_end_and_an_end_absorbs(table):
    assert all(not table[state] for state in ENDED)
    ends = set(ENDED)
    while grown := {state for state in table if state not in ends and ends & set(table[state].values())}:
        ends |= grown
    assert ends == set(table)


@pytest.mark.parametrize("event", TransferEvent)
@pytest.mark.parametrize("state", TransferState)
def test_a_transfer_follows_the_table_of_its_side(state, event):
    key = TransferKey("a", 1, 1)
    outgoing = Outgoing(ask(), "there", 1, key, 1, state=state)
    incoming = Incoming(Offer(key, 1, ask(), "NONE", PageFormat(1, 64, 0), 9), "there", state=state)
    following = PREFILL_TRANSITIONS.get(state, {}).get(event)
    if state in PREFILL_TRANSITIONS:
        assert outgoing.try_move(event) == (following is not None)
        assert outgoing.state is (following or state)
    following = DECODE_TRANSITIONS.get(state, {}).get(event)
    if following is not None:
        incoming.move(event)
    else:
        with pytest.raises(KeyError):
            incoming.move(event)
    assert incoming.state is (following or state)


def test_deadlines_come_in_order_and_only_the_last_one_set_counts():
    deadlines = Deadlines()
    for owner, at in (("a", 5), ("b", 3), ("a", 9), ("c", 3)):
        deadlines.set(owner, at)
    deadlines.clear("unknown")
    assert deadlines.next_ns == 3 and deadlines.pop_due(2) is None
    assert [deadlines.pop_due(8) for _ in range(3)] == ["b", "c", None]
    assert deadlines.next_ns == 9
    deadlines.clear("a")
    assert deadlines.next_ns is None


def test_a_lost_transfer_is_missed_in_the_counters():
    counts = TransferCounts(started=2)
    counts.end(TransferState.COMPLETED)
    counts.check(1)
    with pytest.raises(InvariantViolation, match="HANDOFF-05"):
        counts.check(0)


def test_timing_that_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="hold_ns"):
        HandoffTiming(lease_ns=10, hold_ns=10)
    with pytest.raises(ConfigError, match="max_attempts"):
        HandoffTiming(max_attempts=0)
