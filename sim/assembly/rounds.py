"""Decode rounds by the cost model: what one takes, and the mean round of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.contract.step import RoundShape
from ...observe.rates import rate_of
from ..cost.host import whole_round_ns
from .assembly import Assembly
from .confidence import factors_of_rounds


@dataclass(frozen=True, slots=True)
class PricedRound:
    """One decode round of a full batch.

    Attributes:
        batch_size: Requests that take part.
        context_len: KV tokens of each when the round starts.
        shape: Draft steps, branches and nodes that the target verifies per request; 0 steps are a plain pass.
        parts_ns: Nanoseconds on the device by part; they sum to the device's time.
        host_ns: The scheduler's time for the round.
        is_overlapped: Whether the host works beside the device, not before and after it.
        accept_length: Tokens that a request gets of the round on average.
        prompt_ns: Nanoseconds on the device for prompts per output token of a request: the time of its prompt over its
            output length; 0 to look at decoding alone.
        late_ns: The part of `host_ns` in which the device waits, where they overlap (`HostCost.late_ns`).
    """

    batch_size: int
    context_len: int
    shape: RoundShape
    parts_ns: Mapping[str, int]
    host_ns: int
    is_overlapped: bool
    accept_length: float
    prompt_ns: float = 0.0
    late_ns: int = 0

    @property
    def device_ns(self) -> int:
        return sum(self.parts_ns.values())

    @property
    def total_ns(self) -> int:
        """Nanoseconds from one round to the next."""
        return whole_round_ns(self.device_ns, self.host_ns, self.is_overlapped, self.late_ns)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of the whole batch, whose places are taken by new requests. So a round's time has a
        part for their prompts."""
        tokens = self.batch_size * self.accept_length
        return tokens * 1e9 / (self.total_ns + tokens * self.prompt_ns)

    def break_even(self, plain: PricedRound) -> float:
        """Return the accept length at which this round is as fast as plain decoding, whose round is `plain`.

        With r, p: the times of this round and of a plain one, and q, o: those of prompts per output token, with and
        without drafts, B rows emit a tokens each as fast if r / a + B q = p + B o. Infinite if no length is enough,
        because prompts take longer with a draft.
        """
        left = plain.total_ns + self.batch_size * (plain.prompt_ns - self.prompt_ns)
        return self.total_ns / left if left > 0 else math.inf


def mean_round(run: Assembly, summary: Mapping[str, Any]) -> PricedRound:
    """Return the round of a run's mean batch, at the mean context and with the draft steps that most rounds had.

    summary: of the run, which has completed requests. The batch is that of one engine.
    """
    spec = run.spec
    rounds = summary["decode_rounds"]
    rows = summary.get("verified_rows", 0) / rounds if rounds else 0.0
    rows = rows or (rate_of(summary, "mean_running") or 0.0) / summary["replicas"]
    batch = max(1, min(round(rows), spec.config.max_running))
    steps = max(spec.adaptive.candidate_steps, key=lambda count: summary.get(f"rounds_at_steps_{count}") or 0.0)
    shape = spec.draft_shape.round_shape(steps, batch)
    context = round(summary["mean_input_tokens"] + summary["mean_output_tokens"] / 2)
    parts = run.cost.decode_parts(batch, shape, batch * context)
    accept_length = summary.get("accept_length") or 1.0
    verified = batch if steps and not spec.config.overlap else 0
    host_ns = run.host.round_ns(batch, round(batch * accept_length), verified)
    late_ns = run.host.late_ns(batch, run.algorithm.has_look_ups)
    return PricedRound(batch, context, shape, parts, host_ns, spec.config.overlap, accept_length, late_ns=late_ns)


def round_of_run(run: Assembly, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean round of a run, in flat names: its batch, context, steps and nodes, and in microseconds the parts
    on the device, the scheduler's time and the whole with its 80 % interval. Empty for a run without decode rounds."""
    if summary["mean_input_tokens"] is None or not summary["decode_rounds"]:
        return {}
    found = mean_round(run, summary)
    interval = factors_of_rounds(run, found.batch_size)
    whole_us = found.total_ns / 1e3
    sizes = {"round_batch": found.batch_size, "round_context": found.context_len, "round_steps": found.shape.steps}
    sizes |= {"round_nodes": found.shape.nodes, "round_overlapped": found.is_overlapped}
    times = {f"round_part_{name}_us": ns / 1e3 for name, ns in found.parts_ns.items()}
    times |= {"round_host_us": found.host_ns / 1e3, "round_whole_us": whole_us}
    ends = {} if interval is None else {"round_whole_us_interval": [interval.low * whole_us, interval.high * whole_us]}
    return sizes | times | ends
