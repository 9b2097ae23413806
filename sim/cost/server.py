"""Server profiles: what a planner cannot know of a serving engine, fitted to published measurements.

A profile bundles how the engine schedules, the host's time per step, what the device waits for between passes, and the server whose kernels
are priced. `benchmarks/fit_servers.py` fits the waits of every profile that names a fit, from `benchmarks/published/`, and prints
their cross-validated errors; a test compares the numbers below with a fresh fit. What the device waits for was measured with the
engine's own overlap of host and device, so it stands in the launch, and no host time is added to it that hides behind the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...core.errors import ForetokenError, nearest_name
from .hardware import GPU
from .host import FORETOKEN, SGLANG_OVERLAP, VLLM_0_10, HostCost
from .launch import FULL_GRAPH, GraphUnit, LaunchCost

GIB = 1 << 30


class UnknownServer(ForetokenError):
    """A server profile that does not exist; the message lists the known ones."""


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """The timing of one serving engine.

    `kernels_of`: the server whose measured kernels are priced; `about`: the fit and its error; `graph_unit`: what its captured sizes
    count; `mixed`, `chunk_size`: the settings of `engine` where a scenario leaves them open; `chunk_sizes`: the latter, by the GiB from
    which a device has it, but that those in `counted_small` have the first; `fp8_kv`: whether FP8 checkpoints made for it keep
    their KV in FP8.
    """

    name: str
    host: HostCost
    launch: LaunchCost
    kernels_of: str
    about: str
    graph_unit: GraphUnit = "rows"
    mixed: bool = True
    chunk_sizes: tuple[tuple[int, int], ...] = ((0, 8192),)
    counted_small: tuple[str, ...] = ()
    fp8_kv: bool = False

    def chunk_size(self, gpu: GPU) -> int:
        """Return how many prompt tokens a step has by default on this device."""
        memory = 0 if gpu.name in self.counted_small else gpu.memory_bytes / GIB
        return next(tokens for least, tokens in reversed(self.chunk_sizes) if memory >= least)


_SGLANG_CHUNKS = (0, 2048), (20, 4096), (60, 8192), (160, 16_384)
"""Defaults of --chunked-prefill-size (sgl-project/sglang, python/sglang/srt/server_args.py, by the memory of the device)."""
_VLLM_CHUNKS = (0, 2048), (70, 8192), (160, 16_384)
"""Defaults of --max-num-batched-tokens of the HTTP server (vllm-project/vllm, vllm/engine/arg_utils.py, get_batch_defaults), where an A100
counts as a small device."""


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
                graph_gap_ns=519.8e3,
                row_gap_ns=7.01e3,
                collective_gap_ns=1.85e3,
                eager_kernel_ns=41.9e3,
                draft_step_ns=152e3,
                tree_ns=739e3,
            ),
            "sglang",
            "fitted to SGLang 0.5 without speculation (Qwen3-32B on H100, Llama-3.1-8B and Qwen3-30B-A3B on H200) and with EAGLE-3 "
            "(Llama-3.1-8B on one H200, batch 1): docs/accuracy.md",
            mixed=False,
            chunk_sizes=_SGLANG_CHUNKS,
        ),
        ServerProfile(
            "vllm-0.9",
            VLLM_0_10,
            _fitted(
                "vllm-0.9",
                graph_gap_ns=796e3,
                row_gap_ns=8.64e3,
                collective_gap_ns=1.48e3,
                draft_step_ns=74e3,
                eagle3_step_ns=691e3,
            ),
            "vllm",
            "fitted to vLLM 0.9 with EAGLE and EAGLE-3 on one H100, Llama-3.1-8B, batch 1 (13 rows, vLLM issue 20780); the waits per row "
            "and for several devices are those of vllm-0.18: docs/accuracy.md",
            graph_unit="tokens",
            chunk_sizes=_VLLM_CHUNKS,
            counted_small=("A100", "A100-40G"),
        ),
        ServerProfile(
            "vllm-0.18",
            VLLM_0_10,
            _fitted("vllm-0.18", graph_gap_ns=0.0, row_gap_ns=8.64e3, collective_gap_ns=1.48e3, draft_step_ns=74e3),
            "vllm",
            "fitted to vLLM of April 2026 without speculation, Llama-3.1-70B in FP8 on 1 to 8 H200 and gpt-oss-120b on 2 to 8 H100, whose "
            "times to the first token show that FP8 checkpoints keep their KV in FP8; a draft step is that of a captured "
            "head of vllm-0.9 (assumption: EAGLE-3 is captured as well): docs/accuracy.md",
            graph_unit="tokens",
            chunk_sizes=_VLLM_CHUNKS,
            counted_small=("A100", "A100-40G"),
            fp8_kv=True,
        ),
        ServerProfile(
            "trtllm-1.x",
            VLLM_0_10,
            _fitted(
                "trtllm-1.x",
                graph_gap_ns=209.4e3,
                row_gap_ns=2.93e3,
                collective_gap_ns=0.63e3,
                eager_kernel_ns=65.0e3,
                draft_step_ns=152e3,
                tree_ns=739e3,
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
