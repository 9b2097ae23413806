"""The configurations that a plan compares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ...core.algorithm.registry import get_algorithm
from ...core.errors import ConfigError, ForedraftError, Problem, count_of
from ...sim.assembly import assemble
from ...sim.assembly.pools import Pool, Pools, parts_of, pools_on
from ...sim.cost.hardware import UnsupportedParallelism
from ...sim.cost.memory import InsufficientMemory
from ...sim.scenario import Scenario
from ...sim.scenario_file import check_names, refuse_keys, scenario_with
from ..grid import ALGORITHM, NO_SPECULATION, POOLS, RATIO, combinations
from .rounds import without_speculation

USUAL_ALGORITHM = "EAGLE3"
CHAIN_STEPS = (1, 2, 3, 5, 7)
TREE = {"speculation.topk": 4, "speculation.steps": 3, "speculation.num_draft_tokens": 8}
HEADS = "speculation.heads"
GPU, TENSOR_PARALLEL = "hardware.gpu", "hardware.tensor_parallel"
REPLICAS = "hardware.replicas"
USUAL_SIZES = (1, 2, 4, 8)  # of tensor parallelism
OWNED = (REPLICAS, "workload.rate", "workload.rate_scale", "workload.num_requests", "workload.trace", "seed")
"""Keys that a plan sets itself."""


@dataclass(frozen=True)
class Candidate:
    """A configuration to judge.

    Attributes:
        name: What distinguishes it from the others, in words.
        settings: The keys of the scenario that it replaces; not the number of engines.
        pools: The engines of its smallest deployment, with their hardware: of prefill and of decode, or those that do
            both. More are multiples of them.
    """

    name: str
    settings: Mapping[str, Any]
    pools: Sequence[Pool]

    @property
    def unit(self) -> int:
        """Engines of its smallest deployment."""
        return sum(pool.engines for pool in self.pools)

    @property
    def smallest(self) -> dict[str, Any]:
        """The keys of the scenario that its smallest deployment replaces."""
        return {**self.settings, REPLICAS: self.unit}

    @property
    def gpus_per_unit(self) -> int:
        return sum(pool.gpus for pool in self.pools)

    def gpus_of(self, engines: int) -> int:
        """Return the devices of so many engines, a multiple of `unit`."""
        return engines // self.unit * self.gpus_per_unit

    def engines_on(self, gpus: int) -> int:
        """Return the engines of whole deployments on so many devices, a multiple of `gpus_per_unit`."""
        return gpus // self.gpus_per_unit * self.unit

    def per_gpu(self, values: Mapping[str, float]) -> float | None:
        """Return the mean over its devices of a price, given by GPU; None if one is missing."""
        if not all(pool.gpu in values for pool in self.pools):
            return None
        total = sum(Fraction(values[pool.gpu]) * pool.gpus for pool in self.pools)  # exact where all are alike
        return float(total / self.gpus_per_unit)


def make_candidates(
    scenario: Scenario, tried: Mapping[str, Sequence[Any]], gpus: int | None, measured: Collection[str] = ()
) -> list[Candidate]:
    """Return the configurations to compare. `tried` has keys with their values; the keys that it leaves open get the
    usual values.

    Usual are plain decoding and, of the scenario's algorithm (EAGLE3 if it has none), chains of 1, 2, 3, 5, 7 drafts, a
    small tree and `goodput`. With `gpus`, each with every tensor parallelism that divides them. Without, a model that
    has no room on the scenario's GPUs gets the tensor parallelism at which it has. `measured`:
    keys with what a server measured on the scenario's GPU and tensor parallelism; candidates on others go without.
    Raises ConfigError for values that no scenario can have.
    """
    owned = [Problem(key, "is what the plan searches; it cannot be tried") for key in tried if key in OWNED]
    if owned:
        raise ConfigError("--try", owned)
    speculation = {key: values for key, values in tried.items() if key.startswith("speculation.")}
    others = {key: values for key, values in tried.items() if key not in speculation}
    has_own_sizes = TENSOR_PARALLEL in others or _pools_have_sizes(scenario, others)
    if not has_own_sizes and gpus is not None:
        others[TENSOR_PARALLEL] = [tp for tp in USUAL_SIZES if gpus % tp == 0]
    own = {f"speculation.{key}": value for key, value in scenario.speculation.model_dump(exclude_defaults=True).items()}
    algorithm = scenario.speculation.algorithm
    if speculation:
        decoding = [_complete(point, own, algorithm) for point in combinations(speculation, algorithm)]
    else:
        decoding = _usual_speculation(USUAL_ALGORITHM if algorithm == NO_SPECULATION else algorithm, own.get(HEADS))
    tables = base_tables(scenario)
    if not has_own_sizes and gpus is None and (larger := _larger_parallelism(scenario, others, decoding)):
        others[TENSOR_PARALLEL] = larger
    found = []
    problems: dict[str, Problem] = {}  # all of them, each once
    for other in combinations(others, algorithm):
        for point in decoding:
            settings = {**point, **other, **_not_measured(scenario, other, measured)}
            try:
                found.append(_candidate(_named(tables, settings), settings, list(other)))
            except ConfigError as error:
                if not all(any(f"{key}.".startswith(f"{problem.key}.") for key in tried) for problem in error.problems):
                    raise
                problems |= {str(problem): problem for problem in error.problems}
    if problems:
        raise ConfigError("--try", list(problems.values()))
    return found


def _not_measured(scenario: Scenario, other: Mapping[str, Any], measured: Collection[str]) -> dict[str, None]:
    """Return the measured keys without a value for a candidate on other devices than the scenario's."""
    hardware = scenario.hardware
    own = {GPU: hardware.gpu, TENSOR_PARALLEL: hardware.tensor_parallel}
    is_alike = all(other.get(key, value) == value for key, value in own.items())
    return {} if is_alike else {key: None for key in measured if key not in other}


