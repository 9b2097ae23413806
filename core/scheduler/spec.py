"""The specification of an engine: it follows from a user's settings, and engines are built from it.

Simulator, session, benchmark and checks resolve their settings with `resolve_spec` and build engines from the result,
so that the same settings make the same engine everywhere. As JSON a specification is part of a log's header; a replay
builds an equal engine from it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..adaptive import AdaptiveConfig, AdaptiveController, Costs, SlotConfig, build_controller, costs_from_json
from ..adaptive.config import (
    DEFAULT_PRESETS,
    PRESETS,
    ReadFile,
    TreeNodes,
    fixed_config,
    load_adaptive_config,
    nodes_for,
    read_tree_nodes,
)
from ..adaptive.draft_shape import DraftTreeShape
from ..adaptive.lengths.interchange import GivenTable, load_files, load_temperatures
from ..adaptive.policy import RangeRouter
from ..algorithm.algorithm import Drafter, SpecAlgorithm
from ..algorithm.registry import get_algorithm
from ..contract.events import EventSink, ignore
from ..contract.step import RoundShape
from ..contract.text import NoTextDecoder, TextDecoder
from ..errors import ConfigError, ForedraftError, Problem, nearest
from ..tree.build import MAX_TREE_NODES, tree_capacity
from .config import OMITTED, EngineConfig, EngineRole, EngineSizes, Mode, choose_mode
from .engine import Engine
from .rules import SETTINGS, rules_from_json

DEFAULT_STEPS = 3
DEFAULT_TREE_NODES = 16
UNUSED_BY_GOODPUT = (
    *("ema_alpha", "up_hysteresis", "down_hysteresis", "ceiling_coeff", "min_dwell_batches", "probe_backoff"),
)
COST_POLICIES = ("goodput", "confidence")  # they decide by a table of times
UNSIZED_POOL = 1 << 40  # `num_pages` while the size of the KV pool is not known yet
GRAPH_SIZES = (1, 2, 4, *range(8, 513, 8))  # dense where padding is expensive


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The arguments of an engine and its controller. `adaptive` of a fixed policy has one candidate."""

    config: EngineConfig
    algorithm: str
    policy: str
    adaptive: AdaptiveConfig
    initial_steps: int | None = None
    topk: int = 1
    num_draft_tokens: TreeNodes | None = None  # of trees, where `adaptive` does not say them; None: chains
    cost_table: Costs | None = None  # of the policies goodput and confidence
    graph_sizes: tuple[int, ...] | None = None  # captured batch sizes, which the controller routes by; None: no graphs
    decodes_text: bool = False  # the engine has a tokenizer, so it takes requests with stop strings
    temperatures: tuple[float, ...] = ()  # of confidences, by draft position; none: the policy learns how to read them

    @property
    def lacks_costs(self) -> bool:
        """Whether the policy decides by times of passes that are not known yet."""
        return self.cost_table is None and self.policy in COST_POLICIES

    @property
    def without_costs(self) -> EngineSpec:
        """The same candidates, with a policy that needs no costs."""
        return replace(self, policy="fixed" if self.policy == "fixed" else "ema", cost_table=None)

    @property
    def max_steps(self) -> int:
        return self.adaptive.candidate_steps[-1]

    @property
    def draft_shape(self) -> DraftTreeShape:
        """The nodes that a round verifies per request, by steps and batch size. Raises InfeasibleDraftShape."""
        depth_limited = self.make_algorithm().drafter is not Drafter.LOOKUP
        shape = DraftTreeShape(self.adaptive, self.topk, self.num_draft_tokens, depth_limited)
        shape.set_router(RangeRouter(self.adaptive, self.graph_sizes))
        return shape

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the user about the adaptive table: what was converted when it was read, and keys that the
        policy ignores.
        """
        if self.policy != "goodput":
            return self.adaptive.notices
        usual = SlotConfig(())
        unused = [
            knob
            for knob in UNUSED_BY_GOODPUT
            if any(getattr(slot, knob) != getattr(usual, knob) for slot in self.adaptive.slots)
        ]
        if not unused or self.adaptive.source.startswith("preset "):
            return self.adaptive.notices
        return (
            *self.adaptive.notices,
            f"{self.adaptive.source}: the goodput policy makes no use of {', '.join(unused)}",
        )

    @property
    def max_num_draft_tokens(self) -> int:
        """Nodes that the largest verify round has per request, the root included."""
        return self.draft_shape.max_num_draft_tokens

    @property
    def largest_round(self) -> RoundShape:
        """The most steps, the branches and the most nodes of a round; with an adaptive table perhaps of two rounds."""
        return RoundShape(self.max_steps, self.topk, self.max_num_draft_tokens)

    def resolve_sizes(self) -> EngineSizes:
        """Return the sizes that the engine reserves.

        Raises ConfigError if configuration, algorithm and candidates contradict each other.
        """
        return EngineSizes.resolve(self.config, self.make_algorithm(), self.without_costs.make_controller())

    def with_config(self, **changes: Any) -> EngineSpec:
        """Return the same specification with other fields of its configuration."""
        return replace(self, config=replace(self.config, **changes))

    def with_role(self, role: EngineRole) -> EngineSpec:
        return self.with_config(role=role)

    def make_algorithm(self) -> SpecAlgorithm:
        return get_algorithm(self.algorithm)

    def make_controller(self) -> AdaptiveController:
        """Build a fresh controller.

        Raises ConfigError or another ForedraftError if the specification contradicts itself.
        """
        controller = build_controller(
            self.policy,
            self.adaptive,
            initial_steps=self.initial_steps,
            cost_table=self.cost_table,
            temperatures=self.temperatures,
            topk=self.topk,
            num_draft_tokens=self.num_draft_tokens,
            depth_limited=self.make_algorithm().drafter is not Drafter.LOOKUP,
        )
        controller.init_states(self.graph_sizes)
        return controller

    def make_engine(
        self, events: EventSink = ignore, text_decoder: TextDecoder | None = None, named_slots: bool = True
    ) -> Engine:
        """Build a fresh engine.

        If the engine decodes text but has no `text_decoder`, the results must say where a stop string ended a request.
        """
        if text_decoder is None and self.decodes_text:
            text_decoder = NoTextDecoder()
        parts = (self.config, self.make_algorithm(), self.make_controller())
        return Engine(*parts, events=events, text_decoder=text_decoder, named_slots=named_slots)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads back."""
        slots = zip(self.adaptive.bounds, self.adaptive.slots, strict=True)
        written = [field.name for field in fields(self) if field.name != "temperatures" or self.temperatures]
        return {name: getattr(self, name) for name in written} | {
            "config": self.config.to_json(),
            "adaptive": {str(bound): _slot_to_json(slot) for bound, slot in slots},
            "num_draft_tokens": _nodes_to_json(self.num_draft_tokens),
            "cost_table": None if self.cost_table is None else self.cost_table.to_json(),
            "graph_sizes": None if self.graph_sizes is None else list(self.graph_sizes),
        }

    @classmethod
    def from_json(cls, value: Any, source: str) -> EngineSpec:
        """Read the object that `to_json` wrote. Raises ConfigError with `source` and every key that does not fit."""
        value = {"temperatures": (), **value} if isinstance(value, Mapping) else value
        _check_keys(value, cls, "engine", source)
        config = _config_from_json(value["config"], "engine.config", source)
        table, sizes = value["cost_table"], value["graph_sizes"]
        problems: list[Problem] = []
        nodes = read_tree_nodes(value["num_draft_tokens"], "engine.num_draft_tokens", problems)
        if problems:
            raise ConfigError(source, problems)
        try:
            adaptive, temperatures = load_adaptive_config(value["adaptive"], source), value["temperatures"]
            if temperatures:
                given = {"temperatures": temperatures}
                temperatures = load_temperatures(given, adaptive.candidate_steps[-1], source)
            spec = cls(
                **{
                    **value,
                    "config": config,
                    "adaptive": adaptive,
                    "temperatures": tuple(temperatures),
                    "num_draft_tokens": nodes,
                    "cost_table": costs_from_json(table, source),
                    "graph_sizes": None if sizes is None else tuple(sizes),
                }
            )
            spec.make_engine()  # raises the errors of contradictions now
        except ForedraftError as error:
            raise ConfigError.of(source, "engine", str(error)) from error
        except (TypeError, ValueError, AttributeError, AssertionError) as error:
            raise ConfigError.of(source, "engine", f"describes no engine: {error}") from error
        return spec


