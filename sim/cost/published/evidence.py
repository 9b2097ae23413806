"""What the published points say of one deployment: a factor on its passes, and intervals of simulated times.

`effects.json` has the observations and the deviations that `benchmarks/published_fit.py` fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ....core.parsing import read_json_object
from ....observe.input_files import read_text
from .hierarchy import Observation, Place, Posterior, Prediction, Term
from .places import slopes_of
from .spread import Spread

EFFECTS = Path(__file__).with_name("effects.json")
OWN_SERVER = "foredraft"
_RELEASE = re.compile(r"(\d{1,3})\.(\d{1,3})\.(\d{1,3})")
NO_POINTS = "no published points"
TPOT, TTFT, REQUEST = "tpot", "ttft", "request"
"""The times that have effects: per output token, to the first token, and of a whole request."""


class Interval(NamedTuple):
    """The ends of an interval, as factors on a simulated value."""

    low: float
    high: float


class Difference(NamedTuple):
    """The mean of the difference of two logarithms, and half the width of its 80 % interval."""

    mean: float
    half_width: float


class Load(NamedTuple):
    """The load of a simulation, as far as errors depend on it. `clients`: requests at a time per attention group.
    `share`: of the time to the first token in the time of decoding a request."""

    clients: float = 32.0
    first_token_ms: float = 300.0
    share: float = 0.0
    equal: bool = False

    @property
    def slopes(self) -> dict[str, float]:
        return slopes_of(*self)


@dataclass(frozen=True)
class Effects:
    """The fitted effects of one source of kernels ("measured" or "roofline")."""

    posteriors: Mapping[str, Posterior]
    spreads: Mapping[str, Spread]
    quantiles: Mapping[str, tuple[float, float]]
    """By time: how many deviations an 80 % interval has on each side, for places without and with own points."""
    counts: Mapping[Place, int]
    """The number of published points of each place."""

    def predict(self, time: str, place: Place, load: Load) -> Prediction:
        """Return the prediction of log(published / simulated) of a time."""
        return self.posteriors[time].predict(place, load.slopes)

    @cached_property
    def by_deployment(self) -> dict[Place, int]:
        """The number of points of each deployment, over all runs."""
        found: dict[Place, int] = {}
        for place, count in self.counts.items():
            key = place._replace(run="")
            found[key] = found.get(key, 0) + count
        return found

    def count(self, place: Place, *fields: str) -> int:
        """Return the number of points of places that share these fields with `place`."""
        shared = [getattr(place, name) for name in fields]
        return sum(
            count for each, count in self.by_deployment.items() if [getattr(each, name) for name in fields] == shared
        )


@dataclass(frozen=True)
class Evidence:
    """What published points say of a deployment."""

    place: Place
    effects: Effects

    @cached_property
    def factor(self) -> float:
        """The factor on the time of its passes at the usual load, the median of published / simulated; 1 for a server
        without points."""
        if not self.effects.count(self.place, "server"):
            return 1.0
        return math.exp(self.effects.predict(TPOT, self.place, Load()).mean)

    def interval(self, time: str, load: Load, is_corrected: bool = True) -> Interval:
        """Return the 80 % interval of a simulated time, as factors on it.

        `is_corrected`: the passes have the factor.
        """
        mean, effects = self.effects.predict(time, self.place, load)
        applied = math.log(self.factor) if is_corrected else 0.0
        deviation = self.effects.spreads[time].deviation(self.place, load.slopes, effects)
        wide = self.effects.quantiles[time][self.has_own_points] * deviation
        return Interval(math.exp(mean - applied - wide), math.exp(mean - applied + wide))

    def compare(self, time: str, load: Load, other: Evidence, other_load: Load) -> Difference:
        """Return by how much the error of a time differs from that of another deployment: the mean of the difference of
        the two log(published / simulated), without any factor on passes, and half of its 80 % interval.

        Effects that both deployments share cancel. So does the noise of a point, if they differ in their load alone.
        """
        mean, effects = self._difference(time, load, other, other_load)
        sides = ((self, load), (other, other_load))
        noise = [side.effects.spreads[time].deviation(side.place, at.slopes, 0.0) for side, at in sides]
        scale = max(side.effects.spreads[time].effects for side, _ in sides)
        deviation = math.hypot(scale * effects, *(noise if self.place != other.place else ()))
        quantile = max(side.effects.quantiles[time][side.has_own_points] for side, _ in sides)
        return Difference(mean, quantile * deviation)

    def _difference(self, time: str, load: Load, other: Evidence, other_load: Load) -> Prediction:
        if other.effects is self.effects:
            points = (self.place, load.slopes), (other.place, other_load.slopes)
            return self.effects.posteriors[time].difference(points)
        mine, theirs = (
            self.effects.predict(time, self.place, load),
            other.effects.predict(time, other.place, other_load),
        )
        return Prediction(mine.mean - theirs.mean, math.hypot(mine.deviation, theirs.deviation))

    @cached_property
    def own_points(self) -> int:
        """The number of points of its model, GPU and server."""
        return self.effects.count(self.place, "model", "gpu", "server")

    @property
    def has_own_points(self) -> bool:
        return self.own_points > 0

    @property
    def about(self) -> str:
        """One line: what the factor and the intervals rest on."""
        if self.has_own_points:
            same = self.effects.count(self.place, "model", "gpu", "server", "number_format", "parallel")
            exact = "" if same == self.own_points else f" ({same:,} of its format and parallelism)"
            return f"{self.own_points:,} published points of this model, GPU and server{exact}"
        here = self.effects.count(self.place, "gpu", "server")
        if here:
            return f"none of this model; {here:,} published points of this GPU and server"
        near = self.effects.count(self.place, "server")
        if near:
            return f"none of this GPU and server; {near:,} published points of this server"
        return f"none of this server; {sum(self.effects.counts.values()):,} published points of others"


@lru_cache(maxsize=1)
def published_effects() -> dict[str, Effects]:
    """Return the effects that the package ships, by the source of kernels."""
    data = read_json_object(str(EFFECTS), read_text)
    return {kernels: _effects(each) for kernels, each in data["kernels"].items()}


def _effects(data: Mapping[str, Any]) -> Effects:
    places = [Place(*fields) for fields in data["places"]]
    posteriors: dict[str, Posterior] = {}
    spreads = {name: Spread(**each["spread"]) for name, each in data["times"].items()}
    for name, each in data["times"].items():
        observations = [
            Observation(places[place], mean, count, dict(zip(("load", "size", "waves", "equal"), slopes, strict=True)))
            for place, mean, count, *slopes in each["observations"]
        ]
        deviations = {Term(tuple(fields), slope): deviation for fields, slope, deviation in each["deviations"]}
        posteriors[name] = Posterior(observations, deviations, each["noise"])
    quantiles = {name: (each["quantiles"][0], each["quantiles"][1]) for name, each in data["times"].items()}
    return Effects(posteriors, spreads, quantiles, dict(zip(places, data["counts"], strict=True)))


def about_releases(server: str) -> str:
    """Say of which releases the published points of a server profile are, as far as they name one; empty if none
    does. Every interval has the spread of releases and days, because no run is of a published one."""
    major = re.search(r"\d+", server)
    named = {
        tuple(map(int, found.groups())): found.group()
        for place in published_effects()["measured"].counts
        if place.server == server and (found := _RELEASE.match(place.run))
    }
    shown = [named[numbers] for numbers in sorted(named) if major is not None and numbers[0] == int(major.group())]
    return f"its published points are of releases {shown[0]} to {shown[-1]}" if shown else ""


def published_evidence(place: Place, kernels: str) -> Evidence | None:
    """Return what published points say of a deployment; None for our own executor, which has no published points.
    `kernels`: the source of the times of passes, "measured" or "roofline"."""
    if place.server == OWN_SERVER:
        return None
    return Evidence(place, published_effects()[kernels])
