"""The block manager's trial (BLOCKS-01 … 09): the suite is scheduler and device, and reads every slot again
after each operation."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from ..harness.invariants import Finding, Outcome, checks
from ..harness.operation import Handles, Operation, operation
from ..harness.trial import Trial
from .contract import STATE, BlockManager, BlockManagerCapabilities, BlockManagerConfig, CacheEvent
from .model import BlockManagerMoment, Cell, ManagedRequest, PageUses, Tables

CONTRACT = "block-manager"


@checks("BLOCKS-01", CONTRACT, on=("admit",))
def a_match_is_the_requests_own_prefix(m: BlockManagerMoment) -> Outcome:
    if m.match is None:
        return None
    length, tables = m.match
    running = m.running[m.request]
    was = f"{m.request} starts with {length} of {len(running.tokens)} positions"
    if length % m.config.page_size:
        return Finding(was, "whole pages", "the rest of the page would be written under others")
    if not 0 <= length < len(running.tokens):
        return Finding(was, "less than all", "the first token comes from computing the last position")
    for group, slots in enumerate(tables):
        every = (
            m.config.page_size if m.config.windows[group] == STATE else 1
        )  # positions between a page's ends: no state
        for position in range(every - 1, len(slots), every):
            slot = slots[position]
            if slot >= 0 and m.memory.get(slot) != running.cell(group, position):
                was = f"{m.request} finds position {position} in slot {slot}, which holds {m.memory.get(slot)}"
                return Finding(was, f"{running.cell(group, position)}", "it goes on from another's text")
    return True


@checks("BLOCKS-02", CONTRACT)
def every_page_is_free_or_held(m: BlockManagerMoment) -> Outcome:
    num_free, by_request = m.after
    held = set().union(*map(m.pages_of, by_request.values()))
    if num_free + len(held) != m.config.num_pages:
        was = f"{num_free} pages are free, {len(held)} are held"
        return Finding(was, f"{m.config.num_pages} in all", "a page is lost, or handed out under its holder")
    if m.drained and num_free != m.config.num_pages:
        return Finding(f"{num_free} pages are free at the end", f"{m.config.num_pages}", "a page is lost")
    return True


@checks("BLOCKS-03", CONTRACT)
def what_is_computed_stays(m: BlockManagerMoment) -> Outcome:
    mine = {slot // m.config.page_size for slot in m.written}
    for name, running in m.running.items():
        shared = mine & m.pages_of(running.tables) if name != m.request else ()
        if shared:
            was = f"{m.request} writes page {min(shared)}, which {name} has, too"
            return Finding(was, "pages of its own", "only full pages are shared")
        for group, slots in enumerate(running.tables):
            for position in m.read_at(running, group):
                slot = slots[position]
                if m.memory.get(slot) != running.cell(group, position):
                    was = f"slot {slot} of {name}, position {position}, holds {m.memory.get(slot)}"
                    return Finding(was, f"{running.cell(group, position)}", "its attention reads another text there")
    return True if m.running else None


@checks("BLOCKS-04", CONTRACT, on=("admit", "grow"))
def what_fits_is_granted_and_a_refusal_changes_nothing(m: BlockManagerMoment) -> Outcome:
    if m.refusal is None:
        return True
    if not _is_as_before(m):
        return Finding(f"a refused {m.operation} changed {m.before} into {m.after}", "nothing", "it was refused")
    if m.fits:
        was = f"refused ({m.refusal}), with {m.before[0]} pages free"
        return Finding(was, "granted: that is enough", "the request waits for ever")
    return True


def _is_as_before(m: BlockManagerMoment) -> bool:
    """Return whether all requests have what they had, but for pages that no later position sees."""
    if m.after == m.before:
        return True
    (_, before), (_, after) = m.before, m.after
    if before.keys() != after.keys() or not any(m.config.windows):
        return False
    return all(
        len(was) == len(now)
        and all(
            new == old or (new == -1 and not m.must_have(m.running[name], group, position))
            for position, (old, new) in enumerate(zip(was, now, strict=True))
        )
        for name in before
        for group, (was, now) in enumerate(zip(before[name], after[name], strict=True))
    )


@checks("BLOCKS-05", CONTRACT, "caching", on=("admit",))
def what_was_released_is_found_again(m: BlockManagerMoment) -> Outcome:
    if m.match is None:
        return None
    if m.match[0] < m.expected:
        was = f"{m.request} starts with {m.match[0]} cached positions"
        return Finding(
            was, f"{m.expected}: they were released, and no page was handed out since", "they are computed again"
        )
    return True


@checks("BLOCKS-06", CONTRACT, on=("admit", "grow"))
def slots_stand_in_whole_pages(m: BlockManagerMoment) -> Outcome:
    if m.refusal is not None:
        return None
    size, running = m.config.page_size, m.running[m.request]
    for group, slots in enumerate(running.tables):
        needed = m.config.pages_to(group, running.computed) * size
        if len(slots) < needed:
            was = f"{m.request} has {len(slots)} slots"
            return Finding(was, f"{needed}, one for each position", "the last ones are written nowhere")
        for position, slot in enumerate(slots):
            if slot == -1 and not m.must_have(running, group, position):
                continue  # its page was given back
            in_order = position % size == 0 or slot == slots[position - 1] + 1
            if slot < 0 or slot % size != position % size or not in_order:
                was = f"position {position} of {m.request} is in slot {slot}, behind slot {slots[position - 1]}"
                return Finding(was, "pages of neighbouring slots", "kernels address pages, not slots")
    return True


@checks("BLOCKS-07", CONTRACT, "misuse", on=("release-stray", "admit-again"))
def misuse_changes_nothing(m: BlockManagerMoment) -> Outcome:
    if m.operation.tag == "admit-again" and m.refusal is None:
        return Finding(f"{m.operation} was accepted", "a refusal", "two requests share one table")
    if m.after != m.before:
        return Finding(f"{m.operation} changed {m.before} into {m.after}", "nothing", "other requests pay for it")
    return True


@checks("BLOCKS-08", CONTRACT, "events")
def events_say_what_is_cached(m: BlockManagerMoment) -> Outcome:
    if m.wrong_event:
        return Finding(
            m.wrong_event, "events that follow from those before", "who reads them has another cache in mind"
        )
    for cell, count in m.account.copies.items():
        if count > (there := m.num_pages_with(cell)):
            was = f"by the events {count} cached pages end with {cell}, and {there} hold it"
            return Finding(was, f"{there} at most", "a page that was handed out must leave the cache")
    if m.unannounced is not None:
        was = f"{m.request} found the page that ends with {m.unannounced}"
        return Finding(
            was, "a cached one: it has not entered the cache by the events, or has left it", "routers miss it"
        )
    if m.match is not None and m.match[0] < m.announced:
        was = f"{m.request} starts with {m.match[0]} cached positions"
        return Finding(was, f"{m.announced}: they are cached by the events", "routers send requests here for nothing")
    return True if m.account.texts else None


@checks("BLOCKS-09", CONTRACT, "lru", on=("admit",))
def the_page_unused_for_longest_goes_first(m: BlockManagerMoment) -> Outcome:
    if m.outlived is not None:
        page, gone = m.outlived
        was = (
            f"page {gone.page}, found in operation {gone.found_at}, was handed out in operation {gone.went_at}, and page "
            f"{page}, which no request has had since operation {gone.other_used_at}, is still cached"
        )
        return Finding(was, f"page {page} goes first", "what is in use is computed again, and what is not stays")
    return True if m.match is not None and m.match[0] else None


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
        self.moment = BlockManagerMoment(self.config)
        self.uses = PageUses()
        self.found: set[Cell] = set()  # the last cells of pages that were released last, and are not handed out yet
        self._observe()

    def begin(self, operation: Operation | str) -> None:
        m = self.moment
        for running in m.running.values():
            running.start = running.computed  # its last step is over
        self.moment = BlockManagerMoment(
            self.config, operation, m.running, m.memory, before=m.after, after=m.after, account=m.account
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
            m.wrong_event = m.wrong_event or m.account.take(CacheEvent(*event), self.config)

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
    def admit(self, request: str, pages: tuple[int, ...], extra: int, namespace: str, num_tokens: int) -> bool | None:
        """Start a request and compute `num_tokens` positions behind its cached prefix, or all that are left."""
        tokens = self.text(pages, extra)
        if not tokens or num_tokens < 1:
            return False
        m = self.moment
        known = self._longest(tokens, namespace, self.found)
        dropped = self.config.page_size if self.capabilities.drops_last_page else 0
        m.expected = max(known - dropped, 0) if self.capabilities.caching else 0
        m.announced = max(self._longest(tokens, namespace, +m.account.copies) - dropped, 0)
        asked = min(num_tokens, len(tokens) - known)  # if more is cached, fewer are left
        # How much of it is cached nothing but the manager knows, and cached pages count as free: so many pages are
        # enough in any case.
        most = min((len(tokens) - 1) // self.config.page_size * self.config.page_size + num_tokens, len(tokens))
        m.fits = sum(self._most_pages(group, most) for group in range(len(self.config.windows))) <= m.before[0]
        answer = self.ask(self.subject.admit, request, list(tokens), namespace, asked)
        if self._is_refused(answer):
            return None
        length = self.integer(answer, "admit()")
        running = m.running[request] = ManagedRequest(namespace, tokens, len(tokens))
        running.tables = self._tables(request)
        m.request, m.match = request, (length, tuple(slots[:length] for slots in running.tables))
        m.outlived = self.uses.find(m.pages_of(m.match[1]), self.num_operations)
        if self.capabilities.events:
            m.unannounced = self._unannounced(running, length)
        running.computed = max(0, min(length, len(tokens)))
        self._compute(running, min(asked, len(tokens) - running.computed))
        return None

    def _is_refused(self, answer: object) -> bool:
        """Return whether the manager has refused, which may have emptied its cache."""
        is_refused = self.refused(answer, None, False)
        if is_refused and self.capabilities.evicts_when_refused:
            self.found.clear()
        return is_refused

    def _unannounced(self, running: ManagedRequest, length: int) -> Cell | None:
        """Return the end of the first page in a match that is not cached by the events; None if all are."""
        ends = range(self.config.page_size, length + 1, self.config.page_size)
        for group, slots in enumerate(running.tables):
            for end in ends:
                cell = running.cell(group, end - 1)
                if slots[end - 1] >= 0 and not self.moment.account.copies[cell]:
                    return cell
        return None

    def _most_pages(self, group: int, num_tokens: int) -> int:
        """Return the most pages that a request of so many positions takes when it enters."""
        pages = self.config.pages_to(group, num_tokens)
        return min(pages, 2 + self.config.lookahead) if self.config.windows[group] == STATE else pages

    def _longest(self, tokens: list[int], namespace: str, cached: Container[Cell]) -> int:
        """Return the positions that a manager must find: the most of which every group has what it sees.
        `cached` has the last cells of pages."""
        size = self.config.page_size
        for length in range((len(tokens) - 1) // size * size, 0, -size):
            if all(self._sees(tokens, namespace, group, length, cached) for group in range(len(self.config.windows))):
                return length
        return 0

    def _sees(self, tokens: list[int], namespace: str, group: int, length: int, cached: Container[Cell]) -> bool:
        """Return whether all that the next position sees in a group is cached, behind so many positions."""
        size, window = self.config.page_size, self.config.windows[group]
        dropped = size if self.capabilities.drops_last_page else 0
        if window == STATE:
            return length == dropped or (group, namespace, tuple(tokens[: length - dropped])) in cached
        first = max(length - (window - 1 + dropped), 0) // size * size if window else 0
        ends = range(first + size, length + 1, size)
        return all((group, namespace, tuple(tokens[:end])) in cached for end in ends)

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
    def grow(self, request: str, num_tokens: int) -> bool | None:
        """Compute the next chunk of a prompt, or a token that has been sampled."""
        m, running = self.moment, self.moment.running[request]
        if num_tokens < 1:
            return False
        left = running.prompt_len - running.computed
        if left <= 0:
            running.tokens.append(1000 + len(running.tokens))
        asked = min(num_tokens, left) if left > 0 else len(running.tokens) - running.computed
        size = self.config.page_size
        if STATE in self.config.windows and running.computed % size:
            asked = min(asked, size - running.computed % size)
        m.request = request
        m.fits = sum(self._missing(running, group, asked) for group in range(len(running.tables))) <= m.before[0]
        answer = self.ask(self.subject.grow, request, list(running.tokens), asked)
        if self._is_refused(answer):
            if left <= 0:
                running.tokens.pop()  # it is sampled once more
            return None
        running.tables = self._tables(request)
        self._compute(running, asked)
        return None

    def _missing(self, running: ManagedRequest, group: int, num_tokens: int) -> int:
        """Return the pages that a table lacks for so many positions more."""
        have = len(running.tables[group]) // self.config.page_size
        missing = max(self.config.pages_to(group, running.computed + num_tokens) - have, 0)
        return min(missing, 1) if self.config.windows[group] == STATE else missing

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
