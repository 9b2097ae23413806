"""The block manager's trial (BLOCKS-01 … 09): the suite is scheduler and device, and reads every slot again
after each operation."""

from __future__ import annotations

from typing import ClassVar

from ..harness.operation import Handles, Operation, operation
from ..harness.trial import Trial
from ..prefix_cache.events import CacheEvent
from . import invariants as invariants  # registers the checkers
from .contract import STATE, BlockManager, BlockManagerCapabilities, BlockManagerConfig
from .model import BlockManagerMoment, Cell, ManagedRequest, PageUses, Tables, account_of, longest_start

REQUESTS = Handles(("r1", "r2", "r3", "r4"))
NAMESPACES = ("", "lora-1", "1")


def _is_new(t: BlockManagerTrial, request: str) -> bool:
    return request not in t.moment.running


def _is_running(t: BlockManagerTrial, request: str) -> bool:
    return request in t.moment.running


def _pages(config: BlockManagerConfig, has: BlockManagerCapabilities) -> tuple[tuple[int, ...], ...]:
    return ((0,), (0, 0), (0, 1), (1,), (0, 0, 0), (0, 0, 1), (1, 0))


def _extras(config: BlockManagerConfig, has: BlockManagerCapabilities) -> list[int]:
    return [1, 0, config.page_size - 1, -1, 1]


def _spaces(config: BlockManagerConfig, has: BlockManagerCapabilities) -> tuple[str, ...]:
    return ("", "", *NAMESPACES) if has.namespaces else ("",)


