"""Hypothesis strategies: configurations, operations and histories of a contract, for tests of other people's own."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .contracts import Capabilities
from .operations import Operation
from .suites import suite_of
from .vocabulary import Letter


def configs(contract: str, capabilities: Capabilities) -> st.SearchStrategy[Any]:
    """Small configurations, as the swarm draws them."""
    suite = suite_of(contract)
    return st.integers(0, 2**32 - 1).map(lambda bits: suite.draw_config(bits, capabilities))


def operations(contract: str, config: Any, capabilities: Capabilities) -> st.SearchStrategy[Operation]:
    """Any operation that makes sense for these capabilities, hostile ones included."""
    spoken = suite_of(contract).vocabulary(config, capabilities)
    return st.one_of([_of(letter) for letters in spoken.values() for letter in letters])


def _of(letter: Letter) -> st.SearchStrategy[Operation]:
    values = [st.sampled_from(tuple(dict.fromkeys(values))) for values in letter.arguments]
    return st.builds(letter.kind, *values)


@st.composite
def histories(draw: Any, contract: str, capabilities: Capabilities, max_size: int = 30) -> tuple[Any, list[Operation]]:
    """A configuration and a sequence of operations for it."""
    config = draw(configs(contract, capabilities))
    return config, draw(st.lists(operations(contract, config, capabilities), max_size=max_size))
