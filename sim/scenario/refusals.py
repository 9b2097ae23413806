"""When a key of a scenario cannot be as it is: the conditions that the keys name (`RefusedIf`).

A condition takes the scenario, the dotted key, and what its declaration needs. It returns what is wrong with the key,
or None if nothing is.
"""

from __future__ import annotations

import re
from typing import Any

from ...core.acceptance.tree import MAX_DEPTH
from ...core.kv.eviction import unknown_policy

CURVE_RATES = 2  # at least: where a curve begins and where it ends
SOURCES_OF_ACCEPTANCE = ("preset", "conditional", "mean_length", "recorded")
NEEDED_LENGTHS = {"fixed": ("value",), "uniform": ("high",), "lognormal": ("mean", "sigma"), "empirical": ("values",)}


def beyond_the_positions(scenario: Any, key: str, target: Any) -> str | None:
    asked = scenario.model.context_len
    if asked is None or asked <= target.max_context:
        return None
    return f"{asked} is beyond the {target.max_context} positions of {target.name}"


def too_deep_for_trees(scenario: Any, key: str, spec: Any) -> str | None:
    """Trees of more steps have no acceptance but a recorded one."""
    if spec.topk == 1 or spec.policy == "fixed" or scenario.acceptance.recorded is not None:
        return None
    deepest = max(spec.adaptive.candidate_steps)
    if deepest <= MAX_DEPTH:
        return None
    return f"has a candidate of {deepest} steps; expected at most {MAX_DEPTH} with topk {spec.topk}"


def chains_alone_are_drawn(scenario: Any, key: str, spec: Any) -> str | None:
    rule = scenario.speculation.accept_rule
    if rule == "target" or spec.topk == 1:
        return None
    return f"{rule} verifies chains, and with topk {spec.topk} drafts are trees; expected target"


def rule_does_not_follow(scenario: Any, key: str) -> str | None:
    """Of other pairs than rejection and block, what one keeps does not follow from what the other keeps."""
    of, rule = scenario.acceptance.of_rule, scenario.speculation.accept_rule
    if of in (None, rule):
        return None
    if (of, rule) != ("rejection", "block"):
        return f"is {of}: what {rule} keeps does not follow from it; give the acceptance of {rule}"
    if scenario.acceptance.recorded is not None:
        return f"is {of}: what {rule} keeps does not follow from recorded runs; give acceptance.conditional"
    return None


def budgets_are_of_the_head(scenario: Any, key: str) -> str | None:
    """In a round with a budget the head drafts for all rows."""
    share = scenario.acceptance.look_up_share
    if not share or scenario.speculation.policy != "confidence":
        return None
    return f"is {share:g}: with the policy confidence all rows draft by the head; expected 0"


def acceptance_is_given(scenario: Any, key: str) -> str | None:
    """The first key that is given decides, in the order of the table."""
    given = [name for name in SOURCES_OF_ACCEPTANCE if getattr(scenario.acceptance, name) is not None]
    if key.rpartition(".")[2] not in given[1:]:
        return None
    return f"contradicts {given[0]}: give one of them"


# -- engine -----------------------------------------------------------------------------------------------------------


def steps_do_not_tell_memory(scenario: Any, key: str, calibration: Any) -> str | None:
    if calibration.steps is None or scenario.engine.kv_slots is not None:
        return None
    return "is not given; a profile of measured steps does not say how much memory the device has"


def no_host_memory(scenario: Any, key: str) -> str | None:
    """Host memory is behind the prefix cache of engines that prefill and decode, and is given once."""
    engine = scenario.engine
    sizes = {"engine.host_cache_gb": engine.host_cache_gb, "engine.host_cache_ratio": engine.host_cache_ratio}
    given = [name for name, size in sizes.items() if size is not None]
    if key not in given[:1]:
        return None
    if len(given) > 1:
        return f"and {given[1]} are given: expected one of them"
    if not engine.prefix_cache:
        return "is host memory behind the prefix cache, and engine.prefix_cache is false"
    table = scenario.disaggregation
    is_disaggregated = table.prefill or table.decode or table.ratio is not None
    return "is not modelled with disaggregation" if is_disaggregated else None


