"""Our FutureMap as a relay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.contract.future_map import FutureMap, RelayField
from ...properties.relay.contract import HIDDEN, RelayCapabilities, RelayConfig

_INTEGERS = np.int64


class FutureMapAdapter:
    """Lists become arrays on the way in."""

    def __init__(self, relay: FutureMap) -> None:
        self.relay = relay
        self.fields = {field.name: field for field in relay.fields}

    def publish(self, rows: Sequence[int], generations: Sequence[int], lengths: Sequence[int]) -> None:
        self.relay.publish(*_arrays(rows, generations, lengths))

    def stash(self, rows: Sequence[int], generations: Sequence[int], values: Mapping[str, Any]) -> None:
        arrays = {name: self._array(name, given) for name, given in values.items()}
        self.relay.stash(*_arrays(rows, generations), arrays)

    def _array(self, name: str, given: Any) -> np.ndarray | None:
        field = self.fields.get(name)
        if given is None or field is None:
            return None if given is None else np.array(given)
        return np.array(given, field.dtype).reshape(-1, *field.shape_suffix)

    def resolve(self, rows: Sequence[int], generations: Sequence[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return self.relay.resolve(*_arrays(rows, generations))

    def drop(self, rows: Sequence[int]) -> None:
        self.relay.drop(*_arrays(rows))
        self.relay.check()

    def num_unread(self) -> int:
        return self.relay.num_unread


def _arrays(*lists: Sequence[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(given, _INTEGERS) for given in lists)


def relay_fields(config: RelayConfig) -> tuple[RelayField, ...]:
    """The declared fields: integers as int64, hidden states as float32."""
    return tuple(
        RelayField(name, (width,) if width else (), "float32" if name == HIDDEN else "int64")
        for name, width in config.fields.items()
    )


def make(config: RelayConfig) -> FutureMapAdapter:
    """A fresh `FutureMap` over NumPy storage."""
    return FutureMapAdapter(FutureMap(config.num_rows, relay_fields(config)))


def make_poisoned(config: RelayConfig) -> FutureMapAdapter:
    """The same in its debug mode, which fills what was consumed with a pattern."""
    return FutureMapAdapter(FutureMap(config.num_rows, relay_fields(config), debug_poison=True))


make.capabilities = make_poisoned.capabilities = RelayCapabilities(padding_row=True, generations=True, inspection=True)
