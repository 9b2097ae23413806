"""Decisions of another server's scheduler, stored, so that a test compares without its wheel.

One line of JSON for each workload: `[seed, digest of the workload, [step, …]]`. A step is a text of what changed since
the last one: `P` requests and tokens of their prompts, `D` the requests that decode, `X` who is preempted, `C` tokens
from the cache, `B` blocks in use. A number says how often the last step came again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from .comparison import SchedulerRun
from .workloads import Decision, DrawnWorkload, draw_workload

FILE = Path(__file__).with_name("vllm-0.33.0.jsonl")
RECORDED = (*range(38), 55, 60, 79)  # seeds; the last ones show rules that are seldom seen


class Record(NamedTuple):
    """What a release decided on one workload."""

    seed: int
    digest: str  # of the workload, so that a record is not compared with another one
    steps: list[str]


def digest_of(workload: DrawnWorkload) -> str:
    """Return eight hexadecimal digits of a workload's content. Its records were made when the classes of workloads had
    the same names without "Drawn"."""
    return hashlib.blake2b(repr(workload).replace("Drawn", "").encode(), digest_size=4).hexdigest()


def texts(decisions: Iterator[Decision]) -> Iterator[str]:
    """Yield the text of each decision."""
    decode: tuple[tuple[str, int], ...] = ()
    blocks = 0
    for decision in decisions:
        parts = []
        if decision.prefill:
            parts.append("P" + " ".join(f"{name}:{count}" for name, count in decision.prefill))
        if decision.decode != decode:
            parts.append("D" + " ".join(f"{name}:{count}" for name, count in decision.decode))
        if decision.preempted:
            parts.append("X" + " ".join(decision.preempted))
        if decision.cached:
            parts.append("C" + " ".join(f"{name}:{count}" for name, count in decision.cached))
        if decision.blocks != blocks:
            parts.append(f"B{decision.blocks}")
        decode, blocks = decision.decode, decision.blocks
        yield "|".join(parts)


def record_of(workload: DrawnWorkload, run: SchedulerRun) -> Record:
    """Return what a scheduler decides on a workload."""
    steps: list[str] = []
    again = 0
    for text in texts(run.decisions()):
        if text:
            steps += [str(again)] if again else []
            steps.append(text)
            again = 0
        else:
            again += 1
    return Record(workload.seed, digest_of(workload), [*steps, str(again)] if again else steps)


def store(start: Callable[[DrawnWorkload], SchedulerRun], version: str) -> int:
    """Store what a release decides on the workloads RECORDED. Returns their number."""
    lines = [json.dumps(["version", version])]
    for seed in RECORDED:
        workload = draw_workload(seed)
        lines.append(json.dumps(record_of(workload, start(workload)), separators=(",", ":")))
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines) - 1


def stored() -> list[Record]:
    """Return the stored records."""
    lines = FILE.read_text(encoding="utf-8").splitlines()[1:]
    return [Record(*json.loads(line)) for line in lines]


def expanded(record: Record) -> Iterator[str]:
    """Yield the text of each step of a record."""
    for step in record.steps:
        if step.isdecimal():
            yield from [""] * int(step)
        else:
            yield step


def share_of_steps(known: list[Record], start: Callable[[DrawnWorkload], SchedulerRun]) -> float:
    """Return the share of recorded steps that a scheduler repeats; none counts behind a workload's first difference."""
    steps = equal = 0
    for record in known:
        same = True
        for theirs, ours in zip_longest(expanded(record), texts(start(draw_workload(record.seed)).decisions())):
            same = same and theirs == ours
            steps += 1
            equal += same
    return equal / steps
