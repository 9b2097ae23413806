"""A session's plan where several workers share what one process would have had, and what cannot be disaggregated."""

from __future__ import annotations

import os
from dataclasses import replace

from ...core.algorithm import AlgorithmShape
from ...core.errors import ConfigError, Problem
from ...core.handoff.wire import SENDABLE_DTYPES
from ...core.registry import is_known_everywhere
from ..session_plan import ARGUMENTS, SessionOptions, SessionPlan, plan_session
from .topology import Disaggregation


def plan_disaggregated(
    options: SessionOptions, topology: Disaggregation, longest_request: int | None = None
) -> SessionPlan:
    """The plan of each worker: all of them have the same sizes, so that whatever one has computed fits into another.

    Workers on one device share its memory, and on a CPU its cores. Raises as `plan_session` does.
    """
    devices = topology.devices(options.device)
    sharing = max(devices.count(device) for device in devices)
    threads = options.threads
    if devices[0] == "cpu" and threads is None:
        threads = max(1, (os.cpu_count() or 1) // sharing)
    fraction = options.memory_fraction / sharing
    plan = plan_session(replace(options, device=devices[0], threads=threads, memory_fraction=fraction), longest_request)
    problems = _problems(plan)
    if problems:
        raise ConfigError(ARGUMENTS, problems)
    return plan


def _problems(plan: SessionPlan) -> list[Problem]:
    algorithm, description = plan.algorithm, plan.description
    problems = []
    if not is_known_everywhere(algorithm.name):
        message = (
            f"{algorithm.name} was registered in this process alone; workers are processes of their own and know the entry "
            "points of group foretoken.algorithms"
        )
        problems.append(Problem("algorithm", message))
    shape = AlgorithmShape(
        steps=plan.sizes.max_steps,
        topk=description.topk,
        hidden_size=plan.target.hidden_size,
        target_vocab_size=plan.target.vocab_size,
    )
    for field in algorithm.relay_fields(shape):
        if field.dtype not in SENDABLE_DTYPES:
            known = ", ".join(sorted(SENDABLE_DTYPES))
            message = f"{algorithm.name} relays {field.name} as {field.dtype}; between workers travel {known}"
            problems.append(Problem("algorithm", message))
    return problems
