"""The devices of a scenario, by its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def value_of(tables: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key of a scenario; None if it is not set."""
    found: Any = tables
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def gpus_by_name(value: Callable[[str], Any]) -> dict[str, int]:
    """Return the devices of all engines of a scenario, by the name of their GPU.

    value: of a dotted key; None where it is not set.
    """
    ratio, replicas = value("disaggregation.ratio"), value("hardware.replicas") or 1
    engines = {pool: value(f"disaggregation.{pool}") or 0 for pool in ("prefill", "decode")}
    if ratio:
        parts = dict(zip(engines, map(int, ratio.split(":")), strict=True))
        engines = {pool: replicas // sum(parts.values()) * part for pool, part in parts.items()}
    found: dict[str, int] = {}
    for pool, count in engines.items() if any(engines.values()) else [("", replicas)]:

        def own(key: str, usual: Any, pool: str = pool) -> Any:
            return value(f"hardware.{pool}.{key}") or value(f"hardware.{key}") or usual

        gpu = own("gpu", "unknown hardware")
        found[gpu] = found.get(gpu, 0) + count * own("tensor_parallel", 1) * own("attention_data_parallel", 1)
    return found
