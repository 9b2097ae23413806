"""Launch commands of servers as scenarios, and what is wrong with them."""

from __future__ import annotations

import pytest
from foredraft.core.errors import ConfigError
from foredraft.planning.servers.launch import read_launch
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import load_scenario


def scenario_of(server: str, command: str) -> Scenario:
    launch = read_launch(server, command, "--from", "H100", has_model=True)
    return load_scenario(None, (), {"--from": launch.settings})[0]


def problems_of(server: str, command: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_launch(server, command, "--from", "H100")
    return str(caught.value)
