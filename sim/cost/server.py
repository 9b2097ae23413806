"""Server profiles: what a planner cannot know of a serving engine, fitted to published measurements.

A profile bundles how the engine schedules, the host's time per step, what the device waits for between passes, and the server whose kernels
are priced. `benchmarks/fit_servers.py` fits the waits of every profile that names a fit, from `benchmarks/published/`, and prints
their cross-validated errors; a test compares the numbers below with a fresh fit. What the device waits for was measured with the
engine's own overlap of host and device, so it stands in the launch, and no host time is added to it that hides behind the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...core.errors import ForetokenError, nearest_name
from .host import FORETOKEN, SGLANG_OVERLAP, VLLM_0_10, HostCost
from .launch import FULL_GRAPH, GraphUnit, LaunchCost


class UnknownServer(ForetokenError):
    """A server profile that does not exist; the message lists the known ones."""


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """The timing of one serving engine.

    `kernels_of`: the server whose measured kernels are priced; `about`: the fit and its error; `graph_unit`: what its captured sizes
    count; `mixed`, `chunk_size`: the settings of `engine` where a scenario leaves them open; `fp8_kv`: whether FP8 checkpoints made
    for it keep their KV in FP8.
    """

    name: str
    host: HostCost
    launch: LaunchCost
    kernels_of: str
    about: str
    graph_unit: GraphUnit = "rows"
    mixed: bool = True
    chunk_size: int = 8192
    fp8_kv: bool = False


_FIT = "benchmarks/fit_servers.py: least squares on benchmarks/published/ over measured kernels"


def _fitted(name: str, **times_ns: float) -> LaunchCost:
    """Return the launch of a server whose decode passes are captured. Times that were not fitted are those of FULL_GRAPH."""
    return replace(FULL_GRAPH, name=name, source=_FIT, **times_ns)


PROFILES: dict[str, ServerProfile] = {
    profile.name: profile
    for profile in (
        ServerProfile(
            "foretoken",
            FORETOKEN,
            FULL_GRAPH,
            "sglang",
            "our own executor: every pass captured, host times as benchmarks/test_engine_round.py measures them",
        ),
        ServerProfile(
            "sglang-0.5",
            SGLANG_OVERLAP,
            _fitted(
                "sglang-0.5",
                graph_gap_ns=589.6e3,
                row_gap_ns=6.82e3,
                collective_gap_ns=2.00e3,
                eager_kernel_ns=40.1e3,
                draft_step_ns=126e3,
                tree_ns=751e3,
            ),
            "sglang",
            "fitted to SGLang 0.5 without speculation (Qwen3-32B on H100, Llama-3.1-8B and Qwen3-30B-A3B on H200) and with EAGLE-3 "
            "(Llama-3.1-8B on one H200, batch 1): docs/accuracy.md",
            mixed=False,
        ),
        ServerProfile(
            "vllm-0.9",
            VLLM_0_10,
            _fitted(
                "vllm-0.9",
                graph_gap_ns=796e3,
                row_gap_ns=9.36e3,
                collective_gap_ns=1.75e3,
                draft_step_ns=74e3,
                eagle3_step_ns=691e3,
            ),
            "vllm",
            "fitted to vLLM 0.9 with EAGLE and EAGLE-3 on one H100, Llama-3.1-8B, batch 1 (13 rows, vLLM issue 20780); the waits per row "
            "and for several devices are those of vllm-0.18: docs/accuracy.md",
            graph_unit="tokens",
        ),
        ServerProfile(
            "vllm-0.18",
            VLLM_0_10,
            _fitted("vllm-0.18", graph_gap_ns=0.0, row_gap_ns=9.36e3, collective_gap_ns=1.75e3, draft_step_ns=74e3),
            "vllm",
            "fitted to vLLM of April 2026 without speculation, Llama-3.1-70B in FP8 on 1 to 8 H200 and gpt-oss-120b on 2 to 8 H100, whose "
            "times to the first token show that FP8 checkpoints keep their KV in FP8; a draft step is that of a captured "
            "head of vllm-0.9 (assumption: EAGLE-3 is captured as well): docs/accuracy.md",
            graph_unit="tokens",
            fp8_kv=True,
        ),
        ServerProfile(
            "trtllm-1.x",
            VLLM_0_10,
            _fitted(
                "trtllm-1.x",
                graph_gap_ns=74.4e3,
                row_gap_ns=3.22e3,
                collective_gap_ns=1.05e3,
                eager_kernel_ns=66.4e3,
                draft_step_ns=126e3,
                tree_ns=751e3,
            ),
            "trtllm",
            "fitted to TensorRT-LLM 1.0.0rc3 (Llama-3.1-8B on 1 to 8 H100) and of April 2026 (Llama-3.1-70B in FP8 on 1 to 8 H200) "
            "without speculation; drafting is that of sglang-0.5 (assumption): docs/accuracy.md",
            fp8_kv=True,
        ),
    )
}


def server_profile(name: str) -> ServerProfile:
    """Look up the profile called `name` (case does not matter). Raises `UnknownServer`."""
    key = name.strip().lower()
    if key not in PROFILES:
        raise UnknownServer(f"unknown server {name!r}{nearest_name(key, PROFILES)}; known: {', '.join(PROFILES)}")
    return PROFILES[key]
