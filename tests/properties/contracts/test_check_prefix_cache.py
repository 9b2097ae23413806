"""The prefix cache's suite: what it tells a foreign cache, and which handles are refused."""

import pytest
from foredraft.checks.adapters import prefix_store, radix_cache
from foredraft.properties.conformance import check, check_prefix_cache
from foredraft.properties.harness.operation import simpler
from foredraft.properties.prefix_cache import plain
from foredraft.properties.prefix_cache.contract import PrefixCacheConfig
from foredraft.properties.prefix_cache.model import HostUses
from foredraft.properties.prefix_cache.plain import EVERYTHING, PlainPrefixCache
from foredraft.properties.prefix_cache.texts import text_of
from foredraft.properties.prefix_cache.trial import PrefixCacheTrial as Do
from foredraft.properties.suites import suite_of

SUITE = suite_of("prefix-cache")


def test_a_cache_that_can_do_nothing_more_than_it_must_is_checked_too():
    report = check_prefix_cache(lambda config: PlainPrefixCache(config), capabilities=(), budget=8_000)
    of_groups = dict.fromkeys(("RADIX-17", "RADIX-18", "RADIX-19", "RADIX-20"), "needs groups")
    assert report.ok and report.skipped == {"RADIX-07": "needs inspection", "RADIX-11": "needs namespaces", **of_groups}
    assert min(count for id, count in report.evaluations.items()) > 20


def test_host_memory_must_have_what_was_handed_over_last():
    uses = HostUses(num_pages=3, page_size=2)
    first, second, third = (text_of((kind,), 0, space, 2, False) for kind, space in ((0, ""), (1, ""), (0, "other")))
    longer = text_of((0, 1, 1), 0, "", 2, False)
    for text in (first, second, third):
        uses.hand_over(text, 2)
    assert [uses.least(each) for each in (first, second, third, longer)] == [1, 1, 1, 1]
    uses.hand_over(longer, 6)  # it fills the memory
    assert [uses.least(each) for each in (first, second, third, longer)] == [1, 0, 0, 3]
    uses.hand_over(second, 2)  # a page of the longer one goes; all of its pages are as old as each other
    assert [uses.least(each) for each in (second, longer)] == [1, 0]


# -- what is found -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [radix_cache.make, plain.make])
def test_a_stale_handle_is_refused_also_when_its_text_is_back_elsewhere(make):
    history = [
        Do.insert((0,), 0, ""), Do.match("m", (0,), 0, ""), Do.evict(1), Do.insert((1,), 0, ""),
        Do.insert((0,), 0, ""), Do.lock("m"), Do.unlock_stray("m"),
    ]  # fmt: skip
    told = []
    SUITE.component(make).execute(
        PrefixCacheConfig(2), history, watch=lambda operation, trial: told.append(trial.last_report())
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


class TellsTheSlotBefore(PlainPrefixCache):
    def events(self):
        last = self.page_size - 1
        return [told._replace(parent=told.parent and told.parent + last) for told in super().events()]


class TellsNoEviction(PlainPrefixCache):
    def events(self):
        return [told for told in super().events() if told.is_stored]


class LosesCopies(prefix_store.PrefixStoreAdapter):
    def in_host(self, tokens, namespace):
        return super().in_host(tokens[:-1], namespace)


class KeepsAbsentCopies(prefix_store.PrefixStoreAdapter):
    def in_host(self, tokens, namespace):
        return self.host.num_held


@pytest.mark.parametrize(
    ("kind", "id", "words"),
    [
        (TellsTheSlotBefore, "RADIX-05", "which is none"),
        (TellsNoEviction, "RADIX-05", "are not, or hold another text"),
        (LosesCopies, "RADIX-05", "are among its latest pages"),
        (KeepsAbsentCopies, "RADIX-05", "host memory has"),
        (NoPair, "TYPE", "a handle and the slots"),
        (NoNumbers, "TYPE", "the copies of insert"),
        (NoNodes, "TYPE", "id, parent, locks, slots, children"),
        (Raises, "RAISES", "evict raised KeyError"),
        (RefusesToUnlock, "RAISES", "unlock was refused"),
    ],
)
def test_misbehaviour_is_reported_as_that(kind, id, words):
    report = check(SUITE, kind, capabilities=kind.capabilities, budget=5_000)
    (failure,) = report.failures
    assert failure.id == id and words in failure.text()


def test_a_capability_that_is_not_there_is_a_failure():
    report = check(SUITE, plain.make, capabilities=[*EVERYTHING.declared, "table"], budget=1_000)
    assert report.failures[0].id == "CAPABILITY" and "admit (table)" in report.failures[0].text()


# -- the other drivers -------------------------------------------------------------------------------------------------


def test_no_name_is_shortened_to_the_empty_one():
    """A namespace may be "", a name may not."""
    before = [Do.insert((0,), 0, ""), Do.match("m", (0,), 0, "")]
    candidates = list(simpler(Do.match("n", (0,), 0, "lora-1"), before))
    assert Do.match("m", (0,), 0, "lora-1") in candidates and Do.match("n", (0,), 0, "") in candidates
    assert not any(candidate.name == "" for candidate in candidates)
