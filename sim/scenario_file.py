"""Reads scenarios: TOML file and command-line settings, with all problems at once and the nearest known keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from os import PathLike
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ..core.acceptance.presets import choose_preset
from ..core.algorithm.algorithm import Drafter
from ..core.algorithm.registry import get_algorithm
from ..core.errors import ConfigError, ForedraftError, Problem, nearest, shown
from ..core.model_shape import UnknownModel, known_models, known_repositories, lookup_model
from ..core.parsing import ParseError, parse_toml
from ..core.scheduler.rules import FORMER_RULES
from ..observe.distribution.install_hint import install_command
from ..observe.input_files import read_toml
from .cost.host import host_preset
from .cost.measured import packaged_models
from .cost.measured.model_files import find_model_files
from .cost.server import server_profile
from .scenario import Scenario
from .scenario.table import RefusedIf, declared_keys

SCENARIO = "<scenario>"  # an error from this source has the full keys of a scenario

_CURVE = 'workload.arrivals = "curve", with the rates in workload.curve and their length in workload.period_s'
_SERVER = "hardware.server, which chooses the rules of a server whole"
GONE = {
    **{f"engine.{rule}": _SERVER for rule in FORMER_RULES},
    "engine.retract_first": f"{_SERVER}, and with SGLang engine.retraction_policy",
    "engine.admit_with": f"{_SERVER}, and with vLLM engine.reserve_full_isl",
    "engine.block_rounds": "engine.multi_step_rounds",
    "workload.arrivals=ramp": _CURVE,
    "workload.end_rate": _CURVE,
    "workload.ramp_s": _CURVE,
}
"""Keys, and values of keys, that were removed -> what does the same now."""

_TABLE_OF = {
    SCENARIO: "",
    "speculation": "speculation.",
    "acceptance": "acceptance.",
    "<acceptance>": "acceptance.",
    "<acceptance tree>": "speculation.",
    "engine": "engine.",
}


def _lookup_model(name: str) -> object:
    """Return a built-in model. Raises UnknownModel, whose message has the nearest names and the other ways to name a
    model."""
    try:
        return lookup_model(name)
    except UnknownModel:
        packaged = packaged_models()
        known = {
            other.rpartition("/")[2].lower(): other
            for other in (*packaged, *known_repositories(packaged), *known_models())
        }
        near = [known[one] for one in get_close_matches(name.rpartition("/")[2].lower(), known, n=3, cutoff=0.5)]
        nearest_ones = f"the nearest known: {', '.join(near)}" if near else "none that is known has a like name"
        more = "" if packaged else f", {install_command('measured')} adds ninety"
        message = (
            f"unknown model {name!r}; {nearest_ones} (`foredraft simulate --list models` prints all {len(known)}{more}). Any other "
            f"model: give the path of its config.json (`hf download {name} config.json` prints it)"
        )
        raise UnknownModel(message) from None


def check_scenario(scenario: Scenario) -> None:
    """Look up every name in the scenario, and judge every key by the others. Raises ConfigError with all problems under
    their keys."""
    if problems := [*_unknown_names(scenario), *_refused(scenario)]:
        raise ConfigError(SCENARIO, problems)


def check_names(scenario: Scenario) -> None:
    """Look up every name in the scenario. Raises ConfigError with all unknown ones under their keys."""
    if problems := _unknown_names(scenario):
        raise ConfigError(SCENARIO, problems)


def _unknown_names(scenario: Scenario) -> list[Problem]:
    """Look up every name. Returns the problems under their keys.

    The name of a draft counts for an algorithm that drafts with a model: the sizes of a head whose file is not here are
    assumed.
    """
    hardware, model, preset = scenario.hardware, scenario.model, scenario.acceptance.preset
    draft = model.draft if _drafts_with_a_model(scenario) else None
    lookups: list[tuple[str, str | None, Callable[[str], object]]] = [
        ("model.target", None if find_model_files(model.target) else model.target, _lookup_model),
        ("model.draft", None if draft is None or find_model_files(draft) else draft, _lookup_model),
        ("hardware.gpu", hardware.gpu, hardware.find_gpu),
        ("hardware.prefill.gpu", None if hardware.prefill is None else hardware.prefill.gpu, hardware.find_gpu),
        ("hardware.decode.gpu", None if hardware.decode is None else hardware.decode.gpu, hardware.find_gpu),
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
        except ForedraftError as error:
            problems.append(Problem(key, str(error)))
    return problems


def _drafts_with_a_model(scenario: Scenario) -> bool:
    with suppress(ForedraftError):
        return get_algorithm(scenario.speculation.algorithm).drafter is Drafter.MODEL
    return False


def _with_place(error: ConfigError, problem: Problem) -> str:
    """Return the message for a problem. It has the place if the name is known but its target, for example a plugin, is
    wrong."""
    return problem.message if error.source.startswith("<") else f"{error.source}: {problem}"


def refuse_keys(scenario: Scenario, *tables: str, **known: object) -> None:
    """Raise ConfigError with every key that its declaration refuses (`RefusedIf`): by the scenario alone, or by what is
    `known` of the run. `tables`: beginnings of the keys that are judged; without any, all."""
    if problems := _refused(scenario, *tables, **known):
        raise ConfigError(SCENARIO, problems)


def _refused(scenario: Scenario, *tables: str, **known: object) -> list[Problem]:
    needs = next(iter(known), "")
    return [
        Problem(key, message)
        for key, one in _refusals()
        if one.needs == needs and key.startswith(tables or "") and (message := one.condition(scenario, key, **known))
    ]


@cache
def _refusals() -> list[tuple[str, RefusedIf]]:
    """Return the keys with what refuses them."""
    return [(key, one) for key, around in declared_keys(Scenario) for one in around[-1] if isinstance(one, RefusedIf)]


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


SETTINGS = "--set"
OVERRIDES = "overrides"
DEFAULT = "default"
WHOLE_TABLES = tuple(  # values, not tables of keys
    f"speculation.{key}" for key in ("adaptive", "num_draft_tokens", "round_times", "confidence_temperatures")
)


def load_scenario(
    path: str | PathLike[str] | None = None,
    settings: Sequence[str] = (),
    given: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> tuple[Scenario, dict[str, str]]:
    """Return the scenario and, for every key that was given, the place it came from (the others are defaults).

    path: a TOML file, or None. given: by their source, dotted keys with values; they win over the file. settings:
    "table.key=value" with a TOML value, or a bare word; they win over both. Raises ConfigError with every problem of
    the first source that has any.
    """
    data: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        _merge(data, read_toml(path), str(path), origins)
        _validate(data, origins)
    for source, values in given.items():
        for key, value in values.items():
            _assign(data, key, deepcopy(value))
            origins = {one: place for one, place in origins.items() if not one.startswith(f"{key}.")} | {key: source}
    set_here, problems = _parse_settings(settings)
    if problems:
        raise ConfigError(SETTINGS, problems)
    for key, value in set_here.items():
        _assign(data, key, value)
        origins[key] = SETTINGS
    return _validate(data, origins), origins


def scenario_with(tables: Mapping[str, Any], settings: Mapping[str, Any]) -> Scenario:
    """Return the scenario of plain data with some values replaced. settings: dotted keys with their values."""
    data = deepcopy(dict(tables))
    for key, value in settings.items():
        _assign(data, key, value)
    return _validate(data, dict.fromkeys(settings, OVERRIDES))


def scenario_from_dict(data: Mapping[str, Any], source: str) -> Scenario:
    """Validate plain data, for example the header of an event log."""
    return _validate(dict(data), {}, source)


def flat_items(table: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, value, description) of every leaf of a scenario."""
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(value, BaseModel):
            yield from flat_items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, field.description or ""