def _config_from_json(value: Any, key: str, source: str) -> EngineConfig:
    """Read what `EngineConfig.to_json` wrote."""
    values = dict(value) if isinstance(value, Mapping) else {}
    rules = rules_from_json(values, source, key)
    others = {name: one for name, one in values.items() if name not in SETTINGS}
    config = {**OMITTED, **others, "rules": rules} if isinstance(value, Mapping) else value
    _check_keys(config, EngineConfig, key, source)
    return EngineConfig(**config)


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """What a user chose of speculation. None: left open.

    `policy` defaults to "fixed", or "ema" if there is an `adaptive` table. The table defaults to the policy's preset:
    "default" for `ema`, 0 … 7 steps at every batch size for `goodput` and `confidence`. `steps` are the steps of a
    fixed policy, of every round of `confidence` without a table, or the first steps of another policy.
    `num_draft_tokens`: nodes of every tree, or a number for each step count; by default as many as its steps can fill,
    at most 16. Without speculation, steps, policy and table have no meaning. `round_times`, by which `confidence`
    chooses with fixed steps, and `confidence_temperatures` are files of SGLang or what is in them
    (`core/adaptive/lengths/interchange.py`). `source` names the choice in messages.
    """

    policy: str | None = None
    steps: int | None = None
    topk: int = 1
    num_draft_tokens: int | Mapping[str, int] | None = None
    adaptive: str | Mapping[str, Any] | None = None
    probe_backoff: bool = True
    mode: Mode | None = None
    round_times: GivenTable | None = None
    confidence_temperatures: GivenTable | None = None
    source: str = "<arguments>"


