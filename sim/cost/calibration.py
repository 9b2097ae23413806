"""Measured lines that replace parts of the roofline: a published fit, or one made on your own machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...core.config_reader import read_json_object
from ...core.errors import ConfigError, Problem, nearest
from ...observe.input_files import read_text


@dataclass(frozen=True, slots=True)
class LinearForward:
    """Time of one pass: `base_ns + per_token_ns · tokens + per_kv_token_ns · KV tokens read`, LM head included."""

    base_ns: float
    per_token_ns: float
    per_kv_token_ns: float

    def __post_init__(self) -> None:
        for name in ("base_ns", "per_token_ns", "per_kv_token_ns"):
            value = getattr(self, name)
            assert math.isfinite(value), f"{name} is not a finite number"
            assert value >= 0.0, f"{name} is negative"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured parts for one model on one GPU; the roofline stays where a part is None.

    `target`: the target's forward pass; `draft_pass`: one drafting pass of the algorithm `draft_algorithm`; `sampling`:
    sampling and acceptance, per verified token (its KV slope is unused).
    """

    name: str
    source: str
    gpu: str
    model: str
    tp: int = 1
    target: LinearForward | None = None
    draft_algorithm: str = ""
    draft_pass: LinearForward | None = None
    sampling: LinearForward | None = None

    def check(self, gpu: str, model: str, tp: int) -> None:
        """Raise `ConfigError` if this calibration was measured on another model, GPU or algorithm."""
        problems = [
            Problem(f"calibration.{key}", f"measured for {measured}, but the run uses {used}")
            for key, measured, used in (("gpu", self.gpu, gpu), ("model", self.model, model), ("tp", self.tp, tp))
            if measured != used
        ]
        if problems:
            raise ConfigError(self.name, problems)

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        rows = []
        for part in ("target", "draft_pass", "sampling"):
            line: LinearForward | None = getattr(self, part)
            if line is not None:
                rows += [
                    (f"calibrated {part}: fixed", line.base_ns / 1e6, "ms", self.source),
                    (f"calibrated {part}: per token", line.per_token_ns / 1e3, "us", self.source),
                    (f"calibrated {part}: per KV token", line.per_kv_token_ns, "ns", self.source),
                ]
        return rows


_DRAFT_PASSES = 3
VLLM_H100_LLAMA_8B = Calibration(
    name="vllm-0.10-h100-llama-3.1-8b",
    source="arXiv 2601.11580, fit for vLLM 0.10.1, one H100, Llama-3.1-8B bf16, EAGLE with 3 steps",
    gpu="H100",
    model="llama-3.1-8b",
    target=LinearForward(5_886_000.0, 21_010.0, 39.3),
    draft_algorithm="EAGLE",
    # The fit is for three drafting passes together.
    draft_pass=LinearForward(2_135_000.0 / _DRAFT_PASSES, 840.0 / _DRAFT_PASSES, 2.4 / _DRAFT_PASSES),
)

_TEXTS = ("name", "source", "gpu", "model", "draft_algorithm")
_LINES = ("target", "draft_pass", "sampling")


def load_calibration(path: str | Path) -> Calibration:
    """Read a calibration from a JSON object whose keys are the fields of `Calibration`.

    Raises `ConfigError` with the file and every problem: unknown keys, wrong types, negative or non-finite numbers.
    """
    file = str(path)
    return _calibration(file, read_json_object(file, read_text))


def _calibration(source: str, data: Mapping[str, Any]) -> Calibration:
    known = [item.name for item in fields(Calibration)]
    problems = [Problem(key, f"unknown key{nearest(key, known)}") for key in data if key not in known]
    values: dict[str, Any] = {}
    for key in _TEXTS:
        if key not in data:
            if key != "draft_algorithm":
                problems.append(Problem(key, "missing, expected a text"))
        elif not isinstance(data[key], str):
            problems.append(Problem(key, f"expected a text, found {data[key]!r}"))
        else:
            values[key] = data[key]
    tp = data.get("tp", 1)
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        problems.append(Problem("tp", f"expected an integer ≥ 1, found {tp!r}"))
    for key in _LINES:
        if data.get(key) is not None:
            values[key] = _line(key, data[key], problems)
    if values.get("draft_pass") is not None and not values.get("draft_algorithm"):
        problems.append(Problem("draft_algorithm", "missing, expected the algorithm that draft_pass was measured with"))
    if problems:
        raise ConfigError(source, problems)
    return Calibration(tp=tp, **values)


def _line(key: str, value: Any, problems: list[Problem]) -> LinearForward | None:
    names = [item.name for item in fields(LinearForward)]
    if not isinstance(value, dict):
        problems.append(Problem(key, f"expected an object with {', '.join(names)}, found {value!r}"))
        return None
    before = len(problems)
    for name in value:
        if name not in names:
            problems.append(Problem(f"{key}.{name}", f"unknown key{nearest(name, names)}"))
    for name in names:
        number = value.get(name)
        valid = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not valid or not math.isfinite(number) or number < 0:
            problems.append(Problem(f"{key}.{name}", f"expected a number ≥ 0, found {number!r}"))
    return LinearForward(**value) if len(problems) == before else None
