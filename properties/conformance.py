"""Checks of other people's components: one call in a test, or a base class with one test per invariant.

    from foredraft.properties.conformance import check_allocator

    def test_my_allocator():
        check_allocator(lambda config: MyAllocator(config.num_pages), budget="10s", seed=1)

There is a `check_…` and a `…Conformance` for every contract. The import needs neither pytest nor hypothesis.
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..core.errors import ConfigError, Problem, count_of, nearest
from .harness.cases import load_case
from .harness.contract import MISBEHAVIOURS, SUITE_VERSION, Adapter, Capabilities
from .harness.importing import load_make, name_of
from .harness.invariants import invariant, of_contract
from .harness.operation import Operation
from .harness.report import Failure, InvariantBroken, PropertiesBroken, Report, outcome_of
from .harness.shrink import explain
from .harness.suite import Suite
from .harness.swarm import Budget, Found, Swarm
from .suites import suite_of

MAX_DISPUTED = 4
"""Counterexamples that our own component fails, too, until the search goes on without that invariant."""


def check(
    suite: Suite,
    make: Callable[[Any], Any],
    *,
    capabilities: Any = None,
    expected_failures: Mapping[str, str] | None = None,
    allowed_failures: Iterable[str] = (),
    budget: str | int | Budget | None = None,
    seed: int = 1,
    spec: str = SUITE_VERSION,
    subject: str = "",
    every_failure: bool = False,
    supports: Callable[[Any], bool] | None = None,
    without: Iterable[str] = (),
    progress: Callable[[Swarm], None] | None = None,
    on_failure: Callable[[Found], None] = lambda found: None,
) -> Report:
    """Check a component, and report; nothing is raised for a broken invariant.

    `make(config)` returns a fresh component. `capabilities` are names, or what the contract's package declares them
    with; if not given, `make.capabilities`, and none if there are none. `expected_failures` maps an invariant's id to
    the reason why it is known to fail: that is reported, but no error, and an error if it holds. `allowed_failures` are
    ids that may fail or hold, for a component whose failure is not found in every run. `budget` is a number
    of operations or a time ("60s"); if not given, it is the contract's quick one. If not every operation has happened
    within the time, the check goes on until it has, but not past the quick number of operations. `supports(config)`
    says which configurations the component can be made from; if not given, `make.supports`, and all if there is none.
    `without` are kinds of operations, by their names in a history, that are left out, and with them what they alone
    would show. `spec` is the version of the suite that the test was written for; another one is refused. Raises
    ConfigError for impossible arguments, and for a component that leaves so many files open that there can be no more.

    `on_failure` gets a failure when it is found, before it is shrunk, which may take minutes.

    With `every_failure` the search goes on after a failure, without the invariant that failed; else the first one ends
    it.
    """
    if spec != SUITE_VERSION:
        raise ConfigError.of("spec", "", f"written for suite {spec!r}, this is {SUITE_VERSION!r}")
    component = suite.component(make, capabilities)
    allowed = tuple(allowed_failures)
    announced = dict.fromkeys(allowed, "it is allowed to") | dict(expected_failures or {})
    known = [item.id for item in of_contract(suite.name)] + list(MISBEHAVIOURS)
    problems = [Problem(id, f"no invariant of {suite.name}{nearest(id, known)}") for id in announced if id not in known]
    if problems:
        raise ConfigError("expected and allowed failures", problems)
    budget = Budget.of(suite.quick if budget is None else budget)
    subject = subject or name_of(make)
    if supports is not None:
        component = suite.component(Adapter(make, component.capabilities, supports))
    swarm = Swarm(component, seed, _kinds(suite, without))
    invariants = list(swarm.enabled)
    component.warm_up(swarm.drawn(0)[0])
    failures: dict[str, Failure] = {}
    probing: tuple[type[Operation], ...] = ()
    num_disputed = 0
    while (found := _search(swarm, invariants, budget, probing, progress)) is not None:
        _refuse_leaks(subject, swarm.num_runs)
        on_failure(found)
        failure = explain(component, invariants, found, subject, announced)
        failures[failure.id] = failure
        if failure.is_disputed and (num_disputed := num_disputed + 1) % MAX_DISPUTED:
            continue  # another run may show what is the component's own
        if failure.id in MISBEHAVIOURS or not (failure.expected or failure.is_disputed or every_failure):
            break
        invariants = [item for item in invariants if item.id != failure.id]
        probing += suite.probes.get(failure.id, ())
    must_fail = [id for id in announced if id not in allowed]
    return _report(swarm, subject, must_fail, failures)


def _refuse_leaks(subject: str, num_runs: int) -> None:
    """Raise ConfigError if this process can open no more files: neither can what explains a failure."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        what = (
            f"it leaves files open: after {count_of(num_runs, 'run')} the process can open no more ({error.strerror})"
        )
        raise ConfigError.of(subject, "", what) from error


