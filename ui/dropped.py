"""What is dropped on a page, or pasted: a scenario file, a trace, or the launch command of a server."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, ForedraftError, count_of
from ..core.parsing import ParseError, parse_toml
from ..planning.servers.launch import read_launch
from ..sim.scenario_file import WHOLE_TABLES, scenario_with
from ..sim.workload.request_logs import log_format
from ..sim.workload.trace_inference import TraceError
from ..sim.workload.trace_layout import MOST_SEARCHED
from ..sim.workload.traces import TraceSource

DROPPED = "dropped:"
"""Begins the path of a trace that a page has sent: `dropped:DIGEST/NAME` in the folder of the server."""
TRACES, MOST_TRACES = "traces", 32
TRACE_ENDINGS = (".csv", ".json", ".jsonl", ".log")
SERVERS = {  # server -> what its launch commands have
    "vllm": re.compile(r"\bvllm\s+serve\b|\bvllm\.entrypoints\b|\bvllm/vllm-openai\b"),
    "sglang": re.compile(r"\bsglang\.launch_server\b|\bsglang\s+serve\b|\blmsysorg/sglang\b"),
    "trtllm": re.compile(r"\btrtllm-serve\b"),
}
KEPT = ("workload.", "clients.", "acceptance.", "slo.", "router.")
"""What a launch command does not say, and a page keeps."""
_TRACE_LIKE = re.compile(r"\s*\{|[^=\n\[]*,[^=\n]*(\n|$)")


def shown_name(path: str) -> str:
    """Return the path of a trace as its user knows it."""
    return path.rpartition("/")[2] if path.startswith(DROPPED) else path


def place_of(path: str, folder: str) -> str:
    """Return where a trace lies. Raises ConfigError for one that this server does not have."""
    if not path.startswith(DROPPED):
        return path
    place = Path(folder, TRACES, *path.removeprefix(DROPPED).split("/"))
    if ".." in path or not place.is_file():
        message = f"this server does not have {shown_name(path)}: drop the file on the page again"
        raise ConfigError.of("<page>", "workload.trace", message)
    return str(place)


def read_dropped(name: str, text: str, given: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return what a text is (`kind`), the keys that the page has with it (`given`), and `notes` for the user.

    name: of the file, or what the user sees for a pasted text. given: the keys that the page has. folder: where traces
    are kept. Raises ConfigError or TraceError for a text that is none of them, or is wrong.
    """
    if name.endswith(TRACE_ENDINGS):
        return _trace(name, text, given, folder)
    for server, words in SERVERS.items():
        if words.search(text):
            return _launch(server, name, text, given)
    if not name.endswith(".toml") and (_TRACE_LIKE.match(text) or log_format(text.splitlines()[:MOST_SEARCHED])):
        return _trace(name, text, given, folder)
    try:
        tables = parse_toml(text)
    except ParseError as error:
        known = (
            "a scenario (TOML), a trace (CSV, JSON, a request log) or a launch command of vLLM, SGLang or TensorRT-LLM"
        )
        raise ConfigError.of(name, "", f"is none of {known}; as TOML: {error}") from None
    if not tables:
        raise ConfigError.of(name, "", "is empty: a scenario has at least one key")
    found = flat(tables)
    try:
        scenario_with({}, found)
    except ConfigError as error:
        raise ConfigError(name, error.problems) from None
    return {"kind": "scenario", "given": found, "notes": []}


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a scenario's tables by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        is_table = isinstance(value, Mapping) and f"{prefix}{key}" not in WHOLE_TABLES
        found |= flat(value, f"{prefix}{key}.") if is_table else {f"{prefix}{key}": value}
    return found


def _launch(server: str, name: str, text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    of_gpu = {key: value for key, value in given.items() if key.startswith(("hardware.gpu", "hardware.custom"))}
    launch = read_launch(server, text, name, scenario_with({}, of_gpu).hardware.device)
    kept = {key: value for key, value in given.items() if key.startswith(KEPT)} | of_gpu
    return {"kind": "launch", "given": {**kept, **flat(launch.settings)}, "notes": launch.notes()}


def _trace(name: str, text: str, given: Mapping[str, Any], folder: str) -> dict[str, Any]:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    short = re.sub(r"[^\w.-]", "_", name)[-80:].lstrip(".") or "trace"
    place = Path(folder, TRACES, digest, short)
    if not place.exists():
        if len(list(Path(folder).glob(f"{TRACES}/*"))) >= MOST_TRACES:
            message = f"this server has {MOST_TRACES} traces: start it again, or with `foredraft ui --trace FILE`"
            raise ForedraftError(message)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    try:
        summary = TraceSource(str(place)).scan()
    except TraceError as error:
        place.unlink()
        raise TraceError(name, error.line, error.message) from None
    kept = {key: value for key, value in given.items() if not key.startswith("workload.")}
    requests = f"{name}: {count_of(summary.num_requests, 'request')} ({summary.format})"
    return {
        "kind": "trace",
        "given": {**kept, "workload.trace": f"{DROPPED}{digest}/{short}"},
        "notes": [requests, *summary.notes],
    }
