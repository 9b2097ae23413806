"""The answer of a plan, and the limits of a run. The answer is stored beside its runs and printed, and `foredraft
report` draws it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..core.errors import count_of
from ..observe.output_files import Document, write_text
from ..sim.assembly import Assembly
from ..sim.assembly.rounds import mean_round
from .confidence.comparison import source_of_comparisons
from .confidence.ranked import Ranked
from .confidence.ranking import rank_candidates
from .plan import Plan
from .search import Finding
from .slo import Objective
from .store import TrialStore
from .workers import Workers

ANSWER = "answer.json"
FULL_POOL = 0.97  # of the KV slots, in use at some time
LARGE_SHARE = 0.35  # of a round
REMEDIES = {
    "KV memory": "more KV: fp8 KV cache, more tensor parallelism, fewer captured graphs",
    "host": "overlap scheduling, larger batches per step, fewer requests per engine",
    "prefill": "smaller prompt chunks, more prefix reuse, prefill apart from decode",
    "link": "less tensor parallelism, a faster interconnect",
    "weights' bandwidth": "fewer bits per weight, more tensor parallelism",
    "KV bandwidth": "fp8 KV cache, more tensor parallelism",
    "compute": "fewer draft tokens, fp8 weights, more GPUs",
}


@dataclass(frozen=True)
class PlannedCandidate:
    """A configuration with its result.

    Attributes:
        name: What distinguishes it from the others, in words.
        settings: The keys of the scenario that it replaces.
        status: "best"; "equal" and "behind" were compared with it; "dropped" was not searched on after the first
            round; "hopeless" holds no load.
        load: The load that it holds; None if it holds none.
        half_width: Half of the 95 % interval of the load over seeds.
        load_interval: [low, high]: the 80 % interval of the load if times are not as simulated.
        gpus: Devices.
        gpus_interval: [low, high] of the devices for a given load; an end that is not known is None.
        of_best_interval: [low, high] of the load as a share of the best one's, if the comparison is wrong.
        engines: Engines on these devices.
        requests_per_s: The load as requests per second of all engines; None for a trace whose requests come at once.
        running_per_engine: Requests that run in one engine on average at the load.
        tokens_per_s: Output tokens of all devices at the load.
        per_million: The price of a million output tokens; None without a price of the device.
        tightest: The limit that is taken the most, by its name.
        taken: The share of it.
        taken_interval: [low, high] of the share.
        intervals_rest_on: The published points behind the intervals of the cost model.
        round: The numbers of the mean round at the load, of the best alone.
    """

    name: str
    settings: Mapping[str, Any]
    status: Literal["best", "equal", "behind", "dropped", "hopeless"]
    load: float | None
    half_width: float | None
    load_interval: tuple[float, float] | None
    gpus: int | None
    gpus_interval: tuple[int | None, int | None] | None
    of_best_interval: tuple[float, float] | None
    engines: int | None
    requests_per_s: float | None
    running_per_engine: float | None
    tokens_per_s: float | None
    per_million: float | None
    tightest: str | None
    taken: float | None
    taken_interval: tuple[float, float] | None
    intervals_rest_on: str | None
    round: Mapping[str, Any] | None


@dataclass(frozen=True)
class RefusedCandidate:
    """A configuration that cannot run, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class PlanAnswer(Document):
    """The answer of a plan, as `foredraft plan --json` prints it.

    Attributes:
        sentences: What was asked, then what holds and what limits it, for readers.
        timing: A sentence: whose timing this is; empty if nothing holds.
        limits: The limits of latencies.
        load: The load that was asked for; None if the greatest was.
        load_key: The key of the scenario that sets the load.
        load_unit: What a load is counted in.
        model_error: The error of comparisons that was given.
        model_error_source: Where the error of comparisons comes from.
        candidates: The configurations that could run, the best first.
        refused: The others.
    """

    FORMAT: ClassVar[str] = "foredraft-plan"

    sentences: tuple[str, ...]
    timing: str
    limits: tuple[Objective, ...]
    load: float | None
    load_key: str
    load_unit: str
    model_error: float | None
    model_error_source: str
    candidates: tuple[PlannedCandidate, ...]
    refused: tuple[RefusedCandidate, ...]

    @property
    def best(self) -> PlannedCandidate | None:
        """The configuration that holds the most load, or needs the fewest devices; None if none holds."""
        return next((one for one in self.candidates if one.status == "best"), None)


def search_plan(
    whole: Plan, pool: Workers, store: TrialStore, on_progress: Callable[[str], None]
) -> tuple[list[Ranked], PlanAnswer]:
    """Search all candidates, and return them by their results with the answer, which is stored beside the runs.
    `on_progress` gets a line for each candidate that a round ends with."""
    for which, index, found in whole.run(pool):
        if not found.reason:  # else `refused` says it
            on_progress(f"{which} round, {_progress(whole, which, index, found)} ({count_of(len(store), 'run')})")
    ranked = rank_candidates(whole)
    answer = answer_of(whole, ranked)
    write_text(store.path / ANSWER, answer.to_text(), replace=True)
    return ranked, answer


