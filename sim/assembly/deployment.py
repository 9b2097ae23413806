"""The deployment of a scenario: what its engines run on, and which server they are like.

`Deployment.of` reads the scenario's hardware once, or that of one of its pools, looks up the GPU and the server's
profile, and applies the rule "the scenario's value, else the server's". `assembly.py` takes memory, captured graphs and
measured kernels from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...core.adaptive.graphs import graph_plan
from ...core.algorithm.algorithm import SpecAlgorithm
from ...core.algorithm.registry import get_algorithm
from ...core.errors import ConfigError, nearest
from ...core.model_shape import STATE_BYTES, ModelShape
from ...core.scheduler.config import EngineConfig, EngineRole
from ...core.scheduler.spec import EngineSpec, default_graph_sizes
from ..cost.calibration import Calibration
from ..cost.deployments.evidence import Evidence, place_of, published_evidence
from ..cost.draft import DraftShape
from ..cost.hardware import GPU, Parallelism
from ..cost.host import FrontEnd, GraphUnit, HostCost, LaunchCost, host_preset, launch_preset
from ..cost.measured import KernelTables, NotMeasured, measured_tables
from ..cost.memory import (
    GRAPH_BYTES,
    InsufficientMemory,
    MemoryPlan,
    MemoryRules,
    MemoryShares,
    StateLayout,
    kv_pool_slots,
)
from ..cost.memory.rules import leanest_rules, rules_of
from ..cost.round import RoundCost
from ..cost.server import ServerProfile, server_profile
from ..scenario import FrontEndTable, Hardware, Model, Scenario

AUTO_KERNELS = ("auto", "roofline")
"""The valid values of the variable FOREDRAFT_KERNELS."""


@dataclass(frozen=True, slots=True)
class CapturedGraphs:
    """The passes that are captured. `given`: the sizes of the scenario, in `unit`; None for the server's."""

    unit: GraphUnit
    given: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Where the times of passes come from: `server` names whose measured kernels are looked up."""

    server: str
    mode: Literal["roofline", "measured", "auto"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The devices of one engine, and the server that it is like. `graphs` is None if nothing is captured.

    `host` and `front_end` have the fitted parameters of `calibration`. `is_corrected`: published points of serving
    correct the times of passes. `port_bytes_per_s`: of all devices together to other engines, in each direction.
    `memory_rules`: those of the server's release; without one those that take most, and the ones that take least.
    """

    gpu: GPU
    server: ServerProfile
    parallel: Parallelism
    graphs: CapturedGraphs | None
    launch: LaunchCost
    host: HostCost
    front_end: FrontEnd
    kernels: KernelSource
    shares: MemoryShares  # that the scenario gives; without any the server's hold
    is_corrected: bool
    port_bytes_per_s: float
    memory_rules: MemoryRules
    leanest_rules: MemoryRules | None
    pool_ratios: Mapping[str, Any]  # that the scenario gives, as fields of StateLayout
    release: str = ""  # of the server; empty for any
    calibration: Calibration | None = None

    @classmethod
    def of(cls, scenario: Scenario, calibration: Calibration | None, role: EngineRole) -> Deployment:
        """Resolve the hardware of the engines of a role. `calibration`: the profile of the scenario, if it has one.

        Raises a ForedraftError for unknown names.
        """
        hardware, own = scenario.hardware.of_role(role), scenario.hardware.pool(role)
        port_gbps = (own and own.bandwidth_gbps) or scenario.disaggregation.bandwidth_gbps
        gpu, server = hardware.device, server_profile(hardware.server)
        parallel = _parallelism(hardware, gpu)
        launch = server.launch if hardware.launch is None else launch_preset(hardware.launch)
        host = server.host if hardware.host is None else host_preset(hardware.host)
        front_end = _front_end(scenario.front_end, server)
        if calibration is not None and calibration.parameters is not None:
            host, front_end = calibration.parameters.host(host), calibration.parameters.front_end(front_end)
        if hardware.piecewise_graphs:
            launch = launch.in_pieces()
        return cls(
            gpu=gpu,
            server=server,
            parallel=parallel,
            graphs=_graphs(hardware, server, get_algorithm(scenario.speculation.algorithm)),
            launch=launch,
            host=host.shared_by(parallel.data),
            front_end=front_end,
            kernels=KernelSource(hardware.kernels_of or server.kernels_of, hardware.kernels),
            shares=MemoryShares(
                hardware.reserved_fraction,
                hardware.static_fraction,
                hardware.free_fraction,
                None if hardware.kv_gb is None else round(hardware.kv_gb * 1e9),
            ),
            is_corrected=hardware.correction == "published" and calibration is None,
            port_bytes_per_s=parallel.devices * port_gbps * 1e9 / 8,
            memory_rules=rules_of(hardware.release, server.memory, hardware.flashinfer_sampler),
            pool_ratios=_ratios(hardware),
            leanest_rules=leanest_rules(hardware.release, server.memory),
            release=hardware.release or "",
            calibration=calibration,
        )

    @property
    def devices(self) -> str:
        """The devices of an engine in words."""
        count = self.parallel.devices
        return f"{count} × {self.gpu.name}" if count > 1 else self.gpu.name

    def evidence(self, target: ModelShape, kernels: str, *, drafts: bool) -> Evidence:
        """Return what published serving points say of passes of `target`.

        `kernels`: what prices the passes, "measured" or "roofline". `drafts`: there are rounds with drafts.
        """
        place = place_of(target, self.gpu.name, self.server.name, self.parallel, self.release)
        return published_evidence(place, kernels, drafts)

    def with_formats(self, model: ModelShape, given: Model) -> ModelShape:
        """Return the model with the formats that a scenario gives. FP8 checkpoints of some servers keep their KV in FP8
        as well."""
        weights, kv = given.weight_dtype, given.kv_dtype
        if kv is None and weights == "fp8" and self.server.fp8_kv:
            kv = "fp8"
        state, conv = (STATE_BYTES.get(each or "") for each in (given.state_dtype, given.conv_dtype))
        return model.with_dtypes(weights, kv).with_states(state, conv, self.server.state_bytes)

    def row_graph_sizes(self, max_running: int) -> tuple[int, ...] | None:
        """Return the captured batch sizes of an engine, by which it chooses its draft steps; None without graphs."""
        if self.graphs is None:
            return None
        if self.graphs.unit == "tokens":
            return default_graph_sizes(max_running)
        if self.graphs.given is not None:
            return self.graphs.given
        return self.server.graph_sizes(self.gpu, self.parallel.devices, max_running)

    def pass_graph_sizes(self, spec: EngineSpec) -> tuple[int, ...] | None:
        """Return the sizes of captured passes, in the unit of `graphs`; None without graphs."""
        if spec.graph_sizes is None or self.graphs is None or self.graphs.unit == "rows":
            return spec.graph_sizes
        return self.server.token_graph_sizes(self.gpu) if self.graphs.given is None else self.graphs.given

    def kernel_tables(self, model: ModelShape) -> tuple[KernelTables | None, str | None]:
        """Return the measured kernels of a model or a head, None for the roofline, and why `auto` took the roofline.

        The variable FOREDRAFT_KERNELS=roofline makes `auto` the roofline, so that runs are alike on all machines.
        Raises NotMeasured if measured kernels are required and missing.
        """
        if self.kernels.mode == "roofline":
            return None, None
        is_required = self.kernels.mode == "measured"
        if not is_required and _auto_kernels() == "roofline":
            return None, "FOREDRAFT_KERNELS=roofline"
        try:
            priced = self.server.priced(model, self.gpu)
            tables = measured_tables(
                priced, self.gpu.name, self.kernels.server, self.parallel, wants_nearest=is_required
            )
        except NotMeasured as error:
            if is_required:
                raise
            return None, str(error)
        return tables, None

    def costs(
        self, target: ModelShape, draft: DraftShape | None, spec: EngineSpec, expert_independence: float
    ) -> tuple[RoundCost, HostCost, Evidence, str | None]:
        """Return the costs of the device and of the host, what published points say of them, and why
        `hardware.kernels=auto` took the roofline. Raises ConfigError for a profile that was fitted around others."""
        body = None if draft is None else draft.body
        tables, not_measured = self.kernel_tables(target)
        draft_tables, draft_not_measured = (None, None) if body is None else self.kernel_tables(body)
        evidence = self.evidence(target, "roofline" if tables is None else "measured", drafts=spec.max_steps > 0)
        cost = RoundCost(
            target,
            self.gpu,
            self.parallel,
            draft,
            graph_sizes=self.pass_graph_sizes(spec),
            graph_unit="rows" if self.graphs is None else self.graphs.unit,
            launch=self.launch,
            calibration=self.calibration,
            tables=tables,
            draft_tables=draft_tables,
            expert_independence=expert_independence,
            published=evidence if self.is_corrected and evidence.own else None,
            keep_draft_warm=draft is not None and 0 in spec.adaptive.candidate_steps and spec.max_steps > 0,
        )
        if self.calibration is not None:
            self.calibration.check_base(self.server.name, cost.kernels)
        return cost, self.host, evidence, not_measured or draft_not_measured

    def memory_plan(
        self, target: ModelShape, draft: DraftShape | None, spec: EngineSpec, is_default_limit: bool = False
    ) -> MemoryPlan:
        """Return the memory of one device under an engine of `spec`. Raises InsufficientMemory. `is_default_limit`: the
        number of requests that may run is the server's default.

        If the pool holds no request of the whole context, and no release is named, it is that of the rules that take
        least, where this one does.
        """
        settings = target, draft, spec, is_default_limit
        usual, missing = self._memory_plan(*settings, self.memory_rules)
        if usual is not None and usual.holds(spec.config):
            return usual
        least = None if self.leanest_rules is None else self._memory_plan(*settings, self.leanest_rules)[0]
        if least is not None and (usual is None or least.holds(spec.config)):
            return replace(least, may_not_start=True)
        if usual is None:
            assert missing is not None
            raise missing
        return usual

    def _layout(self, config: EngineConfig, is_default_limit: bool) -> StateLayout:
        return StateLayout(
            self.server.kv_layout,
            config.prefix_cache,
            config.overlap,
            is_default_limit=is_default_limit,
            **self.pool_ratios,
        )

    def _memory_plan(
        self, target: ModelShape, draft: DraftShape | None, spec: EngineSpec, is_default_limit: bool, rules: MemoryRules
    ) -> tuple[MemoryPlan | None, InsufficientMemory | None]:
        """Return the memory by these rules, or None and what is missing."""
        config, shares, num_graphs = spec.config, self.shares, 0
        if not shares.are_given:
            algorithm = None if draft is None or draft.on_host else draft.algorithm
            static = self.server.static_fraction(self.gpu, self.parallel, algorithm)
            shares = MemoryShares(static=static, free=self.server.free_fraction)
        if self.graphs is not None and spec.graph_sizes:
            # Graphs by tokens serve every number of draft steps; those by rows are captured for each.
            by_rows = self.graphs.unit == "rows"
            captured = graph_plan(spec.adaptive, spec.graph_sizes, GRAPH_BYTES)
            batch = config.max_running * spec.max_num_draft_tokens
            by_tokens = rules.num_graphs(self.pass_graph_sizes(spec) or (), batch)
            num_graphs = captured.num_graphs if by_rows else by_tokens
        try:
            plan = kv_pool_slots(
                target,
                self.gpu,
                self.parallel,
                draft,
                graph_count=num_graphs,
                max_prefill_tokens=config.chunk_size,
                max_batch_size=config.max_running,
                max_num_draft_tokens=spec.max_num_draft_tokens,
                shares=shares,
                page_size=config.page_size,
                rules=rules,
                layout=self._layout(config, is_default_limit),
            )
        except InsufficientMemory as error:
            return None, error
        return plan, None


