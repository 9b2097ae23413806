"""Reads the numbers of servers about the accepted drafts of all requests together.

prometheus  a page of `/metrics`: `vllm:spec_decode_*` counters, by position or in sum; or `sglang:spec_accept_length`,
            a mean
server log  SGLang's lines with `accept len: 2.83`, means over some rounds each; vLLM's with `SpecDecoding metrics`, by
            position
means       CSV with the header `steps,accept_length`: a chain's draft steps, and its tokens per round, the bonus token
            included
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_lines
from .acceptance_logs import MAX_STEPS, AcceptanceLog, read_events, read_responses, wrong
from .prometheus import PAGE_BEGINS, Sample, read_samples

COUNTERS = "vLLM's counters by position (Prometheus)"
SGLANG_LOG = "SGLang's log lines"
CSV_HEADER = "steps,accept_length"
EXPECTED = (
    "events.jsonl of Foredraft; JSON with vLLM's metrics.speculative_decoding or aiperf's spec_decode_acceptance; a Prometheus page "
    'with vllm:spec_decode_* or sglang:spec_accept_length; a log of SGLang with "accept len:" or of vLLM with "SpecDecoding metrics:"; '
    f"or CSV with the header {CSV_HEADER}"
)
_VLLM, _SGLANG = "vllm:spec_decode_num_", "sglang:spec_accept_"
_ACCEPT_LEN = re.compile(r"accept len: *([^\s,]*)")
_ACCEPT_RATE = re.compile(r"accept rate: *([^\s,]*)")
_VLLM_LINE = re.compile(
    r"Mean acceptance length: (?P<mean>[^\s,]+), .*Accepted: (?P<accepted>\d{1,12}) tokens, Drafted: (?P<drafted>\d{1,12}) tokens, "
    r"Per-position acceptance rate: (?P<rates>[^\sA-Z]+(?:, [^\sA-Z]+)*), Avg"
)
_RUNNING = re.compile(r"#running-req: *(\d{1,9})\b")


@dataclass(frozen=True, slots=True)
class MeanAcceptance:
    """Mean accept lengths by draft steps, (steps, tokens per round) each, all requests pooled;
    form and left_out as in `AcceptanceLog`."""

    form: str
    means: tuple[tuple[int, float], ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


def read_means(paths: Sequence[str]) -> MeanAcceptance:
    """Read CSV files with the header `steps,accept_length`. Errors: ConfigError with file and line."""
    means = []
    for path in paths:
        rows = [(number, line) for number, line in enumerate(read_lines(path), 1) if line.strip()]
        for number, line in rows[1:]:
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) != 2:
                raise wrong(path, number, f"{len(cells)} fields, expected {CSV_HEADER} (a truncated line?)")
            steps = _number(path, number, "steps", cells[0])
            if steps != int(steps) or not 1 <= steps <= MAX_STEPS:
                raise wrong(path, number, f"steps {cells[0]}: expected a whole number, 1 ... {MAX_STEPS}")
            length = _number(path, number, "accept_length", cells[1])
            means.append((int(steps), _length(path, number, "accept_length", length, int(steps))))
        if len(rows) < 2:
            raise wrong(path, 0, "no rows behind the header")
    return MeanAcceptance(f"mean accept lengths by steps ({CSV_HEADER})", tuple(sorted(means)))


def read_server_logs(paths: Sequence[str], steps: int | None) -> AcceptanceLog | MeanAcceptance:
    """Read the lines of SGLang servers that have `accept len`, each weighted by its running requests; of vLLM's,
    `SpecDecoding metrics`.

    SGLang's steps are the given ones, or follow from its `accept rate` (correct drafts over drafts). Errors:
    ConfigError with file and line.
    """
    of_vllm = [
        _reached(path, number, line)
        for path in paths
        for number, line in enumerate(read_lines(path), 1)
        if "SpecDecoding metrics:" in line
    ]
    if of_vllm:
        return _log_of_lines(paths[0], of_vllm)
    lengths: list[float] = []
    rates: list[float] = []
    weights: list[int] = []
    idle = 0
    for path in paths:
        before = len(lengths) + idle
        for number, line in enumerate(read_lines(path), 1):
            found = _ACCEPT_LEN.search(line)
            if found is None:
                continue
            length = _number(path, number, "accept len", found[1])
            if length == 0:
                idle += 1
                continue
            lengths.append(_length(path, number, "accept len", length, steps or MAX_STEPS))
            rate, running = _ACCEPT_RATE.search(line), _RUNNING.search(line)
            rates.append(math.nan if rate is None else _number(path, number, "accept rate", rate[1]))
            weights.append(1 if running is None else max(int(running[1]), 1))
        if len(lengths) + idle == before:
            raise wrong(path, 0, f"unknown format: expected {EXPECTED}")
    if not lengths:
        raise wrong(paths[0], 0, "no rounds: every accept len is 0")
    length, mean_rate = (float(np.average(values, weights=weights)) for values in (lengths, rates))
    steps = _steps_by_rate(paths[0], length, mean_rate) if steps is None else steps
    left_out = {"lines without rounds": idle} if idle else {}
    return MeanAcceptance(f"{SGLANG_LOG}, {len(lengths)} with accept len", ((steps, length),), left_out)


def _reached(path: str, number: int, line: str) -> np.ndarray:
    """Return the rounds of a line of vLLM, and those that accepted position 0, 1, …: float64 [steps + 1]."""
    found = _VLLM_LINE.search(line)
    if found is None:
        message = "SpecDecoding metrics without lengths, tokens and rates by position (a truncated line?)"
        raise wrong(path, number, message)
    rates = np.array([_number(path, number, "acceptance rate", rate) for rate in found["rates"].split(", ")])
    if len(rates) > MAX_STEPS:
        raise wrong(path, number, f"rates of {len(rates)} positions: expected at most {MAX_STEPS}")
    if rates.min() < 0 or rates[0] > 1 or (np.diff(rates) > 0).any():
        raise wrong(path, number, f"rates {found['rates'][:80]}: expected numbers that do not rise, 0 ... 1")
    mean, accepted, drafted = (
        _number(path, number, "the mean", found["mean"]),
        int(found["accepted"]),
        int(found["drafted"]),
    )
    if accepted > drafted:
        raise wrong(path, number, f"{accepted} accepted of {drafted} drafted")
    if abs(1 + rates.sum() - mean) > 0.006 + 0.0006 * len(rates):
        raise wrong(path, number, f"mean acceptance length {mean:g}: expected {1 + rates.sum():.2f}, by the rates")
    rounds = accepted / rates.sum() if rates.sum() else drafted / len(rates)
    return rounds * np.array([1.0, *rates])


def _log_of_lines(path: str, lines: Sequence[np.ndarray]) -> AcceptanceLog:
    if len(lengths := {len(reached) for reached in lines}) > 1:
        message = f"lines of {min(lengths) - 1} and of {max(lengths) - 1} positions: expected those of one setting"
        raise wrong(path, 0, message)
    reached = np.sum(lines, axis=0)
    if reached[0] < 1:
        raise wrong(path, 0, "no rounds: nothing was drafted")
    form = f"vLLM's log lines, {len(lines)} with SpecDecoding metrics"
    return AcceptanceLog(form, counts=-np.diff(np.append(reached, 0.0)))


def read_pages(paths: Sequence[str], steps: int | None) -> AcceptanceLog | MeanAcceptance:
    """Read pages of `/metrics`, one of each server: counters are added. Errors: ConfigError with file and line."""
    samples = [sample for path in paths for sample in read_samples(path, (_VLLM, _SGLANG))]
    models = {sample.labels["model_name"] for sample in samples if "model_name" in sample.labels}
    if len(models) > 1:
        message = f"counters of several models, {', '.join(sorted(models))[:200]}: expected those of one"
        raise wrong(paths[-1], 0, message)
    if any(sample.name.startswith(_VLLM) for sample in samples):
        return _counters(paths[0], samples, steps)
    lengths = [sample.value for sample in samples if sample.name == f"{_SGLANG}length" and sample.value]
    rates = [sample.value for sample in samples if sample.name == f"{_SGLANG}rate" and sample.value]
    if not lengths:
        message = (
            "no rounds: expected vllm:spec_decode_num_drafts and its companions, or sglang:spec_accept_length above 0; "
            "is speculative decoding on, and has the server decoded?"
        )
        raise wrong(paths[0], 0, message)
    length, rate = float(np.mean(lengths)), float(np.mean(rates)) if rates else math.nan
    steps = _steps_by_rate(paths[0], length, rate) if steps is None else steps
    return MeanAcceptance("sglang:spec_accept_length (Prometheus)", ((steps, _length(paths[0], 0, "", length, steps)),))


def _counters(path: str, samples: Sequence[Sample], steps: int | None) -> AcceptanceLog | MeanAcceptance:
    total: dict[str, float] = {}
    by_position: dict[int, float] = {}
    for sample in samples:
        name = sample.name.removeprefix(_VLLM).removesuffix("_total")
        if name == "accepted_tokens_per_pos":
            position = sample.labels.get("position", "")
            if not (position.isascii() and position.isdecimal() and int(position[:9]) < MAX_STEPS):
                expected = f"expected position 0 ... {MAX_STEPS - 1}"
                raise wrong(path, f"{_VLLM}{name}", f'position="{position[:20]}": {expected}')
            by_position[int(position)] = by_position.get(int(position), 0.0) + sample.value
        else:
            total[name] = total.get(name, 0.0) + sample.value
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        if name not in total:
            raise wrong(path, f"{_VLLM}{name}", "missing (a truncated page?)")
    drafts, drafted, accepted = total["drafts"], total["draft_tokens"], total["accepted_tokens"]
    if drafts < 1 or drafted < 1:
        message = f"{drafts:g} rounds of {drafted:g} drafts: the server has not speculated yet"
        raise wrong(path, f"{_VLLM}drafts", message)
    if accepted > drafted:
        raise wrong(path, f"{_VLLM}accepted_tokens", f"{accepted:g} accepted of {drafted:g} drafted")
    if by_position:
        return _by_position(path, drafts, drafted, accepted, by_position)
    steps = _whole_steps(path, drafted / drafts, "draft_tokens / drafts") if steps is None else steps
    mean = _length(path, f"{_VLLM}accepted_tokens", "1 + accepted_tokens / drafts", 1 + accepted / drafts, steps)
    return MeanAcceptance("vLLM's counters without positions (Prometheus)", ((steps, mean),))


def _by_position(
    path: str, drafts: float, drafted: float, accepted: float, by_position: Mapping[int, float]
) -> AcceptanceLog:
    key = f"{_VLLM}accepted_tokens_per_pos"
    if sorted(by_position) != list(range(len(by_position))):
        raise wrong(path, key, f"positions {sorted(by_position)}: expected 0, 1, 2, … (a truncated page?)")
    reached = np.array([drafts, *(by_position[i] for i in range(len(by_position)))])
    if (rises := np.flatnonzero(np.diff(reached) > 0)).size:
        at = int(rises[0])
        message = f"{reached[at + 1]:g} accepted at position {at}, after {reached[at]:g} that reached it"
        raise wrong(path, key, message)
    if abs(reached[1:].sum() - accepted) > 0.01 * max(accepted, 1):
        raise wrong(path, key, f"{reached[1:].sum():g} in all positions: expected {accepted:g}, the accepted_tokens")
    fewer = round(drafts * len(by_position) - drafted)
    if fewer < -0.01 * drafted:
        raise wrong(path, f"{_VLLM}draft_tokens", f"{drafted:g} in {drafts:g} drafts of {len(by_position)} positions")
    left_out = {"drafts fewer than the rounds' most, counted as rejected": fewer} if fewer > 0 else {}
    return AcceptanceLog(COUNTERS, left_out, counts=-np.diff(np.append(reached, 0.0)))


def _steps_by_rate(path: str, length: float, rate: float) -> int:
    if not rate > 0:
        raise wrong(path, 0, "does not say how many steps were drafted: give --steps")
    return _whole_steps(path, (length - 1) / rate, "(accept length - 1) / accept rate")


def _whole_steps(path: str, steps: float, what: str) -> int:
    if not 0.5 <= steps <= MAX_STEPS + 0.15 or abs(steps - round(steps)) > 0.15:
        raise wrong(path, 0, f"{what} is {steps:.2f}, no whole number of draft steps, 1 ... {MAX_STEPS}: give --steps")
    return round(steps)


def _length(path: str, place: int | str, what: str, length: float, steps: int) -> float:
    if not 1 <= length <= steps + 1:
        raise wrong(
            path, place, f"{what} {length:g}: expected 1 (bonus token only) ... {steps + 1}, all {steps} drafts".strip()
        )
    return length


def _number(path: str, place: int, what: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e15:
        raise wrong(path, place, f"{what} is {text[:40]!r}: expected a finite number")
    return value


_WITHOUT_STEPS = ("a page of metrics", "a server's log")


def read_acceptance(
    paths: Sequence[str], steps: int | None = None, allow_truncated: bool = False
) -> AcceptanceLog | MeanAcceptance:
    """Read files of one kind; a directory stands for its `events.jsonl`.

    steps: of the drafts, where means do not say them. allow_truncated: read events that have no end.

    Errors: ConfigError and LogError, with file and line.
    """
    paths = [os.path.join(path, "events.jsonl") if Path(path).is_dir() else path for path in paths]
    if twice := [path for i, path in enumerate(paths) if path in paths[:i]]:
        raise wrong(twice[0], 0, "is given twice, and would count twice")
    kinds = [_kind(path) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise wrong(path, 0, f"is {kind}, but {paths[0]} is {kinds[0]}: expected files of one kind")
    if steps is not None and kinds[0] not in _WITHOUT_STEPS:
        raise wrong(paths[0], 0, f"is {kinds[0]}, which say their steps themselves: leave --steps out")
    if kinds[0] == "events":
        return read_events(paths, allow_truncated)
    if kinds[0] == "responses":
        return read_responses(paths)
    if kinds[0] == "means":
        return read_means(paths)
    return read_pages(paths, steps) if kinds[0] == "a page of metrics" else read_server_logs(paths, steps)


def _kind(path: str) -> str:
    line = next((line.strip() for line in read_lines(path) if line.strip()), "")
    if not line:
        raise wrong(path, 0, f"is empty: expected {EXPECTED}")
    if line.startswith(("{", "[{", "data:")) or line == "[":
        try:
            value = parse_json(line)
        except ParseError:
            return "responses"
        return "events" if isinstance(value, dict) and "t" in value else "responses"
    if [cell.strip() for cell in line.split(",")] == CSV_HEADER.split(","):
        return "means"
    return "a page of metrics" if line.startswith(PAGE_BEGINS) else "a server's log"
