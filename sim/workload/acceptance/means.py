"""Reads the numbers of servers about the accepted drafts of all requests together.

prometheus  a page of `/metrics`: `vllm:spec_decode_*` counters, by position or in sum, which llama.cpp has as well
            (`llamacpp:spec_decode_*`); or `sglang:spec_accept_length`, a mean
benchmark   a result of `vllm bench serve --save-result`, which has these counters of its run, or of SGLang's
            `bench_serving`, which has a mean for each run
means       CSV with the header `steps,accept_length`: a chain's draft steps, and its tokens per round, the bonus token
            included

`lines.py` reads the lines of their logs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....core.parsing import ParseError, parse_json
from ....observe.input_files import read_lines
from ..prometheus import PAGE_BEGINS, Sample, read_samples
from .lines import CSV_HEADER, EXPECTED, MeanAcceptance, checked_length, finite_number, read_server_logs, steps_by_rates
from .logs import MAX_STEPS, AcceptanceLog, read_events, read_responses, wrong

_VLLM, _LLAMA, _SGLANG = "vllm:spec_decode_num_", "llamacpp:spec_decode_num_", "sglang:spec_accept_"
_NAMES = {_VLLM: "vLLM", _LLAMA: "llama.cpp"}
_BENCHMARK = "spec_decode_"
_STEPS = "speculative_num_steps"
_SGLANG_STEPS = "sglang:spec_num_steps"


def read_means(paths: Sequence[str]) -> MeanAcceptance:
    """Read CSV files with the header `steps,accept_length`. Errors: ConfigError with file and line."""
    means = []
    for path in paths:
        rows = [(number, line) for number, line in enumerate(read_lines(path), 1) if line.strip()]
        for number, line in rows[1:]:
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) != 2:
                raise wrong(path, number, f"{len(cells)} fields, expected {CSV_HEADER} (a truncated line?)")
            steps = finite_number(path, number, "steps", cells[0])
            if steps != int(steps) or not 1 <= steps <= MAX_STEPS:
                raise wrong(path, number, f"steps {cells[0]}: expected a whole number, 1 ... {MAX_STEPS}")
            length = finite_number(path, number, "accept_length", cells[1])
            means.append((int(steps), checked_length(path, number, "accept_length", length, int(steps))))
        if len(rows) < 2:
            raise wrong(path, 0, "no rows behind the header")
    return MeanAcceptance(f"mean accept lengths by steps ({CSV_HEADER})", tuple(sorted(means)))


def read_pages(paths: Sequence[str], steps: int | None) -> AcceptanceLog | MeanAcceptance:
    """Read pages of `/metrics`, one of each server: counters are added. Errors: ConfigError with file and line."""
    samples = [sample for path in paths for sample in read_samples(path, (*_NAMES, _SGLANG, _SGLANG_STEPS))]
    models = {sample.labels["model_name"] for sample in samples if "model_name" in sample.labels}
    if len(models) > 1:
        message = f"counters of several models, {', '.join(sorted(models))[:200]}: expected those of one"
        raise wrong(paths[-1], 0, message)
    for prefix, server in _NAMES.items():
        if any(sample.name.startswith(prefix) for sample in samples):
            counters = [replace(one, name=one.name.removeprefix(prefix)) for one in samples]
            return _counters(paths[0], counters, steps, prefix, f"{server}'s counters{{}} (Prometheus)")
    return _gauges(paths[0], samples, steps)


def _gauges(path: str, samples: Sequence[Sample], steps: int | None) -> MeanAcceptance:
    """Return the mean of SGLang's gauges; later releases say their steps, too."""
    lengths = [sample.value for sample in samples if sample.name == f"{_SGLANG}length" and sample.value]
    rates = [sample.value for sample in samples if sample.name == f"{_SGLANG}rate" and sample.value]
    if not lengths:
        message = (
            "no rounds: expected vllm:spec_decode_num_drafts and its companions, or sglang:spec_accept_length above 0; "
            "is speculative decoding on, and has the server decoded?"
        )
        raise wrong(path, 0, message)
    given = {int(sample.value) for sample in samples if sample.name == _SGLANG_STEPS and sample.value}
    given |= set() if steps is None else {steps}
    if len(given) > 1:
        raise wrong(path, 0, f"{' and '.join(map(str, sorted(given)))} draft steps: expected those of one setting")
    inferred: tuple[str, ...] = ()
    if not given:
        pairs = (lengths, rates) if len(lengths) == len(rates) else ([], [])
        known, inferred = steps_by_rates(path, *pairs)
    else:
        known = given.pop()
    mean = checked_length(path, 0, "", float(np.mean(lengths)), known)
    return MeanAcceptance("sglang:spec_accept_length (Prometheus)", ((known, mean),), inferred=inferred)


