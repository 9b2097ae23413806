"""`foredraft schema`: the JSON schema of a scenario file, and the names of models."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..options import option

Models = Annotated[bool, option("--models", "Print the names that model.target and model.draft take instead.")]


def schema(models: Models = False) -> None:
    """Print the JSON schema of scenario files.

    The schema has every key with its type, default and meaning. Editors use it to
    complete and check TOML files:

        foredraft schema > scenario.schema.json

    With --models the command prints a name per line: the built-in models, then
    those of the extra `measured`, then other names of both. A scenario also takes the path of a config.json.
    """
    from ...sim.scenario import Scenario

    if models:
        _print_models()
    else:
        typer.echo(json.dumps(Scenario.model_json_schema(), indent=2))


def _print_models() -> None:
    from ...core.model_shape import known_models, known_repositories
    from ...observe.distribution.install_hint import install_command
    from ...sim.cost.measured import packaged_models

    others = packaged_models()
    typer.echo("\n".join(dict.fromkeys([*known_models(), *others, *known_repositories(others)])))
    if not others:
        typer.echo(f"foredraft: more names: {install_command('measured')}", err=True)
