"""What a deployment shares with published points: the fields of its `Place`, and the slopes of its load."""

from __future__ import annotations

import math

from ....core.model_shape import ModelShape
from ....core.model_shape.layers import CompressedAttention, LatentAttention, Recurrence
from ..hardware import Parallelism
from .hierarchy import Place

USUAL_CLIENTS, LOAD_UNIT = 32, 3.0
"""The load is 0 with so many clients per attention group, and rises by 1 with so many doublings."""
USUAL_FIRST_TOKEN_MS, SIZE_UNIT = 300.0, 1.5
"""The size is 0 at this simulated time to the first token, and rises by 1 with this rise of its logarithm."""


def place_of(shape: ModelShape, gpu: str, server: str, parallel: Parallelism, run: str = "") -> Place:
    """Return the place of a deployment. Models of one number of layers, width and vocabulary are one model."""
    return Place(
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


def slopes_of(clients: float, first_token_ms: float, share: float, equal: bool) -> dict[str, float]:
    """Return the slopes of a load: so many requests at a time per attention group, a simulated time to the first token,
    the share that it is of the decoding of a request, and whether all requests are equally long."""
    return {
        "load": math.log2(max(clients, 0.5) / USUAL_CLIENTS) / LOAD_UNIT,
        "size": math.log(max(first_token_ms, 1.0) / USUAL_FIRST_TOKEN_MS) / SIZE_UNIT,
        "waves": min(1.0, share) * equal,
        "equal": float(equal),
    }