def _pools_have_sizes(scenario: Scenario, tried: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether the scenario or the values to try say how many devices share a layer in one of two pools."""
    own = (scenario.hardware.prefill, scenario.hardware.decode)
    given = any(pool is not None and pool.tensor_parallel is not None for pool in own)
    return given or any(f"{pool}tensor_parallel" in tried for pool in POOLS)


def _named(tables: Mapping[str, Any], settings: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a candidate. Raises ConfigError for an impossible value, such as an unknown GPU."""
    scenario = scenario_with(tables, settings)
    check_names(scenario)
    refuse_keys(scenario, "engine.eviction_policy", "acceptance.")
    return scenario


def _larger_parallelism(
    scenario: Scenario, others: Mapping[str, Sequence[Any]], decoding: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return the tensor parallelism of a model that has no room on the scenario's GPUs: from the least with room for
    some way of decoding to the least with room for all of them; empty if there is room, or nowhere."""
    tables = base_tables(scenario)
    points = combinations({key: values for key, values in others.items() if key != RATIO}, NO_SPECULATION)
    if any(_fits(tables, point) for point in points):
        return []
    found = []
    for size in (size for size in USUAL_SIZES if size > scenario.hardware.tensor_parallel):
        fit = [[_fits(tables, {**one, **way, TENSOR_PARALLEL: size}) for way in decoding] for one in points]
        found += [size] if any(map(any, fit)) else []
        if any(map(all, fit)):
            break
    return found


def _fits(tables: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether a deployment has room for the model. Other errors do not count: they are reported where it is
    searched."""
    try:
        assemble(scenario_with(tables, {**settings, RATIO: None, REPLICAS: 1}))
    except (InsufficientMemory, UnsupportedParallelism):
        return False
    except ForedraftError:
        return True
    return True


def base_tables(scenario: Scenario) -> dict[str, Any]:
    """Return the tables that candidates replace keys of: the scenario's, with plain decoding, and with a ratio in the
    place of the numbers of prefill and decode engines."""
    tables, table = without_speculation(scenario.model_dump(mode="json")), scenario.disaggregation
    if table.prefill and table.decode and table.ratio is None:
        tables["disaggregation"] |= {"prefill": 0, "decode": 0, "ratio": f"{table.prefill}:{table.decode}"}
    return tables


def _complete(point: Mapping[str, Any], own: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Return a combination, completed with the scenario's own keys of speculation."""
    if point.get(ALGORITHM, algorithm) == NO_SPECULATION:
        return {ALGORITHM: NO_SPECULATION}
    whole = {ALGORITHM: algorithm, **own, **point}
    if "speculation.steps" in point and not {"speculation.policy", "speculation.adaptive"} & set(point):
        whole.pop("speculation.adaptive", None)
        whole["speculation.policy"] = "fixed"
    return whole


def _usual_speculation(algorithm: str, heads: int | None) -> list[dict[str, Any]]:
    spoken = {ALGORITHM: algorithm} | ({HEADS: heads} if heads is not None else {})
    fixed = {**spoken, "speculation.policy": "fixed"}
    chains = [{**fixed, "speculation.steps": steps} for steps in CHAIN_STEPS]
    adaptive = {**spoken, "speculation.policy": "goodput"}
    return [{ALGORITHM: NO_SPECULATION}, *chains, {**fixed, **TREE}, adaptive]


def _candidate(scenario: Scenario, settings: Mapping[str, Any], named: Sequence[str]) -> Candidate:
    table = scenario.speculation
    if table.algorithm == NO_SPECULATION:
        words = ["plain decoding"]
    else:
        words = [table.algorithm]
        if table.policy == "fixed" and table.steps is not None:
            is_resting = table.steps == 0 and get_algorithm(table.algorithm).draft_form is not None
            words.append("draft loaded, not used" if is_resting else count_of(table.steps, "step"))
        else:
            words.append(table.policy)
        if table.topk > 1:
            words.append(f"top-{table.topk}")
            if table.num_draft_tokens is not None:
                words.append(f"{table.num_draft_tokens} nodes")
    words += [f"{_short(key)} {'none' if settings[key] is None else settings[key]}" for key in named]
    ratio = scenario.disaggregation.ratio
    pools = Pools(*parts_of(ratio), 0) if ratio else Pools(num_both=1)
    return Candidate(", ".join(words), settings, pools_on(scenario.hardware, pools))


def _short(key: str) -> str:
    """Return a key in words, without its table: "tensor_parallel", and "prefill gpu" of a pool."""
    *tables, name = key.split(".")
    return " ".join([*tables[1:], name])
