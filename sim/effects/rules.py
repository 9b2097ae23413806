"""When a run does not use a key of its scenario: a table of rules, each with its keys and the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.algorithm.algorithm import Drafter
from ...core.errors import count_of
from ..assembly import Assembly
from ..cost.draft import EAGLE3
from ..cost.executor_steps import StepCost
from ..load import contents_are_known
from ..scenario import PoolHardware

ARRIVALS = ("arrivals", "rate", "amplitude", "curve", "period_s", "burstiness")

HARDWARE = ("hardware", "hardware.prefill", "hardware.decode")

Reason = Callable[[Assembly], str | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """When `keys` have no effect: `reason` returns why, or None if they have one. A key that ends with a dot means the
    whole table.

    `agreeing` are values that describe what the run does anyway, so they are no mistake. With `tells_agreement` such a
    value of the command line is told, because who gives it expects a difference (`given_keys.said_anyway`). `outcome`
    is the message's text about the key.
    """

    keys: tuple[str, ...]
    reason: Reason
    agreeing: Mapping[str, Any] = field(default_factory=dict)
    outcome: str = "has no effect"
    tells_agreement: bool = False

    def agrees(self, key: str, value: Any) -> bool:
        """Return whether the run does what this value says even without it."""
        return key in self.agreeing and self.agreeing[key] == value

    def concerns(self, key: str, value: Any) -> bool:
        if self.agrees(key, value):
            return False
        return any(key.startswith(mine) if mine.endswith(".") else key == mine for mine in self.keys)


def _keys(table: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{table}.{name}" for name in names)


def _when(condition: Callable[[Assembly], bool], reason: str) -> Reason:
    return lambda run: reason.format(run=run, scenario=run.scenario) if condition(run) else None


def drafts_nothing(run: Assembly) -> bool:
    """Return whether no round of the run has a draft."""
    return run.spec.max_steps == 0


def _has_trace(run: Assembly) -> bool:
    return run.scenario.workload.trace is not None


def _is_closed(run: Assembly) -> bool:
    return run.scenario.workload.concurrency is not None


def _arrivals_are(*kinds: str) -> Callable[[Assembly], bool]:
    return lambda run: run.scenario.workload.arrivals in kinds


def _arrivals_are_others(*kinds: str) -> Callable[[Assembly], bool]:
    return lambda run: not (_has_trace(run) or _is_closed(run) or _arrivals_are(*kinds)(run))


def _length_is_unbounded(part: str) -> Callable[[Assembly], bool]:
    return lambda run: not _has_trace(run) and getattr(run.scenario.workload, part).kind in ("fixed", "empirical")


def _not(condition: Callable[[Assembly], bool]) -> Callable[[Assembly], bool]:
    return lambda run: not condition(run)


def _acceptance_of_its_own(run: Assembly) -> str | None:
    is_recorded = run.scenario.acceptance.recorded is not None
    return "the recording (acceptance.recorded) decides what a round accepts" if is_recorded else None


def _rounds_are_too_short(run: Assembly) -> str | None:
    asked, steps = run.scenario.acceptance.mean_length, run.spec.max_steps
    longest = run.algorithm.accept_width(steps, run.spec.max_num_draft_tokens)
    if asked is None or asked <= longest:
        return None
    return f"a round of {count_of(steps, 'draft step')} gives at most {count_of(longest, 'token')}, the bonus token included"


def _ranks_are_unused(run: Assembly) -> str | None:
    if run.spec.topk == 1 or not run.algorithm.supports_trees:
        return "a chain has no candidates below the first rank (speculation.topk is 1)"
    return _acceptance_of_its_own(run)


def _nothing_to_choose(run: Assembly) -> str | None:
    if run.spec.policy == "fixed" or any(len(slot.candidate_steps) > 1 for slot in run.spec.adaptive.slots):
        return None
    return f"every range of {run.spec.adaptive.source} has one candidate, so there is nothing to choose"


def _content_is_unknown(run: Assembly) -> str | None:
    if run.clients_are_outside or contents_are_known(run.scenario):
        return None
    return (
        "what the prompts contain is unknown (no workload.prefixes, no hash_ids in the trace), so none is found again"
    )


def _not_prefix_aware(run: Assembly, policy: str) -> str | None:
    if policy != "prefix_aware":
        return None
    if not run.scenario.engine.prefix_cache:
        return "there is no prefix cache to look for (engine.prefix_cache is false), so only the tokens that wait are weighed"
    if run.clients_are_outside or contents_are_known(run.scenario):
        return None
    return "prompts without block hashes (workload.prefixes, hash_ids of the trace) go to the least loaded engine"


def _router_is_unused(run: Assembly) -> str | None:
    if run.pools.is_disaggregated:
        return "prefill and decode engines are chosen by disaggregation.prefill_policy and decode_policy"
    if run.pools.num_engines == 1:
        return "there is one engine (hardware.replicas)"
    return _not_prefix_aware(run, run.scenario.router.policy)


def _pool_policy_is_unused(side: str) -> Reason:
    def reason(run: Assembly) -> str | None:
        if not run.pools.is_disaggregated:
            return None  # told for the whole table
        table = run.scenario.disaggregation
        if getattr(run.pools, f"num_{side}") == 1 and table.rebalance_s is None:
            return f"there is one {side} engine"
        return _not_prefix_aware(run, getattr(table, f"{side}_policy"))

    return reason


def _pools_have_their_own(key: str) -> Reason:
    def reason(run: Assembly) -> str | None:
        pools = [run.scenario.hardware.prefill, run.scenario.hardware.decode]
        if run.pools.is_disaggregated and all(own is not None and getattr(own, key) is not None for own in pools):
            return f"hardware.prefill.{key} and hardware.decode.{key} replace it"
        return None

    return reason


def _is_on_one_node(run: Assembly) -> bool:
    deployments = [part.deployment for part in run.by_role.values()]
    return all(one.parallel.devices <= min(one.gpu.per_node, one.parallel.gpus_per_node) for one in deployments)


def _priorities_are_equal(run: Assembly) -> str | None:
    table = run.scenario.workload
    if run.clients_are_outside or (table.trace is None and 0 < table.urgent_share < 1):
        return None
    return "all requests have the same priority (workload.urgent_share)"


def _eviction_is_unused(run: Assembly) -> str | None:
    return _content_is_unknown(run) if run.scenario.engine.prefix_cache else "engine.prefix_cache is false"


def _kernels_are_not_measured(run: Assembly) -> str | None:
    if all(part.not_measured is not None for part in run.by_role.values()):
        return f"the roofline prices the passes: {run.not_measured}"
    return "hardware.kernels is roofline" if run.scenario.hardware.kernels == "roofline" else None


def _experts_have_no_price(run: Assembly) -> str | None:
    if isinstance(run.cost, StepCost):
        return "the steps of the profile (hardware.profile) were measured"
    return None if run.cost.has_experts else f"{run.target.name} has no experts"


def mode_fell_back(run: Assembly) -> str | None:
    """Return why the run has another mode than the scenario asks for; None if it has that mode."""
    config, asked = run.spec.config, run.scenario.engine.mode or run.deployment.server.mode
    return None if config.mode == asked else config.mode_reason


def _cap_is_beyond_the_context(run: Assembly) -> str | None:
    cap, context = run.scenario.workload.max_tokens, run.spec.config.context_len
    return f"a context has {context} tokens" if isinstance(cap, int) and cap >= context else None


RULES: tuple[Rule, ...] = (
    # -- speculation ---------------------------------------------------------------------------------------------------
    Rule(
        _keys("speculation", "policy", "steps", "topk", "num_draft_tokens", "adaptive", "heads"),
        _when(lambda run: not run.algorithm.is_speculative, "{run.algorithm.name} drafts nothing"),
        {"speculation.policy": "fixed", "speculation.steps": 0, "speculation.topk": 1},
    ),
    Rule(
        _keys("speculation", "topk", "num_draft_tokens"),
        _when(lambda run: run.algorithm.is_speculative and drafts_nothing(run), "0 steps draft nothing"),
        {"speculation.topk": 1, "speculation.num_draft_tokens": 1},
    ),
    Rule(
        ("speculation.adaptive",),
        _when(
            lambda run: run.algorithm.is_speculative and run.spec.policy == "fixed",
            "the fixed policy takes speculation.steps in every round; the policies ema and goodput choose by a table",
        ),
    ),
    Rule(("speculation.policy",), _nothing_to_choose),
    Rule(
        ("speculation.heads",),
        _when(
            lambda run: run.algorithm.is_speculative and run.algorithm.drafter is not Drafter.HEADS,
            "{run.algorithm.name} has not one head per step, as MULTI_LAYER_EAGLE has",
        ),
    ),
    Rule(
        ("model.draft",),
        _when(
            lambda run: run.algorithm.drafter is not Drafter.MODEL,
            "{run.algorithm.name} has no draft model, as STANDALONE has",
        ),
    ),
    Rule(("model.expert_independence",), _experts_have_no_price),
    Rule(
        ("model.draft_vocab",),
        _when(
            lambda run: run.draft is None or run.draft.algorithm != EAGLE3,
            "{run.algorithm.name} has no vocabulary of its own, as EAGLE3 has",
        ),
    ),
    # -- acceptance ----------------------------------------------------------------------------------------------------
    Rule(("acceptance.",), _when(drafts_nothing, "nothing is drafted, so nothing is accepted")),
    Rule(
        (
            *_keys("acceptance", "request_share", "field_share", "correlation_len", "drift_per_1k_tokens"),
            *_keys("acceptance", "day_amplitude", "regimes."),
        ),
        _acceptance_of_its_own,
    ),
    Rule(("acceptance.mean_length",), _rounds_are_too_short, outcome="is not reached"),
    Rule(("acceptance.rank_ratio",), _ranks_are_unused),
    # -- hardware and engine -------------------------------------------------------------------------------------------
    Rule(
        ("hardware.reserved_fraction", "hardware.static_fraction", "hardware.free_fraction", "hardware.kv_gb"),
        _when(lambda run: run.scenario.engine.kv_slots is not None, "engine.kv_slots gives the size of the pool"),
    ),
    Rule(
        ("hardware.reserved_fraction", "hardware.static_fraction"),
        _when(
            lambda run: run.scenario.hardware.free_fraction is not None, "hardware.free_fraction says what KV may have"
        ),
    ),
    Rule(
        ("hardware.reserved_fraction", "hardware.static_fraction"),
        _when(lambda run: run.scenario.hardware.kv_gb is not None, "hardware.kv_gb is the memory of KV"),
    ),
    Rule(
        ("hardware.reserved_fraction",),
        _when(lambda run: run.scenario.hardware.static_fraction is not None, "hardware.static_fraction says it"),
    ),
    Rule(("hardware.kernels_of",), _kernels_are_not_measured),
    *(
        Rule((f"hardware.{key}", f"disaggregation.{key}"), _pools_have_their_own(key))
        for key in PoolHardware.model_fields
    ),
    Rule(
        tuple(f"{table}.expert_parallel" for table in HARDWARE),
        _when(lambda run: not run.target.moe_layers, "{run.target.name} has no experts"),
        {f"{table}.expert_parallel": 1 for table in HARDWARE},
    ),
    Rule(
        tuple(f"{table}.gpus_per_node" for table in HARDWARE),
        _when(_is_on_one_node, "a replica's devices are on one node"),
    ),
    Rule(
        ("hardware.graph_sizes", "hardware.graph_unit", "hardware.piecewise_graphs"),
        _when(lambda run: run.deployment.graphs is None, "hardware.cuda_graphs is false"),
    ),
    Rule(("engine.mode",), mode_fell_back),
    Rule(("engine.prefix_cache",), _content_is_unknown, {"engine.prefix_cache": False}, tells_agreement=True),
    Rule(_keys("engine", "eviction_policy", "cached_at", "cache_retracted"), _eviction_is_unused),
    Rule(
        _keys("engine", "admit_with", "watermark"),
        _when(
            lambda run: bool(run.spec.config.guarantee_output),
            "outputs are guaranteed instead (engine.guarantee_output is {run.spec.config.guarantee_output:g})",
        ),
    ),
    Rule(
        _keys("engine", "late_tokens", "sure_ends"),
        _when(lambda run: not run.spec.config.overlap, "no step is in flight when the next one is planned"),
        {"engine.late_tokens": "dropped", "engine.sure_ends": "run"},
    ),
    Rule(("engine.lone_token",), _when(drafts_nothing, "nothing is drafted"), {"engine.lone_token": "chunk"}),
    Rule(
        _keys("engine", "guarantee_floor", "guarantee_rounds", "guarantee_limit", "guarantee_fixed"),
        _when(
            lambda run: not run.spec.config.guarantee_output, "no output is guaranteed (engine.guarantee_output is 0)"
        ),
    ),
    Rule(
        ("engine.guarantee_rounds",),
        _when(
            lambda run: run.spec.config.guarantee_floor == 1, "the share does not fall (engine.guarantee_floor is 1)"
        ),
    ),
    Rule(
        ("engine.guarantee_fixed",),
        _when(
            lambda run: run.scenario.workload.max_tokens != "output",
            "no request has a fixed length (workload.max_tokens is not output)",
        ),
    ),
    Rule(
        ("front_end.first_chunk",),
        _when(lambda run: run.deployment.front_end.stream_interval == 1, "front_end.stream_interval is 1"),
        {"front_end.first_chunk": "token"},
    ),
    Rule(
        ("engine.batch_wait_rounds",),
        _when(lambda run: not run.spec.config.batch_wait_tokens, "engine.batch_wait_tokens is 0"),
        {"engine.batch_wait_rounds": 0},
    ),
    Rule(
        ("engine.batch_wait_tokens",),
        _when(lambda run: not run.spec.config.batch_wait_rounds, "engine.batch_wait_rounds is 0"),
        {"engine.batch_wait_tokens": 0.0},
    ),
    Rule(
        ("speculation.probe_backoff",),
        _when(lambda run: run.spec.policy != "ema", "the policy {run.spec.policy} does not try drafts so, as ema does"),
    ),
    Rule(("engine.preempt", "engine.ageing_bound"), _priorities_are_equal, {"engine.preempt": False}),
    # -- workload and clients ------------------------------------------------------------------------------------------
    Rule(
        (*_keys("workload", *ARRIVALS, "urgent_share"), "workload.prompt.", "workload.output.", "workload.prefixes."),
        _when(_has_trace, "the requests and their times are those of the trace (workload.trace)"),
    ),
    Rule(
        _keys("workload", "format", "columns", "time_unit", "start_s", "resample_s"),
        _when(_not(_has_trace), "the requests are synthetic, only a trace (workload.trace) has it"),
        {
            "workload.format": "auto",
            "workload.columns": None,
            "workload.time_unit": "auto",
            "workload.start_s": 0.0,
            "workload.resample_s": None,
        },
    ),
    Rule(
        _keys("workload", *ARRIVALS, "rate_scale", "stop_s"),
        _when(
            lambda run: _is_closed(run) and not _has_trace(run),
            "the clients of a closed loop (workload.concurrency) send when their last request has ended",
        ),
    ),
    Rule(
        ("workload.rate_scale",),
        _when(
            lambda run: _is_closed(run) and _has_trace(run),
            "the clients of a closed loop (workload.concurrency) send when their last request has ended, not at the trace's times",
        ),
    ),
    *(
        Rule(
            _keys("workload", *names),
            _when(
                _arrivals_are_others(*kinds),
                f"arrivals are {{scenario.workload.arrivals}}; it belongs to {', '.join(kinds)} (workload.arrivals)",
            ),
        )
        for names, kinds in (
            (("amplitude",), ("day",)),
            (("curve",), ("curve",)),
            (("period_s",), ("day", "curve")),
            (("burstiness",), ("gamma", "day", "curve")),
        )
    ),
    *(
        Rule(
            _keys(f"workload.{part}", "low", "high"),
            _when(
                _length_is_unbounded(part),
                f"a {{scenario.workload.{part}.kind}} length has no bounds",
            ),
        )
        for part in ("prompt", "output")
    ),
    Rule(
        ("workload.prefixes.zipf",),
        _when(
            lambda run: (
                not _has_trace(run)
                and run.scenario.workload.prefixes is not None
                and run.scenario.workload.prefixes.groups == 1
            ),
            "there is one group (workload.prefixes.groups)",
        ),
    ),
    Rule(("workload.max_tokens",), _cap_is_beyond_the_context),
    Rule(
        ("clients.cancel_mean_s",),
        _when(lambda run: run.scenario.clients.cancel_share == 0, "no client leaves (clients.cancel_share is 0)"),
    ),
    # -- engines -------------------------------------------------------------------------------------------------------
    Rule(("router.policy",), _router_is_unused),
    Rule(
        ("disaggregation.", "hardware.prefill.", "hardware.decode."),
        _when(
            lambda run: not run.pools.is_disaggregated,
            "every engine does all of a request; disaggregation.prefill and decode, or ratio, divide them",
        ),
        {"disaggregation.prefill": 0, "disaggregation.decode": 0, "disaggregation.ratio": None},
    ),
    Rule(("disaggregation.prefill_policy",), _pool_policy_is_unused("prefill")),
    Rule(("disaggregation.decode_policy",), _pool_policy_is_unused("decode")),
)
