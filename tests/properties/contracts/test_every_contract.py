"""What holds of every contract's suite: ours pass it, its invariants, operations as data, runs that follow from
their seed alone."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from foredraft.checks.registry import OPERATIONS, SUBJECTS, contracts
from foredraft.properties.conformance import check
from foredraft.properties.harness.importing import NotInstalled, load_make
from foredraft.properties.harness.invariants import of_contract
from foredraft.properties.harness.operation import decode, encode
from foredraft.properties.harness.swarm import Swarm
from foredraft.properties.suites import suite_of


def test_each_of_our_components_has_a_budget():
    assert set(OPERATIONS) == {name for names in SUBJECTS.values() for name in names}
    for contract, names in SUBJECTS.items():
        assert all(100 <= OPERATIONS[name] <= 2 * suite_of(contract).quick for name in names)


MOSTLY = {"engine", "executor", "simulator", "step-controller"}
"""In so few operations not everything happens with these."""


@pytest.mark.parametrize(
    ("contract", "name"),
    [
        # The simulator's 200 operations take ten seconds.
        pytest.param(c, name, marks=pytest.mark.ci if c == "simulator" or place else ())
        for c in contracts()
        if c != "transport"
        for place, name in enumerate(SUBJECTS[c])
    ],
)
def test_ours_hold(contract, name, record_property):
    """Of the operations of `foredraft check` an eighth, 200 to 5,000; the transport's have a test of their own."""
    try:
        make = load_make(name)
    except NotInstalled as error:
        pytest.skip(str(error))
    begin = time.process_time()
    report = check(suite_of(contract), make, budget=min(max(OPERATIONS[name] // 8, 200), 5_000), subject=name)
    rate = report.num_operations / (time.process_time() - begin)
    never_came_up = [what for what in report.vacuous if not what.startswith("never used: ")]
    assert not report.failures and len(never_came_up) <= (10 if contract == "executor" else 5), report.text()
    assert report.ok or contract in MOSTLY, report.text()
    record_property(
        "note", f"{name}: {rate:,.0f} operations per second of processor time, everything recounted after each"
    )


@pytest.mark.fast("allocator", "relay", "engine", "transport", ci="*")
@pytest.mark.parametrize("contract", contracts())
def test_every_operation_survives_json(contract):
    suite, seen = suite_of(contract), set()
    for name in SUBJECTS[contract]:
        with suppress(NotInstalled):
            swarm = Swarm(suite.component(load_make(name)), seed=1)
            for run in range(25):
                for operation in swarm.drawn(run)[1]:
                    seen.add(type(operation))
                    data = json.loads(json.dumps(encode(operation)))
                    assert decode(suite.operations, data, "test", "operations[0]") == operation
                    assert str(operation).startswith(operation.tag)
    assert seen == set(suite.operations)


@pytest.mark.parametrize("contract", contracts())
def test_an_invariant_is_checked_after_operations_that_there_are(contract):
    tags = {operation.tag for operation in suite_of(contract).operations}
    assert not [(one.id, unknown) for one in of_contract(contract) if (unknown := set(one.on) - tags)]


PROGRAM = """
import sys
from foredraft.properties.harness.importing import load_make
from foredraft.properties.harness.swarm import Swarm
from foredraft.properties.suites import suite_of
component = suite_of(sys.argv[1]).component(load_make(sys.argv[2]))
swarm = Swarm(component, 4)
for run in range(6):
    config, operations = swarm.drawn(run)
    trial = component.execute(config, operations)
    print(config, trial.trace, trial.transcript)
"""


@pytest.mark.fast(ci="engine-core_engine")
@pytest.mark.parametrize(
    ("contract", "adapter"), [("allocator", "kv_store"), ("prefix-cache", "prefix_store"), ("engine", "core_engine")]
)
def test_hash_seeds_change_nothing(contract, adapter):
    line = [sys.executable, "-c", PROGRAM, contract, f"foredraft.checks.adapters.{adapter}:make"]
    first, second = (
        subprocess.check_output(line, env={**os.environ, "PYTHONHASHSEED": seed}, text=True) for seed in ("1", "2")
    )
    assert first == second and len(first) > 10_000
