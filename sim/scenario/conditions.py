"""When a run does not use a key: the conditions that the keys of a scenario name (`NoEffect`).

A condition takes the run (`Assembly` of `sim/assembly`, which is made of a scenario) and the dotted key. It returns why
the run does not use the key, or None if it does.
"""

from __future__ import annotations

from typing import Any

from ...core.algorithm.algorithm import Drafter
from ...core.errors import count_of
from ...core.scheduler.rules import settings_of
from ..cost.draft import EAGLE3, P_EAGLE
from ..cost.executor_steps import StepCost
from ..cost.hardware import CUSTOM
from ..cost.memory.rules import rules_of

# -- speculation and acceptance ---------------------------------------------------------------------------------------


def drafts_in_no_round(run: Any) -> bool:
    """Return whether no round of the run has a draft."""
    return bool(run.spec.max_steps == 0)


def not_speculative(run: Any, key: str) -> str | None:
    return None if run.algorithm.is_speculative else f"{run.algorithm.name} drafts nothing"


def zero_steps(run: Any, key: str) -> str | None:
    return "0 steps draft nothing" if run.algorithm.is_speculative and drafts_in_no_round(run) else None


def policy_is_fixed(run: Any, key: str) -> str | None:
    if not run.algorithm.is_speculative or run.spec.policy != "fixed":
        return None
    return "the fixed policy takes speculation.steps in every round; the policies ema and goodput choose by a table"


def policy_is_not_ema(run: Any, key: str) -> str | None:
    policy = run.spec.policy
    return None if policy == "ema" else f"the policy {policy} does not try drafts so, as ema does"


def policy_is_not_confidence(run: Any, key: str) -> str | None:
    return None if run.spec.policy == "confidence" else f"the policy {run.spec.policy} makes no use of confidences"


def nothing_to_choose(run: Any, key: str) -> str | None:
    is_confident = run.spec.policy == "confidence" and run.spec.max_steps > 0
    if (
        run.spec.policy == "fixed"
        or is_confident
        or any(len(slot.candidate_steps) > 1 for slot in run.spec.adaptive.slots)
    ):
        return None
    return f"every range of {run.spec.adaptive.source} has one candidate, so there is nothing to choose"


def no_heads(run: Any, key: str) -> str | None:
    if not run.algorithm.is_speculative or run.algorithm.drafter is Drafter.HEADS:
        return None
    return f"{run.algorithm.name} has not one head per step, as MULTI_LAYER_EAGLE has"


def only_chains_are_shortened(run: Any, key: str) -> str | None:
    return None if run.spec.topk == 1 else "rows of trees (speculation.topk above 1) verify all nodes"


def rounds_were_measured(run: Any, key: str) -> str | None:
    measured = "the steps of the profile (hardware.profile) were measured with all nodes of every row"
    return measured if isinstance(run.cost, StepCost) else None


def no_draft_model(run: Any, key: str) -> str | None:
    has_draft = run.draft is not None and not run.draft.on_host
    return None if has_draft else f"{run.algorithm.name} has no draft of its own"


def no_draft_vocabulary(run: Any, key: str) -> str | None:
    if run.draft is not None and run.draft.algorithm in (EAGLE3, P_EAGLE):
        is_read = run.scenario.model.draft is not None and run.draft.unknown is None
        return f"the vocabulary is that of {run.draft.source}" if is_read else None
    return f"{run.algorithm.name} has no vocabulary of its own, as EAGLE3 has"


def drafts_nothing(run: Any, key: str) -> str | None:
    return "nothing is drafted, so nothing is accepted" if drafts_in_no_round(run) else None


def recording_decides(run: Any, key: str) -> str | None:
    is_recorded = run.scenario.acceptance.recorded is not None
    return "the recording (acceptance.recorded) decides what a round accepts" if is_recorded else None


def rounds_are_too_short(run: Any, key: str) -> str | None:
    asked, steps = run.scenario.acceptance.mean_length, run.spec.max_steps
    longest = run.algorithm.accept_width(steps, run.spec.max_num_draft_tokens)
    if asked is None or asked <= longest:
        return None
    return f"a round of {count_of(steps, 'draft step')} gives at most {count_of(longest, 'token')}, the bonus token included"


def look_ups_are_not_drawn(run: Any, key: str) -> str | None:
    if not run.algorithm.has_look_ups:
        return None
    return f"{run.algorithm.name} has drafts of look-ups, which are not drawn: all rules keep the same of them"


def look_ups_are_alone_or_none(run: Any, key: str) -> str | None:
    if run.algorithm.looks_up_beside_a_draft:
        return None
    return f"{run.algorithm.name} has no look-ups beside a head, as HYBRID has"


def nothing_is_looked_up(run: Any, key: str) -> str | None:
    return None if run.scenario.acceptance.look_up_share else "acceptance.look_up_share is 0"


def acceptance_is_of_the_rule(run: Any, key: str) -> str | None:
    rule = run.scenario.speculation.accept_rule
    if run.scenario.acceptance.of_rule not in (None, rule):
        return None
    return f"the acceptance is that of the rule {rule} itself (acceptance.of_rule)"


