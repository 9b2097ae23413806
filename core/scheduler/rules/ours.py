"""The rules of our own server. Those of vLLM 0.9 and of TensorRT-LLM are simulated by them, too."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

from ...errors import Problem
from ..life import RequestRecord
from ..waiting import least_entitled
from .admission_state import BatchWait, NumOutputs
from .server_rules import Newcomer, Others, ServerRules, share_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class OurRules(ServerRules):
    """A newcomer finds its context and a reserve, beside the next rounds of all others.

    With `guarantee_output` it finds its whole output, too, and leaves that share of the others' remaining outputs free.

    With a share of 1 memory pressure retracts no request (TensorRT-LLM, GUARANTEED_NO_EVICT).
    """

    name: ClassVar[str] = "ours"
    guarantee_output: float = 0.0
    batch_wait_rounds: int = 0  # decode rounds for which newcomers wait for more of them at most; 0: not at all
    batch_wait_tokens: float = 0.0  # they do not wait if a step with them has this share of the chunk size

    def tokens_to_find(self, newcomer: Newcomer) -> int:
        guaranteed = newcomer.remaining if self.guarantee_output else 0
        return newcomer.context + guaranteed + newcomer.reserve

    def slots_to_leave(self, others: Others) -> int:
        if not self.guarantee_output:
            return others.next_rounds
        return math.ceil(others.share * sum(growth.slots for growth in others.growth()))

    def without_guarantee(self) -> OurRules:
        return replace(self, guarantee_output=0.0)

    def batch_wait(self, chunk_size: int) -> BatchWait:
        return BatchWait(self.batch_wait_rounds, self.batch_wait_tokens * chunk_size)

    def victim(self, running: Collection[RequestRecord], num_outputs: NumOutputs) -> RequestRecord:
        """Choose the lowest priority, and among equals the latest arrival."""
        return least_entitled(running)

    def problems(self, preempt: bool) -> list[Problem]:
        problems = ServerRules.problems(self, preempt)
        problems += share_problems(
            {"guarantee_output": self.guarantee_output, "batch_wait_tokens": self.batch_wait_tokens}
        )
        if self.batch_wait_rounds < 0:
            problems.append(Problem("batch_wait_rounds", f"must be at least 0, got {self.batch_wait_rounds}"))
        if preempt and self.batch_wait_rounds:
            message = "contradicts preempt: a newcomer cannot both wait and take a row at once"
            problems.append(Problem("batch_wait_rounds", message))
        return problems
