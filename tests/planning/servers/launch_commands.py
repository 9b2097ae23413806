"""Launch commands of servers as scenarios, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest
from foredraft.core.errors import ConfigError
from foredraft.planning.servers.launch import LaunchCommand, read_launch
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import load_scenario


def launch_of(command: str, server: str = "vllm") -> LaunchCommand:
    return read_launch(server, command, "--from", "H100")


def scenario_of(server: str, command: str, **more: Any) -> Scenario:
    launch = read_launch(server, command, "--from", "H100", has_model=True)
    return load_scenario(None, [f"{key}={value}" for key, value in more.items()], {"--from": launch.settings})[0]


def refusal_of(command: str, server: str = "vllm") -> str:
    return problems_of(server, command)


def problems_of(server: str, command: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_launch(server, command, "--from", "H100")
    return str(caught.value)
