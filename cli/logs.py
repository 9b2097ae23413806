"""The options for log lines of an engine, which simulate and generate have in common."""

from __future__ import annotations

from typing import Annotated

from .options import output_option, refuse_without_effect

DEFAULT_FORMAT = "text"

# fmt: off
LogLevel = Annotated[str | None, output_option("--log-level",
    "Write log lines from this level on to standard error: each switch of draft steps (info), each fallback and each "
    "failed step (warning). Default: no log lines.", "debug|info|warning|error")]
LogFormat = Annotated[str, output_option("--log-format",
    "text: plain lines. json: objects with the engine, the time and the numbers of each line.", "text|json")]
# fmt: on


def start_logging(level: str | None, form: str) -> None:
    """Start log lines if a level was given. Raises ConfigError."""
    refuse_without_effect(
        ("--log-format", level is None and form != DEFAULT_FORMAT, "without --log-level no line is written")
    )
    if level is not None:
        from ..observe import engine_lines

        engine_lines.start_logging(level, form)
