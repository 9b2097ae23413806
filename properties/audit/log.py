"""The audit of a log: it finds contradictions between the records of each engine.

    audit = audit_log("runs/a/events.jsonl")
    assert audit.ok, audit.text()

Any engine that writes the schema of `core/contract/events.py` (as `observe/encoding.py` puts it into lines) can be
audited. The log is read once, from front to back; memory does not grow with it. Nothing is executed again, so engines
that decide otherwise than ours can be audited.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ...core.errors import ConfigError, ForedraftError
from ...observe.log import LogError, read_log
from .engine_history import EngineHistory
from .findings import Audit, Tally


def audit_log(
    path: str | os.PathLike[str], *, candidates: Iterable[int] | None = None, allow_truncated: bool = False
) -> Audit:
    """Audit the log at `path`. `candidates`: the numbers of steps that the engines may choose from, if known.

    Raises LogError, with file and line, for a damaged log, and for one that breaks off unless `allow_truncated`.
    """
    tally = Tally()
    steps = None if candidates is None else frozenset(candidates)
    engines: dict[int, EngineHistory] = {}
    not_audited: dict[str, int] = {}
    complete = False
    num_records = 0
    for record in read_log(path, allow_truncated=allow_truncated):
        num_records += 1
        kind, data = record.kind, record.data
        tally.line = record.line
        if kind == "header":
            continue
        if kind == "end":
            complete = data["complete"]
            if data.get("events", num_records - 2) != num_records - 2:
                message = f"{num_records - 2} events, by the last line {data['events']}: lines are lost"
                raise LogError(path, record.line, message)
            break
        tally.replica = replica = data["r"]
        if kind == "engine":
            if replica in engines:
                raise LogError(path, record.line, f"replica {replica} starts twice")
            try:
                engines[replica] = EngineHistory(data["config"], steps, tally)
            except ConfigError as error:
                raise LogError(path, record.line, str(error)) from error
            continue
        if replica not in engines:
            raise LogError(path, record.line, f"replica {replica} has no 'engine' record before this one")
        try:
            if not engines[replica].follow(kind, data):
                not_audited[kind] = not_audited.get(kind, 0) + 1
        except ForedraftError as error:
            raise LogError(path, record.line, str(error)) from error
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise LogError(path, record.line, f"a {kind!r} record that cannot be read: {error!r}") from error
    if complete:
        for tally.replica, engine in engines.items():
            engine.end()
    return Audit(
        path=os.fspath(path),
        complete=complete,
        num_records=num_records,
        num_replicas=len(engines),
        num_requests=sum(engine.requests.num_submitted for engine in engines.values()),
        num_tokens=sum(engine.rows.num_tokens for engine in engines.values()),
        evaluations=tally.evaluations,
        not_audited=not_audited,
        flaws=tuple(tally.flaws),
        num_flaws=tally.num_flaws,
    )
