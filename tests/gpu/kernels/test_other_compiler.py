"""The kernels under the other Tritons that supported torches bring.

Each is installed into a folder of its own, which stands before the environment's packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ahead_case import ARCHITECTURES
from test_compile import compile_and_check
from test_interpreted import run_interpreted

# Interpreters before 3.7 make numbers of arrays with one element, which NumPy 2.4 refuses.
OTHERS = {
    "triton==3.5.1": "numpy==2.3.5",
    "triton==3.6.0": "numpy==2.3.5",  # torch 2.10 and 2.11
    "triton==3.8.0": "",  # torch 2.14
    "triton==3.9.0": "",
}
"""The Tritons of supported torches beside the one that is installed, and the NumPy that each needs."""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("other tritons")]


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """A Triton, and the variables of a process that imports it. It is kept in pytest's cache, if there is one."""
    packages = [one for one in (request.param, OTHERS[request.param]) if one]
    cache = getattr(request.config, "cache", None)
    root = tmp_path_factory.mktemp("packages") if cache is None else Path(cache.mkdir("other_tritons"))
    folder = root / "-".join(packages).replace("==", "-")
    if not folder.is_dir():
        partial = root / f"{os.getpid()}.partial"
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run = subprocess.run(
            [sys.executable, *pip, "--target", str(partial), *packages], capture_output=True, text=True
        )
        if run.returncode:
            pytest.skip(f"cannot install {' and '.join(packages)}: {run.stderr.strip().splitlines()[-1]}")
        partial.rename(folder)
    before = os.environ.get("PYTHONPATH")
    return request.param, {"PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}


@pytest.mark.parametrize("markers", ["not slow", "slow"])
def test_kernels_under_its_interpreter(other: tuple[str, dict[str, str]], markers: str, record_property):
    name, variables = other
    record_property("note", f"interpreted kernels, {name}, {markers}: {run_interpreted(markers, variables)}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_case_compiles(other: tuple[str, dict[str, str]], architecture: int, record_property):
    name, variables = other
    kernels = compile_and_check(architecture, "all", variables=variables)
    record_property("note", f"compiled by {name} for sm_{architecture}: {len(kernels)} kernels")
