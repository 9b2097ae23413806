"""The contract of block managers, also behind an adapter of vLLM's shape as docs/contracts.md has it."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from foredraft.checks.conformance import check_block_manager
from foredraft.checks.manager.contract import ManagerCapabilities
from foredraft.checks.manager.plain import PlainManager
from foredraft.properties.conformance import PropertiesBroken

TEXT = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text(encoding="utf-8")


class Request:
    """A request as vLLM's engine has it, as far as the adapter uses it."""

    def __init__(self, name, tokens, namespace):
        self.name, self.tokens, self.namespace = name, list(tokens), namespace
        self.num_computed_tokens = 0

    @property
    def num_tokens(self):
        return len(self.tokens)

    def append_output_token_ids(self, tokens):
        self.tokens += tokens


class Shaped:
    """The plain manager with the methods of vLLM's `KVCacheManager`."""

    def __init__(self, config):
        self.plain = PlainManager(config)
        self.block_pool = SimpleNamespace(get_num_free_blocks=self.plain.num_free)

    def get_computed_blocks(self, request):
        pages = self.plain.lookup(request.tokens, request.namespace)
        return pages, len(pages) * self.plain.size, 0

    def allocate_slots(self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None):
        if request.name in self.plain.tables:
            return [] if self.plain.grow(request.name, request.tokens, num_new_tokens) else None
        found = self.plain.admit(request.name, request.tokens, request.namespace, num_new_tokens)
        return None if found is None else []

    def free(self, request):
        self.plain.release(request.name)

    def get_block_ids(self, name):
        return (self.plain.tables[name],)


@pytest.fixture
def adapter():
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "get_computed_blocks" in block]
    names = {}
    exec(compile(code, "docs/contracts.md", "exec"), names)
    return names["Adapter"]


def test_it_holds_without_a_cache():
    class Forgetful(PlainManager):
        def lookup(self, tokens, namespace):
            return []

    report = check_block_manager(Forgetful, capabilities=(), budget=4_000)
    assert report.skipped == {"BLOCKS-05": "needs caching", "BLOCKS-07": "needs misuse"}


def test_the_adapter_of_the_docs_drives_a_manager_of_that_shape(adapter):
    capabilities = ManagerCapabilities(caching=True, namespaces=True)
    report = check_block_manager(
        lambda config: adapter(Shaped(config), Request, config.page_size), capabilities=capabilities, budget=8_000
    )
    assert report.ok and report.executed["grow"] > 500


def test_and_finds_a_defect_behind_it(adapter):
    class OneNamespace(Shaped):
        def get_computed_blocks(self, request):
            request.namespace = ""
            return super().get_computed_blocks(request)

    with pytest.raises(PropertiesBroken, match="BLOCKS-01"):
        check_block_manager(
            lambda config: adapter(OneNamespace(config), Request, config.page_size),
            capabilities=("caching", "namespaces"),
            budget=8_000,
        )
