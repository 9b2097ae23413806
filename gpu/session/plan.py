"""Resolve a session's options before a weight is read:
configurations, algorithm, engine, memory, and every contradiction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.algorithm.algorithm import AlgorithmShape, Drafter, SpecAlgorithm
from ...core.algorithm.registry import get_algorithm
from ...core.errors import ConfigError, Problem
from ...core.scheduler.config import EngineConfig, EngineSizes
from ...core.scheduler.spec import (
    UNSIZED_POOL,
    BackendOffer,
    EngineSpec,
    SpeculationChoice,
    default_graph_sizes,
    resolve_spec,
)
from ...core.tree.build import MAX_TREE_NODES
from ...core.tree.chains import AcceptRule
from ...observe.input_files import read_text
from ..models.divided import check_shards, sharded
from ..types.session_options import AUTO, DECLARED, FLASHINFER, KEEP, RING, TORCH, wrong_values
from ..types.session_options import SessionOptions as SessionOptions
from ..types.shards import WHOLE, Shard, rank_devices
from .devices import ARGUMENTS, can_capture, check_kernels, keeps_quantized, resolve_device, resolve_dtype
from .memory import (
    bytes_per_token,
    checkpoint_bytes,
    has_states,
    kept_bytes,
    kv_dtype_of,
    most_drafts_of,
    size_pool,
    working_bytes,
)
from .text import spelled_alike

if TYPE_CHECKING:
    import torch

    from ..batch.pools import Rings
    from ..models.config import ModelConfig
    from ..models.heads.config import HeadConfig

NO_SHARED_PREFIX = "the prefix cache is off: a model with recurrent layers keeps no state behind a cached prefix"
NO_PREFIX_IN_RINGS = "the prefix cache is off: a ring keeps a window of its own request and no prefix for others"
NO_GRAPHS = "rounds run without CUDA graphs: the operations {} wait for the device"


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session will be. `spec.cost_table` of the policies goodput and confidence is measured once the
    weights are loaded."""

    options: SessionOptions
    target: ModelConfig
    draft: ModelConfig | HeadConfig | None
    algorithm: SpecAlgorithm
    dtype: torch.dtype
    device: str
    spec: EngineSpec
    weight_bytes: int  # of one rank, as all that follows
    kv_bytes: int
    file_notes: tuple[str, ...] = ()  # sentences for the user about the files
    shard: Shard = WHOLE  # of the rank that carries the plan out

    @property
    def kv_dtype(self) -> torch.dtype:
        return kv_dtype_of(self.options.kv_dtype, self.dtype)

    @property
    def sizes(self) -> EngineSizes:
        return self.spec.resolve_sizes()

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the user: options without effect, what is unusual in the adaptive table, a mode that the
        algorithm forced."""
        config, unused = self.spec.config, without_effect(self.options, self.algorithm, self.device)
        forced = not config.overlap and not self.algorithm.supports_overlap and self.device != "cpu"
        forced = forced and not self.options.overlap  # reported as an option without effect
        return (
            *self.file_notes,
            *map(str, unused),
            *self.spec.notices,
            *([f"the mode is {config.mode}: {config.mode_reason}"] if forced else ()),
            *([NO_SHARED_PREFIX] if self.options.prefix_cache and has_states(self.target, self.draft) else ()),
            *([NO_PREFIX_IN_RINGS] if self.options.prefix_cache and self.options.window_kv == RING else ()),
            *self._notices_of_ops(),
        )

    def _notices_of_ops(self) -> tuple[str, ...]:
        """Say what other operations than the usual ones of a GPU leave out."""
        name = self.options.ops
        if self.device == "cpu" or name not in (TORCH, FLASHINFER):
            return ()
        if name == TORCH:
            return (NO_GRAPHS.format(name),)
        from ..models.heads.config import HeadConfig
        from ..ops.flashinfer_ops import find_flashinfer, lacking

        draft = self.draft.model if isinstance(self.draft, HeadConfig) else self.draft
        models = (self.target,) if draft is None else (self.target, draft)
        return NO_GRAPHS.format(name), *lacking(find_flashinfer(), models, self.dtype)

    def max_prompt_len(self) -> int:
        """Return the length of the longest prompt that leaves room for a token of output."""
        config, sizes = self.spec.config, self.sizes
        return min(config.context_len, sizes.pool_limit(config)) - 1


def plan_session(options: SessionOptions, longest_request: int | None = None) -> SessionPlan:
    """Resolve `options`; `longest_request` is the greatest prompt with its output that is known to come.

    Reads configurations and the headers of weight files only. Raises ConfigError, NotEnoughMemory and other
    ForedraftErrors.
    """
    from ..models.config import ModelConfig

    check_choices(options)
    check_directories(options)
    target = ModelConfig.from_directory(options.model)
    algorithm = get_algorithm(algorithm_name(options))
    num_ranks = options.tensor_parallel
    device = resolve_device(options.device)
    if num_ranks > 1:
        device = rank_devices(options.device, num_ranks)[0]
        check_shards(target, num_ranks, str(options.model))
    if options.steps and not algorithm.is_speculative:
        refuse_without_effect(options, algorithm, device)
    draft = draft_config(options, algorithm, target)
    check_kernels(target, device, str(options.model), options.ops)
    dtype = resolve_dtype(options.dtype, target, device, options.quantized)
    kv_dtype = kv_dtype_of(options.kv_dtype, dtype)
    spec = resolve_spec(
        EngineConfig(
            num_pages=UNSIZED_POOL,
            context_len=target.max_position_embeddings,
            page_size=options.page_size,
            max_running=options.max_running,
            chunk_size=options.chunk_size,
            prefix_cache=options.prefix_cache and options.window_kv != RING and not has_states(target, draft),
            # All ranks must end a step after the same round, and only the parent knows when a new plan is wanted.
            multi_step_rounds=options.multi_step_rounds or (8 if device == "cpu" and num_ranks == 1 else 1),
            track_tokens=True,
        ),
        algorithm,
        speculation_of(options),
        backend_of(device, _graph_sizes(options, device), most_drafts_of(draft, algorithm)),
        read_text,
    )
    check_steps(spec)
    check_algorithm(options, algorithm, spec.max_steps, target, draft)
    spec = replace(spec.with_config(context_len=_context_len(options, target, longest_request)), decodes_text=True)
    target = target.within(spec.config.context_len)
    part = Shard(0, num_ranks)
    kept = options.model if keeps_quantized(options, target, device) else None
    weight_bytes = checkpoint_bytes(options.draft, draft, target, dtype, part, kept)
    own = sharded(target, part)
    working = working_bytes(own, draft, spec, dtype, device) if device != "cpu" else 0
    if options.ops == FLASHINFER:
        from ..ops.flashinfer_ops import WORKSPACE_BYTES

        working += WORKSPACE_BYTES
    rings = _rings(options, own, spec)
    slot_bytes = bytes_per_token(own, draft, algorithm, kv_dtype, rings)
    num_pages, kv_bytes = size_pool(
        options.kv_tokens,
        options.memory_fraction / (num_ranks if device == "cpu" else 1),  # a CPU's ranks share its memory
        slot_bytes,
        device,
        spec,
        weight_bytes,
        working,
        kept_bytes(own, draft, spec, dtype, kv_dtype, rings),
    )
    spec = spec.with_config(num_pages=num_pages)
    spec.resolve_sizes()  # refuses a pool that is too small for any request
    notes = _file_notes(options, target, draft)
    return SessionPlan(options, target, draft, algorithm, dtype, device, spec, weight_bytes, kv_bytes, notes)


def _rings(options: SessionOptions, target: ModelConfig, spec: EngineSpec) -> Rings | None:
    """Return the rings of the target's windowed layers, None where their KV lies in pages. Raises ConfigError for a
    model without such layers."""
    from ..batch.pools import Rings

    if options.window_kv != RING:
        return None
    rings = Rings.of(target, spec.config, spec.resolve_sizes())
    if rings is None:
        message = f"{RING}: the model has no windowed layers beside others"
        raise ConfigError.of(str(options.model), "window_kv", message)
    return rings


def _file_notes(
    options: SessionOptions, target: ModelConfig, draft: ModelConfig | HeadConfig | None
) -> tuple[str, ...]:
    """Return what `file_notes` says of the target, and of a draft that is a model of its own."""
    from ..models.checkpoint import file_notes
    from ..models.config import ModelConfig

    notes = file_notes(options.model, target, drafts_itself=getattr(draft, "inside_target", False))
    if options.draft is not None and isinstance(draft, ModelConfig):
        notes += file_notes(options.draft, draft)
        alike = spelled_alike(options.model, options.draft, target.vocab_size, draft.vocab_size)
        if alike is not None:
            share = f"it drafts the {len(alike.own_ids)} tokens that both spell alike: {alike.difference}"
            notes += (f"the draft {options.draft} has another tokenizer than its target; {share}",)
    return notes


def speculation_of(options: SessionOptions) -> SpeculationChoice:
    """Return what a session's options choose of speculation."""
    return SpeculationChoice(
        options.policy,
        options.steps,
        options.topk,
        options.num_draft_tokens,
        options.adaptive,
        mode=None if options.overlap is None else "overlap" if options.overlap else "synchronous",
        round_times=options.round_times,
        confidence_temperatures=options.confidence_temperatures,
        source=ARGUMENTS,
    )


