"""The configuration of a part of a model, and what keeps a model from being divided."""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import ConfigError, Problem
from ..types.shards import Shard
from .config import ModelConfig


def sharded(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the configuration of the layers of one part: its heads and channels. `check_shards` has found that it can
    be divided."""
    if shard.is_whole:
        return config
    size, moe, state = shard.size, config.moe, config.state
    if moe is not None:
        moe = replace(moe, intermediate_size=moe.intermediate_size // size, shared_size=moe.shared_size // size)
    if state is not None:
        state = replace(state, heads=state.heads // size, key_heads=state.key_heads // size)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        full_kv_heads=max(1, config.full_kv_heads // size) if config.full_kv_heads else 0,
        intermediate_size=config.intermediate_size // size,
        moe=moe,
        state=state,
        shard=shard,
    )


def check_shards(config: ModelConfig, size: int, source: str) -> None:
    """Raise ConfigError with everything that keeps a model from being divided among `size` ranks."""
    even = {"num_attention_heads": config.num_heads}
    if config.state is not None:  # whose heads are in whole groups
        even["linear_num_key_heads"] = config.state.key_heads
    if config.num_moe_layers < config.num_layers:
        even["intermediate_size"] = config.intermediate_size
    if config.moe is not None:
        even["moe_intermediate_size"] = config.moe.intermediate_size
        if config.moe.shared_size:
            even["shared experts' width"] = config.moe.shared_size
    found = [Problem(key, f"{n} cannot be divided by {size}") for key, n in even.items() if n % size]
    for key, n in (
        ("num_key_value_heads", config.num_kv_heads),
        ("num_global_key_value_heads", config.full_kv_heads),
    ):
        if n and n % size and size % n:
            found.append(Problem(key, f"{n} heads can neither be divided by {size} nor be copied to as many"))
    if -(-config.vocab_size // -(-config.vocab_size // size)) < size:
        found.append(Problem("vocab_size", f"{config.vocab_size} tokens are too few: a rank would have none"))
    if found:
        architecture = config.architecture
        problems = [replace(p, message=f"{p.message}: {architecture} cannot run on {size} ranks") for p in found]
        raise ConfigError(source, problems)
