"""Random workloads for two schedulers, and the device that both of them drive.

Everything is a pure function of a seed: prompts, arrivals, what each round accepts, where an output ends. So two
schedulers that decide alike see the same tokens. Time is counted in plans: a request arrives before a given plan, or so
many plans after another request has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from foredraft.core.draws import Purpose, hash64, request_key

BLOCK = 16  # tokens of a KV block, vLLM's default
CONTEXT = 8192
STOP_TOKEN = 2
_FIRST_TOKEN = 10  # below it are tokens with a meaning
_VOCABULARY = 50_000


class Draws:
    """Integers of one workload, drawn one after the other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._position = 0

    def up_to(self, most: int, least: int = 0) -> int:
        """Draw an integer from `least` to `most`."""
        self._position += 1
        bits = int(hash64(self._seed, Purpose.LENGTH, 0, self._position))
        return least + bits % (most - least + 1)

    def happens(self, percent: int) -> bool:
        return self.up_to(99) < percent


@dataclass(frozen=True)
class DrawnCall:
    """One request. It arrives before plan `arrival`, counted from the end of request `after` where that is given."""

    name: str
    prompt: tuple[int, ...]  # tokens; behind those of `after`, prompt and output, where that is given
    max_tokens: int
    output: int  # the length at which it meets a stop token; beyond `max_tokens`: it meets none
    arrival: int
    after: str = ""
    patience: int = 0  # its client gives it up so many plans after it arrived; 0: never


@dataclass(frozen=True)
class DrawnWorkload:
    """Requests, and the settings of a server that serves them."""

    seed: int
    blocks: int  # KV blocks that requests can have
    max_running: int
    budget: int  # tokens of one step
    steps: int  # draft tokens of a round; 0: no speculation
    drafts_have_kv: bool
    is_async: bool
    caches: bool
    calls: tuple[DrawnCall, ...]

    @property
    def method(self) -> str:
        """The name of its drafts for the tables."""
        return "none" if not self.steps else "eagle3" if self.drafts_have_kv else "ngram"

    def token(self, name: str, position: int) -> int:
        """Return the output token of a request at a position; a stop token ends the output."""
        call = self.by_name[name]
        if position + 1 == call.output:
            return STOP_TOKEN
        drawn = int(hash64(self.seed, Purpose.TOKEN, request_key(name), position))
        return _FIRST_TOKEN + drawn % (_VOCABULARY - _FIRST_TOKEN)

    def accepted(self, name: str, position: int) -> int:
        """Return how many drafts of a round are accepted that begins behind `position` output tokens."""
        drawn = int(hash64(self.seed, Purpose.ACCEPTANCE, request_key(name), position))
        return drawn % (self.steps + 1)

    def full_prompt(self, name: str) -> list[int]:
        """Return the tokens of a prompt, with those of the request that it continues."""
        call = self.by_name[name]
        if not call.after or not self.is_turn(call):
            return list(call.prompt)
        before = self.by_name[call.after]
        length = min(before.output, before.max_tokens)
        answer = [self.token(before.name, position) for position in range(length)]
        return self.full_prompt(before.name) + answer + list(call.prompt)

    @staticmethod
    def is_turn(call: DrawnCall) -> bool:
        """Return whether a request continues the one after which it comes."""
        return call.name.endswith("+")

    @property
    def by_name(self) -> dict[str, DrawnCall]:
        cached = self.__dict__.get("_by_name")
        if cached is None:
            cached = {call.name: call for call in self.calls}
            object.__setattr__(self, "_by_name", cached)
        return cached