def backend_of(device: str, graph_sizes: Sequence[int] | None, num_heads: int | None = None) -> BackendOffer:
    """Return what the real executor has on `device`."""
    return BackendOffer("torch" if device == "cpu" else "triton", device == "cpu", graph_sizes, num_heads)


def check_steps(spec: EngineSpec, key: str = "steps") -> None:
    """Raise ConfigError for steps that no round can draft; `key` names those of a fixed policy."""
    source = ARGUMENTS if spec.policy == "fixed" else spec.adaptive.source
    expected = f"expected at most {MAX_TREE_NODES - 1} draft steps: a round has at most {MAX_TREE_NODES} nodes"
    problems = [
        Problem(key if spec.policy == "fixed" else f"{bound}.candidate_steps", f"{steps}; {expected}")
        for bound, slot in zip(spec.adaptive.bounds, spec.adaptive.slots, strict=True)
        for steps in slot.candidate_steps
        if steps >= MAX_TREE_NODES
    ]
    if problems:
        raise ConfigError(source, problems)


# -- names and shapes -------------------------------------------------------------------------------------------------


def check_choices(options: SessionOptions) -> None:
    problems = wrong_values(options)
    if options.quantized == KEEP and options.tensor_parallel > 1:
        problems.append(
            Problem("quantized", "ranks unpack their parts of quantized matrices: choose unpack, or one rank")
        )
    if options.tensor_parallel > 1 and (options.multi_step_rounds or 1) > 1:
        problems.append(
            Problem("multi_step_rounds", f"{options.multi_step_rounds} rounds; with tensor_parallel a step has one")
        )
    if options.topk > 1 and options.accept_rule in [rule for rule in AcceptRule if rule.draws_drafts]:
        message = f"{options.accept_rule} verifies chains, and with topk {options.topk} drafts are trees"
        problems.append(Problem("accept_rule", message))
    if not 0.0 < options.memory_fraction <= 1.0:
        problems.append(Problem("memory_fraction", f"must be in (0, 1], got {options.memory_fraction}"))
    if problems:
        raise ConfigError(ARGUMENTS, problems)


