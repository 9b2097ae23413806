"""Checks beyond the types of a scenario: unknown names, and a context that the model does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ..core.acceptance.presets import choose_preset
from ..core.algorithm.registry import get_algorithm
from ..core.errors import ConfigError, ForetokenError, Problem, nearest_name
from ..core.kv.eviction import unknown_policy
from ..core.model_shape import ModelShape, UnknownModel, built_in_config, lookup_model
from .cost.hardware import lookup_gpu
from .cost.host import host_preset
from .cost.measured import packaged_config, packaged_models
from .cost.server import server_profile
from .scenario import Scenario
from .scenario_file import origin_of

SCENARIO = "<scenario>"  # an error from this source has the full keys of a scenario

_TABLE_OF = {
    SCENARIO: "",
    "speculation": "speculation.",
    "acceptance": "acceptance.",
    "<acceptance>": "acceptance.",
    "<acceptance tree>": "speculation.",
    "engine": "engine.",
}


def is_config_file(name: str) -> bool:
    """Return whether a model's name is the path of a config.json, or of the directory that has it."""
    return name.endswith(".json") or Path(name).is_dir()


def _has_config(name: str) -> bool:
    return is_config_file(name) or (built_in_config(name) is None and packaged_config(name) is not None)


def _lookup_model(name: str) -> ModelShape:
    """Return a built-in model. Raises UnknownModel, which says how else a model is named."""
    try:
        return lookup_model(name)
    except UnknownModel as error:
        others = packaged_models()
        near = nearest_name(name.rpartition("/")[2], [other.rpartition("/")[2] for other in others])
        more = (
            f"; the extra `measured` knows {len(others)} more by name{near}"
            if others
            else "; the extra `measured` knows more by name"
        )
        raise UnknownModel(f"{error}{more}") from None


def check_names(scenario: Scenario) -> None:
    """Look up every name in the scenario. Raises ConfigError with all unknown ones under their keys."""
    hardware, model, preset = scenario.hardware, scenario.model, scenario.acceptance.preset
    lookups: list[tuple[str, str | None, Callable[[str], object]]] = [
        ("model.target", None if _has_config(model.target) else model.target, _lookup_model),
        ("model.draft", None if model.draft is None or _has_config(model.draft) else model.draft, _lookup_model),
        ("hardware.gpu", hardware.gpu, lookup_gpu),
        ("hardware.server", hardware.server, server_profile),
        ("hardware.host", hardware.host, host_preset),
        ("speculation.algorithm", scenario.speculation.algorithm, get_algorithm),
        ("acceptance.preset", preset, choose_preset),
    ]
    problems = []
    for key, name, lookup in lookups:
        try:
            if name is not None:
                lookup(name)
        except ConfigError as error:
            problems += [Problem(key, _with_place(error, problem)) for problem in error.problems]
        except ForetokenError as error:
            problems.append(Problem(key, str(error)))
    unknown = unknown_policy(scenario.engine.eviction_policy)
    if unknown is not None:
        problems.append(Problem("engine.eviction_policy", unknown.message))
    if problems:
        raise ConfigError(SCENARIO, problems)


def _with_place(error: ConfigError, problem: Problem) -> str:
    """Return the message for a problem: with its place if the name is known, and something behind it, such as a plugin, is wrong."""
    return problem.message if error.source.startswith("<") else f"{error.source}: {problem}"


def check_context(scenario: Scenario, target: ModelShape) -> None:
    """Raise ConfigError for a context beyond the model's positions."""
    asked = scenario.model.context_len
    if asked is not None and asked > target.max_context:
        message = f"{asked} is beyond the {target.max_context} positions of {target.name}"
        raise ConfigError(SCENARIO, [Problem("model.context_len", message)])


def at_origins(error: ConfigError, origins: Mapping[str, str]) -> ConfigError:
    """Return the same problems with full keys, under the file or option that gave the first of them."""
    table = _TABLE_OF.get(error.source)
    if table is None:
        return error
    problems = [Problem(f"{table}{problem.key}", problem.message) for problem in error.problems]
    places = [origin_of(problem.key, origins) or SCENARIO for problem in problems]
    return ConfigError(
        places[0],
        [
            problem if place == places[0] else Problem(f"{problem.key} ({place})", problem.message)
            for problem, place in zip(problems, places, strict=True)
        ],
    )
