"""Checks of other people's components: one call in a test, or a base class with one test per invariant.

    from foretoken.properties.conformance import check_allocator

    def test_my_allocator():
        check_allocator(lambda config: MyAllocator(config.num_pages), budget="10s", seed=1)

There is a `check_…` and a `…Conformance` for every contract; those of executors and transports, whose contracts speak in Foretoken's
own types, are in `foretoken.checks.conformance`. The import needs neither pytest nor hypothesis.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from ..core.errors import ConfigError, Problem, nearest
from .harness.cases import Case
from .harness.contract import MISBEHAVIOURS, SUITE_VERSION, Capabilities, capabilities_of
from .harness.operation import Operation
from .harness.report import Failure, PropertiesBroken, Report
from .harness.shrink import Shrinker
from .harness.suite import Suite
from .harness.swarm import Budget, Found, Swarm
from .invariants import Invariant, invariant, of_contract
from .suites import suite_of


def check(
    suite: Suite,
    make: Callable[[Any], Any],
    *,
    capabilities: Any = None,
    expected_failures: Mapping[str, str] | None = None,
    budget: str | int | Budget | None = None,
    seed: int = 1,
    spec: str = SUITE_VERSION,
    subject: str = "",
    every_failure: bool = False,
    progress: Callable[[Swarm], None] | None = None,
) -> Report:
    """Check a component, and report; nothing is raised for a broken invariant.

    `make(config)` returns a fresh component. `capabilities` are names, or what the contract's package declares them with; if not given,
    `make.capabilities`, and none if there are none. `expected_failures` maps an invariant's id to the reason why it is known to fail:
    that is reported, but no error, and an error if it holds. `budget` is a number of operations or a time ("60s"), the contract's
    quick one if not given; a time in which not everything has happened is stretched until it has, as far as to the quick one.
    `spec` is the version of the suite that the test was written for; another one is refused. Raises ConfigError for impossible
    arguments.

    With `every_failure` the search goes on after a failure, without the invariant that failed; else the first one ends it.
    """
    if spec != SUITE_VERSION:
        raise ConfigError("spec", [Problem("", f"written for suite {spec!r}, this is {SUITE_VERSION!r}")])
    capabilities = suite.capabilities.of(capabilities_of(make) if capabilities is None else capabilities)
    announced = dict(expected_failures or {})
    known = [item.id for item in of_contract(suite.name)] + list(MISBEHAVIOURS)
    problems = [Problem(id, f"no invariant of {suite.name}{nearest(id, known)}") for id in announced if id not in known]
    if problems:
        raise ConfigError("expected_failures", problems)
    budget = Budget.of(suite.quick if budget is None else budget)
    subject = subject or name_of(make)
    invariants = list(suite.invariants(capabilities))
    swarm = Swarm(suite, make, capabilities, seed)
    suite.warm_up(make, swarm.drawn(0)[0])
    failures: dict[str, Failure] = {}
    without: tuple[type[Operation], ...] = ()
    while (found := _search(swarm, invariants, budget, without, progress)) is not None:
        failure = explain(suite, make, capabilities, invariants, found, subject, announced)
        failures[failure.id] = failure
        if failure.id in MISBEHAVIOURS or not (failure.expected or every_failure):
            break
        invariants = [item for item in invariants if item.id != failure.id]
        without += suite.probes.get(failure.id, ())
    return _report(suite, swarm, subject, capabilities, announced, failures)


def _search(swarm: Swarm, invariants, budget: Budget, without, progress) -> Found | None:
    found = swarm.search(invariants, budget, without, progress)
    if found is None and budget.seconds is not None and not without and len(invariants) == len(swarm.enabled):
        # How much fits into a time is the machine's affair. What is rare gets the operations of the quick budget to happen in.
        rest = Budget(operations=swarm.suite.quick)
        found = swarm.search(invariants, rest, without, progress, until=lambda: not swarm.vacuous())
    return found


def _report(
    suite: Suite, swarm: Swarm, subject: str, capabilities: Any, announced, failures: dict[str, Failure]
) -> Report:
    enabled = suite.invariants(capabilities)
    counts = {item.id: swarm.evaluations.get(item.id, 0) for item in enabled}
    executed = {kind.tag: swarm.executed.get(kind, 0) for kind in suite.enabled(capabilities)}
    unexpected = tuple(failure for failure in failures.values() if not failure.expected)
    return Report(
        contract=suite.name,
        subject=subject,
        capabilities=capabilities.declared,
        seed=swarm.seed,
        num_runs=swarm.num_runs,
        num_operations=swarm.num_operations,
        seconds=swarm.seconds,
        evaluations=counts,
        executed=executed,
        skipped={
            item.id: f"needs {', '.join(item.missing(capabilities))}"
            for item in of_contract(suite.name)
            if item.missing(capabilities)
        },
        failures=unexpected,
        expected=tuple(failure for failure in failures.values() if failure.expected),
        held=tuple(id for id in announced if id not in failures) if not unexpected else (),
        vacuous=swarm.vacuous() if not failures else (),
    )


def explain(
    suite: Suite,
    make: Callable[[Any], Any],
    capabilities: Any,
    invariants: Iterable[Invariant],
    found: Found,
    subject: str,
    announced: Mapping[str, str] | None = None,
) -> Failure:
    """Shrink a failing run and tell its story."""
    shrinker = Shrinker(suite, make, capabilities, list(invariants), found)
    shrinker.shrink()
    id = found.violation.id
    case = Case(
        contract=suite.name,
        subject=subject,
        capabilities=capabilities.declared,
        config=shrinker.config,
        seed=found.seed,
        run=found.run,
        invariant=id,
        drain=shrinker.drain,
        operations=tuple(shrinker.operations),
    )
    story = case.tell(make)
    violation = story.violation or found.violation
    broken = next((item for item in violation.broken if item.id == id), found.violation.broken[0])
    return Failure(
        id=id,
        sentence=broken.sentence,
        finding=broken.finding,
        also=tuple(item.id for item in found.violation.broken[1:]),
        case=case,
        operations_before=max(len(found.operations), len(shrinker.operations)),
        history=story.history,
        ends_in=story.ends_in or str(violation.operation),
        expected=(announced or {}).get(id, ""),
    )


def name_of(make: Callable[[Any], Any]) -> str:
    """`module:name`, as the command line takes it, or what comes close."""
    module, name = getattr(make, "__module__", ""), getattr(make, "__qualname__", type(make).__qualname__)
    return f"{module}:{name}" if module else name


class Conformance:
    """Base of the base classes of tests. A subclass says how its component is made.

        class TestMine(AllocatorConformance):
            capabilities = ("paged", "inspection")

            def make(self, config):
                return MyAllocator(config.num_pages, config.page_size)

    There is a test method for every invariant of the contract. The search runs once per class, at the first test; each test reports its
    invariant.
    """

    contract: ClassVar[str]
    capabilities: ClassVar[Capabilities | Iterable[str]] = ()
    expected_failures: ClassVar[Mapping[str, str]] = {}
    budget: ClassVar[str | int | Budget | None] = None
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

    def report(self) -> Report:
        """The report of this class, made at the first call."""
        cls = type(self)
        if "_report" not in vars(cls) or cls._report is None:
            cls._report = check(
                suite_of(self.contract),
                self.make,
                capabilities=self.capabilities,
                expected_failures=self.expected_failures,
                budget=self.budget,
                seed=self.seed,
                subject=f"{cls.__module__}:{cls.__qualname__}",
                every_failure=True,
            )
        return cls._report

    def check_invariant(self, id: str) -> None:
        """Raises AssertionError if it is broken, unittest.SkipTest (a skip for pytest too) if it is not checked or expected to fail."""
        report = self.report()
        if id in report.skipped:
            raise unittest.SkipTest(f"{id}: {report.skipped[id]}")
        for failure in report.expected:
            if failure.id == id:
                raise unittest.SkipTest(f"{id} is expected to fail: {failure.expected}")
        for failure in report.failures:
            if failure.id == id:
                raise AssertionError("\n" + failure.text())
        assert id not in report.held, f"{id} was expected to fail and held"
        assert report.evaluations[id], f"{id} was never evaluated"

    def test_behaves(self) -> None:
        """No call raises, hangs, or answers in another form than the contract says; nothing that is enabled never happened."""
        report = self.report()
        broken = [failure.text() for failure in report.failures if failure.id in MISBEHAVIOURS]
        assert not broken, "\n" + "\n".join(broken)
        assert not report.vacuous, report.vacuous


def _test_of(id: str, owner: str) -> Callable[[Conformance], None]:
    def test(self: Conformance) -> None:
        self.check_invariant(id)

    test.__name__ = f"test_{id.lower().replace('-', '_')}"
    test.__qualname__ = f"{owner}.{test.__name__}"
    test.__doc__ = invariant(id).sentence
    return test


class AllocatorConformance(Conformance):
    contract = "allocator"


class PrefixCacheConformance(Conformance):
    contract = "prefix-cache"


class RelayConformance(Conformance):
    contract = "relay"


class AcceptConformance(Conformance):
    contract = "accept"


class StepControllerConformance(Conformance):
    contract = "step-controller"


class EngineConformance(Conformance):
    contract = "engine"


class SimulatorConformance(Conformance):
    contract = "simulator"


def checker(contract: str) -> Callable[..., Report]:
    """Make the function that checks a component of this contract."""

    def check_one(
        make: Callable[[Any], Any],
        *,
        capabilities: Capabilities | Iterable[str] | None = None,
        expected_failures: Mapping[str, str] | None = None,
        budget: str | int | Budget | None = None,
        seed: int = 1,
        spec: str = SUITE_VERSION,
    ) -> Report:
        report = check(
            suite_of(contract),
            make,
            capabilities=capabilities,
            expected_failures=expected_failures,
            budget=budget,
            seed=seed,
            spec=spec,
        )
        if not report.ok:
            raise PropertiesBroken(report)
        return report

    check_one.__name__ = check_one.__qualname__ = f"check_{contract.replace('-', '_')}"
    check_one.__doc__ = f"""Check a component of the contract {contract} against every invariant that its capabilities enable.

    The arguments are those of `check`. Raises `PropertiesBroken` (an AssertionError, with the report) if anything fails.
    """
    return check_one


check_allocator = checker("allocator")
check_prefix_cache = checker("prefix-cache")
check_relay = checker("relay")
check_accept = checker("accept")
check_step_controller = checker("step-controller")
check_engine = checker("engine")
check_simulator = checker("simulator")
