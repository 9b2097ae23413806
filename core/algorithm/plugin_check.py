"""The check of a plugin: what its class must offer, and what its methods may answer.

Registration inspects the class and runs none of its code: every attribute and method of `SpecAlgorithm` must be there
with its signature. When a command first asks for the name, the check calls its methods with a small shape; the methods
are pure. By then its module has been executed, so that a method may name its own class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..acceptance.presets import PRESET_NAMES
from ..contract.future_map import LENGTH_FIELD, RelayField
from ..contract.handoff_batch import HandoffBatch
from ..errors import Problem, nearest
from .algorithm import BONUS_TOKENS, AlgorithmShape, Drafter, DraftKV, SpecAlgorithm
from .proposer import Proposer


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """The attributes that an algorithm must declare for each kind of drafter, because executors build from them."""

    draft_forms: tuple[str, ...]  # of checkpoints
    draft_kv: DraftKV
    needs_hidden_states: bool
    fields: tuple[str, ...]  # that it relays; a proposer may add fields of its own


_TOPK = (BONUS_TOKENS.name, "topk_probabilities", "topk_ids")
KINDS = {
    Drafter.NONE: DrafterKind(("",), DraftKV.NONE, False, (BONUS_TOKENS.name,)),
    Drafter.MODEL: DrafterKind(("STANDALONE",), DraftKV.UNSHIFTED, False, _TOPK),
    Drafter.HEAD: DrafterKind(("EAGLE", "EAGLE3"), DraftKV.SHIFTED, True, (*_TOPK, "hidden_states")),
    Drafter.HEADS: DrafterKind(("MULTI_LAYER_EAGLE",), DraftKV.SHIFTED, True, (*_TOPK, "hidden_states")),
    Drafter.BLOCK: DrafterKind(("DFLASH", "DFLASH2", "DSPARK"), DraftKV.UNSHIFTED, False, (BONUS_TOKENS.name,)),
    Drafter.LOOKUP: DrafterKind(("",), DraftKV.NONE, False, (BONUS_TOKENS.name,)),
}

# Small; no size is 1, and only the two vocabularies are equal.
_ANY_SHAPE = AlgorithmShape(2, 3, hidden_size=8, num_heads=4, target_vocab_size=64, draft_vocab_size=64)
_EMPTY_BATCH = HandoffBatch(
    np.empty(0, np.int32), np.empty(0, np.int64), (), np.empty(0, np.int64), None, None, (), _ANY_SHAPE.hidden_size
)


_MISSING = "is missing"


def interface_problems(cls: type) -> list[Problem]:
    """Return how `cls` differs from the interface of `SpecAlgorithm`: missing names, other signatures, other types.
    Calls nothing."""
    problems = _differences(cls, SpecAlgorithm)
    missing = [problem.key for problem in problems if problem.message == _MISSING]
    if missing and not issubclass(cls, SpecAlgorithm):
        others = [problem for problem in problems if problem.message != _MISSING]
        problems = [Problem("", f"is no subclass of SpecAlgorithm, and has no {', '.join(missing)}"), *others]
    try:
        inspect.signature(cls).bind()
    except (TypeError, ValueError):
        problems.append(Problem("__init__", "must take no arguments: an algorithm carries no state"))
    return problems


def _differences(cls: type, interface: type, where: str = "") -> list[Problem]:
    """Return names of `interface` that `cls` lacks, methods with another signature, values of another type."""
    problems = []
    for attribute, expected in vars(interface).items():
        if attribute.startswith("_") or attribute == "name":
            continue
        found = inspect.getattr_static(cls, attribute, None)
        key = where + attribute
        if found is None:
            problems.append(Problem(key, _MISSING))
        elif inspect.isfunction(expected):
            if not inspect.isfunction(found):
                problems.append(Problem(key, "must be a method"))
            elif (want := _parameters(expected)) != (got := _parameters(found)):
                problems.append(Problem(key, f"takes ({', '.join(got)}), expected ({', '.join(want)})"))
        elif not isinstance(expected, property) and not isinstance(found, property):
            wanted = (int, float) if isinstance(expected, float) else type(expected)
            if not isinstance(found, wanted):
                problems.append(Problem(key, f"is {found!r}, expected {type(expected).__name__}"))
    return problems


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of parameters in order, each marked with how it may be given: `*rest`, `**options`,
    `name (by keyword)`."""
    marks: dict[inspect._ParameterKind, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*{}",
        inspect.Parameter.VAR_KEYWORD: "**{}",
        inspect.Parameter.KEYWORD_ONLY: "{} (by keyword)",
    }
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [marks.get(parameter.kind, "{}").format(parameter.name) for parameter in parameters]


