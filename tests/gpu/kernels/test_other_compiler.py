"""The kernels under an older Triton, which machines with GPUs still have, and a NumPy that its interpreter takes.

Both are installed into a folder of their own, which stands before the environment's packages.
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

# This interpreter makes numbers of arrays with one element, which NumPy 2.4 refuses.
OLDER = ("triton==3.6.0", "numpy==2.3.5")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("older triton")]


@pytest.fixture(scope="module")
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that imports the older packages. They are kept in pytest's cache, if there is one."""
    cache = getattr(request.config, "cache", None)
    root = tmp_path_factory.mktemp("packages") if cache is None else Path(cache.mkdir("older_triton"))
    folder = root / "-".join(OLDER).replace("==", "-")
    if not folder.is_dir():
        partial = root / f"{os.getpid()}.partial"
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run = subprocess.run([sys.executable, *pip, "--target", str(partial), *OLDER], capture_output=True, text=True)
        if run.returncode:
            pytest.skip(f"cannot install {' and '.join(OLDER)}: {run.stderr.strip().splitlines()[-1]}")
        partial.rename(folder)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}


@pytest.mark.parametrize("markers", ["not slow", "slow"])
def test_kernels_under_its_interpreter(older: dict[str, str], markers: str, record_property):
    record_property("note", f"interpreted kernels, {OLDER[0]}, {markers}: {run_interpreted(markers, older)}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_case_compiles(older: dict[str, str], architecture: int, record_property):
    kernels = compile_and_check(architecture, "all", variables=older)
    record_property("note", f"compiled by {OLDER[0]} for sm_{architecture}: {len(kernels)} kernels")
