"""The prefix cache's suite on our own caches, what its operations reach, and what the suite tells a foreign cache."""

import pytest
from foretoken.checks.adapters import prefix_store, radix_cache
from foretoken.checks.registry import SUBJECTS, mutants_of
from foretoken.core.errors import ConfigError
from foretoken.properties.conformance import check, check_prefix_cache
from foretoken.properties.harness.exhaustive import Scope, explore
from foretoken.properties.harness.importing import load_make
from foretoken.properties.harness.letters import Choices
from foretoken.properties.harness.mutants import kill
from foretoken.properties.harness.operation import simpler
from foretoken.properties.harness.swarm import Swarm
from foretoken.properties.invariants import of_contract
from foretoken.properties.prefix_cache import plain
from foretoken.properties.prefix_cache.contract import PrefixCacheConfig
from foretoken.properties.prefix_cache.model import PrefixCacheModel
from foretoken.properties.prefix_cache.plain import EVERYTHING, PlainPrefixCache
from foretoken.properties.prefix_cache.texts import HUGE_TOKEN, LARGE_TOKEN, page_of, text_of
from foretoken.properties.prefix_cache.trial import PrefixCacheTrial as Do
from foretoken.properties.suites import suite_of

SUITE = suite_of("prefix-cache")
OURS = [f"RADIX-{number:02}" for number in (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 14, 15)]


@pytest.mark.parametrize("name", SUBJECTS["prefix-cache"])
def test_ours_hold(name):
    report = check(SUITE, load_make(name), budget=6_000)
    assert report.ok, report.text()
    assert report.num_operations >= 6_000 and min(report.evaluations.values()) > 20
    assert list(report.evaluations) == OURS == [item.id for item in of_contract("prefix-cache")]


def test_a_cache_that_can_do_nothing_more_than_it_must_is_checked_too():
    report = check_prefix_cache(lambda config: PlainPrefixCache(config), capabilities=(), budget=8_000)
    assert report.ok and report.skipped == {"RADIX-07": "needs inspection", "RADIX-11": "needs namespaces"}
    assert min(count for id, count in report.evaluations.items()) > 20


def test_capabilities_have_foundations():
    with pytest.raises(ConfigError, match="needs the capability lru"):
        check_prefix_cache(PlainPrefixCache, capabilities=("policies",))
    with pytest.raises(ConfigError, match="needs the capability inspection"):
        check_prefix_cache(PlainPrefixCache, capabilities=("table",))


# -- what is asked --------------------------------------------------------------------------------------------------------


def test_runs_reach_the_edges():
    swarm = Swarm(SUITE, plain.make, EVERYTHING, seed=1)
    configs, asked = [], set()
    for run in range(300):
        config, operations = swarm.drawn(run)
        configs.append(config)
        asked |= {(type(op), getattr(op, "extra", None)) for op in operations}
    assert {config.page_size for config in configs} == {1, 2, 3, 4, 8, 16}
    assert {config.policy for config in configs} == {"lru", "fifo", "lfu"}
    assert {config.bigram for config in configs} == {True, False}
    assert {config.hash_values for config in configs} == {0, 1, 2}, "colliding hashes, and a cache's own"
    assert {(Do.match, -1), (Do.match, 0), (Do.match, 1), (Do.insert, 15), (Do.unlock_stray, None)} <= asked
    others = SUITE.enabled(prefix_store.make.capabilities)
    assert Do.complete in others and Do.insert not in others


def test_the_simplest_configuration_is_a_small_pool():
    assert SUITE.configure(Choices(), EVERYTHING) == PrefixCacheConfig(2)
    with pytest.raises(AssertionError):
        PrefixCacheConfig(1, policy="mru")


