"""Every planted defect is found, for the reason for which it must be, and shrunk to a history that can be read."""

import sys
from functools import cache

import pytest
from foredraft.checks.adapters import kv_allocator
from foredraft.checks.mutant import MAX_SHRUNK, Kill, Mutant, find, kill
from foredraft.checks.mutants.planting import Subclassed
from foredraft.checks.registry import contracts, mutants_of
from foredraft.properties.harness.invariants import of_contract


@pytest.fixture(autouse=True)
def impatient(request, monkeypatch):
    """Wait less for those that never return. The others get their time:
    on a busy machine an operation takes several times as long."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and "HANGS" in getattr(callspec.params.get("mutant"), "caught_by", ()):
        monkeypatch.setattr("foredraft.properties.harness.suite.RUN_LIMIT_S", 0.4)
        monkeypatch.setattr("foredraft.properties.harness.shrink.HANG_LIMIT_S", 0.04)


SHRUNK = "relay"
"""The contract whose mutants are all found, and shrunk, by the fast tests. Of the others `make check` finds one for
every invariant, of which the fast tests find those that are found soon; the nightly tests find all and shrink what
they find, which takes most of the time."""

RARE = {
    *("ServesOneMore", "LeavesOutTheQueue", "SeedsWithTheSize", "SharesAStreamOfFaults"),
    *("KnowsTheFuture", "DrawsByBlock", "ReservesForNoDraft", "SharesAStream", "ForgetsTheVerifyTokens"),
    *("ArrivesLikeAClock", "StampsTheBegin", "ReceivesManyAtOnce", "StopsNoBlock"),
    *("NeverAges", "NeedsLessAtOnce", "TakesWhatWasSent", "BelievesAnyAttempt"),
}
"""What only many thousands of operations show, or seconds of simulation: found at night; of the last four others break
the same invariants. What is planted in the simulator here, SIM-06, SIM-09 and SIM-17, has a test of its own beside it:
in tests/sim/, test_workload.py and test_simulation.py, and test_check_simulator.py."""


def of_one_worker(contract, value, *marks):
    """What is asked of a contract's mutants runs in one worker, which kills each of them once."""
    return pytest.param(value, marks=[pytest.mark.xdist_group(f"mutants of {contract}"), *marks])


def one_per_invariant(contract):
    caught = set()
    for mutant in mutants_of(contract):
        invariants = set(mutant.caught_by) - {"RAISES"}
        if mutant.name not in RARE and invariants - caught:
            caught.update(invariants)
            yield mutant


ALL = [
    of_one_worker(contract, mutant, *([] if contract == SHRUNK else [pytest.mark.slow]))
    for contract in contracts()
    for mutant in mutants_of(contract)
]
FEW = [mutant for contract in contracts() if contract != SHRUNK for mutant in one_per_invariant(contract)]
SEARCHED_LONG = (
    *("EvictsForEver", "WaitsForRoom", "BreaksTiesByHistory", "ProbesFromBelowNothing", "DraftsTheMost"),
    *("LaunchesBlockAfterBlock", "ForgetsReaders", "ReadsTheExpertsOfOneToken", "KeepsALargePool"),
    *("HasAClockPerReplica", "TakesAnotherWay", "DrawsPartsAnew", "NeverCountsDown", "NoticesEveryMean"),
    *("MovesToTheLaunchedChunk", "SwitchesWithTheBatch", "DraftsMoreTheLessIsAccepted", "KeepsTheStateItStartedFrom"),
    *("GoesOnInTheCachedState", "MasksTheStopByTheCap", "LetsOneMoreIn", "ForgetsTheOutputOnReturn"),
    *("ReservesForOneRound", "LetsEverythingIn", "FindsHalf", "QueuesTheRetractedLast", "KeepsItsCopies"),
    *("CapturesEverything", "StreamsWhatTheDeviceSays", "FreesWhenAllIsSent"),
)
"""What takes a large part of a second, or some, to be found."""


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, marks=pytest.mark.ci) if one.name in SEARCHED_LONG else one for one in FEW],
    ids=lambda mutant: f"{mutant.contract}-{mutant.name}",
)
def test_a_defect_is_found(mutant):
    found, num_operations = find(mutant)
    assert found is not None, f"{mutant.name} survived {num_operations} operations"
    assert {broken.id for broken in found.violation.broken}.intersection(mutant.caught_by)


@cache
def killed(mutant: Mutant) -> Kill:
    return kill(mutant)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: f"{mutant.contract}-{mutant.name}")
def test_a_mutant_is_killed(mutant):
    result = killed(mutant)
    assert result.is_killed, result.line()
    assert len(result.failure.case.operations) <= MAX_SHRUNK
    assert "killed by" in result.line() and mutant.defect in result.line()
    # The stored history is enough to see it again.
    again = result.failure.case.replay(mutant.make)
    assert again is not None and result.failure.id in {broken.id for broken in again.broken}


@pytest.mark.parametrize(
    "contract",
    [
        of_one_worker(contract, contract, *([] if contract == SHRUNK else [pytest.mark.slow]))
        for contract in contracts()
    ],
)
def test_every_invariant_is_broken_by_some_mutant(contract):
    broken = {id for mutant in mutants_of(contract) for id in killed(mutant).broken}
    assert broken >= {item.id for item in of_contract(contract)}


@pytest.mark.fast("step-controller", ci="*")
@pytest.mark.parametrize("contract", contracts())
def test_planted_defects_have_a_place_and_leave_nothing_behind(contract):
    for mutant in mutants_of(contract):
        if not isinstance(mutant.make, Subclassed):
            continue  # it is a component of its own
        places = [(sys.modules[names["__name__"]], name) for names, name, _ in mutant.make.places()]
        assert places or mutant.make.make in mutant.make.changed.values(), mutant.name
        before = [vars(owner).get(name) for owner, name in places]
        with mutant.make.planted():
            during = [vars(owner)[name] for owner, name in places]
        assert before == [vars(owner).get(name) for owner, name in places], mutant.name
        assert not any(good is changed for good, changed in zip(before, during, strict=True)), mutant.name


def test_a_survivor_is_called_one():
    harmless = Mutant("Harmless", "nothing is wrong with it", "allocator", kv_allocator.make, ("ALLOC-01",))
    result = kill(harmless, budget=2_000)
    assert not result.is_killed and "SURVIVED" in result.line()


def test_a_mutant_that_is_found_for_another_reason_does_not_count():
    mutant = next(m for m in mutants_of("allocator") if m.name == "SharesWithoutCounting")
    result = kill(Mutant(mutant.name, mutant.defect, "allocator", mutant.make, ("ALLOC-12",)))
    assert not result.is_killed and "NOT KILLED AS IT SHOULD" in result.line()
