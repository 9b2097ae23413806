"""Planted defects of one side, one message or one page at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np

from ....core.algorithm.arrival import DraftPayload
from ....core.handoff import DecodeSide, PageSeal, PrefillSide, TransferState
from ....core.handoff.life import TransferCounts
from ....core.handoff.messages import Ack
from ....core.handoff.records import Trace
from ....core.scheduler.engine import Engine
from ...transport.handoff_subject import HandoffTransport

# -- the prefill side -------------------------------------------------------------------------------------------------


class FreesWhenAllIsSent(PrefillSide):
    """The source's pages are given back when everything is sent, before its acknowledgement: a retry reads what others wrote."""

    def _send_manifest(self, transfer, now_ns):
        was = transfer.state
        super()._send_manifest(transfer, now_ns)
        if transfer.state is TransferState.SENT and was is not TransferState.SENT:
            self.engine.transfers.release_hold(transfer.row, now_ns)
            self.engine.transfers.end_transfer(transfer.request.request_id, now_ns)
            transfer.row = 0

    def _finish(self, transfer, end, now_ns):
        if not transfer.row:
            self.engine.store._held[0] = None
        super()._finish(transfer, end, now_ns)


class FreesWhatIsCancelled(PrefillSide):
    """A cancelled request gives its pages back at once, while some may still be sent."""

    def _give_up(self, transfer, end, why, now_ns):
        super()._give_up(transfer, end, why, now_ns)
        self._finish(transfer, end, now_ns)


class NeedsNoFence(PrefillSide):
    """When the other worker is gone, pages are free at once, though copies of them may be under way."""

    def _fence(self, transfer, now_ns):
        self._finish(transfer, transfer.end, now_ns)


class WaitsForEver(PrefillSide):
    """There is a lease, and it is never read."""

    def tick(self, now_ns):
        pass


class BelievesAnyAttempt(PrefillSide):
    """Messages are matched by request alone: an acknowledgement or a refusal of the first attempt ends the second."""

    def receive(self, peer, message, now_ns):
        transfer = self._current.get(message.key.request_id)
        if transfer is not None and transfer.key.generation == message.key.generation:
            message = replace(message, key=transfer.key)
        super().receive(peer, message, now_ns)


class KeepsTheRequest(PrefillSide):
    """When the other worker is gone its transfers end, and their requests stay as they are."""

    def _fail_engine_request(self, request_id, why, now_ns):
        if "gone" not in why:
            super()._fail_engine_request(request_id, why, now_ns)


class LosesCount(TransferCounts):
    def end(self, state):
        if state is not TransferState.CANCELLED:
            super().end(state)


class CountsNoCancelled(PrefillSide):
    """Cancelled transfers are in no counter."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.counts = LosesCount()


class OldGenerations(PrefillSide):
    """A worker that begins anew counts from the same generation: what was sent to the old one is taken for its own."""

    def __init__(self, engine, page_format, generation, timing):
        super().__init__(engine, page_format, 1, timing)


# -- the decode side --------------------------------------------------------------------------------------------------


class TrustsTheLink(DecodeSide):
    """Pages are taken as they come, seals are not looked at."""

    def _page(self, transfer, page, measured, now_ns):
        return super()._page(transfer, page, page.seal, now_ns)

    def _complete(self, transfer, now_ns):
        if transfer.manifest is not None:
            found = transfer.received.values()
            transfer.manifest = replace(transfer.manifest, seals=tuple(found) or transfer.manifest.seals)
        super()._complete(transfer, now_ns)


class ComparesSizes(DecodeSide):
    """A page is good when it is as long as it was said to be."""

    def _page(self, transfer, page, measured, now_ns):
        found = PageSeal.of(page.target, page.draft)
        same = (found.target_bytes, found.draft_bytes) == (page.seal.target_bytes, page.seal.draft_bytes)
        return super()._page(transfer, page, page.seal if same else found, now_ns)


class IgnoresTheManifest(DecodeSide):
    """Each page is checked against its own seal, and never against what was to be sent: a misnumbered one is good."""

    def _complete(self, transfer, now_ns):
        if transfer.manifest is not None and len(transfer.received) == len(transfer.manifest.seals):
            seals = tuple(transfer.received[index] for index in sorted(transfer.received))
            transfer.manifest = replace(transfer.manifest, seals=seals)
        super()._complete(transfer, now_ns)


class AcknowledgesTheManifest(DecodeSide):
    """The manifest is acknowledged when it comes; pages that it has overtaken, or that are lost, are not waited for."""

    def _manifest(self, transfer, manifest, now_ns):
        understood = super()._manifest(transfer, manifest, now_ns)
        if understood:
            self._say(transfer.peer, Ack(transfer.key, self.epoch))
        return understood


class FreesTargetsAtOnce(DecodeSide):
    """Reserved pages are given back when their request is given up, and what is still under way is written into another's."""

    def _give_up(self, transfer, end, why, now_ns):
        super()._give_up(transfer, end, why, now_ns)
        if transfer.state is TransferState.CANCELLING:
            self._finish(transfer, end, now_ns)