def _progress(whole: Plan, which: str, index: int, found: Finding) -> str:
    is_load = which == "first" or whole.question.load is None
    value = f"{found.value:.3g} {whole.load_unit}" if is_load else count_of(round(found.value), "engine")
    nothing = f"holds {'no load' if is_load else 'with no number of engines that may be'}"
    return f"{whole.candidates[index].name}: {value if found.value else nothing}"


def answer_of(whole: Plan, ranked: Sequence[Ranked]) -> PlanAnswer:
    """Return the answer of a plan whose candidates were searched."""
    asked = whole.question
    first = next((item for item in ranked if item.holds and not item.dropped), None)
    sentences, timing = [_title(whole)], ""
    if first is not None and first is ranked[0]:
        remarks = _remarks(whole, [item for item in ranked if not item.dropped])
        sentences += [_best(whole, first), *remarks[:-1]]
        timing = remarks[-1]
    elif ranked:
        sentences.append(_nothing_holds(whole, min(ranked, key=lambda item: item.finding.excess)))
    return PlanAnswer(
        tuple(sentences),
        timing,
        asked.objectives,
        asked.load,
        whole.load_key,
        whole.load_unit,
        asked.model_error,
        source_of_comparisons(asked.model_error),
        tuple(_candidate(whole, item, item is first) for item in ranked),
        tuple(RefusedCandidate(candidate.name, reason) for candidate, reason in whole.refused()),
    )


def _candidate(whole: Plan, item: Ranked, is_first: bool) -> PlannedCandidate:
    found, holds = item.finding, item.holds
    status: Literal["best", "equal", "behind", "dropped", "hopeless"]
    if is_first:
        status = "best"
    elif not holds:
        status = "hopeless"
    else:
        status = "dropped" if item.dropped else "equal" if item.equal else "behind"
    tokens, rate = tokens_per_s(whole, item) if holds else None, item.load * whole.trace_rate
    price = whole.question.prices.get(whole.gpu_of(item.candidate))
    half_width = None if found.interval is None else found.interval.half_width
    return PlannedCandidate(
        name=item.candidate.name,
        settings=dict(item.candidate.settings),
        status=status,
        load=item.load if holds else None,
        half_width=half_width if half_width is not None and math.isfinite(half_width) else None,
        load_interval=item.load_range,
        gpus=item.gpus if holds else None,
        gpus_interval=item.gpu_range,
        of_best_interval=item.of_best_range,
        engines=item.gpus // item.candidate.gpus_per_engine if holds else None,
        requests_per_s=rate if holds and math.isfinite(rate) else None,
        running_per_engine=found.summary["mean_running"] / found.summary["replicas"] if holds else None,
        tokens_per_s=tokens,
        per_million=cost_per_million_tokens(item, tokens, price) if tokens and price is not None else None,
        tightest=None if found.tightest is None else found.tightest.name,
        taken=found.excess if math.isfinite(found.excess) else None,
        taken_interval=item.taken_range,
        intervals_rest_on=item.rests_on or None,
        round=_mean_round(found.summary) if is_first else None,
    )


# -- sentences --------------------------------------------------------------------------------------------------------


def _title(whole: Plan) -> str:
    asked, is_trace = whole.question, whole.scenario.workload.trace is not None
    limits = ", ".join(map(str, asked.objectives))
    if asked.load is not None:
        what = f"least GPUs for {asked.load:g} {whole.load_unit}"
    else:
        on = count_of(asked.gpus, "GPU") if asked.gpus else "the GPUs of one engine"
        what = f"greatest {'load' if is_trace else 'rate'} on {on}"
    return f"{whole.scenario.name}: {what} within {limits}"


def _best(whole: Plan, best: Ranked) -> str:

    unit = "times the trace" if whole.scenario.workload.trace is not None else whole.load_unit
    gpus = count_of(best.gpus, "GPU")
    return f"{best.candidate.name} holds {best.load:.3g} {unit} on {gpus}, {tokens_per_s(whole, best):,.0f} output tokens/s."


