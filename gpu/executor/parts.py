"""What an executor is made of: its options, its models with the pools of their KV, and the parts that its prompts and
rounds share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.acceptance.process import AcceptanceProcess
from ...core.algorithm.algorithm import AlgorithmShape, SpecAlgorithm
from ...core.algorithm.hybrid import HYBRID_COSTS, HybridCosts
from ...core.contract.future_map import FutureMap
from ...core.scheduler.engine import Engine
from ...core.tree.chains import AcceptRule
from ..batch.pools import KVPool
from ..draft.port import Draft, RoundLimits
from ..models.decoder import Decoder
from ..models.eagle import DraftHead
from ..types.ops import Ops
from .outputs import USER_OUTPUTS, NodeProducer
from .relay import TorchStorage
from .rows import ForcedRuns, Rows
from .shaping import MakeMatcher, Shaping

DraftModel = Decoder | DraftHead


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """How an executor runs the steps of its engine."""

    graph_sizes: Sequence[int] | None = None
    """Batch sizes, to which captured rounds are padded and by which kernels choose their blocks. None: no round is
    captured, and the blocks are those of the usual sizes."""
    graph_sampling: bool = True  # capture batches that sample, too
    graph_outputs: bool = True  # capture batches with requests that ask for per-token outputs, too
    acceptance: AcceptanceProcess | None = None  # simulated acceptance: how many drafts are accepted
    accept_rule: AcceptRule = AcceptRule.TARGET  # where requests sample; look-up and several heads draw no drafts
    seed: int = 0
    debug: bool = False
    eager: bool | None = None  # begin steps when they are launched; None: what suits the device
    producers: Mapping[str, NodeProducer] = field(default_factory=dict)
    """Make further outputs, by the names under which requests ask for them."""
    make_matcher: MakeMatcher | None = None  # follows grammars; without it requests that ask for one fail
    hybrid_costs: HybridCosts = HYBRID_COSTS  # by which HYBRID chooses; all ranks need the same
    in_rings: bool = False  # the KV of the target's windowed layers lies in `Rings`, where not all are windowed

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs that requests may ask for."""
        return (*USER_OUTPUTS, *self.producers)


DEFAULT_OPTIONS = ExecutorOptions()


@dataclass(frozen=True, slots=True)
class ExecutorModels:
    """The target and the draft of an executor, each with the pool of its KV."""

    ops: Ops
    target: Decoder
    pool: KVPool
    draft: Draft
    parked: Draft  # in the place of `draft` while it is parked
    draft_model: DraftModel | None  # that of `draft`, if it has one
    draft_pool: KVPool | None
    relayed: AlgorithmShape  # gives the relayed fields their sizes


@dataclass(frozen=True, slots=True)
class RowParts:
    """What an executor keeps of its rows, and the bounds of their rounds."""

    algorithm: SpecAlgorithm
    rows: Rows
    forced: ForcedRuns
    shaping: Shaping
    limits: RoundLimits
    relay_storage: TorchStorage
    future_map: FutureMap

    @classmethod
    def of(cls, engine: Engine, models: ExecutorModels, options: ExecutorOptions) -> RowParts:
        """Return the parts with the sizes of `engine`, on the device of the target."""
        config, sizes, algorithm = engine.config, engine.sizes, engine.algorithm
        device, most = models.target.device, sizes.max_draft_tokens
        rows = Rows(config.max_running, sizes.row_width, device, options.seed)
        limits = RoundLimits(
            rows.table,
            # In overlap mode a row that has filled the context runs once more.
            max_len=sizes.row_width - sizes.alloc_len,
            max_nodes=max(most, algorithm.accept_width(sizes.max_steps, most)),
            max_position=config.context_len - 1,
        )
        storage, fields = TorchStorage(models.ops, device), algorithm.relay_fields(models.relayed)
        return cls(
            algorithm,
            rows,
            ForcedRuns(options.acceptance, config.max_running),
            Shaping(config.max_running, models.target.vocab_size, device, options.make_matcher),
            limits,
            storage,
            FutureMap(config.max_running, fields, storage, debug_poison=options.debug),
        )
