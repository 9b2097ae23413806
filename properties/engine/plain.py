"""An engine as plain as can be: first come, first served, one prompt or one round of everybody per step, nothing overlaps.

It shows what a wrapper around somebody else's scheduler has to offer at least, and that the suite asks for no more: of the capabilities it
has `slots` alone. Unlike ours it hands every round its last token instead of leaving it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .contract import Answer, EngineCapabilities, Event, ServingConfig, Wish


@dataclass(slots=True, eq=False)
class Entry:
    """One request; `pages` while it runs."""

    wish: Wish
    most: int
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.wish.prompt) + len(self.output)


class PlainEngine:
    """`queue` in the order of arrival, `batch` in the order of admission, which is the same."""

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
        room = min(config.context_len, config.num_slots - config.page_size) - config.round_slots
        most = min(wish.max_tokens, room - len(wish.prompt))
        if not wish.prompt or most < 1:
            raise ValueError(f"{len(wish.prompt)} tokens and {wish.max_tokens} more, of {room} at most")
        self.queue.append(Entry(wish, most))
        return most

    def abort(self, request: str) -> list[Event]:
        for group in (self.queue, self.batch):
            for entry in group:
                if entry.wish.request == request:
                    group.remove(entry)
                    self._release(entry)
                    return [self._end(entry, "abort")]
        return []

    def _release(self, entry: Entry) -> None:
        """A step in flight may still write to the pages; they are free when it is done."""
        if self.prompt is entry or (self.rows is not None and entry in self.rows):
            return
        self.free += entry.pages
        entry.pages = []

    @staticmethod
    def _end(entry: Entry, reason: str) -> Event:
        return "end", entry.wish.request, reason, list(entry.output), None

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self) -> dict | None:
        if self.prompt is not None or self.rows is not None:
            return None
        config, enters, prefill, decode = self.config, [], [], []
        if self.queue and len(self.batch) < config.max_running and self._enter(self.queue[0]):
            entry = self.prompt = self.queue.pop(0)
            self.batch.append(entry)
            enters = [entry.wish.request]
            prefill = [(entry.wish.request, 0, [*entry.wish.prompt, *entry.output], -1, entry.wish.seed)]
        elif self.batch:
            while not all(self._grow(entry, entry.length - 1 + config.round_slots) for entry in self.batch):
                victim = self.batch.pop()
                self._release(victim)
                self.queue.insert(0, victim)
            self.rows = self.batch[:]
            decode = [(row.wish.request, row.length - 1, row.output[-1], row.wish.seed) for row in self.rows]
        else:
            return None
        self.number += 1
        steps = config.max_steps if decode else 0
        return {
            "step": self.number,
            "enters": enters,
            "prefill": prefill,
            "decode": decode,
            "steps": steps,
            "rounds": 1,
        }

    def _enter(self, entry: Entry) -> bool:
        """Room for the prompt, and for a round of everybody afterwards."""
        per_round = -(-self.config.round_slots // self.config.page_size) + 1
        if len(self.free) < -(-entry.length // self.config.page_size) + per_round * (len(self.batch) + 1):
            return not self.batch and self._grow(entry, entry.length)
        return self._grow(entry, entry.length)

    def _grow(self, entry: Entry, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.config.page_size) - len(entry.pages)
        if missing > len(self.free):
            return False
        entry.pages += [self.free.pop() for _ in range(missing)]
        return True

    def commit(self, answer: Answer) -> list[Event]:
        if answer.step != self.number or (self.prompt is None and self.rows is None):
            raise ValueError(f"step {answer.step} is not in flight")
        rows = [self.prompt] if self.prompt is not None else self.rows
        runs = [answer.first] if self.prompt is not None else answer.runs[0]
        self.prompt = self.rows = None
        events: list[Event] = []
        for entry, run in zip(rows, runs, strict=True):
            if entry not in self.batch:
                self._release(entry)  # it has left since, and this was the last step with its pages
                continue
            events += self._deliver(entry, run)
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
        events: list[Event] = [("tokens", entry.wish.request, given)]
        if reason:
            self.batch.remove(entry)
            self._release(entry)
            events.append(self._end(entry, reason))
        return events

    # -- what it shows ------------------------------------------------------------------------------------------------

    def waiting(self) -> list[str]:
        return [entry.wish.request for entry in self.queue]

    def running(self) -> list[str]:
        return [entry.wish.request for entry in self.batch]

    def slots_of(self, request: str) -> list[int]:
        size = self.config.page_size
        entry = next(entry for entry in self.batch if entry.wish.request == request)
        return [page * size + offset for page in entry.pages for offset in range(size)]

    def free_pages(self) -> list[int]:
        return list(self.free)


def make(config: ServingConfig) -> PlainEngine:
    return PlainEngine(config)


make.capabilities = EngineCapabilities(slots=True)
