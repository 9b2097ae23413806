"""Opens vLLM: its scheduler and its KV manager run on a CPU, with configurations that are plain attributes.

Settings that are not given are the release's own defaults, or None. Needs torch.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ...properties.block_manager.contract import STATE
from .release import Release, open_release
from .wheel import read_source

RELEASES = ("0.32.0", "0.33.0")
REAL = (
    "vllm.envs",
    "vllm.utils.hashing",
    "vllm.utils.math_utils",
    "vllm.v1.core",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.request",
    "vllm.v1.worker.gpu.spec_decode.acceptance_estimator",
    "vllm.v1.worker.gpu.spec_decode.adaptive_verification",
)
ABSENT = ("cbor2", "msgspec", "xxhash", "zmq")


class Settings(SimpleNamespace):
    """A configuration: what is not given is None, which is false."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _NoStats:
    """Statistics of a prompt that are not kept: a call returns None."""

    def __new__(cls) -> Any:
        return None


def open_vllm(any_release: bool = False) -> Release:
    """Return the release, one of RELEASES if not `any_release`. Raises ConfigError, and NotInstalled without torch."""
    release, is_new = open_release("vllm", () if any_release else RELEASES, REAL, ABSENT)
    if is_new:
        _prepare(release)
    return release


def module_of(name: str) -> Any:
    """Return a module of the release by its path below `vllm.v1`."""
    open_vllm(any_release=True)
    return importlib.import_module(f"vllm.v1.{name}")


def _prepare(release: Release) -> None:
    defaults.update(_class_defaults(release.path, "vllm/config/scheduler.py", "SchedulerConfig"))
    utils = importlib.import_module("vllm.v1.utils")
    vars(utils)["ConstantList"] = lambda items: items
    vars(utils)["record_function_or_nullcontext"] = lambda name: nullcontext()
    vars(importlib.import_module("vllm.utils"))["length_from_prompt_token_ids_or_embeds"] = lambda ids, _: len(ids)
    vars(importlib.import_module("vllm.v1.metrics.stats"))["PrefillStats"] = _NoStats
    vars(importlib.import_module("vllm.multimodal.utils"))["strip_covered_mm_data"] = lambda features, *_, **__: (
        features
    )
    importlib.import_module("vllm.v1.core.sched.async_scheduler")
    sys.modules["vllm.v1.core.kv_cache_utils"].init_none_hash(hash_of)
    structured = sys.modules["vllm.v1.request"].StructuredOutputRequest
    structured.from_sampling_params = staticmethod(lambda params: None)


defaults: dict[str, Any] = {}
"""The defaults of the release's SchedulerConfig."""


def hash_of(content: Any) -> bytes:
    """Hash the content of a block, as vLLM's `sha256` does, but faster."""
    return hash(content).to_bytes(8, "little", signed=True)


