"""Server profiles: the properties of a serving engine that a planner cannot know, fitted to published measurements.

A profile has the scheduling of the engine, the host's time per step, the device's waits between passes, and the server
of the kernel times. `benchmarks/fit_servers.py` fits the waits of every profile that names a fit, from
`benchmarks/published/`, and prints their cross-validated errors; a test compares the numbers below with a fresh fit.
The waits are part of the launch. Where the engine overlaps host and device, host time that runs beside the device is
not added to them; where it does not (vLLM 0.9), they are the host's time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...core.errors import ForedraftError, nearest_name
from ...core.model_shape import ModelShape
from ...core.scheduler.rules import OurRules, ServerRules, SGLangRules, VLLMRules
from ...core.scheduler.spec import GRAPH_SIZES, default_graph_sizes
from .deployments.evidence import about_releases
from .draft import STANDALONE
from .hardware import GIB, GPU, MIB, Parallelism
from .host import FOREDRAFT, FULL_GRAPH, NO_DELAY, SGLANG_OVERLAP, VLLM_0_10, FrontEnd, GraphUnit, HostCost, LaunchCost
from .memory.rules import MemoryRules


class UnknownServer(ForedraftError):
    """A server profile that does not exist; the message lists the known ones."""


OUR_RULES = OurRules()


@dataclass(frozen=True, slots=True)
class Defaults:
    """The defaults of an engine on a device of at least `gibibytes` of memory."""

    gibibytes: int = 0
    chunk_size: int = 8192  # prompt tokens of a step
    max_running: int = 256  # requests in a batch
    # The largest batch that is captured with fewer than four devices, and with more; None: the largest that may run.
    largest_graph: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """The timing of one serving engine. `mode`, `mixed` and `defaults` apply if the scenario does not set them, and the
    settings of `rules` as well."""

    name: str
    host: HostCost
    launch: LaunchCost
    kernels_of: str  # the server whose measured kernels are priced
    about: str  # the fit and its error
    rules_release: str  # the release whose scheduling it has
    times_release: str  # the releases that its times are fitted to
    graph_unit: GraphUnit = "rows"
    token_graphs: tuple[int, int] = (
        512,
        512,
    )  # the largest captured size in tokens, and that on Blackwell's data-center GPUs
    mode: Literal["overlap", "synchronous"] = "overlap"
    mixed: bool = True
    rules: ServerRules = OUR_RULES
    rules_with_groups: ServerRules | None = None  # with data-parallel attention; None: as without
    eviction_policy: str = "lru"
    has_one_budget: bool = False  # chunks and verified tokens of a step share `chunk_size`
    defaults: tuple[Defaults, ...] = (Defaults(),)  # by the memory of a device
    probe_backoff: bool = True  # failed tries of drafts after 0 steps make the next one wait longer
    running_with_draft: int | None = None  # requests in a batch if there is a draft; None: as without one
    counted_small: tuple[str, ...] = ()  # devices that have the first of `defaults`
    has_static_share: bool = False  # weights and KV have a share of the memory (SGLang's mem-fraction-static)
    memory: tuple[MemoryRules, ...] = (MemoryRules(),)  # by release, in order
    free_fraction: float | None = None  # the share of what the weights leave that KV has by default
    kv_layout: Literal["pool", "shares", "reserved"] = "reserved"  # of windows and recurrent states (StateLayout)
    holds_the_context: bool = False  # it starts only if its pool holds a request of the whole context
    front_end: FrontEnd = NO_DELAY
    state_bytes: int = 4  # of an element of recurrent states, where the model's files do not say it
    fp8_kv: bool = False  # FP8 checkpoints made for it keep their KV in FP8
    slow_fp8_kv: tuple[str, ...] = ()  # devices on which its attention over FP8 takes as long as over 16 bits

    def on(self, gpu: GPU) -> Defaults:
        """Return the defaults of this engine on a device."""
        memory = 0 if gpu.name in self.counted_small else gpu.memory_bytes / GIB
        return next(each for each in reversed(self.defaults) if memory >= each.gibibytes)

    def scheduling(self, gpu: GPU, groups: int, has_draft: bool) -> dict[str, Any]:
        """Return the settings of the scheduler by key. `groups`: of devices with data-parallel attention."""
        found = self.on(gpu)
        most = self.running_with_draft if has_draft and self.running_with_draft else found.max_running
        return {
            "rules": self.rules_for(groups),
            "chunk_size": found.chunk_size,
            "max_running": min(most, found.max_running),
            "max_step_tokens": found.chunk_size if self.has_one_budget else None,
            "mixed": self.mixed,
            "eviction_policy": self.eviction_policy,
        }

    def rules_for(self, groups: int) -> ServerRules:
        """Return the rules of the scheduler. `groups`: of devices with data-parallel attention."""
        return self.rules_with_groups if groups > 1 and self.rules_with_groups is not None else self.rules

    def priced(self, shape: ModelShape, gpu: GPU) -> ModelShape:
        """Return the model to look up in the measured kernels:
        with KV of 16 bits where attention over FP8 takes as long."""
        return replace(shape, kv_dtype="bf16") if shape.kv_dtype == "fp8" and gpu.name in self.slow_fp8_kv else shape

    def graph_sizes(self, gpu: GPU, devices: int, max_running: int) -> tuple[int, ...]:
        """Return the batch sizes that it captures by default."""
        largest = self.on(gpu).largest_graph
        return default_graph_sizes(max_running if largest is None else min(max_running, largest[devices >= 4]))

    def token_graph_sizes(self, gpu: GPU) -> tuple[int, ...]:
        """Return the sizes of passes, in tokens, that it captures by default."""
        largest = self.token_graphs[gpu.name in _WIDE_GRAPHS]
        return (*GRAPH_SIZES, *range(GRAPH_SIZES[-1] + 16, largest + 1, 16))

    def static_fraction(self, gpu: GPU, parallel: Parallelism, draft: str | None) -> float | None:
        """Return the share of the memory that weights and KV have by default; None: all but what is reserved. `draft`:
        the algorithm of a draft model or head.

        SGLang leaves room for activations by the prompt tokens of a step, for graphs by the largest batch
        (sgl-project/sglang, python/sglang/srt/server_args.py, _handle_gpu_memory_settings).
        """
        if not self.has_static_share:
            return None
        found = self.on(gpu)
        assert found.largest_graph is not None, f"{self.name} captures up to a size of its own"
        graph = found.largest_graph[parallel.devices >= 4]
        reserved = 512 + 1.5 * found.chunk_size + 2 * graph + 128 * parallel.devices
        if parallel.data > 1:
            reserved += (4.5 if graph > 300 else 3) * graph * parallel.data
        if found.gibibytes >= 60:
            reserved = max(reserved, 10 * 1024)
        reserved += 0 if draft is None else 6 * 1024 if draft == STANDALONE else 2 * 1024
        return 1 - reserved * MIB / gpu.memory_bytes


_WIDE_GRAPHS = "B200", "B300", "GB200", "GB300"
"""Devices for which vLLM captures up to 1,024 tokens: Blackwell of data centers."""
_SGLANG = (
    Defaults(0, 2048, 2048, (8, 8)),
    Defaults(20, 2048, 2048, (24, 80)),
    Defaults(35, 4096, 2048, (32, 160)),
    Defaults(60, 8192, 2048, (256, 512)),
    Defaults(160, 16_384, 2048, (512, 512)),
)
"""--chunked-prefill-size, --max-running-requests (at least 2,048, and more where the pool is large for the context) and
--cuda-graph-max-bs (sgl-project/sglang, python/sglang/srt/server_args.py)."""
_VLLM = Defaults(0, 2048, 256), Defaults(70, 8192, 1024), Defaults(160, 16_384, 1024)
"""--max-num-batched-tokens and --max-num-seqs of the HTTP server (vllm-project/vllm, vllm/engine/arg_utils.py,
get_batch_defaults), where an A100 counts as a small device."""
_VLLM_0_11 = MemoryRules(
    unseen_bytes=450 * MIB,
    unseen_share=0.001,
    context_bytes=round(0.13 * GIB),
    group_bytes=round(0.42 * GIB),
    sampler_bytes=38,
    flashinfer_bytes=16,
    sampled_bytes=36_000_000,
    hidden_bytes=2.5,
    expert_multiples=(256, 128),
    counts_graphs=False,
    graph_bytes=6 * MIB,
    graphs_base=round(0.2 * GIB),
    captures_twice=True,
    counts_by_group=True,
    margin=0.005,
)
_VLLM_0_11_1 = replace(_VLLM_0_11, since=(0, 11, 1), flashinfer_bytes=None, expert_multiples=(256, 1))
_VLLM_0_17 = replace(_VLLM_0_11_1, since=(0, 17), sampler_bytes=14, keeps_workspace=True, margin=0.01)
_VLLM_MEMORY = (
    _VLLM_0_11,
    _VLLM_0_11_1,
    _VLLM_0_17,
    replace(_VLLM_0_17, since=(0, 21), counts_graphs=True, counts_by_group=False, utilization=0.92),
)
"""What vLLM takes by its release (vllm/v1/worker/gpu_worker.py, determine_available_memory): its share is one of the
memory that torch sees, 0.5 to 0.7 GiB less than the driver's total. When it starts it samples once for all requests
that may run.

