"""Every kernel compiles for six kinds of GPUs, none of them there:
hardly a spill, little shared memory, tensor cores used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from ahead_case import ARCHITECTURES, SHARED_BYTES

HERE = Path(__file__).resolve().parent
# Least shared memory that a block may have on a GPU of the family: 8.6 has less than 8.0.
MAX_SHARED_BYTES = SHARED_BYTES | {80: 99 << 10}
MAX_SPILLED_BYTES = {80: 24, 89: 24, 90: 16, 100: 16, 120: 24, 121: 24}
"""Bytes that a thread may put aside: of each compiler (Triton 3.6 to 3.9) some kernels need a few registers more than
it gives them, others in each."""
MAX_THREADS_X_REGISTERS = 65536
# Files that a launch of the forward pass or of a round goes through; each has at least one case.
KERNEL_FILES = {
    path.stem
    for path in (HERE.parents[2] / "gpu" / "kernels").rglob("*.py")
    if "\n@jit\n" in path.read_text(encoding="utf-8")
}


# Device functions only; the kernels that call them are compiled.
HELPERS = {"words", "flash", "e4m3"}


def compiled(architecture: int | str, *which: str, variables: Mapping[str, str] | None = None) -> list[dict]:
    """Compile in another process with these environment variables; return what the compiler says of each kernel."""
    pytest.importorskip("triton")
    environment = {**os.environ, **(variables or {})}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, str(HERE / "compile_ahead.py"), str(architecture), *which],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,  # of all cases on a busy machine
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    missing = KERNEL_FILES - {kernel["file"] for kernel in kernels} - HELPERS
    assert not missing, f"no compiled case of {sorted(missing)}"
    return kernels


def compile_and_check(architecture: int, *which: str, variables: Mapping[str, str] | None = None) -> list[dict]:
    """Do what `compiled` does, with kernels that keep the limits of the architecture."""
    kernels = compiled(architecture, *which, variables=variables)
    wrong = []
    for kernel in kernels:
        name = f"{kernel['name']} for sm_{architecture}"
        if kernel["stack"] + kernel["local"] > MAX_SPILLED_BYTES[architecture] and not kernel["may_spill"]:
            wrong.append(f"{name} spills: {kernel['stack']} bytes of stack, {kernel['local']} local, per thread")
        if kernel["shared_bytes"] > MAX_SHARED_BYTES[architecture]:
            wrong.append(f"{name} needs {kernel['shared_bytes']} bytes of shared memory")
        if kernel["registers"] * kernel["num_warps"] * 32 > MAX_THREADS_X_REGISTERS:
            wrong.append(f"{name} needs {kernel['registers']} registers in each of {kernel['num_warps']} warps")
        if kernel["must_use_tensor_cores"] and not kernel["tensor_instructions"]:
            wrong.append(f"{name} uses no tensor cores")
    assert not wrong, "\n".join(wrong)
    return kernels


@pytest.mark.ci
def test_one_case_of_each_kernel_compiles():
    compile_and_check(90)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_case_compiles(architecture: int, record_property):
    kernels = compile_and_check(architecture, "all")
    wide = {90: {"HGMMA"}, 100: {"UTCHMMA"}}.get(architecture, set())
    for name in ("64 nodes", "16 nodes", "2048 tokens"):
        (kernel,) = [
            kernel
            for kernel in kernels
            if "32/8 heads of 128," in kernel["name"] and kernel["name"].endswith((name, f"{name}, parts"))
        ]
        assert wide <= set(kernel["tensor_instructions"]), f"{kernel['name']}: {kernel['tensor_instructions']}"
    record_property("note", f"compiled ahead of time for sm_{architecture}: {len(kernels)} kernels")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_one_case_of_each_kernel_compiles_for_amd(architecture: str):
    """None has been tried there."""
    compiled(architecture)