def draw_workload(seed: int) -> DrawnWorkload:
    """Draw a workload. Its settings make each feature frequent: a third to a half of all workloads has it."""
    draws = Draws(seed)
    steps = draws.up_to(5, 1) if draws.happens(45) else 0
    has_prefixes, is_tight, has_chunks = draws.happens(50), draws.happens(50), draws.happens(50)
    has_aborts = draws.happens(20)
    max_running = draws.up_to(12, 2)
    longest = draws.up_to(400, 40)
    calls: list[DrawnCall] = []
    shared = [_content(seed, 1_000 + group, draws.up_to(200, 8)) for group in range(3)]
    arrival = 0
    for number in range(draws.up_to(30, 10)):
        name = f"r{number}"
        arrival += draws.up_to(draws.up_to(12))
        tokens = _content(seed, number, draws.up_to(longest, 1))
        if has_prefixes and draws.happens(60):
            tokens = shared[draws.up_to(2)] + tokens[: draws.up_to(len(tokens))]
        if has_prefixes and calls and draws.happens(10):
            tokens = calls[draws.up_to(len(calls) - 1)].prompt
        most = draws.up_to(80, 1)
        output = draws.up_to(80, 1) if draws.happens(40) else most + 1
        patience = draws.up_to(40, 1) if has_aborts and draws.happens(20) else 0
        calls.append(DrawnCall(name, tokens, most, output, arrival, patience=patience))
        if has_prefixes and draws.happens(25):
            turn = _content(seed, 500 + number, draws.up_to(60, 1))
            most = draws.up_to(60, 1)
            calls.append(DrawnCall(f"{name}+", turn, most, most + 1, draws.up_to(20), name))
    workload = DrawnWorkload(
        seed=seed,
        blocks=0,
        max_running=max_running,
        budget=0,
        steps=steps,
        drafts_have_kv=draws.happens(60),
        is_async=draws.happens(80),
        caches=has_prefixes or draws.happens(50),
        calls=tuple(calls),
    )
    ends = [len(workload.full_prompt(call.name)) + call.max_tokens for call in calls]
    longest_blocks = -(-(max(ends) + 3 * (steps + 1)) // BLOCK)
    spare = draws.up_to(3 * longest_blocks) if is_tight else max_running * longest_blocks
    rows = max_running * (steps + 1)
    budget = rows + draws.up_to(longest, 1) if has_chunks else rows + 2 * longest
    return replace(workload, blocks=longest_blocks + 3 + spare, budget=budget)


def _content(seed: int, stream: int, length: int) -> tuple[int, ...]:
    drawn = hash64(seed, Purpose.PREFIX, stream, np.arange(length))
    return tuple((_FIRST_TOKEN + drawn % np.uint64(_VOCABULARY - _FIRST_TOKEN)).tolist())


class Device:
    """Computes the tokens of steps in the order in which they are launched. It knows how far each output is."""

    def __init__(self, workload: DrawnWorkload) -> None:
        self.workload = workload
        self.emitted: dict[str, int] = {}

    def end_prompt(self, name: str, emitted: int) -> int:
        """Return the token that a prompt's last chunk samples, behind `emitted` output tokens."""
        self.emitted[name] = emitted + 1
        return self.workload.token(name, emitted)

    def verify(self, name: str, num_drafts: int) -> list[int]:
        """Return the tokens that a round with so many drafts emits."""
        start = self.emitted[name]
        length = 1 + min(self.workload.accepted(name, start), num_drafts)
        self.emitted[name] = start + length
        return [self.workload.token(name, start + i) for i in range(length)]


class Decision(NamedTuple):
    """What a scheduler decided in one plan. Requests are named; the order of `computed` is that of the step."""

    prefill: tuple[tuple[str, int], ...]  # request, tokens of its prompt
    decode: tuple[tuple[str, int], ...]  # request, tokens of its round
    preempted: tuple[str, ...]
    cached: tuple[tuple[str, int], ...]  # request that enters, tokens from the prefix cache
    blocks: int  # KV blocks in use behind the plan


class DrawnArrivals:
    """Which requests arrive before a plan."""

    def __init__(self, workload: DrawnWorkload) -> None:
        self._due: list[tuple[int, int, DrawnCall]] = []
        self._following: dict[str, list[DrawnCall]] = {}
        self._patience: dict[str, int] = {}  # the plan before which a live request is given up
        self._plan = 0
        for number, call in enumerate(workload.calls):
            if call.after:
                self._following.setdefault(call.after, []).append(call)
            else:
                self._due.append((call.arrival, number, call))
        self._due.sort(key=lambda entry: entry[:2])

    @property
    def is_over(self) -> bool:
        return not self._due

    def end(self, name: str) -> None:
        """Let the requests that follow `name` arrive so many plans later."""
        self._patience.pop(name, None)
        for call in self._following.pop(name, ()):
            self._due.append((self._plan + call.arrival, len(self._due), call))
        self._due.sort(key=lambda entry: entry[:2])

    def before_plan(self, plan: int) -> Iterator[DrawnCall]:
        """Yield the requests that arrive before plan number `plan`."""
        self._plan = plan
        while self._due and self._due[0][0] <= plan:
            call = self._due.pop(0)[2]
            if call.patience:
                self._patience[call.name] = plan + call.patience
            yield call

    def given_up(self) -> list[str]:
        """Return the requests that their clients give up before this plan."""
        return [name for name, plan in self._patience.items() if plan <= self._plan]
