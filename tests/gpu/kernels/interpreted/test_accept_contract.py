"""The Triton kernels of trees, verdicts, compaction and moves behind the acceptance contract, in a short swarm."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import pytest
from foretoken.checks.adapters.torch_accept import DeviceAccept
from foretoken.checks.adapters.torch_accept import make as make_twins
from foretoken.gpu.ops.triton_ops import TritonOps
from foretoken.properties.accept.trial import AcceptTrial
from foretoken.properties.harness.cases import load_case
from foretoken.properties.harness.swarm import Budget, Swarm
from foretoken.properties.harness.trial import Violation
from foretoken.properties.suites import suite_of

SUITE = copy(suite_of("accept"))
SUITE.limit_s = 120.0  # of a machine with much else to do


def make(config):
    return DeviceAccept(TritonOps(), "cpu")


CAPABILITIES = SUITE.capabilities.of(make_twins.capabilities)
# Its five hundred rows take long where every program is interpreted.
SLOW = (AcceptTrial.distribution,)


@pytest.mark.slow  # test_bookkeeping_kernels.py compares the same kernels with the twins, which hold with every test
def test_the_kernels_hold():
    swarm = Swarm(SUITE, make, CAPABILITIES, seed=5)
    found = swarm.search(SUITE.invariants(CAPABILITIES), Budget.of(15), SLOW)
    assert found is None, str(found.violation)
    assert all(swarm.evaluations[item.id] for item in SUITE.invariants(CAPABILITIES))


def test_a_tree_without_candidates_has_rows_of_its_own():
    """Its ancestor bits were one row in memory, seen as many; the kernels read past it."""
    cases = Path(__file__).parents[3] / "support" / "cases" / "accept"
    case = load_case(cases / "a-tree-without-candidates-is-its-root.json")
    violation = case.replay(make)
    assert violation is None, str(violation)


@pytest.mark.slow
def test_a_kernel_that_moves_too_little_is_found():
    class Short(TritonOps):
        def move_accepted_(self, kv, node_slots, accept_index, accept_lens):
            super().move_accepted_(kv, node_slots, accept_index, accept_lens - 1)

    def make_short(config):
        return DeviceAccept(Short(), "cpu")

    swarm = Swarm(SUITE, make_short, CAPABILITIES, seed=1)
    found = swarm.search(SUITE.invariants(CAPABILITIES), Budget.of(400), SLOW)
    with pytest.raises(Violation, match="ACCEPT-06"):
        raise found.violation
