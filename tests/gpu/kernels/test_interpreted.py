"""The kernels' own tests, under Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
LIMIT_S = 1200  # of processor time of the slow ones, so that a busy machine does not matter


@pytest.mark.parametrize(
    "markers",
    [
        "not ci and not slow",
        pytest.param("ci and not slow", marks=pytest.mark.ci),
        pytest.param("slow", marks=pytest.mark.slow),
    ],
)
def test_kernels_under_the_interpreter(markers: str, record_property):
    pytest.importorskip("triton")
    record_property("note", f"interpreted kernels, {markers}: {run_interpreted(markers)}")


def run_interpreted(markers: str, variables: Mapping[str, str] | None = None) -> str:
    """Run the tests in another process with these environment variables;
    return how many there were, in pytest's words."""
    environment = {**os.environ, **(variables or {}), "TRITON_INTERPRET": "1"}
    # What the outer run was told (its markers, its number of workers) is not meant for the inner one.
    for variable in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_CURRENT_TEST"):
        environment.pop(variable, None)
    run = subprocess.run(
        [
            *["sh", "-c", 'ulimit -t "$0" && exec "$@"', str(LIMIT_S), sys.executable],
            *["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m"],
            markers,
            str(HERE / "interpreted"),
        ],
        cwd=HERE.parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    last = run.stdout.strip().splitlines()[-1] if run.stdout.strip() else ""
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.fullmatch(r"=*\s*(\d+) passed(, \d+ deselected)?(, \d+ warnings?)? in .*", last), f"not all ran: {last}"
    return last.strip("= ")
