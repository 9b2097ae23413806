"""One event, one line of JSON: how a run is written down. `decoding.py` reads requests and results back.

    {"t":"engine","r":0,"config":{…}}
    {"t":"submit","r":0,"ns":…,"id":"a","prompt":{…},"max_tokens":64}             optional fields only where they are
                                                                                  not the default
    {"t":"abort","r":0,"ns":…,"id":"a"}
    {"t":"plan","r":0,"ns":…,"step":7,"joins":[[id,row,epoch,cached,emitted,max_tokens]],"prefill":[[row,start,len,last]],
     "decode":[rows] or "=",
     "S":3,"k":1,"nd":4,"rounds":8,"retracted":[id],"waiting":0,"held":512,"released":[[row,epoch]],"writes":crc}
     `step` may be null; a join of KV that was sent has a seventh value, its length; one with KV from host memory has an
     eighth, the tokens that come from there; `tokens` in `finished` is their number; "row_nodes":[4,1] after "rounds"
     where rows verify unequal numbers of nodes; "budget":12,"curve":[slope,bias,…] where the device chooses them, the
     curve where it is not that of the plan before. Then a commit has "nodes", as `lens`, and "confidence":[…], flat
    {"t":"commit","r":0,"ns":…,"step":7,"rounds":2,"lens":"4231…","stops":[[round,column,index]],"ended":[column],"end":"request_ended",
     "stopped":[chunk],"failures":[[row,message]],"at":[first end, gap, …],"finished":[[id,reason,tokens]]}
    {"t":"lost","r":0,"ns":…,"step":7,"cause":"hung","message":"…","steps":[7,8],"retracted":[id],"finished":[[id,reason,tokens]]}
    {"t":"resume","r":0,"ns":…,"restarted":true,"retracted":[id]}
    {"t":"handoff","r":0,"ns":…,"move":"reserve","id":"a","row":3,"prompt":{…},"max_tokens":64}
     moves: see `core/scheduler/transfers.py`
    {"t":"retract","r":0,"ns":…,"id":"a"}
    {"t":"deny","r":0,"ns":…,"count":2}
    {"t":"reload","r":0,"ns":…,"table":"{\"1\": …}"}

`decode` is "=" where the rows are those of the engine's previous decode step. `writes` is the CRC-32 of what the step
writes into the request table. `lens` has one character per round and row, 0-9a-zA-Z for 0 … 61, or is one number if all
are equal, or a flat list if one is greater. `stops` and `stopped` count stop tokens and stop strings alike, so a replay
needs no tokenizer. Tokens are written only by executors that have some. Times are integer nanoseconds and keys have one
order, so equal runs give equal bytes. User outputs (log probabilities, …) decide nothing and are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from json.encoder import encode_basestring_ascii as _quote
from typing import Any
from zlib import crc32

import numpy as np

from ..core.contract.events import (
    Aborted,
    AllocationsDenied,
    Committed,
    EngineStarted,
    Event,
    HandoffMoved,
    Planned,
    Reloaded,
    Resumed,
    RetractionAsked,
    StepsLost,
    Submitted,
)
from ..core.contract.request import GREEDY, FinishedRequest, FinishReason, Request
from ..core.contract.step import DecodeResult, DraftBudget, MultiStepEnd, StepResult, TableWrites

DIGITS = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = np.frombuffer(DIGITS, dtype=np.uint8)
_TRUE = b"\x01"

_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def dump_line(value: Mapping[str, Any]) -> str:
    """Return a JSON object without spaces, in the order of its keys. ValueError for NaN and infinities."""
    return _dumps(value)


class LineEncoder:
    """Writes the events of one engine, in their order, as lines (without the newline)."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self._decode_rows: np.ndarray | None = None
        self._curve: tuple[float, ...] = ()  # of the last budget
        self._text_rows: dict[str, int] = {}  # requests with stop strings -> row
        kinds = ("submit", "abort", "plan", "commit", "lost", "resume", "retract", "deny", "reload", "handoff")
        self._heads = {kind: f'{{"t":"{kind}","r":{replica},"ns":' for kind in kinds}
        self._encoders: dict[type, Callable[[Any], str]] = {
            EngineStarted: self._engine,
            Submitted: self._submit,
            Aborted: self._abort,
            Planned: self._plan,
            Committed: self._commit,
            StepsLost: self._lost,
            Resumed: self._resume,
            RetractionAsked: self._retract,
            AllocationsDenied: self._deny,
            Reloaded: self._reload,
            HandoffMoved: self._handoff,
        }

    def encode(self, event: Event) -> str:
        return self._encoders[type(event)](event)

    def _engine(self, event: EngineStarted) -> str:
        return _dumps({"t": "engine", "r": self.replica, "config": event.config})

    def _submit(self, event: Submitted) -> str:
        parts = [f"{self._heads['submit']}{event.now_ns}", *_request_parts(event.request)]
        if event.refusal:
            parts.append(f'"refusal":{_quote(event.refusal)}')
        return ",".join(parts) + "}"

    def _handoff(self, event: HandoffMoved) -> str:
        parts = [f'{self._heads["handoff"]}{event.now_ns},"move":"{event.move.value}"']
        if event.request is not None:
            parts += _request_parts(event.request)
        elif event.request_id:
            parts.append(f'"id":{_quote(event.request_id)}')
        if event.row:
            parts.append(f'"row":{event.row}')
        if event.first_token is not None:
            parts.append(f'"first":{event.first_token}')
        if event.detail:
            parts.append(f'"detail":{_quote(event.detail)}')
        return ",".join(parts) + "}"

    def _abort(self, event: Aborted) -> str:
        self._text_rows.pop(event.request_id, None)
        return f'{self._heads["abort"]}{event.now_ns},"id":{_quote(event.request_id)}}}'

    def _plan(self, event: Planned) -> str:
        step = event.step
        if step is None:
            parts = [f'{self._heads["plan"]}{event.now_ns},"step":null']
        else:
            parts = [f'{self._heads["plan"]}{event.now_ns},"step":{step.step_id}']
            if step.joins:
                joins = [
                    f"[{_quote(j.request.request_id)},{j.row},{j.epoch},{j.num_cached},{j.num_emitted},{j.max_tokens}"
                    f"{f',{j.num_received}' if j.num_received else f',0,{j.num_loaded}' if j.num_loaded else ''}]"
                    for j in step.joins
                ]
                parts.append(f'"joins":[{",".join(joins)}]')
                self._text_rows |= {j.request.request_id: j.row for j in step.joins if j.request.stop_strings}
            if step.prefill is not None:
                p = step.prefill
                columns = (p.rows.tolist(), p.starts.tolist(), p.lens.tolist(), p.is_last.tolist())
                chunks = [f"[{row},{start},{n},{last:d}]" for row, start, n, last in zip(*columns, strict=True)]
                parts.append(f'"prefill":[{",".join(chunks)}]')
                if p.is_parked:
                    parts.append('"parked":true')
            if step.decode is not None:
                d = step.decode
                rows = '"="' if self._same_rows(d.rows) else _dumps(d.rows.tolist())
                parts.append(
                    f'"decode":{rows},"S":{d.shape.steps},"k":{d.shape.topk},"nd":{d.shape.nodes},"rounds":{d.max_rounds}'
                )
                if d.row_nodes is not None:
                    parts.append(f'"row_nodes":{_dumps(d.row_nodes.tolist())}')
                if d.budget is not None:
                    parts.append(self._budget(d.budget))
        if event.retracted:
            parts.append(f'"retracted":{_dumps(event.retracted)}')
        parts.append(f'"waiting":{event.num_waiting},"held":{event.num_held_slots}')
        if step is not None:
            if step.released:
                parts.append(f'"released":{_dumps(step.released)}')
            if len(step.table_writes.slots):
                parts.append(f'"writes":{writes_checksum(step.table_writes)}')
        return ",".join(parts) + "}"

    def _budget(self, budget: DraftBudget) -> str:
        curve = (budget.slope, *budget.biases)
        previous, self._curve = self._curve, curve
        return f'"budget":{budget.drafts}' + ("" if curve == previous else f',"curve":{_dumps(curve)}')

    def _same_rows(self, rows: np.ndarray) -> bool:
        """Return whether these rows are those of the previous decode step, and remember them for the next one."""
        previous, self._decode_rows = self._decode_rows, rows
        return rows is previous or (previous is not None and np.array_equal(rows, previous))

    def _commit(self, event: Committed) -> str:
        result = event.result if not self._text_rows else self._with_text_stops(event)
        parts = [f'{self._heads["commit"]}{event.now_ns},"step":{result.step_id}']
        if result.decode is not None:
            parts.append(_encode_decode(result.decode))
        prefill = result.prefill
        if prefill is not None:
            if prefill.stopped is not None and prefill.stopped.any():
                parts.append(f'"stopped":{_dumps(np.flatnonzero(prefill.stopped).tolist())}')
            if prefill.tokens is not None:
                parts.append(f'"first":{_dumps(prefill.tokens.tolist())}')
        if result.failures:
            failures = [f"[{int(row)},{_quote(message)}]" for row, message in result.failures]
            parts.append(f'"failures":[{",".join(failures)}]')
        parts.append(f'"at":{_encode_times(result.round_end_ns)}')
        if event.finished:
            parts.append(_encode_finished(event.finished))
        return ",".join(parts) + "}"

    def _lost(self, event: StepsLost) -> str:
        for finished in event.finished:
            self._text_rows.pop(finished.request_id, None)
        failure = event.failure
        parts = [
            f'{self._heads["lost"]}{event.now_ns},"step":{failure.step_id},"cause":{_quote(failure.cause.value)},'
            f'"message":{_quote(failure.message)},"steps":{_dumps(event.step_ids)}'
        ]
        if event.retracted:
            parts.append(f'"retracted":{_dumps(event.retracted)}')
        if event.finished:
            parts.append(_encode_finished(event.finished))
        return ",".join(parts) + "}"

    def _resume(self, event: Resumed) -> str:
        retracted = f',"retracted":{_dumps(event.retracted)}' if event.retracted else ""
        return f'{self._heads["resume"]}{event.now_ns},"restarted":{_dumps(event.restarted)}{retracted}}}'

    def _retract(self, event: RetractionAsked) -> str:
        return f'{self._heads["retract"]}{event.now_ns},"id":{_quote(event.request_id)}}}'

    def _deny(self, event: AllocationsDenied) -> str:
        return f'{self._heads["deny"]}{event.now_ns},"count":{event.count}}}'

    def _reload(self, event: Reloaded) -> str:
        return f'{self._heads["reload"]}{event.now_ns},"table":{_quote(event.table)}}}'

    def _with_text_stops(self, event: Committed) -> StepResult:
        """Return the result with the stops that the engine found in the text, as if the executor had found
        them in the tokens."""
        result = event.result
        step, kept = event.step, event.kept
        for finished in event.finished:
            row = self._text_rows.pop(finished.request_id, 0)
            if not row or finished.reason is not FinishReason.STOP:
                continue
            decode, prefill = result.decode, result.prefill
            if step.decode is not None and row in step.decode.rows:
                assert decode is not None and kept is not None, "a result has the parts of its step"
                # Rows with stop strings run single rounds; the tokens that were kept end with the stop, of either kind.
                column = int(np.flatnonzero(step.decode.rows == row)[0])
                stops = decode.stop_index
                stops = np.full(decode.accept_lens.shape, -1, dtype=np.int32) if stops is None else stops.copy()
                stops[0, column] = kept[0, column] - 1
                result = replace(result, decode=replace(decode, stop_index=stops))
            else:
                assert step.prefill is not None and prefill is not None, "the row is in one part of the step"
                stopped = prefill.stopped
                stopped = np.zeros(len(step.prefill.rows), dtype=bool) if stopped is None else stopped.copy()
                stopped[step.prefill.rows == row] = True
                result = replace(result, prefill=replace(prefill, stopped=stopped))
        return result


