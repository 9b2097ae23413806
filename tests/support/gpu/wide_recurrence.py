"""Models of `transformers` with recurrent layers that compute these in 64 bits; it writes 32 into their code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class _WideTorch:
    def __getattr__(self, name: str) -> object:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def wide_recurrence(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module) -> Iterator[None]:
    """Let the code of `model` mean 64 bits where it names 32."""
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[type(model).__module__], "torch", _WideTorch())
        patch.setattr(torch.Tensor, "float", lambda self: self.double())
        yield
