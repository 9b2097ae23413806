"""The scales of an 8-bit KV cache that a calibrated checkpoint has beside its weights, one for the keys and one for the
values of each layer.

    compressed-tensors   self_attn.k_scale, self_attn.v_scale; earlier k_proj.output_scale, v_proj.output_scale
    modelopt             self_attn.k_proj.k_scale, self_attn.v_proj.v_scale
    fp8                  self_attn.k_scale, self_attn.v_scale; earlier self_attn.kv_scale for both
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ....core.errors import Problem
from ...types.attention import KVScales
from .tensor_files import CheckpointError, StoredTensor, read_tensors

_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:[a-z_]+\.)?(?P<own>k|v)_scale|(?P<projection>k|v)_proj\.output_scale|kv_scale)"
)


def read_kv_scales(
    stored: Mapping[str, StoredTensor], layers: Sequence[int], is_latent: bool, kv_format: str | None
) -> list[KVScales]:
    """Return the scales of the attention layers `layers`, in their order; 1 where there are none.

    `stored`: the tensors of a checkpoint by the names of its language model. `is_latent`: values are a part of the keys
    and have their scale. `kv_format`: what the scales are for, as the configuration says; None if it does not. Raises
    CheckpointError for scales of another format, for a scale that is not one finite number above 0, and for two of one
    thing.
    """
    matches = {name: found for name in stored if (found := _NAME.fullmatch(name)) is not None}
    places = {layer: place for place, layer in enumerate(layers)}
    matches = {name: found for name, found in matches.items() if int(found["layer"]) in places}
    scales: list[dict[str, float]] = [{} for _ in layers]
    for name, tensor in read_tensors({name: stored[name] for name in matches}):
        found, value = matches[name], float(tensor) if tensor.numel() == 1 else math.nan
        problem = None
        if kv_format not in (None, "fp8"):
            problem = f"is a scale of another format of KV, {kv_format}: its KV has the model's dtype here"
        elif tensor.numel() != 1 or not tensor.is_floating_point():
            problem = f"expected one number for all heads, found {list(tensor.shape)} of {tensor.dtype}"
        elif not 0 < value < math.inf:
            problem = f"expected a scale above 0, found {value:g}"
        of_layer, kind = scales[places[int(found["layer"])]], found["own"] or found["projection"]
        for part in ("k", "v") if kind is None else (kind,):
            if part in of_layer:
                problem = problem or f"another tensor of the layer is the scale of its {part}, too"
            of_layer[part] = value
        if problem is not None:
            raise CheckpointError(str(stored[name].path), [Problem(name, problem)])
    both = [(of_layer.get("k", 1.0), of_layer.get("v", 1.0)) for of_layer in scales]
    return [KVScales(key, key if is_latent else value) for key, value in both]
