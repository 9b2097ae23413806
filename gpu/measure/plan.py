"""Resolve a benchmark's options into its cells before a weight is read:
every contradiction, and the memory that it needs."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.acceptance.presets import PRESET_NAMES, usual_preset
from ...core.acceptance.process import AcceptanceProcess, FixedMeanAcceptance, GaussianAcceptance
from ...core.algorithm.algorithm import SpecAlgorithm
from ...core.algorithm.registry import get_algorithm
from ...core.errors import ConfigError, Problem, nearest
from ...core.kv.request_table import ceil_to_page
from ...core.scheduler.config import EngineConfig
from ...core.scheduler.rules import OurRules
from ...core.scheduler.spec import UNSIZED_POOL, EngineSpec, resolve_spec
from ..models.divided import check_shards, sharded
from ..session.devices import ARGUMENTS, can_capture, check_kernels, keeps_quantized, resolve_device, resolve_dtype
from ..session.hub import local_checkpoint
from ..session.memory import NotEnoughMemory, bytes_per_token, checkpoint_bytes, free_bytes, kv_dtype_of, most_drafts_of
from ..session.plan import (
    SessionOptions,
    algorithm_name,
    backend_of,
    check_algorithm,
    check_choices,
    check_directories,
    check_steps,
    draft_config,
    refuse_without_effect,
    speculation_of,
    with_look_up,
)
from ..types.session_options import AUTO
from ..types.shards import Shard, rank_devices

if TYPE_CHECKING:
    import torch

    from ..models.config import ModelConfig
    from ..models.heads.config import HeadConfig

DEFAULT_STEPS = "1,3,5"
OTHERS = ("transformers", "ctranslate2")  # engines that a benchmark can be compared with
MEMORY_FRACTION = 0.9  # of what is free; the rest is for activations and graphs
CPU_CHUNK, GPU_CHUNK = 2048, 8192  # prompt tokens of one prefill step
CPU_MULTI_STEP_ROUNDS = 8
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What a user may choose: options of a session under their names, and those of a benchmark. Lists are texts such as
    "1,8,32".
    """

    model: Path | None = None
    draft: str | None = None  # beside random weights the name of a shape
    algorithm: str = AUTO
    steps: str | None = None  # a list
    topk: int = 1
    num_draft_tokens: int | dict[str, int] | None = None
    device: str = AUTO
    ops: str = AUTO
    threads: int | None = None
    dtype: str = AUTO
    quantized: str = AUTO
    overlap: bool | None = None
    page_size: int = 1
    kv_dtype: str = AUTO
    tensor_parallel: int = 1
    seed: int = 0
    graphs: bool | None = None
    random_weights: str | None = None  # a built-in name or a config.json, instead of `model`
    batch_sizes: str = "1,8,32"
    context_lengths: str = "128,1024"
    output_tokens: int = 128
    acceptance: str | None = None
    prompts: int = 4  # of each cell: at least so many, in whole batches
    repeat: int = 3
    against: str | None = None  # a list of other engines


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """One way to decode the requests of a cell: plain (0 steps) or with that many draft steps."""

    spec: EngineSpec
    kv_bytes: int

    @property
    def steps(self) -> int:
        return self.spec.max_steps

    @property
    def num_nodes(self) -> int:
        """Tokens that a round verifies per request, root included."""
        return self.spec.max_num_draft_tokens


