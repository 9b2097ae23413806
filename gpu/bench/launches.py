"""How often a decode round makes the host call the GPU's driver: launches of kernels and graphs, copies, fills."""

from __future__ import annotations

from collections import Counter

import torch

from .arm import Arm

CALLS = {  # how CUPTI names calls of the runtime and the driver -> how we do
    "cudaLaunchKernel": "kernels",
    "cuLaunchKernel": "kernels",
    "cudaGraphLaunch": "graphs",
    "cudaMemcpyAsync": "copies",
    "cudaMemsetAsync": "fills",
}
SHORT, LONG = 16, 48  # output tokens of two runs, whose difference holds whole rounds and nothing else


def launches_per_round(arm: Arm) -> dict[str, float]:
    """Return calls per round by kind. Needs a GPU whose profiler may be used; raises RuntimeError where it records nothing."""
    arm.run(SHORT)
    short, long = (_counted(arm, tokens) for tokens in (SHORT, LONG))
    rounds = long["rounds"] - short["rounds"]
    found = {kind: (long[kind] - short[kind]) / rounds for kind in dict.fromkeys(CALLS.values())}
    if not any(found.values()):
        raise RuntimeError("the profiler recorded no call of the driver")
    return {**{kind: round(count, 1) for kind, count in found.items()}, "all": round(sum(found.values()), 1)}


def _counted(arm: Arm, max_tokens: int) -> Counter[str]:
    before = arm.executor.counters.rounds
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        arm.run(max_tokens)
        torch.cuda.synchronize(arm.executor.device)
    counts = Counter(rounds=arm.executor.counters.rounds - before)
    for event in profile.key_averages():
        # Variants have letters behind them: cuLaunchKernelEx, cudaLaunchKernelExC.
        name = next((name for name in CALLS if event.key.startswith(name)), None)
        if name is not None:
            counts[CALLS[name]] += event.count
    return counts
