"""Reads the published serving points that the package of measured kernels carries (silicon_sample.csv of
aiconfigurator-core, Apache-2.0) and says what each of them served.

    python benchmarks/silicon.py        counts the points, and the rows that are refused, by reason

A row gives a model, a GPU, a server with its version, a number format, lengths, a number of clients, a parallelism, the
mean time to the first token and the mean time per output token. The rows come from two kinds of runs:

    InferenceX     the public benchmark of SemiAnalysisAI/InferenceX, in three copies (two files and a dump of its
                   database). Its script draws lengths uniformly from 0.8 to 1 times the named ones, and each client
                   sends ten requests (utils/bench_serving/benchmark_serving.py, benchmarks/*.sh)
    aiconfigurator runs of the authors of the package: all lengths equal, and twenty requests per client after two to
                   warm up (bench_run.sh.j2 in the wheel aiconfigurator: --isl-stddev 0, --osl-stddev 0). A step has
                   room for one prompt and 1,500 tokens (rule_plugin/benchmark in this wheel: max_num_tokens of vLLM
                   and TensorRT-LLM, max_prefill_tokens of SGLang), and only vLLM computes prompts in chunks

Lengths and launch flags come from these scripts alone, never from a result.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from foredraft.observe.distribution.install_hint import install_command
from foredraft.sim.cost.measured.database import packaged_config
from foredraft.sim.cost.measured.tables import cache_folder
from points import HELD_ROW, Point, read_csv, read_rows

GPUS = {
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
}
SERVERS = {"sglang": "sglang-0.5", "vllm": "vllm-0.18", "trtllm": "trtllm-1.x"}
INFERENCEX, OWN = (0.8, 1.0), (1.0, 1.0)
"""Shortest and longest length of a request, as shares of the named one, by the scripts of the two sources."""

LEAST_WIDE = 16
SPARE_TOKENS = 1500
"""What a step has room for beside one prompt in the runs of the package's authors."""
BLOCKS = "FP8 in blocks"
"""The weights of an FP8 checkpoint in blocks of 128 × 128, of which the package has no configuration of this model."""
HELD = "Llama-3.1-8B"
"""The model whose points under TensorRT-LLM 1.0.0rc3 wait as `points.HELD_ROW` says; Qwen3-32B's and Qwen3-235B's do
not."""
DRAFTED_RUNS = {("1.1.0rc2.post2", "2026-01-14"), ("1.2.0rc6.post3", "2026-02-05"), ("1.2.0rc6.post3", "2026-02-06")}
"""Runs of DeepSeek-R1 under TensorRT-LLM whose rows lost the label of multi-token prediction: benchmarks/*_trt_mtp.sh
began on the first of these days, no row of these runs is in the database's dump, which keeps the label, and their times
per token are half of those of the same deployments without it."""