@dataclass(frozen=True, slots=True)
class CellPlan:
    """Requests of one batch size and prompt length, and the arms that decode them in turn.
    The first arm is plain decoding."""

    batch_size: int
    context_len: int
    arms: tuple[ArmPlan, ...]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV of all arms, which are in memory together, so that they can take turns."""
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
    acceptance: AcceptanceProcess | None  # None: as the draft's tokens are accepted
    acceptance_name: str
    graphs: bool
    cells: tuple[CellPlan, ...]
    weight_bytes: int
    against: tuple[str, ...] = ()  # names of other engines, which load the model, too

    @property
    def kv_dtype(self) -> torch.dtype:
        return kv_dtype_of(self.options.kv_dtype, self.dtype)

    @property
    def part(self) -> Shard:
        """The part of the model whose sizes count: rank 0's."""
        return Shard(0, self.options.tensor_parallel)

    @property
    def spec(self) -> EngineSpec:
        """The engine with the most drafts; all engines have its mode."""
        return self.cells[0].arms[-1].spec

    def num_prompts(self, batch_size: int) -> int:
        """Return the prompts of a cell: whole batches."""
        return -(-self.options.prompts // batch_size) * batch_size

    @property
    def kv_bytes(self) -> int:
        return max(cell.kv_bytes for cell in self.cells)

    @property
    def memory(self) -> str:
        """A sentence about the memory that the run needs."""
        largest = max(self.cells, key=lambda cell: cell.kv_bytes)
        where = f"batch {largest.batch_size}, context {largest.context_len}, {len(largest.arms)} engines side by side"
        others = f", as much for them in {' and in '.join(self.against)}" if self.against else ""
        return f"needs {in_units(self.weight_bytes)} for weights{others}, {in_units(self.kv_bytes)} for KV ({where})"


def in_units(num_bytes: float) -> str:
    """Return `num_bytes` in GiB or MiB, as text."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes * 1024 / GIB:.2f} MiB"


def plan_bench(options: BenchOptions, weights_are_there: bool = False, on_meta: bool = False) -> BenchPlan:
    """Resolve `options`. Raises ConfigError with all problems of the arguments, NotEnoughMemory, and other
    ForedraftErrors.

    `weights_are_there`: of the free memory nothing is needed for them. `on_meta`: plan for a GPU that is not there.
    """
    counts = _counts(options)
    batch_sizes, context_lengths, steps = counts["batch_sizes"], counts["context_lengths"], counts["steps"]
    session = _session(options, max(batch_sizes))
    if options.model is not None and not on_meta:
        session = with_look_up(session)
    check_choices(session)
    target, algorithm, draft, steps = _models(options, session, steps)
    steps = _steps_of(algorithm, options, steps)
    num_ranks = options.tensor_parallel
    if num_ranks > 1:
        check_shards(target, num_ranks, str(session.model))
    if on_meta:
        device = "meta"
    else:
        device = resolve_device(options.device) if num_ranks == 1 else rank_devices(options.device, num_ranks)[0]
    refuse_without_effect(session, algorithm, device)
    graphs = _graphs(options, device)
    check_kernels(target, device, "<arguments>", options.ops)
    dtype = resolve_dtype(options.dtype, target, device, options.quantized)
    target = replace(target, keeps_quantized=keeps_quantized(session, target, device))
    acceptance, name = _acceptance(options, algorithm, target)
    if isinstance(acceptance, FixedMeanAcceptance) and acceptance.mean_accept_length > max(steps) + 1 > 1:
        message = f"{acceptance.mean_accept_length:g} is not reached: {max(steps)} steps give at most {max(steps) + 1} tokens a round"
        raise ConfigError.of(ARGUMENTS, "--acceptance", message)
    plan = BenchPlan(
        options=options,
        name=options.random_weights or Path(options.model or "").resolve().name,
        target=target,
        draft=draft,
        algorithm=algorithm,
        dtype=dtype,
        device=device,
        acceptance=acceptance,
        acceptance_name=name,
        graphs=graphs,
        cells=(),
        weight_bytes=0,
        against=_against(options, target),
    )
    plan = replace(plan, weight_bytes=_bytes_of_weights(plan, session))
    cells = [
        _cell(plan, session, batch_size, length, steps) for length in context_lengths for batch_size in batch_sizes
    ]
    plan = replace(plan, cells=tuple(cells))
    if not on_meta:
        _check_memory(plan, (len(plan.against) + (not weights_are_there)) * plan.weight_bytes)
    return plan


# -- arguments --------------------------------------------------------------------------------------------------------


def _counts(options: BenchOptions) -> dict[str, tuple[int, ...]]:
    """Parse the lists of numbers. Raises ConfigError with every argument that is wrong in itself."""
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
    for name in ("prompts", "repeat"):
        if getattr(options, name) < 1:
            problems.append(Problem(f"--{name}", f"must be at least 1, got {getattr(options, name)}"))
    if problems:
        raise ConfigError(ARGUMENTS, problems)
    return counts


def _session(options: BenchOptions, max_running: int) -> SessionOptions:
    """Return the options of the session whose models and engines a benchmark times; each cell has its own steps."""
    of_session = {field.name for field in fields(SessionOptions)} - {"model", "draft", "steps"}
    shared = {one.name: getattr(options, one.name) for one in fields(options) if one.name in of_session}
    model = Path(options.random_weights or "") if options.model is None else local_checkpoint(options.model)
    draft = None if options.draft is None else _draft_directory(options, options.draft)
    return SessionOptions(model, draft, **shared, max_running=max_running, prefix_cache=False)


def _models(
    options: BenchOptions, session: SessionOptions, steps: tuple[int, ...]
) -> tuple[ModelConfig, SpecAlgorithm, ModelConfig | HeadConfig | None, tuple[int, ...]]:
    """Return target, algorithm, draft, and the steps: by default no more than the draft has heads."""
    from ..models.config import ModelConfig
    from .shapes import draft_shape, shape_of

    if options.model is None:
        assert options.random_weights is not None, "a benchmark is of a checkpoint or of a shape"
        target = shape_of(options.random_weights)
        algorithm = get_algorithm("EAGLE3" if options.algorithm.lower() == AUTO else options.algorithm)
        draft = draft_shape(target, algorithm, max(steps), options.draft)
    else:
        check_directories(session)
        target = ModelConfig.from_directory(session.model)
        algorithm = get_algorithm(algorithm_name(session))
        draft = draft_config(session, algorithm, target)
        heads = most_drafts_of(draft, algorithm)
        if options.steps is None and heads is not None:
            steps = (*(count for count in steps if count < heads), heads)
    check_algorithm(session, algorithm, max(steps) if algorithm.is_speculative else 0, target, draft)
    return target, algorithm, draft, steps


def _draft_directory(options: BenchOptions, draft: str) -> Path:
    """Return where a checkpoint's draft is; beside random weights it is the name of a shape."""
    return Path(draft) if options.model is None else local_checkpoint(draft, "draft")


def _steps_of(algorithm: SpecAlgorithm, options: BenchOptions, steps: tuple[int, ...]) -> tuple[int, ...]:
    """Return the steps in ascending order, with 0 for the plain decoding that the others are compared with."""
    if algorithm.is_speculative:
        return tuple(sorted({0, *steps}))
    if options.steps is not None and max(steps) > 0:
        message = (
            f"{options.steps}; plain decoding drafts nothing: leave it out, or give --draft or another --algorithm"
        )
        raise ConfigError.of(ARGUMENTS, "--steps", message)
    return (0,)


def _graphs(options: BenchOptions, device: str) -> bool:
    is_able = can_capture(options.ops, device)
    if options.graphs and not is_able:
        why = "a CPU has no CUDA graphs" if device == "cpu" else f"the operations {options.ops} wait for the device"
        raise ConfigError.of(ARGUMENTS, "--graphs", f"{why}; leave it out")
    return is_able and options.graphs is not False


def _acceptance(
    options: BenchOptions, algorithm: SpecAlgorithm, target: ModelConfig
) -> tuple[AcceptanceProcess | None, str]:
    """Return the acceptance process and its name. Random drafts are never accepted, so they always have one."""
    text = options.acceptance
    if not algorithm.is_speculative:
        if text is not None:
            raise ConfigError.of(ARGUMENTS, "--acceptance", "nothing is drafted, so nothing can be accepted")
        return None, "none"
    if text is None:
        if options.model is not None:
            return None, "measured"
        text = algorithm.usual_acceptance
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        if text not in PRESET_NAMES:
            names = ", ".join(PRESET_NAMES)
            message = f"{text!r} is no number, list of numbers or one of {names}{nearest(text, PRESET_NAMES)}"
            raise ConfigError.of(ARGUMENTS, "--acceptance", message) from None
        from ..models.families import MODEL_TYPES

        family = MODEL_TYPES[target.architecture]
        preset = usual_preset(algorithm.draft_form or algorithm.name, family, algorithm.usual_acceptance, text).preset
        return preset.process(options.seed), preset.name
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
    """Return the acceptance process of the arm's trees or chains; None for plain decoding."""
    spec = arm.spec
    if plan.acceptance is None or spec.max_steps == 0:
        return None
    if spec.topk > 1 and isinstance(plan.acceptance, GaussianAcceptance):
        return plan.acceptance.for_tree(spec.largest_round)
    return plan.acceptance


def _against(options: BenchOptions, target: ModelConfig) -> tuple[str, ...]:
    """Return the names of the engines to compare with. Raises ConfigError for one that is not known, or for a model
    that they cannot get."""
    names = [] if options.against is None else [name.strip().lower() for name in options.against.split(",")]
    for name in names:
        if name not in OTHERS:
            message = f"{name!r} is none of {', '.join(OTHERS)}{nearest(name, OTHERS)}"
            raise ConfigError.of(ARGUMENTS, "--against", message)
    if names and options.tensor_parallel > 1:
        raise ConfigError.of(ARGUMENTS, "--against", "other engines run in one process; leave --tensor-parallel out")
    if names and options.model is None and target.keeps_quantized:
        message = "random numbers in the formats of quantized files are not saved for others; add --quantized unpack"
        raise ConfigError.of(ARGUMENTS, "--against", message)
    return tuple(dict.fromkeys(names))


# -- cells ------------------------------------------------------------------------------------------------------------


def _cell(plan: BenchPlan, session: SessionOptions, batch_size: int, length: int, steps: tuple[int, ...]) -> CellPlan:
    specs = [_spec(plan, session, batch_size, count) for count in steps]
    mode = specs[-1].config  # plain decoding runs in the mode of the algorithm that it is compared with
    specs = [spec.with_config(overlap=mode.overlap, mode_reason=mode.mode_reason) for spec in specs]
    return CellPlan(batch_size, length, tuple(_arm(plan, spec, length) for spec in specs))


def _spec(plan: BenchPlan, session: SessionOptions, batch_size: int, steps: int) -> EngineSpec:
    algorithm = plan.algorithm if steps else get_algorithm("NONE")
    config = EngineConfig(
        num_pages=UNSIZED_POOL,
        context_len=plan.target.max_position_embeddings,
        page_size=session.page_size,
        max_running=batch_size,
        chunk_size=CPU_CHUNK if plan.device == "cpu" else GPU_CHUNK,
        mixed=False,  # all prompts first, so that every decode round has the whole batch
        prefix_cache=False,
        rules=OurRules(watermark=0.0),
        track_tokens=True,
    )
    nodes = session.num_draft_tokens
    if isinstance(nodes, dict):  # an arm has its own steps alone
        session = replace(session, num_draft_tokens={key: n for key, n in nodes.items() if key == str(steps)} or None)
    choice = replace(speculation_of(session), policy="fixed", steps=steps, adaptive=None)
    if not steps:
        choice = replace(choice, topk=1, num_draft_tokens=None)
    spec = resolve_spec(config, algorithm, choice, backend_of(plan.device, (batch_size,) if plan.graphs else None))
    check_steps(spec, "--steps")
    return spec


def _arm(plan: BenchPlan, spec: EngineSpec, length: int) -> ArmPlan:
    page_size, positions = spec.config.page_size, spec.config.context_len
    # The rounds of a multi-step wait for each other; in overlap mode the next step's are enqueued before one is over.
    in_multi_steps = not spec.config.overlap and plan.options.tensor_parallel == 1
    spec = spec.with_config(multi_step_rounds=CPU_MULTI_STEP_ROUNDS if in_multi_steps else 1)
    context_len = length + plan.options.output_tokens
    if context_len > positions:
        message = f"{length} with {plan.options.output_tokens} output tokens needs {context_len} positions; the model has {positions}"
        raise ConfigError.of(ARGUMENTS, "--context-lengths", message)
    spec = spec.with_config(context_len=context_len)
    pages_of_row = ceil_to_page(spec.resolve_sizes().row_width, page_size) // page_size
    num_pages = spec.config.max_running * (pages_of_row + 1)
    draft = plan.draft if spec.max_steps else None
    slot_bytes = bytes_per_token(sharded(plan.target, plan.part), draft, spec.make_algorithm(), plan.kv_dtype)
    return ArmPlan(spec.with_config(num_pages=num_pages), (num_pages + 1) * page_size * slot_bytes)


# -- memory -----------------------------------------------------------------------------------------------------------


def _bytes_of_weights(plan: BenchPlan, session: SessionOptions) -> int:
    from .shapes import meta_models

    if plan.options.model is not None:
        kept = session.model if plan.target.keeps_quantized else None
        return checkpoint_bytes(session.draft, plan.draft, plan.target, plan.dtype, plan.part, kept)
    models = meta_models(plan.target, plan.draft, plan.dtype, shard=plan.part)
    return sum(model.weight_bytes for model in models if model is not None)


def _check_memory(plan: BenchPlan, weight_bytes: int) -> None:
    free = free_bytes(plan.device)
    if plan.device == "cpu":
        free //= plan.options.tensor_parallel  # its ranks share it
    budget = int(free * MEMORY_FRACTION)
    if weight_bytes + plan.kv_bytes > budget:
        raise NotEnoughMemory(
            f"not enough memory on {plan.device}: the run {plan.memory}; {MEMORY_FRACTION:.0%} of the free "
            f"{in_units(free)} are {in_units(budget)}. Smaller --batch-sizes, --context-lengths, fewer --steps or "
            "a smaller --dtype help"
        )
