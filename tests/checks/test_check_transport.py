"""The transport's suite on our own two state machines, and histories that it has found."""

from dataclasses import replace

import pytest
from foredraft.checks.adapters import handoff as handoff
from foredraft.checks.mutants.planting import Defects
from foredraft.properties.conformance import check
from foredraft.properties.harness.trial import Violation
from foredraft.properties.suites import suite_of
from foredraft.properties.transport.contract import DECODE, PREFILL, TransportConfig
from foredraft.properties.transport.trial import TransportTrial as Op

TRANSPORT = suite_of("transport")
CAPABILITIES = handoff.make.capabilities


def run(history, config=None, make=handoff.make, drain=True):
    config = config or TransportConfig(prefill_pages=12, decode_pages=36)
    return TRANSPORT.component(make, CAPABILITIES).execute(config, history, drain=drain)


GOOD = [
    Op.start(1, 0, 5),
    *[op for _ in range(4) for op in (Op.compute(), Op.deliver_all(DECODE), Op.deliver_all(PREFILL))],
]


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("hidden", [False, True])
def test_on_a_good_link_a_request_arrives(page_size, hidden):
    config = TransportConfig(page_size=page_size, prefill_pages=20, decode_pages=40, hidden=hidden, generation=2**63)
    trial = run([*GOOD, Op.decode()], config, drain=False)
    assert trial.model.decoding[1].has_joined
    assert trial.moment.counters[PREFILL][:2] == trial.moment.counters[DECODE][:2] == (1, 1)


def test_a_page_whose_copy_is_misnumbered_costs_an_attempt_and_no_more():
    offered = [Op.start(1, 0, 2), Op.compute(), Op.deliver(DECODE, 0), Op.deliver(PREFILL, 0), Op.damage(0, 3)]
    trial = run(
        [*offered, *[op for _ in range(4) for op in (Op.deliver_all(DECODE), Op.deliver_all(PREFILL))]], drain=False
    )
    assert trial.model.decoding[1].has_joined
    assert trial.subject._workers[PREFILL].side.counts.retries == 1


# What the suite found in these machines before they were right; each ended in a violation.
FOUND = {
    "a request that waits for its prefill fails with its decode worker": [Op.start(1, 0, 1), Op.kill(DECODE, True)],
    "a cancel of a newer generation releases nothing of an older one": [
        *(Op.start(1, 0, 1), Op.compute(), Op.restart(PREFILL), Op.start(1, 0, 1), Op.compute()),
        *(Op.cancel(PREFILL, 1), Op.deliver_all(DECODE)),
    ],
    "a cancel is about its own transfer alone": [
        *(Op.start(1, 0, 1), Op.compute(), Op.kill(DECODE, True), Op.start(1, 0, 2), Op.compute()),
        *(Op.cancel(PREFILL, 1), Op.restart(DECODE), Op.deliver_all(DECODE)),
    ],
    "another request of one id waits until the pages of the first are settled": [
        *(Op.start(1, 0, 1), Op.compute(), Op.kill(DECODE, True), Op.restart(DECODE), Op.start(1, 0, 2)),
        *(Op.compute(), Op.deliver_all(DECODE), Op.advance(10)),
    ],
    "pages that a cached prefix replaces come back though nothing is ever launched again": [
        *(Op.start(1, 0, 1), Op.start(2, 0, 1), Op.compute(), Op.advance(10), Op.advance(10)),
        *(Op.deliver_all(DECODE), Op.deliver_all(PREFILL), Op.advance(20), Op.deliver_all(DECODE), Op.quiet()),
    ],
    "a late copy of an accept cancels nothing while the transfer is tried again": [
        *(Op.start(1, 0, 1), Op.compute(), Op.deliver_all(DECODE), Op.duplicate(PREFILL, 0), Op.deliver(PREFILL, 0)),
        *(Op.advance(20), Op.deliver(PREFILL, 0), Op.deliver(DECODE, 0), Op.deliver(DECODE, 0), Op.decode()),
        *(Op.deliver(DECODE, 1), Op.deliver(DECODE, 0), Op.serve(1, 1, 1, 0, 0)),
    ],
    "an offer that a cancel has ended is not taken up when it comes late": [
        *(Op.start(1, 0, 1), Op.compute(), Op.deliver(DECODE, 0), Op.advance(30), Op.advance(20)),
        *(Op.deliver_all(DECODE), Op.again(DECODE, 1), Op.again(DECODE, 1)),
    ],
}
CANCEL_OF_A_LATER_ATTEMPT = [
    *(Op.start(1, 0, 1), Op.compute(), Op.deliver_all(DECODE), Op.advance(20), Op.deliver(DECODE, 0)),
    *(Op.restart(DECODE), Op.cancel(PREFILL, 1), Op.again(DECODE, 1), Op.deliver_all(DECODE)),
]


@pytest.mark.parametrize("history", FOUND.values(), ids=FOUND)
def test_what_was_found_stays_mended(history):
    run(history)


def test_a_cancel_of_a_later_attempt_ends_the_earlier_one_that_a_new_worker_has_accepted():
    """The worker before it had accepted both attempts.
    This was reported as HANDOFF-04, though it is what a cancel is for."""
    trial = run(CANCEL_OF_A_LATER_ATTEMPT, drain=False)
    assert trial.moment.counters[DECODE] == (1, 0, 0, 1, 0)


@Defects("transport", handoff.make).breaks("ANSWER")
class EndsAll(handoff.DecodeSide):
    """It takes a cancel of any attempt for the one that it has."""

    def _cancelled(self, peer, message, now_ns):
        transfer = self._transfers.get((peer, message.key.request_id))
        if transfer is not None:
            message = replace(message, key=transfer.key, first_attempt=transfer.offer.first_attempt)
        return super()._cancelled(peer, message, now_ns)


