"""From a long failure to a short case, to a file, and back."""

import json
from pathlib import Path

import pytest
from bad_allocators import CannotBeMade, Exact, ListAllocator
from foredraft.checks.mutant import kill
from foredraft.checks.registry import mutants_of
from foredraft.core.errors import ConfigError
from foredraft.properties.allocator.contract import AllocatorConfig
from foredraft.properties.allocator.trial import AllocatorTrial as ops
from foredraft.properties.conformance import check
from foredraft.properties.harness.cases import load_case, parse_case
from foredraft.properties.harness.contract import SUITE_VERSION
from foredraft.properties.harness.importing import load_make
from foredraft.properties.harness.operation import decode, simpler
from foredraft.properties.harness.trial import Violation
from foredraft.properties.suites import suite_of

ALLOCATOR = suite_of("allocator")

CASES = sorted((Path(__file__).parents[1] / "support" / "cases").rglob("*.json"))


class FailsAtTheThird(ListAllocator):
    """A free after at least three allocations of one page each loses a page: nothing shorter shows it."""

    def __init__(self, config):
        super().__init__(config)
        self.ones = 0

    def alloc(self, n):
        self.ones += n == 1
        return super().alloc(n)

    def free(self, slots):
        super().free(slots)
        if self.ones >= 3:
            self.pages.pop()


def test_a_failure_is_shrunk_to_what_it_needs():
    report = check(ALLOCATOR, FailsAtTheThird, budget=20_000)
    (failure,) = report.failures
    assert failure.operations_before > 50
    operations = failure.case.operations
    tags = [operation.tag for operation in operations]
    assert tags.count("alloc") == 3 and set(tags) == {"alloc", "free"} and len(tags) <= 5
    assert all(operation.num_slots == 1 for operation in operations if operation.tag == "alloc")
    assert len(failure.history) == len(tags) and failure.ends_in == f"operation {len(tags)}"


def test_what_is_left_cannot_be_shortened():
    report = check(ALLOCATOR, FailsAtTheThird, budget=20_000)
    case = report.failures[0].case
    for at in range(len(case.operations)):
        shorter = case.operations[:at] + case.operations[at + 1 :]
        ALLOCATOR.component(FailsAtTheThird).execute(case.config, shorter, drain=False)


def test_a_failure_that_only_draining_shows_says_so():
    mutant = next(mutant for mutant in mutants_of("allocator") if mutant.name == "KeepsOneCached")
    failure = kill(mutant).failure
    assert failure.id == "ALLOC-15" and failure.case.drain
    assert "the end, when all is given back" in failure.text() and len(failure.history) == len(failure.case.operations)
    others = [m for m in mutants_of("allocator") if m.name in ("LosesTheLastPage", "SharesWithoutCounting")]
    assert not any(kill(mutant).failure.case.drain for mutant in others), "draining is left out where it is not needed"


def test_equal_failures_have_equal_cases():
    cases = [check(ALLOCATOR, Exact, budget=20_000).failures[0].case.to_json() for _ in range(2)]
    assert json.dumps(cases[0]) == json.dumps(cases[1])


# -- operations as data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], 'the key "op"'),
        ({"op": "aloc", "holder": "a", "num_slots": 1}, "did you mean 'alloc'"),
        ({"op": "alloc", "holder": "a"}, "num_slots: missing"),
        ({"op": "alloc", "holder": "a", "num_slots": True}, "True is not of type int"),
        ({"op": "alloc", "holder": "a", "num_slots": 1, "n": 1}, "n: unknown"),
        ({"op": "free-stray", "pages": [1, "2"]}, "a list of integers"),
    ],
)
def test_damaged_operations_are_refused_with_their_place(data, words):
    with pytest.raises(ConfigError, match=r"case.json: operations\[4\]") as caught:
        decode(ALLOCATOR.operations, data, "case.json", "operations[4]")
    assert words in str(caught.value)


def test_simpler_operations_are_simpler_and_end():
    def weight(operation):
        return sum(abs(v) * 2 + (v < 0) for v in [getattr(operation, "num_slots", 0)])

    operation, seen = ops.alloc("c", -9), 0
    while (candidate := next(iter(simpler(operation, [ops.alloc("a", 1)])), None)) is not None:
        assert weight(candidate) < weight(operation) or candidate.holder < operation.holder
        operation, seen = candidate, seen + 1
        assert seen < 50
    assert operation == ops.alloc("a", 0)
    assert ops.free_stray((3,)) in set(simpler(ops.free_stray((3, 5)), []))


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def case_file(tmp_path):
    path = tmp_path / "deep" / "case.json"
    check(ALLOCATOR, Exact, budget=20_000, subject="bad_allocators:Exact").failures[0].case.save(path)
    return path


def test_a_case_comes_back_from_its_file(case_file):
    case = load_case(case_file, suite_of)
    written = json.loads(json.dumps(case.to_json()))
    assert written == json.loads(case_file.read_text()) and written["suite"] == SUITE_VERSION
    violation = case.replay(load_make(case.subject))
    assert violation.id == case.invariant == "ALLOC-14"
    assert case.replay(ListAllocator) is None, "a mended allocator passes it"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda text: "[1, 2]", "this is no case"),
        (lambda text: text.replace(SUITE_VERSION, "1999.1"), "made with suite '1999.1'"),
        (lambda text: text.replace('"config"', '"confg"'), "config: missing"),
        (lambda text: text.replace('"seed": 1', '"seed": "1"'), "seed: '1' is not of type int"),
        (lambda text: text.replace("ALLOC-14", "ALLOC-99"), "'ALLOC-99' is none"),
        (lambda text: text.replace("ALLOC-14", "RADIX-01"), "'RADIX-01' is none of allocator's"),
        (lambda text: text.replace('"contract": "allocator"', '"contract": "rely"'), "there is no contract 'rely'"),
        (lambda text: text.replace('"page_size": 1', '"page_size": 0'), "impossible"),
        (lambda text: text.replace('"op": "alloc"', '"op": "allok"'), "operations[0].op"),
        (lambda text: text.replace('"misuse"', '"x"'), "no such capability"),
        (lambda text: text + " " * 1_000_001, "more than 1,000,000 bytes"),
    ],
)
def test_a_damaged_case_says_so(case_file, damage, words):
    text = damage(case_file.read_text())
    assert text != case_file.read_text()
    case_file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_case(case_file, suite_of)
    assert words in str(caught.value) and str(case_file) in str(caught.value)


def test_a_case_whose_subject_cannot_be_made_ends_at_the_start(case_file):
    story = load_case(case_file, suite_of).tell(CannotBeMade)
    assert story.violation.id == "RAISES" and story.ends_in == "the start" and story.history == ()


def test_a_case_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_case(tmp_path / "none.json", suite_of)
    with pytest.raises(ConfigError, match="no case"):
        parse_case(None, "nothing", suite_of)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_stored_cases_pass(path):
    """Histories that once broke something, or a mutant of it, hold for what is there now."""
    case = load_case(path, suite_of)
    violation = case.replay(load_make(case.subject))
    assert violation is None, str(violation)


# -- the model and the shadow memory -----------------------------------------------------------------------------------


def test_a_violation_names_itself():
    with pytest.raises(Violation, match=r"ALLOC-14 at alloc holder=a, num_slots=2: .*expected: ") as caught:
        ALLOCATOR.component(Exact).execute(AllocatorConfig(2), [ops.alloc("a", 2)])
    assert caught.value.trial.trace == [ops.alloc("a", 2)]