def without_effect(options: SessionOptions, algorithm: SpecAlgorithm, device: str) -> list[Problem]:
    """Return every option that this algorithm or device makes no use of, with the reason."""
    reasons = {
        "drafts_nothing": f"{algorithm.name} drafts nothing; give a draft, or an algorithm that needs none (NGRAM)",
        "ignores_confidences": "only the policy confidence makes use of it",
        "draws_nothing": f"{algorithm.name} draws no drafts; a draft model does, or one head, that drafts step by step",
        "no_overlap": f"algorithm {algorithm.name} does not support overlap mode",
        "not_the_cpu": f"{device} computes, not the CPU",
    }
    holds = {
        "drafts_nothing": not algorithm.is_speculative,
        "ignores_confidences": options.policy != "confidence" or not algorithm.is_speculative,
        "draws_nothing": algorithm.drafter not in (Drafter.MODEL, Drafter.HEAD) or algorithm.in_one_pass,
        "no_overlap": not algorithm.supports_overlap,
        "not_the_cpu": device != "cpu",
    }
    return [
        Problem(name, f"has no effect: {reasons[declared.unused]}")
        for name, declared in DECLARED.items()
        if declared.unused and getattr(options, name) and holds[declared.unused]
    ]


def refuse_without_effect(options: SessionOptions, algorithm: SpecAlgorithm, device: str) -> None:
    """Raise ConfigError with every option that this algorithm or device makes no use of."""
    problems = without_effect(options, algorithm, device)
    if problems:
        raise ConfigError(ARGUMENTS, problems)


def check_directories(options: SessionOptions) -> None:
    for directory in filter(None, (options.model, options.draft)):
        if not Path(directory).is_dir():
            raise ConfigError.of(str(directory), "", "no such directory; expected a Hugging Face checkpoint")


