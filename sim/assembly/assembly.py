"""From a scenario to the parts of a run: models, cost, memory, acceptance, and the specification of its engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ...core.acceptance.presets import PresetChoice
from ...core.acceptance.process import AcceptanceProcess, GaussianAcceptance
from ...core.algorithm.algorithm import AlgorithmShape, Drafter, SpecAlgorithm
from ...core.algorithm.builtin import carried_hidden_size
from ...core.algorithm.registry import get_algorithm
from ...core.contract.events import EventSink
from ...core.errors import ConfigError, ForedraftError, Problem
from ...core.model_shape import ModelShape
from ...core.scheduler.config import EngineConfig, EngineRole
from ...core.scheduler.engine import Engine
from ...core.scheduler.rules import SETTINGS, with_settings
from ...core.scheduler.spec import UNSIZED_POOL, BackendOffer, EngineSpec, SpeculationChoice, resolve_spec
from ...observe.input_files import read_text
from ..cost.calibration import Calibration, load_calibration
from ..cost.deployments.evidence import Evidence
from ..cost.draft import DraftShape
from ..cost.executor_steps import ExecutorSteps, StepCost
from ..cost.host import HostCost
from ..cost.host_link import HostLink
from ..cost.memory import MemoryPlan
from ..cost.round import RoundCost
from ..scenario import Scenario
from ..scenario_file import check_scenario, refuse_keys
from .acceptance import acceptance_of
from .deployment import Deployment
from .goodput import cost_table, pass_costs
from .models import draft_shape, model_shape
from .pools import Pools, pools_of


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of a run, all immutable. Each replica's engine is made from `spec`.

    Where prefill and decode engines have unlike hardware, these are the parts of the decode engines. `prefill` has
    those of the others, and differs in hardware, costs, memory and what follows from them.
    """

    scenario: Scenario
    deployment: Deployment
    target: ModelShape
    draft: DraftShape | None
    algorithm: SpecAlgorithm
    spec: EngineSpec
    cost: RoundCost | StepCost
    host: HostCost
    memory: MemoryPlan | None  # None: the scenario gives the KV pool's size
    acceptance: AcceptanceProcess
    preset: PresetChoice  # what the acceptance is made of, as far as the scenario does not give it
    pools: Pools
    evidence: Evidence | None = None  # what published points say of the passes; None: they are not priced
    host_link: HostLink | None = None  # None: no host memory behind the prefix cache
    not_measured: str | None = None  # why hardware.kernels=auto took the roofline
    clients_are_outside: bool = False  # they give prompts, with contents, and priorities, which no workload makes
    prefill: Assembly | None = None  # of engines that only prefill, on other hardware; None: all engines are alike

    def of_role(self, role: EngineRole) -> Assembly:
        """Return the parts of the engines that have this role."""
        return self.prefill if self.prefill is not None and role is EngineRole.PREFILL else self

    @property
    def by_role(self) -> dict[EngineRole, Assembly]:
        """The parts of the engines by their role: of prefill and decode engines where they are unlike, else of all."""
        if self.prefill is None:
            return {EngineRole.BOTH: self}
        return {EngineRole.PREFILL: self.prefill, EngineRole.DECODE: self}

    def make_engine(self, events: EventSink, replica: int = 0, named_slots: bool = True) -> Engine:
        """Make the engine of `replica`, in the role that its number has."""
        role = self.pools.role_of(replica)
        return self.of_role(role).spec.with_role(role).make_engine(events, named_slots=named_slots)

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
    def sent_kv_bytes(self) -> int:
        """Bytes of a token's KV on the network from a prefill to a decode engine, of target and draft.

        Between unlike engines every device of a decode engine is sent what it holds. That is a part of the KV heads,
        or a copy of KV that devices do not divide (a latent, fewer KV heads than devices). Between like engines a copy
        is sent once.
        """
        tensor = 1 if self.prefill is None else self.deployment.parallel.tensor
        draft = 0 if self.draft is None else self.draft.token_bytes(tensor)
        return tensor * (self.target.token_bytes(tensor) + draft)

    @property
    def states_cap(self) -> int | None:
        """The limit of running requests that the scenario or the server gives, if there are recurrent states for fewer
        of them; None: there are enough."""
        deployment = self.deployment
        usual = deployment.server.scheduling(deployment.gpu, deployment.parallel.data, self.algorithm.is_speculative)
        limit: int = self.scenario.engine.max_running or usual["max_running"]
        most = None if self.memory is None else self.memory.most_running
        return limit if most is not None and most < limit else None

    @property
    def is_corrected(self) -> bool:
        """Whether the times of passes have the factor of published points."""
        return isinstance(self.cost, RoundCost) and self.cost.published is not None


