"""Compares a run with the capacity of its deployment: a saturation figure, and whether more was asked than served."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...core.scheduler.config import EngineRole
from ..assembly import Assembly
from ..cost.host import whole_round_ns
from ..cost.passes.decode_work import DecodeWork
from .steady import SETTLED

GROUPS = 4  # of the second half of the arrivals, at most: in an overload the queue grows from each to the next
CHANCE = 2.0  # standard deviations of the arrivals in that half, which a queue in balance hardly grows by
ADAPTIVE = 0.15  # error of a saturation where rounds had several numbers of steps: of each too few rounds are known
MOST_SHED = 0.05  # of the requests, refused by a full queue: beyond that it is bounded by refusals alone


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """The requests of an open loop, and how many of them were there at a time.

    Attributes:
        per_s: Requests per second: those that the scenario asks for if that is one number, else those that came on
            average.
        num_arrivals: Requests of the run.
        num_shed: Those refused because the queue was full.
        arrivals_s: From the first one, with which the timeline begins, to the last one.
        mean_life_s: From the arrival of a request to its end; None if none has completed.
        saturation: `per_s` over the requests per second of full batches; None if there are none.
        margin: How far that may be too high.
        bucket_s: The length of a bucket of the timeline.
        waiting: Mean length of the queue in each bucket from the start of the run on.
        in_system: The same for the requests that wait or run.
    """

    per_s: float
    num_arrivals: int
    num_shed: int
    arrivals_s: float
    mean_life_s: float | None
    saturation: float | None
    margin: float
    bucket_s: float
    waiting: Sequence[float]
    in_system: Sequence[float]

    @property
    def is_beyond(self) -> bool:
        """Whether full batches would surely not serve the load."""
        return self.saturation is not None and self.saturation > 1.0 + self.margin

    @property
    def most_per_s(self) -> float:
        """The requests per second that can be served at most: of full batches if those do not serve the load, else
        those that have ended before the last one came."""
        if self.saturation is not None and self.saturation > 1.0:
            return self.per_s / self.saturation
        left = (
            self.in_system[min(int(self.arrivals_s / self.bucket_s), len(self.in_system) - 1)] if self.bucket_s else 0
        )
        return (self.num_arrivals - self.num_shed - left) / self.arrivals_s

    @property
    def about_overload(self) -> str:
        """How much was asked for, and how much can be served."""
        asked, most = f"{self.per_s:.3g}", f"{self.most_per_s:.2g}"
        if float(most) >= float(asked):
            most = f"{self.most_per_s:.3g}"
        return (
            f"{float(asked):,g}/s is asked, about {float(most):,g}/s is the most; all latencies grow with the length of "
            "the run"
        )


def saturation(
    assembly: Assembly,
    summary: Mapping[str, Any],
    arrivals_per_s: float | None,
    lengths: Mapping[str, tuple[float, float]] | None = None,
) -> float | None:
    """Return the offered requests per second (in a closed loop: the served ones) divided by those of full batches; None
    if there are none.

    An estimate: the cost model's time of full batches with the acceptance of the run. A batch is full at
    `engine.max_running` requests, or where their KV fills the pool. `lengths`: mean and standard deviation of prompts
    ("input") and outputs; without them the means of the run count, as if all were alike.
    """
    offered = arrivals_per_s if arrivals_per_s is not None else summary["request_throughput"]
    prompt, output = summary["mean_input_tokens"], summary["mean_output_tokens"]
    if not offered or not prompt or not output:
        return None
    deviation = 0.0
    if lengths:
        (prompt, _), (output, deviation) = lengths["input"], lengths["output"]
    # Long outputs are there for longer: at any moment a batch holds more than the mean request does at its half.
    held = prompt + output / 2 * (1 + (deviation / output) ** 2)
    computed = max(1, round(prompt * (1 - (summary["prefix_cache_hit_rate"] or 0.0))))
    seconds = _seconds_per_request(assembly, held, computed, output, summary["correct_drafts_histogram"])
    if seconds is None:
        return None
    prefill_s, decode_s = seconds
    pools = assembly.pools
    if pools.is_disaggregated:
        return offered * max(prefill_s / pools.num_prefill, decode_s / pools.num_decode)
    return offered * (prefill_s + decode_s) / pools.num_engines


def _seconds_per_request(
    assembly: Assembly, held: float, computed: int, output: float, drafts: Sequence[int]
) -> tuple[float, float] | None:
    """Return the time that a request takes of an engine with full batches: for its prompt, and for its output, each of
    the engine that computes it. None if no batch has room. `held`: KV tokens of a request of the batch."""
    config, spec, cost, host = assembly.spec.config, assembly.spec, assembly.cost, assembly.host
    batch = min(config.max_running, config.num_fitting(held + spec.resolve_sizes().reserve))
    if batch < 1:
        return None
    kv_tokens = round(batch * held)
    slot = spec.adaptive.slots[max(0, bisect_right(spec.adaptive.bounds, batch) - 1)]
    decode_s, work = float("inf"), None
    for steps in slot.candidate_steps:
        round_work = DecodeWork(batch, spec.draft_shape.round_shape(steps, batch), kv_tokens)
        verified = batch if steps and not config.overlap else 0
        device_ns, host_ns = cost.decode_ns(*round_work), host.round_ns(batch, batch, verified)
        late_ns = host.late_ns(batch, assembly.algorithm.has_look_ups)
        round_ns = whole_round_ns(device_ns, host_ns, config.overlap, late_ns)
        per_request = (output - 1) / _accept_length(drafts, steps) * round_ns / batch / 1e9
        if per_request < decode_s:
            decode_s, work = per_request, round_work
    assert work is not None, "a range of batch sizes has candidates"
    on = assembly.of_role(EngineRole.PREFILL)
    chunk = min(on.spec.config.chunk_size, computed)
    rides = config.mixed and not assembly.pools.is_disaggregated
    chunk_ns = cost.step_ns([(chunk, 0)], work) - cost.decode_ns(*work) if rides else on.cost.step_ns([(chunk, 0)])
    return computed / chunk * chunk_ns / 1e9, decode_s


def _accept_length(drafts: Sequence[int], steps: int) -> float:
    """Return the mean accept length of rounds with `steps` steps, estimated from the rounds of the run, which may have
    had other steps."""
    rows = sum(drafts)
    return 1 + sum(min(correct, steps) * count for correct, count in enumerate(drafts)) / rows if rows else 1.0


def is_overloaded(load: OpenLoad) -> bool:
    """Return whether more was asked than can be served: full batches would not do it, requests became only more in the
    second half of the arrivals, or a bounded queue refused too many.

    Requests also become more until the first ones end. So, other than a queue that grows, requests that run count only
    if the second half begins several lives of a request after the start.
    """
    if load.is_beyond or load.num_shed > MOST_SHED * load.num_arrivals:
        return True
    if not load.bucket_s or not load.waiting:
        return False
    last = min(int(load.arrivals_s / load.bucket_s), len(load.waiting))  # buckets that end before the last arrival
    if last - last // 2 < 2:
        return bool(load.waiting[min(last, len(load.waiting) - 1)] > CHANCE * load.num_arrivals**0.5)
    is_settled = load.mean_life_s is not None and load.arrivals_s / 2 >= SETTLED * load.mean_life_s
    counted = (load.waiting, load.in_system) if is_settled else (load.waiting,)
    return any(_only_grows(lengths[last // 2 : last], load.num_arrivals) for lengths in counted)


def _only_grows(lengths: Sequence[float], num_arrivals: int) -> bool:
    """Return whether a number of requests in the second half of the arrivals only grows, beyond chance."""
    groups = min(GROUPS, len(lengths))
    bounds = [len(lengths) * i // groups for i in range(groups + 1)]
    means = [sum(lengths[low:high]) / (high - low) for low, high in pairwise(bounds)]
    grows = all(before <= after for before, after in pairwise(means))
    return grows and means[-1] - means[0] > CHANCE * (num_arrivals / 2) ** 0.5
