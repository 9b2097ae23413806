"""From a scenario to its parts: models, cost, memory, algorithm, acceptance, workload, engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.acceptance.drift import Regimes
from ..core.acceptance.presets import PRESETS, acceptance_preset
from ..core.acceptance.process import AcceptanceProcess, FixedMeanAcceptance, GaussianAcceptance
from ..core.acceptance.recorded import TraceAcceptance
from ..core.adaptive import AdaptiveConfig, AdaptiveController, CostTable, build_controller, load_adaptive_config
from ..core.adaptive.config import fixed_config
from ..core.adaptive.graph_plan import graph_plan
from ..core.algorithm.algorithm import AlgorithmShape, Drafter, SpecAlgorithm
from ..core.algorithm.registry import get_algorithm
from ..core.contract.events import EventSink
from ..core.errors import ConfigError, ForetokenError, Problem
from ..core.kv.sizing import max_speculative_num_draft_tokens
from ..core.scheduler.config import EngineConfig, EngineSizes
from ..core.scheduler.engine import Engine
from ..core.scheduler.overlap_mode import Routing, choose_mode
from ..core.tree.build import MAX_TREE_NODES, tree_capacity
from .cost.calibration import load_calibration
from .cost.draft import EAGLE, DraftShape, eagle3_head, eagle_head, host_draft, multi_layer_eagle, standalone
from .cost.hardware import GPU, lookup_gpu
from .cost.hf_config import from_hf_config
from .cost.host import HostCost, host_preset
from .cost.launch import DEFAULT_GRAPH_SIZES, launch_preset
from .cost.memory import GRAPH_BYTES, MemoryPlan, kv_pool_slots
from .cost.model import ModelShape, lookup_model
from .cost.round import RoundCost
from .disaggregation.pools import Pools, pools_of, timing_of
from .scenario import Scenario
from .scenario_check import SCENARIO, check_context, check_names, is_config_file

DEFAULT_STEPS = 3
DEFAULT_TREE_NODES = 16
BACKEND = "simulated"


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of a run. Everything here is immutable or a pure function; engines are made from it, one per replica."""

    scenario: Scenario
    target: ModelShape
    gpu: GPU
    draft: DraftShape | None
    algorithm: SpecAlgorithm
    adaptive: AdaptiveConfig  # of a fixed policy: one candidate
    num_draft_tokens: int | None  # of trees; chains follow from the steps
    cost: RoundCost
    host: HostCost
    memory: MemoryPlan | None  # None: the scenario gives the KV pool's size
    acceptance: AcceptanceProcess
    routing: Routing
    engine_config: EngineConfig
    cost_table: CostTable | None
    pools: Pools

    def make_controller(self) -> AdaptiveController:
        """A fresh controller; graph sizes are its routing, as in a real engine."""
        speculation = self.scenario.speculation
        controller = build_controller(
            speculation.policy if self.algorithm.is_speculative else "fixed",
            self.adaptive,
            initial_steps=_initial_steps(self.scenario, self.algorithm),
            cost_table=self.cost_table,
            topk=speculation.topk,
            num_draft_tokens=self.num_draft_tokens,
            depth_limited=self.algorithm.drafter is not Drafter.LOOKUP,
        )
        controller.init_states(self.cost.graph_sizes)
        return controller

    def make_engine(self, events: EventSink | None, replica: int = 0) -> Engine:
        """The engine of `replica`, with the role that its number has."""
        config = replace(self.engine_config, role=self.pools.role_of(replica))
        return Engine(config, self.algorithm, self.make_controller(), events=events)

    def explain(self) -> list[tuple[str, float | str, str, str]]:
        """(name, value, unit, source) of every number behind the run."""
        rows: list[tuple[str, float | str, str, str]] = [*self.cost.explain(), *self.host.explain()]
        if self.memory is not None:
            rows += self.memory.explain()
        rows.append(("scheduling mode", self.routing.mode, "", self.routing.reason))
        rows.append(
            ("acceptance", type(self.acceptance).__name__, "", _acceptance_source(self.scenario, self.algorithm))
        )
        return rows