def assemble(scenario: Scenario, calibration: Calibration | None = None) -> Assembly:
    """Resolve a scenario. `calibration` stands in for the file `hardware.profile`.

    Raises a ForedraftError for everything that cannot run, before the run begins.
    """
    check_scenario(scenario)
    if calibration is None and scenario.hardware.profile:
        calibration = load_calibration(scenario.hardware.profile)
    if calibration is not None:
        refuse_keys(scenario, calibration=calibration)
    pools = pools_of(scenario)
    if not pools.is_disaggregated:
        return _assemble(scenario, Deployment.of(scenario, calibration, EngineRole.BOTH), pools)
    with _named(scenario, EngineRole.DECODE):
        decode = Deployment.of(scenario, calibration, EngineRole.DECODE)
        run = _assemble(scenario, decode, pools)
    with _named(scenario, EngineRole.PREFILL):
        prefill = Deployment.of(scenario, calibration, EngineRole.PREFILL)
        if prefill == decode:
            return run
        refuse_keys(scenario, unlike=decode)
        return replace(run, prefill=_assemble(scenario, prefill, pools))


@contextmanager
def _named(scenario: Scenario, role: EngineRole) -> Iterator[None]:
    """Name the pool in errors that its own hardware raises."""
    try:
        yield
    except ForedraftError as error:
        if isinstance(error, ConfigError) or scenario.hardware.pool(role) is None:
            raise
        raise type(error)(f"hardware.{role}: {error}") from None