def read_benchmarks(paths: Sequence[str], steps: int | None) -> AcceptanceLog | MeanAcceptance:
    """Read results of vLLM's benchmark, whose counts are added. Errors: ConfigError with file and line."""
    samples = [one for path, number, run in _runs(paths) for one in _of_benchmark(path, number, run)]
    return _counters(paths[0], samples, steps, _BENCHMARK, "vLLM's benchmark{}")


def read_bench_serving(paths: Sequence[str], steps: int | None) -> MeanAcceptance:
    """Read results of SGLang's benchmark: the mean of all rounds, of servers that draft the same `steps`, where the
    results do not say them. Errors: ConfigError with file and line."""
    rounds = tokens = 0.0
    known = steps
    for path, number, run in _runs(paths):
        server = run.get("server_info")
        told = server.get(_STEPS) if isinstance(server, dict) else None
        if known is None and type(told) is int:
            known = told
        elif type(told) is int and told != known:
            raise wrong(path, number, f"server_info.{_STEPS} is {told}: expected the {known} of the other runs")
        if known is None:
            raise wrong(path, number, "does not say how many steps were drafted: give --steps")
        length = finite_number(path, number, "accept_length", str(run.get("accept_length")))
        output = finite_number(path, number, "total_output_tokens", str(run.get("total_output_tokens")))
        rounds += output / checked_length(path, number, "accept_length", length, known)
        tokens += output
    if not rounds or known is None:
        raise wrong(paths[0], 0, "has no output tokens")
    return MeanAcceptance("SGLang's benchmark", ((known, tokens / rounds),))