def assemble(scenario: Scenario) -> Assembly:
    """Resolve a scenario. Raises a ForetokenError for whatever cannot be run, before anything is."""
    check_names(scenario)
    algorithm = get_algorithm(scenario.speculation.algorithm)
    target = _model(scenario.model.target, "model.target")
    target = target.with_dtypes(scenario.model.weight_dtype, scenario.model.kv_dtype)
    check_context(scenario, target)
    gpu = lookup_gpu(scenario.hardware.gpu)
    adaptive = _adaptive_config(scenario, algorithm)
    num_draft_tokens = _tree_nodes(scenario, algorithm, adaptive)
    max_steps = adaptive.candidate_steps[-1]
    draft = _draft_shape(scenario, algorithm, target, max_steps)
    graph_sizes = _graph_sizes(scenario)
    warm = draft is not None and 0 in adaptive.candidate_steps and max_steps > 0
    profile = scenario.hardware.profile
    cost = RoundCost(
        target,
        gpu,
        scenario.hardware.tensor_parallel,
        draft,
        graph_sizes=graph_sizes,
        launch=launch_preset(scenario.hardware.launch),
        calibration=load_calibration(profile) if profile else None,
        keep_draft_warm=warm,
    )
    host = host_preset(scenario.hardware.host)
    routing = choose_mode(
        scenario.engine.mode,
        page_size=scenario.engine.page_size,
        topk=scenario.speculation.topk,
        backend=BACKEND,
        backend_supports_paged_trees=True,
        algorithm=algorithm.name,
        algorithm_supports_overlap=algorithm.supports_overlap,
    )
    candidates = adaptive.candidate_steps
    nodes = max_speculative_num_draft_tokens(
        [(s, num_draft_tokens) if num_draft_tokens else s for s in candidates], None, scenario.speculation.topk
    )
    memory, config = _engine_config(scenario, target, gpu, draft, graph_sizes, adaptive, nodes or 1, routing)
    table = None
    if scenario.speculation.policy == "goodput" and algorithm.is_speculative:
        table = _cost_table(scenario, cost, host, candidates, num_draft_tokens, routing.mode == "overlap")
    acceptance = _acceptance(scenario, algorithm)
    assembly = Assembly(
        scenario,
        target,
        gpu,
        draft,
        algorithm,
        adaptive,
        num_draft_tokens,
        cost,
        host,
        memory,
        acceptance,
        routing,
        config,
        table,
        pools_of(scenario),
    )
    timing_of(scenario)
    _check(assembly, max_steps)
    return assembly


def _check(assembly: Assembly, max_steps: int) -> None:
    scenario, algorithm = assembly.scenario, assembly.algorithm
    shape = AlgorithmShape(
        max_steps, scenario.speculation.topk, assembly.target.hidden, scenario.speculation.heads or max(max_steps, 1)
    )
    problems = algorithm.problems(shape)
    if problems:
        raise ConfigError("speculation", problems)
    _check_tree_acceptance(assembly)
    try:
        EngineSizes.resolve(assembly.engine_config, algorithm, assembly.make_controller())
    except ConfigError as error:
        # The pool's size in pages is the engine's own word for what a scenario gives in tokens.
        renamed = [Problem("kv_slots" if p.key == "num_pages" else p.key, p.message) for p in error.problems]
        raise ConfigError(error.source, renamed) from None


def _check_tree_acceptance(assembly: Assembly) -> None:
    """Trees beyond what the acceptance process covers are refused now, not in the round that first drafts one."""
    nodes, process = assembly.num_draft_tokens, assembly.acceptance
    if nodes is None or not isinstance(process, GaussianAcceptance):
        return
    for steps in assembly.adaptive.candidate_steps:
        if steps > 0:
            process.for_tree(assembly.scenario.speculation.topk, steps, nodes, assembly.scenario.acceptance.rank_ratio)


def _model(name: str, key: str) -> ModelShape:
    if is_config_file(name):
        return from_hf_config(Path(name) / "config.json" if Path(name).is_dir() else name)
    try:
        return lookup_model(name)
    except ForetokenError as error:
        raise ConfigError(SCENARIO, [Problem(key, str(error))]) from None


