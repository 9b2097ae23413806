"""A plan for a page's scenario: its progress, and its answer as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ..core.errors import ConfigError
from ..planning.answers.answer import search_plan
from ..planning.candidates.candidate import base_tables
from ..planning.demand.question import PlanQuestion, question_of
from ..planning.grid import parse_grid
from ..planning.plan import make_plan
from ..planning.store import kept_runs
from ..sim.scenario import Scenario

Tell = Callable[[dict[str, Any]], None]
PREFIX = "plan-"  # of the directories of plans
OPTIONS = {"slo": "--slo", "rate": "--rate", "gpus": "--gpus", "requests": "--requests", "seeds": "--seeds"}
_KINDS: Mapping[str, tuple[type, ...]] = {
    "slo": (str,), "rate": (int, float), "gpus": (int,), "requests": (int,), "seeds": (int,), "tried": (list,),
}  # fmt: skip


def options_of(asked: Mapping[str, Any]) -> list[str]:
    """Return the options of `foredraft plan` that say the same. Raises ConfigError for values of another kind."""
    words = [word for name, flag in OPTIONS.items() if asked.get(name) is not None for word in (flag, str(asked[name]))]
    return words + [word for one in _checked(asked).get("tried", ()) for word in ("--try", one)]


def _checked(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the page asks, whose values have the right types. Raises ConfigError."""
    for name, kinds in _KINDS.items():
        value = asked.get(name)
        is_right = isinstance(value, kinds) and not isinstance(value, bool)
        if value is not None and not (is_right and (name != "tried" or all(isinstance(one, str) for one in value))):
            raise ConfigError.of("<page>", name, f"expected another kind of value than {value!r}")
    return asked


def plan(scenario: Scenario, asked: Mapping[str, Any], folder: str, tell: Tell) -> dict[str, Any]:
    """Search the candidates, and return the answer as `foredraft plan --json` prints it. Raises a ForedraftError.

    folder: where the runs are kept while the server runs; the key "place" of the answer is their directory there.
    """
    tried = parse_grid(_checked(asked).get("tried", ()), "--try")
    question, scenario = _question(scenario, asked)
    whole = make_plan(scenario, tried, question)
    tables = base_tables(scenario)
    place = Path(mkdtemp(prefix=PREFIX, dir=folder))

    with kept_runs("plan", tables, place, None, None, **whole.asked) as (pool, store):

        def on_run(words: str) -> None:
            pace = whole.pace
            counts = {"round": pace.round, "ended": pace.ended[pace.round], "candidates": pace.searches[pace.round]}
            tell(
                {"plan": counts | {"runs": sum(pace.runs.values()), "left_s": pace.left_s(pool.count), "words": words}}
            )

        _, found = search_plan(whole, pool, store, lambda line: None, on_run)
    return found.to_json() | {"place": place.name}


def _question(scenario: Scenario, asked: Mapping[str, Any]) -> tuple[PlanQuestion, Scenario]:
    given = {name: asked[name] for name in OPTIONS if asked.get(name) is not None}
    load = given.pop("rate", None)
    return question_of(scenario, given.pop("slo", None), load, **given)
