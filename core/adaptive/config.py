"""The table of adaptive steps: batch-size ranges, their candidates and the knobs of the EMA rule.

A table is a JSON object. A key of ASCII digits is the lower bound of a batch-size range and maps to an entry. Keys that
begin with "_" are comments, the others are defaults for all entries (docs/planning.md). `load_adaptive_config` reads a
dict, a JSON text, a preset's name, or a file through a function that opens it, and reports every problem at once.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeGuard

from ..errors import ConfigError, ForedraftError, Problem, nearest
from .table_text import json_kind, key_path, parse_table, repeated_keys

ReadFile = Callable[[str], str]
"""Returns the text of a file by its path, or raises ConfigError; core opens no files itself."""

TreeNodes = int | tuple[tuple[int, int], ...]
"""Nodes of verify trees, including roots: one number for every step count, or ascending (steps, nodes) pairs."""

MAX_BATCH_SIZE_BOUND = 1 << 30
MAX_STEPS = 1 << 10

_BATCH_SIZE_KEY = re.compile(r"[0-9]+")


class InvalidInitialSteps(ForedraftError):
    """The initial step count is not in the union of candidates; the message names both."""


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """The rule of one batch-size range; `candidate_steps` is sorted and has no duplicates.

    The documentation and the JSON schema explain each field. The EMA is that of correct drafts per request.
    """

    candidate_steps: tuple[int, ...] = field(metadata={"meaning": "draft steps to choose from; 0 is plain decoding"})
    ema_alpha: float = field(default=0.2, metadata={"meaning": "weight of the newest verify result in the EMA"})
    update_interval: int = field(default=5, metadata={"meaning": "number of verify results between two decisions"})
    warmup_batches: int = field(
        default=10, metadata={"meaning": "number of verify results before the first decision; the EMA counts them"}
    )
    up_hysteresis: float = field(
        default=0.0, metadata={"meaning": "steps rise while the EMA is above steps − 0.5 + this value"}
    )
    down_hysteresis: float = field(
        default=-0.25,
        metadata={
            "meaning": "steps drop to the next lower candidate while the EMA ≤ that candidate − 0.5 + this value"
        },
    )
    ceiling_coeff: float = field(
        default=0.0,
        metadata={"meaning": "0: off; else steps that do not rise are at most the EMA times this value, rounded up"},
    )
    min_dwell_batches: int = field(
        default=0,
        metadata={"meaning": "0: off; else verify results between two switches; each reversal doubles it, up to 2,048"},
    )
    probe_backoff: bool | None = field(
        default=None,
        metadata={
            "meaning": "true: after 0 steps each failed try of drafts doubles the wait for the next, up to 32 decisions; "
            "false: every decision tries (SGLang); default: as in the server, mostly true"
        },
    )
    num_draft_tokens: TreeNodes | None = field(
        default=None,
        metadata={
            "meaning": "nodes of verify trees, roots included: one number, or an object by steps; default: up to 16"
        },
    )


@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """A whole table: `bounds` ascending, `slots[i]` the rule for batch sizes from `bounds[i]` on.

    `notices` are sentences for the user about input that was read in an unusual way. The caller may print them.
    """

    bounds: tuple[int, ...]
    slots: tuple[SlotConfig, ...]
    source: str = "<arguments>"
    notices: tuple[str, ...] = ()

    def with_probe_backoff(self, backs_off: bool) -> AdaptiveConfig:
        """Return the table with this rule in the ranges that give none."""
        slots = [replace(slot, probe_backoff=backs_off) if slot.probe_backoff is None else slot for slot in self.slots]
        return replace(self, slots=tuple(slots))

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """The sorted union over all ranges."""
        return tuple(sorted({step for slot in self.slots for step in slot.candidate_steps}))


_KNOBS = tuple(knob.name for knob in fields(SlotConfig) if knob.name != "candidate_steps")
_ENTRY_KEYS = ("candidate_steps", *_KNOBS)

_EXPECTED_STEPS = "expected a non-empty list of integers >= 0, for example [1, 3, 7]"

PRESETS: dict[str, dict[str, Any]] = {
    "default": {
        "1": {"candidate_steps": [1, 3, 7], "down_hysteresis": -0.25},
        "8": {"candidate_steps": [1, 3], "down_hysteresis": 0.0},
        "32": {"candidate_steps": [1], "down_hysteresis": 0.0},
    },
    "with-zero": {
        "1": {"candidate_steps": [1, 3, 5, 7], "down_hysteresis": -0.25},
        "8": {"candidate_steps": [0, 1, 3], "down_hysteresis": 0.0},
        "32": {"candidate_steps": [0, 1], "down_hysteresis": 0.0},
        "64": {"candidate_steps": [0], "down_hysteresis": 0.0},
    },
    "zero-to-seven": {"1": {"candidate_steps": [0, 1, 2, 3, 4, 5, 6, 7]}},
}
DEFAULT_PRESETS = {"ema": "default", "goodput": "zero-to-seven", "confidence": "zero-to-seven"}
"""Policy -> its default preset. A policy that knows the cost of a round needs no ranges."""


def load_adaptive_config(
    given: str | Mapping[str, Any] | AdaptiveConfig | None, source: str | None = None, read_file: ReadFile | None = None
) -> AdaptiveConfig:
    """Read a table from a dict, a JSON text (it begins with `{`), a preset's name, or the path of a file for
    `read_file`. None is the preset "default".

    `source` names the input in messages; the default is the path, or `<arguments>`. Raises ConfigError with all
    problems at once.
    """
    if isinstance(given, AdaptiveConfig):
        return given
    given = "default" if given is None else given
    if isinstance(given, Mapping):
        return _read_table(given, source or "<arguments>")
    if given in PRESETS:
        return _read_table(PRESETS[given], source or f"preset {given}")
    if given.lstrip()[:1] in ("{", "[") or not given.strip():
        source = source or "<arguments>"
        return _read_table(parse_table(given, source), source)
    hint, presets = nearest(given, PRESETS), ", ".join(PRESETS)
    if read_file is None:
        message = f"{given!r} is no JSON object and none of the presets {presets}{hint}; a file needs `read_file`"
        raise ConfigError.of(source or "<arguments>", "", message)
    try:
        text = read_file(given)
    except ConfigError as error:
        expected = f"{hint}; expected a JSON file or one of the presets {presets}"
        problems = [Problem(problem.key, f"{problem.message}{expected}") for problem in error.problems]
        raise ConfigError(source or given, problems) from error
    return _read_table(parse_table(text, source or given), source or given)


def _read_table(table: Any, source: str) -> AdaptiveConfig:
    problems: list[Problem] = []
    if not isinstance(table, Mapping):
        message = f"is {json_kind(table)}; expected a JSON object of batch-size keys"
        raise ConfigError.of(source, "", message)
    problems += [Problem(key, "is written twice; expected each key once") for key in repeated_keys(table)]
    bound_keys = [key for key in table if isinstance(key, str) and _BATCH_SIZE_KEY.fullmatch(key)]
    notices: list[str] = []
    if not bound_keys:
        if "candidate_steps" not in table:
            _check_known(table, "", _ENTRY_KEYS, problems)
            message = "has neither a batch-size key nor candidate_steps; expected for example"
            problems.append(Problem("", message + ' {"1": {"candidate_steps": [1, 3, 7]}}'))
            raise ConfigError(source, problems)
        notices.append(f'{source}: the flat form is read as {{"1": ...}}, one range for all batch sizes')
        slot = _read_entry(table, {}, "", problems)
        if problems or slot is None:
            raise ConfigError(source, problems)
        return _finished((1,), (slot,), source, notices)

    defaults_and_bounds = {key: value for key, value in table.items() if key not in bound_keys}
    _check_known(defaults_and_bounds, "", _ENTRY_KEYS, problems)
    if "candidate_steps" in table:
        notices.append(f"{source}: candidate_steps beside batch-size keys has no effect; each entry has its own")
    defaults = _read_knobs(defaults_and_bounds, "", problems)
    entries: dict[int, SlotConfig | None] = {}
    key_of_bound: dict[int, str] = {}
    for key in bound_keys:
        if len(key) > 10 or int(key) > MAX_BATCH_SIZE_BOUND:
            problems.append(Problem(key[:20], f"is too large; expected a batch size up to {MAX_BATCH_SIZE_BOUND}"))
            continue
        bound = int(key)
        if bound in key_of_bound:
            message = f"means batch size {bound}, as {key_of_bound[bound]!r} does; expected one key for each number"
            problems.append(Problem(key, message))
        key_of_bound[bound] = key
        entries[bound] = _read_entry(table[key], defaults, key, problems)
    union = tuple(sorted({steps for slot in entries.values() if slot is not None for steps in slot.candidate_steps}))
    if not problems:
        problems += _of_no_candidate(defaults.get("num_draft_tokens"), union, "")
    if problems:
        raise ConfigError(source, problems)
    slots = {bound: slot for bound, slot in sorted(entries.items()) if slot is not None}  # all: there are no problems
    return _finished(tuple(slots), tuple(slots.values()), source, notices)


def _finished(
    bounds: tuple[int, ...], slots: tuple[SlotConfig, ...], source: str, notices: list[str]
) -> AdaptiveConfig:
    for bound, slot in zip(bounds, slots, strict=True):
        steps = slot.candidate_steps
        undone = [
            high
            for low, high in itertools.pairwise(steps)
            # A rise from `low` happens just above this EMA; the ceiling must not undo it at the next recompute.
            if slot.ceiling_coeff > 0
            and low > 0
            and max(1, math.ceil(max(0.0, low - 0.5 + slot.up_hysteresis) * slot.ceiling_coeff)) < high
        ]
        if undone:
            notices.append(
                f"{source}: {bound}.ceiling_coeff: {slot.ceiling_coeff} can undo a rise to {undone[0]} steps and so"
                " oscillate; a larger coefficient or min_dwell_batches bounds it"
            )
    return AdaptiveConfig(bounds, slots, source, tuple(notices))


def slot_config(cfg: SlotConfig | Mapping[str, Any]) -> SlotConfig:
    """Read one entry from a mapping, checked as in a file. Raises `ConfigError`."""
    if isinstance(cfg, SlotConfig):
        return cfg
    problems: list[Problem] = []
    slot = _read_entry(cfg, {}, "", problems)
    if problems or slot is None:
        raise ConfigError("<arguments>", problems)
    return slot


def _read_entry(entry: Any, defaults: Mapping[str, Any], key: str, problems: list[Problem]) -> SlotConfig | None:
    """Return the slot of one entry over the table's defaults, or None with the reasons appended to `problems`."""
    before = len(problems)
    if not isinstance(entry, Mapping):
        problems.append(Problem(key, f"is {json_kind(entry)}; expected an object with candidate_steps"))
        return None
    if key:
        problems += [
            Problem(f"{key}.{name}", "is written twice; expected each key once") for name in repeated_keys(entry)
        ]
    _check_known(entry, key, _ENTRY_KEYS, problems)
    steps = _read_steps(entry, key, problems)
    own = _read_knobs(entry, key, problems)
    if steps:
        problems += _of_no_candidate(own.get("num_draft_tokens"), steps, key)
    knobs = {**defaults, **own}
    if isinstance(knobs.get("num_draft_tokens"), tuple):
        knobs["num_draft_tokens"] = tuple(pair for pair in knobs["num_draft_tokens"] if pair[0] in steps) or None
    up = knobs.get("up_hysteresis", 0.0)
    down = knobs.get("down_hysteresis", -0.25)
    if up < down:
        message = (
            f"is {up}, below down_hysteresis {down}; expected up_hysteresis >= down_hysteresis (it would oscillate)"
        )
        problems.append(Problem(key_path(key, "up_hysteresis"), message))
    return SlotConfig(steps, **knobs) if len(problems) == before else None


