"""Errors say what is wrong, and survive being copied as SimPy copies what a process raises."""

import pytest
import simpy
from foredraft.core.errors import MAX_SHOWN, ConfigError, InvariantViolation, Problem, count_of, nearest, shown

ERRORS = [
    ConfigError("a.toml", [Problem("x.y", "is wrong"), Problem("", "is worse")]),
    InvariantViolation("ALLOC-10", "freed twice"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_out_of_a_process_as_it_is(error):
    def process(env):
        yield env.timeout(1)
        raise error

    env = simpy.Environment()
    env.process(process(env))
    with pytest.raises(type(error)) as seen:
        env.run()
    assert str(seen.value) == str(error)


def test_all_problems_are_named():
    assert str(ERRORS[0]) == "a.toml: x.y: is wrong\na.toml: is worse"
    assert ERRORS[1].invariant == "ALLOC-10"


def test_the_nearest_word_is_suggested():
    assert nearest("page_sise", ["page_size", "mode"]) == " (did you mean 'page_size'?)"
    assert nearest("zzz", ["page_size", "mode"]) == ""


def test_a_number_has_its_noun_in_singular_or_plural():
    assert [count_of(number, "row") for number in (0, 1, 1585)] == ["0 rows", "1 row", "1,585 rows"]


def test_a_long_value_is_cut_off_in_a_message():
    assert shown("ab") == "'ab'" and shown(12) == "12"
    long = shown(10**4000)
    assert len(long) == MAX_SHOWN and long.startswith("1000") and long.endswith("…")
