"""Reads the result files of benchmarks of serving engines, and makes points of them.

    vLLM       `vllm bench serve --save-result`: a JSON object; `--append-result`: one per line
    SGLang     `sglang.bench_serving --output-file`: JSON lines
    guidellm   `benchmarks.json`: an object with `benchmarks`, one for each load
    aiperf     `profile_export_aiperf.json`: an object of metrics, schema 1
    CSV        a header of `points.COLUMNS`, a run per row

A file is recognised by its content. Settings that it lacks follow its name: `results.json:algorithm=EAGLE3,steps=3`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...core.errors import ConfigError, Problem
from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_text
from .points import COLUMNS, FAILED, BenchmarkPoint, check_together, point_of, unknown_column

EXPECTED = (
    "expected the result of `vllm bench serve --save-result`, of SGLang's bench_serving --output-file, benchmarks.json of guidellm, "
    "profile_export_aiperf.json of aiperf, or CSV with a header (docs/calibration.md)"
)
MAX_BYTES = 512 << 20  # guidellm writes every request into its file
MAX_RUNS = 1000

_SETTINGS = re.compile(r"(?P<file>.+?):(?P<settings>\w+=[^,=]+(?:,\w+=[^,=]+)*)")
_NO_NUMBER = re.compile(r'"(?P<key>[^"\\]{1,100})"\s*:\s*(?P<value>-?Infinity|NaN)')
_CONSISTENT = 0.03  # a throughput and the tokens and the time that it is made of

_FROM_SERVING = {  # names of vLLM and SGLang
    "concurrency": "max_concurrency",
    "rate_per_s": "request_rate",
    "num_requests": "completed",
    "input_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "output_tokens_per_s": "output_throughput",
}
_SGLANG_SERVER = {
    "algorithm": "speculative_algorithm",
    "steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "num_draft_tokens": "speculative_num_draft_tokens",
    "tensor_parallel": "tp_size",
    "model": "model_path",
}
_SPEC_DECODE = "spec_decode_"
_EARLIER_TOTALS = (("scheduler_metrics", "requests_made"), ("run_stats", "requests_made"))  # of guidellm's requests


def read_points(files: Sequence[str], leave_out: Callable[[str], None] = lambda what: None) -> list[BenchmarkPoint]:
    """Return the points of all files, FILE or FILE:column=value,….

    `leave_out` is called with each run that has no load of its own, in words. Raises ConfigError with the file and the
    key; then nothing is read.
    """
    points: list[BenchmarkPoint] = []
    for i, argument in enumerate(files):
        found = _SETTINGS.fullmatch(argument)
        file = found["file"] if found else argument
        settings = _settings(argument, found["settings"]) if found else {}
        if argument in files[:i]:
            raise ConfigError.of(file, "", "is given twice, and would count twice")
        points += _file_points(file, settings, leave_out)
    check_together(points)
    return points


def _settings(argument: str, text: str) -> dict[str, str]:
    settings = dict(item.split("=", 1) for item in text.split(","))
    problems = [Problem(name, unknown_column(name)) for name in settings if name not in COLUMNS]
    if problems:
        raise ConfigError(argument, problems)
    return settings


def _file_points(file: str, settings: Mapping[str, str], leave_out: Callable[[str], None]) -> Iterator[BenchmarkPoint]:
    text = read_text(file, MAX_BYTES)
    if not text.strip():
        raise _wrong(file, "", f"is empty: {EXPECTED}")
    records = _json_records(file, text, leave_out) if text.lstrip()[0] in "{[" else _csv_records(file, text)
    for number, (place, record, names) in enumerate(records):
        if number == MAX_RUNS:
            raise _wrong(file, "", f"has more than {MAX_RUNS:,} runs")
        for column, value in settings.items():
            before = record.get(column)
            if before is not None and str(before) != value:
                raise _wrong(file, names.get(column, column), f"is {before!r}, but the command line says {value!r}")
        yield point_of(f"{file}{place}", {**record, **settings}, names, file)


# -- CSV ---------------------------------------------------------------------------------------------------------------


def _csv_records(file: str, text: str) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    try:
        header, *rows = csv.reader(io.StringIO("\n".join(lines)), strict=True)
    except csv.Error as error:
        raise _wrong(file, "", f"is no CSV: {error}") from None
    header = [name.strip() for name in header]
    known = [name for name in header if name in COLUMNS]
    if len(known) < 3:
        raise _wrong(file, "", f"unknown format: {EXPECTED}")
    problems = [Problem(name, unknown_column(name)) for name in header if name not in COLUMNS]
    problems += [Problem(name, "is there twice") for name in dict.fromkeys(known) if known.count(name) > 1]
    if not rows:
        problems.append(Problem("", "has no rows behind its header"))
    if problems:
        raise ConfigError(file, problems)
    numbers = [number for number, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
    for number, row in zip(numbers[1:], rows, strict=False):
        if len(row) != len(header):
            raise _wrong(file, f"line {number}", f"{len(row)} fields, expected {len(header)} (a truncated line?)")
        record = {name: cell.strip() for name, cell in zip(header, row, strict=True) if cell.strip()}
        yield f" line {number}", record, {}


# -- JSON --------------------------------------------------------------------------------------------------------------


def _json_records(
    file: str, text: str, leave_out: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    for place, value in _objects(file, text):
        if not isinstance(value, dict):
            raise _wrong(file, place.strip(), f"is {type(value).__name__}: {EXPECTED}")
        if "benchmarks" in value:
            yield from _guidellm(file, value, leave_out)
        elif "schema_version" in value or (
            "input_config" in value and "request_throughput" in value and not _is_old(value)
        ):
            yield place, *_aiperf(file, value)
        elif "tokenizer_id" in value and "model_id" in value:
            yield place, *_serving(file, place, value, "vllm")
        elif "max_concurrency" in value and ("server_info" in value or "accept_length" in value):
            yield place, *_serving(file, place, value, "sglang")
        else:
            hint = _other_tool(value)
            raise _wrong(file, place.strip(), f"{hint}: {EXPECTED}")


def _objects(file: str, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the object of a file, or those of its lines. A rate without limit, for which JSON has no number, becomes a
    text."""
    for found in _NO_NUMBER.finditer(text):
        if found["key"] != "request_rate":
            raise _wrong(file, found["key"], f"is {found['value']}: expected a finite number")
    text = re.sub(r'("request_rate"\s*:\s*)Infinity', r'\1"inf"', text)
    try:
        yield "", parse_json(text, long_integers=True)
        return
    except ParseError as error:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if len(lines) < 2 or not all(line.lstrip().startswith("{") for _, line in lines):
            raise _wrong(file, "", f"is not JSON: {error}") from None
    for number, line in lines:
        try:
            yield f" line {number}", parse_json(line, long_integers=True)
        except ParseError as error:
            raise _wrong(file, f"line {number}", f"is not JSON: {error} (a truncated line?)") from None


