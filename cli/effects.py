"""Options that do nothing in a run are refused: they were meant to do something."""

from __future__ import annotations


def refuse_without_effect(*rules: tuple[str, bool, str]) -> None:
    """Raise ConfigError with every option that does nothing. A rule: the option, whether it was given and does nothing, and why."""
    from ..core.errors import ConfigError, Problem

    problems = [Problem(option, f"has no effect: {reason}") for option, applies, reason in rules if applies]
    if problems:
        raise ConfigError("<arguments>", problems)
