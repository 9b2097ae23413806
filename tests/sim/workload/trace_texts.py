"""Texts of traces, and the times that are read from one."""

import json

from foredraft.sim.workload.trace_layout import TraceOptions
from foredraft.sim.workload.traces import TraceSource

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def mooncake_line(timestamp, input_length, output_length, hash_ids=None):
    if hash_ids is None:
        hash_ids = list(range(-(-input_length // 512)))
    return json.dumps(
        {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}
    ) + "\n"  # fmt: skip


def seconds(path, **options):
    return [arrival.time_ns / 1e9 for arrival in TraceSource(path, TraceOptions(**options))]
