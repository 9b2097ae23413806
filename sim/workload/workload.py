"""Synthetic workloads: arrival times × lengths × shared prefixes, as a stream of `TimedRequest`s.

Every property of request i is drawn by key (seed, purpose, i): a longer workload begins with the shorter one, and a
change of one distribution moves nothing else. Requests are made in chunks of some thousand, which bounds memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...core.draws import Purpose, uniform
from ...core.prompt import Prompt
from .arrivals import ArrivalProcess
from .lengths import LengthDistribution, SharedPrefixes


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request.

    time_ns:    arrival, integer nanoseconds from the workload's start; None in a closed loop, where the next free
                client sends it
    prompt:     its prompt
    output_len: tokens it will emit before it stops, at least 1: known to the executor that plays the model, never to
                the scheduler
    session:    the conversation or user it belongs to, for routing by affinity; None if the workload has none
    priority:   greater is more urgent
    row:        number of the request in its workload or data row in its trace, from 0; the key of its draws
    """

    time_ns: int | None
    prompt: Prompt
    output_len: int
    session: str | None = None
    priority: int = 0
    row: int = 0


CHUNK_REQUESTS = 8192


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """Iterating yields `TimedRequest`s, in order of time or, without `arrivals`, for a closed loop (`time_ns` None).

    prompt_len:       tokens of a prompt, shared prefix included
    output_len:       tokens that a request emits
    arrivals:         None: requests without times, each sent by the next free of `concurrency` clients
    concurrency:      clients of the closed loop; None with `arrivals`
    prefixes:         None: prompts of which only the length is known
    num_requests:     None: for ever (then `stop_s`, or the consumer, ends it)
    stop_s:           no arrival at or after this time
    urgent_share:     share of requests with priority 1 instead of 0
    seed:             another seed is another sample of the same workload
    """

    prompt_len: LengthDistribution
    output_len: LengthDistribution
    arrivals: ArrivalProcess | None = None
    concurrency: int | None = None
    prefixes: SharedPrefixes | None = None
    num_requests: int | None = None
    stop_s: float | None = None
    urgent_share: float = 0.0
    seed: int = 0

    def __iter__(self) -> Iterator[TimedRequest]:
        first = 0
        for times, count in self._time_chunks():
            yield from self.make(first, count, times)
            first += count

    def make(self, first: int, count: int, times_ns: np.ndarray | None = None) -> list[TimedRequest]:
        """Make the requests first … first + count − 1, at these times (int64 [count])."""
        index = np.arange(first, first + count, dtype=np.uint64)
        prompt_lens = self.prompt_len.draw(self.seed, Purpose.LENGTH, index)
        output_lens = self.output_len.draw(self.seed, Purpose.OUTPUT_LENGTH, index).tolist()
        if self.prefixes is None:
            prompts = [Prompt(length) for length in prompt_lens.tolist()]
        else:
            prompts = self.prefixes.prompts(self.seed, index, prompt_lens)
        times = [None] * count if times_ns is None else times_ns.tolist()
        if self.urgent_share:
            priorities = (uniform(self.seed, Purpose.PRIORITY, index, 0) < self.urgent_share).astype(int).tolist()
        else:
            priorities = [0] * count
        return [
            TimedRequest(time_ns, prompt, output_len, None, priority, row)
            for time_ns, prompt, output_len, priority, row in zip(
                times, prompts, output_lens, priorities, range(first, first + count), strict=True
            )
        ]

    def _time_chunks(self) -> Iterator[tuple[np.ndarray | None, int]]:
        if self.arrivals is not None:
            for times in self.arrivals.chunks(self.seed, self.num_requests, self.stop_s, CHUNK_REQUESTS):
                yield times, len(times)
            return
        made = 0
        while self.num_requests is None or made < self.num_requests:
            count = CHUNK_REQUESTS if self.num_requests is None else min(CHUNK_REQUESTS, self.num_requests - made)
            yield None, count
            made += count