def cache_config(
    num_blocks: int, block_size: int, windows: Sequence[int] = (0,), states: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Make the release's KVCacheConfig of so many blocks, the null block not among them, and groups of layers.

    `windows`: the sliding window of each group in tokens, 0 for full attention, STATE for Mamba; `states`: further
    fields of Mamba's MambaSpec.
    """
    interface, torch = module_of("kv_cache_interface"), importlib.import_module("torch")
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = []
    for number, window in enumerate(windows):
        if window == STATE:
            given = {"block_size": block_size, "shapes": ((1,),), "dtypes": (torch.float32,)}
            spec = interface.MambaSpec(**given | dict(states))
        elif window:
            spec = interface.SlidingWindowSpec(**shape, sliding_window=window)
        else:
            spec = interface.FullAttentionSpec(**shape)
        groups.append(interface.KVCacheGroupSpec([f"layer.{number}"], spec))
    return interface.KVCacheConfig(num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)


@dataclass(frozen=True)
class SchedulerSettings:
    """What a scheduler is made with. `steps`: draft tokens of a round; `is_eagle`: these drafts have KV, which looks a
    token ahead. So hashes do, too, or with `drops_block` (disable_lookahead_block_hashes, and always before 0.33) the
    last block of a hit is dropped."""

    num_blocks: int  # without the null block
    block_size: int
    max_running: int
    budget: int  # tokens of a step
    context_len: int
    steps: int = 0
    is_eagle: bool = False
    drops_block: bool = False
    is_async: bool = False
    caches: bool = True
    more: dict[str, Any] = field(default_factory=dict)  # further settings of its SchedulerConfig

    @property
    def hash_lookahead(self) -> int:
        """How many tokens behind a block its hash covers (`VllmConfig.num_hash_lookahead_tokens`)."""
        return int(self.is_eagle and self.caches and not self.drops_block)


def make_scheduler(settings: SchedulerSettings) -> Any:
    """Make the release's scheduler, with the release's own defaults where a setting is not given."""
    is_eagle = settings.is_eagle
    speculation = Settings(
        num_speculative_tokens=settings.steps,
        max_num_new_slots_for_drafting=0,
        use_eagle=lambda: is_eagle,
        use_eagle_block_drop=lambda: is_eagle,
        needs_eagle_block_drop=lambda: is_eagle,
        uses_draft_model=lambda: False,
    )
    module = module_of("core.sched.async_scheduler" if settings.is_async else "core.sched.scheduler")
    given = {
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": settings.budget,
        "enable_chunked_prefill": True,
        "async_scheduling": settings.is_async,
        "policy": "fcfs",
    }
    config = Settings(
        scheduler_config=Settings(**defaults | given | settings.more),
        cache_config=Settings(
            block_size=settings.block_size,
            num_gpu_blocks=settings.num_blocks + 1,
            enable_prefix_caching=settings.caches,
            mamba_cache_mode="none",
        ),
        model_config=Settings(max_model_len=settings.context_len, runner_type="generate"),
        parallel_config=Settings(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
        ),
        observability_config=Settings(per_request_spec_decode_metrics="none"),
        ec_manager_config=Settings(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=Settings(enabled=False),
        speculative_config=speculation if settings.steps else None,
        num_speculative_tokens=settings.steps,
        num_lookahead_tokens=settings.steps if is_eagle else 0,
        num_prefill_lookahead_tokens=1 if is_eagle else 0,
        num_hash_lookahead_tokens=settings.hash_lookahead,
        max_concurrent_batches=2 if settings.is_async else 1,
        max_in_flight_tokens=2 * settings.budget,
        use_v2_model_runner=True,
    )
    outputs = SimpleNamespace(
        accept_tokens=lambda *_: True, should_advance=lambda _: False, validate_tokens=lambda _, ids: ids
    )
    text_only = SimpleNamespace(supports_multimodal_inputs=lambda model: False)
    kind = module.AsyncScheduler if settings.is_async else module.Scheduler
    tables = cache_config(settings.num_blocks, settings.block_size)
    return kind(config, tables, outputs, block_size=settings.block_size, mm_registry=text_only)


def make_request(
    name: str,
    tokens: Sequence[int],
    block_size: int,
    *,
    max_tokens: int = 1,
    caches: bool = True,
    hash_lookahead: int = 0,
    eos_token: int | None = None,
    **more: Any,
) -> Any:
    """Make the release's request. `more`: what its class takes besides."""
    make_hasher = module_of("core.kv_cache_utils").get_request_block_hasher
    hasher = make_hasher(block_size, hash_of, **_known(make_hasher, {"num_hash_lookahead_tokens": hash_lookahead}))
    return module_of("request").Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=more.pop("sampling_params", None)
        or Settings(max_tokens=max_tokens, eos_token_id=eos_token, min_tokens=0),
        pooling_params=None,
        block_hasher=hasher if caches else None,
        **more,
    )


def _known(call: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that this release knows."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(call).parameters}


def _class_defaults(path: Path, file: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a class of the release that have a literal as their default."""
    for node in ast.walk(ast.parse(read_source(path, file))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    value = item.value
                    if isinstance(value, ast.Call):
                        value = next((word.value for word in value.keywords if word.arg == "default"), None)
                    if isinstance(value, ast.Constant):
                        yield item.target.id, value.value
