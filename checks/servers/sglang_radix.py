"""SGLang's radix cache behind the prefix cache contract.

It trusts its callers: a lock on a node that was evicted is not noticed. `evict` frees slots through the allocator,
which is the adapter here. Its "lfu" counts insertions, not matches, so that order is not asked for.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ...properties.harness.contract import Adapter
from ...properties.prefix_cache.contract import PrefixCacheConfig
from .release import Recorded
from .sglang import module_of

Handle = Any
"""A TreeNode."""


class SGLangRadixCache:
    """A cache of the release without a request table."""

    def __init__(self, config: PrefixCacheConfig) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.base: Any = module_of("mem_cache.base_prefix_cache")
        self.radix: Any = module_of("mem_cache.radix_cache")
        params = module_of("mem_cache.cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self,
            page_size=config.page_size,
            is_eagle=config.bigram,
            eviction_policy=config.policy,
        )
        self.config = config
        self.freed: list[int] = []
        self.own_calls: list[str] | None = None
        said = f"page_size={config.page_size}, is_eagle={config.bigram}, eviction_policy={config.policy!r}"
        self.made: str = f"cache = RadixCache(CacheInitParams({said}, …))"
        self.tree: Any = self.radix.RadixCache(params)
        self.cache: Any = Recorded(self.tree, "cache", self, self._told)

    # -- the allocator of the cache -----------------------------------------------------------------------------------

    device = "cpu"

    def free_segment(self, free_index: Any, *, start_pos: int) -> None:
        assert start_pos % self.config.page_size == 0
        self.freed += free_index.tolist()

    # -- the contract -------------------------------------------------------------------------------------------------

    def _key(self, tokens: Sequence[int], namespace: str) -> Any:
        return self.radix.RadixKey(array("q", tokens), namespace or None)

    def match(self, tokens: Sequence[int], namespace: str) -> tuple[Handle, list[int]]:
        found = self.cache.match_prefix(self.base.MatchPrefixParams(key=self._key(tokens, namespace)))
        slots = self.tree.path_device_indices(found.last_device_node).tolist()
        assert len(slots) == found.device_prefix_len
        return found.last_device_node, slots

    def insert(
        self, tokens: Sequence[int], slots: Sequence[int], namespace: str
    ) -> tuple[Handle, list[int], list[int]]:
        value = self.torch.tensor(slots, dtype=self.torch.int64)
        key = self._key(tokens[: len(slots) + self.config.bigram], namespace)
        done = self.cache.insert(self.base.InsertParams(key=key, value=value))
        node = done.last_device_node
        path = self.tree.path_device_indices(node).tolist()
        copies = [slot for slot, kept in zip(slots[: done.prefix_len], path, strict=False) if slot != kept]
        return node, path, copies

    def lock(self, handle: Handle) -> None:
        self.cache.inc_lock_ref(handle)

    def unlock(self, handle: Handle) -> None:
        self.cache.dec_lock_ref(handle)

    def evict(self, num_slots: int) -> list[int]:
        self.freed = []
        done = self.cache.evict(self.base.EvictParams(num_tokens=num_slots))
        assert done.num_tokens_evicted == len(self.freed)
        return self.freed

    def num_evictable(self) -> int:
        return int(self.tree.evictable_size())

    def num_protected(self) -> int:
        return int(self.tree.protected_size())

    def nodes(self) -> list[tuple[int, int, int, list[int], list[int]]]:
        found, waiting = [], [(self.tree.root_node, -1)]
        while waiting:
            node, parent = waiting.pop()
            children = list(node.children.values())
            slots = [] if parent == -1 else node.value.tolist()
            found.append((node.id, parent, node.lock_ref, slots, [child.id for child in children]))
            waiting += [(child, child.parent.id) for child in children]
        return found

    def _told(self, value: Any) -> str:
        match type(value).__name__:
            case "TreeNode":
                return "root" if value is self.tree.root_node else f"node_{value.id}"
            case "MatchResult":
                return f"{value.device_prefix_len} tokens, {self._told(value.last_device_node)}"
            case "InsertResult":
                return f"{value.prefix_len} tokens were there, {self._told(value.last_device_node)}"
            case "EvictResult":
                return f"freed {self.freed}"
            case "MatchPrefixParams":
                return f"MatchPrefixParams({self._told(value.key)})"
            case "InsertParams":
                return f"InsertParams({self._told(value.key)}, torch.tensor({value.value.tolist()}))"
            case "RadixKey":
                extra = f", {value.extra_key!r}" if value.extra_key else ""
                return f'RadixKey(array("q", {list(value.token_ids)}){extra})'
            case "EvictParams":
                return f"EvictParams({value.num_tokens})"
            case "IncLockRefResult" | "DecLockRefResult":
                return f"delta {value.delta}"
        return repr(value)


def _adapter(order: str) -> Callable[[PrefixCacheConfig], SGLangRadixCache]:
    orders = {"": (), "lru": ("lru",), "fifo": ("lru", "policies")}[order]
    capabilities = ("paged", "bigrams", "wide_ids", "namespaces", "inspection", "unchecked_locks", *orders)
    return Adapter(SGLangRadixCache, capabilities, lambda config: config.policy == (order or "lru"))


make: Callable[[PrefixCacheConfig], SGLangRadixCache] = _adapter("")
make_lru: Callable[[PrefixCacheConfig], SGLangRadixCache] = _adapter("lru")
make_fifo: Callable[[PrefixCacheConfig], SGLangRadixCache] = _adapter("fifo")