Until 0.16 that sorts the logits: 38 bytes of each fit six published rows within 0.1 GiB (llm-d/llm-d-benchmark,
config_explorer/empirical-vllm-memory-results.md, H100: 4.76 … 7.38 GiB of activations, 0.13 or 0.55 GiB outside torch)
and two of gpt-oss-120b in 0.10.1 and 0.11.0 within 0.2 GiB (its issues 23278, 27508), whose experts its kernel of that
time pads in both sizes: 65.97 GiB of weights, then 64.38. Until 0.11.0 it samples with FlashInfer where this is
installed, as in its images: 16 bytes (Mistral-Small-3.2-24B in the first source). Since 0.17 a kernel masks logits in
place (its pull 33538): 2 bytes of logits and three copies in float32. Since 0.21 graphs are counted, and the share is
0.92 by default (its pull 38284); logs say 0.17 to 1.3 GiB (assumption: 0.2 GiB and 6 MiB each)."""
_TRTLLM = Defaults(0, 8192, 2048, (512, 512))
"""max_num_tokens and max_batch_size (NVIDIA/TensorRT-LLM, tensorrt_llm/llmapi/llm_args.py). By default it captures
batches of up to 128, and launch commands are read so. Here it is 512, as in the launch files of
ai-dynamo/aiconfigurator, because `eager_kernel_ns` is fitted to steps with prompts and is too long for decoding."""


_FIT = "benchmarks/fit_servers.py: least squares on benchmarks/published/ over measured kernels"


def _fitted(name: str, **times_ns: float) -> LaunchCost:
    """Return the launch of a server whose decode passes are captured.
    Times that were not fitted are those of FULL_GRAPH. vLLM's drafter returns before its logits where nothing is
    drafted (vllm-project/vllm, vllm/v1/spec_decode/llm_base_proposer.py, propose)."""
    has_logits = not name.startswith("vllm")
    return replace(FULL_GRAPH, name=name, source=_FIT, has_resting_logits=has_logits, **times_ns)


PROFILES: dict[str, ServerProfile] = {
    profile.name: profile
    for profile in (
        ServerProfile(
            "foredraft",
            FOREDRAFT,
            FULL_GRAPH,
            "sglang",
            "our own executor: every pass captured, host times as benchmarks/timing/test_engine_round.py measures them",
            rules_release="this package",
            times_release="this package",
        ),
        ServerProfile(
            "sglang-0.5",
            SGLANG_OVERLAP,
            _fitted(
                "sglang-0.5",
                graph_gap_ns=479.8e3,
                row_gap_ns=6.83e3,
                collective_gap_ns=1.95e3,
                eager_kernel_ns=44.9e3,
                draft_step_ns=68e3,
                tree_ns=924e3,
            ),
            "sglang",
            "fitted to SGLang 0.5 without speculation (Qwen3-32B on H100, Llama-3.1-8B and Qwen3-30B-A3B on H200) and with EAGLE-3 "
            "on H200 (Llama-3.1-8B with 1 request; Qwen3-30B-A3B and 235B-A22B, Llama-3.3-70B and Kimi-K2 with 8): "
            "docs/evidence/accuracy.md",
            rules_release="0.5.23",
            times_release="0.5.1 to 0.5.8",
            mixed=False,
            rules=SGLangRules(),
            rules_with_groups=SGLangRules(guarantee_output=0.21),  # --enable-dp-attention: conservativeness times 0.3
            running_with_draft=48,
            probe_backoff=False,  # srt/speculative/adaptive_spec_params.py, AdaptiveStepSlot
            defaults=_SGLANG,
            has_static_share=True,
            kv_layout="shares",
        ),
        ServerProfile(
            "vllm-0.9",
            replace(
                VLLM_0_10,
                name="vllm-0.9",
                **dict.fromkeys(("plan_base_ns", "launch_base_ns", "commit_base_ns", "sampling_base_ns"), 0),
                source="nothing overlaps, so the host's time is in the fitted waits of the device",
            ),
            _fitted(
                "vllm-0.9",
                graph_gap_ns=764e3,
                row_gap_ns=7.24e3,
                collective_gap_ns=1.94e3,
                draft_step_ns=68e3,
                eagle3_step_ns=695e3,
            ),
            "vllm",
            "fitted to vLLM 0.9 with EAGLE and EAGLE-3 on one H100, Llama-3.1-8B, batch 1 (13 rows, vLLM issue 20780); the waits per row "
            "and for several devices are those of vllm-0.18: docs/evidence/accuracy.md",
            rules_release="this package",
            times_release="0.9",
            kv_layout="pool",
            state_bytes=2,  # --mamba-cache-dtype auto: as the model's activations
            memory=_VLLM_MEMORY,
            holds_the_context=True,
            graph_unit="tokens",
            mode="synchronous",  # asynchronous scheduling is the default since v0.14
            defaults=_VLLM,
            counted_small=("A100", "A100-40G"),
        ),
        ServerProfile(
            "vllm-0.18",
            VLLM_0_10,
            _fitted(
                "vllm-0.18",
                graph_gap_ns=0.0,
                row_gap_ns=7.24e3,
                collective_gap_ns=1.94e3,
                eager_index_ns=115e3,
                draft_step_ns=68e3,
            ),
            "vllm",
            "fitted to vLLM of April 2026 without speculation, Llama-3.1-70B in FP8 on 1 to 8 H200 and gpt-oss-120b on 2 to 8 H100, whose "
            "times to the first token show that FP8 checkpoints keep their KV in FP8, and times per token that reading it saves no time; "
            "a draft step is that of a captured head of vllm-0.9 (assumption: EAGLE-3 is captured as well); "
            "a pass with sparse attention beyond the graphs is that of "
            "DeepSeek-V4-Flash (vLLM blog of 2026-08-14, 104 ms for 905 kernels): docs/evidence/accuracy.md",
            rules_release="0.33",
            times_release="0.18",
            kv_layout="pool",
            state_bytes=2,  # --mamba-cache-dtype auto: as the model's activations
            memory=_VLLM_MEMORY,
            holds_the_context=True,
            graph_unit="tokens",
            token_graphs=(512, 1024),  # vllm/config/vllm.py, _set_cudagraph_sizes
            rules=VLLMRules(),
            eviction_policy="release",
            has_one_budget=True,
            defaults=_VLLM,
            counted_small=("A100", "A100-40G"),
            fp8_kv=True,
            slow_fp8_kv=("H100", "H200"),
        ),
        ServerProfile(
            "trtllm-1.x",
            VLLM_0_10,
            _fitted(
                "trtllm-1.x",
                graph_gap_ns=234.2e3,
                row_gap_ns=4.43e3,
                collective_gap_ns=0.52e3,
                eager_kernel_ns=62.7e3,
                draft_step_ns=68e3,
                tree_ns=924e3,
            ),
            "trtllm",
            "fitted to TensorRT-LLM 1.0.0rc3 (Llama-3.1-8B on 1 to 8 H100) and of April 2026 (Llama-3.1-70B in FP8 on 1 to 8 H200) "
            "without speculation; drafting is that of sglang-0.5 (assumption): docs/evidence/accuracy.md",
            rules_release="1.3",
            times_release="1.0 to 1.3",
            rules=OurRules(guarantee_output=1.0),
            free_fraction=0.9,
            defaults=(_TRTLLM,),
            fp8_kv=True,
        ),
    )
}


NEWEST = {"vllm": "vllm-0.18", "sglang": "sglang-0.5", "trtllm": "trtllm-1.x"}
"""The newest profile of each server, by its name without a release."""


def profile_name(name: str) -> str:
    """Return the name of a profile, of the newest one if `name` is that of a server (case does not matter)."""
    key = name.strip().lower()
    return NEWEST.get(key, name)


def server_profile(name: str) -> ServerProfile:
    """Look up the profile called `name` (`profile_name`). Raises `UnknownServer`."""
    key = profile_name(name).strip().lower()
    if key not in PROFILES:
        hint = nearest_name(key, PROFILES)
        if not hint and (near := nearest_profile(key)) is not None:
            about = f" ({releases})" if (releases := about_releases(near)) else ""
            hint = f": no profile stands for this release; the nearest is {near}{about}, and `foredraft calibrate --from` fits your own"
        raise UnknownServer(f"unknown server {name!r}{hint}; known: {', '.join([*PROFILES, *NEWEST])}")
    return PROFILES[key]


def nearest_profile(release: str) -> str | None:
    """Return the profile whose version is nearest to a release, such as vllm-0.10.1; None without one of its server."""
    server, _, version = release.partition("-")
    others = [known for known in PROFILES if version and known.startswith(f"{server}-")]
    return min(others, key=lambda known: abs(_number(known) - _number(release)), default=None)


def _number(server: str) -> int:
    """Return the version in the name of a server as a number: 1,018 for 1.18, 25 for 0.2x."""
    major, minor = (*map(int, re.findall(r"\d{1,6}", server.replace("x", "5"))), 0, 0)[:2]
    return 1000 * major + minor
