"""A calibration from results of benchmarks: the fitted parameters, the evidence for them, and the profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...observe.output_files import Document
from ..cost.calibration import profile_document
from ..scenario import Scenario
from .fit import PointFit, calibrate
from .prediction import measured_scenario
from .result_files import read_points


@dataclass(frozen=True)
class CalibratedParameter:
    """A number of the timing.

    Attributes:
        name: As in a profile; those that end in `_ns` are nanoseconds, `device_scale` is a factor on kernels.
        server: The value in the server's profile.
        value: The fitted value.
        low: The lower end of its 90 % interval.
        high: The upper end.
        told: The share of its uncertainty that the points took away.
        is_told: Whether that is enough for the value to come from the points.
    """

    name: str
    server: float
    value: float
    low: float
    high: float
    told: float
    is_told: bool


@dataclass(frozen=True)
class CalibratedResult:
    """A measured result beside the fit.

    Attributes:
        point: The run that was measured, in words.
        source: Its file and place.
        name: The result, such as `mean_tpot_ms`.
        measured: Its value.
        fitted: The same by the fit.
        error: fitted / measured − 1.
        left_out_error: The same by a fit without this point; None if the result is not fitted.
        contradicts: Whether the other points contradict it.
        assumes_spread: Whether lengths are taken to vary, which the file does not say.
    """

    point: str
    source: str
    name: str
    measured: float
    fitted: float
    error: float
    left_out_error: float | None
    contradicts: bool
    assumes_spread: bool


@dataclass(frozen=True)
class SuggestedPoint:
    """A run that would tell more, and the parameters that it would tell."""

    point: str
    tells: tuple[str, ...]


@dataclass(frozen=True)
class CalibrateResult(Document):
    """The timing of a deployment fitted to its measurements, as `foredraft calibrate --json` prints it.

    Attributes:
        model: The target.
        gpu: The device.
        server: The server profile around which parameters are fitted.
        kernels: What priced the passes: "roofline" or "measured".
        points: Runs that were measured.
        left_out: Runs of the files that are not among them, with the reason.
        error: Mean absolute error of the fitted results.
        left_out_error: The same of results that were left out of the fit.
        parameters: The fitted numbers.
        results: Every measured result.
        entangled: Pairs of parameters of which the points tell only a sum.
        suggestions: Runs that would tell more.
        profile: The content of a profile, for `hardware.profile`.
    """

    FORMAT: ClassVar[str] = "foredraft-calibrate"

    model: str
    gpu: str
    server: str
    kernels: str
    points: int
    left_out: tuple[str, ...]
    error: float
    left_out_error: float
    parameters: tuple[CalibratedParameter, ...]
    results: tuple[CalibratedResult, ...]
    entangled: tuple[tuple[str, str], ...]
    suggestions: tuple[SuggestedPoint, ...]
    profile: Mapping[str, Any]


def calibrate_from_files(
    files: Sequence[str],
    base: Scenario,
    given: Mapping[str, str],
    name: str = "profile",
    on_progress: Callable[[int, int], None] = lambda points, simulations: None,
) -> CalibrateResult:
    """Fit the timing of `base` to the results in files of benchmarks, each with settings behind a colon if it lacks
    some.

    `given`: the keys of `base` that are not defaults, with their source; files set the others. `on_progress` gets the
    numbers of points and of simulations so far. Raises ConfigError for a file that cannot be used.
    """
    left_out: list[str] = []
    points = read_points(files, left_out.append)
    base = measured_scenario(points, base, given)
    source = ", ".join(dict.fromkeys(Path(point.file).name for point in points))
    fit = calibrate(points, base, source, name, lambda count: on_progress(len(points), count))
    return _result(fit, tuple(left_out))


def _result(fit: PointFit, left_out: tuple[str, ...]) -> CalibrateResult:
    profile = fit.calibration
    fitted = profile.parameters
    assert fitted is not None, "points have no measured steps"
    parameters = (
        CalibratedParameter(
            name, fit.by_server[name], one.value, one.low, one.high, one.told, name not in fit.undetermined
        )
        for name, one in fitted.values.items()
    )
    results = (
        CalibratedResult(
            one.point.title,
            one.point.source,
            one.column,
            one.measured,
            one.predicted,
            one.error,
            one.left_out_error,
            one in fit.contradicting,
            one.column == "mean_ttft_ms" and one.point.output_std > 0,
        )
        for one in fit.results
    )
    return CalibrateResult(
        model=profile.model,
        gpu=profile.gpu,
        server=fitted.server,
        kernels=fitted.kernels,
        points=fitted.points,
        left_out=left_out,
        error=fitted.error,
        left_out_error=fitted.left_out_error,
        parameters=tuple(parameters),
        results=tuple(results),
        entangled=tuple(fit.entangled),
        suggestions=tuple(SuggestedPoint(one.title, one.tells) for one in fit.suggestions),
        profile=profile_document(profile),
    )