def _kinds(suite: Suite, names: Iterable[str]) -> tuple[type[Operation], ...]:
    """Return kinds of operations by their names. Raises ConfigError for an unknown name."""
    kinds = {kind.tag: kind for kind in suite.operations}
    names = [str(name) for name in names]
    problems = [
        Problem(name, f"{suite.name} has no operation of this name{nearest(name, kinds)}; there are {', '.join(kinds)}")
        for name in names
        if name not in kinds
    ]
    if problems:
        raise ConfigError("without", problems)
    return tuple(kinds[name] for name in names)


def _search(swarm: Swarm, invariants, budget: Budget, probing, progress) -> Found | None:
    found = swarm.search(invariants, budget, probing, progress)
    if found is None and budget.is_extended and not probing and len(invariants) == len(swarm.enabled):
        rest = Budget(operations=swarm.component.suite.quick)
        found = swarm.search(invariants, rest, probing, progress, until=lambda: not swarm.vacuous())
    return found


def _report(swarm: Swarm, subject: str, must_fail: Iterable[str], failures: dict[str, Failure]) -> Report:
    skipped = _skipped(swarm)
    counts = {item.id: swarm.evaluations.get(item.id, 0) for item in swarm.enabled if item.id not in skipped}
    executed = {kind.tag: swarm.executed.get(kind, 0) for kind in swarm.kinds}
    unexpected = tuple(failure for failure in failures.values() if not (failure.expected or failure.is_disputed))
    return Report(
        contract=swarm.component.suite.name,
        subject=subject,
        capabilities=swarm.component.capabilities.declared,
        seed=swarm.seed,
        num_runs=swarm.num_runs,
        num_operations=swarm.num_operations,
        seconds=swarm.seconds,
        evaluations=counts,
        executed=executed,
        skipped=skipped,
        failures=unexpected,
        disputed=tuple(failure for failure in failures.values() if failure.is_disputed and not failure.expected),
        expected=tuple(failure for failure in failures.values() if failure.expected),
        held=tuple(id for id in must_fail if id not in failures) if not unexpected else (),
        vacuous=swarm.vacuous() if not failures and not swarm.is_restricted else (),
        unreached=swarm.unreached() if not failures else {},
        unexercised=swarm.unexercised() if not failures else (),
        parts=swarm.used,
    )


def _skipped(swarm: Swarm) -> dict[str, str]:
    """Return why invariants of the contract are not checked."""
    skipped = {}
    for item in of_contract(swarm.component.suite.name):
        if missing := item.missing(swarm.component.capabilities):
            skipped[item.id] = f"needs {', '.join(missing)}"
        elif item not in swarm.enabled:
            needed = [kind.tag for kind in swarm.left_out if item.concerns(kind)]
            skipped[item.id] = f"needs {', '.join(needed)}, which is left out"
        elif swarm.is_restricted and not swarm.evaluations.get(item.id):
            skipped[item.id] = "it never came up in what is supported and not left out"
    return skipped


def check_case(path: str | Path, make: Callable[[Any], Any] | None = None) -> None:
    """Run a stored case again, on the component that it names or on what `make` makes. Raises AssertionError, with the
    history, if it fails; ConfigError for a damaged case."""
    case = load_case(Path(path), suite_of)
    story = case.tell(load_make(case.subject) if make is None else make)
    if story.violation is not None:
        raise AssertionError("\n".join(["", *outcome_of(case, story)]))


class BrokenAsExpected(unittest.SkipTest):
    """An invariant that was announced as broken is: an expected failure for pytest, a skip for unittest."""


