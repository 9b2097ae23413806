"""What decode rounds cost: the parts of their time, and the accept length at which drafts pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...core.errors import ConfigError, Problem
from ...observe.output_files import Document
from ...sim.assembly.confidence import factors_of_rounds, rests_on
from ...sim.assembly.explaining import timing_line
from ...sim.assembly.rounds import PricedRound
from ...sim.cost.deployments.evidence import Interval
from ...sim.scenario import Scenario
from ..candidates.rounds import RoundModel
from ..confidence.comparison import about_speed_ups
from ..grid import NO_SPECULATION


@dataclass(frozen=True)
class RoundPrice:
    """One decode round of a full batch.

    Attributes:
        steps: Draft steps; 0 is plain decoding.
        num_draft_tokens: Nodes that the target verifies per request, the root included.
        parts_us: Microseconds on the device by part; they sum to `device_us`.
        host_us: The scheduler's time, beside the device if `is_overlapped`, else after it.
        round_us: Microseconds from one round to the next.
        interval_us: [low, high]: the 80 % interval of `round_us` by published points; None where there are none.
        accept_length: Tokens that a request gets of the round on average, by the scenario's acceptance.
        break_even: The accept length at which the round is as fast as plain decoding.
        tokens_per_s: Output tokens per second of the whole batch, decode alone: without the time of prompts.
    """

    steps: int
    num_draft_tokens: int
    parts_us: Mapping[str, float]
    device_us: float
    host_us: float
    is_overlapped: bool
    round_us: float
    interval_us: tuple[float, float] | None
    accept_length: float
    break_even: float
    tokens_per_s: float


@dataclass(frozen=True)
class BatchCost:
    """The rounds of one batch size, each with another number of draft steps.

    Attributes:
        batch: Requests that decode together.
        interval: Factors on simulated times: the ends of their 80 % interval; None where no points are published.
        rounds: Of the draft steps that so many requests decode with together.
        no_room: The other draft steps: their KV or `engine.max_running` holds fewer requests.
    """

    batch: int
    interval: tuple[float, float] | None
    rounds: tuple[RoundPrice, ...]
    no_room: tuple[int, ...]


@dataclass(frozen=True)
class Cost(Document):
    """What decode rounds cost in a deployment, as `foredraft doctor --round` prints it.

    Attributes:
        timing: A sentence: whose timing this is.
        intervals_rest_on: The published points behind the intervals.
        about_speed_ups: How sure break-even lengths are.
        context: KV tokens of each request.
        batches: One entry per batch size.
    """

    FORMAT: ClassVar[str] = "foredraft-cost"

    timing: str
    intervals_rest_on: str
    about_speed_ups: str
    context: int
    batches: tuple[BatchCost, ...]


def cost_of_rounds(
    scenario: Scenario, batches: Sequence[int], context: int, steps: Sequence[int], model: RoundModel | None = None
) -> Cost:
    """Return what the rounds of these batches cost with these numbers of draft steps.

    Without speculation the rounds are plain. model: the rounds of the scenario, if they are known already. Raises
    ForedraftError for a scenario that cannot be assembled, numbers out of range, and a context that the model does not
    have.
    """
    ranges = {"batch": (batches, 1), "context": ((context,), 0), "steps": (steps, 0)}
    if wrong := [
        Problem(name, f"is {list(values)}; expected whole numbers from {least} on")
        for name, (values, least) in ranges.items()
        if not values or min(values) < least
    ]:
        raise ConfigError("<arguments>", wrong)
    model = RoundModel(scenario) if model is None else model
    steps = [0] if scenario.speculation.algorithm == NO_SPECULATION else steps
    longest = model.plain.spec.config.context_len
    if context > longest:
        raise ConfigError.of("--context", "", f"{context:,} tokens do not fit into the model's context of {longest:,}")
    run = model.with_steps(max(steps))
    found = []
    for batch in batches:
        interval = factors_of_rounds(run, batch)
        fits = [count for count in steps if batch <= min(model.most_rows(context, n) for n in (count, 0))]
        plain = model.round(batch, context, 0) if fits else None
        rounds = tuple(_cost(model.round(batch, context, count), plain, interval) for count in fits if plain)
        no_room = tuple(count for count in steps if count not in fits)
        found.append(BatchCost(batch, None if interval is None else (*interval,), rounds, no_room))
    return Cost(timing_line(run), rests_on(run), about_speed_ups(run), context, tuple(found))


def _cost(one: PricedRound, plain: PricedRound, interval: Interval | None) -> RoundPrice:
    ends = None if interval is None else (one.total_ns * interval.low / 1e3, one.total_ns * interval.high / 1e3)
    return RoundPrice(
        one.shape.steps,
        one.shape.nodes,
        {part: ns / 1e3 for part, ns in one.parts_ns.items()},
        one.device_ns / 1e3,
        one.host_ns / 1e3,
        one.is_overlapped,
        one.total_ns / 1e3,
        ends,
        one.accept_length,
        one.break_even(plain),
        one.tokens_per_s,
    )