def _ratios(hardware: Hardware) -> dict[str, Any]:
    """Return the proportions of SGLang's pools, and the states of one, that the scenario gives."""
    given: dict[str, Any] = {"window_ratio": hardware.window_ratio, "state_ratio": hardware.state_ratio}
    if hardware.state_slots is not None:
        given["state_slots"] = hardware.state_slots // hardware.attention_data_parallel
    return {name: ratio for name, ratio in given.items() if ratio is not None}


def _parallelism(hardware: Hardware, gpu: GPU) -> Parallelism:
    return Parallelism(
        hardware.tensor_parallel,
        hardware.attention_data_parallel,
        hardware.expert_parallel,
        hardware.gpus_per_node or gpu.per_node,
    )


def _front_end(given: FrontEndTable, server: ServerProfile) -> FrontEnd:
    usual = server.front_end

    def time_ns(given_us: float | None, usual_ns: int) -> int:
        return usual_ns if given_us is None else round(given_us * 1e3)

    return FrontEnd(
        request_ns=time_ns(given.request_us, usual.request_ns),
        token_ns=time_ns(given.prompt_token_us, usual.token_ns),
        poll_steps=given.poll_steps or usual.poll_steps,
        stream_interval=given.stream_interval or usual.stream_interval,
        first_chunk=given.first_chunk or usual.first_chunk,
        chunk_ns=time_ns(given.chunk_us, usual.chunk_ns),
        output_token_ns=time_ns(given.output_token_us, usual.output_token_ns),
    )


def _graphs(hardware: Hardware, server: ServerProfile, algorithm: SpecAlgorithm) -> CapturedGraphs | None:
    if not hardware.cuda_graphs or not algorithm.captures_rounds:
        return None
    given = None if hardware.graph_sizes is None else tuple(hardware.graph_sizes)
    return CapturedGraphs(hardware.graph_unit or server.graph_unit, given)


def _auto_kernels() -> str:
    """Return the meaning of `hardware.kernels=auto` in this environment. Raises ConfigError for an invalid value of the
    variable."""
    given = os.environ.get("FOREDRAFT_KERNELS") or "auto"
    if given not in AUTO_KERNELS:
        message = f"expected {' or '.join(AUTO_KERNELS)}, found {given!r}{nearest(given, AUTO_KERNELS)}"
        raise ConfigError.of("environment", "FOREDRAFT_KERNELS", message)
    return given