@dataclass(frozen=True, slots=True)
class BackendOffer:
    """What the executor of an engine has. `num_heads`: the most tokens that its draft proposes, if there is such a
    number; the default of `steps`, and the most steps of a preset's candidates."""

    name: str = "simulated"
    device_is_host: bool = False
    graph_sizes: Sequence[int] | None = None
    num_heads: int | None = None


LEFT_OPEN = SpeculationChoice()
SIMULATED = BackendOffer()


def resolve_spec(
    config: EngineConfig,
    algorithm: SpecAlgorithm,
    choice: SpeculationChoice = LEFT_OPEN,
    backend: BackendOffer = SIMULATED,
    read_file: ReadFile | None = None,
) -> EngineSpec:
    """Resolve what a user chose; `config` comes back with the scheduling mode and its reason. Raises ConfigError and
    other ForedraftErrors."""
    policy, steps, table = _steps_of(algorithm, choice, backend.num_heads, read_file)
    times: Costs | None = None
    temperatures: tuple[float, ...] = ()
    if policy == "confidence":
        files = choice.round_times, choice.confidence_temperatures
        times, temperatures = load_files(*files, table.candidate_steps, choice.source, read_file)
    chosen = choose_mode(
        choice.mode,
        page_size=config.page_size,
        topk=choice.topk,
        backend=backend.name,
        backend_supports_paged_trees=True,
        algorithm=algorithm.name,
        algorithm_supports_overlap=algorithm.supports_overlap,
        device_is_host=backend.device_is_host,
    )
    return EngineSpec(
        config=replace(config, overlap=chosen.mode == "overlap", mode_reason=chosen.reason),
        algorithm=algorithm.name,
        policy=policy,
        adaptive=table,
        initial_steps=steps,
        topk=choice.topk,
        num_draft_tokens=_tree_nodes(algorithm, table, choice.topk, choice.num_draft_tokens, choice.source),
        cost_table=times,
        graph_sizes=None if backend.graph_sizes is None else tuple(backend.graph_sizes),
        decodes_text=False,
        temperatures=temperatures,
    )


def _steps_of(
    algorithm: SpecAlgorithm, choice: SpeculationChoice, num_heads: int | None, read_file: ReadFile | None
) -> tuple[str, int | None, AdaptiveConfig]:
    """Return the policy, its first steps, and its table."""
    policy = choice.policy or ("fixed" if choice.adaptive is None else "ema")
    if not algorithm.is_speculative:
        return "fixed", 0, fixed_config(0)
    if policy == "confidence" and (choice.topk > 1 or algorithm.drafter is Drafter.LOOKUP):
        what = f"chains that a model drafts, not of {algorithm.name} with top-{choice.topk}"
        raise ConfigError.of(choice.source, "policy", f"confidence chooses among the drafts of {what}")
    if policy == "fixed" or (policy == "confidence" and choice.steps is not None and choice.adaptive is None):
        steps = num_heads or DEFAULT_STEPS if choice.steps is None else choice.steps
        return policy, steps, fixed_config(steps)
    preset = DEFAULT_PRESETS.get(policy, "default")
    given = preset if choice.adaptive is None else choice.adaptive
    place = f"{choice.source}.adaptive" if isinstance(given, Mapping) else None
    if choice.adaptive is None and num_heads is not None:
        given, place = _limit_candidates(PRESETS[preset], num_heads), f"preset {preset} for {num_heads} heads"
    table = load_adaptive_config(given, place, read_file)
    return policy, choice.steps, table if choice.probe_backoff or policy != "ema" else table.with_probe_backoff(False)


def _limit_candidates(preset: Mapping[str, Any], num_heads: int) -> dict[str, Any]:
    """Return a preset with `num_heads` in place of all candidates beyond it."""
    table = dict(preset)
    for bound, entry in preset.items():
        if isinstance(entry, Mapping):
            steps = sorted({min(count, num_heads) for count in entry["candidate_steps"]})
            table[bound] = {**entry, "candidate_steps": steps}
    return table


