"""A search of everything that an executor keeps, for arrays that could hold hidden states."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .contract import HIDDEN_STATES

_OPAQUE = (str, bytes, int, float, bool, complex, type, types.ModuleType, np.generic, np.dtype, Enum)


class FoundArray(NamedTuple):
    """Where an array is reached, and what it looks like."""

    path: str
    shape: tuple[int, ...]
    dtype: str


def hidden_arrays(
    roots: Mapping[str, object], hidden_sizes: Collection[int], without: Iterable[object] = ()
) -> list[FoundArray]:
    """Find every array reached from `roots` (name -> object) that could hold hidden states: of floating point, several
    axes, the last of them as wide as one. Objects in `without` are not entered; closures and slots are."""
    found: list[FoundArray] = []
    seen: dict[int, object] = {id(item): item for item in without}
    stack: list[tuple[str, Any]] = list(roots.items())
    while stack:
        path, value = stack.pop()
        kind = type(value)
        if value is None or kind in _NEVER or id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen[id(value)] = value  # kept, so that no other object gets its id
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple) and hasattr(value, "dtype"):
            if len(shape) > 1 and shape[-1] in hidden_sizes and "float" in str(value.dtype):
                found.append(FoundArray(path, tuple(shape), str(value.dtype)))
        elif isinstance(value, Mapping):
            stack += [(f"{path}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple | deque):
            stack += [(f"{path}[{number}]", item) for number, item in enumerate(value)]
        elif isinstance(value, set | frozenset):
            stack += [(f"{path}{{}}", item) for item in value]  # in no order, which the sorting below makes good
        elif isinstance(value, types.FunctionType):
            stack += [(f"{path}.<cell>", _content(cell)) for cell in value.__closure__ or ()]
        elif isinstance(value, types.MethodType):
            stack += [(path, value.__self__), (path, value.__func__)]
        else:
            stack += [(f"{path}.{name}", getattr(value, name, None)) for name in _slots(kind)]
            stack += [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    return sorted(found)


_NEVER = frozenset((int, str, float, bool, bytes))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the attributes of a class that are not in the `__dict__` of its objects."""
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]
    return tuple(dict.fromkeys(names))


def unasked(found: list[FoundArray], shown: bool) -> list[FoundArray]:
    """Leave out the target's hidden states on their way to a user who asked to see them: under that name, among
    outputs."""
    end = f"[{HIDDEN_STATES!r}]"
    return [array for array in found if not (shown and array.path.endswith(end) and "outputs" in array.path)]