def test_a_late_cancel_of_another_transfer_still_counts_no_more():
    history = [
        *(Op.start(1, 0, 1), Op.compute(), Op.deliver_all(DECODE), Op.cancel(PREFILL, 1), Op.deliver_all(DECODE)),
        *(Op.deliver_all(PREFILL), Op.start(1, 0, 1), Op.compute(), Op.deliver_all(DECODE), Op.again(DECODE, 1)),
    ]
    run(history, drain=False)
    with pytest.raises(Violation) as caught:
        run(history, make=EndsAll, drain=False)
    assert "HANDOFF-04" in [broken.id for broken in caught.value.broken]


# What was reported and is right. Each ended in a violation.
NO_DEFECTS = {
    "a request without a whole page has none that could be kept": (
        TransportConfig(page_size=4, prefill_pages=8, decode_pages=16),
        [Op.start(1, 0, 2), Op.start(2, 0, 3), Op.compute(), Op.kill(DECODE, True), Op.quiet()],
    ),
    "a manifest that comes again does not make the decode side remember longer": (
        TransportConfig(prefill_pages=26, decode_pages=46, max_attempts=1),
        [
            *(Op.start(1, 0, 1), Op.compute(), Op.deliver(DECODE, 0), Op.deliver_all(PREFILL), Op.deliver_all(DECODE)),
            *(Op.advance(31), Op.again(DECODE, 0), Op.advance(49), Op.again(DECODE, 2)),
        ],
    ),
    "an equal request takes the place of one that was offered long ago": (
        TransportConfig(prefill_pages=26, decode_pages=46),
        [
            *(Op.start(2, 0, 5), Op.compute(), Op.deliver_all(DECODE), Op.quiet(), Op.again(DECODE, 0)),
            *(Op.start(2, 0, 5), Op.compute(), Op.deliver(DECODE, 0)),
        ],
    ),
    "a fence that follows an unanswered cancel ends with time, whatever the other side gives up": (
        TransportConfig(prefill_pages=26, decode_pages=46),
        [
            *(Op.start(1, 0, 1), Op.compute(), Op.deliver(DECODE, 0), Op.cancel(PREFILL, 1)),
            *(Op.advance(50), Op.deliver_all(PREFILL)),
        ],
    ),
    "a cancel of an attempt before the acknowledged one calls nothing back": (
        TransportConfig(prefill_pages=26, decode_pages=46),
        [
            *(Op.start(1, 0, 1), Op.compute(), Op.deliver_all(DECODE), Op.deliver_all(PREFILL), Op.advance(20)),
            *(Op.deliver_all(DECODE), Op.again(PREFILL, 0), Op.deliver(DECODE, 0), Op.quiet()),
        ],
    ),
    "a cancel of one attempt alone ends no earlier one": (
        TransportConfig(prefill_pages=26, decode_pages=46),
        [
            *(Op.start(1, 0, 1), Op.compute(), Op.deliver_all(DECODE), Op.advance(20), Op.deliver_all(DECODE)),
            *(Op.deliver_all(PREFILL), Op.quiet(), Op.again(DECODE, 1), Op.again(PREFILL, 0), Op.deliver_all(DECODE)),
        ],
    ),
    "a page may be read again when it has another owner": (
        TransportConfig(prefill_pages=14, decode_pages=46, chunk_size=16, slow_link=True),
        [],
    ),
    "a prompt that is computed again may end in that step": (
        TransportConfig(prefill_pages=26, decode_pages=46, num_output=2),
        [
            *(Op.start(1, 0, 1), Op.compute(), Op.deliver_all(DECODE), Op.deliver_all(PREFILL), Op.deliver_all(DECODE)),
            *(Op.lose_kv(DECODE), Op.serve(1, 1, 1, 0, 0)),
        ],
    ),
}


@pytest.mark.parametrize("config, history", NO_DEFECTS.values(), ids=NO_DEFECTS)
def test_what_is_right_is_no_violation(config, history):
    run(history, config)


@pytest.mark.ci
def test_ours_holds_and_every_kind_of_message_and_of_end_is_reached():
    seen = set()

    class Watched(handoff.HandoffTransport):
        """Notes what travels, and how requests end."""

        def collect(self, side):
            messages = super().collect(side)
            seen.update((side, message.kind) for message in messages)
            return messages

        def ended(self, side):
            ended = super().ended(side)
            seen.update((side, end.how) for end in ended)
            return ended

    report = check(TRANSPORT, Watched, budget=3_000, seed=5)
    assert report.ok, report.text()
    assert min(report.evaluations.values()) > 5 and all(report.executed.values())
    prefill = {
        "offer",
        "page",
        "manifest",
        "renew",
        "cancel",
        "cancel_ack",
        "transferred",
        "length",
        "aborted",
        "error",
    }
    decode = {"accept", "reject", "ack", "nack", "renew", "cancel", "cancel_ack", "length", "aborted"}
    assert seen == {*((PREFILL, what) for what in prefill), *((DECODE, what) for what in decode)}


def test_a_lease_begins_anew_while_pages_are_computed_and_read():
    """The prefill side waits for its own link then, not for the decode side:
    with one attempt alone the request failed."""
    config = TransportConfig(prefill_pages=26, decode_pages=46, max_attempts=1, slow_link=True)
    trial = run([Op.serve(1, 5, 2, 0, 0)], config, drain=False)
    assert trial.moment.counters[PREFILL] == (1, 1, 0, 0, 0)


def test_a_transport_over_which_nothing_comes_is_reported():
    class Silent(handoff.HandoffTransport):
        """Refuses everything."""

        def submit(self, wish, now_ns):
            return False

    with pytest.raises(Violation, match="does not come through"):
        run([], make=Silent)
