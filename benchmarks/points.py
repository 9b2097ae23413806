"""The published measurements of `benchmarks/published/` as points: what was served, what was measured, and a scenario
that repeats it.

    plain.csv     serving without speculation: time to first token and time per output token at a number of clients
    rounds.csv    SGLang and vLLM with EAGLE drafts, and the same without: output tokens per second at a number of
                  clients
    speedups.csv  how much faster the same requests were served with a draft than without, by the number of clients

Each client sends its next request when the last has ended. Lengths are uniform from `shortest` to `longest` times
`prompt` and `output`. Rows of InferenceX say so themselves: its random lengths are 0.8 to 1 times the named ones
(RANDOM_RANGE_RATIO in the scripts of SemiAnalysisAI/InferenceX). For the others, whose lengths were published as means,
it is our reading of the data: as meets the published times to the first token best (fit_servers.py --spread), for
requests that are equally long come in waves. Speculative points give the mean accept length, which the simulation takes
as it is.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from foredraft.core.contract.step import RoundShape
from foredraft.core.scheduler.spec import default_graph_sizes
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.efficiency import default_efficiency
from foredraft.sim.cost.passes.decode_work import DecodeWork
from foredraft.sim.cost.passes.forward import ForwardCost
from foredraft.sim.cost.server import PROFILES
from foredraft.sim.scenario_file import scenario_from_dict

if TYPE_CHECKING:
    from foredraft import Result

PUBLISHED = Path(__file__).parent / "published"
# requests per client that are simulated: the first wave of prompts, the last, which ends with fewer clients, and one
# between
TURNS = 3
TURNS_MEASURED = 10
"""Requests per client of a benchmark. Assumption: as the example scripts of NVIDIA's benchmark tools ask for;
it was not published."""
HELD_ROW = "1.0.0rc3"
"""A version of TensorRT-LLM that gave a row of the batch to the request that pads captured batches (its pull 7998 added
one). Assumption: the server allowed as many rows as there were clients. In its points requests wait as if one client
less were served: for 1/8 of a request's time with 8 clients, 1/16 with 16, 1/32 with 32."""
STATIC_FRACTIONS = {"Qwen/Qwen3-32B": 0.8}
"""SGLang's --mem-fraction-static where it was not its own default. Assumption: by the published times of one H100 6,912
to 7,600 tokens fitted beside the weights (three requests of 2,304 ran at once, and two of 2,560), which 0.8 leaves. The
default leaves 18,600."""
CHECKPOINT = "mxfp4"  # a format that its checkpoints are published in: nothing is set
LENGTHS = {"gsm8k": (300, 140), "humaneval": (200, 400), "math500": (200, 700), "MT-Bench": (300, 400)}
"""Mean prompt and output of benchmarks whose lengths were not published. Assumption: usual lengths of these texts; 300
tokens more or fewer change a round of one request by less than 1 %. The output length of gsm8k, 140, follows from 100
answers by Qwen3-30B-A3B at 373.6 tokens/s in 37.4 s, an example in docs/benchmarks/SpecBundle.md in
sgl-project/sgl-cookbook, which launches this model with tensor parallelism 4 (rounds.csv has that)."""


BATCH_WAIT_TOKENS = 0.9
"""batch_wait_max_tokens_ratio where a script of InferenceX waits for batches (70b_fp8_h200_trt_slurm.sh)."""


class MeasuredPoint(NamedTuple):
    """What a simulation of a point shows: time per output token of one client, and to the first token, in ms."""

    token_ms: float
    first_token_ms: float


