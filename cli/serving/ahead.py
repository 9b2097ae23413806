"""What a server does before it listens: its kernels are compiled, and its rounds captured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...gpu.session.plan import SessionPlan
    from ...gpu.session.ready import Ready
    from ...serve.telemetry.log_lines import ServerLog

PROGRESS_S = 5.0


def captures_ahead(plan: SessionPlan, ready_s: float | None) -> bool:
    """Return whether rounds of the session are captured; if not, refuse the seconds for it. Raises ConfigError."""
    from ..options import refuse_without_effect

    is_captured = plan.spec.graph_sizes is not None
    why = "no rounds are captured here"
    refuse_without_effect(("--ready-s", ready_s is not None and not is_captured, why))
    return is_captured


def get_ready(
    make_ready: Callable[[Callable[[str], None], float], Ready], ready_s: float | None, log: ServerLog
) -> None:
    """Make a session ready within `ready_s` seconds, and tell how it goes."""
    from ...gpu.session.ready import READY_S

    ready = make_ready(_now_and_then(log.tell), READY_S if ready_s is None else ready_s)
    log.tell(ready.notice or f"all rounds are captured: {ready.num_graphs} CUDA graphs")


def _now_and_then(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return what tells a line if none was told for PROGRESS_S."""
    told_s = -PROGRESS_S

    def on_line(line: str) -> None:
        nonlocal told_s
        if (now_s := time.monotonic()) >= told_s + PROGRESS_S:
            told_s = now_s
            tell(line)

    return on_line
