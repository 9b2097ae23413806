"""An engine as plain as can be: first come, first served, one prompt or one round of all rows per step, nothing
overlaps.

It shows the least that a wrapper around another scheduler has to offer: of the capabilities it has `slots` alone.
Unlike ours it hands every round its last token instead of leaving it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .contract import EngineCapabilities, Event, ServingConfig, StepAnswer, Wish


@dataclass(slots=True, eq=False)
class Entry:
    """One request; `pages` while it runs."""

    wish: Wish
    most: int
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.wish.request

    @property
    def length(self) -> int:
        return len(self.wish.prompt) + len(self.output)

    def end(self, reason: str) -> Event:
        return "end", self.name, reason, list(self.output), None


class PlainEngine:
    """`queue` in the order of arrival, `batch` in the order of admission, which is the same."""

    capabilities = EngineCapabilities(slots=True, misuse=True)

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self.free = list(range(config.num_pages, 0, -1))
        self.queue: list[Entry] = []
        self.batch: list[Entry] = []
        self.number = 0
        self.prompt: Entry | None = None  # what the step in flight computes: this prompt, or a round of `rows`
        self.rows: list[Entry] | None = None

    # -- clients ------------------------------------------------------------------------------------------------------

    def submit(self, wish: Wish) -> int:
        config = self.config
        if wish.request in (*self.waiting(), *self.running()):
            raise ValueError(f"{wish.request} is there already")
        if config.max_queue and len(self.queue) >= config.max_queue:
            raise ValueError(f"{config.max_queue} requests wait")
        room = min(config.context_len, config.num_slots - config.page_size - config.round_slots)
        most = min(wish.max_tokens, room - len(wish.prompt))
        if not wish.prompt or most < 1:
            raise ValueError(f"{len(wish.prompt)} tokens and {wish.max_tokens} more, of {room} at most")
        self.queue.append(Entry(wish, most))
        return most

    def abort(self, request: str) -> list[Event]:
        for group in (self.queue, self.batch):
            for entry in group:
                if entry.name == request:
                    group.remove(entry)
                    self._release(entry)
                    return [entry.end("abort")]
        return []

    def _release(self, entry: Entry) -> None:
        """Free the pages, but not while a step in flight may still write to them: then `commit` does."""
        if entry is not self.prompt and entry not in (self.rows or ()):
            self.free += entry.pages
            entry.pages = []

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self) -> dict[str, Any] | None:
        if self.prompt is not None or self.rows is not None:
            return None
        enters, prefill, decode = [], [], []
        if self.queue and len(self.batch) < self.config.max_running and self._enter(self.queue[0]):
            entry = self.prompt = self.queue.pop(0)
            self.batch.append(entry)
            enters = [entry.name]
            prefill = [(entry.name, 0, [*entry.wish.prompt, *entry.output], -1, entry.wish.seed)]
        elif self.batch:
            while not all(self._grow(entry, entry.length - 1 + self.config.round_slots) for entry in self.batch):
                victim = self.batch.pop()
                self._release(victim)
                self.queue.insert(0, victim)
            self.rows = self.batch[:]
            decode = [(row.name, row.length - 1, row.output[-1], row.wish.seed) for row in self.rows]
        else:
            return None
        self.number += 1
        view = {"step": self.number, "enters": enters, "prefill": prefill, "decode": decode, "rounds": 1}
        return view | {"steps": self.config.max_steps if decode else 0}

    def _enter(self, entry: Entry) -> bool:
        """Reserve pages for the prompt, if that leaves enough for a round of all rows afterwards."""
        size = self.config.page_size
        reserve = (-(-self.config.round_slots // size) + 1) * (len(self.batch) + 1)
        fits = len(self.free) >= -(-entry.length // size) + reserve
        return (fits or not self.batch) and self._grow(entry, entry.length)

    def _grow(self, entry: Entry, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.config.page_size) - len(entry.pages)
        if missing > len(self.free):
            return False
        entry.pages += [self.free.pop() for _ in range(missing)]
        return True

    def commit(self, answer: StepAnswer) -> list[Event]:
        if answer.step != self.number or (self.prompt is None and self.rows is None):
            raise ValueError(f"step {answer.step} is not in flight")
        rows = [self.prompt] if self.prompt is not None else self.rows
        runs = [answer.first] if self.prompt is not None else answer.runs[0]
        self.prompt = self.rows = None
        events: list[Event] = []
        for entry, run in zip(rows, runs, strict=True):
            if entry in self.batch:
                events += self._deliver(entry, run)
            else:
                self._release(entry)  # it has left since, and this was the last step with its pages
        return events

    def _deliver(self, entry: Entry, run: list[int]) -> list[Event]:
        given, reason = [], ""
        for token in run:
            given.append(token)
            if token in entry.wish.stop_tokens:
                reason = "stop"
            elif len(entry.output) + len(given) == entry.most:
                reason = "length"
            if reason:
                break
        entry.output += given
        events: list[Event] = [("tokens", entry.name, given)]
        if reason:
            self.batch.remove(entry)
            self._release(entry)
            events.append(entry.end(reason))
        return events

    # -- what it shows ------------------------------------------------------------------------------------------------

    def waiting(self) -> list[str]:
        return [entry.name for entry in self.queue]

    def running(self) -> list[str]:
        return [entry.name for entry in self.batch]

    def slots_of(self, request: str) -> list[int]:
        size = self.config.page_size
        pages = next(entry.pages for entry in self.batch if entry.name == request)
        return [page * size + offset for page in pages for offset in range(size)]

    def free_pages(self) -> list[int]:
        return list(self.free)


make = PlainEngine
