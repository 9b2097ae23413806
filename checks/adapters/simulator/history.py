"""The history of a simulated run: what its engines say, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from ....core.contract.events import Committed, Event, Planned, Submitted
from ....observe.encoding import LineEncoder


class History:
    """What the engines say: lines, times, what each request asked for, and the tokens that it got."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.times_ns: list[int] = []
        self.max_tokens: dict[str, int] = {}
        self.emissions: dict[str, list[list[int]]] = defaultdict(list)
        self._unsent: dict[tuple[int, str], int] = defaultdict(int)

    def sink(self, replica: int) -> Callable[[Event], None]:
        encode = LineEncoder(replica).encode
        rows: dict[int, str] = {}

        def take(event: Event) -> None:
            self.lines.append(encode(event))
            self.times_ns.append(getattr(event, "now_ns", self.times_ns[-1] if self.times_ns else 0))
            if type(event) is Submitted and not event.refusal:
                self.max_tokens[event.request.request_id] = event.request.max_tokens
            elif type(event) is Planned and event.step is not None:
                rows.update({join.row: join.request.request_id for join in event.step.joins})
            elif type(event) is Committed:
                self._emitted(event, rows, replica)

        return take

    def _emitted(self, event: Committed, rows: dict[int, str], replica: int) -> None:
        ends_ns, sent = event.result.round_end_ns.tolist(), event.deliveries
        firsts_ns = [ends_ns[0]] * len(event.first_tokens) if sent is None else sent.first_ns.tolist()
        for request_id, at_ns in zip(event.first_tokens, firsts_ns, strict=True):
            self._send(replica, request_id, at_ns, 1)
        if event.step.decode is None or event.kept is None:
            return
        decode_rows = event.step.decode.rows.tolist()
        all_ns = [[end_ns] * len(decode_rows) for end_ns in ends_ns] if sent is None else sent.at_ns.tolist()
        for round_ns, kept in zip(all_ns, event.kept.tolist(), strict=True):
            for row, at_ns, tokens in zip(decode_rows, round_ns, kept, strict=True):
                if tokens:
                    self._send(replica, rows[row], at_ns, tokens)

    def _send(self, replica: int, request_id: str, at_ns: int, tokens: int) -> None:
        """Note tokens that reach their client at `at_ns`; −1: with the next chunk."""
        self._unsent[replica, request_id] += tokens
        if at_ns >= 0:
            self.emissions[request_id].append([at_ns, self._unsent.pop((replica, request_id))])
