"""The executor contract on the devices, and with the operations, that `--device` and `--ops` name."""

from __future__ import annotations

import pytest
from foredraft.core.errors import ConfigError
from foredraft.properties.executor.contract import ExecutorConfig
from foredraft.properties.executor.trial import ExecutorTrial
from foredraft.properties.harness.importing import load_make, name_of
from foredraft.properties.harness.swarm import Budget, Swarm
from foredraft.properties.suites import suite_of

torch_executor = pytest.importorskip("foredraft.checks.adapters.torch_executor", exc_type=ImportError)
Place, places_of = torch_executor.DevicePlace, torch_executor.places_of
SUITE = suite_of("executor")
PLACES = [Place("cpu", "torch"), Place("cpu", "torch", captured=True), Place("cpu", "host", captured=True)]


@pytest.mark.parametrize("place", [Place(), *PLACES, Place("cuda", "triton"), Place("cuda:1", "torch", captured=True)])
def test_the_name_of_a_place_leads_back_to_it(place):
    make = load_make(place.name)
    assert make is torch_executor.make if place == Place() else make.place == place
    assert name_of(torch_executor.make).endswith("CheckedExecutor")


@pytest.mark.ci
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name.rpartition(":")[2])
def test_the_contract_holds_with_torchs_operations_and_captured_rounds(place):
    component = SUITE.component(load_make(place.name))
    found = Swarm(component, seed=2).search(component.invariants, Budget(operations=700))
    assert found is None, str(found.violation)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name.rpartition(":")[2])
def test_a_block_ends_after_one_round_if_the_prompt_before_it_has_ended_a_request(place):
    """Its first round is launched before the prompt's token is read."""
    config = ExecutorConfig("NONE", steps=0, num_pages=208, max_running=1, multi_step_rounds=3, overlap=True)
    ends_at_once = ExecutorTrial.submit("a", 1, 1, 0, False, False)
    launch, collect = ExecutorTrial.launch(), ExecutorTrial.collect()
    trial = SUITE.component(load_make(place.name)).execute(config, [ends_at_once, launch, launch, collect, collect])
    assert "accept lengths [[1]]" in trial.transcript[4], trial.transcript


def test_captured_rounds_are_replayed(monkeypatch):
    """A component that captured nothing would hold, too."""
    made = []

    class Noting(torch_executor.ExecutorIn):
        def __call__(self, config):
            made.append(super().__call__(config))
            return made[-1]

    config = ExecutorConfig(num_pages=256, context_len=64)
    operations = [ExecutorTrial.submit("a", 7, 12, 0, False, False)]
    SUITE.component(Noting(Place("cpu", "torch", captured=True))).execute(config, operations)
    assert made[0].executor.graphs.reports
    SUITE.component(Noting(Place("cpu", "torch"))).execute(config, operations)
    assert not made[1].executor.graphs.reports


def test_a_gpu_has_no_operations_of_the_host(monkeypatch):
    monkeypatch.setattr(torch_executor, "resolve_device", lambda name: name)
    with pytest.raises(ConfigError, match="'host' is none of triton, torch, which cuda has"):
        places_of("cuda", "host")
