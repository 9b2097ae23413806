"""`foredraft schema`: the JSON schema of a scenario file."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON schema of scenario files.

    The schema has every key with its type, default and meaning. Editors use it to
    complete and check TOML files:

        foredraft schema > scenario.schema.json
    """
    from ...sim.scenario import Scenario

    typer.echo(json.dumps(Scenario.model_json_schema(), indent=2))
