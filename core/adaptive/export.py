"""Writing an adaptive table for SGLang's `--speculative-adaptive-config`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

from ..errors import ConfigError, Problem
from .config import AdaptiveConfig


def to_sglang_json(
    config: AdaptiveConfig, *, sglang_version: str | None = None, zero_steps_since: str | None = None
) -> str:
    """Return the table as JSON text that SGLang reads: always keyed by batch size, every knob written out.

    A candidate of 0 steps needs an SGLang that knows it: `sglang_version` is the version the file is for and
    `zero_steps_since` the first version with 0 steps; both must be given, in order, or the table is refused.
    Raises `ConfigError` for that, and for `min_dwell_batches` and `num_draft_tokens`, which SGLang does not have.
    """
    problems: list[Problem] = []
    zero_ready = (
        sglang_version is not None
        and zero_steps_since is not None
        and _numbers(sglang_version, "sglang_version") >= _numbers(zero_steps_since, "zero_steps_since")
    )
    table: dict[str, dict[str, object]] = {}
    for bound, slot in zip(config.bounds, config.slots, strict=True):
        if 0 in slot.candidate_steps and not zero_ready:
            target = f"SGLang {sglang_version}" if sglang_version else "an unstated SGLang version"
            since = f"since {zero_steps_since}" if zero_steps_since else "in a version that was not stated"
            message = (
                f"has a candidate of 0 steps, which SGLang reads {since}; this export is for {target}."
                " Give sglang_version and zero_steps_since, or drop the 0"
            )
            problems.append(Problem(f"{bound}.candidate_steps", message))
        if slot.min_dwell_batches:
            message = f"is {slot.min_dwell_batches}; SGLang has no such key, expected 0 for an export"
            problems.append(Problem(f"{bound}.min_dwell_batches", message))
        if slot.num_draft_tokens is not None:
            message = "is given; SGLang has one number for all ranges, --speculative-num-draft-tokens"
            problems.append(Problem(f"{bound}.num_draft_tokens", message))
        entry = asdict(slot)
        del entry["min_dwell_batches"], entry["num_draft_tokens"]
        entry["candidate_steps"] = list(slot.candidate_steps)
        table[str(bound)] = entry
    if problems:
        raise ConfigError(config.source, problems)
    return json.dumps(table, indent=2)


def _numbers(version: str, name: str) -> tuple[int, ...]:
    """`v0.5.10.post1` as (0, 5, 10): only the dotted numbers decide, padded so that 0.6 equals 0.6.0."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if not found:
        raise ConfigError("<arguments>", [Problem(name, f"is {version!r}; expected a version such as 0.5.3")])
    numbers = tuple(int(part) for part in found.group(1).split("."))
    return numbers + (0,) * (6 - len(numbers))
