"""What the controls of the page offer, and the keys that it begins with."""

from __future__ import annotations

from typing import Any

from ..core.acceptance.presets import TEXTS
from ..core.algorithm.registry import algorithm_names
from ..core.model_shape import known_models
from ..observe.log import package_version
from ..sim.cost.hardware import known_gpus
from ..sim.cost.measured import packaged_models
from ..sim.cost.server import PROFILES
from ..sim.effects.given_keys import given_keys
from ..sim.scenario import Scenario
from ..sim.scenario_file import flat_items


def choices(begin: Scenario) -> dict[str, Any]:
    """Return the values that a page can choose from, every key with its default and meaning, and those of `begin`."""
    given = given_keys(begin, "")
    return {
        "version": package_version(),
        "models": list(known_models()),
        "measured_models": packaged_models(),
        "gpus": list(known_gpus()),
        "servers": list(PROFILES),
        "algorithms": algorithm_names(),
        "texts": list(TEXTS),
        "keys": {key: {"default": value, "meaning": text} for key, value, text in flat_items(Scenario())},
        "begin": {key: value for key, value, _ in flat_items(begin) if key in given and value is not None},
    }
