"""The load of a server as gateways ask for it: `/load` of vLLM, `/v1/loads` of SGLang."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from ...observe.log import package_version
from ..metrics import ServerMetrics

COUNTS = {  # SGLang's name -> the number of an engine
    "num_running_reqs": "running",
    "num_waiting_reqs": "waiting",
    "num_used_tokens": "kv_used",
    "max_total_num_tokens": "kv_slots",
    "token_usage": "kv_use",
    "gen_throughput": "throughput",
    "cache_hit_rate": "hit_rate",
}
SPECULATIVE = {"accept_length": "accept_length", "accept_rate": "accept_rate"}


def server_load(metrics: ServerMetrics, numbers: Sequence[int]) -> dict[str, int]:
    """Return the outputs that engines have, running and waiting, as vLLM's `/load`."""
    values = [metrics.values(number, 0) for number in numbers]
    return {"server_load": sum(int(found.get("running", 0) + found.get("waiting", 0)) for found in values)}


def engine_loads(metrics: ServerMetrics, numbers: Sequence[int], now_ns: int) -> dict[str, Any]:
    """Return the loads of engines, as SGLang's `/v1/loads`. What the engine does not know is absent."""
    loads = []
    for number in numbers:
        values, config = metrics.values(number, now_ns), metrics.engines[number].config
        load: dict[str, Any] = {"dp_rank": number, "max_running_requests": config.max_running}
        load |= {name: values[key] for name, key in COUNTS.items() if key in values}
        speculative = {name: values[key] for name, key in SPECULATIVE.items() if key in values}
        loads.append(load | ({"speculative": speculative} if speculative else {}))
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return {"timestamp": now, "version": package_version(), "loads": loads}
