"""`Suite` is a contract as the drivers see it, `Component` a component under check:
it runs a history, within a limit of time."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from pathlib import Path
from types import FrameType
from typing import Any

from ...core.errors import ConfigError
from .contract import MISBEHAVIOURS, capabilities_of, supports_of
from .importing import NotInstalled
from .invariants import Finding, Invariant, invariant, of_contract
from .letters import Choices, Vocabulary, vocabulary_of
from .operation import Operation
from .trial import Broken, Trial, Violation, frames

MOSTLY, PATIENCE = 0.9, 5
"""The share of its limit that a component must have computed to be interrupted;
and after how many limits it is interrupted anyway."""


class Hanging(BaseException):
    """Raised inside a component that has taken too long.
    No Exception, so that a component's own handlers let it pass."""


def can_interrupt() -> bool:
    """Return whether alarms work: they need the main thread of a system that has them.
    Elsewhere a component that hangs is waited for."""
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


@contextmanager
def alarm(limit_s: float) -> Iterator[None]:
    """Raise Hanging in the body once it has taken `limit_s` seconds, and again from time to time if it goes on.

    Of these seconds it must have computed for nine in ten (`MOSTLY`), else it gets `PATIENCE` times as many: other
    processes may have had the core. What other threads of the process compute is not counted.
    """
    if not can_interrupt():
        yield
        return

    computed_s, begin_s = time.thread_time(), time.monotonic()

    def ring(number: int, frame: FrameType | None) -> None:
        has_computed = time.thread_time() - computed_s >= MOSTLY * limit_s
        if has_computed or time.monotonic() - begin_s >= PATIENCE * limit_s:
            raise Hanging

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


RUN_LIMIT_S = 2.0
"""How long one run of a few hundred operations may take before it counts as hanging; a good one takes milliseconds."""

WARM_UP_LIMIT_S = 60.0
EXIT_FORKED = 70
DRAWN_FOR_SUPPORT = 5_000


class Suite:
    """A contract as the drivers see it. Most attributes are class variables of its trial; these are not:

    controls       our components as import strings, the plainest first: what is shown passes on one
    probes         for an invariant that a component is known to break, the operations that do nothing but probe it
    """

    def __init__(self, trial: type[Trial], controls: tuple[str, ...] = ()) -> None:
        self.trial, self.controls = trial, controls
        self.draws_a_part = False  # of the configurations: see `drawing`
        self.name, self.config, self.capabilities = trial.contract, trial.config_type, trial.capabilities_type
        self.operations, self.quick, self.run_length = trial.operations, trial.quick, trial.run_length
        self.probes: dict[str, tuple[type[Operation], ...]] = {}
        for method in trial.declared:
            if method.probes:
                self.probes[method.probes] = (*self.probes.get(method.probes, ()), method.kind)

    def drawing(self, config: type) -> Suite:
        """Return the same suite, with the part of the configurations that `config.draw` draws. It has no controls: in
        these configurations they may fail, too."""
        other = copy(self)
        other.config, other.controls, other.draws_a_part = config, (), True
        return other

    def component(self, make: Callable[[Any], Any], capabilities: Any = None) -> Component:
        """Return a component of this contract, with the capabilities that it declares itself if none are given.
        Raises ConfigError."""
        declared = capabilities_of(make) if capabilities is None else capabilities
        return Component(self, make, self.capabilities.of(declared))


