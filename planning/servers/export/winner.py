"""The winner of a plan or a tune that was stored in a directory: its scenario, and what a replica of it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ....core.errors import ConfigError, ForedraftError, nearest
from ....core.parsing import read_json_object
from ....observe.input_files import read_text
from ....sim.scenario import Scenario
from ....sim.scenario_file import load_scenario, scenario_with
from ...candidates.candidate import REPLICAS
from .deployment import ReplicaLoad

QUESTION, ANSWER, TUNED = "question.json", "answer.json", "scenario.toml"


class Winner(NamedTuple):
    """What a search found: `load` is that of a replica, None for a tune, whose table the scenario uses (`is_tuned`)."""

    name: str
    scenario: Scenario
    load: ReplicaLoad | None
    is_tuned: bool


def read_winner(place: Path, candidate: str | None) -> Winner:
    """Return a plan's best candidate, or the one named `candidate`; of a tune the scenario that uses its table.

    Raises ForedraftError for a directory of something else, a search that has not ended, and a candidate that holds no
    load.
    """
    asked = _object(place / QUESTION)
    if asked.get("kind") == "tune":
        if candidate is not None:
            raise ConfigError.of("--candidate", candidate, "has no effect: a tune has one table")
        if not (place / TUNED).is_file():
            raise ForedraftError(f"{place}: has no {TUNED}: the search has not ended, or no table holds")
        scenario, _ = load_scenario(place / TUNED)
        return Winner(f"{scenario.name}, tuned steps", scenario, None, is_tuned=True)
    if asked.get("kind") != "plan":
        raise ForedraftError(f"{place}: is no directory of a plan or a tune")
    if not (place / ANSWER).is_file():
        raise ForedraftError(f"{place}: has no {ANSWER}: the plan has not ended; the same `foredraft plan` goes on")
    answer = _object(place / ANSWER)
    try:
        return _of_plan(place, asked, answer, candidate)
    except (KeyError, TypeError):
        message = "is not of this version: the same `foredraft plan` writes it again from the runs that are kept"
        raise ConfigError.of(str(place / ANSWER), "", message) from None


def _object(path: Path) -> dict[str, Any]:
    return read_json_object(str(path), read_text)


def _of_plan(place: Path, asked: Mapping[str, Any], answer: Mapping[str, Any], candidate: str | None) -> Winner:
    found = {one["name"]: one for one in answer["candidates"]}
    best = next((name for name, one in found.items() if one["status"] == "best"), None)
    name = candidate if candidate is not None else best
    if name is None:
        raise ForedraftError(f"{place}: no candidate of this plan holds a load")
    if name not in found:
        known = ", ".join(map(repr, found))
        raise ConfigError.of("--candidate", name, f"is none of this plan{nearest(name, found)}; there are {known}")
    one = found[name]
    if one["status"] in ("dropped", "hopeless"):
        raise ConfigError.of("--candidate", name, f"was {one['status']}: only candidates with a load can be exported")
    engines = one["engines"]
    scenario = scenario_with(asked["scenario"], {**one["settings"], REPLICAS: engines})
    per_load = one["requests_per_s"] / one["load"] / engines
    ends = one["load_interval"]
    load = ReplicaLoad(
        running=one["running_per_engine"],
        requests_per_s=one["requests_per_s"] / engines,
        interval=None if ends is None else (ends[0] * per_load, ends[1] * per_load),
        tokens_per_s=one["tokens_per_s"] / engines,
        limits=[limit["text"] for limit in answer["limits"]],
        tightest=one["tightest"],
        taken=one["taken"],
    )
    return Winner(name, scenario, load, is_tuned=False)