def _read_steps(entry: Mapping[str, Any], key: str, problems: list[Problem]) -> tuple[int, ...]:
    place = key_path(key, "candidate_steps")
    if "candidate_steps" not in entry:
        problems.append(Problem(place, f"is missing; {_EXPECTED_STEPS}"))
        return ()
    steps = entry["candidate_steps"]
    if not isinstance(steps, list | tuple):
        problems.append(Problem(place, f"is {json_kind(steps)}; {_EXPECTED_STEPS}"))
        return ()
    if not steps:
        problems.append(Problem(place, f"is empty; {_EXPECTED_STEPS}"))
    before = len(problems)
    for index, step in enumerate(steps):
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEPS:
            what = f"is {step!r}" if isinstance(step, int | float) else f"is {json_kind(step)}"
            problems.append(Problem(f"{place}[{index}]", f"{what}; expected an integer from 0 to {MAX_STEPS}"))
    return tuple(sorted(set(steps))) if len(problems) == before else ()


def _read_knobs(entry: Mapping[str, Any], key: str, problems: list[Problem]) -> dict[str, Any]:
    """Return the valid knobs that `entry` gives; each invalid one is a problem."""
    knobs: dict[str, Any] = {}
    for name in _KNOBS:
        if name not in entry:
            continue
        value = entry[name]
        if name == "num_draft_tokens":
            knobs[name] = read_tree_nodes(value, key_path(key, name), problems)
            continue
        expected = _refusal(name, value)
        if expected is None:
            knobs[name] = value if name in _INTEGER_MINIMUM or name == "probe_backoff" else float(value)
        else:
            what = f"is {value!r}" if isinstance(value, int | float) else f"is {json_kind(value)}"
            problems.append(Problem(key_path(key, name), f"{what}; expected {expected}"))
    return knobs


