"""What a server does before it listens, and --warm-only without it: kernels are compiled, and rounds captured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...gpu.session.plan import SessionOptions, SessionPlan
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


def warm(options: SessionOptions, ready_s: float | None, as_json: bool, quiet: bool) -> None:
    """Compile the kernels of a session, so that the next one finds them in Triton's cache, and print what fits.

    Graphs are captured only to show that they fit into memory. On a CPU nothing is compiled. Raises ConfigError.
    """
    from ...core.scheduler.spec import default_graph_sizes
    from ...gpu.session.plan import plan_session, refuse_without_effect
    from ...gpu.session.ready import READY_S, make_ready
    from ...gpu.session.session import DecodeSession
    from ..decode.display import print_warm
    from ..progress import StatusLine

    plan = plan_session(options)
    refuse_without_effect(plan.options, plan.algorithm, plan.device)
    captures_ahead(plan, ready_s)
    if plan.device == "cpu":
        print_warm(plan.device, plan.algorithm.name, default_graph_sizes(plan.spec.config.max_running), as_json)
        return
    progress = StatusLine(quiet)
    try:
        progress.show("loading the weights")
        opened = DecodeSession.open(options, plan=plan)
        ready = make_ready(opened, progress.show, READY_S if ready_s is None else ready_s)
    finally:
        progress.clear()
    opened.close()
    print_warm(plan.device, plan.algorithm.name, (), as_json, ready.num_graphs, ready.notice)


def _now_and_then(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that prints a line if none was printed for PROGRESS_S."""
    told_s = -PROGRESS_S

    def on_line(line: str) -> None:
        nonlocal told_s
        if (now_s := time.monotonic()) >= told_s + PROGRESS_S:
            told_s = now_s
            tell(line)

    return on_line
