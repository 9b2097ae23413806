"""Time real decoding: the arms of a cell, plain decoding among them, run in turns; results are medians.

for each cell    engines of all arms ─► warm up ─► turns of all (`take_turns`) ─► medians, speed-ups of the same turn
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ..executor.executor import TorchExecutor
from ..executor.graphs import CaptureReport
from ..executor.parts import DraftModel
from ..models.checkpoint import load_draft, load_target, network_of
from ..models.decoder import Decoder
from ..session.devices import ops_for, set_threads
from ..session.session import lay_out_models, twins_of
from ..session.text import Tokenizer
from ..types.ops import Ops
from ..types.session_options import INT8
from ..types.shards import WHOLE, Shard
from .arm import Arm, BatchArm, Timing, common_outputs
from .floor import copy_bandwidth
from .others import OtherEngines, OtherResult
from .plan import ArmPlan, BenchPlan, CellPlan, acceptance_of_arm
from .prompts import bench_prompts
from .ranks import open_bench_ranks
from .shapes import meta_models, random_draft, random_target
from .turns import Timed, take_turns

WARM_UP_TOKENS = 16
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Machine:
    """The device, and how fast its memory is; measured in the same process."""

    device_name: str
    num_threads: int  # of torch, on a CPU
    copy_bytes_per_s: float
    target_bytes: int
    draft_bytes: int


@dataclass(frozen=True, slots=True)
class ArmResult:
    """Medians over the repeats of one arm of a cell. Shares are of the decode time."""

    batch_size: int
    context_len: int
    steps: int
    num_nodes: int  # per request and round, root included
    tokens_per_s: float
    tokens_per_s_request: float
    accept_length: float
    speedup: float  # over plain decoding, median of the turns' own ratios
    speedups: tuple[float, ...]  # of each turn
    round_ms: float
    rounds: int
    prefill_tokens_per_s: float
    shares: dict[str, float]  # draft, verify, graph, host, other
    floor_share: float  # least time in which memory delivers what the rounds read, as a share of their time
    idle_share: float | None  # of the device between phases; None on a CPU
    equal_outputs: int | None  # requests with the tokens of plain decoding; None if acceptance is simulated
    kv_bytes: int
    captures: tuple[CaptureReport, ...]
    tokens_per_cpu_s: float = 0.0  # by the processor time of the process, where nothing runs on a GPU
    others: tuple[OtherResult, ...] = ()  # of plain decoding: engines that decoded the same requests in the same turns


class Bench:
    """The models of a plan, loaded; `cells` runs it."""

    def __init__(
        self,
        plan: BenchPlan,
        on_progress: OnProgress = lambda text: None,
        models: tuple[Decoder, DraftModel | None] | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Load the models, unless those of another benchmark of the same models are given.

        With tensor parallelism, start the ranks that load them, unless this is a rank with the part `shard`.
        """
        self.plan = plan
        self._on_progress = on_progress
        self._ops: Ops = ops_for(plan.device, plan.options.ops)
        set_threads(plan.device, plan.options.threads, plan.target, plan.weight_bytes)
        self._tokenizer: Tokenizer | None = None
        options = plan.options
        if options.model is not None and (Path(options.model) / "tokenizer.json").is_file():
            self._tokenizer = Tokenizer.load(options.model)
        on_progress("measuring the memory's copy bandwidth")
        bandwidth = copy_bandwidth(plan.device) if shard is None else 0.0  # ranks would disturb each other
        if models is None:
            on_progress("loading the weights" if options.model is not None else "making random weights")
        self._ranks = None if options.tensor_parallel == 1 or shard is not None else open_bench_ranks(options)
        self._shard = shard or WHOLE
        if self._ranks is not None:
            models = meta_models(plan.target, plan.draft, plan.dtype, shard=plan.part)
        self._others: OtherEngines | None = None
        self.models = self._target, self._draft = models or self._load()
        self.machine = Machine(
            device_name=device_name(plan.device),
            num_threads=torch.get_num_threads(),
            copy_bytes_per_s=bandwidth,
            target_bytes=self._target.weight_bytes,
            draft_bytes=0 if self._draft is None else self._draft.weight_bytes,
        )

    def close(self) -> None:
        """End the ranks, and delete what other engines read, if there are any."""
        if self._others is not None:
            self._others.close()
        if self._ranks is not None:
            self._ranks.close()

    def make_executor(self, cell: int, arm: int) -> TorchExecutor:
        """Make the executor of an arm for a rank, whose engine plans nothing."""
        made = self.arm(self.plan.cells[cell].arms[arm])
        return made.executor(made.spec.make_engine())

    def arm(self, plan: ArmPlan) -> Arm:
        """Return the arm of a plan, with the models."""
        draft, acceptance = self._draft if plan.steps else None, acceptance_of_arm(self.plan, plan)
        return Arm(_in_words(plan), plan.spec, self._target, draft, self._ops, acceptance, self.plan.options.seed)

    def cells(self) -> Iterator[tuple[ArmResult, ...]]:
        """Yield the results of one cell after another, plain decoding first in each."""
        for number, cell in enumerate(self.plan.cells):
            yield self._cell(cell, self._named(cell, number))

    def warm(self) -> int:
        """Run all cells, which compiles their kernels, and time none. Returns how many CUDA graphs were captured."""
        num_graphs = 0
        for number, cell in enumerate(self.plan.cells):
            num_graphs += sum(len(arm.captures) for arm in self._warm_arms(cell, self._named(cell, number)))
            self._free_memory()
        return num_graphs

    def _load(self) -> tuple[Decoder, DraftModel | None]:
        models = self._load_models()
        if self.plan.against:
            self._on_progress(f"loading the model in {' and '.join(self.plan.against)}")
            self._others = OtherEngines(self.plan, models[0])
        lay_out_models(self.plan.options, *models)
        return models

    def _load_models(self) -> tuple[Decoder, DraftModel | None]:
        plan, options = self.plan, self.plan.options
        if options.model is None:
            target = random_target(
                plan.target, self._ops, plan.device, plan.dtype, options.seed, self._shard, plan.kv_dtype
            )
            return target, None if plan.draft is None else random_draft(plan.draft, target, options.seed + 1)
        target = load_target(
            options.model,
            self._ops,
            plan.device,
            plan.dtype,
            shard=self._shard,
            keep_quantized=plan.target.keeps_quantized,
            kv_dtype=plan.kv_dtype,
            in_int8=options.quantized == INT8,
        )
        if options.draft is None:
            return target, None
        draft = load_draft(options.draft, plan.algorithm.draft_form, target, network_of(plan.algorithm))
        if isinstance(draft, Decoder):
            draft.twins = twins_of(Path(options.model), Path(options.draft), target.vocab_size, draft)
        return target, draft

    def arms(self, cell: CellPlan, on_arm: Callable[[ArmPlan], None] = lambda arm: None) -> list[BatchArm]:
        """Return the engines of a cell; `on_arm` gets each before it is made."""
        prompts = self._prompts(cell)
        found = []
        for number, arm_plan in enumerate(cell.arms):
            on_arm(arm_plan)
            ranks = None if self._ranks is None else self._ranks.make_arm(self.plan.cells.index(cell), number)
            found.append(BatchArm(self.arm(arm_plan), prompts, self.plan.options.output_tokens, ranks))
        return found

    def _prompts(self, cell: CellPlan) -> list[np.ndarray]:
        plan = self.plan
        number = plan.num_prompts(cell.batch_size)
        return bench_prompts(self._tokenizer, plan.target.vocab_size, number, cell.context_len, plan.options.seed)

    def _named(self, cell: CellPlan, number: int) -> str:
        return f"cell {number + 1} of {len(self.plan.cells)} (batch {cell.batch_size}, context {cell.context_len})"

    def _warm_arms(self, cell: CellPlan, what: str) -> list[BatchArm]:
        """Return the engines of a cell, which have run some rounds."""
        arms = self.arms(cell, lambda arm: self._on_progress(f"{what}: warming up {_in_words(arm)}"))
        for arm in arms:
            arm.run(max_tokens=min(WARM_UP_TOKENS, self.plan.options.output_tokens))
        return arms

    def _free_memory(self) -> None:
        gc.collect()  # executors and their engines' controllers refer to each other, and the pools are large
        if self._target.device.type == "cuda":
            torch.cuda.empty_cache()

    def _cell(self, cell: CellPlan, what: str) -> tuple[ArmResult, ...]:
        arms, repeat = self._warm_arms(cell, what), self.plan.options.repeat
        others = [] if self._others is None else self._others.timed(self._prompts(cell), cell.batch_size)

        def show(done: int, total: int, name: str) -> None:
            if done % (in_turn := total // repeat) == 0:
                self._on_progress(f"{what}: turn {done // in_turn + 1} of {repeat}")

        def timed(arm: BatchArm) -> Timed[Timing]:
            return Timed(arm.arm.name, repeat, lambda sample: arm.run())

        samples: list[list[Any]] = take_turns([*map(timed, arms), *others], on_sample=show)
        timings, of_others = samples[: len(arms)], samples[len(arms) :]
        of_arms = zip(cell.arms, arms, timings, strict=True)
        results = tuple(self._result(cell, plan, arm, mine, timings[0]) for plan, arm, mine in of_arms)
        if self._others is not None:
            results = replace(results[0], others=self._others.results(of_others, timings[0])), *results[1:]
        del arms, of_arms
        self._free_memory()
        return results

    def _result(
        self, cell: CellPlan, plan: ArmPlan, arm: BatchArm, timings: list[Timing], plain: list[Timing]
    ) -> ArmResult:
        """Return the medians of an arm's timings; the speed-up of each turn is over plain decoding in the same turn."""
        speedups = tuple(mine.tokens_per_s / other.tokens_per_s for mine, other in zip(timings, plain, strict=True))
        rate = median(timing.tokens_per_s for timing in timings)
        shares = _shares(timings)
        busy = sum(share for name, share in shares.items() if name not in ("host", "other"))
        on_gpu = self._target.device.type == "cuda"
        bandwidth = self.machine.copy_bytes_per_s
        equal = common_outputs(timings[0], plain[0]) if self.plan.acceptance is None else None
        return ArmResult(
            batch_size=cell.batch_size,
            context_len=cell.context_len,
            steps=plan.steps,
            num_nodes=plan.num_nodes,
            tokens_per_s=rate,
            tokens_per_s_request=rate / cell.batch_size,
            tokens_per_cpu_s=median(timing.tokens / timing.cpu_s for timing in timings),
            accept_length=timings[0].accept_length,
            speedup=median(speedups),
            speedups=speedups,
            round_ms=median(1e3 * timing.decode_s / timing.rounds for timing in timings),
            rounds=timings[0].rounds,
            prefill_tokens_per_s=median(timing.prefill_tokens / timing.prefill_s for timing in timings),
            shares=shares,
            floor_share=median(timing.bytes_read / bandwidth / timing.decode_s for timing in timings),
            idle_share=max(0.0, 1.0 - busy) if on_gpu else None,
            equal_outputs=equal,
            kv_bytes=plan.kv_bytes,
            captures=arm.captures,
        )


def _shares(timings: list[Timing]) -> dict[str, float]:
    """Return the shares of all turns' time: the executor's phases, the host's, and the rest.
    A GPU works while the host does."""
    names = dict.fromkeys(name for timing in timings for name in timing.phase_s)
    total_s = sum(timing.shared_s for timing in timings)
    shares = {name: sum(timing.phase_s.get(name, 0.0) for timing in timings) / total_s for name in names}
    shares["host"] = sum(timing.host_s for timing in timings) / total_s
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def _in_words(arm: ArmPlan) -> str:
    if not arm.steps:
        return "plain decoding"
    shape = f"trees of {arm.num_nodes} nodes" if arm.spec.topk > 1 else "a chain"
    return f"{arm.spec.algorithm} with {arm.steps} steps, {shape}"


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # another system than Linux
    return "CPU"