def _is_old(value: Mapping[str, Any]) -> bool:
    return "perf_analyzer" in json.dumps(value.get("input_config", {}))[:10_000]


def _other_tool(value: Mapping[str, Any]) -> str:
    if "metrics" in value and "metadata" in value:
        return "is aiperf's export of single requests, not of the run"
    if _is_old(value):
        return "is a result of genai-perf, which aiperf has replaced"
    if "latencies" in value and "avg_latency" in value:
        return "is a result of `vllm bench latency`, which has no clients"
    if "elapsed_time" in value and "tokens_per_second" in value:
        return "is a result of `vllm bench throughput`, which has no clients"
    return "unknown format"


def _serving(file: str, place: str, run: Mapping[str, Any], tool: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the record of a run of vLLM's or SGLang's benchmark, whose common names are equal."""
    names = dict(_FROM_SERVING)
    place = place.strip()
    completed = _required(file, run, "completed", place)
    if completed <= 0:
        raise _wrong(file, _at(place, "completed"), "no request was completed")
    asked = run.get("num_prompts", completed)
    if isinstance(asked, int) and asked - completed > FAILED * asked:
        raise _wrong(file, _at(place, "completed"), f"{completed:g} of {asked} requests: the others failed")
    record: dict[str, Any] = {name: run.get(name) for name in ("mean_tpot_ms", "mean_ttft_ms")}
    tokens = {name: _required(file, run, f"total_{name}", place) for name in ("input_tokens", "output_tokens")}
    record |= {name: total / completed for name, total in tokens.items()}
    record["output_tokens_per_s"] = _required(file, run, "output_throughput", place)
    _check_sum(file, place, run, "output_throughput", tokens["output_tokens"])
    record["num_requests"] = int(completed)
    record["concurrency"], rate = run.get("max_concurrency"), run.get("request_rate")
    if rate not in ("inf", None):
        record["rate_per_s"] = rate
    elif record["concurrency"] is None:
        record["concurrency"] = int(completed)  # all at once
    if run.get("burstiness", 1.0) != 1.0 and "rate_per_s" in record:
        raise _wrong(file, _at(place, "burstiness"), f"{run['burstiness']}: expected 1, Poisson arrivals")
    if run.get("ramp_up_strategy") is not None:
        raise _wrong(file, _at(place, "ramp_up_strategy"), "a load that rises has no one result")
    record |= {key: run[key] for key in ("input_lens", "output_lens") if _are_lengths(run.get(key))}
    if tool == "vllm":
        record |= _vllm_speculation(run)
        names |= {"accept_length": f"{_SPEC_DECODE}acceptance_length", "model": "model_id"}
        record["model"] = run["model_id"]
        # What `--metadata` adds, in the names of our columns.
        record |= {name: run[name] for name in COLUMNS if name in run and record.get(name) is None}
    else:
        server = _object(run, "server_info")
        names |= {column: f"server_info.{key}" for column, key in _SGLANG_SERVER.items()}
        record |= {column: server[key] for column, key in _SGLANG_SERVER.items() if server.get(key) is not None}
        record["accept_length"] = run.get("accept_length")
        if server and server.get("speculative_algorithm") is None:
            record = {
                k: v for k, v in record.items() if k not in ("steps", "topk", "num_draft_tokens", "accept_length")
            }
        if record.get("algorithm") == "NEXTN":
            record["algorithm"] = "EAGLE"
    return {key: value for key, value in record.items() if value is not None}, names


def _vllm_speculation(run: Mapping[str, Any]) -> dict[str, Any]:
    length, drafts = run.get(f"{_SPEC_DECODE}acceptance_length"), run.get(f"{_SPEC_DECODE}num_drafts")
    if not length or drafts == 0:
        return {}
    positions = run.get(f"{_SPEC_DECODE}per_position_acceptance_rates")
    return {"accept_length": length, "steps": len(positions) if isinstance(positions, list) and positions else None}


def _object(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object at `key`, an empty one if there is something else."""
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 1 for item in value)


