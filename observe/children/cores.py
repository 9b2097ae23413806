"""How many cores this process may compute on: what its affinity and its container allow, and what other work leaves."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Return the cores that this process may use: those of its affinity, at most the CPU quota of its control groups
    (rounded up), at least 1. `root` is the root of the file system."""
    return max(1, min([_cores_of_affinity(), *map(math.ceil, _quotas(root))]))


def idle_cores(root: Path = _ROOT) -> int:
    """Return the usable cores that were idle over the last minute, by the load of the machine; at least 1."""
    try:
        load = os.getloadavg()[0]
    except OSError:  # a system that counts none
        load = 0.0
    return max(1, min(usable_cores(root), (os.cpu_count() or 1) - round(load)))


def _cores_of_affinity() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of the control groups that this process is in, with the groups above them."""
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        is_second_version = not controllers
        if not is_second_version and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("" if is_second_version else "cpu")
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            quota = _quota_of_second_version(folder) if is_second_version else _quota_of_first_version(folder)
            if quota is not None:
                yield quota
            if folder == top:
                break


def _quota_of_second_version(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    return None


def _quota_of_first_version(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
        return quota / period if quota > 0 else None
    return None
