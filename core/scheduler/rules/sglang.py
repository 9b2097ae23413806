"""The rules of SGLang 0.5.23.

The share: managers/scheduler_components/new_token_ratio_tracker.py, with the values of environ.py, and
managers/schedule_policy.py (PrefillAdder). Retraction: managers/schedule_batch.py (retract_decode). Retry:
managers/scheduler.py (batch_is_full). docs/servers.md describes them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

from ...errors import Problem, nearest
from ..life import RequestRecord, RequestState
from .admission_state import GuaranteedShare, NumOutputs, PauseEnd
from .server_rules import Newcomer, Others, ServerRules, share_problems

RETRACTION_POLICIES = ("length", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangRules(ServerRules):
    """A newcomer finds its whole output, beside a share of the others' remaining outputs that falls with each round.

    Without a share it finds its context and a reserve, beside the next rounds of all others.
    """

    name: ClassVar[str] = "sglang"
    retries_after_departure: ClassVar[bool] = True
    pause_ends: ClassVar[PauseEnd] = PauseEnd.LAUNCH
    waits_at_tail: ClassVar[bool] = True
    caches_retracted: ClassVar[bool] = False

    guarantee_output: float = 0.7  # SGLANG_INIT_NEW_TOKEN_RATIO, times --schedule-conservativeness
    guarantee_floor: float = 0.14  # the share falls to this part of itself (SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR)
    guarantee_rounds: int = 600  # in so many decode rounds (SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS)
    # Tokens of a remaining output that count at most (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)
    guarantee_limit: int = 4096
    retraction_policy: str = "length"  # one of RETRACTION_POLICIES (--retraction-policy)

    def tokens_to_find(self, newcomer: Newcomer) -> int:
        guaranteed = min(newcomer.remaining, self.guarantee_limit) if self.guarantee_output else 0
        return newcomer.context + guaranteed + newcomer.reserve

    def slots_to_leave(self, others: Others) -> int:
        """Count the outputs of fixed lengths, and of requests that enter now, in full; the others by the share."""
        if not self.guarantee_output:
            return others.next_rounds
        in_full = in_part = 0
        for record, slots, enters_now in others.growth():
            counted = min(slots, self.guarantee_limit)
            if record.request.fixed_length or (enters_now and self.guarantee_floor < 1):
                in_full += counted
            else:
                in_part += counted
        return in_full + math.ceil(others.share * in_part)

    def without_guarantee(self) -> SGLangRules:
        return replace(self, guarantee_output=0.0)

    def share(self) -> GuaranteedShare:
        return GuaranteedShare(self.guarantee_output, self.guarantee_floor, self.guarantee_rounds)

    def victim(self, running: Collection[RequestRecord], num_outputs: NumOutputs) -> RequestRecord:
        """Choose the fewest emitted tokens, then the longest prompt, then the last in the batch; by the policy
        "priority" only among the lowest priority.

        A request that decodes gives way before a prompt in progress, but not the last one of them.
        """
        if self.retraction_policy == "priority":
            lowest = min(record.request.priority for record in running)
            running = [record for record in running if record.request.priority == lowest]
        decoding = [record for record in running if record.state is RequestState.DECODE]
        others = [record for record in running if record.state is not RequestState.DECODE]
        candidates = decoding if len(decoding) > 1 or not others else others
        return min(reversed(candidates), key=lambda record: (num_outputs(record), -record.prompt_len))

    def problems(self, preempt: bool) -> list[Problem]:
        problems = ServerRules.problems(self, preempt)
        problems += share_problems({"guarantee_output": self.guarantee_output, "guarantee_floor": self.guarantee_floor})
        for key in ("guarantee_rounds", "guarantee_limit"):
            if getattr(self, key) < 1:
                problems.append(Problem(key, f"must be at least 1, got {getattr(self, key)}"))
        policy, known = self.retraction_policy, RETRACTION_POLICIES
        if policy not in known:
            message = f"{policy!r} is none of {', '.join(known)}{nearest(str(policy), known)}"
            problems.append(Problem("retraction_policy", message))
        return problems
