"""Rounds by the cost model: the time of a round, its parts, and the number of tokens at which it breaks even."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...core.acceptance.fit import mean_accept_length
from ...core.acceptance.process import GaussianAcceptance
from ...core.contract.step import RoundShape
from ...core.tree.build import tree_capacity
from ...sim.assembly import Assembly, assemble
from ...sim.assembly.rounds import PricedRound
from ...sim.cost.passes.decode_work import DecodeWork
from ...sim.scenario import Scenario
from ...sim.scenario_file import scenario_with

MOST_STEPS = 7


@dataclass(frozen=True, slots=True)
class BatchSpeed:
    """The output tokens per second of all requests of a batch, prompts included.

    Attributes:
        batch: Requests that decode together; as soon as one ends, another one takes its place.
        plain: Without drafts.
        drafted: With the best number of draft steps; None for a deployment that does not speculate.
        steps: That number.
    """

    batch: int
    plain: float
    drafted: float | None = None
    steps: int = 0


def without_speculation(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a scenario with plain decoding."""
    return {**tables, "speculation": {"algorithm": "NONE"}}


class RoundModel:
    """Rounds of one deployment with fixed step counts, and without speculation."""

    def __init__(self, scenario: Scenario, output_len: float | None = None) -> None:
        """Assemble the scenario. Raises a ForedraftError if that is not possible, as `simulate` does.

        `output_len`: tokens of an average output, by which each round bears its part of the prompts; None looks at
        decoding alone.
        """
        self.output_len = output_len
        self._tables = scenario.model_dump(mode="json")
        self._assemblies: dict[int, Assembly] = {}
        self._accept_lengths: dict[RoundShape, float] = {}
        self._reserves: dict[int, int] = {}
        self.scenario = scenario

    def with_prompts(self, output_len: float) -> RoundModel:
        """Return the same rounds, each of which bears its part of the prompts (`output_len`)."""
        other = copy(self)  # with the same deployments
        other.output_len = output_len
        return other

    @cached_property
    def plain(self) -> Assembly:
        """The deployment without speculation."""
        return assemble(Scenario.model_validate(without_speculation(self._tables)))

    @cached_property
    def _as_given(self) -> Assembly:
        return assemble(self.scenario)

    def with_steps(self, steps: int) -> Assembly:
        """Return the deployment in which every round has this many draft steps, 0 for the deployment
        without speculation."""
        if not steps:
            return self.plain
        if steps not in self._assemblies:
            fixed: dict[str, Any] = {
                "speculation.policy": "fixed",
                "speculation.steps": steps,
                "speculation.adaptive": None,
            }
            given = self._tables["speculation"]
            nodes = given["num_draft_tokens"]
            if isinstance(nodes, int):  # no more than so few steps can fill
                fixed["speculation.num_draft_tokens"] = min(nodes, tree_capacity(given["topk"], steps) + 1)
            if self.scenario.speculation.heads is not None:
                fixed["speculation.heads"] = max(steps, self.scenario.speculation.heads)
            self._assemblies[steps] = assemble(scenario_with(self._tables, fixed))
        return self._assemblies[steps]

    def round(self, batch_size: int, context_len: int, steps: int) -> PricedRound:
        """Return the round of a batch. Raises a ForedraftError for steps that the deployment cannot have."""
        run = self.with_steps(steps)
        work = DecodeWork(batch_size, run.spec.draft_shape.round_shape(steps, batch_size), batch_size * context_len)
        parts = run.cost.decode_parts(*work)
        accept_length = self.accept_length(work.shape)
        verified = batch_size if steps and not run.spec.config.overlap else 0
        host_ns = run.host.round_ns(batch_size, round(batch_size * accept_length), verified)
        prompt_ns = 0.0
        if self.output_len is not None and run.prefill is None:  # else other devices compute the prompts
            prompt_len = max(1, round(context_len - self.output_len / 2))
            prompt_ns = _prompt_ns(run, prompt_len, work) / self.output_len
        overlap, late_ns = run.spec.config.overlap, run.host.late_ns(batch_size, run.algorithm.has_look_ups)
        return PricedRound(
            batch_size, context_len, work.shape, parts, host_ns, overlap, accept_length, prompt_ns, late_ns
        )

    def accept_length(self, shape: RoundShape) -> float:
        """Return the mean accept length of rounds of this shape, bonus token included.

        `acceptance.mean_length` is the mean of the scenario's most steps, from which fewer and more steps follow.
        """
        if not shape.steps:
            return 1.0
        if shape not in self._accept_lengths:
            run = self.with_steps(shape.steps)
            process = self._as_given.acceptance if self.scenario.acceptance.mean_length else run.acceptance
            if isinstance(process, GaussianAcceptance):
                process = replace(process, seed=0)  # a mean of the process, not of one seed
            if shape.topk > 1 and isinstance(process, GaussianAcceptance):
                process = process.for_tree(shape, self.scenario.acceptance.rank_ratio)
            self._accept_lengths[shape] = mean_accept_length(process, shape.steps)
        return self._accept_lengths[shape]

    def best(self, batch_size: int, context_len: int, most_steps: int) -> PricedRound:
        """Return the round with the most tokens per second among 0 to `most_steps` draft steps."""
        rounds = (self.round(batch_size, context_len, steps) for steps in range(most_steps + 1))
        return max(rounds, key=lambda candidate: candidate.tokens_per_s)

    def best_drafted(self, batch_size: int, context_len: int, most_steps: int) -> PricedRound:
        """Return the round with the most tokens per second among 1 to `most_steps` draft steps, without those that so
        many requests do not decode with together."""
        counts = [steps for steps in range(1, most_steps + 1) if batch_size <= self.most_rows(context_len, steps)]
        rounds = (self.round(batch_size, context_len, steps) for steps in counts or [1])
        return max(rounds, key=lambda candidate: candidate.tokens_per_s)

    def speeds(self, context_len: int, batch_sizes: Sequence[int], speculates: bool) -> list[BatchSpeed]:
        """Return the throughput of these batches, for every figure that shows it. The model bears prompts."""
        assert self.output_len is not None, "throughput bears the prompts: see with_prompts"
        found = []
        for size in batch_sizes:
            speed = BatchSpeed(size, self.round(size, context_len, 0).tokens_per_s)
            if speculates:
                best = self.best_drafted(size, context_len, MOST_STEPS)
                speed = BatchSpeed(size, speed.plain, best.tokens_per_s, best.shape.steps)
            found.append(speed)
        return found

    def gain(self, found: PricedRound) -> float:
        """Return how many times the tokens of plain decoding a round gives."""
        return found.tokens_per_s / self.round(found.batch_size, found.context_len, 0).tokens_per_s

    def largest_that_pays(self, context_len: int, most_steps: int, least_gain: float = 1.0) -> int:
        """Return the largest batch, among those that fit with drafts, at which some number of draft steps gives more
        than `least_gain` times the tokens of plain decoding; 0 if none does."""

        def pays(size: int) -> bool:
            return self.gain(self.best_drafted(size, context_len, most_steps)) > least_gain

        largest = self.most_drafted_rows(context_len)
        sizes = [*itertools.takewhile(lambda size: size < largest, (1 << i for i in itertools.count())), largest]
        pay = [size for size in sizes if size and pays(size)]
        if not pay or pay[-1] == largest:
            return pay[-1] if pay else 0
        low, high = pay[-1], sizes[sizes.index(pay[-1]) + 1]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if pays(middle) else (low, middle)
        return low

    def most_drafted_rows(self, context_len: int) -> int:
        """Return how many requests of this context can decode together both with and without drafts; 0 if none fits."""
        return min(self.most_rows(context_len, 0), self.most_rows(context_len, 1))

    def most_rows(self, context_len: int, steps: int) -> int:
        """Return how many requests of this context the KV pool holds, at most `engine.max_running`; 0 if none fits."""
        run = self.with_steps(steps)
        config = run.spec.config
        if steps not in self._reserves:
            self._reserves[steps] = run.spec.resolve_sizes().reserve
        held = context_len + self._reserves[steps]
        return min(config.max_running, config.num_fitting(held))


def _prompt_ns(run: Assembly, prompt_len: int, round_work: DecodeWork) -> float:
    """Return the device's time for one prompt of a deployment under load: steps are filled with prompts, as far as
    there are any, up to the chunk size. If steps mix prompts with decode rounds, what a round takes longer by it.
    """
    config = run.spec.config
    chunk = config.chunk_size or prompt_len
    beside = round_work if config.mixed else None
    alone_ns = run.cost.step_ns([], beside)
    if prompt_len <= chunk:
        together = max(1, min(chunk // prompt_len, round_work.batch_size))
        return (run.cost.step_ns([(prompt_len, 0)] * together, beside) - alone_ns) / together
    starts = range(0, prompt_len, chunk)
    steps = ([(min(chunk, prompt_len - start), start)] for start in starts)
    return float(sum(run.cost.step_ns(chunks, beside) - alone_ns for chunks in steps))
