"""Published deployments: how far measured times were from simulated ones, and how far those of others may be.

`deployments.json` has a row for each model, format, GPU, server, parallelism, release and kind of round, and 80 %
intervals by what is known of a deployment. `benchmarks/accuracy.py` makes it, with errors of points that were left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ....core.model_shape import ModelShape
from ....core.parsing import read_json_object
from ....observe.input_files import read_text
from ..hardware import Parallelism

TABLE = Path(__file__).with_name("deployments.json")
NO_POINTS = "no published points"
TPOT, TTFT, REQUEST, DRAFTS = "tpot", "ttft", "request", "drafts"
"""The times that are compared: per output token, to the first token, of a whole request, and per output token of rounds
with drafts."""
RELEASE, OWN, OTHERS, NOTHING = "own deployment and release", "own deployment", "other deployments", "no benchmark"
KNOWN = (RELEASE, OWN, OTHERS, NOTHING)
"""What is known: points of the deployment's own model, format, GPU, server, parallelism and kind of round, of the
release that is simulated or of any; of others; none of this GPU or of this server."""
SHARED = (("model", "gpu", "server"), ("gpu", "server"), ("model", "server"), ("server",), ())
"""What two deployments share, the most first."""


DRAFTED_BATCHES = (1, 8)
"""The requests at a time of the published rounds with drafts (benchmarks/published/rounds.csv). Of more only two points
are known (docs/evidence/accuracy.md, "Intervals")."""


class Interval(NamedTuple):
    """The ends of an interval, as factors on a simulated value."""

    low: float
    high: float


class Place(NamedTuple):
    """What tells a deployment from others. `release`: three numbers; empty for any."""

    model: str
    gpu: str
    server: str
    number_format: str
    parallel: str
    release: str = ""


def place_of(shape: ModelShape, gpu: str, server: str, parallel: Parallelism, release: str = "") -> Place:
    """Return the place of a deployment. Models of one number of layers, width and vocabulary are one model."""
    return Place(
        model=f"{shape.layers} x {shape.hidden}, {shape.vocab}",
        gpu=gpu,
        server=server,
        number_format=format_of(shape),
        parallel=f"{parallel.tensor} x {parallel.data}, {parallel.expert}",
        release=release,
    )


def format_of(shape: ModelShape) -> str:
    """Return the format of a model's weights as kernels differ by it: 16 bits, FP8, FP4 or INT4."""
    name = shape.weight_dtype
    if "fp4" in name:
        return "FP4"
    if name.startswith("int4"):
        return "INT4"
    return "FP8" if "fp8" in name else "16 bits"


class PublishedDeployment(NamedTuple):
    """A row of the table: its points and runs, and the mean and deviation of log(published / simulated) per output
    token. `has_drafts`: of rounds with drafts."""

    place: Place
    kernels: str
    has_drafts: bool
    points: int
    runs: int
    mean: float
    deviation: float


@dataclass(frozen=True)
class PublishedErrors:
    """What is known of errors with one source of kernels ("measured" or "roofline").

    Attributes:
        deployments: The rows of this source.
        published: Those of both sources, each deployment once.
        times: By time and by what is known, the 10 % and 90 % quantiles of log(published / simulated); of a
            deployment's own points around their mean. Own points that say nothing of a time are not among them.
        speed_ups: By what is known, the 80 % quantile of the error of a speed-up.
        apart: By time and by what two deployments share (`SHARED`), the 80 % quantile of how far their errors differ.
    """

    deployments: tuple[PublishedDeployment, ...]
    published: tuple[PublishedDeployment, ...]
    times: Mapping[str, Mapping[str, tuple[float, float]]]
    speed_ups: Mapping[str, float]
    apart: Mapping[str, tuple[float, ...]]

    def count(self, place: Place, *fields: str, has_drafts: bool = False) -> int:
        """Return the number of points of deployments that share these fields with `place`."""
        return sum(
            one.points
            for one in self.published
            if one.has_drafts == has_drafts and all(getattr(one.place, name) == getattr(place, name) for name in fields)
        )


