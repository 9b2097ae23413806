"""What every operation on a prefix cache has around it: the subject is asked, observed and recounted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...core.errors import InvariantViolation
from ..harness.operation import Operation
from ..harness.trial import Refused, Trial
from ..invariants.registry import Invariant
from .contract import METHODS, PrefixCache, PrefixCacheCapabilities, PrefixCacheConfig
from .model import PrefixCacheModel, Running
from .moment import Moment, Node, Observation
from .texts import Text, text_of


class ObservedCache(Trial):
    """`subject`, its model, and the memory that both speak of. The operations are the subclass's."""

    methods = METHODS

    def __init__(
        self,
        subject: PrefixCache,
        config: PrefixCacheConfig,
        capabilities: PrefixCacheCapabilities,
        invariants: Iterable[Invariant],
    ) -> None:
        super().__init__(subject, config, capabilities, invariants)
        self.model = PrefixCacheModel(config.page_size, config.policy if capabilities.policies else "lru")
        self.memory: dict[int, int] = {}  # slot -> cell
        self.free = list(range(config.num_pages, 0, -1))
        self.moment = Moment(config, capabilities, self.model)
        self._observe()
        self.check()

    # -- around every operation ---------------------------------------------------------------------------------------

    def _begin(self, operation: Operation | str) -> Moment:
        """Forget the last operation; what was after it is now before."""
        m = self.moment
        m.operation = operation
        m.matches = []
        m.evicted = m.inserted = m.locked = m.refusal = m.should_share = None
        m.stale = m.must_refuse = False
        m.before, m.locks_before = m.after, m.locks
        return m

    def _end(self) -> bool:
        self._observe()
        m = self.moment
        if m.refusal is None:
            self.transcript.append([match.slots or match.length for match in m.matches])
        else:
            self.transcript.append("refused")
        return True

    def _observe(self) -> None:
        """Ask the subject for all that it shows, and recount the model."""
        subject, has, m = self.subject, self.capabilities, self.moment
        nodes = free = None
        num_evictable = self.integer(self.must(subject.num_evictable), "num_evictable()")
        num_protected = self.integer(self.must(subject.num_protected), "num_protected()")
        if has.inspection:
            nodes = self._nodes()
        if has.table:
            free = self.integers(self.must(subject.free_slots), "free_slots()")
        m.after = Observation(num_evictable, num_protected, nodes, free)
        m.locks = self.model.locks()
        m.wrong = None
        m.tables = {}
        for name, request in self.model.running.items():
            m.tables[name] = slots = self._table(name, request)
            cells = request.text.cells
            found = tuple(map(self.memory.get, slots[: len(cells)]))
            if found != cells and m.wrong is None:
                at = next((i for i, cell in enumerate(found) if cell != cells[i]), len(found))
                slot = slots[at] if at < len(slots) else None
                m.wrong = (name, at, slot, self.memory.get(slot), cells[at])

    def _nodes(self) -> tuple[Node, ...]:
        found = []
        for row in self.must(self.subject.nodes):
            if not isinstance(row, Sequence) or len(row) != 5:
                raise self.misbehaviour("TYPE", f"nodes() has {row!r}", "(id, parent, locks, slots, children) of each")
            id, parent, locks, slots, children = row
            numbers = [
                self.integer(n, f"the {what} of a node")
                for n, what in ((id, "id"), (parent, "parent"), (locks, "locks"))
            ]
            slots, children = self.integers(slots, "a node's slots"), self.integers(children, "a node's children")
            found.append(Node(*numbers, slots, children))
        return tuple(found)

    def _table(self, name: str, request: Running) -> tuple[int, ...]:
        if not self.capabilities.table:
            return self.moment.slots_of(request.table)
        return self.integers(self.must(self.subject.slots_of, name), f"slots_of({name!r})")

    def _text(self, op: Any, namespace: str | None = None) -> Text:
        namespace = op.namespace if namespace is None else namespace
        return text_of(op.pages, op.extra, namespace, self.config.page_size, self.config.bigram)

    def _parts(self, answer: object, count: int, what: str, should: str) -> Sequence[Any]:
        if not isinstance(answer, tuple | list) or len(answer) != count:
            raise self.misbehaviour("TYPE", f"{what} is {answer!r}", should)
        return answer

    def _refused(self, method, *arguments: object) -> bool:
        """Whether the subject refused; its own alarm about the caller counts as that."""
        try:
            answer = self.ask(method, *arguments)
        except Exception as error:
            if not isinstance(error.__cause__, InvariantViolation):
                raise
            self.failed = False
            answer = Refused(str(error.__cause__))
        if isinstance(answer, Refused):
            self.moment.refusal = answer.reason
            return True
        if answer is False:
            self.moment.refusal = "False"
            return True
        return False

    def _carries_out(self, method, *arguments: object) -> None:
        """Call what the contract gives no reason to refuse here."""
        if self._refused(method, *arguments):
            was = f"{method.__name__} was refused: {self.moment.refusal}"
            raise self.misbehaviour("RAISES", was, "it is carried out")
