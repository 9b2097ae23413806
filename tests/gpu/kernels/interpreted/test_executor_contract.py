"""The executor contract with only interpreted Triton kernels. It tests how the kernels work together, including the
relay cells of captured rounds."""

from __future__ import annotations

import pytest
from foredraft.checks.adapters.torch_executor import DevicePlace, ExecutorIn
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.properties.executor.trial import ExecutorTrial
from foredraft.properties.harness.swarm import Budget, Found, Swarm
from foredraft.properties.suites import suite_of

OPERATIONS = 300


def searched(place: DevicePlace, seed: int) -> Found | None:
    """Search without the operation that samples hundreds of tokens, which takes a minute here."""
    component = suite_of("executor").component(ExecutorIn(place))
    sample = type(ExecutorTrial.sample())
    return Swarm(component, seed, left_out=[sample]).search(component.invariants, Budget(operations=OPERATIONS))


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
def test_the_contract_holds(captured):
    found = searched(DevicePlace("cpu", "triton", captured), seed=3)
    assert found is None, str(found.violation)


@pytest.mark.slow
def test_a_kernel_that_moves_no_kv_is_found(monkeypatch):
    monkeypatch.setattr(TritonOps, "move_accepted_", lambda *arguments: None)
    assert searched(DevicePlace("cpu", "triton"), seed=8) is not None
