"""The values of `core.contract.future_map.FutureMap` in device memory; its flags and epochs stay on the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...core.contract.future_map import FutureMap, RelayField
from ..batch.uploads import upload
from ..types.ops import Ops

_POISON_BYTE = 0xA5


class TorchStorage:
    """Relay cells as tensors. Only the debug methods wait for the device."""

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        self._device = device
        self._host_rows: np.ndarray | None = None
        self._device_rows = torch.empty(0, dtype=torch.int64, device=device)
        self.num_bytes: int = 0

    def allocate(self, num_rows: int, relay_field: RelayField) -> Tensor:
        shape = (num_rows, *relay_field.shape_suffix)
        buffer = torch.zeros(shape, dtype=getattr(torch, relay_field.dtype), device=self._device)
        self.num_bytes += buffer.nbytes
        return buffer

    def gather(self, buffer: Tensor, rows: np.ndarray) -> Tensor:
        return self._ops.relay_gather([buffer], self._rows(rows))[0]

    def scatter(
        self, buffer: Tensor, rows: np.ndarray, values: Tensor | np.ndarray, sources: np.ndarray | None
    ) -> None:
        """Write fields that another worker sent, as arrays of the host."""
        if isinstance(values, np.ndarray):
            values = upload(self._device, values)
        if sources is not None:
            values = values[upload(self._device, sources)]
        self._ops.relay_scatter_([buffer], self._rows(rows), [values])

    def poison(self, buffer: Tensor, rows: np.ndarray) -> None:
        pattern = np.frombuffer(bytes([_POISON_BYTE]) * 8, np.uint8).copy()
        value = torch.from_numpy(pattern).view(buffer.dtype)[0].to(self._device)
        buffer[torch.from_numpy(rows).to(self._device)] = value

    def is_poison(self, values: Tensor) -> np.ndarray:
        if not values.numel():
            return np.zeros(len(values), bool)
        raw = values.contiguous().view(len(values), -1).view(torch.uint8)
        return (raw == _POISON_BYTE).all(dim=1).cpu().numpy()

    def has_placeholder(self, values: Tensor | np.ndarray) -> np.ndarray:
        return (torch.as_tensor(values).reshape(len(values), -1) < 0).any(dim=1).cpu().numpy()

    def _rows(self, rows: np.ndarray) -> Tensor:
        """Return the rows on the device; every field of one call has the same ones, so they travel once."""
        if rows is not self._host_rows:
            self._device_rows = upload(self._device, rows)
            self._host_rows = rows
        return self._device_rows


def publish_cells(
    future_map: FutureMap, rows: np.ndarray, epochs: np.ndarray, lengths: Tensor, values: dict[str, Tensor]
) -> None:
    """Relay what the next round of these rows starts from: their lengths [n], and per field its values [n, …]."""
    future_map.publish(rows, epochs, lengths)
    future_map.stash(rows, epochs, values)
