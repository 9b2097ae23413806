"""From a session's options to its engine, before a weight is read: configurations, algorithm, mode, memory, and all that contradicts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.adaptive import AdaptiveConfig, load_adaptive_config
from ...core.adaptive.config import fixed_config
from ...core.algorithm.algorithm import AlgorithmShape, Drafter, DraftKV, SpecAlgorithm
from ...core.algorithm.registry import get_algorithm
from ...core.errors import ConfigError, ForetokenError, Problem, nearest
from ...core.kv.sizing import ceil_to_page
from ...core.scheduler.config import EngineConfig, EngineSizes
from ...core.scheduler.overlap_mode import Routing, choose_mode
from ...core.tree.build import MAX_TREE_NODES, tree_capacity
from ...observe.engine_description import EngineDescription

if TYPE_CHECKING:
    import torch

    from ..models.config import ModelConfig
    from ..models.head_config import HeadConfig

ARGUMENTS = "<arguments>"
AUTO = "auto"
DEFAULT_STEPS = 3
DEFAULT_TREE_NODES = 16
DEFAULT_CACHE_SHARE = 0.25  # slots beyond what running requests need, for prefixes that come again
POLICIES = ("ema", "goodput")


class NotEnoughMemory(ForetokenError):
    """The device cannot hold the weights and the KV of one request; the message says what needs how much."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a user may choose. Lengths in tokens; None or "auto" leaves the choice to the session."""

    model: Path
    draft: Path | None = None
    algorithm: str = AUTO  # by the draft's configuration; without a draft NONE
    steps: int | None = None  # draft steps; with `adaptive` those to begin with
    topk: int = 1
    num_draft_tokens: int | None = None  # nodes of a verify tree
    adaptive: str | None = None  # a preset or a file; None: fixed steps
    policy: str | None = None  # what chooses among the adaptive candidates: "ema" (default) or "goodput"
    overlap: bool | None = None  # default: on a GPU
    page_size: int = 1
    context_len: int | None = None  # default: what the requests need, else what the model can
    max_running: int = 32
    chunk_size: int = 2048
    prefix_cache: bool = True
    kv_tokens: int | None = None  # size of the KV pool; default: what running requests need, as far as memory goes
    memory_fraction: float = 0.85  # of the device's free memory, weights included
    dtype: str = AUTO  # the checkpoint's; on a CPU at least float32
    device: str = AUTO
    threads: int | None = (
        None  # of torch on a CPU, in the whole process; default: 1 for small models, else torch's choice
    )
    seed: int = 0
    block_rounds: int | None = None  # rounds per plan; default: 8 on a CPU, 1 on a GPU, where overlap hides the host
    graphs: bool | None = None  # capture rounds as CUDA graphs; default: on a GPU, unless debugging
    debug: bool = False


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session will be. `description.cost_table` of the goodput policy is measured once the weights are there."""

    options: SessionOptions
    target: ModelConfig
    draft: ModelConfig | HeadConfig | None
    algorithm: SpecAlgorithm
    dtype: torch.dtype
    device: str
    description: EngineDescription
    weight_bytes: int
    kv_bytes: int

    @property
    def sizes(self) -> EngineSizes:
        return _sizes(self.description)

    def max_prompt_len(self) -> int:
        """The longest prompt that leaves room for a token of output."""
        config = self.description.config
        return min(self.sizes.total_limit - 1, config.num_pages * config.page_size - self.sizes.reserve - 1)


def plan_session(options: SessionOptions, longest_request: int | None = None) -> SessionPlan:
    """Resolve `options`; `longest_request` is the greatest prompt with its output that is known to come.

    Reads configurations and the headers of weight files only. Raises ConfigError, NotEnoughMemory and other ForetokenErrors.
    """
    from ..models.config import ModelConfig

    _check_choices(options)
    for directory in filter(None, (options.model, options.draft)):
        if not Path(directory).is_dir():
            raise ConfigError(str(directory), [Problem("", "no such directory; expected a Hugging Face checkpoint")])
    target = ModelConfig.from_directory(options.model)
    algorithm = get_algorithm(_algorithm_name(options))
    draft = _draft_config(options, algorithm, target)
    device = _device(options.device)
    dtype = _dtype(options.dtype, target, device)
    adaptive, initial_steps = _adaptive(options, algorithm)
    policy = "fixed" if options.adaptive is None and options.policy is None else options.policy or "ema"
    policy = policy if algorithm.is_speculative else "fixed"
    nodes = _tree_nodes(options, algorithm, adaptive)
    _check_algorithm(options, algorithm, adaptive, target, draft)
    routing = _mode(options, algorithm, device)
    description = EngineDescription(
        config=EngineConfig(
            num_pages=1 << 40,
            context_len=target.max_position_embeddings,
            page_size=options.page_size,
            overlap=routing.mode == "overlap",
            mode_reason=routing.reason,
            max_running=options.max_running,
            chunk_size=options.chunk_size,
            prefix_cache=options.prefix_cache,
            block_rounds=options.block_rounds or (8 if device == "cpu" else 1),
            track_tokens=True,
        ),
        algorithm=algorithm.name,
        policy=policy,
        adaptive=adaptive,
        initial_steps=initial_steps,
        topk=options.topk,
        num_draft_tokens=nodes,
        graph_sizes=_graph_sizes(options, algorithm, device),
        decodes_text=True,
    )
    context_len = _context_len(options, target, description, longest_request)
    description = replace(description, config=replace(description.config, context_len=context_len))
    weight_bytes = _weight_bytes(options, target, dtype)
    num_pages, kv_bytes = _pool(options, target, draft, algorithm, dtype, device, description, weight_bytes)
    description = replace(description, config=replace(description.config, num_pages=num_pages))
    plan = SessionPlan(options, target, draft, algorithm, dtype, device, description, weight_bytes, kv_bytes)
    _sizes(description)  # a pool too small for anything is refused now
    return plan


def _sizes(description: EngineDescription) -> EngineSizes:
    if description.policy == "goodput" and description.cost_table is None:
        description = replace(description, policy="ema")  # sizes depend on the candidates, not on who chooses
    return EngineSizes.resolve(description.config, description.make_algorithm(), description.make_controller())


# -- names and shapes -------------------------------------------------------------------------------------------------


def _check_choices(options: SessionOptions) -> None:
    problems = []
    if options.policy is not None and options.policy not in POLICIES:
        hint = nearest(options.policy, POLICIES)
        problems.append(Problem("policy", f"{options.policy!r} is none of {', '.join(POLICIES)}{hint}"))
    least = {"steps": 0, "topk": 1, "page_size": 1, "context_len": 2, "max_running": 1, "chunk_size": 1}
    for name, minimum in {**least, "kv_tokens": 1, "block_rounds": 1, "seed": 0}.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            problems.append(Problem(name, f"must be at least {minimum}, got {value}"))
    if not 0.0 < options.memory_fraction <= 1.0:
        problems.append(Problem("memory_fraction", f"must be in (0, 1], got {options.memory_fraction}"))
    if problems:
        raise ConfigError(ARGUMENTS, problems)


def _algorithm_name(options: SessionOptions) -> str:
    if options.algorithm.lower() != AUTO:
        return options.algorithm
    return "NONE" if options.draft is None else recognise_draft(options.draft)


def recognise_draft(directory: Path) -> str:
    """The algorithm that the draft in `directory` is made for: by its architecture, or by the tensors that only a head has."""
    from ..models.config import read_json
    from ..models.tensor_files import list_tensors

    config = read_json(Path(directory) / "config.json")
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    tensors = {tensor.removeprefix("model.") for tensor in list_tensors(directory)}
    if "Eagle3" in name or "d2t" in tensors or any(tensor.startswith("midlayer.") for tensor in tensors):
        return "EAGLE3"
    if config.get("num_nextn_predict_layers"):
        return "MULTI_LAYER_EAGLE"
    return "EAGLE" if "Eagle" in name or "fc.weight" in tensors else "STANDALONE"


def _draft_config(
    options: SessionOptions, algorithm: SpecAlgorithm, target: ModelConfig
) -> ModelConfig | HeadConfig | None:
    from ..models.config import ModelConfig
    from ..models.head_config import HeadConfig

    needs_draft = algorithm.drafter in (Drafter.MODEL, Drafter.HEAD, Drafter.HEADS)
    if needs_draft and options.draft is None:
        raise ConfigError(ARGUMENTS, [Problem("draft", f"{algorithm.name} needs the directory of a draft checkpoint")])
    if not needs_draft:
        if options.draft is not None:
            message = f"{algorithm.name} takes no draft checkpoint; leave it out, or choose another algorithm"
            raise ConfigError(ARGUMENTS, [Problem("draft", message)])
        return None
    if algorithm.drafter is not Drafter.MODEL:
        return HeadConfig.from_directory(options.draft, algorithm.draft_form, target)
    return ModelConfig.from_directory(options.draft)


def _check_algorithm(
    options: SessionOptions,
    algorithm: SpecAlgorithm,
    adaptive: AdaptiveConfig,
    target: ModelConfig,
    draft: ModelConfig | HeadConfig | None,
) -> None:
    shape = AlgorithmShape(
        steps=adaptive.candidate_steps[-1],
        topk=options.topk,
        hidden_size=target.hidden_size,
        num_heads=draft.num_heads if algorithm.drafter is Drafter.HEADS else None,
        target_vocab_size=target.vocab_size,
        draft_vocab_size=draft.vocab_size if algorithm.drafter is Drafter.MODEL else None,
    )
    problems = algorithm.problems(shape)
    if problems:
        raise ConfigError(str(options.draft or ARGUMENTS), problems)


def _adaptive(options: SessionOptions, algorithm: SpecAlgorithm) -> tuple[AdaptiveConfig, int | None]:
    """The candidates, and the steps to begin with."""
    if not algorithm.is_speculative:
        if options.steps:
            raise ConfigError(ARGUMENTS, [Problem("steps", f"{options.steps} steps, but {algorithm.name} drafts none")])
        return fixed_config(0), 0
    if options.adaptive is None and options.policy is None:
        steps = DEFAULT_STEPS if options.steps is None else options.steps
        return fixed_config(steps), steps
    return load_adaptive_config(options.adaptive or "default"), options.steps


def _tree_nodes(options: SessionOptions, algorithm: SpecAlgorithm, adaptive: AdaptiveConfig) -> int | None:
    """nd of a tree; None for chains, whose nd follows from the steps."""
    asked = options.num_draft_tokens
    steps = [count for count in adaptive.candidate_steps if count > 0]
    if not steps:
        return None
    if options.topk == 1 or not algorithm.supports_trees:
        if asked is not None and steps != [asked - 1]:
            message = f"{asked} does not suit a chain, which has one more than its steps; give topk for a tree"
            raise ConfigError(ARGUMENTS, [Problem("num_draft_tokens", message)])
        return None
    most = min(tree_capacity(options.topk, steps[0]) + 1, MAX_TREE_NODES)
    nodes = min(most, DEFAULT_TREE_NODES) if asked is None else asked
    if not 2 <= nodes <= most:
        message = f"{nodes} nodes; topk {options.topk} with {steps[0]} steps makes trees of 2 to {most}"
        raise ConfigError(ARGUMENTS, [Problem("num_draft_tokens", message)])
    return nodes


# -- the device -------------------------------------------------------------------------------------------------------


def _device(name: str) -> str:
    import torch

    if name == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ConfigError(
            ARGUMENTS, [Problem("device", f"{name!r} is neither cpu nor cuda{nearest(name, ('cpu', 'cuda'))}")]
        )
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError(ARGUMENTS, [Problem("device", f"{name} is not there; torch finds {found} CUDA devices")])
    return name


def _dtype(name: str, target: ModelConfig, device: str) -> torch.dtype:
    import torch

    from ..models.config import DTYPES

    if device != "cpu" and (name == "float64" or (name == AUTO and target.dtype is torch.float64)):
        message = "float64 is for a CPU: the GPU's kernels sum in float32; choose float32 or bfloat16"
        raise ConfigError(ARGUMENTS, [Problem("dtype", message)])
    if name == AUTO:
        # CPUs emulate the 16-bit formats, several times slower than they compute in 32 bits.
        return target.dtype if device != "cpu" or target.dtype.itemsize >= 4 else torch.float32
    if name not in DTYPES:
        message = f"{name!r} is none of {AUTO}, {', '.join(DTYPES)}{nearest(name, DTYPES)}"
        raise ConfigError(ARGUMENTS, [Problem("dtype", message)])
    return DTYPES[name]


def _graph_sizes(options: SessionOptions, algorithm: SpecAlgorithm, device: str) -> tuple[int, ...] | None:
    """Batch sizes to capture: powers of two up to the largest batch, which is one of them. None: no graphs."""
    wanted = device != "cpu" and not options.debug if options.graphs is None else options.graphs
    if not wanted or algorithm.drafter is Drafter.LOOKUP:
        return None
    powers = (1 << i for i in range(options.max_running.bit_length()))
    return tuple(sorted({*powers, options.max_running}))


def _mode(options: SessionOptions, algorithm: SpecAlgorithm, device: str) -> Routing:
    asked = None if options.overlap is None else "overlap" if options.overlap else "synchronous"
    if asked is None and device == "cpu":
        return Routing("synchronous", "a CPU computes where the host would plan ahead")
    return choose_mode(
        asked,
        page_size=options.page_size,
        topk=options.topk,
        backend="torch" if device == "cpu" else "triton",
        backend_supports_paged_trees=True,
        algorithm=algorithm.name,
        algorithm_supports_overlap=algorithm.supports_overlap,
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def _context_len(
    options: SessionOptions, target: ModelConfig, description: EngineDescription, longest_request: int | None
) -> int:
    most = target.max_position_embeddings
    if options.context_len is not None:
        if options.context_len > most:
            message = f"{options.context_len} is beyond the model's {most} positions"
            raise ConfigError(ARGUMENTS, [Problem("context_len", message)])
        return options.context_len
    if longest_request is None:
        return most
    room = most - _sizes(description).total_limit  # what a round may overshoot
    return min(most, max(2, longest_request) + room)


def _weight_bytes(options: SessionOptions, target: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the target's and the draft's weights as they are loaded."""
    from ..models.checkpoint import required_bytes
    from ..models.tensor_files import list_tensors

    draft = 0
    if options.draft is not None:
        for tensor in list_tensors(options.draft).values():
            count = 1
            for size in tensor.shape:
                count *= size
            draft += count * dtype.itemsize
    return sum(required_bytes(target, dtype).values()) + draft


