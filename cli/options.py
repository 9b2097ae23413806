"""How commands declare their options, the options that several of them have, and the refusal of those
that do nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .names import complete_setting

if TYPE_CHECKING:
    from ..observe.output_files import Document


def option(flags: str, text: str, metavar: str | None = None, **settings: Any) -> Any:
    """Return what makes a parameter an option, for its `Annotated`.
    `text` is its help; `settings` are limits, as typer has them."""
    return typer.Option(*flags.split(), help=_without_markup(text), metavar=metavar, **settings)


def _without_markup(text: str) -> str:
    """Return a help in which `[slo]` is printed as it is: the help's formatter takes such words for its markup."""
    return re.sub(r"\[(?=[a-z#/@])", r"\\[", text)


def in_panel(title: str) -> partial[Any]:
    """Return `option` for those that the help shows in a panel."""
    return partial(option, rich_help_panel=title)


ONLY = "Only with "


def only_with(*flags: str) -> partial[Any]:
    """Return `option` for those that do something only with one of `flags`. The help has a panel that says so."""
    return in_panel(ONLY + " or ".join(flags))


def mode_of(ctx: typer.Context, modes: Mapping[str, Collection[str]]) -> str | None:
    """Return which flag of `modes` is given, None without one: what a command does instead of its usual work.

    `modes` has by flag the parameters that the command takes then, beside those declared by `only_with`. Raises
    ConfigError for two of the flags, and with every option given that does nothing.
    """
    from ..core.errors import ConfigError

    flags = {flag for one in _given(ctx) for flag in one.opts}
    chosen = [flag for flag in modes if flag in flags]
    if len(chosen) > 1:
        raise ConfigError.of("<arguments>", chosen[1], f"contradicts {chosen[0]}: give one of them")
    mode = chosen[0] if chosen else None
    refuse_of_other_modes(ctx, mode, () if mode is None else modes[mode])
    return mode


def _given(ctx: typer.Context) -> list[Any]:
    """Return the parameters that the command line has."""
    sources = {one.name: ctx.get_parameter_source(one.name or "") for one in ctx.command.params}
    return [one for one in ctx.command.params if getattr(sources[one.name], "name", "") == "COMMANDLINE"]


def refuse_of_other_modes(ctx: typer.Context, mode: str | None, taken: Collection[str] = ()) -> None:
    """Raise ConfigError with every option given that does nothing in `mode`, which takes the parameters `taken` beside
    those declared by `only_with`."""
    rules = []
    for one in _given(ctx):
        flag = one.opts[0] if one.opts[0].startswith("-") else one.metavar or one.opts[0]
        panel = getattr(one, "rich_help_panel", None) or ""
        needs = panel.removeprefix(ONLY).split(" or ") if panel.startswith(ONLY) else []
        if mode is None:
            rules.append((flag, bool(needs), f"without {' or '.join(needs)}"))
        else:
            is_taken = mode in needs or mode in one.opts or one.name in taken
            rules.append((flag, not is_taken, f"{mode} makes no use of it"))
    refuse_without_effect(*rules)


def with_options(name: str, declared: Callable[..., Any] | Mapping[str, Parameter]) -> Decorator:
    """Return a decorator of commands that puts the parameters of `declared`, or those that it has by their names, in
    the place of the parameter `name`, which gets their values by their names."""
    inner = declared if isinstance(declared, Mapping) else signature(declared, eval_str=True).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**arguments: Any) -> None:
            command(**{name: {one: arguments.pop(one) for one in inner}}, **arguments)

        own = signature(command, eval_str=True).parameters.values()
        all_declared = [one for given in own for one in (inner.values() if given.name == name else (given,))]
        parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in all_declared]
        shown: Any = run  # where typer reads its parameters
        shown.__signature__ = signature(command, eval_str=True).replace(parameters=parameters)
        shown.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def argument(metavar: str | None, text: str, mode: str | None = None) -> Any:
    """Return what makes a parameter an argument, for its `Annotated`. `mode`: the flag that it does something with."""
    return typer.Argument(
        metavar=metavar, help=_without_markup(text), rich_help_panel=None if mode is None else f"{ONLY}{mode}"
    )


Decorator = Callable[[Callable[..., None]], Callable[..., None]]
output_option = in_panel("Output")
ScenarioFile = Annotated[
    Path | None, argument("SCENARIO.toml", "Scenario file. Default: Llama-3.1-8B on one H100 with EAGLE-3.")
]
Settings = Annotated[
    list[str] | None,
    option(
        "--set",
        "Set one key of the scenario to a TOML value; repeatable. `foredraft simulate --explain` prints all keys.",
        "KEY=VALUE",
        autocompletion=complete_setting,
    ),
]
TraceFile = Annotated[Path | None, option("--trace", "Replay the requests of this trace (workload.trace).", "FILE")]
Columns = Annotated[
    str | None,
    option(
        "--columns",
        "Columns of the trace, where their names do not say it: arrival=NAME,prompt=NAME,output=NAME,session=NAME (workload.columns).",
        "ROLE=NAME,…",
    ),
]
Correct = Annotated[
    bool,
    option(
        "--correct", "Multiply times by how much slower published services like this one were (hardware.correction)."
    ),
]
Seed = Annotated[int | None, option("--seed", "Seed of every random draw (the key seed).", min=0)]
Log = Annotated[Path, argument(None, "events.jsonl of a run, or its directory.")]
AllowTruncated = Annotated[
    bool, option("--allow-truncated", "Accept the log of a run that was killed; such a log has no end.")
]
AS_JSON = "Print one JSON document instead of text; `foredraft simulate --schema COMMAND` has its schema."
AsJson = Annotated[bool, option("--json", AS_JSON)]
Quiet = Annotated[bool, option("--quiet -q", "Print no progress on standard error.")]


def print_document(document: Document) -> None:
    """Print a document of --json on standard output, where nothing else may stand."""
    typer.echo(document.to_text(), nl=False)


def refuse_without_effect(*rules: tuple[str, bool, str]) -> None:
    """Raise ConfigError with every option that does nothing.
    A rule: the option, whether it was given and does nothing, and why."""
    from ..core.errors import ConfigError, Problem

    problems = [Problem(name, f"has no effect: {reason}") for name, applies, reason in rules if applies]
    if problems:
        raise ConfigError("<arguments>", problems)