def _initial_steps(scenario: Scenario, algorithm: SpecAlgorithm) -> int | None:
    """The configured steps; a fixed policy without one drafts three, and without speculation there are none."""
    if not algorithm.is_speculative:
        return 0
    if scenario.speculation.steps is None and scenario.speculation.policy == "fixed":
        return DEFAULT_STEPS
    return scenario.speculation.steps


def _adaptive_config(scenario: Scenario, algorithm: SpecAlgorithm) -> AdaptiveConfig:
    steps = _initial_steps(scenario, algorithm)
    if not algorithm.is_speculative or scenario.speculation.policy == "fixed":
        return fixed_config(steps)
    table = scenario.speculation.adaptive
    return load_adaptive_config(table, "speculation.adaptive" if isinstance(table, dict) else None)


def _tree_nodes(scenario: Scenario, algorithm: SpecAlgorithm, adaptive: AdaptiveConfig) -> int | None:
    """nd of a tree, or None for chains, whose nd follows from the steps. A given nd must suit a chain's steps."""
    speculation = scenario.speculation
    steps = [step for step in adaptive.candidate_steps if step > 0]
    asked = speculation.num_draft_tokens
    if not steps:
        return None
    if speculation.topk == 1 or not algorithm.supports_trees:
        if asked is not None and (len(steps) > 1 or asked != steps[0] + 1):
            expected = f"{steps[0] + 1}" if len(steps) == 1 else "no value: it follows from the steps"
            raise ConfigError(
                "speculation", [Problem("num_draft_tokens", f"{asked} does not suit a chain, expected {expected}")]
            )
        return None
    capacity = tree_capacity(speculation.topk, min(steps)) + 1
    nodes = asked if asked is not None else min(capacity, DEFAULT_TREE_NODES)
    if nodes < 2:
        raise ConfigError(
            "speculation", [Problem("num_draft_tokens", f"{nodes} is the root alone, expected 2 or more")]
        )
    if nodes > min(capacity, MAX_TREE_NODES):
        raise ConfigError(
            "speculation",
            [
                Problem(
                    "num_draft_tokens",
                    f"{nodes} is beyond the tree's capacity: topk {speculation.topk} and {min(steps)} steps hold at most "
                    f"{min(capacity, MAX_TREE_NODES)} nodes",
                )
            ],
        )
    return nodes


def _draft_shape(scenario: Scenario, algorithm: SpecAlgorithm, target: ModelShape, max_steps: int) -> DraftShape | None:
    match algorithm.drafter:
        case Drafter.NONE:
            return None
        case Drafter.MODEL:
            return standalone(_model(scenario.model.draft or "llama-3.2-1b", "model.draft"), target)
        case Drafter.HEADS:
            return multi_layer_eagle(target, scenario.speculation.heads or max(max_steps, 1))
        case Drafter.LOOKUP:
            return host_draft(algorithm.name, algorithm.draft_time_share)
        case Drafter.HEAD:
            return (
                eagle_head(target) if algorithm.draft_form == EAGLE else eagle3_head(target, scenario.model.draft_vocab)
            )


def _graph_sizes(scenario: Scenario) -> tuple[int, ...] | None:
    hardware = scenario.hardware
    if not hardware.cuda_graphs:
        return None
    if hardware.graph_sizes is not None:
        return tuple(hardware.graph_sizes)
    most = scenario.engine.max_running
    return tuple(size for size in DEFAULT_GRAPH_SIZES if size < most + 8)


