"""Requests, results and decisions as the lines of a log record them (`encoding.py` has the form)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.contract.request import GREEDY, Request, SamplingParams
from ..core.contract.step import DecodeResult, FailureCause, MultiStepEnd, PrefillResult, Step, StepFailure, StepResult
from ..core.errors import ForedraftError
from ..core.prompt import NO_TOKENS, Prompt
from .encoding import DIGITS

_VALUES = np.full(256, -1, dtype=np.int32)
_VALUES[np.frombuffer(DIGITS, dtype=np.uint8)] = np.arange(len(DIGITS), dtype=np.int32)


class MalformedRecord(ForedraftError):
    """A record of a log whose content does not fit its kind; the reader adds file and line."""


_UNREADABLE = (LookupError, TypeError, ValueError, ArithmeticError, MemoryError)
"""What decoding raises where a value has another type, length or range than its record promises."""


def decode_request(record: Mapping[str, Any]) -> Request:
    """Return the request of a `submit` record. MalformedRecord names the wrong part; InvalidRequest comes from the
    request itself."""
    try:
        sampling = GREEDY
        if "sampling" in record:
            sampling = SamplingParams.from_json(record["sampling"])
        return Request(
            request_id=record["id"],
            prompt=Prompt.from_json(record["prompt"]),
            max_tokens=record["max_tokens"],
            priority=record.get("priority", 0),
            namespace=record.get("namespace", ""),
            sampling=sampling,
            stop_tokens=tuple(record.get("stop_tokens", ())),
            stop_strings=tuple(record.get("stop_strings", ())),
            outputs=tuple(record.get("outputs", ())),
            shown=Prompt.from_json(record["shown"]) if "shown" in record else NO_TOKENS,
            fixed_length=bool(record.get("fixed_length", False)),
            answer=Prompt.from_json(record["answer"]) if "answer" in record else NO_TOKENS,
            arrived_ns=record.get("arrived_ns"),
            min_tokens=record.get("min_tokens", 0),
        )
    except _UNREADABLE as error:
        raise MalformedRecord(f"a request that cannot be read: {error!r}") from error


def decode_result(record: Mapping[str, Any], step: Step) -> StepResult:
    """Return the result of step `step` in a `commit` record. MalformedRecord if the two do not belong together."""
    if record["step"] != step.step_id:
        raise MalformedRecord(f"the result of step {record['step']}, expected that of step {step.step_id}")
    try:
        prefill = _decode_prefill(record, step)
        decode = _decode_rounds(record, step)
        at = record["at"]
        times = np.cumsum(np.array(at if isinstance(at, list) else [at], dtype=np.int64))
        failures = tuple((int(row), str(message)) for row, message in record.get("failures", ()))
    except _UNREADABLE as error:
        raise MalformedRecord(f"a result of step {step.step_id} that cannot be read: {error!r}") from error
    expected = decode.rounds if decode is not None else 1
    if len(times) != expected:
        raise MalformedRecord(f"{len(times)} end times, expected {expected}, one for each round")
    return StepResult(step.step_id, prefill, decode, times, failures)


def decode_failure(record: Mapping[str, Any]) -> StepFailure:
    """Return the failure of a `lost` record; MalformedRecord for an unknown cause."""
    try:
        return StepFailure(record["step"], FailureCause(record["cause"]), record["message"])
    except _UNREADABLE as error:
        raise MalformedRecord(f"a failure that cannot be read: {error}") from error


def _decode_prefill(record: Mapping[str, Any], step: Step) -> PrefillResult | None:
    if step.prefill is None:
        return None
    count = len(step.prefill.rows)
    stopped = None
    if "stopped" in record:
        stopped = np.zeros(count, dtype=bool)
        stopped[record["stopped"]] = True
    tokens = np.array(record["first"], dtype=np.int64) if "first" in record else None
    if tokens is not None and len(tokens) != count:
        raise MalformedRecord(f"{len(tokens)} first tokens, expected {count}, one for each chunk")
    return PrefillResult(tokens, stopped)


def _decode_rounds(record: Mapping[str, Any], step: Step) -> DecodeResult | None:
    if step.decode is None:
        if "rounds" in record:
            raise MalformedRecord(f"decode rounds, but step {step.step_id} has no decode part")
        return None
    rounds, batch_size = int(record["rounds"]), len(step.decode.rows)
    lens = decode_lens(record["lens"], rounds, batch_size)
    stop_index = None
    if "stops" in record:
        stop_index = np.full((rounds, batch_size), -1, dtype=np.int32)
        for number, column, index in record["stops"]:
            stop_index[number, column] = index
    ended = np.zeros(batch_size, dtype=bool)
    if "ended" in record:
        ended[record["ended"]] = True
    tokens = None
    if "tokens" in record:
        flat = np.array(record["tokens"], dtype=np.int64)
        width = int(lens.max(initial=1))
        emitted = np.arange(width) < lens[:, :, None]
        if len(flat) != emitted.sum():
            raise MalformedRecord(f"{len(flat)} tokens, expected {emitted.sum()}, the sum of lens")
        tokens = np.full((rounds, batch_size, width), -1, dtype=np.int64)
        tokens[emitted] = flat
    end = MultiStepEnd(record.get("end", MultiStepEnd.MAX_ROUNDS.value))
    nodes = confidence = None
    if "nodes" in record:
        nodes = decode_lens(record["nodes"], rounds, batch_size)
        confidence = np.array(record["confidence"], dtype=np.float32).reshape(rounds, batch_size, -1)
    return DecodeResult(rounds, lens, stop_index, ended, end, tokens, row_nodes=nodes, confidence=confidence)


def decode_lens(value: int | str | list[int], rounds: int, batch_size: int) -> np.ndarray:
    """Decode `lens` of a `commit` record as int32 [rounds, bs]."""
    if isinstance(value, int):
        return np.full((rounds, batch_size), value, dtype=np.int32)
    if isinstance(value, str):
        flat = _VALUES[np.frombuffer(value.encode("latin-1", "replace"), dtype=np.uint8)]
        if len(flat) and flat.min() < 0:
            raise MalformedRecord(f"lens {value!r}: expected the characters 0-9, a-z, A-Z")
    else:
        flat = np.array(value, dtype=np.int32)
    if len(flat) != rounds * batch_size:
        raise MalformedRecord(f"{len(flat)} accept lengths, expected {rounds} rounds of {batch_size} rows")
    return flat.reshape(rounds, batch_size)


def decision(record: Mapping[str, Any], previous_rows: list[int] | None) -> dict[str, Any]:
    """Return what a `plan` record decided, without its time, for comparison;
    "=" is replaced by the rows it stands for."""
    kept = {key: value for key, value in record.items() if key not in ("t", "r", "ns")}
    if kept.get("decode") == "=":
        if previous_rows is None:
            raise MalformedRecord('"decode" is "=", but this engine has no earlier decode step')
        kept["decode"] = previous_rows
    return kept
