"""The block manager's trial (BLOCKS-01 … 07): the suite is scheduler and device, and reads every slot again
after each operation."""

from __future__ import annotations

from typing import ClassVar

from ...properties.harness.operation import Handles, Operation, operation
from ...properties.harness.trial import Trial
from ...properties.invariants.registry import Finding, Outcome, checks
from .contract import BlockManager, ManagerCapabilities, ManagerConfig
from .model import Cell, Moment, Running

CONTRACT = "block-manager"


@checks("BLOCKS-01", CONTRACT, on=("admit",))
def a_match_is_the_requests_own_prefix(m: Moment) -> Outcome:
    if m.match is None:
        return None
    length, slots = m.match
    running = m.running[m.request]
    was = f"{m.request} starts with {length} of {len(running.tokens)} positions"
    if length % m.config.page_size:
        return Finding(was, "whole pages", "the rest of the page would be written under others")
    if not 0 <= length < len(running.tokens):
        return Finding(was, "less than all", "the first token comes from computing the last position")
    for position, slot in enumerate(slots):
        if m.memory.get(slot) != running.cell(position):
            was = f"{m.request} finds position {position} in slot {slot}, which holds {m.memory.get(slot)}"
            return Finding(was, f"{running.cell(position)}", "it goes on from another's text")
    return True


