"""`foredraft schema`: the JSON schema of a scenario file."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON schema of scenario files.

    Every key with its type, default and meaning, for editors that complete and
    check TOML by a schema:

        foredraft schema > scenario.schema.json
    """
    from ...sim.scenario import Scenario

    typer.echo(json.dumps(Scenario.model_json_schema(), indent=2))
