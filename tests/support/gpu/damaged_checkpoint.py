"""Changes the single file of a checkpoint, and takes the error of reading it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foredraft.gpu.models.checkpoint import load_draft, load_target
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.stored.tensor_files import SINGLE, CheckpointError
from foredraft.gpu.ops.torch_ops import TorchOps
from safetensors.torch import load_file, save_file

OPS = TorchOps()


def change(directory: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite the single file; dots in names are written as __, None removes."""
    tensors = load_file(directory / SINGLE)
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, directory / SINGLE)


def refused(directory: Path, *parts: str, draft: str | None = None, target: Decoder | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_draft(directory, draft, target) if draft else load_target(directory, OPS)
    for part in (str(directory), *parts):
        assert part in str(caught.value)
    return caught.value
