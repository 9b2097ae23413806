"""Writes results of benchmarks as the tools write them, from numbers that a simulation gave."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

COUNT = 40  # requests of a written run
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def vllm(run: dict[str, Any], **more: Any) -> str:
    """Return what `vllm bench serve --save-result` writes of a run, a mapping of our column names."""
    steps = run.get("steps", 0)
    tokens = round(COUNT * run["output_tokens"])
    result: dict[str, Any] = {
        "date": "20260101-000000", "endpoint_type": "vllm", "backend": "vllm", "label": None, "model_id": MODEL,
        "tokenizer_id": MODEL, "num_prompts": COUNT, "request_rate": "inf", "burstiness": 1.0,
        "max_concurrency": run["concurrency"], "duration": tokens / run["output_tokens_per_s"], "completed": COUNT, "failed": 0,
        "total_input_tokens": round(COUNT * run["input_tokens"]), "total_output_tokens": tokens, "request_goodput": None,
        "output_throughput": run["output_tokens_per_s"], "mean_ttft_ms": run["mean_ttft_ms"], "mean_tpot_ms": run["mean_tpot_ms"],
        "median_tpot_ms": run["mean_tpot_ms"], "mean_itl_ms": 1.0,
    }  # fmt: skip
    if steps:
        result |= {
            "spec_decode_acceptance_rate": 50.0, "spec_decode_acceptance_length": run["accept_length"], "spec_decode_num_drafts": 100,
            "spec_decode_per_position_acceptance_rates": [0.5] * steps, "algorithm": run["algorithm"],
        }  # fmt: skip
    return json.dumps(result | more)


def sglang(run: dict[str, Any], **more: Any) -> str:
    """Return the line that SGLang's bench_serving writes of a run."""
    tokens, steps = round(COUNT * run["output_tokens"]), run.get("steps")
    server = {
        "model_path": MODEL, "tp_size": 1, "version": "0.5.3", "speculative_algorithm": run.get("algorithm"),
        "speculative_num_steps": steps, "speculative_eagle_topk": run.get("topk", 1) if steps else None,
        "speculative_num_draft_tokens": run.get("num_draft_tokens", steps + 1) if steps else None,
    }  # fmt: skip
    result = {
        "tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": float("inf"), "max_concurrency": run["concurrency"],
        "random_input_len": 64, "server_info": server, "duration": tokens / run["output_tokens_per_s"], "completed": COUNT,
        "total_input_tokens": round(COUNT * run["input_tokens"]), "total_output_tokens": tokens,
        "output_throughput": run["output_tokens_per_s"], "mean_ttft_ms": run["mean_ttft_ms"], "mean_tpot_ms": run["mean_tpot_ms"],
        "concurrency": run["concurrency"] * 0.98, "accept_length": run.get("accept_length"),
    }  # fmt: skip
    return json.dumps(result | more)


def guidellm(runs: list[dict[str, Any]], **more: Any) -> str:
    """Return the report of guidellm; it knows nothing of speculation."""

    def metric(mean: float, std: float = 0.0) -> dict[str, Any]:
        return {"successful": {"mean": mean, "median": mean, "std_dev": std, "count": COUNT}, "errored": {"mean": 0.0}}

    benchmarks = [
        {
            "type_": "generative_benchmark",
            "config": {
                "strategy": {
                    "type_": "concurrent",
                    "streams": run["concurrency"],
                    "max_concurrency": run["concurrency"],
                }
            },
            "metrics": {
                "request_totals": {"successful": COUNT, "errored": 0, "incomplete": 1, "total": COUNT + 1},
                "prompt_token_count": metric(run["input_tokens"]),
                "output_token_count": metric(run["output_tokens"]),
                "output_tokens_per_second": metric(run["output_tokens_per_s"], 50.0),
                "inter_token_latency_ms": metric(run["mean_tpot_ms"]),
                "time_per_output_token_ms": metric(run["mean_tpot_ms"] * 1.2),
                "time_to_first_token_ms": metric(run["mean_ttft_ms"]),
            },
        }
        for run in runs
    ]
    return json.dumps(
        {"metadata": {"version": 1, "guidellm_version": "0.5.3"}, "args": {}, "benchmarks": benchmarks} | more
    )


def aiperf(run: dict[str, Any], **more: Any) -> str:
    """Return aiperf's profile_export_aiperf.json of a run."""

    def metric(average: float, unit: str, **others: float) -> dict[str, Any]:
        return {"unit": unit, "avg": average, "p50": average, **others}

    result = {
        "schema_version": "1.3", "aiperf_version": "0.10.0", "was_cancelled": False,
        "request_count": metric(float(COUNT), "requests"), "request_throughput": metric(1.0, "requests/sec"),
        "input_sequence_length": metric(run["input_tokens"], "tokens", std=0.0),
        "output_sequence_length": metric(run["output_tokens"], "tokens", std=0.0),
        "output_token_throughput": metric(run["output_tokens_per_s"], "tokens/sec"),
        "inter_token_latency": metric(run["mean_tpot_ms"], "ms"), "time_to_first_token": metric(run["mean_ttft_ms"], "ms"),
        "input_config": {
            "endpoint": {"model_names": [MODEL]},
            "loadgen": {"concurrency": run["concurrency"], "request_rate": None},
        },
    }  # fmt: skip
    return json.dumps(result | more)


def table(runs: list[dict[str, Any]]) -> str:
    """Return the CSV of runs, with a column for every name that any of them has."""
    names = list(dict.fromkeys(name for run in runs for name in run))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(runs)
    return text.getvalue()
