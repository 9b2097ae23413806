"""A token's way from the engine to its client: the server collects chunks, and its output process sends them in turn.

```
round ends ──► chunk of `stream_interval` tokens ──► output process, one chunk after the other ──► client
```

The first token of a request is a chunk of its own, unless `FrontEnd.first_chunk` says otherwise, and the last chunk
comes with the last token. An engine decides nothing by these times. But clients of a closed loop send their next
request when the last chunk has arrived. Where one engine goes on with what another one has begun, each has an output
process of its own; the router passes no chunk on before those that came earlier in the request.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...core.contract.events import Aborted, Committed, Deliveries, Event, Planned
from ..cost.host import FrontEnd

_Scalar = TypeVar("_Scalar", bound=np.generic)


class TokenStreamer:
    """Times the chunks of one engine's tokens. As the first sink of its events it adds `Committed.deliveries`.

    `begun_ns`: of requests that another engine goes on with, when their first chunk arrives; one mapping for all
    engines. None: each request stays with its engine.
    """

    def __init__(self, front_end: FrontEnd, begun_ns: dict[str, int] | None = None) -> None:
        self.front_end = front_end
        self._begun_ns = begun_ns
        self._free_ns = 0  # when the output process has sent all chunks so far
        self._numbers: dict[str, int] = {}  # of requests that have not ended
        self._num_entered = 0
        self._unsent: NDArray[np.int64] = np.zeros(256, dtype=np.int64)  # by number: tokens that wait for their chunk
        self._has_sent: NDArray[np.bool_] = np.zeros(256, dtype=bool)  # by number: whether a chunk was sent
        self._not_before: NDArray[np.int64] = np.zeros(256, dtype=np.int64)  # by number: when the first chunk arrives
        self._number_of_row: NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._end_ns: dict[str, int] = {}

    def take(self, event: Event) -> None:
        """Take an event of the engine."""
        if isinstance(event, Committed):
            event.deliveries = self._deliver(event)
        elif isinstance(event, Planned) and event.step is not None:
            for join in event.step.joins:
                self._enter(join.request.request_id, join.row, join.num_emitted)
        elif isinstance(event, Aborted):
            self._numbers.pop(event.request_id, None)
            if self._begun_ns is not None:
                self._begun_ns.pop(event.request_id, None)

    def take_end(self, request_id: str) -> int | None:
        """Return when the last chunk of a request arrives, once; None if the request did not end with a token."""
        return self._end_ns.pop(request_id, None)

    def _enter(self, request_id: str, row: int, num_emitted: int) -> None:
        number = self._numbers.get(request_id)
        if number is None:
            number = self._numbers[request_id] = self._num_entered
            self._num_entered += 1
            self._unsent = _with_room(self._unsent, number)
            self._has_sent = _with_room(self._has_sent, number)
            self._not_before = _with_room(self._not_before, number)
            self._not_before[number] = 0 if self._begun_ns is None else self._begun_ns.pop(request_id, 0)
            if self.front_end.first_chunk == "token":
                self._has_sent[number] = num_emitted > 0  # by the engine that has computed the prompt
            else:
                self._unsent[number] = num_emitted
        self._number_of_row = _with_room(self._number_of_row, row)
        self._number_of_row[row] = number

    def _deliver(self, event: Committed) -> Deliveries:
        """Return the chunks that a step completes, and when they arrive."""
        decode, end_ns = event.step.decode, event.result.round_end_ns
        ended = {
            self._numbers[one.request_id]: one.request_id for one in event.finished if one.request_id in self._numbers
        }
        first = np.array([self._numbers[name] for name in event.first_tokens], dtype=np.int64)
        of_first = self._chunks(first, np.ones((1, len(first)), dtype=np.int64), ended)
        tokens = np.zeros((len(end_ns), 0), dtype=np.int64)
        if decode is not None and event.kept is not None:
            numbers = self._number_of_row[decode.rows]
            tokens = self._chunks(numbers, event.kept, ended)
        arrived_ns = self._send(
            np.concatenate([of_first.ravel(), tokens.ravel()]),
            np.concatenate([np.repeat(end_ns[:1], of_first.size), np.repeat(end_ns, tokens.shape[1])]),
        )
        first_ns, at_ns = arrived_ns[: of_first.size], arrived_ns[of_first.size :].reshape(tokens.shape)
        if self._begun_ns is not None:
            goes_on = [name for name in event.first_tokens if self._numbers[name] not in ended]
            self._begun_ns.update({name: int(first_ns[first == self._numbers[name]].max()) for name in goes_on})
            if decode is not None and event.kept is not None:
                at_ns = np.where(at_ns >= 0, np.maximum(at_ns, self._not_before[numbers]), at_ns)
        for number, request_id in ended.items():
            del self._numbers[request_id]
            times_ns = [*first_ns[first == number]]
            if decode is not None and event.kept is not None:
                times_ns += [*at_ns[:, numbers == number].ravel()]
            if times_ns and max(times_ns) >= 0:
                self._end_ns[request_id] = int(max(times_ns))
        return Deliveries(first_ns, at_ns)

    def _chunks(self, numbers: NDArray[np.int64], kept: NDArray[np.int64], ended: dict[int, str]) -> NDArray[np.int64]:
        """Return the tokens of the chunk that each round completes for each request, int64 [rounds, n]; 0 for none.

        `kept`: tokens by round and request; `ended`: the requests that end with their last one.
        """
        interval = self.front_end.stream_interval
        if interval == 1:
            return kept
        unsent, has_sent = self._unsent[numbers], self._has_sent[numbers]
        if self.front_end.first_chunk != "token":
            has_sent[:] = True
        last_round = np.where(np.isin(numbers, list(ended)), len(kept) - 1 - (kept[::-1] > 0).argmax(axis=0), -1)
        chunks = np.zeros_like(kept)
        for i, tokens in enumerate(kept):
            unsent += tokens
            is_complete = (unsent >= interval) | ~has_sent | (last_round == i)
            chunks[i] = np.where(is_complete & (tokens > 0), unsent, 0)
            unsent -= chunks[i]
            has_sent |= chunks[i] > 0
        self._unsent[numbers], self._has_sent[numbers] = unsent, has_sent
        return chunks

    def _send(self, tokens: NDArray[np.int64], ready_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Send chunks of `tokens` that are ready at `ready_ns`, int64 [n] each, one after the other. Returns when each
        arrives; -1 where there is none."""
        is_chunk = tokens > 0
        sent_ns = np.full(len(tokens), -1, dtype=np.int64)
        if is_chunk.any():
            service_ns = self.front_end.chunk_ns + self.front_end.output_token_ns * tokens[is_chunk]
            total_ns = np.cumsum(service_ns)
            begin_ns = np.maximum.accumulate(ready_ns[is_chunk] - (total_ns - service_ns))
            sent_ns[is_chunk] = np.maximum(begin_ns, self._free_ns) + total_ns
            self._free_ns = int(sent_ns[is_chunk][-1])
        return sent_ns


def _with_room(values: NDArray[_Scalar], place: int) -> NDArray[_Scalar]:
    """Return `values` with room for `place`."""
    if place < len(values):
        return values
    return np.concatenate([values, np.zeros(place + 1, dtype=values.dtype)])
