"""Our FutureMap as a relay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...core.contract.future_map import FutureMap, NumpyStorage, RelayField
from ...properties.relay.contract import HIDDEN, LENGTHS, RelayCapabilities, RelayConfig


class FutureMapAdapter:
    """A fresh `FutureMap` over NumPy storage; lists become arrays on the way in."""

    capabilities = RelayCapabilities(padding_row=True, generations=True, halves=True, inspection=True, misuse=True)

    def __init__(self, config: RelayConfig, debug_poison: bool = False) -> None:
        self.fields = {
            name: RelayField(name, (width,) if width else (), "float32" if name == HIDDEN else "int64")
            for name, width in config.fields.items()
            if name != LENGTHS
        }
        fields = tuple(self.fields.values())
        self.relay = FutureMap(config.num_rows, fields, NumpyStorage(), debug_poison=debug_poison)

    def write(self, rows: Sequence[int], generations: Sequence[int], values: Mapping[str, Any]) -> None:
        if list(values) == [LENGTHS]:
            self.relay.publish(*_arrays(rows, generations, values[LENGTHS]))
        else:
            arrays = {name: self._array(name, given) for name, given in values.items()}
            self.relay.stash(*_arrays(rows, generations), arrays)

    def _array(self, name: str, given: Any) -> np.ndarray | None:
        field = self.fields.get(name)
        if given is None or field is None:
            return None if given is None else np.array(given)
        return np.array(given, field.dtype).reshape(-1, *field.shape_suffix)

    def read(self, rows: Sequence[int], generations: Sequence[int]) -> dict[str, np.ndarray]:
        lengths, fields = self.relay.resolve(*_arrays(rows, generations))
        return {LENGTHS: lengths, **fields}

    def drop(self, rows: Sequence[int]) -> None:
        self.relay.drop(*_arrays(rows))
        self.relay.check()

    def num_unread(self) -> int:
        return self.relay.num_unread


def _arrays(*lists: Sequence[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(given, np.int64) for given in lists)


make = FutureMapAdapter
make_poisoned = partial(FutureMapAdapter, debug_poison=True)  # it fills what was consumed with a pattern
make_poisoned.capabilities = FutureMapAdapter.capabilities
