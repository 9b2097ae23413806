"""The options of a decoding session, which several commands have, in the panels that their help shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from ...gpu.types.session_options import DECLARED, ENGINE, MODEL, SPECULATION, SessionOptions
from ..options import AS_JSON, Decorator, in_panel, option, output_option, with_options

if TYPE_CHECKING:
    from ...core.errors import Problem

model_option, speculation_option, prompt_option = map(in_panel, (MODEL, SPECULATION, "Prompts"))
sampling_option, engine_option = map(in_panel, ("Sampling", ENGINE))


def problems_name_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with problems of its arguments written as `--adaptive: …`, where they have the
    names of parameters."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        from ...core.errors import ConfigError, ForedraftError

        try:
            command(**arguments)
        except ConfigError as error:
            if error.source != "<arguments>":
                raise
            raise ForedraftError("\n".join(_named(problem, arguments) for problem in error.problems)) from error

    return run


def _named(problem: Problem, parameters: Container[str]) -> str:
    """Return a problem as text, its key as the option that it is a value of."""
    name, dot, rest = problem.key.partition(".")
    if name in parameters:
        return f"--{name.replace('_', '-')}{dot}{rest}: {problem.message}"
    return str(problem) if name.startswith("--") else f"<arguments>: {problem}"


def tree_nodes(text: str | None) -> int | dict[str, int] | None:
    """Return what `--num-draft-tokens` says: one number, or the nodes of each step count. Raises ConfigError."""
    from ...core.errors import ConfigError

    if text is None:
        return None
    pairs = re.findall(r"([0-9]{1,9}):([0-9]{1,9})(?:,|$)", text)
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    if not pairs or ",".join(map(":".join, pairs)) != text or len(dict(pairs)) < len(pairs):
        message = f"{text!r}; expected a whole number, or one for each step count, as in 1:5,3:16"
        raise ConfigError.of("<arguments>", "--num-draft-tokens", message)
    return {steps: int(nodes) for steps, nodes in pairs}


FIELDS = {one.name: one for one in fields(SessionOptions) if one.name in DECLARED and DECLARED[one.name].text}
KINDS = get_type_hints(SessionOptions) | {"num_draft_tokens": str | None}  # see `tree_nodes`


def session_option(name: str, more: str = "", **own: Any) -> Any:
    """Return what makes a parameter the option of a session of this name, for its `Annotated`. `more`: what the help of
    a command adds. `own`: what a command has instead of the declared text, metavar, panel and limits."""
    declared = DECLARED[name]
    if name == "threads":  # the others are checked with all problems at once
        own.setdefault("min", declared.least)
    panel, flags = own.pop("panel", declared.panel), declared.flags or f"--{name.replace('_', '-')}"
    text, metavar = own.pop("text", declared.text) + more, own.pop("metavar", declared.metavar)
    return option(flags, text, metavar, rich_help_panel=panel, **own)


def session_parameter(name: str, more: str = "", kind: Any = None, default: Any = MISSING, **own: Any) -> Parameter:
    """Return a parameter of a command that is the option of a session of this name. `kind`, `default`, `more`, `own`:
    what the command has instead of what is declared, as in `session_option`."""
    annotation = Annotated[KINDS[name] if kind is None else kind, session_option(name, more, **own)]  # type: ignore[valid-type]  # a type that is made at run time
    usual = FIELDS[name].default if default is MISSING else default
    default = Parameter.empty if usual is MISSING else usual
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


SESSION = {name: session_parameter(name) for name in FIELDS}
OPTIONAL_MODEL = session_parameter("model", kind=Path | None, default=None)


def with_session_options(*names: str, **own: Parameter) -> Decorator:
    """Return a decorator of commands that puts options of a session in the place of the parameter `session`: those of
    these names, or all. `own`: those of which the command says more, or of another kind."""
    return with_options("session", {name: own.get(name, SESSION[name]) for name in FIELDS if name in (names or FIELDS)})


# fmt: off
Disaggregate = Annotated[str | None, engine_option("--disaggregate",
    "Prefill in N processes and decode in M, each on its own GPU if there are GPUs.", "prefill=N,decode=M")]
GenerationConfig = Annotated[str, sampling_option("--generation-config",
    "auto: generation_config.json of the model gives the defaults of temperature, top_p, top_k, min_p, "
    "repetition_penalty and max_tokens. none: it does not.", "auto|none")]
AsJson = Annotated[bool, output_option("--json", AS_JSON)]
Quiet = Annotated[bool, output_option("--quiet -q", "Print no progress on standard error.")]
# fmt: on


def session_values(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for `SessionOptions`: checkpoints of the hub are on this machine then. Raises ConfigError."""
    from ...gpu.session.hub import local_checkpoint

    model, draft = local_checkpoint(session["model"]), session["draft"]
    changed = {"model": model, "draft": None if draft is None else local_checkpoint(draft, "draft")}
    return {**session, **changed, "num_draft_tokens": tree_nodes(session["num_draft_tokens"])}


def given_session_options(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not the defaults."""
    return {name: value for name, value in session.items() if value not in (None, SESSION[name].default)}
