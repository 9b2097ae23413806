"""How commands declare their options, the options that several of them have, and the refusal of those that do nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


def option(kind: Any, flags: str, text: str, metavar: str | None = None, **settings: Any) -> Any:
    """Return the annotation of a parameter that is an option. `text` is its help; `settings` are limits, as typer has them."""
    return Annotated[kind, typer.Option(*flags.split(), help=text, metavar=metavar, **settings)]


def in_panel(title: str) -> partial[Any]:
    """Return `option` for those that the help shows in a panel."""
    return partial(option, rich_help_panel=title)


def argument(kind: Any, metavar: str | None, text: str) -> Any:
    """Return the annotation of a parameter that is an argument."""
    return Annotated[kind, typer.Argument(metavar=metavar, help=text)]


output_option = in_panel("Output")
ScenarioFile = argument(Path | None, "SCENARIO.toml", "Scenario file. Default: Llama-3.1-8B on one H100 with EAGLE-3.")
Settings = option(
    list[str] | None,
    "--set",
    "Set one key of the scenario to a TOML value; repeatable. `foredraft simulate --explain` prints all keys.",
    "KEY=VALUE",
)
TraceFile = option(Path | None, "--trace", "Replay the requests of this trace (workload.trace).", "FILE")
Seed = option(int | None, "--seed", "Seed of every random draw (the key seed).", min=0)
Log = argument(Path, None, "events.jsonl of a run, or its directory.")
AllowTruncated = option(bool, "--allow-truncated", "Accept the log of a run that was killed; such a log has no end.")
Quiet = option(bool, "--quiet -q", "Print no progress on standard error.")


def refuse_without_effect(*rules: tuple[str, bool, str]) -> None:
    """Raise ConfigError with every option that does nothing. A rule: the option, whether it was given and does nothing, and why."""
    from ..core.errors import ConfigError, Problem

    problems = [Problem(name, f"has no effect: {reason}") for name, applies, reason in rules if applies]
    if problems:
        raise ConfigError("<arguments>", problems)
