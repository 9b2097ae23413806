"""Opens SGLang: its allocators, its radix cache and its adaptive number of draft steps run on a CPU.

Needs torch. Small functions of `sglang.srt.utils.common`, a module that needs a device, are taken out of its file. The
clock that orders the nodes of the radix cache counts calls, so that no two nodes are equally old.
"""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace
from typing import Any

from .release import Release, open_release
from .wheel import load_functions

RELEASES = ("0.5.23",)
REAL = (
    "sglang.srt.managers.schedule_policy",
    "sglang.srt.managers.scheduler_components.new_token_ratio_tracker",
    "sglang.srt.mem_cache.allocator.base",
    "sglang.srt.mem_cache.allocator.paged",
    "sglang.srt.mem_cache.allocator.token",
    "sglang.srt.mem_cache.base_prefix_cache",
    "sglang.srt.mem_cache.cache_init_params",
    "sglang.srt.mem_cache.events",
    "sglang.srt.mem_cache.evict_policy",
    "sglang.srt.mem_cache.prefill_budget",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.mem_cache.utils",
    "sglang.srt.speculative.adaptive_spec_params",
)
_COMMON = "sglang/srt/utils/common.py"
_FUNCTIONS = ("ceil_div", "ceil_align", "get_num_new_pages", "next_power_of_2")


def open_sglang(any_release: bool = False) -> Release:
    """Return the release, one of RELEASES if not `any_release`. Raises ConfigError, and NotInstalled without torch."""
    release, is_new = open_release("sglang", () if any_release else RELEASES, REAL)
    if is_new:
        _prepare(release)
    return release


def module_of(name: str) -> Any:
    """Return a module of the release by its path below `sglang.srt`."""
    open_sglang()
    return importlib.import_module(f"sglang.srt.{name}")


def _prepare(release: Release) -> None:
    torch = importlib.import_module("torch")
    functions = load_functions(release.path, _COMMON, _FUNCTIONS, {"torch": torch})
    no_device = dict.fromkeys(("get_bool_env_var", "is_gfx95_supported", "is_hip"), lambda *_: False)
    for name in ("utils", "utils.common"):
        vars(importlib.import_module(f"sglang.srt.{name}")).update(functions | no_device)
    platform = SimpleNamespace(capabilities=SimpleNamespace(supports_triton=False))
    vars(importlib.import_module("sglang.srt.utils"))["log_info_on_rank0"] = lambda *_: None
    vars(importlib.import_module("sglang.srt.platforms"))["current_platform"] = platform
    clock = itertools.count(1)
    now = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=lambda: 0.0)
    vars(importlib.import_module("sglang.srt.mem_cache.radix_cache"))["time"] = now