def read_tree_nodes(value: Any, place: str, problems: list[Problem]) -> TreeNodes | None:
    """Return the nodes of verify trees: from one number >= 2, or from an object of step counts (keys of digits, or
    integers).

    None means the default. Appends a message to `problems` for each invalid value.
    """
    if value is None:
        return None
    if _is_integer(value):
        if value >= 2:
            return value
        problems.append(Problem(place, f"{value} is the root alone, expected 2 or more"))
        return None
    if not isinstance(value, Mapping) or not value:
        expected = 'expected an integer >= 2, or an object of step counts, for example {"1": 5, "3": 16}'
        what = f"is {value!r}" if isinstance(value, float) else f"is {json_kind(value)}"
        problems.append(Problem(place, f"{what}; {expected}"))
        return None
    pairs: list[tuple[int, int]] = []
    for key, nodes in value.items():
        digits = _BATCH_SIZE_KEY.fullmatch(str(key)) and len(str(key)) <= 10
        if not digits or not 1 <= int(key) <= MAX_STEPS:
            problems.append(
                Problem(f"{place}.{str(key)[:20]}", f"is no step count; expected one from 1 to {MAX_STEPS}")
            )
        elif not _is_integer(nodes) or nodes < 2:
            what = f"is {nodes!r}" if isinstance(nodes, int | float) else f"is {json_kind(nodes)}"
            problems.append(Problem(f"{place}.{key}", f"{what}; expected an integer >= 2"))
        elif int(key) in dict(pairs):
            problems.append(Problem(f"{place}.{key}", "means a step count that is already there; expected each once"))
        else:
            pairs.append((int(key), nodes))
    return tuple(sorted(pairs))


