"""Tables of steps as others read and write them: SGLang's files, vLLM's and TensorRT-LLM's schedules, a JSON schema for
editors.

SGLang reads `--speculative-adaptive-config`: the format is ours, less `min_dwell_batches`, `probe_backoff` and
`num_draft_tokens`. Its release 0.5.13 is the first with ranges of batch sizes (before: the flat form), 0.5.14 the first
with 0 steps. vLLM reads the key `num_speculative_tokens_per_batch_size` of `--speculative-config`: one number of steps
for each range, inclusive at both ends. A batch size between two ranges takes the steps of the range before it.
TensorRT-LLM reads `draft_len_schedule` beside `max_draft_len`: since its release 1.3 a key is the last batch size of a
range, and batches beyond the last one do not speculate.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeGuard

from ..errors import ConfigError, Problem
from .config import MAX_BATCH_SIZE_BOUND, MAX_STEPS, AdaptiveConfig, SlotConfig, load_adaptive_config
from .table_text import parse_table

SGLANG_RANGES_SINCE = (0, 5, 13)
SGLANG_ZERO_STEPS_SINCE = (0, 5, 14)
VLLM_SCHEDULE = "num_speculative_tokens_per_batch_size"
VLLM_MAX_STEPS = "num_speculative_tokens"
TRTLLM_SCHEDULE, TRTLLM_MAX_STEPS = "draft_len_schedule", "max_draft_len"
TARGETS = "sglang-VERSION (such as sglang-0.5.23), vllm or trtllm"


def export_table(config: AdaptiveConfig, target: str, max_batch_size: int = 512) -> str:
    """Return the table as text for `target`: "sglang-0.5.23" (any version; JSON), "vllm" (JSON), or "trtllm" (YAML).

    `max_batch_size` ends the last range of the latter two. Raises ConfigError with everything in the table that the
    target does not have.
    """
    if target == "vllm":
        return _vllm_json(config, max_batch_size)
    if target == "trtllm":
        return _trtllm_yaml(config, max_batch_size)
    version = re.fullmatch(r"sglang-v?(\d+(?:\.\d+)*)(?:\.?(?:post|rc|dev)\d+)?", target)
    if version is None:
        raise ConfigError.of("--for", "", f"is {target!r}; expected {TARGETS}")
    return _sglang_json(config, target, tuple(int(part) for part in version.group(1).split(".")))


def _sglang_json(config: AdaptiveConfig, target: str, version: tuple[int, ...]) -> str:
    problems: list[Problem] = []
    table: dict[str, dict[str, object]] = {}
    if version < SGLANG_RANGES_SINCE and config.bounds != (1,):
        message = f"{target} has one range for all batch sizes; ranges need {_written(SGLANG_RANGES_SINCE)} or later"
        problems.append(Problem("", message))
    for bound, slot in zip(config.bounds, config.slots, strict=True):
        if 0 in slot.candidate_steps and version < SGLANG_ZERO_STEPS_SINCE:
            message = f"has 0 steps, which {target} refuses; they need {_written(SGLANG_ZERO_STEPS_SINCE)} or later"
            problems.append(Problem(f"{bound}.candidate_steps", message))
        if slot.min_dwell_batches:
            message = f"is {slot.min_dwell_batches}; SGLang has no such key, expected 0"
            problems.append(Problem(f"{bound}.min_dwell_batches", message))
        if slot.num_draft_tokens is not None:
            message = "is given; SGLang's adaptive steps are for chains alone"
            problems.append(Problem(f"{bound}.num_draft_tokens", message))
        if slot.probe_backoff and 0 in slot.candidate_steps:
            message = "is true; SGLang tries drafts at every decision, expected false"
            problems.append(Problem(f"{bound}.probe_backoff", message))
        entry: dict[str, object] = {**asdict(slot), "candidate_steps": list(slot.candidate_steps)}
        del entry["min_dwell_batches"], entry["num_draft_tokens"], entry["probe_backoff"]
        table[str(bound)] = entry
    if problems:
        raise ConfigError(config.source, problems)
    return json.dumps(table if version >= SGLANG_RANGES_SINCE else table["1"], indent=2)


def _schedule(config: AdaptiveConfig, server: str, max_batch_size: int) -> list[tuple[int, int, int]]:
    """Return (first batch size, last batch size, steps) of every range.

    Raises ConfigError if a range has several candidates.
    """
    problems = [
        Problem(
            f"{bound}.candidate_steps",
            f"has {len(slot.candidate_steps)} candidates; {server} takes one number of steps for each range",
        )
        for bound, slot in zip(config.bounds, config.slots, strict=True)
        if len(slot.candidate_steps) > 1
    ]
    if config.bounds[-1] > max_batch_size:
        message = f"is beyond the largest batch size {max_batch_size}, where {server}'s last range ends"
        problems.append(Problem(str(config.bounds[-1]), message))
    if problems:
        raise ConfigError(config.source, problems)
    starts = (1, *config.bounds[1:])  # a batch below the first bound belongs to the first range
    ends = (*(start - 1 for start in starts[1:]), max_batch_size)
    return list(zip(starts, ends, (slot.candidate_steps[0] for slot in config.slots), strict=True))


def _vllm_json(config: AdaptiveConfig, max_batch_size: int) -> str:
    schedule = _schedule(config, "vLLM", max_batch_size)
    ranges = [f"    {json.dumps(entry)}" for entry in schedule]
    most = max(steps for _, _, steps in schedule)
    return "\n".join(["{", f'  "{VLLM_MAX_STEPS}": {most},', f'  "{VLLM_SCHEDULE}": [', ",\n".join(ranges), "  ]", "}"])


def _trtllm_yaml(config: AdaptiveConfig, max_batch_size: int) -> str:
    schedule = _schedule(config, "TensorRT-LLM", max_batch_size)
    most = schedule[0][2]
    problems = [
        Problem(f"{first}.candidate_steps", f"is {steps}; TensorRT-LLM takes no more than the first range has, {most}")
        for first, _, steps in schedule
        if steps > most
    ]
    if not most:
        problems.append(Problem("1.candidate_steps", "is 0; TensorRT-LLM takes 1 or more in the first range"))
    if problems:
        raise ConfigError(config.source, problems)
    while not schedule[-1][2]:  # batches beyond the last key do not speculate
        schedule.pop()
    keys = [f"  {last}: {steps}" for _, last, steps in schedule]
    return "\n".join([f"{TRTLLM_MAX_STEPS}: {most}", f"{TRTLLM_SCHEDULE}:", *keys])


def import_table(text: str, source: str = "<arguments>") -> AdaptiveConfig:
    """Return the table in the JSON text of an SGLang file or of a vLLM `--speculative-config`, or in a YAML file of
    TensorRT-LLM.

    `notices` name what was left out. Raises ConfigError with all problems at once.
    """
    if text.lstrip()[:1] not in ("{", "[") and f"{TRTLLM_SCHEDULE}:" in text:
        return _from_trtllm(text, source)
    table = parse_table(text, source)
    if isinstance(table, Mapping) and (VLLM_SCHEDULE in table or VLLM_MAX_STEPS in table):
        return _from_vllm(table, source)
    if isinstance(table, Mapping) and table.get("strategy") == "throughput_aware":
        message = (
            "is 'throughput_aware', which chooses by measured times; the policy goodput does so here, without ranges"
        )
        raise ConfigError.of(source, "strategy", message)
    return load_adaptive_config(table, source)


def _from_vllm(table: Mapping[str, Any], source: str) -> AdaptiveConfig:
    problems: list[Problem] = []
    asked, greatest = table.get(VLLM_MAX_STEPS), MAX_STEPS
    if _is_count(asked, 0, MAX_STEPS):
        greatest = asked
    else:
        problems.append(Problem(VLLM_MAX_STEPS, f"is {asked!r}; expected an integer from 0 to {MAX_STEPS}"))
    given = table.get(VLLM_SCHEDULE, [[1, MAX_BATCH_SIZE_BOUND, greatest]])
    ranges: list[tuple[int, int, int]] = []
    for place, entry in _vllm_entries(given):
        if (
            len(entry) == 3
            and _is_count(entry[0], 1)
            and _is_count(entry[1], entry[0])
            and _is_count(entry[2], 0, MAX_STEPS)
        ):
            ranges.append((entry[0], entry[1], entry[2]))
        else:
            message = f"is {list(entry)!r}; expected [first batch size, last batch size, steps]"
            problems.append(Problem(f"{VLLM_SCHEDULE}{place}", message))
    if not ranges and not problems:
        problems.append(Problem(VLLM_SCHEDULE, "has no range; expected for example [[1, 16, 3], [17, 512, 0]]"))
    ranges.sort()
    for (_, end, _), (start, _, _) in itertools.pairwise(ranges):
        if start <= end:
            problems.append(Problem(VLLM_SCHEDULE, f"has two ranges with batch size {start}; expected none to overlap"))
    if problems:
        raise ConfigError(source, problems)
    steps = {start: min(chosen, greatest) for start, _, chosen in ranges}
    notices = [
        f"{source}: {start}: {chosen} steps are cut to {VLLM_MAX_STEPS} = {greatest}"
        for start, _, chosen in ranges
        if chosen > greatest
    ]
    ignored = [key for key in table if key not in (VLLM_SCHEDULE, VLLM_MAX_STEPS)]
    if ignored:
        notices.append(f"{source}: left out, as a table of steps has no such keys: {', '.join(map(str, ignored))}")
    read = load_adaptive_config({str(start): {"candidate_steps": [chosen]} for start, chosen in steps.items()}, source)
    return AdaptiveConfig(read.bounds, read.slots, source, (*read.notices, *notices))


def _from_trtllm(text: str, source: str) -> AdaptiveConfig:
    """Read the schedule in YAML, in block or flow form; other keys are passed over."""
    pairs = r"\{[^}]*\}|(?:[ \t]*\n[ \t]+[0-9]+[ \t]*:[ \t]*[0-9]+[ \t]*(?:\#[^\n]*)?)+"
    if len(re.findall(rf"^[ \t]*{TRTLLM_SCHEDULE}:", text, re.MULTILINE)) > 1:
        raise ConfigError.of(source, TRTLLM_SCHEDULE, "is given twice")
    found = re.search(rf"^[ \t]*{TRTLLM_SCHEDULE}:[ \t]*({pairs})", text, re.MULTILINE)
    numbers = (
        re.findall(r"^\s*([0-9]{1,10})\s*:\s*([0-9]{1,10})", found[1].strip("{}").replace(",", "\n"), re.MULTILINE)
        if found
        else []
    )
    schedule = {int(last): int(steps) for last, steps in numbers}
    if len(schedule) < len(numbers):
        raise ConfigError.of(
            source, TRTLLM_SCHEDULE, f"has a batch size twice, of {[int(last) for last, _ in numbers]}"
        )
    wrong = [last for last, steps in schedule.items() if not last or steps > MAX_STEPS]
    if not schedule or wrong:
        message = f"is no schedule of last batch sizes with up to {MAX_STEPS} draft tokens; expected for example {{8: 3, 64: 1}}"
        raise ConfigError.of(source, TRTLLM_SCHEDULE, message)
    lasts = sorted(schedule)
    table = {start: schedule[last] for start, last in zip([1, *(last + 1 for last in lasts)], lasts, strict=False)}
    if schedule[lasts[-1]]:
        table[lasts[-1] + 1] = 0
    read = load_adaptive_config({str(start): {"candidate_steps": [steps]} for start, steps in table.items()}, source)
    notice = f"{source}: read as since TensorRT-LLM 1.3: a key of {TRTLLM_SCHEDULE} is the last batch size of its range"
    return AdaptiveConfig(read.bounds, read.slots, source, (*read.notices, notice))


def _vllm_entries(given: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Return (place, entry) of a schedule in either form: a list of [first, last, steps], or an object {"1-16": 3}."""
    if isinstance(given, list):
        return [(f"[{i}]", tuple(entry) if isinstance(entry, list) else (entry,)) for i, entry in enumerate(given)]
    if not isinstance(given, Mapping):
        return [("", (given,))]
    entries = []
    for key, steps in given.items():
        ends = re.fullmatch(r"(\d{1,10})-(\d{1,10})", str(key), re.ASCII)
        entries.append((f".{key}", (int(ends[1]), int(ends[2]), steps) if ends else (key, steps)))
    return entries


