"""When an operation of the trial can run."""

from __future__ import annotations

from typing import Protocol

from .contract import Service, SimulatorConfig


class Described(Protocol):
    """What a trial says of the simulator and the service that it has described."""

    config: SimulatorConfig
    service: Service


QUIET_FAULTS = ("device.slow", "device.raises", "device.restarts", "link.late", "pool.denied", "pool.retraction")
"""Faults that change nothing of what is asked for."""


PARTS = {
    "a verify tree": "books",
    "steps that follow the load": "books",
    "engines of two pools": "books",
    "KV that leaves before its prompt is computed": "books",
    "engines that change their role": "rebalance",
}
"""What a service may do without: a check in which a declared part was never used has not checked it."""


def used_parts(config: SimulatorConfig) -> dict[str, bool]:
    """Return which of `PARTS` a run uses."""
    return {
        "a verify tree": config.topk > 1 and config.steps > 0,
        "steps that follow the load": config.adaptive and config.steps > 0,
        "engines of two pools": config.has_pools,
        "KV that leaves before its prompt is computed": config.has_pools and config.layerwise,
        "engines that change their role": config.rebalance_ms > 0,
    }


def is_calm(t: Described) -> bool:
    return t.service.faults is None


def is_open(t: Described) -> bool:
    """Return whether requests come at their own times, and stay."""
    return is_calm(t) and not t.service.clients and not t.service.has_leavers


def is_steady(t: Described) -> bool:
    """Return whether no slots that a step of several rounds holds are wanted before its end."""
    # A request that leaves while such a step runs ends with its round, and not at once: a router may send the next one
    # elsewhere.
    is_routed_by_ends = t.service.has_leavers and t.service.replicas > 1
    return is_calm(t) and not t.config.has_pools and not is_routed_by_ends


def has_one_draft(t: Described) -> bool:
    """Return whether what a request gets in a round follows from that request alone."""
    return not t.config.adaptive and not t.service.clients and not t.service.has_leavers


def is_apart(t: Described, replicas: int, cancels: int) -> bool:
    """Return whether no engine of the service depends on another one when requests come to them in turn."""
    return is_calm(t) and not t.config.has_pools and not t.service.clients


def may_have_faults(t: Described) -> bool:
    return not t.config.has_pools


def may_have_more_pages(t: Described) -> bool:
    return is_open(t) and not t.config.has_pools and not t.config.adaptive


def is_new_fault(t: Described, kind: str) -> bool:
    return may_have_faults(t) and has_one_draft(t) and kind in QUIET_FAULTS and kind not in dict(t.service.faults or ())


def is_server(t: Described, services: str, seed: int) -> bool:
    # A pipeline that plans ahead is no such server: while the next request waits, a short one takes a step longer.
    return not t.config.overlap and not t.config.has_pools and services in ("constant", "exponential") and seed >= 0
