"""What published points say of a deployment: how far simulated times may be off, and by how much its own points differ.

`deployments.json` has the deployments and the errors by what is known, which `benchmarks/published_fit.py` computes:
those of points that were left out, with all that the class of a deployment does not know.
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
from .places import SharedPlace

DEPLOYMENTS = Path(__file__).with_name("deployments.json")
_RELEASE = re.compile(r"(\d{1,3})\.(\d{1,3})\.(\d{1,3})")
NO_POINTS = "no published points"
TPOT, TTFT, REQUEST = "tpot", "ttft", "request"
"""The times that are compared: per output token, to the first token, and of a whole request."""
OWN, GPU, SERVER, NOTHING = "own deployment", "same server and GPU", "same server", "nothing"
"""What is known of a deployment, by the points that are published: of its own model, GPU, server, format and
parallelism; of others on this GPU under this server; of this server on other GPUs; none of this server, or of this
GPU."""
SHARED = (("model", "gpu", "server"), ("gpu", "server"), ("model", "server"), ("server",), ())
"""What two deployments share, the most first."""


class Interval(NamedTuple):
    """The ends of an interval, as factors on a simulated value."""

    low: float
    high: float


class LogDifference(NamedTuple):
    """The mean of the difference of two logarithms, and half the width of its 80 % interval."""

    mean: float
    half_width: float


class PublishedDeployment(NamedTuple):
    """A deployment with published points: their number, the first and last release that they name, and the mean
    log(published / simulated) of each time; `drafts`: with speculation."""

    place: SharedPlace
    drafts: bool
    points: int
    releases: tuple[str, ...]
    means: Mapping[str, float]


@dataclass(frozen=True)
class PublishedErrors:
    """The deployments of one source of kernels ("measured" or "roofline"), and errors by what is known.

    Attributes:
        published: The deployments of both sources, each once.
        times: By time and by what is known, the quantiles 10 % and 90 % of log(published / simulated) of points that
            were left out; of own deployments around their mean.
        drafts: The same of the time per output token with drafts, by what is known of drafts.
        speed_ups: By what is known of drafts, the 80 % quantile of the error of a speed-up.
        apart: By time and by what two deployments share (`SHARED`), the 80 % quantile of how far their errors differ.
    """

    deployments: tuple[PublishedDeployment, ...]
    published: tuple[PublishedDeployment, ...]
    times: Mapping[str, Mapping[str, tuple[float, float]]]
    drafts: Mapping[str, tuple[float, float]]
    speed_ups: Mapping[str, float]
    apart: Mapping[str, tuple[float, ...]]

    def count(self, place: SharedPlace, *fields: str, drafts: bool = False) -> int:
        """Return the number of points of deployments that share these fields with `place`."""
        return sum(
            one.points
            for one in self.published
            if one.drafts == drafts and all(getattr(one.place, name) == getattr(place, name) for name in fields)
        )


@dataclass(frozen=True)
class Evidence:
    """What published points say of a deployment. `drafts`: it speculates."""

    place: SharedPlace
    errors: PublishedErrors
    drafts: bool = False

    @cached_property
    def own(self) -> PublishedDeployment | None:
        """Its own published points without drafts."""
        return next((one for one in self.errors.deployments if not one.drafts and one.place == self.place), None)

    @cached_property
    def knowledge(self) -> str:
        """What is known of it: OWN, GPU, SERVER or NOTHING."""
        if self.own is not None:
            return OWN
        if self.errors.count(self.place, "gpu", "server"):
            return GPU
        return SERVER if self.errors.count(self.place, "gpu") and self.errors.count(self.place, "server") else NOTHING

    @property
    def knowledge_of_drafts(self) -> str:
        """GPU if points with drafts of its server and GPU are published, else NOTHING."""
        return GPU if self.errors.count(self.place, "gpu", "server", drafts=True) else NOTHING

    @cached_property
    def factor(self) -> float:
        """The factor on the times of passes that the mean of its own published points is; 1 without such points."""
        return math.exp(self.own.means[TPOT]) if self.own is not None else 1.0

    def interval(self, time: str, is_corrected: bool = False) -> Interval:
        """Return the 80 % interval of a simulated time, as factors on it, in which the simulated time is, too.

        `is_corrected`: the passes have the factor.
        """
        low, high = self.errors.times[time][self.knowledge]
        mean = self.own.means.get(time, 0.0) if self.own is not None else 0.0
        mean -= math.log(self.factor) if is_corrected else 0.0
        ends = [0.0, mean + low, mean + high]
        if self.drafts and time != TTFT:
            ends += self.errors.drafts[self.knowledge_of_drafts]
        return Interval(math.exp(min(ends)), math.exp(max(ends)))

    @property
    def is_of_unknown_gpu(self) -> bool:
        """Whether no point of its GPU is published, under any server."""
        return not self.errors.count(self.place, "gpu")

    @property
    def speed_up_error(self) -> float:
        """Half of the 80 % interval of the logarithm of a speed-up over plain decoding. On a GPU without any point that
        of a time with drafts, because the errors of the two are not known to cancel."""
        if self.is_of_unknown_gpu:
            return max(map(abs, self.errors.drafts[NOTHING]))
        return self.errors.speed_ups[self.knowledge_of_drafts]

    def compare(self, time: str, other: Evidence) -> LogDifference:
        """Return by how much log(published / simulated) of a time may differ between two deployments: half of the 80 %
        interval. What they share cancels; nothing is said of one deployment at two loads."""
        if self.place == other.place and self.errors is other.errors:
            return LogDifference(0.0, 0.0)
        level = next(
            i
            for i, fields in enumerate(SHARED)
            if all(getattr(self.place, name) == getattr(other.place, name) for name in fields)
        )
        sides = (self, other)
        if self.errors is not other.errors:
            level = len(SHARED) - 1
        widths = [one.errors.apart[time][level] for one in sides]
        if (self.place.gpu, self.place.server) != (other.place.gpu, other.place.server):
            widths += [one.errors.times[time][NOTHING][1] for one in sides if one.knowledge == NOTHING]
        return LogDifference(0.0, max(widths))

    @property
    def about(self) -> str:
        """One line: what the intervals rest on."""
        parts = [self._about_times]
        if self.drafts:
            count = self.errors.count(self.place, "gpu", "server", drafts=True)
            parts.append(f"with drafts {f'{count:,}' if count else 'none'} of this GPU and server")
        return "; ".join(parts)

    @property
    def _about_times(self) -> str:
        if self.own is not None:
            took = math.exp(self.own.means[TPOT])
            return (
                f"{self.own.points:,} published points of this deployment, which took {took:.2f} × the simulated time "
                "per token"
            )
        here = self.errors.count(self.place, "gpu", "server")
        if here:
            return f"none of this deployment; {here:,} published points of this GPU and server"
        if self.knowledge == SERVER:
            near = self.errors.count(self.place, "server")
            return f"none of this GPU and server; {near:,} published points of this server"
        what = "GPU" if self.is_of_unknown_gpu else "server"
        return f"no benchmark of this {what}: order of magnitude"


@lru_cache(maxsize=1)
def published_errors() -> dict[str, PublishedErrors]:
    """Return what the package ships, by the source of kernels."""
    data = read_json_object(str(DEPLOYMENTS), read_text)
    by_source = {
        kernels: tuple(
            PublishedDeployment(SharedPlace(*place), bool(drafts), points, tuple(releases), means)
            for place, drafts, points, releases, means in each["deployments"]
        )
        for kernels, each in data["kernels"].items()
    }
    once: dict[tuple[SharedPlace, bool], PublishedDeployment] = {}
    for known in by_source.values():
        for one in known:
            once.setdefault((one.place, one.drafts), one)
    return {
        kernels: _errors(each, by_source[kernels], tuple(once.values())) for kernels, each in data["kernels"].items()
    }


def _errors(
    data: Mapping[str, Any], deployments: tuple[PublishedDeployment, ...], published: tuple[PublishedDeployment, ...]
) -> PublishedErrors:
    def ends(given: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        return {name: (low, high) for name, (low, high) in given.items()}

    return PublishedErrors(
        deployments,
        published,
        {time: ends(each) for time, each in data["times"].items()},
        ends(data["drafts"]),
        data["speed_ups"],
        {time: tuple(each) for time, each in data["apart"].items()},
    )


def about_releases(server: str) -> str:
    """Say of which releases the published points of a server profile are, as far as they name one; empty if none
    does. Every interval has the spread of releases and days, because no run is of a published one."""
    major = re.search(r"\d+", server)
    named = {
        tuple(map(int, found.groups())): found.group()
        for one in published_errors()["measured"].deployments
        for release in one.releases
        if one.place.server == server and (found := _RELEASE.match(release))
    }
    shown = [named[numbers] for numbers in sorted(named) if major is not None and numbers[0] == int(major.group())]
    return f"its published points are of releases {shown[0]} to {shown[-1]}" if shown else ""


def published_evidence(place: SharedPlace, kernels: str, drafts: bool = False) -> Evidence:
    """Return what published points say of a deployment. `kernels`: the source of the times of passes, "measured" or
    "roofline"."""
    return Evidence(place, published_errors()[kernels], drafts)