def _request_parts(request: Request) -> list[str]:
    """Return a request's fields, except those that have their default."""
    parts = [
        f'"id":{_quote(request.request_id)}',
        f'"prompt":{_dumps(request.prompt.to_json())},"max_tokens":{request.max_tokens}',
    ]
    if request.priority:
        parts.append(f'"priority":{request.priority}')
    if request.namespace:
        parts.append(f'"namespace":{_quote(request.namespace)}')
    if request.sampling != GREEDY:
        parts.append(f'"sampling":{_dumps(request.sampling.to_json())}')
    for name in ("stop_tokens", "stop_strings", "outputs"):
        value = getattr(request, name)
        if value:
            parts.append(f'"{name}":{_dumps(list(value))}')
    if request.fixed_length:
        parts.append('"fixed_length":true')
    if request.min_tokens:
        parts.append(f'"min_tokens":{request.min_tokens}')
    if request.shown.length:
        parts.append(f'"shown":{_dumps(request.shown.to_json())}')
    if request.answer.length:
        parts.append(f'"answer":{_dumps(request.answer.to_json())}')
    if request.arrived_ns is not None:
        parts.append(f'"arrived_ns":{request.arrived_ns}')
    return parts


def writes_checksum(writes: TableWrites) -> int:
    """Return the CRC-32 over the bytes of rows, columns and slots, one after the other."""
    checksum = 0
    for part in (writes.rows, writes.columns, writes.slots):
        checksum = crc32(np.ascontiguousarray(part).data, checksum)
    return checksum