def _assemble(scenario: Scenario, deployment: Deployment, pools: Pools) -> Assembly:
    """Resolve a scenario whose engines have this hardware."""
    algorithm = get_algorithm(scenario.speculation.algorithm)
    given = scenario.model
    target = deployment.with_formats(model_shape(given.target, "model.target"), given)
    refuse_keys(scenario, target=target)
    spec = _spec(scenario, deployment, algorithm, target)
    refuse_keys(scenario, spec=spec)
    draft = draft_shape(scenario, algorithm, target, spec.max_steps)
    memory, slots = None, scenario.engine.kv_slots
    if slots is None:
        spec, memory = _sized(scenario, deployment, algorithm, target, draft, spec)
        slots = memory.slots
    cost, host, evidence, not_measured = _costs(scenario, deployment, spec, target, draft)
    host_link, host_tokens = _host_memory(scenario, deployment, target, draft, slots)
    page_size = spec.config.page_size
    spec = spec.with_config(num_pages=slots // page_size, host_pages=host_tokens // page_size)
    if spec.policy == "goodput":
        spec = replace(spec, cost_table=cost_table(spec, cost, host))
    if spec.policy == "confidence":
        spec = replace(spec, cost_table=pass_costs(spec, cost, host))
    preset, acceptance = acceptance_of(scenario, algorithm, target, draft, spec)
    _check(scenario, spec, acceptance)
    return Assembly(
        scenario=scenario,
        deployment=deployment,
        target=target,
        draft=draft,
        algorithm=algorithm,
        spec=spec,
        cost=cost,
        host=host,
        memory=memory,
        acceptance=acceptance,
        preset=preset,
        pools=pools,
        evidence=evidence,
        host_link=host_link,
        not_measured=not_measured,
    )


def _sized(
    scenario: Scenario,
    deployment: Deployment,
    algorithm: SpecAlgorithm,
    target: ModelShape,
    draft: DraftShape | None,
    spec: EngineSpec,
) -> tuple[EngineSpec, MemoryPlan]:
    """Return the specification of the engines with what a request takes of their memory, and that memory. If there are
    states for fewer requests than may run, no more of them run."""
    is_default = scenario.engine.max_running is None
    memory = deployment.memory_plan(target, draft, spec, is_default)
    if memory.most_running is not None and memory.most_running < spec.config.max_running:
        spec = _spec(scenario, deployment, algorithm, target, memory.most_running)
        memory = deployment.memory_plan(target, draft, spec, is_default)
    return spec.with_config(groups=memory.groups), memory


def _host_memory(
    scenario: Scenario, deployment: Deployment, target: ModelShape, draft: DraftShape | None, pool_slots: int
) -> tuple[HostLink | None, int]:
    """Return the link to the host memory behind the prefix cache, None without one, and the tokens that it holds."""
    engine, parallel = scenario.engine, deployment.parallel
    if engine.host_cache_gb is None and engine.host_cache_ratio is None:
        return None, 0
    link = HostLink.of(deployment.gpu, parallel, target, draft, scenario.hardware.host_link_gbps)
    if engine.host_cache_gb is not None:
        return link, link.num_tokens(engine.host_cache_gb * 1e9, parallel.tensor)
    return link, int(pool_slots * (engine.host_cache_ratio or 0))


def _costs(
    scenario: Scenario, deployment: Deployment, spec: EngineSpec, target: ModelShape, draft: DraftShape | None
) -> tuple[RoundCost | StepCost, HostCost, Evidence | None, str | None]:
    """Return the costs of the device and of the host, what published points say of them, and why
    `hardware.kernels=auto` took the roofline."""
    calibration = deployment.calibration
    if calibration is not None and calibration.steps is not None:
        return *_executor_steps(scenario, calibration.steps, spec, target, calibration.name), None, None
    return deployment.costs(target, draft, spec, scenario.model.expert_independence)


def _executor_steps(
    scenario: Scenario, steps: ExecutorSteps, spec: EngineSpec, target: ModelShape, profile: str
) -> tuple[StepCost, HostCost]:
    """Return device and host costs as measured on our own executor.
    Raises ConfigError for another model or unmeasured shapes."""
    profile = scenario.hardware.profile or profile
    shape = {"hidden": target.hidden, "layers": target.layers, "kv_heads": target.kv_heads, "vocab": target.vocab}
    steps.check_target(profile, **shape)
    return steps.cost(spec, profile), steps.host


def _spec(
    scenario: Scenario,
    deployment: Deployment,
    algorithm: SpecAlgorithm,
    target: ModelShape,
    most_running: int | None = None,
) -> EngineSpec:
    """Return the specification of the engines, without the values that follow from memory and cost. `most_running`:
    the requests for which there is memory."""
    engine, speculation, server = scenario.engine, scenario.speculation, deployment.server
    others = {"mode", "kv_slots", "host_cache_gb", "host_cache_ratio", *SETTINGS}
    given = engine.model_dump(exclude=others)  # fields of the table that the engine does not have
    defaults = server.scheduling(deployment.gpu, deployment.parallel.data, algorithm.is_speculative)
    given |= {key: value for key, value in defaults.items() if given.get(key) is None} | {"verify": speculation.verify}
    given["rules"] = with_settings(defaults["rules"], engine.model_dump(include={*SETTINGS}))
    if most_running is not None:
        given["max_running"] = min(given["max_running"], most_running)
    context_len = scenario.model.context_len or target.max_context
    backs_off = server.probe_backoff if speculation.probe_backoff is None else speculation.probe_backoff

    def resolve(rows: int) -> EngineSpec:
        return resolve_spec(
            EngineConfig(num_pages=UNSIZED_POOL, context_len=context_len, **given | {"max_running": rows}),
            algorithm,
            SpeculationChoice(
                **speculation.model_dump(exclude={"algorithm", "heads", "probe_backoff", "verify", "accept_rule"}),
                probe_backoff=backs_off,
                mode=engine.mode or server.mode,
                source="speculation",
            ),
            BackendOffer(
                graph_sizes=deployment.row_graph_sizes(rows),
                num_heads=speculation.heads if algorithm.drafter is Drafter.HEADS else None,
            ),
            read_text,
        )

    spec = resolve(given["max_running"])
    if engine.max_running is None and spec.config.mixed and spec.config.max_step_tokens is not None:
        most = (spec.config.max_step_tokens - 1) // spec.max_num_draft_tokens  # leaves room for a prompt
        if 0 < most < spec.config.max_running:
            spec = resolve(most)
    widest = spec.config.max_running * spec.max_num_draft_tokens
    if engine.max_step_tokens is None and spec.config.max_step_tokens is not None:
        # The scenario has more rows than the server's budget: it has room for them and a token of a prompt.
        spec = spec.with_config(max_step_tokens=max(spec.config.max_step_tokens, widest + 1))
    if engine.mode is None and server.mode == "synchronous":
        spec = spec.with_config(mode_reason=f"{server.name} does not overlap host and device")
    heads = speculation.heads or max(spec.max_steps, 1)
    problems = algorithm.problems(AlgorithmShape(spec.max_steps, spec.topk, target.hidden, heads))
    if problems:
        raise ConfigError("speculation", problems)
    return spec


def _check(scenario: Scenario, spec: EngineSpec, acceptance: AcceptanceProcess) -> None:
    """Raise ConfigError if the acceptance or the engine of the scenario is impossible."""
    if spec.topk > 1 and isinstance(acceptance, GaussianAcceptance):
        for shape in spec.draft_shape.round_shapes():
            if shape.steps > 0:
                acceptance.for_tree(shape, scenario.acceptance.rank_ratio)
    try:
        spec.resolve_sizes()
        spec.make_controller()
    except ConfigError as error:
        # A scenario gives the pool in tokens, the engine has it in pages.
        renamed = [Problem("kv_slots" if p.key == "num_pages" else p.key, p.message) for p in error.problems]
        raise ConfigError(error.source, renamed) from None
