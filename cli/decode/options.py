"""The options of a decoding session, which several commands have, in the panels that their help shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature
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


def session_option(name: str) -> Any:
    """Return what makes a parameter the option of a session of this name, for its `Annotated`."""
    declared = DECLARED[name]
    limits = {"min": declared.least} if name == "threads" else {}  # the others are checked with all problems at once
    flags = declared.flags or f"--{name.replace('_', '-')}"
    return option(flags, declared.text, declared.metavar, rich_help_panel=declared.panel, **limits)


# fmt: off
Dtype = Annotated[str, session_option("dtype")]
Quantized = Annotated[str, session_option("quantized")]
Topk = Annotated[int, session_option("topk")]
Nodes = Annotated[str | None, session_option("num_draft_tokens")]
Device = Annotated[str, session_option("device")]
Threads = Annotated[int | None, session_option("threads")]
Overlap = Annotated[bool | None, session_option("overlap")]
PageSize = Annotated[int, session_option("page_size")]
KvDtype = Annotated[str, session_option("kv_dtype")]
TensorParallel = Annotated[int, session_option("tensor_parallel")]
Disaggregate = Annotated[str | None, engine_option("--disaggregate",
    "Prefill in N processes and decode in M, each on its own GPU if there are GPUs.", "prefill=N,decode=M")]
GenerationConfig = Annotated[str, sampling_option("--generation-config",
    "auto: generation_config.json of the model gives the defaults of temperature, top_p, top_k, min_p, "
    "repetition_penalty and max_tokens. none: it does not.", "auto|none")]
AsJson = Annotated[bool, output_option("--json", AS_JSON)]
Quiet = Annotated[bool, output_option("--quiet -q", "Print no progress on standard error.")]
# fmt: on


def _session_parameters() -> dict[str, Parameter]:
    """Return the options of a session as parameters of a command, by the names of `SessionOptions`."""
    found = {}
    for one in fields(SessionOptions):
        if one.name in DECLARED and DECLARED[one.name].text:
            kind = str | None if one.name == "num_draft_tokens" else get_type_hints(SessionOptions)[one.name]
            annotation = Annotated[kind, session_option(one.name)]  # type: ignore[valid-type]
            found[one.name] = Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=annotation)
    return found


SESSION = _session_parameters()


def _session_options(**session: Any) -> None:
    """Have the parameters `SESSION`."""


_session_options.__signature__ = Signature([*SESSION.values()])  # type: ignore[attr-defined]
with_session_options: Decorator = with_options("session", _session_options)


def session_values(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for `SessionOptions`: checkpoints of the hub are on this machine then. Raises ConfigError."""
    from ...gpu.session.hub import local_checkpoint

    draft, nodes = session["draft"], tree_nodes(session["num_draft_tokens"])
    return {**session, "draft": None if draft is None else local_checkpoint(draft, "draft"), "num_draft_tokens": nodes}


def given_session_options(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not the defaults."""
    return {name: value for name, value in session.items() if value != SESSION[name].default}
