"""The command `foredraft`. Each subcommand has a file, which imports the other packages only when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

from ..core.errors import ForedraftError
from .calibration.calibrate import calibrate
from .checking.audit import audit
from .checking.check import check
from .decode.bench import bench
from .decode.generate import generate
from .decode.selftest import selftest
from .decode.tiny import tiny
from .names import GONE
from .planning.doctor import doctor
from .planning.export import export
from .planning.plan import plan
from .planning.report import report
from .planning.sweep import sweep
from .planning.tune import tune
from .serving.serve import serve
from .simulation.simulate import simulate
from .simulation.trace import trace
from .ui import ui


class Commands(typer.core.TyperGroup):
    """The subcommands of `foredraft`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name. Raises ForedraftError for a command or an option that is gone."""
        name = args[0] if args else ""
        for gone in (name, *(f"{name} {word.partition('=')[0]}" for word in args[1:])):
            if gone in GONE:
                raise ForedraftError(f"{gone} is gone: use {GONE[gone]}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="foredraft",
    cls=Commands,
    epilog="Start with `foredraft doctor` or `foredraft tiny`. To check an engine, see `foredraft check --list`. "
    "Every command has --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for panel, commands in {
    "Answer: will it pay, how much load, with which flags": (
        *(doctor, plan, tune, sweep, simulate, calibrate, trace, report, export, ui),
    ),
    "Decode: run a model with speculation": (generate, bench, serve, tiny, selftest),
    "Check: an engine, a server, a log": (check, audit),
}.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"foredraft {version('foredraft')}")
        raise typer.Exit


@app.callback()
def foredraft(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding of large language models: simulate a deployment, decode text, check a serving engine."""
