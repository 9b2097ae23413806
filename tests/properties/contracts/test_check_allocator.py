"""The allocator's suite on foreign allocators, and what its arguments mean."""

import re
import subprocess
import sys
from copy import copy
from pathlib import Path
from unittest import SkipTest

import hostile_driver
import pytest
from bad_allocators import Exact, ListAllocator, NegativeSlice
from foredraft.checks.adapters import kv_allocator
from foredraft.core.errors import ConfigError
from foredraft.properties.allocator import plain
from foredraft.properties.allocator.contract import AllocatorCapabilities, AllocatorConfig
from foredraft.properties.conformance import AllocatorConformance, check, check_allocator
from foredraft.properties.executor import reference as reference_executor
from foredraft.properties.harness.invariants import BY_THE_MATRIX, all_invariants
from foredraft.properties.harness.report import PropertiesBroken
from foredraft.properties.harness.swarm import Budget
from foredraft.properties.suites import suite_of

ALLOCATOR = suite_of("allocator")


def test_holds_of_a_foreign_allocator():
    report = check_allocator(ListAllocator, budget=20_000)
    assert report.ok and report.capabilities == ("misuse",)
    assert "ALLOC-02" in report.skipped and report.skipped["ALLOC-07"] == "needs table"
    assert set(report.skipped) | {id for id, count in report.evaluations.items() if count} == {
        f"ALLOC-{number:02}" for number in range(1, 20)
    }


def test_the_pool_of_the_documentation_holds_and_is_found_wrong_once_it_is():
    page = (Path(__file__).parents[3] / "docs" / "contracts.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Pool:" in block]
    declared, names = ("paged", "sharing", "inspection"), {}
    exec(code, names)
    assert names["CAPABILITIES"] == declared and check_allocator(names["Pool"], capabilities=declared, budget=10_000).ok
    exec(code.replace("if self.holders[page] == 0:", "if True:"), names)
    with pytest.raises(PropertiesBroken, match="3 after shrinking") as caught:
        check_allocator(names["Pool"], capabilities=declared, budget=10_000)
    assert [failure.id for failure in caught.value.report.failures] == ["ALLOC-03"]


def test_what_a_good_one_never_does_is_exercised_all_the_same():
    """The clauses of a free page with an owner are judged where no page has one."""
    declared = ("paged", "padding_page", "sharing", "inspection")
    report = check(ALLOCATOR, plain.make, capabilities=declared, budget=20_000)
    assert report.ok and not report.unexercised, report.text()


def test_an_expected_failure_that_is_not_checked_is_reported_by_itself():
    with pytest.raises(PropertiesBroken, match="ALLOC-10: expected to fail, but it is not checked: needs misuse"):
        check_allocator(ListAllocator, capabilities=(), expected_failures={"ALLOC-10": "frees anything"}, budget=5_000)


def test_a_failure_is_raised_with_its_story():
    with pytest.raises(PropertiesBroken, match="ALLOC-16") as caught:
        check_allocator(NegativeSlice, budget=20_000, seed=3)
    (failure,) = caught.value.report.failures
    text = str(caught.value)
    assert failure.id in ("ALLOC-08", "ALLOC-16") and len(failure.case.operations) == 1
    assert failure.sentence in text and "seed 3" in text and "1 after shrinking" in text
    assert "1. alloc " in text and failure.finding.was in text and failure.finding.should in text


def test_equal_seeds_are_equal_and_others_are_not():
    runs = [check(ALLOCATOR, kv_allocator.make, budget=5_000, seed=seed).to_json() for seed in (5, 5, 6)]
    for run in runs:
        del run["seconds"], run["seed"]
    assert runs[0] == runs[1] != runs[2]


def test_a_run_that_proves_nothing_fails():
    """Thirty operations evaluate no run's-end invariant twice and never reach most operations."""
    report = check(ALLOCATOR, plain.make, budget=30)
    assert not report.ok and any("never" in what for what in report.vacuous)
    assert "vacuous: the operation" in report.text()


def test_an_optional_part_that_no_run_uses_makes_it_vacuous():
    """Parts that only the component sees are declared beside its capabilities."""

    class HasASpareList(ListAllocator):
        parts = ("a spare list",)

    class UsesIt(HasASpareList):
        @property
        def used_parts(self):
            return {"a spare list": 2, "another": 1}

    report = check(ALLOCATOR, HasASpareList, budget=10_000)
    assert report.vacuous == ("never used: a spare list",) and not report.ok
    left_out = check(ALLOCATOR, HasASpareList, budget=10_000, without=["free"])
    assert left_out.ok and "never used: a spare list" in left_out.text()
    report = check(ALLOCATOR, UsesIt, budget=10_000)
    assert report.ok and report.to_json()["parts"] == {"a spare list": 2 * report.num_runs}