def _runs(paths: Sequence[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the object of each line; a request rate without limit is written as Infinity."""
    for path in paths:
        for number, text in enumerate(read_lines(path), 1):
            if not text.strip():
                continue
            try:
                run = parse_json(text, with_infinity=True, long_integers=True)
            except ParseError as error:
                raise wrong(path, number, f"is not JSON (a truncated line?): {error}") from None
            yield path, number, run if isinstance(run, dict) else {}


def _of_benchmark(path: str, line: int, run: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield the counts of one run, under the names of counters."""
    drafts = 0.0
    for name, key in (
        ("drafts", "num_drafts"),
        ("draft_tokens", "draft_tokens"),
        ("accepted_tokens", "accepted_tokens"),
    ):
        value = finite_number(path, line, f"{_BENCHMARK}{key}", str(run.get(f"{_BENCHMARK}{key}")))
        drafts = value if name == "drafts" else drafts
        yield Sample(name, {}, value, None)
    key = f"{_BENCHMARK}per_position_acceptance_rates"
    rates = run.get(key) or []
    for position, rate in enumerate(rates if isinstance(rates, list) else [rates]):
        value = finite_number(path, line, key, str(rate)) * drafts
        yield Sample("accepted_tokens_per_pos", {"position": str(position)}, value, None)


def _counters(
    path: str, samples: Sequence[Sample], steps: int | None, prefix: str, form: str
) -> AcceptanceLog | MeanAcceptance:
    """Return the acceptance of counters whose names stand without their `prefix`."""
    total: dict[str, float] = {}
    by_position: dict[int, float] = {}
    for sample in samples:
        name = sample.name.removesuffix("_total")
        if name == "accepted_tokens_per_pos":
            position = sample.labels.get("position", "")
            if not (position.isascii() and position.isdecimal() and int(position[:9]) < MAX_STEPS):
                expected = f"expected position 0 ... {MAX_STEPS - 1}"
                raise wrong(path, f"{prefix}{name}", f'position="{position[:20]}": {expected}')
            by_position[int(position)] = by_position.get(int(position), 0.0) + sample.value
        else:
            total[name] = total.get(name, 0.0) + sample.value
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        if name not in total:
            raise wrong(path, f"{prefix}{name}", "missing (a truncated page?)")
    drafts, drafted, accepted = total["drafts"], total["draft_tokens"], total["accepted_tokens"]
    if drafts < 1 or drafted < 1:
        message = f"{drafts:g} rounds of {drafted:g} drafts: the server has not speculated yet"
        raise wrong(path, f"{prefix}drafts", message)
    if accepted > drafted:
        raise wrong(path, f"{prefix}accepted_tokens", f"{accepted:g} accepted of {drafted:g} drafted")
    if by_position:
        return _by_position(path, drafts, drafted, accepted, by_position, prefix, form)
    steps = _whole_steps(path, drafted / drafts, "draft_tokens / drafts") if steps is None else steps
    mean = checked_length(
        path, f"{prefix}accepted_tokens", "1 + accepted_tokens / drafts", 1 + accepted / drafts, steps
    )
    return MeanAcceptance(form.format(" without positions"), ((steps, mean),))


def _by_position(
    path: str,
    drafts: float,
    drafted: float,
    accepted: float,
    by_position: Mapping[int, float],
    prefix: str,
    form: str,
) -> AcceptanceLog:
    key = f"{prefix}accepted_tokens_per_pos"
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
        raise wrong(path, f"{prefix}draft_tokens", f"{drafted:g} in {drafts:g} drafts of {len(by_position)} positions")
    left_out = {"drafts fewer than the rounds' most, counted as rejected": fewer} if fewer > 0 else {}
    return AcceptanceLog(form.format(" by position"), left_out, counts=-np.diff(np.append(reached, 0.0)))


def _whole_steps(path: str, steps: float, what: str) -> int:
    if not 0.5 <= steps <= MAX_STEPS + 0.15 or abs(steps - round(steps)) > 0.15:
        raise wrong(path, 0, f"{what} is {steps:.2f}, no whole number of draft steps, 1 ... {MAX_STEPS}: give --steps")
    return round(steps)


_WITHOUT_STEPS = ("a page of metrics", "a benchmark's result", "a result of SGLang's benchmark", "a server's log")


def read_acceptance(
    paths: Sequence[str], steps: int | None = None, allow_truncated: bool = False
) -> AcceptanceLog | MeanAcceptance:
    """Read files of one kind; a directory stands for its `events.jsonl`.

    steps: of the drafts, where means do not say them. allow_truncated: read events that have no end.

    Errors: ConfigError and LogError, with file and line.
    """
    paths = [os.path.join(path, "events.jsonl") if os.path.isdir(path) else path for path in paths]
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
    if kinds[0] == "a benchmark's result":
        return read_benchmarks(paths, steps)
    if kinds[0] == "a result of SGLang's benchmark":
        return read_bench_serving(paths, steps)
    return read_pages(paths, steps) if kinds[0] == "a page of metrics" else read_server_logs(paths, steps)


def _kind(path: str) -> str:
    line = next((line.strip() for line in read_lines(path) if line.strip()), "")
    if not line:
        raise wrong(path, 0, f"is empty: expected {EXPECTED}")
    if line.startswith(("{", "[{", "data:")) or line == "[":
        try:
            value = parse_json(line, with_infinity=True, long_integers=True)
        except ParseError:
            return "responses"
        if isinstance(value, dict) and {"accept_length", "max_concurrency", "total_output_tokens"} <= set(value):
            return "a result of SGLang's benchmark"
        if isinstance(value, dict) and f"{_BENCHMARK}num_drafts" in value:
            return "a benchmark's result"
        return "events" if isinstance(value, dict) and "t" in value else "responses"
    if [cell.strip() for cell in line.split(",")] == CSV_HEADER.split(","):
        return "means"
    return "a page of metrics" if line.startswith(PAGE_BEGINS) else "a server's log"
