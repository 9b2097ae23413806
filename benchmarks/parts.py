"""Prints published parts of serving beside simulated ones, of which docs/evidence/accuracy.md tells what is wrong:

    python benchmarks/parts.py         (the extra measured has three of its models)

the times of verify passes (verify_times.csv), the price of a draft that rests (resting_drafts.csv), how far the slowest
requests and gaps are from the mean under speculation (acceptance_tails.csv), and what verify lengths for each row bring
(adaptive_verification.csv).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from foredraft.core.contract.step import RoundShape
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.hardware import known_gpus
from foredraft.sim.scenario_file import scenario_from_dict
from foredraft.simulation import run_scenario
from points import read_rows

ROOFLINE = "roofline"
VERIFIED_NODES = 4  # 256 requests had 1,024 tokens
GRAPHS = (1, 2, 4, *range(8, 1025, 8))
BEYOND_GRAPHS = 2048
TAIL_STEPS = 3
"""Draft steps of acceptance_tails.csv. Assumption: as in other benchmarks of its author."""
RESTING = {"1": {"candidate_steps": [0]}, "1000": {"candidate_steps": [3]}}
"""A schedule of steps that never drafts for fewer than 1,000 requests, whose draft is loaded nevertheless."""
ADAPTIVE_LENGTH, ADAPTIVE_PROMPT, ADAPTIVE_GRAPHS = 3.4, 220, 1024
"""Of adaptive_verification.csv, which does not say them (assumptions): the accept length with all drafts verified, the
mean prompt of ShareGPT, and the largest captured pass (vLLM's announcement sets it for this model)."""


def passes_table() -> Iterator[str]:
    """Yield a Markdown table of verify passes by their tokens, with the time of their launch."""
    yield "| model, GPU | tokens | published, ms | simulated |"
    yield "| --- | --- | --- | --- |"
    for row in read_rows("verify_times.csv"):
        if row["gpu"] in known_gpus():
            ours = _verify_ms(int(row["tokens"] or BEYOND_GRAPHS), row)
            tokens = row["tokens"] or f"{BEYOND_GRAPHS:,} (assumption), not captured"
            error = f"{ours:.1f} ({100 * (ours / float(row['verify_ms']) - 1):+.0f} %)"
            name = f"{row['model']}, {row['gpu']}, TP {row['tensor_parallel']}"
            yield f"| {name} | {tokens} | {row['verify_ms']} | {error} |"


def _verify_ms(tokens: int, row: Mapping[str, str]) -> float:
    """Return what the target takes of a round, for requests of VERIFIED_NODES tokens each."""
    scenario = {
        "model": {"target": f"deepseek-ai/{row['model']}"},
        "hardware": {
            "gpu": row["gpu"],
            "tensor_parallel": int(row["tensor_parallel"]),
            "server": "vllm-0.18",
            "kernels": ROOFLINE,
            "graph_sizes": [*GRAPHS],
        },
        "engine": {"kv_slots": 1 << 20, "max_running": 1024},
        "speculation": {"algorithm": "EAGLE3", "policy": "fixed", "steps": VERIFIED_NODES - 1},
    }
    rows, nodes = (tokens // VERIFIED_NODES, VERIFIED_NODES) if tokens >= VERIFIED_NODES else (tokens, 1)
    cost = assemble(scenario_from_dict(scenario, "verify")).cost
    parts = cost.decode_parts(rows, RoundShape.chain(nodes - 1), rows * 1024)
    return sum(ns for name, ns in parts.items() if not name.startswith("draft")) / 1e6


def resting_table() -> Iterator[str]:
    """Yield a Markdown table of what a draft costs that rests: more time per token with a schedule that never drafts.

    Lengths were not published: prompts of 400 tokens and outputs of 256 (assumption). The draft of the measurement is
    smaller than the EAGLE head that stands for it.
    """
    yield "| model, GPU | clients | published | simulated: draft's KV kept | and graphs in pieces |"
    yield "| --- | --- | --- | --- | --- |"
    for row in read_rows("resting_drafts.csv"):
        clients = int(row["clients"])
        hardware = {"gpu": row["gpu"], "server": row["server"], "correction": "off", "kernels": ROOFLINE}
        scenario: dict[str, Any] = {
            "model": {"target": row["model"], "weight_dtype": row["weight_dtype"], "context_len": 4096},
            "hardware": hardware,
            "speculation": {"algorithm": "NONE"},
            "workload": {
                "concurrency": clients,
                "num_requests": max(3 * clients, 12),
                "prompt": {"kind": "fixed", "value": 400},
                "output": {"kind": "fixed", "value": 256},
            },
        }
        resting = scenario | {"speculation": {"algorithm": "EAGLE", "adaptive": RESTING}}
        in_pieces = resting | {"hardware": hardware | {"piecewise_graphs": True}}
        name = f"{row['model'].split('/')[-1]} {row['weight_dtype']}, {row['gpu']}"
        published = float(row["resting_tpot_ms"]) / float(row["plain_tpot_ms"]) - 1
        plain, kept, pieces = (
            run_scenario(each, {}).summary["mean_tpot_ms"] for each in (scenario, resting, in_pieces)
        )
        cells = f"{100 * (kept / plain - 1):+.1f} % | {100 * (pieces / plain - 1):+.1f} %"
        yield f"| {name} | {clients} | {100 * published:+.1f} % | {cells} |"


def tails_table() -> Iterator[str]:
    """Yield a Markdown table of how far the slowest requests and gaps are from the mean, for acceptance as drafts have
    it and for independent draws.

    What was served where was not published: ours is Llama-3.1-8B on one H100, and the ratios are to be compared. The
    accept length of each run is its time between chunks over its time per token.
    """
    yield "| acceptance | latency | p90 / mean: published | simulated | p99 / mean: published | simulated |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row, correlation in zip(
        read_rows("acceptance_tails.csv"), ({}, {"request_share": 0.0, "field_share": 0.0}), strict=True
    ):
        clients, requests = int(row["clients"]), int(row["requests"])
        prompt, output = (round(int(row[name]) / requests) for name in ("prompt_tokens", "output_tokens"))
        length = float(row["mean_itl_ms"]) / float(row["mean_tpot_ms"])
        scenario = {
            "hardware": {"server": "vllm-0.18", "kernels": ROOFLINE},
            "speculation": {"algorithm": "EAGLE3", "policy": "fixed", "steps": TAIL_STEPS},
            "acceptance": {"mean_length": round(length, 2), **correlation},
            "workload": {
                "concurrency": clients,
                "num_requests": requests,
                "prompt": {"kind": "uniform", "low": 1, "high": 2 * prompt},
                "output": {"kind": "fixed", "value": output},
            },
        }
        summary = run_scenario(scenario, {}).summary
        for name in ("tpot", "itl", "ttft"):
            cells = [row["acceptance"], name.upper()]
            for quantile in ("p90", "p99"):
                published = row[f"{quantile}_{name}_ms"]
                mean = float(row[f"mean_{name}_ms"])
                cells.append(f"{float(published) / mean:.2f}" if published else "")
                cells.append(f"{summary[f'{quantile}_{name}_ms'] / summary[f'mean_{name}_ms']:.2f}")
            yield f"| {' | '.join(cells)} |"


def adaptive_table() -> Iterator[str]:
    """Yield a Markdown table of output tokens per second without drafts, with all of them verified, and with verify
    lengths for each row: of the second over the first, and of the third over both."""
    yield "| clients | fixed / none: published | simulated | adaptive / none | simulated | adaptive / fixed | simulated |"
    yield "| --: | --: | --: | --: | --: | --: | --: |"
    for row in read_rows("adaptive_verification.csv"):
        clients, drafts = int(row["clients"]), {"algorithm": row["algorithm"], "steps": int(row["steps"])}
        scenario: dict[str, Any] = {
            "model": {"target": row["model"], "context_len": 8192},
            "hardware": {
                "gpu": row["gpu"],
                "tensor_parallel": int(row["devices"]),
                "server": row["server"],
                "kernels": ROOFLINE,
                "graph_sizes": [*GRAPHS[: GRAPHS.index(256)], *range(256, ADAPTIVE_GRAPHS + 1, 16)],
            },
            "workload": {
                "concurrency": clients,
                "num_requests": max(3 * clients, 64),
                "prompt": {"mean": ADAPTIVE_PROMPT, "high": 2000},
                "output": {"kind": "fixed", "value": int(row["output"])},
            },
        }
        acceptance = {"acceptance": {"mean_length": ADAPTIVE_LENGTH}}
        none, fixed, adaptive = (
            run_scenario(scenario | each, {}).summary["output_throughput"]
            for each in (
                {"speculation": {"algorithm": "NONE"}},
                {"speculation": drafts | {"policy": "fixed"}} | acceptance,
                {"speculation": drafts | {"policy": "confidence"}} | acceptance,
            )
        )
        published = [float(row[name]) for name in ("plain", "fixed", "adaptive")]
        pairs = zip(_ratios(*published), _ratios(none, fixed, adaptive), strict=True)
        yield f"| {clients} | " + " | ".join(f"{known:.2f} | {ours:.2f}" for known, ours in pairs) + " |"


def _ratios(none: float, fixed: float, adaptive: float) -> tuple[float, float, float]:
    return fixed / none, adaptive / none, adaptive / fixed


if __name__ == "__main__":
    for table in (passes_table, resting_table, tails_table, adaptive_table):
        print(f"\n{(table.__doc__ or '').splitlines()[0]}\n", *table(), sep="\n")