def _guidellm(
    file: str, report: Mapping[str, Any], leave_out: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Yield the records of a report. Its time per output token includes the first token;
    its inter-token latency is our TPOT. The run `throughput` of a sweep has neither clients nor a rate."""
    runs = report["benchmarks"]
    if not isinstance(runs, list) or not runs:
        raise _wrong(file, "benchmarks", "expected a list of benchmarks")
    metadata = _object(report, "metadata")
    version = metadata.get("guidellm_version") or metadata.get("version") or "of an unknown version"
    strategies = [_inside(run, "config", "strategy") or _inside(run, "args", "strategy") for run in runs]
    kinds = [_inside(one, "type_") or _inside(one, "kind") for one in strategies]
    if set(kinds) == {"throughput"}:
        message = "'throughput': has neither clients nor a rate; expected a run that is synchronous, concurrent, constant or poisson"
        raise _wrong(file, "benchmarks[0].config.strategy.type_", message)
    for i, (run, strategy, kind) in enumerate(zip(runs, strategies, kinds, strict=True)):
        place = f"benchmarks[{i}]"
        if kind == "throughput":
            leave_out(f"{file} {place}: throughput, which has neither clients nor a rate")
            continue
        if not isinstance(strategy, dict) or not isinstance(_inside(run, "metrics"), dict):
            message = f"is missing; expected config.strategy and metrics, as guidellm 0.2 … 0.8 writes them (this file: {version})"
            raise _wrong(file, f"{place}.config.strategy", message)
        record: dict[str, Any] = {}
        if kind == "synchronous":
            record["concurrency"] = 1
        elif kind == "concurrent":
            record["concurrency"] = strategy.get("streams")
        elif kind in ("constant", "poisson", "async"):
            record["rate_per_s"] = strategy.get("rate")
        else:
            message = f"{kind!r}: expected synchronous, concurrent, constant or poisson"
            raise _wrong(file, f"{place}.config.strategy.type_", message)
        places = (("metrics", "request_totals"), ("request_totals",), *_EARLIER_TOTALS)
        totals: Mapping[str, Any] = next((found for path in places if (found := _inside(run, *path))), {})
        of_totals = f"{place}.metrics.request_totals"
        completed = _count(file, f"{of_totals}.successful", _inside(totals, "successful"))
        failed = _count(file, f"{of_totals}.errored", _inside(totals, "errored"))
        if not completed:
            raise _wrong(file, f"{place}.metrics.request_totals.successful", "no request was completed")
        if failed > FAILED * (completed + failed):
            message = f"{failed} of {failed + completed} requests failed"
            raise _wrong(file, f"{place}.metrics.request_totals.errored", message)
        names = {"concurrency": f"{place}.config.strategy.streams", "rate_per_s": f"{place}.config.strategy.rate"}
        for column, metric in (
            ("input_tokens", "prompt_token_count"),
            ("output_tokens", "output_token_count"),
            ("output_tokens_per_s", "output_tokens_per_second"),
            ("mean_tpot_ms", "inter_token_latency_ms"),
            ("mean_ttft_ms", "time_to_first_token_ms"),
        ):
            names[column] = f"{place}.metrics.{metric}.successful.mean"
            record[column] = _inside(run, "metrics", metric, "successful", "mean")
            if record[column] is None:
                raise _wrong(file, names[column], "is missing")
        for column, metric in (("input_std", "prompt_token_count"), ("output_std", "output_token_count")):
            record[column] = _inside(run, "metrics", metric, "successful", "std_dev") or 0.0
        record["num_requests"] = completed
        yield f" {place}", record, names


def _aiperf(file: str, run: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    version = str(run.get("schema_version", ""))
    if version.partition(".")[0] != "1":
        raise _wrong(file, "schema_version", f"{version!r}: expected 1.x, of aiperf's profile_export_aiperf.json")
    if run.get("was_cancelled"):
        raise _wrong(file, "was_cancelled", "the run was cancelled: its numbers cover a part of it")
    names, record = {}, {}
    for column, metric, statistic in (
        ("num_requests", "request_count", "avg"),
        ("input_tokens", "input_sequence_length", "avg"),
        ("output_tokens", "output_sequence_length", "avg"),
        ("output_tokens_per_s", "output_token_throughput", "avg"),
        ("mean_tpot_ms", "inter_token_latency", "avg"),
        ("mean_ttft_ms", "time_to_first_token", "avg"),
        ("input_std", "input_sequence_length", "std"),
        ("output_std", "output_sequence_length", "std"),
    ):
        names[column] = f"{metric}.{statistic}"
        record[column] = _inside(run, metric, statistic)
        if record[column] is None and statistic == "avg":
            raise _wrong(file, names[column], "is missing (was the run streaming?)")
        unit = _inside(run, metric, "unit")
        if column.endswith("_ms") and unit not in ("ms", None):
            raise _wrong(file, f"{metric}.unit", f"{unit!r}: expected ms")
    if not _count(file, "request_count.avg", record["num_requests"]):
        raise _wrong(file, "request_count.avg", "no request was completed")
    failed = _count(file, "error_request_count.avg", _inside(run, "error_request_count", "avg"))
    if failed > FAILED * (record["num_requests"] + failed):
        raise _wrong(
            file, "error_request_count.avg", f"{failed:g} of {failed + record['num_requests']:g} requests failed"
        )
    load = _inside(run, "input_config", "loadgen") or {}
    phases = _inside(run, "input_config", "phases")
    if isinstance(phases, list):
        load = next((phase for phase in phases if isinstance(phase, dict) and phase.get("name") == "profiling"), load)
    record["concurrency"] = _inside(load, "concurrency")
    if _inside(load, "request_rate") is not None:
        record["rate_per_s"] = load["request_rate"]
    names |= {"concurrency": "input_config.loadgen.concurrency", "rate_per_s": "input_config.loadgen.request_rate"}
    models = _inside(run, "input_config", "endpoint", "model_names")
    if isinstance(models, list) and len(models) == 1:
        record["model"] = models[0]
    return {key: value for key, value in record.items() if value is not None}, names


def _count(file: str, key: str, value: Any) -> float:
    """Return a number of requests, 0 if it is not there. Raises ConfigError unless it is a finite number >= 0."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _wrong(file, key, f"{value!r} is no number of requests")
    return value


def _inside(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _required(file: str, run: Mapping[str, Any], key: str, place: str) -> float:
    value = run.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        found = "is missing" if key not in run else f"expected a number ≥ 0, found {value!r}"
        raise _wrong(file, _at(place, key), found)
    return float(value)


def _check_sum(file: str, place: str, run: Mapping[str, Any], key: str, tokens: float) -> None:
    duration = run.get("duration")
    if (
        isinstance(duration, int | float)
        and duration > 0
        and abs(tokens / duration - run[key]) > _CONSISTENT * run[key]
    ):
        message = f"{run[key]:g} contradicts {tokens:,.0f} tokens in {duration:g} s (total_output_tokens, duration)"
        raise _wrong(file, _at(place, key), message)


def _at(place: str, key: str) -> str:
    return f"{place}: {key}" if place else key


def _wrong(file: str, key: str, message: str) -> ConfigError:
    return ConfigError.of(file, key, message)