class BlockManagerTrial(Trial):
    """`subject` under operations."""

    contract = "block-manager"
    looks = ("slots_of", "tables_of", "num_free", "events")
    quick = 20_000
    values: ClassVar = {"request": REQUESTS, "num_tokens": lambda c, has: [64, 64, 1, c.page_size, c.page_size + 1]}

    subject: BlockManager
    config: BlockManagerConfig
    capabilities: BlockManagerCapabilities
    moment: BlockManagerMoment

    def prepare(self) -> None:
        self.moment = BlockManagerMoment(self.config, account_of(self.config))
        self.uses = PageUses()
        self.found: set[Cell] = set()  # the last cells of pages that were released last, and are not handed out yet
        self._observe()

    def begin(self, operation: Operation | str) -> None:
        m = self.moment
        for running in m.running.values():
            running.start = running.computed  # its last step is over
        self.moment = BlockManagerMoment(
            self.config, m.account, operation, m.running, m.memory, before=m.after, after=m.after
        )

    def end(self) -> None:
        self._observe()
        m = self.moment
        self.transcript.append((m.match, m.refusal, m.after))

    def _observe(self) -> None:
        m = self.moment
        for name, running in m.running.items():
            running.tables = self._tables(name)
        num_free = self.integer(self.must(self.subject.num_free), "num_free()")
        m.after = num_free, {name: running.tables for name, running in m.running.items()}
        for running in m.running.values():
            self.uses.hold(m.pages_of(running.tables), self.num_operations)
        for event in self.sequence(self.must(self.subject.events), "events()") if self.capabilities.events else ():
            m.wrong_event = m.wrong_event or m.account.take(CacheEvent(*event))

    def _tables(self, request: str) -> Tables:
        """Ask for the slots of a request in each group."""
        if not self.capabilities.groups:
            return (self.integers(self.must(self.subject.slots_of, request), "slots_of()"),)
        tables = self.sequence(
            self.must(self.subject.tables_of, request),
            "tables_of()",
            "a table for each group",
            len(self.config.windows),
        )
        return tuple(self.integers(slots, "a table of tables_of()") for slots in tables)

    def text(self, pages: tuple[int, ...], extra: int) -> list[int]:
        """Return pages of kinds 0 and 1, which differ in every token, and `extra` tokens more or less."""
        size = self.config.page_size
        tokens = [100 * (number + 1) + 10 * kind + at for number, kind in enumerate(pages) for at in range(size)]
        return tokens + [7] * extra if extra >= 0 else tokens[:extra]

    # -- operations ---------------------------------------------------------------------------------------------------

    @operation(weight=10, when=_is_new, pages=_pages, extra=_extras, namespace=_spaces)
    def admit(self, request: str, pages: tuple[int, ...], extra: int, namespace: str, num_tokens: int) -> None:
        """Start a request and compute `num_tokens` positions behind its cached prefix, or all that are left."""
        tokens = self.text(pages, extra)
        self.only_if(tokens and num_tokens > 0)
        m = self.moment
        dropped = self.config.page_size if self.capabilities.drops_last_page else 0
        known = longest_start(self.config, tokens, namespace, self.found, dropped)
        m.expected = max(known - dropped, 0) if self.capabilities.caching else 0
        m.announced = max(longest_start(self.config, tokens, namespace, +m.account.copies, dropped) - dropped, 0)
        asked = min(num_tokens, len(tokens) - known)  # if more is cached, fewer are left
        # How much of it is cached nothing but the manager knows, and cached pages count as free: so many pages are
        # enough in any case.
        most = min((len(tokens) - 1) // self.config.page_size * self.config.page_size + num_tokens, len(tokens))
        needed = sum(self.config.pages_to_enter(group, most) for group in range(len(self.config.windows)))
        m.fits = needed <= m.before[0]
        answer = self.ask(self.subject.admit, request, list(tokens), namespace, asked)
        if self._is_refused(answer):
            return
        length = self.integer(answer, "admit()")
        running = m.running[request] = ManagedRequest(namespace, tokens, len(tokens))
        running.tables = self._tables(request)
        m.request, m.match = request, (length, tuple(slots[:length] for slots in running.tables))
        m.outlived = self.uses.find(m.pages_of(m.match[1]), self.num_operations)
        if self.capabilities.events:
            m.unannounced = m.first_unannounced(running, length)
        running.computed = max(0, min(length, len(tokens)))
        self._compute(running, min(asked, len(tokens) - running.computed))

    def _is_refused(self, answer: object) -> bool:
        """Return whether the manager has refused, which may have emptied its cache."""
        is_refused = self.refused(answer, None, False)
        if is_refused and self.capabilities.evicts_when_refused:
            self.found.clear()
        return is_refused

    def _compute(self, running: ManagedRequest, num_tokens: int) -> None:
        """Write the next positions, as the device does in the same step, and drafts behind them."""
        m, start, stop = self.moment, running.computed, running.computed + num_tokens
        written = set()
        size = self.config.page_size
        had = set().union(*map(m.pages_of, m.before[1].values())) | (m.pages_of(m.match[1]) if m.match else set())
        self.uses.hand_out(m.pages_of(running.tables) - had, self.num_operations)
        for group, (slots, window) in enumerate(zip(running.tables, self.config.windows, strict=True)):
            first, end = start, stop + self.config.lookahead
            if window == STATE:
                first = (stop - 1) // size * size
                end = first + (1 + self.config.lookahead) * size
            for position in range(first, min(end, len(slots))):
                at = position if window != STATE else stop - 1 + size * (position >= first + size)
                cell = running.cell(group, at) if at < stop else None
                if self.capabilities.rewrites_shared and cell is not None and m.memory.get(slots[position]) == cell:
                    continue  # it is computed a second time
                m.memory[slots[position]] = cell
                written.add(slots[position])
        m.written = frozenset(written)
        running.start, running.computed = start, stop
        self.found.clear()  # a page was handed out, perhaps one of these

    @operation(weight=12, when=_is_running)
    def grow(self, request: str, num_tokens: int) -> None:
        """Compute the next chunk of a prompt, or a token that has been sampled."""
        m, running = self.moment, self.moment.running[request]
        self.only_if(num_tokens > 0)
        left = running.prompt_len - running.computed
        if left <= 0:
            running.tokens.append(1000 + len(running.tokens))
        asked = min(num_tokens, left) if left > 0 else len(running.tokens) - running.computed
        size = self.config.page_size
        if STATE in self.config.windows and running.computed % size:
            asked = min(asked, size - running.computed % size)
        m.request = request
        m.fits = sum(running.missing(self.config, group, asked) for group in range(len(running.tables))) <= m.before[0]
        answer = self.ask(self.subject.grow, request, list(running.tokens), asked)
        if self._is_refused(answer):
            if left <= 0:
                running.tokens.pop()  # it is sampled once more
            return
        running.tables = self._tables(request)
        self._compute(running, asked)

    @operation(weight=6, when=_is_running)
    def release(self, request: str) -> None:
        """End a request."""
        running = self.moment.running.pop(request)
        size = self.config.page_size
        self.must(self.subject.release, request)
        for group, slots in enumerate(running.tables):
            for end in range(size, running.computed + 1, size):
                if slots[end - 1] >= 0 and self.moment.memory.get(slots[end - 1]) == running.cell(group, end - 1):
                    self.found.add(running.cell(group, end - 1))

    @operation(needs="misuse", weight=1, when=_is_new)
    def release_stray(self, request: str) -> None:
        """Release a request that is not there. Must be refused, or do nothing."""
        self.ask(self.subject.release, request)

    @operation(needs="misuse", weight=1, when=_is_running)
    def admit_again(self, request: str) -> None:
        """Admit a request under the name of one that runs. Must be refused."""
        self.refused(self.ask(self.subject.admit, request, self.text((1,), 1), "", 1), None, False)

    # -- the end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Release everything; then all pages are free."""
        for name in list(self.moment.running):
            self.release(name)
        self.operation = "drained"
        self.begin("drained")
        self.moment.drained = True
        self._observe()
        self.check()

    def describe(self) -> str:
        m = self.moment
        if m.match is not None:
            return f"-> {m.match[0]} cached, writes {sorted(m.written)}"
        return f"-> writes {sorted(m.written)}" if m.written else "done"
