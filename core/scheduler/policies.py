"""The rules in which servers differ: how much a newcomer must leave free, who gives way, and where it waits again.

`Policies` names the rules of one engine. `EngineConfig` has its fields, so a configuration in JSON selects each rule by
name. The defaults are the rules of this engine; docs/servers.md says what other servers do and since which release.

```
admission   reserve ──► head refused ──► tried again: after a change, or after a departure
memory      no round fits ──► victim ──► waits at its old place, or at the tail ──► pause: to a commit, or to a launch
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InvariantViolation, Problem, nearest
from .life import RequestRecord, RequestState

NumOutputs = Callable[[RequestRecord], int]
"""The number of tokens that a request has emitted."""


def entitlement(record: RequestRecord) -> tuple[int, int]:
    """Return a key: the greater it is, the more entitled a request is to its row."""
    return record.request.priority, -record.arrival_number


def least_entitled(running: Iterable[RequestRecord]) -> RequestRecord:
    """Return the request of the lowest priority, and among equals the latest arrival."""
    return min(running, key=entitlement)


def _fewest_outputs(running: Collection[RequestRecord], num_outputs: NumOutputs) -> RequestRecord:
    """Choose the fewest emitted tokens, then the longest prompt, then the last in the batch.

    A request that decodes gives way before a prompt in progress, but not the last one of them.
    """
    decoding = [record for record in running if record.state is RequestState.DECODE]
    others = [record for record in running if record.state is not RequestState.DECODE]
    candidates = decoding if len(decoding) > 1 or not others else others
    return min(reversed(candidates), key=lambda record: (num_outputs(record), -record.prompt_len))


def _lowest_then_fewest(running: Collection[RequestRecord], num_outputs: NumOutputs) -> RequestRecord:
    """Choose among those of the lowest priority as `fewest_outputs` does."""
    lowest = min(record.request.priority for record in running)
    return _fewest_outputs([record for record in running if record.request.priority == lowest], num_outputs)


VICTIMS: dict[str, Callable[[Collection[RequestRecord], NumOutputs], RequestRecord]] = {
    "latest": lambda running, num_outputs: least_entitled(running),
    "fewest_outputs": _fewest_outputs,
    "lowest_then_fewest": _lowest_then_fewest,
}
"""Which running request memory pressure retracts."""

PLACES = ("arrival", "tail")
"""Where a retracted request waits: at its place by arrival, or behind all others of its priority."""

PAUSES = ("commit", "launch", "plan")
"""Until when no request enters after a retraction: the commit, or the launch, of the next decode round; or the next
plan."""

RETRIES = ("change", "departure")
"""When a refused request is tried again: after any event that could make room, or when a running request has left."""

ADMISSIONS = ("reserve", "context", "chunk")
"""What a newcomer finds free: its context, a round, and the next rounds of all others; its context; its first chunk."""

ROW_SLOTS = ("pipeline", "launched")
"""The slots of a decoding row: for all rounds that the pipeline may have, or for the launched ones and a draft."""

RELEASES = ("fence", "departure")
"""When the slots of a row that leaves are free: behind the last step that may touch them, or at once."""

LATE_TOKENS = ("dropped", "delivered")
"""What becomes of tokens that a step in flight computes for a request that was retracted."""

SURE_ENDS = ("run", "rest")
"""Whether a row runs on that surely ends with a round in flight."""

SHORT_OF_SLOTS = ("waits", "retracted")
"""What a prompt in progress does if its next chunk does not fit."""

LONE_TOKENS = ("chunk", "round")
"""What a newcomer takes of a step that has one token left to compute: that token, or a round with drafts, so that the
step remains one of rounds."""

CACHED_AT = ("commit", "launch")
"""When the computed part of a prompt is in the prefix cache."""

ESTIMATED_ROUNDS = 20
"""The rounds for which an estimate after a retraction adds a token for each request (SGLang 0.5.23,
SGLANG_RETRACT_DECODE_STEPS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The rules of one engine in which servers differ. Each field is a key of a scenario's table `engine`."""

    guarantee_floor: float = 1.0  # the share `EngineConfig.guarantee_output` falls to this part of itself
    guarantee_rounds: int = 600  # decode rounds in which it falls so far
    guarantee_limit: int | None = None  # tokens of a request's remaining output that count at most; None: all
    guarantee_fixed: bool = False  # count the whole remaining output of a request with a fixed length
    retract_first: str = "latest"  # one of VICTIMS
    retracted_to: str = "arrival"  # one of PLACES
    cache_retracted: bool = True  # keep the KV of a retracted request in the prefix cache
    pause_until: str = "commit"  # one of PAUSES
    retry_after: str = "change"  # one of RETRIES
    admit_with: str = "reserve"  # one of ADMISSIONS; without a guaranteed output
    row_slots: str = "pipeline"  # one of ROW_SLOTS
    released_at: str = "fence"  # one of RELEASES
    late_tokens: str = "dropped"  # one of LATE_TOKENS
    sure_ends: str = "run"  # one of SURE_ENDS
    short_chunk: str = "waits"  # one of SHORT_OF_SLOTS
    cached_at: str = "commit"  # one of CACHED_AT
    lone_token: str = "chunk"  # one of LONE_TOKENS
    batch_wait_rounds: int = 0  # decode rounds for which newcomers wait for more of them at most; 0: not at all
    batch_wait_tokens: float = 0.0  # they do not wait if a step with them has this share of `chunk_size`

    def policy_problems(self) -> list[Problem]:
        """Return the problems of each rule by itself."""
        problems = []
        if not (0.0 <= self.guarantee_floor <= 1.0):
            problems.append(Problem("guarantee_floor", f"must be in [0, 1], got {self.guarantee_floor}"))
        for key in ("guarantee_rounds", "guarantee_limit"):
            value = getattr(self, key)
            if value is not None and value < 1:
                problems.append(Problem(key, f"must be at least 1, got {value}"))
        if self.batch_wait_rounds < 0:
            problems.append(Problem("batch_wait_rounds", f"must be at least 0, got {self.batch_wait_rounds}"))
        if not (0.0 <= self.batch_wait_tokens <= 1.0):
            problems.append(Problem("batch_wait_tokens", f"must be in [0, 1], got {self.batch_wait_tokens}"))
        for key, known in NAMED_POLICIES.items():
            value = getattr(self, key)
            if value not in known:
                problems.append(Problem(key, f"{value!r} is none of {', '.join(known)}{nearest(str(value), known)}"))
        return problems

    def policy_values(self) -> dict[str, Any]:
        """Return all rules by their names, as JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(Policies)}

    def victim(self, running: Collection[RequestRecord], num_outputs: NumOutputs) -> RequestRecord:
        """Return the request that memory pressure retracts. Raises ENGINE-08 for a single one: it must fit."""
        if len(running) < 2:
            raise InvariantViolation("ENGINE-08", "a request alone does not fit the pool that it was admitted to")
        return VICTIMS[self.retract_first](running, num_outputs)


NAMED_POLICIES: dict[str, Collection[str]] = {
    "retract_first": VICTIMS,
    "retracted_to": PLACES,
    "pause_until": PAUSES,
    "retry_after": RETRIES,
    "admit_with": ADMISSIONS,
    "row_slots": ROW_SLOTS,
    "released_at": RELEASES,
    "late_tokens": LATE_TOKENS,
    "sure_ends": SURE_ENDS,
    "short_chunk": SHORT_OF_SLOTS,
    "cached_at": CACHED_AT,
    "lone_token": LONE_TOKENS,
}
"""The rules that are chosen by name."""


class GuaranteedShare:
    """The share of the running requests' remaining output that a newcomer must leave free now.

    It begins at `guarantee_output` and falls with each decode round in a straight line, to `guarantee_floor` of itself.
    An idle engine sets it back. After a retraction it is what the remaining requests have emitted of what they may.
    """

    def __init__(self, share: float, policies: Policies) -> None:
        self._first = share
        self._least = share * policies.guarantee_floor
        self._fall = (self._first - self._least) / policies.guarantee_rounds
        self.reset()

    @property
    def falls(self) -> bool:
        """Whether the share is an estimate, and not the same at all times."""
        return self._fall > 0

    def reset(self) -> None:
        """Begin again: the engine is idle."""
        self._start, self._rounds = self._first, 0

    def count(self, rounds: int) -> None:
        """Count committed decode rounds."""
        self._rounds += rounds

    def now(self, rounds_in_flight: int) -> float:
        """Return the share, with `rounds_in_flight` rounds launched and not counted yet."""
        rounds = self._rounds + rounds_in_flight
        return self._start if rounds <= 0 or not self.falls else max(self._start - rounds * self._fall, self._least)

    def estimate(self, kept: Iterable[RequestRecord], num_outputs: NumOutputs, rounds_in_flight: int) -> None:
        """Estimate the share anew after a retraction that leaves the requests `kept`, if it is one that falls.

        The share begins to fall after the round for which the retraction has made room.
        """
        if not self.falls:
            return
        records = list(kept)
        emitted = sum(map(num_outputs, records)) + ESTIMATED_ROUNDS * len(records)
        self._start = min(1.0, emitted / (sum(record.max_tokens for record in records) + 1))
        self._rounds = -rounds_in_flight - 1


class AdmissionPause:
    """Whether admission pauses after a retraction: until the next decode round of a live row is committed, or only
    launched, or until the next plan (`Policies.pause_until`).

    It does not pause if no round can come. Without the pause two requests could retract each other in turns and neither
    would advance. A request that was given way to by smaller priorities is spared: none of them can retract it.
    """

    def __init__(self, policies: Policies) -> None:
        self._until = policies.pause_until
        self._has_begun = False
        self._greatest: float = -math.inf  # priority for which admission pauses

    def goes_on(self, may_have_rounds: bool) -> bool:
        """Return whether admission pauses. `may_have_rounds`: rows decode, or a step in flight has rounds."""
        return self._has_begun and (self._until == "plan" or may_have_rounds)

    def spares(self, head: RequestRecord | None) -> bool:
        """Return whether all that was retracted has given way to requests of this one's priority."""
        return self._has_begun and head is not None and head.request.priority > self._greatest

    def begin(self, greatest: float) -> None:
        """Pause for requests up to this priority: a request was retracted."""
        self._has_begun = True
        self._greatest = max(self._greatest, greatest)

    def end(self) -> None:
        self._has_begun = False
        self._greatest = -math.inf

    def pass_plan(self) -> None:
        """Take note of a plan that begins."""
        if self._until == "plan":
            self.end()

    def pass_launch(self) -> None:
        """Take note of a launched step with rounds."""
        if self._until == "launch":
            self.end()

    def pass_commit(self) -> None:
        """Take note of committed rounds of a live row."""
        if self._until == "commit":
            self.end()


class BatchWait:
    """How long newcomers have waited for more of them, beside requests that decode.

    They wait for `batch_wait_rounds` plans at most, and only while a step with all of them would have less than the
    share `batch_wait_tokens` of `chunk_size` in tokens.
    """

    def __init__(self, policies: Policies, chunk_size: int) -> None:
        self.is_used: bool = policies.batch_wait_rounds > 0
        self.enough_tokens: float = policies.batch_wait_tokens * chunk_size  # of a step, verified tokens included
        self._most_plans = policies.batch_wait_rounds
        self._num_plans = 0

    def goes_on(self, is_small: bool) -> bool:
        """Count a plan for which newcomers wait. Returns whether they do: the step is small, and they may wait on."""
        waits = is_small and self._num_plans < self._most_plans
        self._num_plans = self._num_plans + 1 if waits else 0
        return waits

    def end(self) -> None:
        """Begin to count anew: no newcomer has to wait."""
        self._num_plans = 0


OUR_POLICIES = Policies()
"""The default rules."""