class Refusal(StrEnum):
    """Why a row of the file is no point."""

    COPY = "the same run is in the file under another name"
    RACK = "tensor parallelism of a whole rack (12 to 72): the devices of several engines, added up"
    ENGINES = "disaggregated, and the number of engines is not given: the rows of a decode engine are unknown"
    DRAFTED = "a run with multi-token prediction whose label is lost"
    CACHED = "prompts that were probably cached: the time to the first token is shorter than computing the prompt"
    REPORTED_LATE = "512 clients, December 2025: tokens were reported late, the published TPOT is no time of a step"
    REPLICAS = "a test of a whole deployment: the number of its replicas is not given"
    NO_FORMAT = "no configuration of this model in this format"
    CONTRADICTION = "the parallelism contradicts itself"
    NO_CLIENTS = "the number of clients is not given"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the devices of an engine share a model: see `Parallelism`."""

    tensor: int
    data: int
    expert: int

    @property
    def devices(self) -> int:
        return self.tensor * self.data


@dataclass(frozen=True, slots=True)
class ServedPoint:
    """What a row served, and when.

    `engines`, `prefill`, `prefill_engines`: of a disaggregated row, else 0 and None.
    """

    id: str
    family: str
    precision: str
    version: str
    date: str
    is_inferencex: bool
    layout: Layout
    point: Point
    engines: int = 0
    prefill: Layout | None = None
    prefill_engines: int = 0

    @property
    def deployment(self) -> tuple[str, ...]:
        """The model, GPU, server, format and parallelism: a group of the fit."""
        parallel = f"TP{self.layout.tensor} DP{self.layout.data} EP{self.layout.expert}"
        kind = f"{self.engines} decoding" if self.engines else ""
        return (self.family, self.point.gpu, self.point.server, self.precision, parallel, kind)


def silicon_file() -> Path | None:
    """Return the file of the installed package; None without the extra `measured`."""
    spec = find_spec("aiconfigurator_core")
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) / "systems" / "silicon_sample.csv" if places else None


def served_points(path: Path) -> tuple[list[ServedPoint], Counter[Refusal]]:
    """Return the points of the file, in its order, and how many rows are refused for each reason."""
    refused: Counter[Refusal] = Counter()
    points = []
    for rows in _runs(read_csv(path)):
        refused[Refusal.COPY] += len(rows) - 1
        found = _served(rows)
        if isinstance(found, Refusal):
            refused[found] += 1
        else:
            points.append(found)
    return points, refused


def _runs(rows: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """Yield the rows of each run. A run has one time to the first token and one per output token in every copy, to a
    hundredth of a millisecond; the copy with the clearest label comes first."""
    runs: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        times = (f"{float(row[key]):.2f}" for key in ("silicon_ttft_ms", "silicon_tpot_ms"))
        runs.setdefault((row["mode"], row["backend"], row["system"], *times), []).append(row)
    for copies in runs.values():
        yield sorted(copies, key=_unclear)


def _unclear(row: Mapping[str, str]) -> tuple[bool, bool]:
    """Return whether a row lacks the number of engines, and whether its label may have TP times EP written twice."""
    source = row["silicon_data_source"]
    lacks_engines = row["mode"] == "disagg" and not row["decode_num_workers"]
    return lacks_engines, not source.startswith("source_file=2026-03-25")


def _served(copies: list[dict[str, str]]) -> ServedPoint | Refusal:
    row, source = copies[0], copies[0]["silicon_data_source"]
    name = row["model_path"].rpartition("/")[2]
    known = _models().get((name, row["precision"]))
    if known is None:
        return Refusal.NO_FORMAT
    family = known["family"]
    clients = int((re.search(r"silicon_concurrency=(\d+)", source) or [0, row["batch_size"] or 0])[1])
    if not clients:
        return Refusal.NO_CLIENTS
    is_inferencex = "/Users/" not in source
    date = (re.search(r"measured=(\d{4}-\d\d-\d\d)", source) or ["", ""])[1]
    version = next((copy["backend_version"] for copy in copies if copy["backend_version"]), "")
    is_split = row["mode"] == "disagg"
    layout = _layout(row, "decode_" if is_split else "", is_inferencex)
    refusal = _doubt(row, family, version, date, clients, layout)
    if refusal is not None or layout is None:
        return refusal or Refusal.CONTRADICTION
    engines = int(row["decode_num_workers"] or 0) if is_split else 0
    lengths = INFERENCEX if is_inferencex else OWN
    point = _point(row, known, version, clients, layout, lengths)
    if not is_inferencex:
        point = replace(point, chunk_size=_prompt_tokens(point.server, point.prompt, clients))
    flags = _flags(point, family, row["precision"] or "bf16") if is_inferencex else {}
    if flags:
        point = replace(
            point,
            kv_dtype=flags["kv_dtype"] or None,
            chunk_size=int(flags["chunk_size"]) if flags["chunk_size"] else None,
            static_fraction=float(flags["static_fraction"]) if flags["static_fraction"] else None,
            reserved_fraction=float(flags["reserved_fraction"]) if flags["reserved_fraction"] else None,
            poll_steps=int(flags["poll_steps_from_16" if clients >= 16 else "poll_steps"]),
            batch_wait_rounds=int(flags["batch_wait_rounds"]),
            prefix_cache=flags["prefix_cache"] != "off",
        )
    return ServedPoint(
        id=row["id"],
        family=family,
        precision=row["precision"] or "bf16",
        version=version,
        date=date,
        is_inferencex=is_inferencex,
        layout=layout,
        point=point,
        engines=engines,
        prefill=_layout(row, "prefill_", is_inferencex) if is_split else None,
        prefill_engines=int(row["prefill_num_workers"] or 0) if is_split else 0,
    )


@cache
def _models() -> dict[tuple[str, str], dict[str, str]]:
    """Return what the names of models and formats in the file stand for: the database of InferenceX calls DeepSeek-R1
    by the shape that it shares with DeepSeek-V3."""
    return {(row["name"], row["precision"]): row for row in read_rows("silicon_models.csv")}


def _flags(point: Point, family: str, precision: str) -> Mapping[str, str]:
    """Return the launch flags of a deployment by InferenceX's scripts; empty where we know none. A field that is empty
    has no condition."""
    asked = {
        "precision": precision,
        "gpus": point.gpu,
        "tensor_parallel": str(point.tensor_parallel),
        "lengths": f"{point.prompt}/{point.output}",
    }
    for row in read_rows("launch_flags.csv"):
        is_meant = all(value in (row[name] or value).split() for name, value in asked.items())
        if is_meant and (row["server"], row["model"]) == (point.server, family):
            return row
    return {}


def _prompt_tokens(server: str, prompt: int, clients: int) -> int:
    """Return the prompt tokens of a step in a run of the package's authors."""
    if server == "vllm-0.18":
        return clients + prompt + SPARE_TOKENS
    return (prompt + SPARE_TOKENS) // prompt * prompt  # whole prompts