@dataclass(frozen=True, slots=True)
class Point:
    """One published measurement.

    `server` is our profile. Of the measured values those that were not published are None: `tokens_per_s` is that of
    all clients.
    """

    dataset: str
    server: str
    gpu: str
    model: str
    tensor_parallel: int
    concurrency: int
    prompt: int
    output: int
    shortest: float
    longest: float
    weight_dtype: str = "bf16"  # that of the checkpoint
    text: str = ""
    draft: str = ""
    algorithm: str = "NONE"
    steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    accept_length: float = 1.0
    tokens_per_s: float | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    held_rows: int = 0  # rows of the batch that no client's request can have
    static_fraction: float | None = None  # None: the server's own
    expert_parallel: int = 1
    attention_data_parallel: int = 1
    reserved_fraction: float | None = None  # None: the server's own
    kv_dtype: str | None = None  # None: that of the checkpoint and the server
    chunk_size: int | None = None  # None: the server's own
    mode: str | None = None  # of scheduling; None: the server's own
    poll_steps: int = 1  # decode steps between two looks of the server at its queue
    batch_wait_rounds: int = 0  # rounds for which new requests wait for more of them
    prefix_cache: bool = True
    requests: int | None = None  # None: TURNS of each client
    is_pinned: bool = False  # whether the server drew accepted drafts independently, with this mean

    @property
    def clients_keep_step(self) -> bool:
        """Whether all requests are equally long."""
        return self.shortest == self.longest

    def mean(self, length: int) -> float:
        """Return the mean of lengths that are called `length`."""
        return length * (self.shortest + self.longest) / 2

    @property
    def shape(self) -> str:
        """The draft's steps, branches and nodes."""
        return f"{self.steps}-{self.topk}-{self.num_draft_tokens}" if self.steps else "plain"

    def scenario(self, kernels: str) -> dict[str, Any]:
        """Return the scenario that repeats this point with times of passes from `kernels` (see `hardware.kernels`)."""
        rows = self.concurrency - self.held_rows
        hardware = {
            "gpu": self.gpu,
            "server": self.server,
            "kernels": kernels,
            "correction": "off",
            "tensor_parallel": self.tensor_parallel,
        }
        for key in ("expert_parallel", "attention_data_parallel"):
            if getattr(self, key) > 1:
                hardware[key] = getattr(self, key)
        for key in ("static_fraction", "reserved_fraction"):
            if getattr(self, key) is not None:
                hardware[key] = getattr(self, key)
        if PROFILES[self.server].graph_unit == "rows":  # every batch is captured, as NVIDIA's scripts ask for
            hardware["graph_sizes"] = list(default_graph_sizes(rows))
        speculation: dict[str, Any] = {"algorithm": self.algorithm}
        tables: dict[str, Any] = {}
        if self.steps:
            speculation |= {"policy": "fixed", "steps": self.steps, "topk": self.topk}
            speculation["num_draft_tokens"] = self.num_draft_tokens
            tables["acceptance"] = {"mean_length": self.accept_length}
            if self.is_pinned:
                tables["acceptance"] |= {"request_share": 0.0, "field_share": 0.0}
        # The engine's tables are as wide as the context: no wider than these requests need, so that they are quick.
        longest = math.ceil((self.prompt + self.output) * self.longest)
        model: dict[str, Any] = {"target": self.model, "context_len": longest + 64}
        if self.weight_dtype not in ("bf16", CHECKPOINT):
            model["weight_dtype"] = self.weight_dtype
        if self.kv_dtype is not None:
            model["kv_dtype"] = self.kv_dtype
        engine: dict[str, Any] = {"max_running": rows}
        for key in ("chunk_size", "mode"):
            if getattr(self, key) is not None:
                engine[key] = getattr(self, key)
        if self.chunk_size is not None and PROFILES[self.server].has_one_budget:
            engine["max_step_tokens"] = self.chunk_size
        if not self.prefix_cache:
            engine["prefix_cache"] = False
        if self.batch_wait_rounds:
            engine |= {"batch_wait_rounds": self.batch_wait_rounds, "batch_wait_tokens": BATCH_WAIT_TOKENS}
        if self.poll_steps > 1:
            tables["front_end"] = {"poll_steps": self.poll_steps}
        return tables | {
            "name": self.dataset,
            "model": model,
            "hardware": hardware,
            "speculation": speculation,
            "engine": engine,
            "workload": {
                "concurrency": self.concurrency,
                "num_requests": self.requests or TURNS * max(self.concurrency, 4),
                "prompt": self._lengths(self.prompt),
                "output": self._lengths(self.output),
            },
        }

    def _lengths(self, length: int) -> dict[str, Any]:
        return {"kind": "uniform", "low": math.ceil(length * self.shortest), "high": math.floor(length * self.longest)}

    def measured(self, result: Result) -> MeasuredPoint:
        """Return what a run shows of this point, at the published accept length.

        A published rate has prompts and waiting in it, a published time per token has not. The first and the last turn
        of the clients are a third of a simulation each, and a tenth of a benchmark: means over requests are weighted
        so.
        """
        rows = result.requests.sort_by("arrival_ns").select(["arrival_ns", "first_token_ns", "finish_ns", "num_output"])
        arrival, first, finish, tokens = (column.to_numpy().astype(float) for column in rows.columns)
        turn = np.arange(len(tokens)) // self.concurrency
        inner = (turn > 0) & (turn < turn[-1])
        weights = np.where(inner, (TURNS_MEASURED - 2) * self.concurrency / max(inner.sum(), 1), 1.0)

        def mean(values: np.ndarray) -> float:
            return float(np.average(values, weights=weights))

        decoding = (finish - first) * self._luck(result)
        if self.tpot_ms is not None:
            ms = mean(decoding / np.maximum(tokens - 1, 1)) / 1e6
        else:
            assert self.tokens_per_s is not None, "a point has a time or a rate"
            ms = mean(first - arrival + decoding) / mean(tokens) / 1e6  # of the steady state (Little's law)
        return MeasuredPoint(ms, mean(first - arrival) / 1e6)

    def tokens_per_s_of(self, result: Result) -> float:
        """Return the rate of a whole run, its empty batches at the end included, at the published accept length."""
        return float(result.summary["output_throughput"]) / self._luck(result)

    def _luck(self, result: Result) -> float:
        """Return how much longer the accept length of a run is than the published one: rounds accept a little more or
        less than they were asked to."""
        return float(result.summary["accept_length"]) / self.accept_length if self.steps else 1.0

    @property
    def published_ms(self) -> float:
        """The published time per output token of one client."""
        return self.tpot_ms or 1e3 * self.concurrency / self.tokens_per_s


