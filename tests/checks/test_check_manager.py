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