@dataclass(frozen=True)
class Evidence:
    """What published points say of a deployment. `drafts`: it speculates."""

    place: Place
    errors: PublishedErrors
    drafts: bool = False

    @cached_property
    def own(self) -> tuple[PublishedDeployment, ...]:
        """Its own rows: of its release if there is one of that, else of all if it names none."""
        release, anywhere = self.place.release, self.place._replace(release="")
        rows = [
            one
            for one in self.errors.deployments
            if one.has_drafts == self.drafts and one.place._replace(release="") == anywhere
        ]
        return tuple(one for one in rows if not release or is_release(one.place.release, release))

    @cached_property
    def knowledge(self) -> str:
        """What is known of it: RELEASE, OWN, OTHERS or NOTHING."""
        if self.own:
            return RELEASE if self.place.release else OWN
        return OTHERS if self.errors.count(self.place, "gpu") and self.errors.count(self.place, "server") else NOTHING

    @cached_property
    def factor(self) -> float:
        """The factor on the times of passes that the mean of its own published points is; 1 without such points."""
        return math.exp(self._mean) if self.own else 1.0

    @property
    def _mean(self) -> float:
        return sum(one.runs * one.mean for one in self.own) / sum(one.runs for one in self.own)

    def interval(self, time: str, is_corrected: bool = False, rows: float = 1.0) -> Interval:
        """Return the 80 % interval of a simulated time, as factors on it, in which the simulated time is, too.

        `is_corrected`: the passes have the factor. `rows`: the requests of a batch. Prompts are those of plain rounds.
        Rounds with drafts of which no points of this GPU and server, or of so many requests, are published are no surer
        than plain ones.
        """
        factor, plain = math.log(self.factor) if is_corrected else 0.0, replace(self, drafts=False)
        if not self.drafts:
            return self._moved(time, self.knowledge, factor)
        if time == TTFT:
            return plain._moved(time, plain.knowledge, factor)
        found = self._moved(DRAFTS, OWN if self.own else OTHERS, factor)
        if rows <= DRAFTED_BATCHES[-1] and (self.own or self.near_drafts):
            return found
        plain_times = plain._moved(time, plain.knowledge, factor)
        return Interval(min(found.low, plain_times.low), max(found.high, plain_times.high))

    def _moved(self, time: str, known: str, log_factor: float) -> Interval:
        """Return the interval of a time that is exp(log_factor) times the simulated one."""
        times = self.errors.times[time]
        known = next(name for name in (known, *KNOWN[KNOWN.index(known) + 1 :]) if name in times)
        low, high = times[known]
        mean = (self._mean if known in (RELEASE, OWN) else 0.0) - log_factor
        return Interval(math.exp(min(0.0, mean + low)), math.exp(max(0.0, mean + high)))

    @property
    def near_drafts(self) -> int:
        """The number of published points with drafts of its GPU and server."""
        return self.errors.count(self.place, "gpu", "server", has_drafts=True)

    @property
    def is_of_unknown_gpu(self) -> bool:
        """Whether no point of its GPU is published, under any server."""
        return not self.errors.count(self.place, "gpu")

    @property
    def speed_up_error(self) -> float:
        """Half of the 80 % interval of the logarithm of a speed-up over plain decoding. On a GPU without any point that
        of a time, because the errors of the two are not known to cancel."""
        if self.is_of_unknown_gpu:
            return max(map(abs, self.errors.times[TPOT][NOTHING]))
        return self.errors.speed_ups[OTHERS if self.near_drafts else NOTHING]

    def compare(self, time: str, other: Evidence) -> float:
        """Return by how much log(published / simulated) of a time may differ between two deployments: half of the 80 %
        interval. What they share cancels; nothing is said of one deployment at two loads."""
        if self.place == other.place and self.errors is other.errors:
            return 0.0
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
        return max(widths)

    @property
    def about(self) -> str:
        """One line: what the intervals rest on."""
        parts = [self._about_times]
        if self.drafts and not self.own:
            parts.append(
                f"with drafts {f'{self.near_drafts:,}' if self.near_drafts else 'none'} of this GPU and server"
            )
        return "; ".join(parts)

    @property
    def _about_times(self) -> str:
        if self.own:
            count, kind = sum(one.points for one in self.own), " with drafts" if self.drafts else ""
            return (
                f"{count:,} published points of this deployment{kind}, which took {self.factor:.2f} × the simulated time "
                "per token"
            )
        here = self.errors.count(self.place, "gpu", "server")
        if here:
            return f"none of this deployment; {here:,} published points of this GPU and server"
        if self.knowledge == OTHERS:
            near = self.errors.count(self.place, "server")
            return f"none of this GPU and server; {near:,} published points of this server"
        what = "GPU" if self.is_of_unknown_gpu else "server"
        return f"no benchmark of this {what}: order of magnitude"


def is_release(one: str, wanted: str) -> bool:
    """Return whether a release is the wanted one, of which the last number may be left out."""
    return one == wanted or one.startswith(f"{wanted}.")


@lru_cache(maxsize=1)
def published_errors() -> dict[str, PublishedErrors]:
    """Return what the package ships, by the source of kernels."""
    data = read_json_object(str(TABLE), read_text)
    rows = [PublishedDeployment(Place(*row[:6]), row[6], bool(row[7]), *row[8:]) for row in data["deployments"]]
    once: dict[tuple[Place, bool], PublishedDeployment] = {}
    for one in rows:
        once.setdefault((one.place, one.has_drafts), one)
    return {
        kernels: _errors(each, tuple(one for one in rows if one.kernels == kernels), tuple(once.values()))
        for kernels, each in data["intervals"].items()
    }


def _errors(
    data: Mapping[str, Any], deployments: tuple[PublishedDeployment, ...], published: tuple[PublishedDeployment, ...]
) -> PublishedErrors:
    return PublishedErrors(
        deployments,
        published,
        {time: {name: (low, high) for name, (low, high) in each.items()} for time, each in data["times"].items()},
        data["speed_ups"],
        {time: tuple(each) for time, each in data["apart"].items()},
    )


def about_releases(server: str) -> str:
    """Say of which releases the published points of a server profile are, as far as they name one; empty if none
    does."""
    major = re.search(r"\d+", server)
    named = {
        tuple(map(int, one.place.release.split(".")))
        for one in published_errors()["measured"].deployments
        if one.place.server == server and one.place.release
    }
    shown = [".".join(map(str, one)) for one in sorted(named) if major is not None and one[0] == int(major.group())]
    return f"its published points are of releases {shown[0]} to {shown[-1]}" if shown else ""


def published_evidence(place: Place, kernels: str, drafts: bool = False) -> Evidence:
    """Return what published points say of a deployment. `kernels`: the source of the times of passes, "measured" or
    "roofline"."""
    return Evidence(place, published_errors()[kernels], drafts)