def test_expected_failures_are_reported_and_no_error():
    known = {"ALLOC-14": "the whole pool at once is refused"}
    report = check_allocator(Exact, budget=20_000, expected_failures=known)
    assert [failure.id for failure in report.expected] == ["ALLOC-14"]
    assert report.num_operations >= 20_000, "the search goes on behind it"
    assert known["ALLOC-14"] in report.text() and "held: ALLOC-01" in report.text()


def test_an_expected_failure_that_holds_is_an_error():
    with pytest.raises(PropertiesBroken, match="ALLOC-09 was expected to fail and held"):
        check_allocator(ListAllocator, budget=5_000, expected_failures={"ALLOC-09": "no reason"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"expected_failures": {"ALLOC-1": "x"}}, "ALLOC-1"),
        ({"expected_failures": {"RADIX-01": "x"}}, "RADIX-01"),
        ({"capabilities": ["page"]}, "did you mean 'paged'"),
        ({"capabilities": ["deferred_close"]}, "needs the capability table"),
        ({"budget": "soon"}, "60s"),
        ({"budget": "0"}, "0"),
        ({"budget": "1.5"}, "1.5"),
        ({"spec": "2020.1"}, "2020.1"),
    ],
)
def test_impossible_arguments_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        check_allocator(ListAllocator, **arguments)


def test_budgets():
    assert Budget.of("2m") == Budget(seconds=120, is_extended=True) and Budget.of("0.5s").seconds == 0.5
    assert Budget.of("200_000") == Budget.of(200_000) == Budget(operations=200_000)
    report = check(ALLOCATOR, kv_allocator.make, budget="0.3s")
    assert report.seconds >= 0.3 and report.num_operations > 0


def test_a_time_that_is_too_short_is_stretched_until_everything_has_happened():
    report = check(ALLOCATOR, plain.make, budget="0.000001s")
    assert report.ok and all(report.evaluations.values()) and all(report.executed.values())
    assert report.num_operations < ALLOCATOR.quick, "and no longer"


def test_what_never_happens_ends_at_the_quick_budget():
    suite = copy(ALLOCATOR)
    suite.quick = 300
    report = check(suite, plain.make, budget="0.000001s")
    assert report.vacuous and 300 <= report.num_operations < 700


def test_unknown_contracts():
    with pytest.raises(ConfigError, match="did you mean 'allocator'"):
        suite_of("alocator")


def test_the_import_needs_no_test_library():
    code = (
        "import sys\n"
        "for name in ('pytest', 'hypothesis', 'torch', 'transformers'): sys.modules[name] = None\n"
        "from foredraft.properties.conformance import AllocatorConformance, check_allocator\n"
        "from foredraft.checks.registry import mutants_of\n"
        "from foredraft.checks.adapters.kv_allocator import make\n"
        "print(check_allocator(make, budget=4000).ok, len(mutants_of('allocator')) > 16)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


# -- the catalogue ----------------------------------------------------------------------------------------------------


def test_the_catalogue_is_whole():
    items = all_invariants()
    assert len(items) == len({item.id for item in items})
    counts = {}
    for item in items:
        group, number = item.id.split("-")
        counts.setdefault(group, []).append(int(number))
        assert item.sentence and callable(item.check) and set(item.when.replace(",", "")) <= set("ESTIRM")
    assert all(sorted(numbers) == list(range(1, len(numbers) + 1)) for numbers in counts.values()), counts


def test_how_an_invariant_is_checked_is_said_honestly():
    """What is said of the matrix is what its files raise."""
    folder, reference = (Path(module.__file__).parent for module in (hostile_driver, reference_executor))
    files = [folder / "hostile_driver.py", folder / "serving_matrix.py", *reference.glob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert set(re.findall(r'InvariantViolation\(\s*"([A-Z]+-\d+)"', text)) == BY_THE_MATRIX


# -- one test per invariant --------------------------------------------------------------------------------------------


class Bad(AllocatorConformance):
    capabilities = AllocatorCapabilities(misuse=True)
    budget = 8_000

    def make(self, config):
        return Exact(config)


def test_a_broken_one_fails_in_its_own_test_alone():
    tests = Bad()
    with pytest.raises(AssertionError, match=r"can_allocate|refused"):
        tests.test_alloc_14()
    with pytest.raises(SkipTest, match="needs sharing"):
        tests.test_alloc_04()
    tests.test_alloc_01()
    tests.test_alloc_10()
    tests.test_behaves()
    assert tests.report() is Bad().report(), "one search per class"


def test_a_class_that_makes_nothing_says_so():
    with pytest.raises(NotImplementedError, match="AllocatorConformance"):
        AllocatorConformance().make(AllocatorConfig(1))