def _merge(
    data: dict[str, Any], more: Mapping[str, Any], source: str, origins: dict[str, str], prefix: str = ""
) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in WHOLE_TABLES:
            below = data.setdefault(key, {})
            if isinstance(below, dict):
                _merge(below, value, source, origins, f"{prefix}{key}.")
                continue
        data[key] = value
        origins[f"{prefix}{key}"] = source


def _assign(data: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        below = data.get(table)
        if not isinstance(below, dict):
            below = data[table] = {}
        data = below
    data[last] = value


def _parse_settings(settings: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    given: dict[str, Any] = {}
    problems = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(Problem(setting, "expected table.key=value"))
            continue
        value = _parse_value(text.strip())
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        given[key] = text.strip() if is_number and _takes_text(key) else value  # a release such as 0.20
    return given, problems


def _parse_value(text: str) -> Any:
    """Parse a TOML value. Anything else is a string, so that `--set hardware.gpu=H200` needs no quotes."""
    if text == "none":
        return None
    try:
        return parse_toml(f"value = {text}")["value"]
    except ParseError:
        return text


def _takes_text(key: str) -> bool:
    """Return whether a key takes a text, and no number."""
    table, _, name = key.rpartition(".")
    model = _table_at(table)
    field = None if model is None else model.model_fields.get(name)
    kinds = [] if field is None else [field.annotation]
    for kind in kinds:
        kinds += get_args(kind)
    return str in kinds and not any(kind in kinds for kind in (int, float))


def _validate(data: dict[str, Any], origins: Mapping[str, str], source: str = "<scenario>") -> Scenario:
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        by_source: dict[str, list[Problem]] = {}
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"] if not _is_branch(part))
            near = key.rpartition(".")[0] if detail["type"] == "missing" else key  # where the rest of its table is
            place = origin_of(near, origins) or source
            problem = Problem(key, _explain(detail, key))
            if problem not in by_source.setdefault(place, []):
                by_source[place].append(problem)
        first, *rest = by_source.items()
        problems = list(first[1])
        for place, more in rest:
            problems += [Problem(f"{problem.key} ({place})", problem.message) for problem in more]
        raise ConfigError(first[0], problems) from None


def origin_of(key: str, origins: Mapping[str, str]) -> str | None:
    """Return the place where `key` was given, or else the place of its table or of one of its parts."""
    near = (place for given, place in origins.items() if key.startswith(f"{given}.") or given.startswith(f"{key}."))
    return origins.get(key) or next(near, None)


def _is_branch(part: Any) -> bool:
    """Return whether a part of a location is Pydantic's name for the branch of a union, which readers do not need."""
    return (
        isinstance(part, str)
        and re.fullmatch(r"(str|int|float|dict\[.*\]|constrained-.*|function-.*)", part) is not None
    )


def _explain(detail: Mapping[str, Any], key: str) -> str:
    if detail["type"] == "extra_forbidden":
        if key in GONE:
            return f"is gone: use {GONE[key]}"
        table, _, name = key.rpartition(".")
        known = _keys_of(table)
        everywhere = [item[0] for item in flat_items(Scenario())]
        hint = nearest(name, known) or _elsewhere(name, everywhere) or nearest(key, everywhere)
        return f"unknown key{hint}" + ("" if hint else f"; known here: {', '.join(known)}")
    if detail["type"] == "model_type":
        return _as_table(detail["input"], key)
    if isinstance(detail["input"], Mapping) and not _keys_of(key) and (hint := _table_elsewhere(key, detail["input"])):
        return f"has no keys of its own{hint}"
    if (value := f"{key}={detail['input']}") in GONE:
        return f"{detail['input']} is gone: use {GONE[value]}"
    if detail["type"] == "missing":
        return f"is missing{_expected(key)}"
    message = detail["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{message}, got {shown(detail['input'])}"


def _expected(key: str) -> str:
    """Return what a key's description says of it."""
    table, _, name = key.rpartition(".")
    field = model.model_fields.get(name) if (model := _table_at(table)) is not None else None
    return f": expected {field.description}" if field is not None and field.description else ""


def _as_table(value: Any, key: str) -> str:
    """Say how to write a value that was given in the place of a table."""
    known = _keys_of(key)
    if "value" in known and isinstance(value, int) and not isinstance(value, bool):
        return f"{value} is no table; for a length of {value} tokens write '{key}={{value={value}}}'"
    return f"{shown(value)} is no table; give its keys, such as {key}.{known[0]}" if known else "expected a table"


def _table_at(table: str) -> type[BaseModel] | None:
    """Return the class of the table with this dotted key; None if there is no such table."""
    model: type[BaseModel] | None = Scenario
    for name in filter(None, table.split(".")):
        field = None if model is None else model.model_fields.get(name)
        model = None if field is None else _table_class(field.annotation)
    return model


def _keys_of(table: str) -> list[str]:
    return [] if (model := _table_at(table)) is None else list(model.model_fields)


def _table_class(annotation: Any) -> type[BaseModel] | None:
    """Return the class of a table, or of one that need not be there; None for other values."""
    kinds = (annotation, *getattr(annotation, "__args__", ()))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _table_elsewhere(key: str, given: Mapping[str, Any]) -> str:
    """Return a hint at the table of the same name, below another table, that has one of the given keys."""
    name = key.rpartition(".")[2]
    tables = (f"{table}.{name}" for table in Scenario.model_fields)
    known = (f"{table}.{one}" for table in tables for one in _keys_of(table) if one in given)
    return f" (did you mean {found!r}?)" if (found := next(known, None)) else ""


def _elsewhere(name: str, keys: Sequence[str]) -> str:
    matches = [key for key in keys if key.rpartition(".")[2] == name]
    return f" (did you mean {matches[0]!r}?)" if matches else ""
