"""What clients may ask of a server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...core.errors import ConfigError, Problem

SMALL_BODY = 1 << 13
"""Bytes of a body that is read in the event loop: one to three milliseconds of work."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on requests; seconds are real ones. Raises ConfigError for one that is not positive."""

    max_streams: int = 512  # outputs at once, running or waiting; beyond that 429
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None  # default: what the body takes
    max_choices: int = 16  # outputs of one request: n times prompts
    deadline_s: float = 600.0  # for the body of a request, and then again for its outputs
    stall_s: float = 30.0  # after this time without sending or reading, a client counts as gone
    quiet_s: float = 5.0  # after this time without news, a stream gets a comment
    retry_after_s: int = 1  # what 429 advises
    max_connections: int = 4096

    def __post_init__(self) -> None:
        problems = [
            Problem(item.name, f"must be positive, got {value}")
            for item in fields(self)
            if (value := getattr(self, item.name)) is not None and not value > 0
        ]
        if problems:
            raise ConfigError("<arguments>", problems)
