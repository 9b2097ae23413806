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
        name: As in a profile; those that end in `_ns` are nanoseconds, `_slope` powers, the others factors.
        value: The fitted value. That of the server's profile is a factor of 1, a power and a time of 0.
        low: The lower end of its 90 % interval.
        high: The upper end.
    """

    name: str
    value: float
    low: float
    high: float


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
        left_out_error: The same by a fit without this point.
        contradicts: Whether the other points contradict it.
        assumes_spread: Whether lengths are taken to vary, which the file does not say.
    """

    point: str
    source: str
    name: str
    measured: float
    fitted: float
    error: float
    left_out_error: float
    contradicts: bool
    assumes_spread: bool


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
        clients: The requests at a time at which the factors hold.
        error: Mean absolute error of the results of decoding.
        left_out_error: The same of results that were left out of the fit.
        left_out_ttft_error: The same of times to the first token; None if none was measured.
        parameters: The fitted numbers.
        results: Every measured result.
        next_run: The run of which the points tell least.
        profile: The content of a profile, for `hardware.profile`.
    """

    FORMAT: ClassVar[str] = "foredraft-calibrate"

    model: str
    gpu: str
    server: str
    kernels: str
    points: int
    left_out: tuple[str, ...]
    clients: float
    error: float
    left_out_error: float
    left_out_ttft_error: float | None
    parameters: tuple[CalibratedParameter, ...]
    results: tuple[CalibratedResult, ...]
    next_run: str
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
    parameters = (CalibratedParameter(name, one.value, one.low, one.high) for name, one in fitted.values.items())
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
        clients=fitted.clients.usual,
        error=fitted.error,
        left_out_error=fitted.left_out_error,
        left_out_ttft_error=fitted.left_out_ttft_error,
        parameters=tuple(parameters),
        results=tuple(results),
        next_run=fit.next_run,
        profile=profile_document(profile),
    )
