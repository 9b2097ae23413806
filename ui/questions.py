"""The questions that a page asks, from plain data to plain data; processes answer them (`process.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..core.errors import ConfigError, ForedraftError
from ..observe.distribution.install_hint import install_command
from ..sim.scenario import Scenario
from ..sim.scenario_file import SETTINGS, at_origins, scenario_with
from .answers import answer
from .dropped import place_of, read_dropped
from .exports import export_files
from .plans import options_of, plan
from .runs import simulate
from .texts import TRACE, commands, scenario_toml

Tell = Callable[[dict[str, Any]], None]
"""Takes what is known before the end of an answer."""


def ask(question: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the answer of a question as `{"result": …}`, or `{"error": {"message", "problems"}}` for bad input."""
    try:
        return {"result": _ASKED[question["ask"]](question, tell)}
    except ConfigError as error:
        if error.source != SETTINGS and not re.fullmatch(r"<\w+>", error.source):  # a file, not the keys of the page
            return _error(str(error))
        problems = [{"key": problem.key, "message": problem.message} for problem in error.problems]
        return _error("\n".join(map(str, error.problems)), problems)
    except ForedraftError as error:
        return _error(str(error))
    except ModuleNotFoundError as error:
        return _error(f"{error.name} is not installed: {install_command('planning')}")


def _error(message: str, problems: list[dict[str, str]] | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "problems": problems or []}}


def _scenario(question: Mapping[str, Any]) -> tuple[Scenario, dict[str, str]]:
    """Return the scenario of a page, and the keys that the page gives. Raises ConfigError with full keys."""
    given = dict(question["given"])
    if isinstance(given.get(TRACE), str):
        given[TRACE] = place_of(given[TRACE], question["folder"])
    try:
        return scenario_with({}, given), dict.fromkeys(given, SETTINGS)  # as the command that says the same
    except ConfigError as error:
        raise ConfigError(SETTINGS, error.problems) from None


def _answer(question: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    scenario, origins = _scenario(question)
    if question.get("roofline"):  # which needs no tables of kernels
        scenario = scenario_with(scenario.model_dump(mode="json"), {"hardware.kernels": "roofline"})
    batch, context = question["batch"], question["context"]
    try:
        found = answer(scenario, origins, batch, context)
    except ConfigError as error:
        raise at_origins(error, origins) from None
    cost = found["cost"]
    more = {"doctor --round": ["--batch", str(cost["batches"][0]["batch"]), "--context", str(cost["context"])]}
    with suppress(ConfigError):  # what is asked of a plan is judged when it is asked
        more["plan"] = options_of(question["plan"])
    texts = {"toml": scenario_toml(question["given"]), "commands": commands(question["given"], more)}
    return found | texts


def _read(question: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    return read_dropped(question["name"], question["text"], question["given"], question["folder"])


def _export(question: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    scenario, origins = _scenario(question)
    try:
        return export_files(scenario, question, question["folder"])
    except ConfigError as error:
        raise at_origins(error, origins) from None


def _simulate(question: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    scenario, origins = _scenario(question)
    try:
        return simulate(scenario, origins, tell)
    except ConfigError as error:
        raise at_origins(error, origins) from None


def _plan(question: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    return plan(_scenario(question)[0], question["plan"], question["folder"], tell)


_ASKED: Mapping[str, Callable[[Mapping[str, Any], Tell], dict[str, Any]]] = {
    "answer": _answer,
    "read": _read,
    "export": _export,
    "simulate": _simulate,
    "plan": _plan,
}
