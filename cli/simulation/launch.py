"""Launch commands of other servers in the place of a scenario: `--from-sglang`, `--from-vllm`, `--from-trtllm`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..options import option

if TYPE_CHECKING:
    from ...sim.scenario import Scenario

WIDTH = 80
MODEL = "model.target"
FromSglang = Annotated[
    str | None, option("--from-sglang", "Launch command of SGLang, or only its arguments.", "COMMAND|FILE")
]
FromVllm = Annotated[
    str | None, option("--from-vllm", "Launch command of vLLM, or only its arguments.", "COMMAND|FILE")
]
FromTrtllm = Annotated[
    str | None,
    option("--from-trtllm", "Launch command of TensorRT-LLM (trtllm-serve), or only its arguments.", "COMMAND|FILE"),
]
ServerLog = Annotated[
    Path | None,
    option(
        "--server-log",
        "Log of a server's start: its KV pool, captured sizes and release replace the computed ones.",
        "FILE",
    ),
]


def launched(
    scenario: Path | None,
    settings: Sequence[str],
    sglang: str | None,
    vllm: str | None,
    trtllm: str | None,
    server_log: Path | None = None,
) -> Mapping[str, Mapping[str, Any]]:
    """Return the keys that a launch command gives, by its option, and behind them those of a server's log, by its
    lines; empty without both. Says on standard error what is not modelled, and what in the log contradicts the rest.

    `scenario`, `settings`: what else is given; the GPU, which a command does not name, is taken from there, and the
    model if the command names none.
    """
    given = _of_command(scenario, settings, sglang, vllm, trtllm)
    if server_log is None:
        return given
    from ...planning.servers.started.measured import with_log
    from ...planning.servers.started.start_log import read_start_log

    given, sentences = with_log(read_start_log(str(server_log)), scenario, settings, given)
    _say("--server-log", sentences)
    return given


def _of_command(
    scenario: Path | None, settings: Sequence[str], sglang: str | None, vllm: str | None, trtllm: str | None
) -> Mapping[str, Mapping[str, Any]]:
    """Return the keys that a launch command gives, by its option; empty without one."""
    commands = {"sglang": sglang, "vllm": vllm, "trtllm": trtllm}
    given = [(server, command) for server, command in commands.items() if command is not None]
    if not given:
        return {}
    from ...core.errors import ConfigError
    from ...planning.servers.launch import read_launch
    from ...sim.scenario_file import load_scenario

    server, command = given[0]
    if len(given) > 1:
        raise ConfigError.of("<arguments>", f"--from-{given[1][0]}", f"contradicts --from-{server}: give one of them")
    option = f"--from-{server}"
    if scenario is not None and " -" in str(scenario):
        message = (
            f"was split by the shell at the commas of its JSON ({str(scenario)!r} stands alone); leave out the single quotes "
            "around the JSON, or write the command into a file"
        )
        raise ConfigError.of("<arguments>", option, message)
    needed = ("hardware.gpu=", "hardware.custom", "hardware.release=", f"{MODEL}=")
    early = [text for text in settings if text.strip().startswith(needed)]
    known, origins = load_scenario(scenario, early)
    launch = read_launch(
        server, command, option, known.hardware.device, has_model=MODEL in origins, release=known.hardware.release
    )
    _say(option, launch.notes())
    return {option: launch.settings}


def capacity_of_launch(scenario: Scenario, with_notices: bool = False, must_fit: bool = False) -> list[str]:
    """Return what the server of a launch command would print of its KV pool, and perhaps the notices about its start.
    If the model does not fit: nothing, or with `must_fit` raises InsufficientMemory."""
    from ...sim.assembly import assemble
    from ...sim.assembly.explaining import capacity_lines
    from ...sim.cost.memory import InsufficientMemory
    from ...sim.effects.notices import start_notices

    try:
        run = assemble(scenario)
    except InsufficientMemory:
        if must_fit:
            raise
        return []
    notices = start_notices(run) if with_notices else ()
    return [*capacity_lines(run), *(line for notice in notices for line in textwrap.wrap(notice, WIDTH))]


def _say(option: str, lines: Sequence[str]) -> None:
    """Print lines about an option on standard error."""
    for line in lines:
        print(
            textwrap.fill(f"{option}: {line}", WIDTH, subsequent_indent="  ", break_on_hyphens=False), file=sys.stderr
        )
