"""The files of a deployment for those who run it: of a page's scenario, or of a plan that the page has made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, nearest
from ..planning.servers.export.deployment import SERVERS, export, server_of
from ..planning.servers.export.winner import Winner, read_winner
from ..sim.scenario import Scenario
from .plans import PREFIX


def export_files(scenario: Scenario, asked: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return what `foredraft export --json` prints of a scenario, or of the plan that `asked` names.

    asked: `server`, a key of SERVERS, or None for the server that was simulated; `place`, the directory of a plan in
    `folder`, or None for the scenario; `candidate`, a name of that plan, or None for the best. Raises a ForedraftError.
    """
    server, place, candidate = (asked.get(key) for key in ("server", "place", "candidate"))
    if server is not None and (not isinstance(server, str) or server not in SERVERS):
        hint = nearest(str(server), SERVERS)
        raise ConfigError.of("<page>", "server", f"is {server!r}; expected {', '.join(SERVERS)}{hint}")
    winner = Winner(scenario.name, scenario, None, is_tuned=False)
    if place is not None:
        if not re.fullmatch(rf"{PREFIX}\w+", str(place)) or not Path(folder, place).is_dir():
            raise ConfigError.of("<page>", "place", "this server does not have this plan: make it again")
        winner = read_winner(Path(folder, place), candidate)
    chosen = server or server_of(winner.scenario)
    return export(winner.name, winner.scenario, chosen, winner.load, winner.is_tuned).to_json()