def _doubt(
    row: Mapping[str, str], family: str, version: str, date: str, clients: int, layout: Layout | None
) -> Refusal | None:
    """Return the reason for which a row's label or its results cannot be taken as they stand."""
    if row["mode"] == "disagg" and not row["decode_num_workers"]:
        return Refusal.ENGINES
    if "gtl_" in row["silicon_data_source"]:
        return Refusal.REPLICAS
    if layout is not None and row["mode"] == "agg" and layout.devices > 8:
        return Refusal.RACK
    if family == "DeepSeek-R1" and row["backend"] == "trtllm" and (version, date) in DRAFTED_RUNS:
        return Refusal.DRAFTED
    if family == "Llama-3.1-8B" and row["backend"] == "vllm":
        return Refusal.CACHED
    if family == "gpt-oss-120b" and row["backend"] == "vllm" and date.startswith("2025-12") and clients == 512:
        return Refusal.REPORTED_LATE
    return None


def _layout(row: Mapping[str, str], role: str, is_inferencex: bool) -> Layout | None:
    """Return the parallelism of a row; None if its numbers contradict each other.

    Two copies of InferenceX's rows multiply the tensor parallelism by that of the experts: "64" is 8 times 8, on eight
    devices. MiniMax in FP8 with eight devices has whole experts on each: 192 columns are not blocks of 128. SGLang
    makes its expert parallelism as large as the deployment where experts exchange tokens by all-to-all, whatever was
    asked for: with 16 groups or more they do (assumption).
    """
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tensor, data, expert_tensor, expert = (max(1, int(row[role + name] or 1)) for name in names)
    if is_inferencex and expert > 1 and expert_tensor > 1 and not role:
        if data > 1:
            data //= expert
        else:
            tensor //= expert
    elif is_inferencex and row["backend"] == "vllm" and data > 1 and expert == tensor * data:
        data, expert = 1, tensor
    elif is_inferencex and row["backend"] == "sglang" and data >= LEAST_WIDE and expert == 1:
        expert = tensor * data
    if "MiniMax" in row["model_path"] and row["precision"] == "fp8" and tensor == 8:
        expert = 8
    if (tensor * data) % expert or (not is_inferencex and expert_tensor * expert > tensor * data > 0 and expert > 1):
        return None
    return Layout(tensor, data, expert)


def _point(
    row: Mapping[str, str],
    known: Mapping[str, str],
    version: str,
    clients: int,
    layout: Layout,
    lengths: tuple[float, float],
) -> Point:
    family, model, dtype = (known[name] for name in ("family", "configuration", "weights"))
    gpu, server = GPUS[row["system"]], SERVERS[row["backend"]]
    if dtype == BLOCKS:
        model = _in_blocks(model)
    return Point(
        dataset=f"{family} {row['precision'] or 'bf16'}, {gpu}, {server}",
        server=server,
        gpu=gpu,
        model=model,
        weight_dtype="bf16" if dtype in ("", BLOCKS) else dtype,
        tensor_parallel=layout.tensor,
        expert_parallel=layout.expert,
        attention_data_parallel=layout.data,
        concurrency=clients,
        prompt=int(row["isl"]),
        output=int(row["osl"]),
        shortest=lengths[0],
        longest=lengths[1],
        tpot_ms=float(row["silicon_tpot_ms"]),
        ttft_ms=float(row["silicon_ttft_ms"]),
        held_rows=int(version == HELD_ROW and family == HELD),
    )


@cache
def _in_blocks(model: str) -> str:
    """Return the path of a packaged configuration with FP8 weights in blocks, as its FP8 checkpoint has them."""
    packaged = packaged_config(model)
    assert packaged is not None, f"{model} is not in the package"
    config = json.loads(packaged[0].read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
    }
    path = cache_folder("configs") / f"{model.rpartition('/')[2]}-FP8" / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def main() -> None:
    path = silicon_file()
    if path is None:
        raise SystemExit(f"needs measured kernels: {install_command('measured')}")
    points, refused = served_points(path)
    print(f"{len(points):,} points")
    for server, count in Counter(item.point.server for item in points).items():
        split = sum(item.engines > 0 for item in points if item.point.server == server)
        print(f"    {server}: {count:,}, {split} of them disaggregated")
    for reason, count in refused.most_common():
        print(f"{count:,} rows refused: {reason}")


if __name__ == "__main__":
    main()