def _engine_config(
    scenario: Scenario,
    target: ModelShape,
    gpu: GPU,
    draft: DraftShape | None,
    graph_sizes: tuple[int, ...] | None,
    adaptive: AdaptiveConfig,
    nodes: int,
    routing: Routing,
) -> tuple[MemoryPlan | None, EngineConfig]:
    engine, hardware = scenario.engine, scenario.hardware
    memory = None
    if engine.kv_slots is not None:
        slots = engine.kv_slots
    else:
        memory = kv_pool_slots(
            target,
            gpu,
            hardware.tensor_parallel,
            draft,
            graph_count=graph_plan(adaptive, graph_sizes, GRAPH_BYTES).num_graphs if graph_sizes else 0,
            max_prefill_tokens=engine.chunk_size,
            max_batch_size=engine.max_running,
            max_num_draft_tokens=nodes,
            reserved_fraction=hardware.reserved_fraction,
            page_size=engine.page_size,
        )
        slots = memory.slots
    config = EngineConfig(
        num_pages=slots // engine.page_size,
        context_len=scenario.model.context_len or target.max_context,
        page_size=engine.page_size,
        overlap=routing.mode == "overlap",
        mode_reason=routing.reason,
        max_running=engine.max_running,
        max_queue=engine.max_queue,
        chunk_size=engine.chunk_size,
        max_step_tokens=engine.max_step_tokens,
        mixed=engine.mixed,
        prefix_cache=engine.prefix_cache,
        eviction_policy=engine.eviction_policy,
        watermark=engine.watermark,
        block_rounds=engine.block_rounds,
        preempt=engine.preempt,
        ageing_bound=engine.ageing_bound,
    )
    return memory, config


def _cost_table(
    scenario: Scenario,
    cost: RoundCost,
    host: HostCost,
    candidates: Iterable[int],
    num_draft_tokens: int | None,
    overlap: bool,
) -> CostTable:
    """Round times for the goodput policy: what the device takes, and the host beside it (overlap) or after it."""
    most = scenario.engine.max_running
    sizes = sorted({1, 2, 3, 4, 6, 8, 12, 16, *range(24, most, 8), most} - {n for n in range(17) if n > most})
    topk = scenario.speculation.topk
    round_ns, kv_token_ps = [], []
    for steps in candidates:
        nodes = 1 if steps == 0 else num_draft_tokens or steps + 1
        k = topk if steps else 1
        device = [int(cost.decode_ns(size, steps, k, nodes, 0)) for size in sizes]
        hosts = [host.round_ns(size, size) for size in sizes]
        round_ns.append(tuple(max(d, h) if overlap else d + h for d, h in zip(device, hosts, strict=True)))
        read = 1_000_000
        kv_token_ps.append((int(cost.decode_ns(sizes[-1], steps, k, nodes, read)) - device[-1]) * 1000 // read)
    return CostTable(tuple(candidates), tuple(sizes), tuple(round_ns), tuple(kv_token_ps))


def _acceptance(scenario: Scenario, algorithm: SpecAlgorithm) -> AcceptanceProcess:
    table, seed = scenario.acceptance, scenario.seed
    given = [key for key in ("preset", "conditional", "mean_length", "recorded") if getattr(table, key) is not None]
    if len(given) > 1:
        raise ConfigError("acceptance", [Problem(given[1], f"contradicts {given[0]}: give one of them")])
    if table.mean_length is not None:
        return FixedMeanAcceptance(table.mean_length, seed)
    if table.recorded is not None:
        try:
            with open(table.recorded, encoding="utf-8") as lines:
                return TraceAcceptance.from_lines(lines, table.recorded, seed=seed)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(table.recorded, [Problem("", f"cannot be read: {error}")]) from None
    base = acceptance_preset(_preset_name(scenario, algorithm), seed)
    regimes = table.regimes
    return GaussianAcceptance(
        tuple(table.conditional) if table.conditional is not None else base.conditional,
        seed,
        base.request_share if table.request_share is None else table.request_share,
        base.field_share if table.field_share is None else table.field_share,
        table.correlation_len or base.correlation_len,
        table.drift_per_1k_tokens,
        Regimes(regimes.stretch_len, tuple(regimes.shifts), tuple(regimes.weights)) if regimes else None,
    )


def _preset_name(scenario: Scenario, algorithm: SpecAlgorithm) -> str:
    return scenario.acceptance.preset or algorithm.usual_acceptance


def _acceptance_source(scenario: Scenario, algorithm: SpecAlgorithm) -> str:
    table = scenario.acceptance
    if table.mean_length is not None or table.recorded is not None or table.conditional is not None:
        return "scenario"
    return PRESETS[_preset_name(scenario, algorithm)].source
