"""`foretoken simulate` as a whole process: wall time, CPU time, peak memory.

    FORETOKEN_AZURE_TRACE=AzureLLMInferenceTrace_conv.csv pytest benchmarks/test_simulate_process.py -s

The trace is one hour of a conversation service, 19,366 requests (Azure Public Dataset, 2023). Skipped without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

NEARBY = Path(__file__).resolve().parents[1] / "../shared/traces/AzureLLMInferenceTrace_conv.csv"
AZURE = Path(os.environ.get("FORETOKEN_AZURE_TRACE", NEARBY))
NONE = ("speculation.algorithm=NONE",)
CHAIN = ("speculation.policy=fixed", "speculation.steps=3")
CASES = {
    "single rounds, synchronous": (*NONE, "engine.mode=synchronous", "engine.block_rounds=1"),
    "single rounds, overlap": (*NONE, "engine.block_rounds=1"),
    "blocks, synchronous": (*NONE, "engine.mode=synchronous"),
    "blocks, overlap": NONE,
    "chain of 3, blocks, synchronous": (*CHAIN, "engine.mode=synchronous"),
    "chain of 3, blocks, overlap": CHAIN,
}


def run_process(arguments: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MiB of one `foretoken` process."""
    command = [str(Path(sys.executable).parent / "foretoken"), *arguments]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    assert os.waitstatus_to_exitcode(status) == 0
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def test_start_up(benchmark):
    benchmark.pedantic(run_process, args=(["simulate", "--quiet", "--set", "workload.num_requests=1"],), rounds=3)


@pytest.mark.skipif(not AZURE.exists(), reason="needs the Azure conversation trace, see FORETOKEN_AZURE_TRACE")
@pytest.mark.parametrize("case", list(CASES))
def test_azure_hour(benchmark, case):
    settings = [part for setting in (*CASES[case], "hardware.gpu=A100") for part in ("--set", setting)]
    arguments = ["simulate", "--quiet", "--trace", str(AZURE), *settings]
    seen = benchmark.pedantic(run_process, args=(arguments,), rounds=1)
    benchmark.extra_info.update(zip(("wall_s", "cpu_s", "peak_mib"), seen, strict=True))
    print(f"\n{case}: {seen[0]:.1f} s wall, {seen[1]:.1f} s CPU, {seen[2]:.0f} MiB peak")


@pytest.mark.parametrize("num_requests", [10_000, 1_000_000])
def test_many_requests(benchmark, num_requests):
    """Memory and rate must not depend on the length of the run."""
    if num_requests > 100_000 and not os.environ.get("FORETOKEN_LONG"):
        pytest.skip("minutes; set FORETOKEN_LONG=1")
    settings = [
        f"workload.num_requests={num_requests}",
        "workload.rate=150",
        "workload.prompt={kind='lognormal',mean=200.0,sigma=0.8,low=8,high=2048}",
        "workload.output={kind='lognormal',mean=24.0,sigma=0.6,low=1,high=256}",
        *CHAIN,
    ]
    arguments = ["simulate", "--quiet", *[part for setting in settings for part in ("--set", setting)]]
    seen = benchmark.pedantic(run_process, args=(arguments,), rounds=1)
    print(f"\n{num_requests} requests: {seen[0]:.1f} s wall, {seen[1]:.1f} s CPU, {seen[2]:.0f} MiB peak")