class Component:
    """A component under check: its `make` and its capabilities. `invariants` are those that these enable."""

    def __init__(self, suite: Suite, make: Callable[[Any], Any], capabilities: Any) -> None:
        self.suite, self.make, self.capabilities = suite, make, capabilities
        self.supports = supports_of(make)
        # How long a run may take: some components need more time than most of their contract.
        self.limit_s: float = getattr(make, "limit_s", None) or suite.trial.limit_s or RUN_LIMIT_S
        self.invariants = tuple(item for item in of_contract(suite.name) if not item.missing(capabilities))

    def configure(self, choose: Choices) -> Any:
        """Make the configuration of these choices, the simplest one of `Choices()`."""
        return self.suite.config.draw(choose, self.capabilities)

    def first_supported(self, bits: Callable[[int], int]) -> tuple[Any, tuple[int, ...]]:
        """Return the first configuration drawn that is supported, and its choices; `bits` are those of each attempt.
        Raises ConfigError."""
        for attempt in range(DRAWN_FOR_SUPPORT):
            choose = Choices(bits(attempt))
            config = self.configure(choose)
            if self.supports(config):
                return config, tuple(choose.taken)
        draw = f"{self.suite.config.__name__}.draw"
        what = f"accepts none of {DRAWN_FOR_SUPPORT:,} configurations drawn; {draw} says what is drawn"
        raise ConfigError.of("supports", "", what)

    def vocabulary(self, config: Any) -> Vocabulary:
        """Return the letters of one configuration.
        Which groups and kinds there are depends on the capabilities alone."""
        return vocabulary_of(self.suite.trial.declared, config, self.capabilities)

    @property
    def operations(self) -> tuple[type[Operation], ...]:
        """The operations that are tried on it."""
        spoken = self.vocabulary(self.configure(Choices()))
        return tuple(dict.fromkeys(letter.kind for letters in spoken.values() for letter in letters))

    def warm_up(self, config: Any) -> None:
        """Make one component and drop it, so that libraries are loaded now and not within the time limit of a run."""
        with suppress(Exception, Hanging), alarm(WARM_UP_LIMIT_S):
            self.make(config)

    def start(self, config: Any, invariants: Iterable[Invariant]) -> Trial:
        """Make a fresh one and its trial. Raises Violation."""
        try:
            subject = self.make(config)
        except ModuleNotFoundError as error:
            raise NotInstalled("make", error.name or str(error)) from error
        except Exception as error:
            was = f"make({config}) raised {type(error).__name__}: {error}{frames(error)}"
            finding = Finding(was, f"a component for the contract {self.suite.name}", MISBEHAVIOURS["RAISES"])
            raise Violation("make", [Broken("RAISES", finding)]) from error
        trial = self.suite.trial(subject, config, self.capabilities, invariants)
        trial.make = self.make
        return trial

    def execute(
        self,
        config: Any,
        operations: Sequence[Operation],
        invariants: Sequence[Invariant] | None = None,
        *,
        drain: bool = True,
        twice: bool = False,
        limit_s: float | None = None,
        watch: Callable[[Operation, Trial], None] | None = None,
    ) -> Trial:
        """Run the operations on a fresh component, drain it, and check the invariants (all, if None). Raises Violation
        if one breaks, or if the component raises, hangs or answers nonsense; `Violation.trial` is the trial, None where
        two runs were compared.

        With `twice`, twins go through the same, for the invariants that compare two runs. `watch` is called after each
        operation.
        """
        invariants = self.invariants if invariants is None else invariants
        limit_s = limit_s or self.limit_s
        first = self._execute_once(config, operations, invariants, drain, limit_s, watch)
        twins: dict[Any, Trial | None] = {}
        broken: list[Broken] = []
        for item in invariants if twice else ():
            other = self.twin_of(item, config)
            if other is None:
                continue
            if other not in twins:
                try:
                    twins[other] = self._execute_once(other, operations, invariants, drain, limit_s)
                except Violation:
                    if other == config:
                        raise
                    twins[other] = None  # that configuration fails by itself; a run of its own will tell
            if twins[other] is None:
                continue
            outcome = item.check((first, twins[other]))
            first.evaluations[first.invariants.index(item)] += outcome is not None
            if isinstance(outcome, Finding):
                broken.append(Broken(item.id, outcome))
        if broken:
            # What differs in the same configuration, too, differs for no reason of the others.
            broken.sort(key=lambda item: invariant(item.id).twin != "again")
            raise Violation(f"the same operations {invariant(broken[0].id).twin}", broken)
        return first

    def twin_of(self, item: Invariant, config: Any) -> Any:
        """Return the other configuration of an invariant over two runs:
        the first that is supported, None if there is none."""
        if not item.twin:
            return None
        found = self.suite.trial.twin_config(item.twin, config)
        others = found if isinstance(found, list) else [found]
        return next((other for other in others if other and self.supports(other)), None)

    def _execute_once(self, config, operations, invariants, drain, limit_s, watch=None) -> Trial:
        process = os.getpid()
        try:
            with getattr(self.make, "planted", nullcontext)():  # the defect of a mutant
                return self._run(config, operations, invariants, drain, limit_s, watch)
        finally:
            if os.getpid() != process:
                # A call has forked and come back twice: the copy must not go on with the check.
                os.write(2, f"foredraft: a call of the component forked; process {os.getpid()} ends\n".encode())
                os._exit(EXIT_FORKED)

    def _run(self, config, operations, invariants, drain, limit_s, watch) -> Trial:
        trial = None
        with self.judged(lambda: trial, limit_s):
            trial = self.start(config, invariants)
            if watch is not None:
                trial.calls = []
            apply = trial.apply
            for operation in operations:
                if apply(operation) and watch is not None:
                    watch(operation, trial)
            if drain:
                trial.drain()
        return trial

    @contextmanager
    def judged(self, trial: Callable[[], Trial | None], limit_s: float) -> Iterator[None]:
        """Raise a Violation, which has the trial as far as it came, for whatever goes wrong in the body, or takes
        longer than `limit_s` seconds; `trial` returns None until it is made."""
        try:
            with alarm(limit_s):
                yield
        except NotInstalled:
            raise
        except (Exception, Hanging) as error:
            violation = error if isinstance(error, Violation) else _accident(trial(), error, limit_s)
            violation.trial = trial()
            if violation is error:
                raise
            raise violation from (None if isinstance(error, Hanging) else error)


def _accident(trial: Trial | None, error: BaseException, limit_s: float) -> Violation:
    """Return the violation of a component that hangs, or whose answer a trial could not read. Each trial looks at the
    answers that it expects; what it did not foresee ends here, and is no crash of the suite."""
    at = "make" if trial is None else trial.operation
    if isinstance(error, Hanging):
        was = f"{at} did not return within {limit_s:g} s{frames(error)}"
        return Violation(at, [Broken("HANGS", Finding(was, "an answer", MISBEHAVIOURS["HANGS"]))])
    return Violation(at, [Broken("TYPE", _unreadable(error))])


def _unreadable(error: Exception) -> Finding:
    """Describe an answer that a trial could not read:
    the error and where, since the answer itself is not at hand any more."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).parent.name}/{Path(place.filename).name}, line {place.lineno}"
    was = f"an answer could not be read: {type(error).__name__}: {error} ({where}: {place.line})"
    return Finding(was, "answers of the types and shapes of the contract", MISBEHAVIOURS["TYPE"])
