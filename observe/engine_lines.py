"""Lines of an engine for the log of the process: each switch of draft steps, each fallback and each recovery is one
line.

`EngineLines` is an event sink, so simulated and real engines write the same lines. They go to the logger
`foredraft.engine`, which has no handler of its own: without one nothing is written, and `start_logging` adds one.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from ..core.contract.events import EngineStarted, Event, Planned, Resumed, StepsLost
from ..core.errors import ConfigError, Problem, count_of, nearest
from ..core.scheduler.engine import Engine

IsCaptured = Callable[[int, int], bool]

LOGGER = logging.getLogger("foredraft.engine")
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_ROOT = logging.getLogger("foredraft")
_ROOT.addHandler(logging.NullHandler())


class _Capture(Protocol):
    """What a captured graph was for, as `gpu.executor.graphs.CaptureReport` has it."""

    @property
    def steps(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def kind(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    @property
    def with_outputs(self) -> bool: ...


class EngineLines:
    """Writes the lines of one engine. Set `engine` once it is made.

    `is_captured` tells whether a round of so many rows and verified tokens per row has a graph, in a simulation; a real
    executor calls `round_ran` instead. Times are those of events, counted from the first one, or from 0 if `from_zero`.
    """

    def __init__(self, name: str, *, is_captured: IsCaptured | None = None, from_zero: bool = False) -> None:
        self.name = name
        self.engine: Engine | None = None
        self._is_captured = is_captured
        self._origin_ns = 0 if from_zero else None
        self._now_ns = 0
        self._steps: int | None = None
        self._has_graph = True
        self._limits: tuple[bool, int | None, int] | None = None

    def __call__(self, event: Event) -> None:
        """Take an event of the engine."""
        if isinstance(event, EngineStarted):
            config = event.config
            mode = "overlap" if config["overlap"] else "synchronous"
            words = f"starts: {config['algorithm']}, {mode} mode ({config['mode_reason']})"
            self._write(
                logging.INFO, "start", words, algorithm=config["algorithm"], mode=mode, reason=config["mode_reason"]
            )
            return
        if self._origin_ns is None:
            self._origin_ns = event.now_ns
        self._now_ns = event.now_ns - self._origin_ns
        if isinstance(event, Planned):
            self._tell_limits(logging.INFO)
            if event.step is not None and event.step.decode is not None:
                decode = event.step.decode
                self._planned(decode.shape.steps, len(decode.rows), decode.shape.nodes)
        elif isinstance(event, StepsLost):
            waiting, ended = len(event.retracted), len(event.finished)
            lost, again = count_of(len(event.step_ids), "step"), count_of(waiting, "request")
            words = f"{event.failure}; {lost} lost, {again} back in the queue, {ended} failed"
            facts = {
                "step": event.failure.step_id,
                "cause": event.failure.cause.value,
                "lost_steps": len(event.step_ids),
            }
            self._write(logging.WARNING, "failure", words, **facts, waiting_again=waiting, failed=ended)
            self._tell_limits(logging.WARNING)
        elif isinstance(event, Resumed):
            words = "resumes after a restart, without what was cached" if event.restarted else "resumes"
            self._write(logging.INFO, "resume", words, restarted=event.restarted)

    def round_ran(self, has_graph: bool, batch_size: int) -> None:
        """Take whether a round ran as a CUDA graph, where there are graphs; only a change is a line."""
        if has_graph == self._has_graph:
            return
        self._has_graph = has_graph
        words = "rounds run as CUDA graphs again" if has_graph else "rounds run without a CUDA graph"
        level = logging.INFO if has_graph else logging.WARNING
        self._write(
            level, "graph", f"{words} at {count_of(batch_size, 'request')}", graph=has_graph, batch_size=batch_size
        )

    def graph_captured(self, graph: _Capture) -> None:
        """Take a CUDA graph that was captured because a round needed it."""
        shape = f"{graph.steps} draft steps, {count_of(graph.batch_size, 'request')}, {graph.kind}"
        words = f"captured a CUDA graph in {graph.seconds:.2f} s: {shape}{', with outputs' * graph.with_outputs}"
        facts = {"steps": graph.steps, "batch_size": graph.batch_size, "kind": str(graph.kind)}
        self._write(logging.INFO, "capture", words, **facts, seconds=round(graph.seconds, 6))

    def _planned(self, steps: int, batch_size: int, nodes: int) -> None:
        if self._steps is not None and steps != self._steps:
            words = f"{self._steps} -> {steps} draft steps at {count_of(batch_size, 'request')}"
            self._write(logging.INFO, "steps", words, before=self._steps, after=steps, batch_size=batch_size)
        self._steps = steps
        if self._is_captured is not None:
            self.round_ran(self._is_captured(batch_size, nodes), batch_size)

    def _tell_limits(self, level: int) -> None:
        """Write a line about the limits of a step, if they have changed: they fall after a failure and rise after good
        steps."""
        if self.engine is None:
            return
        limits = self.engine.recovery.limits
        now = (limits.fewer_steps, limits.row_limit, limits.prefill_budget)
        before, self._limits = self._limits, now
        if now == before or (before is None and not limits.fewer_steps and limits.row_limit is None):
            return
        words = "steps are planned without limits again"
        if limits.fewer_steps or limits.row_limit is not None:
            rows = (
                "any number of requests"
                if limits.row_limit is None
                else f"at most {count_of(limits.row_limit, 'request')}"
            )
            fewest = "the fewest draft steps, " if limits.fewer_steps else ""
            words = f"plans smaller steps: {fewest}{rows}, {limits.prefill_budget} prefill tokens"
        facts = {"fewer_steps": now[0], "row_limit": now[1], "prefill_budget": now[2]}
        self._write(level, "limits", words, **facts)

    def _write(self, level: int, event: str, words: str, **facts: Any) -> None:
        fields = {"engine": self.name, "time_s": round(self._now_ns / 1e9, 6), "event": event, **facts, "words": words}
        _log(level, fields)


def _log(level: int, fields: Mapping[str, Any]) -> None:
    message = "%s, %.6f s: %s"
    LOGGER.log(level, message, fields["engine"], fields["time_s"], fields["words"], extra={"fields": dict(fields)})


def engine_lines(name: str, **options: Any) -> EngineLines | None:
    """Return the sink for an engine's lines; None if nothing listens, so that it costs nothing."""
    return EngineLines(name, **options) if LOGGER.isEnabledFor(logging.WARNING) and _has_handler() else None