def algorithm_name(options: SessionOptions) -> str:
    if options.algorithm.lower() != AUTO:
        return options.algorithm
    return "NONE" if options.draft is None else recognise_draft(options.draft)


def with_look_up(options: SessionOptions) -> SessionOptions:
    """Return `options` with look-up drafts (NGRAM) if neither draft nor algorithm is named, on a CPU. Its proposals
    cost almost nothing and change no token. On a GPU rounds with drafts from the host wait for each other. `steps` 0
    stays plain decoding."""
    is_decided = options.draft is not None or options.algorithm.lower() != AUTO or options.steps == 0 or options.overlap
    device = resolve_device(AUTO) if options.device == AUTO else options.device
    if is_decided or device != "cpu":
        return options
    return replace(options, algorithm="NGRAM")


def recognise_draft(directory: Path) -> str:
    """Return the algorithm that the draft in `directory` is made for, by its architecture or the tensors that
    only a head has."""
    from ..models.config import read_json
    from ..models.heads.config import head_form
    from ..models.stored.tensor_files import list_tensors

    path = Path(directory) / "config.json"
    return head_form(read_json(path), list_tensors(directory), str(path)) or "STANDALONE"


def draft_config(
    options: SessionOptions, algorithm: SpecAlgorithm, target: ModelConfig
) -> ModelConfig | HeadConfig | None:
    from ..models.checkpoint import network_of
    from ..models.config import ModelConfig
    from ..models.heads.config import HeadConfig

    needs_draft = algorithm.drafter not in (Drafter.NONE, Drafter.LOOKUP)
    if needs_draft and options.draft is None:
        raise ConfigError.of(ARGUMENTS, "draft", f"{algorithm.name} needs the directory of a draft checkpoint")
    if not needs_draft:
        if options.draft is not None:
            message = f"{algorithm.name} takes no draft checkpoint; leave it out, or choose another algorithm"
            raise ConfigError.of(ARGUMENTS, "draft", message)
        return None
    assert options.draft is not None
    if algorithm.drafter is not Drafter.MODEL:
        network = network_of(algorithm)
        return replace(HeadConfig.from_directory(options.draft, algorithm.draft_form, target), network=network)
    draft = ModelConfig.from_directory(options.draft)
    if algorithm.in_one_pass and draft.mask_token is None:
        message = f"is missing: {algorithm.name} drafts behind masks, and the draft does not say which token is one"
        raise ConfigError.of(str(Path(options.draft) / "config.json"), "pard_token", message)
    alike = spelled_alike(options.model, options.draft, target.vocab_size, draft.vocab_size)
    if alike is not None and algorithm.in_one_pass:
        message = f"{algorithm.name} drafts for a target of its own tokenizer; {alike.difference}"
        raise ConfigError.of(str(options.draft), "vocab_size", message)
    return draft


def check_algorithm(
    options: SessionOptions,
    algorithm: SpecAlgorithm,
    max_steps: int,
    target: ModelConfig,
    draft: ModelConfig | HeadConfig | None,
) -> None:
    shape = AlgorithmShape(
        steps=max_steps,
        topk=options.topk,
        hidden_size=target.hidden_size,
        num_heads=most_drafts_of(draft, algorithm),
        target_vocab_size=target.vocab_size,
    )
    problems = algorithm.problems(shape)
    if problems:
        raise ConfigError(str(options.draft or ARGUMENTS), problems)


def _graph_sizes(options: SessionOptions, device: str) -> tuple[int, ...] | None:
    """Return the batch sizes to capture, or None for no graphs. Raises ConfigError for graphs of operations that cannot
    be captured."""
    if options.graphs and device != "cpu" and not can_capture(options.ops, device):
        raise ConfigError.of(ARGUMENTS, "graphs", f"the operations {options.ops} wait for the device; leave it out")
    wanted = can_capture(options.ops, device) and not options.debug if options.graphs is None else options.graphs
    return default_graph_sizes(options.max_running) if wanted else None


# -- lengths ----------------------------------------------------------------------------------------------------------


def _context_len(options: SessionOptions, target: ModelConfig, longest_request: int | None) -> int:
    most = target.max_position_embeddings
    if options.context_len is not None:
        if options.context_len > most:
            message = f"{options.context_len} is beyond the model's {most} positions"
            raise ConfigError.of(ARGUMENTS, "context_len", message)
        return options.context_len
    if longest_request is None:
        return most
    return min(most, max(2, longest_request))
