"""From the options of a benchmark to its cells, before a weight is read: everything that contradicts, and the memory it takes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.acceptance.presets import PRESETS, acceptance_preset
from ...core.acceptance.process import AcceptanceProcess, FixedMeanAcceptance, GaussianAcceptance
from ...core.adaptive import fixed_controller
from ...core.adaptive.config import fixed_config
from ...core.algorithm.algorithm import Drafter, SpecAlgorithm
from ...core.algorithm.registry import get_algorithm
from ...core.errors import ConfigError, Problem, nearest
from ...core.kv.sizing import ceil_to_page
from ...core.scheduler.config import EngineConfig, EngineSizes
from ..session.plan import (
    ARGUMENTS,
    AUTO,
    NotEnoughMemory,
    SessionOptions,
    _algorithm_name,
    _check_algorithm,
    _check_choices,
    _device,
    _draft_config,
    _dtype,
    _mode,
    _slot_bytes,
    _tree_nodes,
    _weight_bytes,
    free_bytes,
)

if TYPE_CHECKING:
    import torch

    from ..models.config import ModelConfig
    from ..models.head_config import HeadConfig

DEFAULT_STEPS = "1,3,5"
MEMORY_FRACTION = 0.9  # of what is free; the rest is for activations and graphs
CPU_CHUNK, GPU_CHUNK = 2048, 8192  # prompt tokens of one prefill step
CPU_BLOCK_ROUNDS = 8
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What a user may choose; lists as they are typed ("1,8,32")."""

    model: Path | None = None
    random_weights: str | None = None  # a built-in name or a config.json, instead of `model`
    draft: str | None = None
    algorithm: str = AUTO
    steps: str | None = None
    topk: int = 1
    num_draft_tokens: int | None = None
    batch_sizes: str = "1,8,32"
    context_lengths: str = "128,1024"
    output_tokens: int = 128
    acceptance: str | None = None
    overlap: bool | None = None
    graphs: bool | None = None
    device: str = AUTO
    dtype: str = AUTO
    threads: int | None = None
    page_size: int = 1
    repeat: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """One way to decode the requests of a cell: plain (0 steps) or with that many draft steps."""

    steps: int
    algorithm: str
    topk: int
    num_draft_tokens: int | None  # of a tree; None: a chain
    config: EngineConfig
    graph_sizes: tuple[int, ...] | None
    kv_bytes: int

    @property
    def num_nodes(self) -> int:
        """Tokens that a round verifies per request, root included."""
        return self.steps + 1 if self.num_draft_tokens is None else self.num_draft_tokens


@dataclass(frozen=True, slots=True)
class CellPlan:
    """Requests of one batch size and prompt length, and the arms that decode them in turn. The first arm is plain decoding."""

    batch_size: int
    context_len: int
    arms: tuple[ArmPlan, ...]

    @property
    def kv_bytes(self) -> int:
        """All arms stand side by side, so that they can take turns."""
        return sum(arm.kv_bytes for arm in self.arms)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    options: BenchOptions
    name: str  # of the model
    target: ModelConfig
    draft: ModelConfig | HeadConfig | None
    algorithm: SpecAlgorithm
    dtype: torch.dtype
    device: str
    mode: str  # "synchronous" or "overlap"
    mode_reason: str
    acceptance: AcceptanceProcess | None  # None: as the draft's tokens are accepted
    acceptance_name: str
    graphs: bool
    output_tokens: int
    repeat: int
    cells: tuple[CellPlan, ...]
    weight_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Of the cell that needs most."""
        return max(cell.kv_bytes for cell in self.cells)

    @property
    def memory(self) -> str:
        """What the run needs, in words."""
        largest = max(self.cells, key=lambda cell: cell.kv_bytes)
        where = f"batch {largest.batch_size}, context {largest.context_len}, {len(largest.arms)} engines side by side"
        return f"needs {in_units(self.weight_bytes)} for weights, {in_units(self.kv_bytes)} for KV ({where})"


def in_units(num_bytes: float) -> str:
    """Bytes in words."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes * 1024 / GIB:.2f} MiB"