def _has_handler() -> bool:
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


# -- where lines go ---------------------------------------------------------------------------------------------------


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: its level, its message, and the facts behind it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {key: value for key, value in getattr(record, "fields", {}).items() if key != "words"}
        return json.dumps({"level": record.levelname.lower(), **fields, "message": record.getMessage()})


class Forwarder(logging.Handler):
    """Hands each line to `send` as plain data, in a process whose parent writes it (`write_forwarded`)."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send({"level": record.levelno, "fields": record.__dict__["fields"]})


def write_forwarded(line: Mapping[str, Any], engine: str) -> None:
    """Write a line that another process has forwarded, as one of `engine`."""
    _log(line["level"], {**line["fields"], "engine": engine})


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current standard error."""

    def __init__(self, form: str) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(levelname)s %(message)s"))


def start_logging(level: str, form: str = "text") -> None:
    """Write the lines from `level` on to standard error, as text or JSON, in place of an earlier choice.
    Raises ConfigError."""
    problems = []
    for option, value, known in (("--log-level", level, LEVELS), ("--log-format", form, FORMATS)):
        if value not in known:
            problems.append(Problem(option, f"{value!r} is none of {', '.join(known)}{nearest(value, known)}"))
    if problems:
        raise ConfigError("<arguments>", problems)
    _listen(_StandardError(form), level.upper())


def forward_lines(level: str | None, send: Callable[[dict[str, Any]], None]) -> None:
    """Hand the lines from `level` on (None: no lines) to `send`, in place of an earlier choice."""
    stop_logging()
    if level is not None:
        _listen(Forwarder(send), level)


def stop_logging() -> None:
    """Write no lines any more, if `start_logging` or `forward_lines` was called."""
    for handler in [handler for handler in _ROOT.handlers if isinstance(handler, _StandardError | Forwarder)]:
        _ROOT.removeHandler(handler)
        _ROOT.setLevel(logging.NOTSET)


def active_level() -> str | None:
    """Return the name of the level from which lines are written; None if nothing listens."""
    return logging.getLevelName(LOGGER.getEffectiveLevel()) if _has_handler() else None


def _listen(handler: logging.Handler, level: str) -> None:
    stop_logging()
    _ROOT.addHandler(handler)
    _ROOT.setLevel(level)