@contextmanager
def profile_with(server: str, **times_ns: float) -> Iterator[None]:
    """Give a server's profile other times of its launch meanwhile."""
    profile = PROFILES[server]
    PROFILES[server] = replace(profile, launch=replace(profile.launch, **times_ns))
    try:
        yield
    finally:
        PROFILES[server] = profile


READ: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": bool}


def point_of(row: Mapping[str, str], **values: Any) -> Point:
    """Return the point of a row whose columns are called as the fields are. `values`: those that the row has not, or
    not so; a cell that is empty leaves a field at its default."""
    found = {
        field.name: READ[str(field.type).removesuffix(" | None")](row[field.name])
        for field in fields(Point)
        if row.get(field.name)
    }
    return Point(**found | values)


def plain_points() -> list[Point]:
    """Return the points of plain.csv, in its order."""
    return [
        point_of(
            row,
            dataset=f"{row['model'].split('/')[-1]} {row['weight_dtype']}, {row['gpu']}, {row['server']}",
            held_rows=int(row["server_version"] == HELD_ROW),
            static_fraction=STATIC_FRACTIONS.get(row["model"]) if row["server"] == "sglang-0.5" else None,
        )
        for row in read_rows("plain.csv")
    ]


def round_points() -> list[Point]:
    """Return the points of rounds.csv, in its order."""
    return [
        point_of(
            row,
            dataset=f"{row['checkpoint'] or row['model'].split('/')[-1]}, {row['gpu']}, {row['server']}, "
            f"{row['concurrency']} clients",
            **usual_lengths(row["text"], 0.2),
        )
        for row in read_rows("rounds.csv")
    ]


def usual_lengths(text: str, spread: float) -> dict[str, float]:
    """Return the lengths of a benchmark's requests, which are apart by `spread` times the mean to both sides."""
    prompt, output = LENGTHS[text]
    return {"prompt": prompt, "output": output, "shortest": 1 - spread, "longest": 1 + spread}


def unseen_points() -> list[Point]:
    """Return the points of unseen.csv, in its order.

    Its column `model` is what has the sizes of the model that was served: GLM-5.2 has those of GLM-5, but for the
    indexer of its attention, which four layers share (not simulated). Of the slow host only a mean output of about
    1,000 tokens is known: prompts of 300 and a spread of half are assumptions.
    """
    return [
        point_of(row, shortest=1.0 if row["requests"] else 0.5, longest=1.0 if row["requests"] else 1.5)
        for row in read_rows("unseen.csv")
    ]


class SpeedUp(NamedTuple):
    """A published speed-up: the points with and without a draft, and how much faster the first was served."""

    drafting: Point
    plain: Point
    published: float

    def simulated(self, simulate: Callable[[Point], Result]) -> float:
        """Return the speed-up that simulations of both points show."""
        rates = [point.tokens_per_s_of(simulate(point)) for point in (self.drafting, self.plain)]
        return rates[0] / rates[1]