def _nothing_holds(whole: Plan, nearest: Ranked) -> str:
    found, gpus = nearest.finding, whole.question.gpus
    needed = {index: whole.needed(index) for index in whole.rough} if whole.question.load is not None else {}
    least = min((index for index in needed if needed[index]), key=lambda index: needed[index], default=None)
    if least is not None:
        there = f"the {count_of(gpus, 'GPU')}" if gpus else "the engines that are tried"
        return f"Nothing holds on {there}. {whole.candidates[least].name} needs the least: about {count_of(needed[least], 'GPU')}."
    devices = f" on {count_of(gpus, 'GPU')}" if gpus else ""
    if refused := found.summary.get("refused"):
        count = f"{refused:,} of {count_of(found.summary['submitted'], 'request')}"
        return f"Nothing holds{devices}: at any load the engines refuse {count}. `foredraft simulate` says for which reason."
    at = found.summary.get("request_throughput")
    if found.excess == float("inf"):
        within = "it is an overloaded run"
    else:
        tightest = tightest_of(found)
        value = found.excess * tightest.limit_ms
        within = f"{tightest.name} is {value:.3g} ms, {found.excess:.3g} times the limit of {tightest.limit_ms:g} ms"
    return f"Nothing holds{devices}. Nearest is {nearest.candidate.name}: at {at:.3g} requests/s {within}."


def _remarks(whole: Plan, shown: list[Ranked]) -> list[str]:
    """Return what limits the best candidate, what the marks mean, what the runs took of a trace, and at the end whose
    timing it is."""
    limited, timing = limit_of(whole, shown[0])
    texts = [limited]
    if any(item.equal for item in shown[1:]) and whole.question.load is not None:
        texts.append(
            "= serves the load at no more cost than the first; the one that takes less of the limits stands first."
        )
    elif any(item.equal for item in shown[1:]):
        seeds, source = len(whole.question.seeds), source_of_comparisons(whole.question.model_error)
        texts.append(
            f"= cannot be told from the first by {'up to ' if seeds > 2 else ''}{seeds} seeds and a cost model that may be "
            f"wrong about the ratio of two candidates, but not about what they share (80 % intervals; {source})."
        )
    part = whole.trace_part
    if part is not None:
        texts += part.qualifications(whole.question.load)
    return [*texts, timing]


# -- numbers ----------------------------------------------------------------------------------------------------------


def _mean_round(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a run's mean round, which a report draws."""
    return {key: value for key, value in summary.items() if key.startswith("round_") or key == "accept_length"}


def tokens_per_s(plan: Plan, item: Ranked) -> float:
    """Return the output tokens per second of a candidate at the load found.
    A run's own throughput counts its ramp and its drain, too."""
    summary = item.finding.summary
    if plan.scenario.workload.trace is None:
        return item.load * float(summary["mean_output_tokens"])
    return float(summary["output_throughput"])


def cost_per_million_tokens(item: Ranked, tokens: float, price_per_gpu_hour: float) -> float:
    """Return what a million output tokens cost, in the price's currency, at `tokens` per second."""
    return item.gpus * price_per_gpu_hour / 3600 / tokens * 1e6


def tightest_of(found: Finding) -> Objective:
    """Return the objective that takes the most of its limit, of a candidate that could be searched."""
    assert found.tightest is not None
    return found.tightest


def limit_of(whole: Plan, item: Ranked) -> tuple[str, str]:
    """Return sentences about what limits a candidate at its load, what would raise this limit, and whose timing is
    simulated."""
    run = whole.errors.assembly(item.candidate, item.candidate.unit)
    limit = bottleneck(run, item.finding.summary)
    return f"{item.candidate.name} is limited by {limit}; what would move it: {REMEDIES[limit]}.", run.timing


def bottleneck(run: Assembly, summary: Mapping[str, Any]) -> str:
    """Return which of `REMEDIES` limits a run, from its summary and the round that its mean batch took.

    Returns the first that applies: the KV pool was full while requests waited or were retracted. The host takes longer
    than the device. Prompts take the larger part of the device's time. Collectives, attention or the weights take most
    of a round. Else the arithmetic.
    """
    if summary["kv_occupancy_max"] >= FULL_POOL and (summary["retractions"] or summary["max_queue_length"]):
        return "KV memory"
    found = mean_round(run, summary)
    parts, device_ns, host_ns = found.parts_ns, found.device_ns, found.host_ns
    if host_ns > (device_ns if found.is_overlapped else LARGE_SHARE * device_ns):
        return "host"
    decode_ns = summary["decode_rounds"] * device_ns / summary["replicas"]
    if decode_ns < (1 - LARGE_SHARE) * summary["device_busy_share"] * summary["duration"] * 1e9:
        return "prefill"
    if parts.get("comm", 0) > LARGE_SHARE * device_ns:
        return "link"
    if parts.get("attention", 0) > LARGE_SHARE * device_ns:
        return "KV bandwidth"
    topk = run.spec.topk if found.steps else 1
    one_row = sum(run.cost.decode_parts(1, found.steps, topk, found.num_draft_tokens, found.context_len).values())
    return "weights' bandwidth" if one_row > 0.6 * (device_ns - parts.get("attention", 0)) else "compute"
