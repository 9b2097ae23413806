"""The choice between overlap and synchronous mode: a pure function whose result carries the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError, Problem, nearest

Mode = Literal["overlap", "synchronous"]
MODES: tuple[Mode, ...] = ("overlap", "synchronous")


@dataclass(frozen=True, slots=True)
class Routing:
    """The scheduling mode of an engine, and the reason for it."""

    mode: Mode
    reason: str


def choose_mode(
    asked_for: Mode | None,
    *,
    page_size: int,
    topk: int,
    backend: str,
    backend_supports_paged_trees: bool,
    algorithm: str,
    algorithm_supports_overlap: bool,
    device_is_host: bool = False,
) -> Routing:
    """Choose the mode. `asked_for` None means the user left the choice; `topk` 1 stands for chains and no speculation.

    Overlap is chosen unless synchronous mode was asked for, the algorithm has no overlap, or trees (topk > 1) meet
    pages (page_size > 1) on a backend that does not declare the page layout of draft branches. If `device_is_host`,
    one CPU plans and computes, so synchronous mode is the default. Raises `ConfigError` for wrong arguments.
    """
    problems = []
    if asked_for is not None and asked_for not in MODES:
        problems.append(Problem("mode", f"{asked_for!r} is neither of {', '.join(MODES)}{nearest(asked_for, MODES)}"))
    if page_size < 1:
        problems.append(Problem("page_size", f"{page_size} is less than 1"))
    if topk < 1:
        problems.append(Problem("topk", f"{topk} is less than 1"))
    if problems:
        raise ConfigError("<arguments>", problems)

    if asked_for == "synchronous":
        return Routing("synchronous", "synchronous mode was asked for")
    if asked_for is None and device_is_host:
        return Routing("synchronous", "a CPU computes where the host would plan ahead")
    if not algorithm_supports_overlap:
        return Routing("synchronous", f"algorithm {algorithm} does not support overlap mode")
    if page_size > 1 and topk > 1 and not backend_supports_paged_trees:
        trees = f"trees (topk = {topk}) with pages (page_size = {page_size})"
        return Routing("synchronous", f"backend {backend} does not support {trees} in overlap mode")
    return Routing("overlap", "overlap mode was asked for" if asked_for else "overlap mode is the default")