def speedup_points() -> list[SpeedUp]:
    """Return the points of speedups.csv, in its order.

    Its server scheduled plain rounds ahead of the device, but not those with drafts. Requests are a turn of a
    conversation each, of lengths that differ widely (assumption). No profile stands for its version: that of the
    nearest is taken.
    """
    found = []
    for row in read_rows("speedups.csv"):
        drafting = point_of(
            row,
            dataset=f"{row['model']}, {row['gpu']}, SGLang {row['server_version']}",
            mode="synchronous",
            **usual_lengths(row["text"], 0.75),
        )
        plain = replace(drafting, algorithm="NONE", steps=0, topk=1, num_draft_tokens=1, accept_length=1.0, mode=None)
        found.append(SpeedUp(drafting, plain, float(row["speedup"])))
    return found


def model_of(point: Point) -> str:
    """Return the name of a point's model as fits have it."""
    return point.model.split("/")[-1].lower()


def rounds_of(model: str) -> str:
    """Return what left_out.csv calls a fit without the speculative rounds of a model."""
    return f"rounds of {model}"


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a file of `published`."""
    return read_csv(PUBLISHED / name)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- times per token as a formula of what a server waits for: near a simulation, and quick, so that fits need few ------

DEVICE = "device_scale"
WAITS = ("graph_gap_ns", "row_gap_ns", "collective_gap_ns", "draft_step_ns", "eagle3_step_ns", "tree_ns")
FREE = dict.fromkeys([*WAITS, "eager_kernel_ns"], 0.0)


class PointEstimate(NamedTuple):
    """What a point's time per token is made of, in ns:
    kernels of a round, of a round with one prompt, of that prompt alone."""

    point: Point
    decode_ns: float
    mixed_ns: float
    prompt_ns: float
    kernels: int
    collectives: int
    devices: int

    def token_ns(self, waits: Mapping[str, float]) -> float:
        """Return the time per token in a steady state, in which so many prompts come in each step. `waits`: those of
        the launch, and DEVICE, a factor on kernels; what is absent is the profile's."""
        point, scale = self.point, waits.get(DEVICE, 1.0)
        launch = replace(PROFILES[point.server].launch, **{name: ns for name, ns in waits.items() if name != DEVICE})
        wait = launch.target_gap_ns(point.concurrency / point.attention_data_parallel) + launch.collectives_gap_ns(
            self.collectives, self.devices
        )
        drafting = 0.0
        if point.steps:
            drafting = (
                launch.graph_gap_ns + point.steps * launch.step_ns(point.algorithm) + launch.tree_ns * (point.topk > 1)
            )
        floor = self.kernels * launch.eager_kernel_ns
        # Where clients keep step, half of the prompts come before a request's first token.
        prompts = point.concurrency * point.accept_length / point.mean(point.output) * (1 - point.clients_keep_step / 2)
        step = scale * self.decode_ns + wait + drafting
        if PROFILES[point.server].mixed:
            mixed = scale * self.mixed_ns + wait + drafting
            step += prompts * (mixed - step) + (1 - math.exp(-prompts)) * max(0.0, floor - mixed)
        else:
            passes = 1 - math.exp(-prompts)  # prompts that wait together are one pass
            step += max(prompts * scale * self.prompt_ns, passes * floor) + passes * wait
        return step / point.accept_length


def estimate(point: Point, kernels: str = "measured") -> PointEstimate:
    """Return the times of a point's kernels."""
    with profile_with(point.server, **FREE):
        run = assemble(scenario_from_dict(point.scenario(kernels), point.dataset))
    cost, passes = (
        run.cost,
        ForwardCost(run.target, run.deployment.gpu, default_efficiency(run.deployment.gpu), run.cost.parallel),
    )
    prompt_len, rows = round(point.mean(point.prompt)), point.concurrency
    context = prompt_len + round(point.mean(point.output)) // 2
    shape, prompt = RoundShape(point.steps, point.topk, point.num_draft_tokens), [(prompt_len, 0)]
    mixed = cost.step_ns(prompt, DecodeWork(rows - 1, shape, (rows - 1) * context) if rows > 1 else None)
    decode = cost.decode_ns(rows, shape, rows * context)
    return PointEstimate(
        point, decode, mixed, cost.step_ns(prompt), passes.kernels, passes.collectives, cost.parallel.devices
    )