def plan_bench(options: BenchOptions) -> BenchPlan:
    """Resolve `options`. Raises ConfigError with all that is wrong with the arguments, NotEnoughMemory, other ForetokenErrors."""
    counts = _counts(options)
    batch_sizes, context_lengths, steps = counts["batch_sizes"], counts["context_lengths"], counts["steps"]
    session = SessionOptions(
        model=options.model or Path(options.random_weights or ""),
        draft=None if options.draft is None else Path(options.draft),
        algorithm=options.algorithm,
        topk=options.topk,
        num_draft_tokens=options.num_draft_tokens,
        overlap=options.overlap,
        page_size=options.page_size,
        max_running=max(batch_sizes),
        prefix_cache=False,
        dtype=options.dtype,
        device=options.device,
        seed=options.seed,
    )
    _check_choices(session)
    target, algorithm, draft = _models(options, session, steps)
    steps = _steps_of(algorithm, options, steps)
    device = _device(options.device)
    graphs = _graphs(options, algorithm, device)
    dtype = _dtype(options.dtype, target, device)
    routing = _mode(session, algorithm, device)
    acceptance, name = _acceptance(options, algorithm)
    plan = BenchPlan(
        options=options,
        name=options.random_weights or Path(session.model).resolve().name,
        target=target,
        draft=draft,
        algorithm=algorithm,
        dtype=dtype,
        device=device,
        mode=routing.mode,
        mode_reason=routing.reason,
        acceptance=acceptance,
        acceptance_name=name,
        graphs=graphs,
        output_tokens=options.output_tokens,
        repeat=options.repeat,
        cells=(),
        weight_bytes=_bytes_of_weights(options, session, target, draft, dtype, device),
    )
    cells = [
        CellPlan(batch_size, length, tuple(_arm(plan, session, batch_size, length, count) for count in steps))
        for length in context_lengths
        for batch_size in batch_sizes
    ]
    plan = replace(plan, cells=tuple(cells))
    _check_memory(plan)
    return plan


# -- arguments --------------------------------------------------------------------------------------------------------


def _counts(options: BenchOptions) -> dict[str, tuple[int, ...]]:
    """The lists of numbers; raises ConfigError with every problem of the arguments taken by themselves."""
    problems: list[Problem] = []
    if (options.model is None) == (options.random_weights is None):
        problems.append(Problem("--model", "give either a checkpoint or --random-weights"))
    lists = {"batch_sizes": 1, "context_lengths": 1, "steps": 0}
    counts = {}
    for name, least in lists.items():
        text = getattr(options, name)
        text = DEFAULT_STEPS if text is None else text
        numbers = [int(part) for part in text.split(",") if re.fullmatch(r"\s*[0-9]{1,9}\s*", part)]
        if len(numbers) != text.count(",") + 1 or min(numbers) < least:
            message = f"{text!r}; expected whole numbers from {least} on, as in 1,8,32"
            problems.append(Problem(f"--{name.replace('_', '-')}", message))
            numbers = [1]
        counts[name] = tuple(sorted(set(numbers)))
    if options.output_tokens < 2:
        message = f"{options.output_tokens}; the first comes from the prefill, so at least 2 make a round"
        problems.append(Problem("--output-tokens", message))
    if options.repeat < 1:
        problems.append(Problem("--repeat", f"must be at least 1, got {options.repeat}"))
    if problems:
        raise ConfigError(ARGUMENTS, problems)
    return counts


def _models(
    options: BenchOptions, session: SessionOptions, steps: tuple[int, ...]
) -> tuple[ModelConfig, SpecAlgorithm, ModelConfig | HeadConfig | None]:
    from ..models.config import ModelConfig
    from .shapes import draft_shape, shape_of

    if options.model is None:
        target = shape_of(options.random_weights)
        algorithm = get_algorithm("EAGLE3" if options.algorithm.lower() == AUTO else options.algorithm)
        draft = draft_shape(target, algorithm, max(steps), options.draft)
    else:
        for directory in filter(None, (session.model, session.draft)):
            if not directory.is_dir():
                message = "no such directory; expected a Hugging Face checkpoint"
                raise ConfigError(str(directory), [Problem("", message)])
        target = ModelConfig.from_directory(session.model)
        algorithm = get_algorithm(_algorithm_name(session))
        draft = _draft_config(session, algorithm, target)
    _check_algorithm(session, algorithm, fixed_config(max(steps)), target, draft)
    return target, algorithm, draft


def _steps_of(algorithm: SpecAlgorithm, options: BenchOptions, steps: tuple[int, ...]) -> tuple[int, ...]:
    """Ascending, with 0 for the plain decoding that everything is compared with."""
    if algorithm.is_speculative:
        return tuple(sorted({0, *steps}))
    if options.steps is not None and max(steps) > 0:
        message = f"{options.steps}; without a draft there is plain decoding alone: leave it out, or give --draft or --algorithm"
        raise ConfigError(ARGUMENTS, [Problem("--steps", message)])
    return (0,)


def _graphs(options: BenchOptions, algorithm: SpecAlgorithm, device: str) -> bool:
    if device == "cpu":
        if options.graphs:
            raise ConfigError(ARGUMENTS, [Problem("--graphs", "a CPU has no CUDA graphs; leave it out")])
        return False
    return options.graphs is not False


