"""Steps, their results and specifications of engines as JSON, for processes that run the steps of one engine.

Arrays are pieces of one body, as in the messages of `core.handoff.messages`, and the body is base64: control messages
are JSON objects.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any
from zlib import crc32

import numpy as np

from ...core.contract.handoff_batch import HandoffBatch
from ...core.contract.step import (
    Arrivals,
    DecodeResult,
    DecodeStep,
    DraftBudget,
    Join,
    MultiStepEnd,
    PrefillResult,
    PrefillStep,
    RoundShape,
    Step,
    StepResult,
    TableWrites,
    WrittenRanges,
)
from ...core.handoff.messages import plain, request_from_json, tree
from ...core.scheduler.spec import EngineSpec


def step_to_json(step: Step) -> dict[str, Any]:
    writes = step.table_writes
    parts = {name: getattr(step, name) for name in ("step_id", "joins", "released", "prefill", "decode", "arrivals")}
    return _packed({**parts, "writes": [writes.rows, writes.columns, writes.slots]})


def step_from_json(value: Mapping[str, Any]) -> Step:
    found = _unpacked(value)
    rows, columns, slots = found["writes"]
    writes = TableWrites([WrittenRanges(rows, columns, np.ones(len(rows), np.int32), slots)] if len(rows) else ())
    return Step(
        found["step_id"],
        tuple(Join(**{**join, "request": request_from_json(join["request"])}) for join in found["joins"]),
        tuple((row, epoch) for row, epoch in found["released"]),
        writes,
        None if found["prefill"] is None else PrefillStep(**found["prefill"]),
        None if found["decode"] is None else _decode(found["decode"]),
        arrivals=None if found["arrivals"] is None else _arrivals(found["arrivals"]),
    )


def _decode(found: Mapping[str, Any]) -> DecodeStep:
    budget = found["budget"]
    if budget is not None:
        lists = {name: tuple(budget[name]) for name in ("biases", "temperatures")}
        budget = DraftBudget(**{**budget, **lists})
    return DecodeStep(**{**found, "shape": RoundShape(*found["shape"]), "budget": budget})


def _arrivals(found: Mapping[str, Any]) -> Arrivals:
    batch: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found["batch"].items()}
    return Arrivals(HandoffBatch(**batch), found["first_tokens"])


def arrays_to_json(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return _packed(arrays)


def arrays_from_json(value: Mapping[str, Any]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = _unpacked(value)
    return found


def result_to_json(result: StepResult) -> dict[str, Any]:
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    if result.decode is not None:
        decode = {field.name: getattr(result.decode, field.name) for field in fields(result.decode)}
        values["decode"] = {**decode, "multi_step_end": result.decode.multi_step_end.value}
    return _packed(values)


def result_from_json(value: Mapping[str, Any]) -> StepResult:
    found = _unpacked(value)
    prefill, decode = found["prefill"], found["decode"]
    if decode is not None:
        outputs = None if decode["outputs"] is None else tuple(decode["outputs"])
        decode = DecodeResult(
            **{**decode, "multi_step_end": MultiStepEnd(decode["multi_step_end"]), "outputs": outputs}
        )
    return StepResult(
        found["step_id"],
        None if prefill is None else PrefillResult(**prefill),
        decode,
        found["round_end_ns"],
        tuple((row, message) for row, message in found["failures"]),
    )


def result_digest(value: Mapping[str, Any]) -> int:
    """Return a checksum of what `result_to_json` has made, without the times, which differ between ranks."""
    timeless = {name: part for name, part in value["value"].items() if name != "round_end_ns"}
    return crc32(json.dumps(timeless, sort_keys=True).encode())  # each array has the checksum of its bytes in it


def engine_to_json(engine: EngineSpec) -> dict[str, Any]:
    """Return an engine's specification for another process, also one whose costs that process will measure."""
    whole = engine
    if engine.lacks_costs:
        engine = engine.without_costs  # an engine that is complete in itself, until the costs are measured
    return {"policy": whole.policy, "spec": engine.to_json()}


def engine_from_json(value: Mapping[str, Any]) -> EngineSpec:
    return replace(EngineSpec.from_json(value["spec"], "the order of a session"), policy=value["policy"])


def _packed(value: Any) -> dict[str, Any]:
    pieces: list[bytes] = []
    described = plain(value, pieces)
    body = base64.b64encode(b"".join(pieces)).decode()
    return {"value": described, "sizes": [len(piece) for piece in pieces], "body": body}


def _unpacked(value: Mapping[str, Any]) -> Any:
    body = base64.b64decode(value["body"])
    ends = pairwise(accumulate(value["sizes"], initial=0))
    return _writable(tree(value["value"], [body[begin:end] for begin, end in ends]))


def _writable(value: Any) -> Any:
    """Return a tree with arrays of its own, and numbers where NumPy's were sent."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.shape else value.item()
    if isinstance(value, dict):
        return {name: _writable(item) for name, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list) else value