def test_kinds_of_pages_differ_where_defects_hide():
    pages = [page_of(kind, 4) for kind in range(5)]
    assert len(set(pages)) == 5 and {len(page) for page in pages} == {4}
    assert pages[0][:3] == pages[1][:3] and pages[0][1:] == pages[2][1:]
    assert LARGE_TOKEN & 0xFFFF == 1 and [token & 0xFFFF for token in pages[3]] == list(pages[0])
    assert HUGE_TOKEN & 0x7FFFFFFF == 1 and [token & 0x7FFFFFFF for token in pages[4]] == list(pages[0])
    assert len({page_of(kind, 1) for kind in range(5)}) == 5


def test_cells_are_equal_where_prefixes_are():
    text, longer = text_of((0, 1), 0, "", 2, False), text_of((0, 1), 3, "", 2, False)
    assert longer.cells[:4] == text.cells and longer.tokens[:4] == text.tokens and len(longer.tokens) == 7
    other, apart = text_of((2, 1), 0, "", 2, False), text_of((0, 1), 0, "x", 2, False)
    assert not set(text.cells) & set(other.cells) and not set(text.cells) & set(apart.cells)
    assert len(text_of((0, 1), 0, "", 2, True).cells) == 3 and len(text_of((0,), -1, "", 1, True).cells) == 0
    # A bigram's cell depends on the token behind it.
    assert text_of((0, 0), 0, "", 1, True).cells != text_of((0, 1), 0, "", 1, True).cells


def test_the_model_evicts_by_its_policy():
    def filled(policy):
        model = PrefixCacheModel(1, policy)
        for page, kind in enumerate((0, 1, 2), 1):
            text = text_of((kind,), 0, "", 1, False)
            model.use((), hit=False)
            model.add(text, (), [page])
        for kind in (1, 0, 0):
            model.use(model.path_of(text_of((kind,), 0, "", 1, False)), hit=True)
        return model

    assert filled("lru").evicted_next(3) == [3, 2, 1]
    assert filled("fifo").evicted_next(3) == [1, 2, 3]
    assert filled("lfu").evicted_next(2) == [3, 2]
    model = filled("lru")
    model.add(text_of((2, 0), 0, "", 1, False), model.path_of(text_of((2,), 0, "", 1, False)), [4])
    assert model.evicted_next(9) == [2, 1, 4, 3], "a leaf goes before what it hangs below"
    model.remove([2])
    assert len(model.tree) == 3 and len(model.ever_evicted) == 1


def test_what_makes_no_sense_is_left_out():
    senseless = [
        Do.lock("m"), Do.unlock("m"), Do.unlock_stray("m"), Do.share("r1", 1), Do.finish("r1"), Do.abort("r1"),
        Do.insert((0, 0, 0), 0, ""), Do.admit("r1", (), 0, ""),
    ]  # fmt: skip
    invariants = SUITE.invariants(EVERYTHING)
    trial = SUITE.execute(plain.make, PrefixCacheConfig(2), EVERYTHING, invariants, senseless, drain=False)
    assert trial.num_operations == 0


# -- what is found --------------------------------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_leaves_no_lock():
    """Its prefix is cached and locked for it; the rest does not fit; then all of it can be evicted."""
    history = [Do.insert((0,), 0, ""), Do.admit("r1", (1, 1, 1), 0, ""), Do.admit("r2", (0, 0), 0, ""), Do.evict(1)]
    invariants = SUITE.invariants(EVERYTHING)
    trial = SUITE.execute(plain.make, PrefixCacheConfig(4), EVERYTHING, invariants, history)
    assert trial.trace[3] == Do.evict(1) and not trial.model.tree


@pytest.mark.parametrize("make", [radix_cache.make, plain.make])
def test_a_stale_handle_is_refused_also_when_its_text_is_back_elsewhere(make):
    history = [
        Do.insert((0,), 0, ""), Do.match("m", (0,), 0, ""), Do.evict(1), Do.insert((1,), 0, ""),
        Do.insert((0,), 0, ""), Do.lock("m"), Do.unlock_stray("m"),
    ]  # fmt: skip
    told = []
    capabilities = make.capabilities
    SUITE.execute(
        make,
        PrefixCacheConfig(2),
        capabilities,
        SUITE.invariants(capabilities),
        history,
        watch=lambda operation, trial: told.append(trial.told()),
    )
    assert ["refused" in what for what in told] == [False] * 5 + [True, True]


