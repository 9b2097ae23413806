"""From a scenario to the parts of a run: models, cost, memory, acceptance, and the specification of its engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ..core.acceptance.presets import PresetChoice, TraceAcceptance, usual_preset
from ..core.acceptance.process import AcceptanceProcess, GaussianAcceptance, Regimes
from ..core.acceptance.tree import MAX_DEPTH
from ..core.adaptive.graphs import graph_plan
from ..core.algorithm.algorithm import AlgorithmShape, Drafter, SpecAlgorithm
from ..core.algorithm.builtin import carried_hidden_size
from ..core.algorithm.registry import get_algorithm
from ..core.contract.events import EventSink
from ..core.errors import ConfigError, ForedraftError, Problem, nearest
from ..core.model_shape import (
    HF_QUANT_CONFIG,
    ModelShape,
    built_in_config,
    known_models,
    lookup_model,
    modelopt_config,
    read_model_shape,
)
from ..core.parsing import read_json_object
from ..core.scheduler.config import EngineConfig
from ..core.scheduler.engine import Engine
from ..core.scheduler.spec import GRAPH_SIZES, UNSIZED_POOL, EngineSpec, default_graph_sizes, resolve_spec
from ..observe.input_files import read_text
from .cost.calibration import Calibration, load_calibration
from .cost.draft import EAGLE, DraftShape, eagle3_head, eagle_head, host_draft, multi_layer_eagle, standalone
from .cost.executor_steps import ExecutorSteps, StepCost
from .cost.goodput import cost_table
from .cost.hardware import GPU, Parallelism, lookup_gpu
from .cost.host import GraphUnit, HostCost, host_preset, launch_preset
from .cost.measured import KernelTables, NotMeasured, measured_tables, packaged_config
from .cost.memory import GRAPH_BYTES, MemoryPlan, kv_pool_slots
from .cost.round import RoundCost
from .cost.server import server_profile
from .disaggregation.pools import Pools, pools_of, timing_of
from .scenario import Scenario
from .scenario_file import SCENARIO, check_context, check_names, is_config_file
from .workload.recorded_runs import load_recorded_runs

RESERVED = 0.10  # of a device's memory: what servers leave alone by default, those with a static share apart
AUTO_KERNELS = ("auto", "roofline")
"""The valid values of the variable FOREDRAFT_KERNELS."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of a run, all immutable. Each replica's engine is made from `spec`."""

    scenario: Scenario
    target: ModelShape
    gpu: GPU
    draft: DraftShape | None
    algorithm: SpecAlgorithm
    spec: EngineSpec
    cost: RoundCost | StepCost
    host: HostCost
    memory: MemoryPlan | None  # None: the scenario gives the KV pool's size
    acceptance: AcceptanceProcess
    preset: PresetChoice  # what the acceptance is made of, as far as the scenario does not give it
    pools: Pools
    calibration: Calibration | None = None
    not_measured: str | None = None  # why hardware.kernels=auto took the roofline

    def make_engine(self, events: EventSink | None, replica: int = 0, named_slots: bool = True) -> Engine:
        """Make the engine of `replica`, in the role that its number has."""
        return self.spec.with_role(self.pools.role_of(replica)).make_engine(events, named_slots=named_slots)

    @property
    def relay_shape(self) -> AlgorithmShape:
        """The sizes that determine what a row relays: those of the draft, as the real executor has them."""
        steps, hidden, heads = self.spec.max_steps, self.target.hidden, None
        if self.algorithm.drafter is Drafter.HEADS:
            assert self.draft is not None, f"{self.algorithm.name} drafts with heads"
            steps = heads = self.draft.heads
            hidden = carried_hidden_size(hidden, heads)
        return AlgorithmShape(steps, self.spec.topk, hidden, heads, self.target.vocab)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the prefix cache of an engine can hold at most; 0 without one."""
        config = self.spec.config
        return config.num_pages * config.page_size if config.prefix_cache else 0

    @property
    def timing(self) -> str:
        """A line for the report: whose timing is simulated, and where the times of passes come from."""
        hardware, rows = self.scenario.hardware, f"{self.spec.config.max_running:,}"
        timing = f"Timing of {hardware.server} (hardware.server), batches of up to {rows}; passes priced by {self.cost.priced_by}"
        if self.not_measured is not None and "roofline" in self.cost.priced_by:
            timing += f" ({self.not_measured})"
        return f"{timing}." if self.calibration is None else f"{timing}; {self.calibration.origin}."

    def explain(self) -> list[tuple[str, float | str, str, str]]:
        """Return (name, value, unit, source) of every number behind the run."""
        server = server_profile(self.scenario.hardware.server)
        rows: list[tuple[str, float | str, str, str]] = [("timing of the server", server.name, "", server.about)]
        rows += [*self.cost.explain(), *self.host.explain()]
        if self.memory is not None:
            rows += self.memory.explain()
        config, engine = self.spec.config, self.scenario.engine
        for name, unit in (("max_running", "requests in a batch"), ("chunk_size", "prompt tokens of a step")):
            value, usual = getattr(config, name), getattr(server.on(self.gpu), name)
            source = f"default of {server.name} on {self.gpu.name}" if getattr(engine, name) is None else "scenario"
            if source != "scenario" and value < usual:
                source += f" ({usual:,}), within engine.max_step_tokens"
            rows.append((f"engine: {name}", value, unit, source))
        rows.append(("scheduling mode", config.mode, "", config.mode_reason))
        source = _acceptance_source(self.scenario, self.preset)
        rows.append(("acceptance", type(self.acceptance).__name__, "", source))
        return rows


def assemble(scenario: Scenario, calibration: Calibration | None = None) -> Assembly:
    """Resolve a scenario. `calibration` stands in for the file `hardware.profile`.

    Raises a ForedraftError for everything that cannot run, before the run begins.
    """
    check_names(scenario)
    hardware = scenario.hardware
    algorithm = get_algorithm(scenario.speculation.algorithm)
    target = _model(scenario.model.target, "model.target")
    target = _with_formats(target, scenario)
    check_context(scenario, target)
    gpu, server = lookup_gpu(hardware.gpu), server_profile(hardware.server)
    spec = _spec(scenario, algorithm, target)
    draft = _draft_shape(scenario, algorithm, target, spec.max_steps)
    if calibration is None and hardware.profile:
        calibration = load_calibration(hardware.profile)
    launch = server.launch if hardware.launch is None else launch_preset(hardware.launch)
    host = server.host if hardware.host is None else host_preset(hardware.host)
    if calibration is not None and calibration.parameters is not None:
        launch, host = calibration.parameters.launch(launch), calibration.parameters.host(host)
    steps = None if calibration is None else calibration.steps
    bodies = (target, None if draft is None else draft.body) if steps is None else (None, None)
    (tables, not_measured), (draft_tables, draft_not_measured) = (
        _kernel_tables(scenario, body, gpu) for body in bodies
    )
    roofline = RoundCost(
        target,
        gpu,
        _parallelism(scenario),
        draft,
        graph_sizes=_captured_sizes(scenario, spec),
        graph_unit=_graph_unit(scenario),
        launch=launch,
        calibration=calibration if steps is None else None,
        tables=tables,
        draft_tables=draft_tables,
        expert_independence=scenario.model.expert_independence,
        keep_draft_warm=draft is not None and 0 in spec.adaptive.candidate_steps and spec.max_steps > 0,
    )
    cost: RoundCost | StepCost = roofline
    if calibration is not None and calibration.steps is not None:
        cost, host = _executor_steps(scenario, calibration.steps, spec, target, calibration.name)
    elif calibration is not None:
        calibration.check_base(server.name, roofline.kernels)
    memory, slots = None, scenario.engine.kv_slots
    if slots is None:
        memory = _memory(scenario, target, gpu, draft, spec)
        slots = memory.slots
    spec = spec.with_config(num_pages=slots // spec.config.page_size)
    if spec.policy == "goodput":
        spec = replace(spec, cost_table=cost_table(spec, cost, host))
    preset = _chosen_preset(scenario, algorithm, target)
    acceptance = _acceptance(scenario, preset, spec)
    timing_of(scenario)
    _check(scenario, spec, acceptance)
    pools = pools_of(scenario)
    return Assembly(
        scenario, target, gpu, draft, algorithm, spec, cost, host, memory, acceptance, preset, pools, calibration,
        not_measured or draft_not_measured,
    )  # fmt: skip


def _executor_steps(
    scenario: Scenario, steps: ExecutorSteps, spec: EngineSpec, target: ModelShape, profile: str
) -> tuple[StepCost, HostCost]:
    """Return device and host costs as measured on our own executor.
    Raises ConfigError for another model or unmeasured shapes."""
    profile = scenario.hardware.profile or profile
    if scenario.engine.kv_slots is None:
        message = "is not given; a profile of measured steps does not say how much memory the device has"
        raise ConfigError.of(SCENARIO, "engine.kv_slots", message)
    shape = {"hidden": target.hidden, "layers": target.layers, "kv_heads": target.kv_heads, "vocab": target.vocab}
    steps.check_target(profile, **shape)
    return steps.cost(spec, profile), steps.host


def _with_formats(target: ModelShape, scenario: Scenario) -> ModelShape:
    """Return the model with the formats that the scenario gives;
    FP8 checkpoints of some servers keep their KV in FP8 as well."""
    weights, kv = scenario.model.weight_dtype, scenario.model.kv_dtype
    if kv is None and weights == "fp8" and server_profile(scenario.hardware.server).fp8_kv:
        kv = "fp8"
    return target.with_dtypes(weights, kv)


def _parallelism(scenario: Scenario) -> Parallelism:
    table = scenario.hardware
    per_node = table.gpus_per_node or lookup_gpu(table.gpu).per_node
    return Parallelism(table.tensor_parallel, table.attention_data_parallel, table.expert_parallel, per_node)


def _kernel_tables(scenario: Scenario, shape: ModelShape | None, gpu: GPU) -> tuple[KernelTables | None, str | None]:
    """Return the measured kernels of a model or a head, None for the roofline, and why `auto` took it.

    The variable FOREDRAFT_KERNELS=roofline makes `auto` the roofline, so that runs are alike on all machines. Raises
    NotMeasured if measured kernels are required and missing.
    """
    hardware = scenario.hardware
    if shape is None or hardware.kernels == "roofline":
        return None, None
    profile, is_demanded = server_profile(hardware.server), hardware.kernels == "measured"
    if not is_demanded and _auto_kernels() == "roofline":
        return None, "FOREDRAFT_KERNELS=roofline"
    try:
        server, shape = hardware.kernels_of or profile.kernels_of, profile.priced(shape, gpu)
        tables = measured_tables(shape, gpu.name, server, _parallelism(scenario), wants_nearest=is_demanded)
    except NotMeasured as error:
        if is_demanded:
            raise
        return None, str(error)
    return tables, None


def _auto_kernels() -> str:
    """Return the meaning of `hardware.kernels=auto` in this environment. Raises ConfigError for an invalid value of the
    variable."""
    given = os.environ.get("FOREDRAFT_KERNELS") or "auto"
    if given not in AUTO_KERNELS:
        message = f"expected {' or '.join(AUTO_KERNELS)}, found {given!r}{nearest(given, AUTO_KERNELS)}"
        raise ConfigError.of("environment", "FOREDRAFT_KERNELS", message)
    return given


def _graph_unit(scenario: Scenario) -> GraphUnit:
    return scenario.hardware.graph_unit or server_profile(scenario.hardware.server).graph_unit


def _captured_sizes(scenario: Scenario, spec: EngineSpec) -> tuple[int, ...] | None:
    """Return the sizes of captured passes, in rows or in tokens; None without graphs."""
    if spec.graph_sizes is None or _graph_unit(scenario) == "rows":
        return spec.graph_sizes
    return GRAPH_SIZES if scenario.hardware.graph_sizes is None else tuple(scenario.hardware.graph_sizes)


def _spec(scenario: Scenario, algorithm: SpecAlgorithm, target: ModelShape) -> EngineSpec:
    """Return the specification of the engines, without the values that follow from memory and cost."""
    engine, hardware, speculation = scenario.engine, scenario.hardware, scenario.speculation
    server, gpu = server_profile(hardware.server), lookup_gpu(hardware.gpu)
    given = engine.model_dump(exclude={"mode", "kv_slots"})  # fields of the table that the engine does not have
    defaults = {key: getattr(server.on(gpu), key) for key in ("chunk_size", "max_running")}
    defaults |= {key: getattr(server, key) for key in ("mixed", "guarantee_output")}
    given |= {key: value for key, value in defaults.items() if given[key] is None}
    context_len = scenario.model.context_len or target.max_context

    def resolve(rows: int) -> EngineSpec:
        sizes: Sequence[int] | None = hardware.graph_sizes
        if _graph_unit(scenario) == "tokens":  # of rows, by which the number of draft steps is chosen
            sizes = default_graph_sizes(rows)
        elif sizes is None:
            sizes = server.graph_sizes(gpu, hardware.devices, rows)
        return resolve_spec(
            EngineConfig(num_pages=UNSIZED_POOL, context_len=context_len, **given | {"max_running": rows}),
            algorithm,
            **speculation.model_dump(exclude={"algorithm", "heads"}),
            mode=engine.mode,
            graph_sizes=sizes if hardware.cuda_graphs else None,
            num_heads=speculation.heads if algorithm.drafter is Drafter.HEADS else None,
            read_file=read_text,
            source="speculation",
        )

    spec = resolve(given["max_running"])
    if engine.max_running is None and spec.config.mixed and spec.config.max_step_tokens is not None:
        most = (spec.config.max_step_tokens - 1) // spec.max_num_draft_tokens  # leaves room for a prompt
        if 0 < most < spec.config.max_running:
            spec = resolve(most)
    heads = speculation.heads or max(spec.max_steps, 1)
    problems = algorithm.problems(AlgorithmShape(spec.max_steps, spec.topk, target.hidden, heads))
    if problems:
        raise ConfigError("speculation", problems)
    return spec


def _check(scenario: Scenario, spec: EngineSpec, acceptance: AcceptanceProcess) -> None:
    """Raise ConfigError if the acceptance or the engine of the scenario is impossible."""
    if spec.topk > 1 and isinstance(acceptance, GaussianAcceptance):
        for steps, nodes in spec.draft_shape.tree_sizes():
            if steps > MAX_DEPTH and spec.policy != "fixed":
                message = f"has a candidate of {steps} steps; expected at most {MAX_DEPTH} with topk {spec.topk}"
                raise ConfigError.of(SCENARIO, "speculation.adaptive", message)
            if steps > 0:
                acceptance.for_tree(spec.topk, steps, nodes, scenario.acceptance.rank_ratio)
    try:
        spec.resolve_sizes()
        spec.make_controller()
    except ConfigError as error:
        # A scenario gives the pool in tokens, the engine has it in pages.
        renamed = [Problem("kv_slots" if p.key == "num_pages" else p.key, p.message) for p in error.problems]
        raise ConfigError(error.source, renamed) from None


def _model(name: str, key: str) -> ModelShape:
    """Return a model by its name, built in or known to the database of measured kernels, or by the path of
    its configuration."""
    packaged = None if is_config_file(name) or built_in_config(name) else packaged_config(name)
    if packaged is None and not is_config_file(name):
        try:
            return lookup_model(name)
        except ForedraftError as error:
            raise ConfigError.of(SCENARIO, key, str(error)) from None
    if packaged is None:
        file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        beside, own_name = file.with_name(HF_QUANT_CONFIG), file.resolve().parent.name
    else:
        (file, beside), own_name = packaged, name.rpartition("/")[2]
    config = read_json_object(str(file), read_text, with_infinity=True)
    if config.get("quantization_config") is None and beside.is_file():
        config["quantization_config"] = modelopt_config(read_json_object(str(beside), read_text), str(beside))
    return read_model_shape(config, str(file), own_name)


def _draft_shape(scenario: Scenario, algorithm: SpecAlgorithm, target: ModelShape, max_steps: int) -> DraftShape | None:
    match algorithm.drafter:
        case Drafter.NONE:
            return None
        case Drafter.MODEL:
            given = scenario.model.draft
            return standalone(_usual_draft(target) if given is None else _model(given, "model.draft"), target)
        case Drafter.HEADS:
            return multi_layer_eagle(target, scenario.speculation.heads or max(max_steps, 1))
        case Drafter.LOOKUP:
            return host_draft(algorithm.name, algorithm.draft_time_share)
        case Drafter.HEAD:
            return (
                eagle_head(target) if algorithm.draft_form == EAGLE else eagle3_head(target, scenario.model.draft_vocab)
            )


def _usual_draft(target: ModelShape) -> ModelShape:
    """Return the smallest built-in model with the target's vocabulary.
    Raises ConfigError if none is smaller than the target."""
    built_in = map(lookup_model, known_models())
    fitting = [model for model in built_in if model.vocab == target.vocab and model.parameters < target.parameters]
    if not fitting:
        message = (
            f"is not given, and no built-in model smaller than {target.name} has its vocabulary of {target.vocab} tokens; "
            "give the config.json of one that has"
        )
        raise ConfigError.of(SCENARIO, "model.draft", message)
    return min(fitting, key=lambda model: model.parameters)


def _memory(scenario: Scenario, target: ModelShape, gpu: GPU, draft: DraftShape | None, spec: EngineSpec) -> MemoryPlan:
    config, hardware, graphs = spec.config, scenario.hardware, 0
    static, free = hardware.static_fraction, hardware.free_fraction
    if static is None and free is None and hardware.reserved_fraction is None:
        algorithm = None if draft is None or draft.on_host else draft.algorithm
        server, parallel = server_profile(hardware.server), _parallelism(scenario)
        static, free = server.static_fraction(gpu, parallel, algorithm), server.free_fraction
    if spec.graph_sizes:
        # Graphs by tokens serve every number of draft steps; those by rows are captured for each.
        by_rows = _graph_unit(scenario) == "rows"
        plan = graph_plan(spec.adaptive, spec.graph_sizes, GRAPH_BYTES)
        graphs = plan.num_graphs if by_rows else len(_captured_sizes(scenario, spec) or ())
    return kv_pool_slots(
        target,
        gpu,
        _parallelism(scenario),
        draft,
        graph_count=graphs,
        max_prefill_tokens=config.chunk_size,
        max_batch_size=config.max_running,
        max_num_draft_tokens=spec.max_num_draft_tokens,
        reserved_fraction=RESERVED if hardware.reserved_fraction is None else hardware.reserved_fraction,
        static_fraction=static,
        free_fraction=free,
        page_size=config.page_size,
    )


def _acceptance(scenario: Scenario, choice: PresetChoice, spec: EngineSpec) -> AcceptanceProcess:
    table, seed = scenario.acceptance, scenario.seed
    given = [key for key in ("preset", "conditional", "mean_length", "recorded") if getattr(table, key) is not None]
    if len(given) > 1:
        raise ConfigError.of("acceptance", given[1], f"contradicts {given[0]}: give one of them")
    if table.recorded is not None:
        return TraceAcceptance.of_runs(load_recorded_runs(table.recorded), seed=seed)
    base = choice.preset
    regimes = table.regimes
    process = GaussianAcceptance(
        tuple(table.conditional) if table.conditional is not None else base.conditional,
        seed,
        base.request_share if table.request_share is None else table.request_share,
        base.field_share if table.field_share is None else table.field_share,
        table.correlation_len or base.correlation_len,
        table.drift_per_1k_tokens,
        Regimes(regimes.stretch_len, tuple(regimes.shifts), tuple(regimes.weights)) if regimes else None,
        draft_confidence=base.draft_confidence if table.conditional is None else None,
    )
    if table.mean_length is None or not spec.max_steps:
        return process
    tree = (spec.topk, spec.max_steps, spec.max_num_draft_tokens, table.rank_ratio) if spec.topk > 1 else None
    return replace(_with_mean(replace(process, seed=0), table.mean_length, spec.max_steps, tree), seed=seed)


@lru_cache(maxsize=64)
def _with_mean(
    process: GaussianAcceptance, mean: float, steps: int, tree: tuple[int, int, int, float] | None
) -> GaussianAcceptance:
    """Return `process`, more or less likely to accept at every depth, so that rounds of `steps` emit `mean`
    tokens on average."""
    from ..core.acceptance.fit import fit_means  # seldom needed

    drafted_as = None if tree is None else lambda process: process.for_tree(*tree)
    return fit_means([(steps, min(mean, steps + 1.0))], process, drafted_as)[0]


def _chosen_preset(scenario: Scenario, algorithm: SpecAlgorithm, target: ModelShape) -> PresetChoice:
    name = algorithm.draft_form or algorithm.name
    return usual_preset(name, target.family, algorithm.usual_acceptance, scenario.acceptance.preset)


def _acceptance_source(scenario: Scenario, choice: PresetChoice) -> str:
    table = scenario.acceptance
    if table.mean_length is not None:
        return f"the scenario's mean, with the spread and correlation of preset {choice.preset.name}"
    if table.recorded is not None or table.conditional is not None:
        return "scenario"
    return f"preset {choice.preset.name}: {choice.preset.source}"