@checks("BLOCKS-02", CONTRACT)
def every_page_is_free_or_held(m: Moment) -> Outcome:
    size = m.config.page_size
    num_free, tables = m.after
    held = {slot // size for slots in tables.values() for slot in slots}
    if num_free + len(held) != m.config.num_pages:
        was = f"{num_free} pages are free, {len(held)} are held"
        return Finding(was, f"{m.config.num_pages} in all", "a page is lost, or handed out under its holder")
    if m.drained and num_free != m.config.num_pages:
        return Finding(f"{num_free} pages are free at the end", f"{m.config.num_pages}", "a page is lost")
    return True


@checks("BLOCKS-03", CONTRACT)
def what_is_computed_stays(m: Moment) -> Outcome:
    size = m.config.page_size
    mine = {slot // size for slot in m.written}
    for name, running in m.running.items():
        shared = mine.intersection(slot // size for slot in running.slots) if name != m.request else ()
        if shared:
            was = f"{m.request} writes page {min(shared)}, which {name} has, too"
            return Finding(was, "pages of its own", "only full pages are shared")
        for position, slot in enumerate(running.slots[: running.computed]):
            if m.memory.get(slot) != running.cell(position):
                was = f"slot {slot} of {name}, position {position}, holds {m.memory.get(slot)}"
                return Finding(was, f"{running.cell(position)}", "another request has written there")
    return True if m.running else None


@checks("BLOCKS-04", CONTRACT, on=("admit", "grow"))
def what_fits_is_granted_and_a_refusal_changes_nothing(m: Moment) -> Outcome:
    if m.refusal is None:
        return True
    if m.after != m.before:
        return Finding(f"a refused {m.operation} changed {m.before} into {m.after}", "nothing", "it was refused")
    if m.fits:
        was = f"refused ({m.refusal}), with {m.before[0]} pages free"
        return Finding(was, "granted: that is enough", "the request waits for ever")
    return True


@checks("BLOCKS-05", CONTRACT, "caching", on=("admit",))
def what_was_released_is_found_again(m: Moment) -> Outcome:
    if m.match is None:
        return None
    if m.match[0] < m.expected:
        was = f"{m.request} starts with {m.match[0]} cached positions"
        return Finding(
            was, f"{m.expected}: they were released, and no page was handed out since", "they are computed again"
        )
    return True


@checks("BLOCKS-06", CONTRACT, on=("admit", "grow"))
def slots_stand_in_whole_pages(m: Moment) -> Outcome:
    if m.refusal is not None:
        return None
    size, running = m.config.page_size, m.running[m.request]
    if len(running.slots) < running.computed:
        was = f"{m.request} has {len(running.slots)} slots"
        return Finding(was, f"{running.computed}, one for each position", "the last ones are written nowhere")
    for position, slot in enumerate(running.slots):
        in_order = position % size == 0 or slot == running.slots[position - 1] + 1
        if slot < 0 or slot % size != position % size or not in_order:
            was = f"position {position} of {m.request} is in slot {slot}, behind slot {running.slots[position - 1]}"
            return Finding(was, "pages of neighbouring slots", "kernels address pages, not slots")
    return True


@checks("BLOCKS-07", CONTRACT, "misuse", on=("release-stray", "admit-again"))
def misuse_changes_nothing(m: Moment) -> Outcome:
    if m.operation.tag == "admit-again" and m.refusal is None:
        return Finding(f"{m.operation} was accepted", "a refusal", "two requests share one table")
    if m.after != m.before:
        return Finding(f"{m.operation} changed {m.before} into {m.after}", "nothing", "other requests pay for it")
    return True


REQUESTS = Handles(("r1", "r2", "r3", "r4"))
NAMESPACES = ("", "lora-1", "1")


def _is_new(t: ManagerTrial, request: str) -> bool:
    return request not in t.moment.running


def _is_running(t: ManagerTrial, request: str) -> bool:
    return request in t.moment.running


def _pages(config: ManagerConfig, has: ManagerCapabilities) -> tuple[tuple[int, ...], ...]:
    return ((0,), (0, 0), (0, 1), (1,), (0, 0, 0), (0, 0, 1), (1, 0))


def _extras(config: ManagerConfig, has: ManagerCapabilities) -> list[int]:
    return [1, 0, config.page_size - 1, -1, 1]


def _spaces(config: ManagerConfig, has: ManagerCapabilities) -> tuple[str, ...]:
    return ("", "", *NAMESPACES) if has.namespaces else ("",)


class ManagerTrial(Trial):
    """`subject` under operations."""

    contract = "block-manager"
    looks = ("slots_of", "num_free")
    quick = 20_000
    values: ClassVar = {"request": REQUESTS, "num_tokens": lambda c, has: [64, 64, 1, c.page_size, c.page_size + 1]}

    subject: BlockManager
    config: ManagerConfig
    capabilities: ManagerCapabilities
    moment: Moment

    def prepare(self) -> None:
        self.moment = Moment(self.config)
        self.found: dict[Cell, int] = {}  # what was released last, and is not handed out yet: end of a page -> 1
        self._observe()

    def begin(self, operation: Operation | str) -> None:
        m = self.moment
        self.moment = Moment(self.config, operation, m.running, m.memory, before=m.after, after=m.after)

    def end(self) -> None:
        self._observe()
        m = self.moment
        self.transcript.append((m.match, m.refusal, m.after))

    def _observe(self) -> None:
        m = self.moment
        for name, running in m.running.items():
            running.slots = self.integers(self.must(self.subject.slots_of, name), "slots_of()")
        num_free = self.integer(self.must(self.subject.num_free), "num_free()")
        m.after = num_free, {name: running.slots for name, running in m.running.items()}

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
        m, size = self.moment, self.config.page_size
        known = self._known(tokens, namespace)
        m.expected = known if self.capabilities.caching else 0
        asked = min(num_tokens, len(tokens) - known)  # if more is cached, fewer are left
        # How much of it is cached nothing but the manager knows, and cached pages count as free: so many pages are
        # enough in any case.
        most = min((len(tokens) - 1) // size * size + num_tokens, len(tokens))
        m.fits = -(-most // size) <= m.before[0]
        answer = self.ask(self.subject.admit, request, list(tokens), namespace, asked)
        if self.refused(answer, None, False):
            return None
        length = self.integer(answer, "admit()")
        running = m.running[request] = Running(namespace, tokens, len(tokens))
        running.slots = self.integers(self.must(self.subject.slots_of, request), "slots_of()")
        m.request, m.match = request, (length, running.slots[:length])
        running.computed = max(0, min(length, len(tokens)))
        self._compute(running, min(asked, len(tokens) - running.computed))
        return None

    def _known(self, tokens: list[int], namespace: str) -> int:
        """Return the positions that a manager must find again."""
        size, length = self.config.page_size, 0
        while length + size < len(tokens) and (namespace, tuple(tokens[: length + size])) in self.found:
            length += size
        return length

    def _compute(self, running: Running, num_tokens: int) -> None:
        """Write the next positions, as the device does in the same step."""
        m, start, stop = self.moment, running.computed, running.computed + num_tokens
        m.written = running.slots[start:stop]
        for position, slot in zip(range(start, stop), m.written, strict=False):
            m.memory[slot] = running.cell(position)
        running.computed = stop
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
        m.request = request
        m.fits = -(-(running.computed + asked) // size) - len(running.slots) // size <= m.before[0]
        answer = self.ask(self.subject.grow, request, list(running.tokens), asked)
        if self.refused(answer, None, False):
            if left <= 0:
                running.tokens.pop()  # it is sampled once more
            return None
        running.slots = self.integers(self.must(self.subject.slots_of, request), "slots_of()")
        self._compute(running, asked)
        return None

    @operation(weight=6, when=_is_running)
    def release(self, request: str) -> None:
        """End a request."""
        running = self.moment.running.pop(request)
        size = self.config.page_size
        self.must(self.subject.release, request)
        for end in range(size, running.computed + 1, size):
            self.found[running.namespace, tuple(running.tokens[:end])] = 1

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
            return f"-> {m.match[0]} cached, writes {list(m.written)}"
        return f"-> writes {list(m.written)}" if m.written else "done"