class NoPair(PlainPrefixCache):
    def match(self, tokens, namespace):
        return super().match(tokens, namespace)[1]


class NoNumbers(PlainPrefixCache):
    def insert(self, tokens, slots, namespace):
        return *super().insert(tokens, slots, namespace)[:2], "none"


class NoNodes(PlainPrefixCache):
    def nodes(self):
        return [(0, -1, 0, [])]


class Raises(PlainPrefixCache):
    def evict(self, num_slots):
        raise KeyError(num_slots)


class RefusesToUnlock(PlainPrefixCache):
    def unlock(self, path):
        return False


@pytest.mark.parametrize(
    ("kind", "id", "words"),
    [
        (NoPair, "TYPE", "a handle and the slots"),
        (NoNumbers, "TYPE", "the copies of insert"),
        (NoNodes, "TYPE", "id, parent, locks, slots, children"),
        (Raises, "RAISES", "evict raised KeyError"),
        (RefusesToUnlock, "RAISES", "unlock was refused"),
    ],
)
def test_misbehaviour_is_reported_as_that(kind, id, words):
    report = check(SUITE, kind, capabilities=EVERYTHING, budget=5_000)
    (failure,) = report.failures
    assert failure.id == id and words in failure.text()


class LocksTheParentOnce(radix_cache.RadixCacheAdapter):
    """Of two locks on different children of a node, the node shows one."""

    def nodes(self):
        found = super().nodes()
        below = [sum(node[2] for node in found if node[1] == other[0]) for other in found]
        return [
            (id, parent, locks - 1 if locks == under > 1 and parent >= 0 else locks, slots, children)
            for (id, parent, locks, slots, children), under in zip(found, below, strict=True)
        ]


def test_a_node_has_the_locks_of_all_its_children():
    report = check(
        suite_of("prefix-cache"), LocksTheParentOnce, capabilities=radix_cache.make.capabilities, budget=8_000
    )
    (failure,) = report.failures
    assert "RADIX-02" in (failure.id, *failure.also), failure.text()


def test_a_capability_that_is_not_there_is_a_failure():
    report = check(SUITE, plain.make, capabilities=[*EVERYTHING.declared, "table"], budget=1_000)
    assert report.failures[0].id == "CAPABILITY" and "admit (table)" in report.failures[0].text()


def test_equal_failures_have_equal_cases():
    mutant = next(m for m in mutants_of("prefix-cache") if m.name == "LeavesTheTableAlone")
    first, second = (kill(mutant).failure for _ in range(2))
    assert first.case.to_json() == second.case.to_json()
    assert {op.tag for op in first.case.operations} >= {"admit", "share"}


# -- the other drivers ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", [radix_cache.make, plain.make])
def test_nothing_breaks_within_the_scope(make):
    coverage = explore("prefix-cache", make, scope=Scope(2, 2, 4))
    assert coverage.failure is None and coverage.complete and coverage.num_states > 150


def test_what_is_broken_breaks_within_the_scope():
    mutant = next(m for m in mutants_of("prefix-cache") if m.name == "SplitsWithoutTheLock")
    coverage = explore("prefix-cache", mutant.make, scope=Scope(2, 1, 3))
    assert coverage.failure is not None and len(coverage.failure.case.operations) <= 3


def test_no_name_is_shortened_to_the_empty_one():
    """A namespace may be "", a name may not."""
    before = [Do.insert((0,), 0, ""), Do.match("m", (0,), 0, "")]
    candidates = list(simpler(Do.match("n", (0,), 0, "lora-1"), before))
    assert Do.match("m", (0,), 0, "lora-1") in candidates and Do.match("n", (0,), 0, "") in candidates
    assert not any(candidate.name == "" for candidate in candidates)