def _slot_bytes(
    target: ModelConfig, draft: ModelConfig | HeadConfig | None, algorithm: SpecAlgorithm, dtype: torch.dtype
) -> int:
    from ..batch.pools import bytes_per_slot

    total = bytes_per_slot(target.num_layers, target.num_kv_heads, target.head_dim, dtype)
    if algorithm.draft_kv is DraftKV.NONE:
        return total
    shape = draft if algorithm.drafter is Drafter.MODEL else draft.model
    layers = shape.num_layers * (draft.num_heads if algorithm.drafter is Drafter.HEADS else 1)
    return total + bytes_per_slot(layers, shape.num_kv_heads, shape.head_dim, dtype)


def _pool(
    options: SessionOptions,
    target: ModelConfig,
    draft: ModelConfig | HeadConfig | None,
    algorithm: SpecAlgorithm,
    dtype: torch.dtype,
    device: str,
    description: EngineDescription,
    weight_bytes: int,
) -> tuple[int, int]:
    """Pages of the KV pool, and their bytes in all pools. NotEnoughMemory if the device cannot hold one request."""
    sizes, page_size = _sizes(description), options.page_size
    slot_bytes = _slot_bytes(target, draft, algorithm, dtype)
    one_request = ceil_to_page(sizes.row_width, page_size) + page_size
    wanted = options.kv_tokens
    least = wanted
    if wanted is None:
        cache = DEFAULT_CACHE_SHARE if options.prefix_cache else 0.01
        wanted = int(options.max_running * one_request * (1 + cache))
        least = one_request
    free = free_bytes(device)
    budget = int(free * options.memory_fraction) - weight_bytes
    if budget < (least + page_size) * slot_bytes:
        gib = 1 << 30
        raise NotEnoughMemory(
            f"not enough memory on {device}: the weights need {weight_bytes / gib:.2f} GiB, KV of {least} tokens "
            f"{least * slot_bytes / gib:.2f} GiB ({slot_bytes} bytes each); {options.memory_fraction:.0%} of the free "
            f"{free / gib:.2f} GiB are {free * options.memory_fraction / gib:.2f} GiB. A smaller context_len, kv_tokens or dtype helps"
        )
    pages = min(wanted, budget // slot_bytes - page_size) // page_size
    return pages, (pages + 1) * page_size * slot_bytes


def free_bytes(device: str) -> int:
    """Memory that can be had on `device` now."""
    import torch

    if device != "cpu":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # another system than Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