def answer_problems(algorithm: SpecAlgorithm) -> list[Problem]:
    """Return the problems of a plugin: attributes that no executor supports, and unusable answers of its methods
    about a small shape."""
    problems: list[Problem] = []

    def ask(method: str, *arguments: Any) -> Any:
        try:
            return getattr(algorithm, method)(*arguments)
        except Exception as error:
            problems.append(Problem(method, f"raised {type(error).__name__}: {error}"))
            return None

    problems += _value_problems(algorithm)
    fields = ask("relay_fields", _ANY_SHAPE)
    if fields is not None:
        problems += _field_problems(fields, algorithm)
    width = ask("accept_width", 2, 3)
    if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
        problems.append(Problem("accept_width", f"gave {width!r}, expected an integer of at least 1"))
    kind = ask("prefix_key_kind")
    if kind not in (None, "token", "bigram"):
        problems.append(Problem("prefix_key_kind", f"gave {kind!r}, expected 'token' or 'bigram'"))
    ask("problems", _ANY_SHAPE)
    ask("build_disagg_draft_input", _EMPTY_BATCH, np.empty(0, np.int64), None)
    # That of a head may import torch, so executors alone ask for it.
    has_head = algorithm.drafter in (Drafter.HEAD, Drafter.HEADS, Drafter.BLOCK)
    if not has_head and (network := ask("draft_network")) is not None:
        problems.append(Problem("draft_network", f"gave {network!r}, but its drafter is {algorithm.drafter.name}"))
    proposer = ask("make_proposer", _ANY_SHAPE)
    if algorithm.drafter is Drafter.LOOKUP and proposer is None:
        if not any(problem.key == "make_proposer" for problem in problems):
            problems.append(
                Problem("make_proposer", "gave None, but its drafter is LOOKUP: proposals come from the host")
            )
    elif algorithm.drafter is not Drafter.LOOKUP and proposer is not None:
        problems.append(Problem("make_proposer", f"gave a proposer, but its drafter is {algorithm.drafter.name}"))
    elif proposer is not None:
        problems += _differences(type(proposer), Proposer, f"{type(proposer).__qualname__}.")
    return problems


def _value_problems(algorithm: SpecAlgorithm) -> list[Problem]:
    problems = []
    kind, drafter = KINDS[algorithm.drafter], algorithm.drafter.name
    if algorithm.draft_form not in kind.draft_forms:
        expected = " or ".join(map(repr, kind.draft_forms))
        problems.append(Problem("draft_form", f"is {algorithm.draft_form!r}; a drafter {drafter} needs {expected}"))
    for attribute in ("draft_kv", "needs_hidden_states"):
        found, expected = getattr(algorithm, attribute), getattr(kind, attribute)
        if found is not expected:
            problems.append(Problem(attribute, f"is {found}; executors build a drafter {drafter} with {expected}"))
    if algorithm.usual_acceptance not in PRESET_NAMES:
        hint = nearest(algorithm.usual_acceptance, PRESET_NAMES)
        message = f"is {algorithm.usual_acceptance!r}, none of {', '.join(PRESET_NAMES)}{hint}"
        problems.append(Problem("usual_acceptance", message))
    if not 0.0 <= algorithm.draft_time_share < float("inf"):
        problems.append(Problem("draft_time_share", f"is {algorithm.draft_time_share!r}, expected a share, 0 or more"))
    return problems


def _field_problems(fields: Any, algorithm: SpecAlgorithm) -> list[Problem]:
    """Return what is wrong with the relay fields that an algorithm declares."""
    if not isinstance(fields, tuple) or not all(isinstance(field, RelayField) for field in fields):
        return [Problem("relay_fields", f"gave {fields!r}, expected a tuple of RelayField")]
    problems = []
    names = [field.name for field in fields]
    expected = list(KINDS[algorithm.drafter].fields)
    may_add = algorithm.drafter is Drafter.LOOKUP
    if fields[:1] != (BONUS_TOKENS,) or (names[: len(expected)] if may_add else names) != expected:
        begin = "begin with" if may_add else "be"
        problems.append(
            Problem("relay_fields", f"are {', '.join(names) or 'none'}; must {begin} {', '.join(expected)}")
        )
    names.append(LENGTH_FIELD.name)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        problems.append(Problem("relay_fields", f"{', '.join(twice)}: every field has a name of its own"))
    if not may_add:
        return problems
    for field in fields:
        try:
            known = np.dtype(field.dtype).kind in "iuf"
        except TypeError:
            known = False
        if not known:
            message = f"{field.name} is of dtype {field.dtype!r}; a host's fields are NumPy integers or floats"
            problems.append(Problem("relay_fields", message))
        if not all(isinstance(size, int) and size > 0 for size in field.shape_suffix):
            problems.append(Problem("relay_fields", f"{field.name} has the shape {field.shape_suffix}"))
    return problems