class ReservesForEver(DecodeSide):
    """Reserved pages have no deadline: a lost message leaks them."""

    def tick(self, now_ns):
        pass


class StartsEveryOffer(DecodeSide):
    """An offer that comes twice, or late, begins a transfer of its own."""

    def _offered(self, peer, offer, now_ns):
        name = (peer, offer.key.request_id)
        if name in self._traces:
            self._traces[name] = Trace(offer.key._replace(attempt=-1), False)
        return super()._offered(peer, offer, now_ns)


class CachesWhatIsReserved(DecodeSide):
    """The prompt is in the prefix cache as soon as it has pages; nothing has arrived in them."""

    def _reserve_waiting(self, now_ns):
        super()._reserve_waiting(now_ns)
        for transfer in self._transfers.values():
            if transfer.state is TransferState.RECEIVING and not transfer.message:
                transfer.message = "cached"
                tokens = transfer.offer.request.prompt.materialize()
                self.engine.store.share_prefix(transfer.row, tokens, len(tokens), "", self.engine.last_step_id)


# -- the workers ------------------------------------------------------------------------------------------------------


class ChangesItsRole(Engine):
    """A worker changes its role at any time."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.transfers.change_role = lambda role, now_ns: self.admission.take_role(role)


class ReadsAhead(HandoffTransport):
    """The last page is read, and the manifest sent, while the last chunk is still being computed."""

    _late = ()

    def compute(self, now_ns):
        final = super().compute(now_ns)
        kept = len(final) - 1 if final else 0
        reported, self._late = [*self._late, *final[:kept]], final[kept:]
        return reported


class TargetPagesAlone(HandoffTransport):
    """The draft's KV stays where it was computed."""

    def _write_page(self, action):
        page = int(action.slots[0]) // self.config.page_size
        self.write(page, (action.page.target, b"\0" * 8))


class DraftIdsIn32Bits(HandoffTransport):
    """Token ids are sent in 32 bits."""

    def _payload(self, name):
        payload = super()._payload(name)
        ids = payload.values["topk_ids"].astype(np.int32).astype(np.int64)
        return DraftPayload({**payload.values, "topk_ids": ids}, payload.hidden_states, payload.needs_hidden_states)


class HiddenStatesOfTheLast(HandoffTransport):
    """The draft input is the one of the request before: a buffer that is filled once per step."""

    def _payload(self, name):
        payload = super()._payload(name)
        last = getattr(self, "_last", payload)
        self._last = payload
        return last


class WritesByIndex(HandoffTransport):
    """Pages are written where their numbers say, as if a prompt always began at the pool's first page."""

    def _write_page(self, action):
        self.write(1 + action.page.index, (action.page.target, action.page.draft))


class AcksCountPages(HandoffTransport):
    """The link counts pages and gives them out in the order in which they arrive."""

    def _write_page(self, action):
        counted = self.__dict__.setdefault("_counts", {}).setdefault((action.row, action.epoch), count())
        size = self.config.page_size
        table = self._workers["decode"].engine.store.table
        at = next(counted) * size
        held = int(self._workers["decode"].engine.store.allocated[action.row])
        page = int(table.gather(action.row, 0, held)[min(at, held - 1)]) // size
        self.write(page, (action.page.target, action.page.draft))


PREFILL_SIDES = (
    (FreesWhenAllIsSent, ("HANDOFF-02", "HANDOFF-05")),
    (FreesWhatIsCancelled, ("HANDOFF-02",)),
    (NeedsNoFence, ("HANDOFF-02",)),
    (WaitsForEver, ("HANDOFF-03", "ANSWER")),
    (BelievesAnyAttempt, ("HANDOFF-04",)),
    (KeepsTheRequest, ("HANDOFF-08", "HANDOFF-03")),
    (CountsNoCancelled, ("HANDOFF-05",)),
    (OldGenerations, ("HANDOFF-04", "HANDOFF-01", "HANDOFF-02", "ANSWER")),
)
DECODE_SIDES = (
    (TrustsTheLink, ("HANDOFF-01",)),
    (ComparesSizes, ("HANDOFF-01",)),
    (IgnoresTheManifest, ("HANDOFF-01", "HANDOFF-07")),
    (AcknowledgesTheManifest, ("HANDOFF-01", "HANDOFF-05")),
    (FreesTargetsAtOnce, ("HANDOFF-02",)),
    (ReservesForEver, ("HANDOFF-03",)),
    (StartsEveryOffer, ("HANDOFF-04", "ANSWER")),
    (CachesWhatIsReserved, ("HANDOFF-09",)),
)
ENGINES = ((ChangesItsRole, ("HANDOFF-10",)),)
TRANSPORTS = (
    (ReadsAhead, ("HANDOFF-06",)),
    (TargetPagesAlone, ("HANDOFF-07",)),
    (DraftIdsIn32Bits, ("HANDOFF-07",)),
    (HiddenStatesOfTheLast, ("HANDOFF-07",)),
    (WritesByIndex, ("HANDOFF-07",)),
    (AcksCountPages, ("HANDOFF-07",)),
)