def default_graph_sizes(max_running: int) -> tuple[int, ...]:
    """Return the batch sizes to capture if the user names none; the last one holds the largest batch."""
    sizes = GRAPH_SIZES[: bisect_left(GRAPH_SIZES, max_running) + 1]
    return sizes if sizes[-1] >= max_running else (*sizes, max_running)


def _tree_nodes(
    algorithm: SpecAlgorithm, adaptive: AdaptiveConfig, topk: int, asked: int | Mapping[str, int] | None, source: str
) -> TreeNodes | None:
    """Return the nodes of verify trees for the ranges that have none of their own, or None for chains, whose nodes
    follow from the steps. Raises ConfigError with every tree that cannot be.
    """
    problems: list[Problem] = []
    given = read_tree_nodes(asked, "num_draft_tokens", problems)
    union = [steps for steps in adaptive.candidate_steps if steps > 0]
    if isinstance(given, tuple):
        idle = [steps for steps, _ in given if steps not in union]
        problems += [Problem(f"num_draft_tokens.{steps}", f"is for no candidate of {union}") for steps in idle]
    if not union:
        given = None
    elif topk > 1 and not algorithm.supports_trees:
        problems.append(Problem("topk", f"{algorithm.name} drafts no trees, so topk must be 1, got {topk}"))
    elif topk == 1:
        problems += _nodes_of_chains(adaptive, union, given)
        given = None
    else:
        default = tuple((steps, min(_most_nodes(topk, steps), DEFAULT_TREE_NODES)) for steps in union)
        if given is not None and any(slot.num_draft_tokens is not None for slot in adaptive.slots):
            problems.append(
                Problem("num_draft_tokens", "is given here and in the adaptive table; expected one of them")
            )
        for bound, slot in zip(adaptive.bounds, adaptive.slots, strict=True):
            key = "num_draft_tokens" if slot.num_draft_tokens is None else f"adaptive.{bound}.num_draft_tokens"
            for steps in filter(None, slot.candidate_steps):
                nodes, most = nodes_for(steps, slot.num_draft_tokens, given), _most_nodes(topk, steps)
                if nodes is not None and nodes > most:
                    holds = f"topk {topk} and {steps} steps hold at most {most} nodes"
                    message = f"{nodes} is beyond the tree's capacity: {holds}"
                    if isinstance(given, int) and len(union) > 1:
                        message += f"; give the nodes by steps, for example {_nodes_to_json(default)}"
                    problems.append(Problem(key, message))
        pairs = tuple((steps, nodes_for(steps, given) or nodes) for steps, nodes in default)
        given = pairs[0][1] if len({nodes for _, nodes in pairs}) == 1 else pairs
    if problems:
        raise ConfigError(source, list(dict.fromkeys(problems)))
    return given


def _nodes_of_chains(adaptive: AdaptiveConfig, steps: list[int], given: TreeNodes | None) -> list[Problem]:
    """Return the problems of nodes that were given for chains."""
    asked = dict.fromkeys([given, *(slot.num_draft_tokens for slot in adaptive.slots)])
    expected = f"expected {steps[0] + 1}" if len(steps) == 1 else "leave it out: it follows from the steps"
    return [
        Problem("num_draft_tokens", f"{_nodes_to_json(nodes)} does not suit a chain, {expected}; give topk for a tree")
        for nodes in asked
        if nodes is not None and any(nodes_for(count, nodes) not in (None, count + 1) for count in steps)
    ]


def _most_nodes(topk: int, steps: int) -> int:
    return min(tree_capacity(topk, steps) + 1, MAX_TREE_NODES)


def _nodes_to_json(nodes: TreeNodes | None) -> Any:
    return {str(steps): count for steps, count in nodes} if isinstance(nodes, tuple) else nodes


def _slot_to_json(slot: SlotConfig) -> dict[str, Any]:
    written = asdict(slot) | {"candidate_steps": list(slot.candidate_steps)}
    nodes = _nodes_to_json(slot.num_draft_tokens)
    given = {"num_draft_tokens": nodes, "probe_backoff": slot.probe_backoff}
    return {key: value for key, value in written.items() if key not in given} | {
        key: value for key, value in given.items() if value is not None
    }


def _check_keys(value: Any, kind: type, key: str, source: str) -> None:
    """Raise ConfigError unless `value` is an object with exactly the fields of the dataclass `kind`."""
    if not isinstance(value, Mapping):
        raise ConfigError.of(source, key, f"is {value!r}; expected an object")
    known = tuple(field.name for field in fields(kind))
    problems = [
        Problem(f"{key}.{name}", f"is not known{nearest(str(name), known)}") for name in value if name not in known
    ]
    problems += [Problem(f"{key}.{name}", "is missing") for name in known if name not in value]
    if problems:
        raise ConfigError(source, problems)