def ranks_are_unused(run: Any, key: str) -> str | None:
    if run.spec.topk == 1 or not run.algorithm.supports_trees:
        return "a chain has no candidates below the first rank (speculation.topk is 1)"
    return recording_decides(run, key)


# -- hardware ---------------------------------------------------------------------------------------------------------


def kv_slots_are_given(run: Any, key: str) -> str | None:
    return None if run.scenario.engine.kv_slots is None else "engine.kv_slots gives the size of the pool"


def kv_is_given(run: Any, key: str) -> str | None:
    if (reason := kv_slots_are_given(run, key)) is not None:
        return reason
    if run.scenario.hardware.free_fraction is not None:
        return "hardware.free_fraction says what KV may have"
    return None if run.scenario.hardware.kv_gb is None else "hardware.kv_gb is the memory of KV"


def no_pool_of_windows(run: Any, key: str) -> str | None:
    has_pool = run.memory is not None and run.memory.window_slot_bytes
    return None if has_pool else "layers with a window have no pool of their own"


def no_pool_of_states(run: Any, key: str) -> str | None:
    has_pool = run.deployment.server.kv_layout == "shares" and run.target.recurrent_state_bytes
    return None if has_pool else "recurrent states have no pool in proportion to that of KV"


def no_flashinfer(run: Any, key: str) -> str | None:
    release, rules = run.scenario.hardware.release, run.deployment.server.memory
    has_choice = release is not None and rules_of(release, rules).flashinfer_bytes is not None
    return None if has_choice else "only releases of vLLM until 0.11.0 sample so (hardware.release)"


def states_are_counted(run: Any, key: str) -> str | None:
    return None if run.scenario.hardware.state_slots is None else "hardware.state_slots is their number"


def no_states(run: Any, key: str) -> str | None:
    return None if run.target.recurrent_state_bytes else f"{run.target.name} has no recurrent layers"


def one_rule_of_memory(run: Any, key: str) -> str | None:
    server = run.deployment.server
    return None if len(server.memory) > 1 else f"all releases of {server.name} take memory by one rule here"


def static_fraction_is_given(run: Any, key: str) -> str | None:
    return None if run.scenario.hardware.static_fraction is None else "hardware.static_fraction says it"


def experts_have_no_price(run: Any, key: str) -> str | None:
    if isinstance(run.cost, StepCost):
        return "the steps of the profile (hardware.profile) were measured"
    return None if run.cost.has_experts else f"{run.target.name} has no experts"


def no_experts(run: Any, key: str) -> str | None:
    return None if run.target.moe_layers else f"{run.target.name} has no experts"


def kernels_are_not_measured(run: Any, key: str) -> str | None:
    if all(part.not_measured is not None for part in run.by_role.values()):
        return f"the roofline prices the passes: {run.not_measured}"
    return "hardware.kernels is roofline" if run.scenario.hardware.kernels == "roofline" else None


def no_graphs(run: Any, key: str) -> str | None:
    if run.deployment.graphs is not None:
        return None
    return "hardware.cuda_graphs is false" if run.algorithm.captures_rounds else f"{run.algorithm.name} captures none"


def on_one_node(run: Any, key: str) -> str | None:
    deployments = [part.deployment for part in run.by_role.values()]
    if all(one.parallel.devices <= min(one.gpu.per_node, one.parallel.gpus_per_node) for one in deployments):
        return "a replica's devices are on one node"
    return None


def pools_have_their_own(run: Any, key: str) -> str | None:
    name = key.rpartition(".")[2]
    pools = [run.scenario.hardware.prefill, run.scenario.hardware.decode]
    if run.pools.is_disaggregated and all(own is not None and getattr(own, name) is not None for own in pools):
        return f"hardware.prefill.{name} and hardware.decode.{name} replace it"
    return None


def another_gpu(run: Any, key: str) -> str | None:
    gpus = list(dict.fromkeys(part.deployment.gpu.name for part in run.by_role.values()))
    return None if CUSTOM in gpus else f"hardware.gpu is {' and '.join(gpus)}"


def chunks_are_tokens(run: Any, key: str) -> str | None:
    return "front_end.stream_interval is 1" if run.deployment.front_end.stream_interval == 1 else None


# -- engine -----------------------------------------------------------------------------------------------------------


def mode_fell_back(run: Any, key: str) -> str | None:
    config, asked = run.spec.config, run.scenario.engine.mode or run.deployment.server.mode
    return None if config.mode == asked else config.mode_reason


def content_is_unknown(run: Any, key: str) -> str | None:
    if run.clients_are_outside or run.scenario.workload.contents_are_known:
        return None
    return (
        "what the prompts contain is unknown (no workload.prefixes, no hash_ids in the trace), so none is found again"
    )


def eviction_is_unused(run: Any, key: str) -> str | None:
    return content_is_unknown(run, key) if run.scenario.engine.prefix_cache else "engine.prefix_cache is false"


def rules_have_no_such_setting(run: Any, key: str) -> str | None:
    if key.rpartition(".")[2] in settings_of(run.spec.config.rules):
        return None
    return f"the rules of hardware.server = {run.deployment.server.name} have no such setting"


