"""A calibration from results of benchmarks: the fitted parameters, the evidence for them, and the profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...observe.output_files import Document


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