def _encode_finished(ended: Iterable[FinishedRequest]) -> str:
    finished = [f"[{_quote(f.request_id)},{_quote(f.reason.name.lower())},{f.num_output}]" for f in ended]
    return f'"finished":[{",".join(finished)}]'


def _encode_decode(decode: DecodeResult) -> str:
    text = f'"rounds":{decode.rounds},"lens":{_encode_lens(decode.accept_lens)}'
    if decode.stop_index is not None:
        hits = np.argwhere(decode.stop_index >= 0)
        if len(hits):
            stops = np.column_stack([hits, decode.stop_index[hits[:, 0], hits[:, 1]]])
            text += f',"stops":{_dumps(stops.tolist())}'
    if _TRUE in decode.ended.tobytes():
        text += f',"ended":{_dumps(np.flatnonzero(decode.ended).tolist())}'
    if decode.multi_step_end is not MultiStepEnd.MAX_ROUNDS:
        text += f',"end":"{decode.multi_step_end.value}"'
    if decode.tokens is not None:
        emitted = np.arange(decode.tokens.shape[2]) < decode.accept_lens[:, :, None]
        text += f',"tokens":{_dumps(decode.tokens[emitted].tolist())}'
    if decode.row_nodes is not None and decode.confidence is not None:
        text += f',"nodes":{_encode_lens(decode.row_nodes)},"confidence":{_encode_confidence(decode.confidence)}'
    return text


def _encode_confidence(confidence: np.ndarray) -> str:
    """Encode float32 of any shape as a flat list of the shortest decimals that give the same numbers; null for NaN and
    infinities."""
    finite = np.isfinite(confidence)
    return (
        f"[{','.join(str(one) if ok else 'null' for one, ok in zip(confidence.ravel(), finite.ravel(), strict=True))}]"
    )


def _encode_lens(lens: np.ndarray) -> str:
    """Encode int [rounds, bs] as a number, a string of digits or a flat list."""
    flat = lens.reshape(-1)
    if not len(flat):
        return '""'
    # As an unsigned number a negative entry is huge: one reduction checks both ends.
    if flat.dtype != np.int32 or flat.view(np.uint32).max() >= len(DIGITS):
        return _dumps(flat.tolist())
    digits = _DIGITS.take(flat).tobytes()
    if digits.count(digits[:1]) == len(digits):
        return str(int(flat[0]))
    return f'"{digits.decode("ascii")}"'


def _encode_times(times: np.ndarray) -> str:
    if len(times) == 1:
        return str(int(times[0]))
    values = times.tolist()
    return _dumps(values[:1] + [after - before for before, after in pairwise(values)])
