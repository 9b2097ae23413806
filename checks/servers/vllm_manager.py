"""vLLM's KV manager behind the contract of block managers: full attention, sliding windows, two groups of layers, and
its KV events.

It trusts its callers, so it does not declare `misuse`. With EAGLE the last block of a hit is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ...properties.block_manager.contract import STATE, BlockManagerConfig
from ...properties.harness.contract import Adapter
from ...properties.prefix_cache.events import CacheEvent
from .release import Recorded
from .vllm import cache_config, make_request, module_of

CONTEXT = 4096


class VLLMManager:
    """A manager of the release, and the requests that its scheduler would keep."""

    def __init__(self, config: BlockManagerConfig, use_eagle: bool, mamba_cache_mode: str) -> None:
        kind = module_of("core.kv_cache_manager").KVCacheManager
        block = {"scheduler_block_size": config.page_size, "hash_block_size": config.page_size}
        states = {"mamba_cache_mode": mamba_cache_mode, "num_speculative_blocks": config.lookahead}
        self.is_one_block: bool = mamba_cache_mode == "none"
        if self.is_one_block:
            block["scheduler_block_size"] = states["block_size"] = CONTEXT * config.page_size
        tables = cache_config(config.num_pages, config.page_size, config.windows, states)
        known = inspect.signature(kind).parameters
        block = {name: value for name, value in block.items() if name in known}
        self.config: BlockManagerConfig = config
        self.own_calls: list[str] | None = None
        self.manager: Any = Recorded(
            kind(
                tables,
                max_model_len=CONTEXT,
                enable_caching=not self.is_one_block,
                use_eagle=use_eagle,
                enable_kv_cache_events=True,
                **block,
            ),
            "manager",
            self,
            self._told,
        )
        names = {0: "full attention", STATE: f"Mamba, mamba_cache_mode={mamba_cache_mode!r}"}
        layers = ", ".join(names.get(window, f"sliding window {window}") for window in config.windows)
        self.made: str = (
            f"manager = KVCacheManager(…, use_eagle={use_eagle})  # {config.num_pages} blocks of {config.page_size} and "
            f"the null block; groups: {layers}"
        )
        self.requests: dict[str, Any] = {}

    def admit(self, request: str, tokens: Sequence[int], namespace: str, num_tokens: int) -> int | None:
        lora = (
            SimpleNamespace(name=namespace, lora_name=namespace, lora_path="", adapter_id=1)
            if "lora" in namespace
            else None
        )
        salt = namespace if namespace and lora is None else None
        made = make_request(request, tokens, self.config.page_size, lora_request=lora, cache_salt=salt)
        if self.own_calls is not None:
            more = f", cache_salt={salt!r}" if salt else f", lora_request={namespace!r}" if lora else ""
            self.own_calls.append(f"{request} = Request({list(tokens)}{more}, …)")
        blocks, length, *_ = self.manager.get_computed_blocks(made)
        count = min(num_tokens, len(tokens) - length)
        if self._allocate(made, count, num_new_computed_tokens=length, new_computed_blocks=blocks) is None:
            return None
        made.num_computed_tokens = length + count
        self.requests[request] = made
        return int(length)

    def _allocate(self, request: Any, count: int, **found: Any) -> Any:
        self.manager.new_step_starts()
        lookahead = {"num_lookahead_tokens": self.config.lookahead} if self.config.lookahead else {}
        return self.manager.allocate_slots(request, count, **found, **lookahead)

    def grow(self, request: str, tokens: Sequence[int], num_tokens: int) -> bool:
        made = self.requests[request]
        if len(tokens) > made.num_tokens:
            made.append_output_token_ids(list(tokens[made.num_tokens :]))
        if self._allocate(made, num_tokens) is None:
            return False
        made.num_computed_tokens += num_tokens
        return True

    def release(self, request: str) -> None:
        self.manager.free(self.requests.pop(request))

    def slots_of(self, request: str) -> list[int]:
        return self.tables_of(request)[0]

    def tables_of(self, request: str) -> list[list[int]]:
        size, tables = self.config.page_size, list(self.manager.get_block_ids(request))
        if self.is_one_block:
            pages = -(-self.requests[request].num_computed_tokens // size)
            for group, window in enumerate(self.config.windows):
                if window == STATE:
                    tables[group] = tables[group][:1] * (pages - 1) + tables[group]
        return [
            [block * size + offset if block else -1 for block in blocks for offset in range(size)] for blocks in tables
        ]

    def events(self) -> list[CacheEvent]:
        return [_event(event) for event in self.manager.block_pool.take_events()]

    def num_free(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def _told(self, value: Any) -> str:
        match type(value).__name__:
            case "Request":
                return str(value.request_id)
            case "KVCacheBlocks":
                return f"blocks {[list(group) for group in value.get_block_ids()]}"
            case "tuple":
                return f"({', '.join(map(self._told, value))})"
        return repr(value)


def _event(event: Any) -> CacheEvent:
    """Translate a BlockStored or BlockRemoved. The cache salt is the last key of a text's first block."""
    group = event.group_idx or 0
    if type(event).__name__ == "BlockRemoved":
        return CacheEvent(False, event.block_hashes, group)
    keys = event.extra_keys[0] if event.extra_keys else None
    namespace = str(event.lora_name or (keys[-1] if keys else ""))
    return CacheEvent(True, event.block_hashes, group, event.parent_block_hash, event.token_ids, namespace)


def _adapter(
    *capabilities: str, use_eagle: bool = False, mode: str = ""
) -> Callable[[BlockManagerConfig], VLLMManager]:
    more = ("drops_last_page",) if use_eagle else ()
    supports = (lambda config: config.windows == (0, STATE)) if mode else None
    declared = ("windows", "groups", "lookahead", *capabilities, *more)
    return Adapter(lambda config: VLLMManager(config, use_eagle, mode), declared, supports)


make: Callable[[BlockManagerConfig], VLLMManager] = _adapter("caching", "namespaces", "events")
make_eagle: Callable[[BlockManagerConfig], VLLMManager] = _adapter("caching", "namespaces", "events", use_eagle=True)
make_states: Callable[[BlockManagerConfig], VLLMManager] = _adapter("states", "caching", "events", mode="align")
make_states_eagle: Callable[[BlockManagerConfig], VLLMManager] = _adapter(
    "states", "caching", "namespaces", mode="align", use_eagle=True
)
make_states_salted: Callable[[BlockManagerConfig], VLLMManager] = _adapter(
    "states", "caching", "namespaces", "events", mode="align"
)
make_one_state: Callable[[BlockManagerConfig], VLLMManager] = _adapter("states", mode="none")
