"""Intervals of simulated time for a timeline: what one engine's device and scheduler do when."""

from __future__ import annotations

from typing import Protocol

from ...core.contract.step import Step


class SpanSink(Protocol):
    """Takes intervals of time for a timeline: a device step or a stretch of scheduler work."""

    def span(
        self, replica: int, track: str, name: str, start_ns: int, duration_ns: int, args: dict[str, int]
    ) -> None: ...


class EngineSpans:
    """Passes the intervals of one engine to a sink, if there is one."""

    def __init__(self, replica: int, sink: SpanSink | None) -> None:
        self._replica = replica
        self._sink = sink

    def add_host(self, what: str, step: Step, start_ns: int, duration_ns: int) -> None:
        """Add work of the scheduler on `step`: "plan", "launch" of a step that waited, or "commit"."""
        if self._sink is not None:
            self._sink.span(self._replica, "scheduler", what, start_ns, duration_ns, {"step": step.step_id})

    def add_device(self, step: Step, start_ns: int, duration_ns: int, rounds: int) -> None:
        """Add a step that the device ran for so many rounds."""
        if self._sink is None:
            return
        args: dict[str, int] = {"step": step.step_id}
        name = "prefill"
        if step.decode is not None:
            name = "mixed" if step.prefill is not None else "decode"
            args |= {
                "rows": len(step.decode.rows),
                "steps": step.decode.shape.steps,
                "draft_tokens": step.decode.shape.nodes,
                "rounds": rounds,
            }
        if step.prefill is not None:
            args["prefill_tokens"] = int(step.prefill.lens.sum())
        self._sink.span(self._replica, "device", name, start_ns, duration_ns, args)
