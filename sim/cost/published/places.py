"""What a deployment shares with published points: the fields of its `SharedPlace`."""

from __future__ import annotations

from typing import NamedTuple

from ....core.model_shape import ModelShape
from ....core.model_shape.layers import CompressedAttention, LatentAttention, Recurrence
from ..hardware import Parallelism


class SharedPlace(NamedTuple):
    """What a deployment shares with others. `run`: a release of the server, or a day; empty for one to be predicted."""

    model: str
    kind: str
    gpu: str
    server: str
    number_format: str
    parallel: str
    run: str = ""


def place_of(shape: ModelShape, gpu: str, server: str, parallel: Parallelism, run: str = "") -> SharedPlace:
    """Return the place of a deployment. Models of one number of layers, width and vocabulary are one model."""
    return SharedPlace(
        model=f"{shape.layers} x {shape.hidden}, {shape.vocab}",
        kind=kind_of(shape),
        gpu=gpu,
        server=server,
        number_format=format_of(shape),
        parallel=f"{parallel.tensor} x {parallel.data}, {parallel.expert}",
        run=run,
    )


def kind_of(shape: ModelShape) -> str:
    """Return the kind of layers that decides which kernels a pass consists of."""
    mixers = [mixer for mixer, _ in shape.mixers]
    if any(isinstance(mixer, Recurrence) for mixer in mixers):
        return "recurrent"
    if any(isinstance(mixer, LatentAttention | CompressedAttention) for mixer in mixers):
        return "latent"
    return "dense" if shape.experts is None else "experts"


def format_of(shape: ModelShape) -> str:
    """Return the format of a model's weights as kernels differ by it: 16 bits, FP8, FP4 or INT4."""
    name = shape.weight_dtype
    if "fp4" in name:
        return "FP4"
    if name.startswith("int4"):
        return "INT4"
    return "FP8" if "fp8" in name else "16 bits"
