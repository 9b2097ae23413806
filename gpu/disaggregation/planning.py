"""A session's plan where several workers share what one process would have had, and what cannot be disaggregated."""

from __future__ import annotations

import os
from dataclasses import replace

from ...core.algorithm.registry import is_known_everywhere
from ...core.errors import ConfigError, Problem
from ..session.plan import ARGUMENTS, SessionOptions, SessionPlan, plan_session
from .topology import Disaggregation


def plan_disaggregated(
    options: SessionOptions, topology: Disaggregation, longest_request: int | None = None
) -> SessionPlan:
    """Return the plan of each worker: all of them have the same sizes, so that whatever one has computed fits into another.

    Workers on one device share its memory, and on a CPU its cores. Raises as `plan_session` does.
    """
    devices = topology.devices(options.device)
    sharing = max(devices.count(device) for device in devices)
    threads = options.threads
    if devices[0] == "cpu" and threads is None:
        threads = max(1, (os.cpu_count() or 1) // sharing)
    fraction = options.memory_fraction / sharing
    plan = plan_session(replace(options, device=devices[0], threads=threads, memory_fraction=fraction), longest_request)
    if not is_known_everywhere(plan.algorithm.name):
        message = (
            f"{plan.algorithm.name} was registered in this process alone; workers are processes of their own and know the entry "
            "points of group foretoken.algorithms"
        )
        raise ConfigError(ARGUMENTS, [Problem("algorithm", message)])
    return plan