def _of_no_candidate(nodes: TreeNodes | None, candidates: tuple[int, ...], key: str) -> list[Problem]:
    """Return the problems of nodes that are given for step counts outside the candidates, because they would have no
    effect.
    """
    given = [steps for steps, _ in nodes] if isinstance(nodes, tuple) else []
    message = f"is for no candidate; expected some of {[steps for steps in candidates if steps]}"
    return [
        Problem(f"{key_path(key, 'num_draft_tokens')}.{steps}", message) for steps in given if steps not in candidates
    ]


def nodes_for(steps: int, *given: TreeNodes | None) -> int | None:
    """Return the nodes of a tree of `steps` steps from the first entry of `given` that has them, or None."""
    for nodes in given:
        found = dict(nodes).get(steps) if isinstance(nodes, tuple) else nodes
        if found is not None:
            return found
    return None


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_INTEGER_MINIMUM = {"update_interval": 1, "warmup_batches": 0, "min_dwell_batches": 0}


def _refusal(name: str, value: Any) -> str | None:
    """Return the expected form of knob `name`, or None if `value` is valid."""
    if name in _INTEGER_MINIMUM:
        valid = _is_integer(value) and value >= _INTEGER_MINIMUM[name]
        return None if valid else f"an integer >= {_INTEGER_MINIMUM[name]}"
    if name == "probe_backoff":
        return None if value is None or isinstance(value, bool) else "true or false"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    finite = number and abs(value) <= 1e9  # False for NaN too
    if name == "ema_alpha":
        return None if finite and 0 < value <= 1 else "a number in (0, 1]"
    if name == "ceiling_coeff":
        return None if finite and value >= 0 else "a finite number >= 0"
    return None if finite else "a finite number"


def _check_known(table: Mapping[str, Any], key: str, known: tuple[str, ...], problems: list[Problem]) -> None:
    for name, value in table.items():
        if name == "strategy" and not key:  # SGLang's files may have it
            if value != "ema":
                problems.append(Problem(name, f"is {value!r}; expected 'ema': a table is for that policy"))
        elif name not in known and not str(name).startswith("_"):
            options = ", ".join(known) + ("" if key else ", or a batch size in digits")
            message = f"is not a known key{nearest(str(name), known)}; expected one of {options}"
            problems.append(Problem(key_path(key, str(name)), message))


def resolve_initial_steps(config: AdaptiveConfig, initial_steps: int | None = None) -> int:
    """Return the step count to start with: the given one, or the middle of the union of candidates.

    Raises `InvalidInitialSteps`, naming the value and the union, if the given one is no candidate.
    """
    union = config.candidate_steps
    if initial_steps is None:
        return union[len(union) // 2]
    if isinstance(initial_steps, bool) or initial_steps not in union:
        message = f"{config.source}: initial steps {initial_steps!r} is not one of the candidate steps {list(union)}"
        raise InvalidInitialSteps(message)
    return int(initial_steps)


def fixed_config(steps: int) -> AdaptiveConfig:
    """Return a table with one range and one candidate.

    Raises `ConfigError` unless the step count is an integer >= 0.
    """
    return _read_table({"1": {"candidate_steps": [steps]}}, "<fixed steps>")
