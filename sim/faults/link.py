"""A link that loses messages, delays them past others, or delivers them twice."""

from __future__ import annotations

from collections.abc import Callable

from ..actors.clock import call_at
from ..actors.link import Link
from .ledger import Ledger


class UnreliableLink:
    """Sends over `link`, with faults. `unreachable(*arguments)` is called for a message whose every attempt was lost."""

    def __init__(self, link: Link, number: int, ledger: Ledger, unreachable: Callable[..., None]) -> None:
        self.link = link
        self._number = number
        self._ledger = ledger
        self._unreachable = unreachable
        self._num_sent = 0

    def send(self, num_bytes: int, deliver: Callable[..., None], *arguments) -> None:
        self._attempt(1, num_bytes, deliver, *arguments)

    def _attempt(self, attempt: int, num_bytes: int, deliver: Callable[..., None], *arguments) -> None:
        """Send a message; if it is lost, try again later, up to the plan's number of attempts."""
        ledger, env = self._ledger, self.link.env
        now_ns, occasion = env.now, self._num_sent
        self._num_sent += 1
        kinds = ledger.kinds_at("message", self._number, occasion, now_ns)
        if "link.lost" in kinds:
            ledger.note("link.lost", now_ns)
            lost = ledger.plan.link.lost
            retry = self._unreachable if attempt == lost.retries else self._attempt
            again = (attempt + 1, num_bytes, deliver) if attempt < lost.retries else (deliver,)
            call_at(env, now_ns + round(lost.retry_s * 1e9), retry, *again, *arguments)
            return
        for kind in kinds:
            # A copy of its own, past all others: order is not kept.
            ledger.note(kind, now_ns)
            delay_s = ledger.plan.of(kind).delay_s * ledger.draws.amount(kind, self._number, occasion)
            call_at(env, now_ns + self.link.latency_ns + round(delay_s * 1e9), deliver, *arguments)
        if "link.late" not in kinds:
            self.link.send(num_bytes, deliver, *arguments)