def _acceptance(options: BenchOptions, algorithm: SpecAlgorithm) -> tuple[AcceptanceProcess | None, str]:
    """The process and its name. Random drafts are never right, so with them there is always one."""
    text = options.acceptance
    if not algorithm.is_speculative:
        if text is not None:
            raise ConfigError(ARGUMENTS, [Problem("--acceptance", "nothing is drafted, so nothing can be accepted")])
        return None, "none"
    if text is None:
        if options.model is not None:
            return None, "measured"
        text = algorithm.usual_acceptance
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        if text not in PRESETS:
            message = f"{text!r} is no number, list of numbers or one of {', '.join(PRESETS)}{nearest(text, PRESETS)}"
            raise ConfigError(ARGUMENTS, [Problem("--acceptance", message)]) from None
        return acceptance_preset(text, options.seed), text
    try:
        if len(numbers) > 1:
            return GaussianAcceptance(tuple(numbers), options.seed), f"{text} by position"
        return FixedMeanAcceptance(numbers[0], options.seed), f"mean length {numbers[0]:g}"
    except ConfigError as error:
        hint = "; for one probability at every position write 0.7,0.7" if len(numbers) == 1 else ""
        raise ConfigError(
            ARGUMENTS, [Problem("--acceptance", f"{problem.message}{hint}") for problem in error.problems]
        ) from None


def acceptance_of_arm(plan: BenchPlan, arm: ArmPlan) -> AcceptanceProcess | None:
    """The process of the arm's trees or chains; plain decoding has none."""
    if plan.acceptance is None or arm.steps == 0:
        return None
    if arm.num_draft_tokens is not None and isinstance(plan.acceptance, GaussianAcceptance):
        return plan.acceptance.for_tree(arm.topk, arm.steps, arm.num_draft_tokens)
    return plan.acceptance


# -- cells ------------------------------------------------------------------------------------------------------------


def _arm(plan: BenchPlan, session: SessionOptions, batch_size: int, length: int, steps: int) -> ArmPlan:
    algorithm = plan.algorithm if steps else get_algorithm("NONE")
    topk = session.topk if steps else 1
    nodes = None
    if steps:
        nodes = _tree_nodes(replace(session, topk=topk), algorithm, fixed_config(steps))
    config = EngineConfig(
        num_pages=1 << 40,
        context_len=plan.target.max_position_embeddings,
        page_size=session.page_size,
        overlap=plan.mode == "overlap",
        mode_reason=plan.mode_reason,
        max_running=batch_size,
        chunk_size=CPU_CHUNK if plan.device == "cpu" else GPU_CHUNK,
        mixed=False,  # all prompts first, so that every decode round has the whole batch
        prefix_cache=False,
        watermark=0.0,
        # A block's rounds wait for each other; in overlap mode the next step's are enqueued before one is over.
        block_rounds=1 if plan.mode == "overlap" else CPU_BLOCK_ROUNDS,
        track_tokens=True,
    )
    controller = fixed_controller(
        steps, topk=topk, num_draft_tokens=nodes, depth_limited=algorithm.drafter is not Drafter.LOOKUP
    )
    sizes = EngineSizes.resolve(config, algorithm, controller)
    context_len = length + plan.output_tokens + config.context_len - sizes.total_limit
    if context_len > plan.target.max_position_embeddings:
        message = (
            f"{length} with {plan.output_tokens} output tokens and {steps} steps needs {context_len} positions; "
            f"the model has {plan.target.max_position_embeddings}"
        )
        raise ConfigError(ARGUMENTS, [Problem("--context-lengths", message)])
    config = replace(config, context_len=context_len)
    row_width = EngineSizes.resolve(config, algorithm, controller).row_width
    num_pages = batch_size * (ceil_to_page(row_width, config.page_size) // config.page_size + 1)
    slot_bytes = _slot_bytes(plan.target, plan.draft if steps else None, algorithm, plan.dtype)
    kv_bytes = (num_pages + 1) * config.page_size * slot_bytes
    graph_sizes = (batch_size,) if plan.graphs else None
    return ArmPlan(steps, algorithm.name, topk, nodes, replace(config, num_pages=num_pages), graph_sizes, kv_bytes)


# -- memory -----------------------------------------------------------------------------------------------------------


def _bytes_of_weights(
    options: BenchOptions,
    session: SessionOptions,
    target: ModelConfig,
    draft: ModelConfig | HeadConfig | None,
    dtype: torch.dtype,
    device: str,
) -> int:
    from ..executor.build import MAX_PACKED_BYTES
    from .shapes import meta_models

    if options.model is not None:
        total = _weight_bytes(session, target, dtype)
    else:
        total = sum(model.weight_bytes for model in meta_models(target, draft, dtype) if model is not None)
    # On a CPU small models keep a second layout for the products of a few rows.
    return 2 * total if device == "cpu" and total <= MAX_PACKED_BYTES else total


def _check_memory(plan: BenchPlan) -> None:
    free = free_bytes(plan.device)
    budget = int(free * MEMORY_FRACTION)
    if plan.weight_bytes + plan.kv_bytes > budget:
        raise NotEnoughMemory(
            f"not enough memory on {plan.device}: the run {plan.memory}; {MEMORY_FRACTION:.0%} of the free "
            f"{in_units(free)} are {in_units(budget)}. Smaller --batch-sizes, --context-lengths, fewer --steps or "
            "a smaller --dtype help"
        )