class Conformance:
    """Base of the base classes of tests. A subclass says how its component is made.

        class TestMine(AllocatorConformance):
            capabilities = ("paged", "inspection")

            def make(self, config):
                return MyAllocator(config.num_pages, config.page_size)

    There is a test method for every invariant of the contract. The search runs once per class, at the first test; each
    test reports its invariant.
    """

    contract: ClassVar[str]
    capabilities: ClassVar[Capabilities | Iterable[str]] = ()
    expected_failures: ClassVar[Mapping[str, str]] = {}
    budget: ClassVar[str | int | Budget | None] = None
    without: ClassVar[Iterable[str]] = ()
    seed: ClassVar[int] = 1
    _report: ClassVar[Report | None] = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "contract" in vars(cls):
            for item in of_contract(cls.contract):
                test = _test_of(item.id, cls.__qualname__)
                setattr(cls, test.__name__, test)

    def make(self, config: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not say how its component is made")

    supports: ClassVar[Callable[..., bool] | None] = None
    """A method with one argument: whether a component can be made from this configuration. Only such ones are drawn."""

    def report(self) -> Report:
        """Return the report of this class, made at the first call."""
        cls = type(self)
        if "_report" not in vars(cls) or cls._report is None:
            cls._report = check(
                suite_of(self.contract),
                self.make,
                capabilities=self.capabilities,
                expected_failures=self.expected_failures,
                supports=self.supports,
                without=self.without,
                budget=self.budget,
                seed=self.seed,
                subject=f"{cls.__module__}:{cls.__qualname__}",
                every_failure=True,
            )
        return cls._report

    @classmethod
    def as_adapter(cls) -> Adapter:
        """Return the component as a stored case finds it, under the name of this class."""
        tests = cls()
        return Adapter(tests.make, cls.capabilities, tests.supports)

    def check_invariant(self, id: str) -> None:
        """Raise AssertionError if it is broken, BrokenAsExpected if that was announced, unittest.SkipTest (a skip for
        pytest, too) if it is not checked."""
        report = self.report()
        if id in report.skipped:
            raise unittest.SkipTest(f"{id}: {report.skipped[id]}")
        for failure in report.expected:
            if failure.id == id:
                raise BrokenAsExpected(f"{id} is expected to fail: {failure.expected}")
        for failure in report.failures:
            if failure.id == id:
                raise InvariantBroken(failure)
        assert id not in report.held, f"{id} was expected to fail and held"
        assert report.evaluations[id], f"{id} was never evaluated"

    def test_behaves(self) -> None:
        """Fail if a call raises, hangs, or answers in another form than the contract says, or if an enabled
        operation never happened."""
        report = self.report()
        for failure in report.failures:
            if failure.id in MISBEHAVIOURS:
                raise InvariantBroken(failure)
        assert not report.vacuous, report.vacuous


def _test_of(id: str, owner: str) -> Callable[[Conformance], None]:
    def test(self: Conformance) -> None:
        self.check_invariant(id)

    test.__name__ = f"test_{id.lower().replace('-', '_')}"
    test.__qualname__ = f"{owner}.{test.__name__}"
    test.__doc__ = invariant(id).sentence
    return test


def for_tests(contract: str) -> tuple[type[Conformance], Callable[..., Report]]:
    """Make the base class of a contract's tests, and the function that checks a component in one call."""

    def check_one(make: Callable[[Any], Any], **options: Any) -> Report:
        report = check(suite_of(contract), make, **options)
        if not report.ok:
            raise PropertiesBroken(report)
        return report

    check_one.__name__ = check_one.__qualname__ = f"check_{contract.replace('-', '_')}"
    check_one.__doc__ = f"""Check a component of the contract {contract} against every invariant that its capabilities enable.

    The options are those of `check`. Raises `PropertiesBroken` (an AssertionError, with the report) if anything fails.
    """
    name = "".join(map(str.capitalize, contract.split("-"))) + "Conformance"
    return type(name, (Conformance,), {"contract": contract, "__module__": __name__}), check_one


AllocatorConformance, check_allocator = for_tests("allocator")
PrefixCacheConformance, check_prefix_cache = for_tests("prefix-cache")
RelayConformance, check_relay = for_tests("relay")
AcceptConformance, check_accept = for_tests("accept")
StepControllerConformance, check_step_controller = for_tests("step-controller")
EngineConformance, check_engine = for_tests("engine")
ExecutorConformance, check_executor = for_tests("executor")
BlockManagerConformance, check_block_manager = for_tests("block-manager")
TransportConformance, check_transport = for_tests("transport")
SimulatorConformance, check_simulator = for_tests("simulator")
