"""All arrays that an object graph reaches: NumPy's, torch's, or whoever else's, as long as they have a shape and a dtype."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

_OPAQUE = (str, bytes, int, float, bool, complex, type, types.ModuleType, np.generic, np.dtype, Enum)


class FoundArray(NamedTuple):
    """Where an array is reached, and what it looks like."""

    path: str
    shape: tuple[int, ...]
    dtype: str


def arrays_under(roots: Mapping[str, object], without: Iterable[object] = ()) -> list[FoundArray]:
    """Every array that is reached from `roots` (name -> object), objects in `without` aside; closures and slots are looked into, too."""
    found: list[FoundArray] = []
    seen: dict[int, object] = {id(item): item for item in without}
    stack: list[tuple[str, Any]] = list(roots.items())
    while stack:
        path, value = stack.pop()
        if value is None or isinstance(value, _OPAQUE) or id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that no other object gets its id
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if dtype is not None and isinstance(shape, tuple):
            found.append(FoundArray(path, tuple(shape), str(dtype)))
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
            stack += [(f"{path}.{name}", item) for name, item in _attributes(value)]
    return sorted(found)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _attributes(value: object) -> list[tuple[str, object]]:
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]
    values = dict(getattr(value, "__dict__", {}))
    values |= {name: getattr(value, name, None) for name in names}
    return list(values.items())


def hidden_arrays(found: Iterable[FoundArray], hidden_sizes: Iterable[int]) -> list[FoundArray]:
    """Those of them that could hold hidden states: of floating point, with a last axis as wide as one."""
    sizes = tuple(hidden_sizes)
    return [array for array in found if len(array.shape) > 1 and array.shape[-1] in sizes and "float" in array.dtype]
