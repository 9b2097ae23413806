"""Our policy `confidence` beside vLLM's adaptive verification, on the same random inputs."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("verification_of_wheel.py")
# Slope and intercepts of the estimator of vLLM 0.33.0 after each of four refits on the rounds of the script.
RECORDED = [
    [0.8528995, 0.3623308, -0.6783198, -0.0459309],
    [1.1877157, 0.2665150, -0.9567789, 0.1801455],
    [1.2592859, 0.5586251, -0.7564622, 0.3709586],
    [1.2032856, 0.2071931, -0.8993885, 0.3231440],
]


def test_the_curve_learns_what_vllms_estimator_has_learnt():
    ours = runpy.run_path(str(SCRIPT))["our_coefficients"]()
    assert len(ours) == len(RECORDED)
    for found, theirs in zip(ours, RECORDED, strict=True):
        assert found == pytest.approx(theirs, abs=2e-6)


@pytest.mark.slow
def test_budgets_choices_and_times_are_vllms():
    """The wheel is in the folder that FOREDRAFT_WHEELS names."""
    wheels = [*Path(os.environ.get("FOREDRAFT_WHEELS", ".")).glob("vllm-0.33.0-*.whl")]
    if not wheels:
        pytest.skip("no wheel of vllm 0.33.0 in FOREDRAFT_WHEELS")
    pytest.importorskip("triton")
    command = [sys.executable, "-P", str(SCRIPT), str(wheels[0])]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    for coefficients, recorded in zip(found["coefficients"], RECORDED, strict=True):
        assert coefficients == pytest.approx(recorded, abs=2e-6)
    assert found["batches"] == 400 and found["times"] == 160_000
    assert found["differences"] == []
