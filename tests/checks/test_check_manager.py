"""The contract of block managers: what is asked of one that declares less, or does something otherwise by design."""

import pytest
from foredraft.properties.block_manager.contract import BlockManagerConfig
from foredraft.properties.block_manager.plain import PlainBlockManager
from foredraft.properties.conformance import PropertiesBroken, check_block_manager


def test_it_holds_without_a_cache():
    class Forgetful(PlainBlockManager):
        def lookup(self, tokens, namespace):
            return [[] for _ in self.windows]

    report = check_block_manager(Forgetful, capabilities=(), budget=4_000)
    assert report.skipped == {
        "BLOCKS-05": "needs caching",
        "BLOCKS-07": "needs misuse",
        "BLOCKS-08": "needs events",
        "BLOCKS-09": "needs lru",
    }


class DropsThePage(PlainBlockManager):
    """Computes the last page of a hit again."""

    def lookup(self, tokens, namespace):
        return [pages[:-1] for pages in super().lookup(tokens, namespace)]


def test_a_dropped_last_page_is_a_design_and_a_lost_one_is_still_found():
    check_block_manager(DropsThePage, capabilities=("caching", "namespaces", "drops_last_page"), budget=6_000)
    with pytest.raises(PropertiesBroken, match="BLOCKS-05"):
        check_block_manager(DropsThePage, capabilities=("caching", "namespaces"), budget=6_000)

    class DropsTwo(DropsThePage):
        def lookup(self, tokens, namespace):
            return [pages[:-1] for pages in super().lookup(tokens, namespace)]

    with pytest.raises(PropertiesBroken, match="BLOCKS-05"):
        check_block_manager(DropsTwo, capabilities=("caching", "namespaces", "drops_last_page"), budget=6_000)


def test_a_window_is_not_negative():
    with pytest.raises(AssertionError):
        BlockManagerConfig(2, windows=(-1,))


def test_a_manager_may_evict_for_a_request_that_it_refuses():
    class Forgets(PlainBlockManager):
        def admit(self, request, tokens, namespace, num_tokens):
            length = super().admit(request, tokens, namespace, num_tokens)
            for page in self.free if length is None else ():
                self.uncache(page)
            return length

    check_block_manager(Forgets, capabilities=("caching", "evicts_when_refused"), budget=4_000)
    with pytest.raises(PropertiesBroken, match="BLOCKS-05"):
        check_block_manager(Forgets, capabilities=("caching",), budget=4_000)


def test_a_manager_may_give_a_request_the_page_that_is_cached_meanwhile():
    class Rewrites(PlainBlockManager):
        def cache(self, page, group, tokens, namespace, end):
            key = self.key(group, tokens, namespace, end)
            known = next((other for other, text in self.keys.items() if text == key), None)
            if known is None:
                super().cache(page, group, tokens, namespace, end)
                return
            pages = next(tables[group] for tables in self.tables.values() if page in tables[group])
            self.hold(known)
            pages[pages.index(page)] = known
            self.give_back(page)

    check_block_manager(Rewrites, capabilities=("caching", "rewrites_shared"), budget=6_000)
    with pytest.raises(PropertiesBroken, match="BLOCKS-03"):
        check_block_manager(Rewrites, capabilities=("caching",), budget=6_000)