def _is_count(value: Any, least: int, most: int = MAX_BATCH_SIZE_BOUND) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _written(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def to_json(config: AdaptiveConfig) -> str:
    """Return the table as JSON text in our own format, with a key for every value that is not the default."""
    default = {field.name: field.default for field in fields(SlotConfig)}
    table = {}
    for bound, slot in zip(config.bounds, config.slots, strict=True):
        entry = {key: value for key, value in asdict(slot).items() if value != default[key]}
        if isinstance(slot.num_draft_tokens, tuple):
            entry["num_draft_tokens"] = {str(steps): nodes for steps, nodes in slot.num_draft_tokens}
        table[str(bound)] = entry | {"candidate_steps": list(slot.candidate_steps)}
    return json.dumps(table, indent=2)


def table_schema() -> dict[str, Any]:
    """Return the JSON schema of a table in our own format."""
    whole = {"type": "integer", "minimum": 0}
    types: dict[str, dict[str, Any]] = {
        "candidate_steps": {"type": "array", "minItems": 1, "items": whole | {"maximum": MAX_STEPS}},
        "ema_alpha": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "update_interval": {"type": "integer", "minimum": 1},
        "warmup_batches": whole,
        "up_hysteresis": {"type": "number"},
        "down_hysteresis": {"type": "number"},
        "ceiling_coeff": {"type": "number", "minimum": 0},
        "min_dwell_batches": whole,
        "probe_backoff": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "num_draft_tokens": {
            "anyOf": [
                {"type": "integer", "minimum": 2},
                {"type": "object", "patternProperties": {"^[0-9]+$": {"type": "integer", "minimum": 2}}, "additionalProperties": False},
            ]
        },
    }  # fmt: skip
    properties = {}
    for field in fields(SlotConfig):
        default = {"default": field.default} if isinstance(field.default, int | float) else {}
        properties[field.name] = {"description": field.metadata["meaning"], **default, **types[field.name]}
    comments = {"^_": {"description": "a comment"}}
    return {
        "type": "object",
        "description": "ranges of batch sizes by their smallest; the other keys are defaults for all ranges",
        "properties": properties | {"strategy": {"const": "ema", "description": "of SGLang's files"}},
        "patternProperties": comments
        | {
            "^[0-9]+$": {
                "type": "object",
                "properties": properties,
                "patternProperties": comments,
                "required": ["candidate_steps"],
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
    }
