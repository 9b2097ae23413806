"""Single decisions of SGLang's scheduler, from its files, on stand-in objects, beside those of our rules.

SGLang's scheduler as a whole needs its workers. What runs alone here: the tracker of the share that a newcomer leaves
free, and the order in which requests give way. Each is asked about random states, and so are the objects of our engine
with the rules of the profile. `sglang_admission.py` has `PrefillAdder`, which admits, and `sglang_adaptive.py` the
number of draft steps.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from foredraft.checks.servers.release import name_wheel
from foredraft.checks.servers.sglang import open_sglang
from foredraft.checks.servers.wheel import load_functions, read_source
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.life import RequestRecord, RequestState
from foredraft.core.scheduler.rules import SGLangRules
from foredraft.sim.cost.server import PROFILES

from .workloads import Draws

_BATCH = "sglang/srt/managers/schedule_batch.py"


class _Setting:
    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        """Return the default of an environment variable."""
        return self._value


class SGLang:
    """An opened release of SGLang. A process can open one."""

    def __init__(self, path: Path) -> None:
        """Raise ConfigError if `path` is no wheel of SGLang, and no folder of an unpacked one."""
        name_wheel("sglang", path)
        self.version: str = open_sglang(any_release=True).version
        self.schedule = SimpleNamespace(
            schedule_conservativeness=1.0, retraction_policy="length", schedule_low_priority_values_first=False
        )
        vars(importlib.import_module("sglang.srt.environ"))["envs"] = _Settings(read_source(path, _ENVIRON))
        context = importlib.import_module("sglang.srt.runtime_context")
        vars(context)["get_schedule"] = lambda: self.schedule
        tracker = importlib.import_module("sglang.srt.managers.scheduler_components.new_token_ratio_tracker")
        self._tracker = tracker.NewTokenRatioTracker
        scope: dict[str, Any] = {"get_schedule": lambda: self.schedule, "sys": sys}
        name = "_get_decode_retraction_order"
        self._order = load_functions(path, _BATCH, [name], scope)[name]

    def shares(self, moves: list[str], requests: list[Any]) -> Iterator[float]:
        """Yield the share after each move: a decode step, an idle server, or a retraction that leaves `requests`."""
        tracker = self._tracker.from_config()
        for move in moves:
            if move == "step":
                tracker.decay_step()
            elif move == "idle":
                tracker.reset()
            else:
                tracker.current = tracker.estimate_new_token_ratio_after_retract(requests)
            yield tracker.current

    def victim(self, requests: list[Any], policy: str) -> int:
        """Return the index of the request that gives way first."""
        self.schedule.retraction_policy = policy
        return int(self._order(requests)[-1])


_ENVIRON = "sglang/srt/environ.py"


class _Settings:
    """Environment variables of the release with their defaults."""

    def __init__(self, source: str) -> None:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
                default = node.value.args[0]
                if isinstance(default, ast.Constant) and isinstance(node.targets[0], ast.Name):
                    setattr(self, node.targets[0].id, _Setting(default.value))


def _draw_requests(draws: Draws) -> list[SimpleNamespace]:
    """Draw running requests with the fields that SGLang's methods read."""
    return [
        SimpleNamespace(
            output_ids=range(draws.up_to(6)),
            origin_input_ids=range(draws.up_to(8, 1)),
            sampling_params=SimpleNamespace(max_new_tokens=draws.up_to(600, 10)),
            priority=draws.up_to(2),
        )
        for _ in range(draws.up_to(12, 2))
    ]


def _record(request: SimpleNamespace, number: int) -> RequestRecord:
    """Return our record of a request that decodes."""
    asked = Request(
        f"r{number}",
        Prompt.of_length(len(request.origin_input_ids)),
        request.sampling_params.max_new_tokens,
        request.priority,
    )
    made = RequestRecord(asked, number, asked.max_tokens)
    made.state = RequestState.DECODE
    return made


def count_equal_victims(release: SGLang, states: int, policy: str) -> int:
    """Return in how many random states the same request gives way."""
    equal, rules = 0, SGLangRules(retraction_policy=policy)
    for seed in range(states):
        requests = _draw_requests(Draws(seed))
        records = [_record(request, number) for number, request in enumerate(requests)]
        emitted = {id(record): len(request.output_ids) for record, request in zip(records, requests, strict=True)}
        chosen = rules.victim(records, lambda record, emitted=emitted: emitted[id(record)])
        equal += records[release.victim(requests, policy)] is chosen
    return equal


def count_equal_shares(release: SGLang, states: int) -> int:
    """Return in how many random histories the share is the same after each of 50 moves."""
    equal = 0
    for seed in range(states):
        draws = Draws(seed)
        requests = _draw_requests(draws)
        moves = [("step", "step", "step", "idle", "retract")[draws.up_to(4)] for _ in range(50)]
        equal += all(
            abs(theirs - ours) < 1e-9
            for theirs, ours in zip(release.shares(moves, requests), _our_shares(moves, requests), strict=True)
        )
    return equal


def _our_shares(moves: list[str], requests: list[SimpleNamespace]) -> Iterator[float]:
    share = PROFILES["sglang-0.5"].rules.share()
    records = [_record(request, number) for number, request in enumerate(requests)]
    emitted = {id(record): len(request.output_ids) for record, request in zip(records, requests, strict=True)}
    for move in moves:
        if move == "step":
            share.count(1)
        elif move == "idle":
            share.reset()
        else:
            share.estimate(records, lambda record: emitted[id(record)], 0)
            share.count(1)  # the round for which the retraction has made room, after which SGLang sets its share
        yield share.now(0)


def compare_rules(release: SGLang, states: int) -> list[tuple[str, str, int, int]]:
    """Return (decision, method of SGLang, states, states with the same answer)."""
    return [
        (
            "who gives way",
            "_get_decode_retraction_order, length",
            states,
            count_equal_victims(release, states, "length"),
        ),
        (
            "who gives way",
            "_get_decode_retraction_order, priority",
            states,
            count_equal_victims(release, states, "priority"),
        ),
        ("the share that a newcomer leaves free", "NewTokenRatioTracker", states, count_equal_shares(release, states)),
    ]