def no_such_eviction(scenario: Any, key: str) -> str | None:
    given = scenario.engine.eviction_policy
    unknown = None if given is None else unknown_policy(given)
    return None if unknown is None else unknown.message


# -- workload ---------------------------------------------------------------------------------------------------------


def no_curve(scenario: Any, key: str) -> str | None:
    table = scenario.workload
    is_used = table.arrivals == "curve" and table.trace is None and table.concurrency is None
    if not is_used or (table.curve is not None and len(table.curve) >= CURVE_RATES and any(table.curve)):
        return None
    return "is missing; arrivals of the kind curve need two rates at least, one of them above 0"


def length_needs_it(scenario: Any, key: str) -> str | None:
    table, length, name = key.split(".")
    given = getattr(getattr(scenario, table), length)
    is_used = scenario.workload.trace is None and name in NEEDED_LENGTHS[given.kind]
    return f"is missing; a {given.kind} length needs it" if is_used and getattr(given, name) is None else None


# -- pools of prefill and decode engines ------------------------------------------------------------------------------

RATIO = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,3})", re.ASCII)
UNLIKE = "and the pools have unlike hardware (hardware.prefill, hardware.decode)"


def parts_of(ratio: str) -> tuple[int, int] | None:
    """Return P and D of a ratio P:D; None for another text."""
    match = RATIO.fullmatch(ratio)
    return None if match is None else (int(match[1]), int(match[2]))


def no_ratio(text: str) -> str:
    return f"{text!r} is no P:D; expected two numbers of 1 or more, such as 2:1"


def ratio_does_not_divide(scenario: Any, key: str) -> str | None:
    table, replicas = scenario.disaggregation, scenario.hardware.replicas
    if table.ratio is None:
        return None
    if table.prefill or table.decode:
        return f"{table.ratio!r} contradicts prefill = {table.prefill}, decode = {table.decode}: give one of them"
    parts = parts_of(table.ratio)
    if parts is None:
        return no_ratio(table.ratio)
    if replicas % sum(parts) == 0:
        return None
    return f"{table.ratio} does not divide {replicas} replicas; hardware.replicas must be a multiple of {sum(parts)}"


def pool_has_no_engine(scenario: Any, key: str) -> str | None:
    table, name = scenario.disaggregation, key.rpartition(".")[2]
    is_other_given = (table.decode if name == "prefill" else table.prefill) > 0
    if table.ratio is not None or getattr(table, name) or not is_other_given:
        return None
    return f"0 engines for {name}: each of the two pools needs at least 1"


def replicas_are_not_those_of_the_pools(scenario: Any, key: str) -> str | None:
    table, replicas = scenario.disaggregation, scenario.hardware.replicas
    are_given = table.ratio is None and table.prefill and table.decode
    if not are_given or replicas in (1, table.prefill + table.decode):
        return None
    return f"{replicas} contradicts {table.prefill} prefill and {table.decode} decode engines; leave it out"


def unlike_pools_keep_their_roles(scenario: Any, key: str, unlike: Any) -> str | None:
    return None if scenario.disaggregation.rebalance_s is None else f"lets engines change their role, {UNLIKE}"


def unlike_pools_have_no_steps(scenario: Any, key: str, unlike: Any) -> str | None:
    is_measured = unlike.calibration is not None and unlike.calibration.steps is not None
    return f"has steps that were measured on one device, {UNLIKE}" if is_measured else None


def hold_is_no_longer_than_the_lease(scenario: Any, key: str) -> str | None:
    table = scenario.disaggregation
    if round(table.hold_s * 1e9) > round(table.lease_s * 1e9):
        return None
    return f"{table.hold_s:g} must be more than lease_s, which is {table.lease_s:g}"