def outputs_are_guaranteed(run: Any, key: str) -> str | None:
    share = run.spec.config.rules.guarantee_output
    return f"outputs are guaranteed instead (engine.guarantee_output is {share:g})" if share else None


def no_output_is_guaranteed(run: Any, key: str) -> str | None:
    is_guaranteed = run.spec.config.rules.guarantee_output
    return None if is_guaranteed else "no output is guaranteed (engine.guarantee_output is 0)"


def share_does_not_fall(run: Any, key: str) -> str | None:
    stays = settings_of(run.spec.config.rules).get("guarantee_floor") == 1
    return "the share does not fall (engine.guarantee_floor is 1)" if stays else None


def requests_never_wait(run: Any, key: str) -> str | None:
    """Requests wait for others only if both numbers are above 0."""
    (other,) = {"batch_wait_rounds", "batch_wait_tokens"} - {key.rpartition(".")[2]}
    return None if settings_of(run.spec.config.rules).get(other) else f"engine.{other} is 0"


def priorities_are_equal(run: Any, key: str) -> str | None:
    table = run.scenario.workload
    if run.clients_are_outside or (table.trace is None and 0 < table.urgent_share < 1):
        return None
    return "all requests have the same priority (workload.urgent_share)"


# -- workload and clients ---------------------------------------------------------------------------------------------


def _has_trace(run: Any) -> bool:
    return run.scenario.workload.trace is not None


def _is_closed(run: Any) -> bool:
    return run.scenario.workload.concurrency is not None


def requests_are_of_the_trace(run: Any, key: str) -> str | None:
    return "the requests and their times are those of the trace (workload.trace)" if _has_trace(run) else None


def requests_are_synthetic(run: Any, key: str) -> str | None:
    return None if _has_trace(run) else "the requests are synthetic, only a trace (workload.trace) has it"


def clients_are_closed(run: Any, key: str) -> str | None:
    if not _is_closed(run) or _has_trace(run):
        return None
    return "the clients of a closed loop (workload.concurrency) send when their last request has ended"


def clients_of_a_trace_are_closed(run: Any, key: str) -> str | None:
    if not (_is_closed(run) and _has_trace(run)):
        return None
    return (
        "the clients of a closed loop (workload.concurrency) send when their last request has ended, not at the "
        "trace's times"
    )


def arrivals_are_others(run: Any, key: str, *kinds: str) -> str | None:
    arrivals = run.scenario.workload.arrivals
    if _has_trace(run) or _is_closed(run) or arrivals in kinds:
        return None
    return f"arrivals are {arrivals}; it belongs to {', '.join(kinds)} (workload.arrivals)"


def length_has_no_bounds(run: Any, key: str) -> str | None:
    kind = getattr(run.scenario.workload, key.split(".")[1]).kind
    return f"a {kind} length has no bounds" if not _has_trace(run) and kind in ("fixed", "empirical") else None


def one_group(run: Any, key: str) -> str | None:
    prefixes = run.scenario.workload.prefixes
    if _has_trace(run) or prefixes is None or prefixes.groups > 1:
        return None
    return "there is one group (workload.prefixes.groups)"


def cap_is_beyond_the_context(run: Any, key: str) -> str | None:
    cap, context = run.scenario.workload.max_tokens, run.spec.config.context_len
    return f"a context has {context} tokens" if isinstance(cap, int) and cap >= context else None


def no_client_leaves(run: Any, key: str) -> str | None:
    return "no client leaves (clients.cancel_share is 0)" if run.scenario.clients.cancel_share == 0 else None


# -- routers and pools ------------------------------------------------------------------------------------------------


def _not_prefix_aware(run: Any, policy: str) -> str | None:
    if policy != "prefix_aware":
        return None
    if not run.scenario.engine.prefix_cache:
        return "there is no prefix cache to look for (engine.prefix_cache is false), so only the tokens that wait are weighed"
    if run.clients_are_outside or run.scenario.workload.contents_are_known:
        return None
    return "prompts without block hashes (workload.prefixes, hash_ids of the trace) go to the least loaded engine"


def router_is_unused(run: Any, key: str) -> str | None:
    if run.pools.is_disaggregated:
        return "prefill and decode engines are chosen by disaggregation.prefill_policy and decode_policy"
    if run.pools.num_engines == 1:
        return "there is one engine (hardware.replicas)"
    return _not_prefix_aware(run, run.scenario.router.policy)


def not_disaggregated(run: Any, key: str) -> str | None:
    if run.pools.is_disaggregated:
        return None
    return "every engine does all of a request; disaggregation.prefill and decode, or ratio, divide them"


def pool_policy_is_unused(run: Any, key: str) -> str | None:
    side = key.rpartition(".")[2].removesuffix("_policy")
    table = run.scenario.disaggregation
    if run.pools.is_disaggregated and getattr(run.pools, f"num_{side}") == 1 and table.rebalance_s is None:
        return f"there is one {side} engine"
    return _not_prefix_aware(run, getattr(table, f"{side}_policy")) if run.pools.is_disaggregated else None
