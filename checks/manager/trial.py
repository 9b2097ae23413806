"""The block manager's trial: the suite is the scheduler and the device, and reads every slot again after each operation."""

from __future__ import annotations

from ...properties.harness.operation import Handles, Operation, operation
from ...properties.harness.trial import Trial
from . import invariants as invariants  # registers the checkers
from .contract import METHODS, BlockManager, ManagerCapabilities, ManagerConfig
from .model import Cell, Moment, Running

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


def _amounts(config: ManagerConfig, has: ManagerCapabilities) -> list[int]:
    return [64, 64, 1, config.page_size, config.page_size + 1]


class ManagerTrial(Trial):
    """`subject` under operations."""

    contract = "block-manager"
    config_type = ManagerConfig
    capabilities_type = ManagerCapabilities
    methods = METHODS
    looks = ("slots_of", "num_free")
    quick = 20_000

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

    @operation(
        weight=10, when=_is_new, request=REQUESTS, pages=_pages, extra=_extras, namespace=_spaces, num_tokens=_amounts
    )
    def admit(self, request: str, pages: tuple[int, ...], extra: int, namespace: str, num_tokens: int) -> bool | None:
        """Start a request and compute `num_tokens` positions behind its cached prefix, or all that are left."""
        tokens = self.text(pages, extra)
        if not tokens or num_tokens < 1:
            return False
        m, size = self.moment, self.config.page_size
        known = self._known(tokens, namespace)
        m.expected = known if self.capabilities.caching else 0
        asked = min(num_tokens, len(tokens) - known)  # if more is cached, fewer are left
        # How much of it is cached nothing but the manager knows, and cached pages count as free: so many pages are enough in any case.
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

    @operation(weight=12, when=_is_running, request=REQUESTS, num_tokens=_amounts)
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

    @operation(weight=6, when=_is_running, request=REQUESTS)
    def release(self, request: str) -> None:
        """End a request."""
        running = self.moment.running.pop(request)
        size = self.config.page_size
        self.must(self.subject.release, request)
        for end in range(size, running.computed + 1, size):
            self.found[running.namespace, tuple(running.tokens[:end])] = 1

    @operation(needs="misuse", weight=1, when=_is_new, request=REQUESTS)
    def release_stray(self, request: str) -> None:
        """Release a request that is not there. Must be refused, or do nothing."""
        self.ask(self.subject.release, request)

    @operation(needs="misuse", weight=1, when=_is_running, request=REQUESTS)
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
