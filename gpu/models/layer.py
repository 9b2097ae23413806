"""One decoder layer: a mixer and an MLP over a ragged batch of n tokens, with fused projections.

The weights are also kept in plain tuples: looking a parameter up on an `nn.Module` costs as much as a small operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..types.attention import BatchAttention
from ..types.ops import NO_CAPTURE, Capture, DecoderLayer, LayersOutput, Ops
from .config import ModelConfig
from .delta_net import DeltaNet
from .families import SILU
from .mixers import SHARED_ROTATION, GroupedAttention, LatentAttentionMixer, Rotation, norm_dtype
from .mlps import DenseMlp, ExpertMlp
from .weights import NamedWeight, empty_weight


class Layer(nn.Module):
    """`index` counts the model's layers. EAGLE-3's layer attends over an input of another width.

    `input_norm` False: the first norm stands elsewhere.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        ops: Ops,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        sparse: bool = False,
        input_size: int | None = None,
        input_norm: bool = True,
        rotation: Rotation = SHARED_ROTATION,
    ) -> None:
        super().__init__()
        self.index, self.ops, self.eps = index, ops, config.rms_norm_eps
        self._family, self._activation = config.family, config.activation
        names, wide = self._family.norms, norm_dtype(config, dtype)

        def norm(name: str | None) -> nn.Parameter | None:
            return None if name is None else empty_weight(config.hidden_size, device=device, dtype=wide)

        self.input_norm: nn.Parameter | None = norm(names.before_attention) if input_norm else None
        self.mlp_norm: nn.Parameter | None = norm(names.before_mlp)
        self.behind_attention_norm, self.behind_mlp_norm = norm(names.behind_attention), norm(names.behind_mlp)
        self.layer_scalar: nn.Parameter | None = None
        if self._family.has_layer_scalar:
            self.layer_scalar = empty_weight(1, device=device, dtype=dtype)
        self.mixer: GroupedAttention | LatentAttentionMixer | DeltaNet
        if index in config.recurrent_layers:
            self.mixer = DeltaNet(config, config.recurrent_layers.index(index), ops, device, dtype)
        elif config.latent is not None:
            self.mixer = LatentAttentionMixer(config, index, ops, device, dtype, rotation)
        else:
            self.mixer = GroupedAttention(config, index, ops, device, dtype, input_size, rotation)
        self.mlp: DenseMlp | ExpertMlp = (ExpertMlp if sparse else DenseMlp)(config, ops, device, dtype)
        # Plain attributes of the object, past the module's registry.
        self.norms: tuple[nn.Parameter | None, nn.Parameter | None] = (self.input_norm, self.mlp_norm)
        self._behind = (self.behind_attention_norm, self.behind_mlp_norm)
        self._scalar = self.layer_scalar
        self._multiplier = None if config.residual_multiplier == 1.0 else config.residual_multiplier
        self.mix, self.run_mlp = self.mixer.run, self.mlp.run

    @property
    def is_plain(self) -> bool:
        """Whether it is a Llama's layer but for scale, window and a rotation that it lacks: norms, scores,
        activation."""
        return (
            self.behind_attention_norm is self.behind_mlp_norm is None
            and self.mlp_norm is not None
            and self._multiplier is None
            and self._scalar is None
            and self._activation == SILU
            and self.mixer.is_plain
        )

    def after_attention(
        self, out: Tensor, residual: Tensor, in_round: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the layer's second half: what the MLP adds to the residual [n, H], the residual beside it, and the
        chosen experts if it has experts. `in_round`: see `BatchAttention`."""
        normed, residual = add_norm(self.ops, self._added(out, 0), residual, self.norms[1], self.eps)
        out, experts = self.run_mlp(normed, in_round)
        out = self._added(out, 1)
        if self._scalar is not None:
            out, residual = out * self._scalar, residual * self._scalar
        return out, residual, experts

    def _added(self, out: Tensor, half: int) -> Tensor:
        """Return what a half of the layer, the mixer or the MLP, adds to the residual."""
        norm = self._behind[half]
        if norm is not None:
            out = self.ops.rms_norm(out, norm, self.eps)
        return out if self._multiplier is None else out * self._multiplier

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        """Yield the weights with names below the layer's own prefix, as the family publishes them."""
        yield from self.mixer.checkpoint_weights()
        names, offset = self._family.norms, self._family.norm_offset
        norms = {names.before_attention: self.input_norm, names.before_mlp: self.mlp_norm}
        norms |= dict(zip((names.behind_attention, names.behind_mlp), self._behind, strict=True))
        yield from (NamedWeight(f"{name}.weight", w.detach(), offset) for name, w in norms.items() if w is not None)
        if self.layer_scalar is not None:
            yield NamedWeight("layer_scalar", self.layer_scalar.detach())
        prefix = "mlp" if self._family.experts is None else self._family.experts.prefix
        yield from (replace(weight, name=f"{prefix}.{weight.name}") for weight in self.mlp.checkpoint_weights())


def add_norm(ops: Ops, out: Tensor, residual: Tensor, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return (the normed sum, the sum) of a half's output and the residual; the sum itself where there is no norm."""
    if norm is None:
        total = out + residual
        return total, total
    return ops.add_rms_norm(out, residual, norm, eps)


def run_layers(
    layers: Sequence[DecoderLayer],
    residual: Tensor,
    attention: BatchAttention,
    cos_sin: Tensor,
    first_input: Tensor | None = None,
    final_norm: Tensor | None = None,
    capture: Capture = NO_CAPTURE,
) -> LayersOutput:
    """Do what `Ops.run_layers` says, layer after layer."""
    ops, eps = layers[0].ops, layers[0].eps
    out: Tensor | None = None
    aux: list[Tensor] = []
    chosen: list[Tensor] = []
    for place, layer in enumerate(layers):
        norm = layer.norms[0]
        if out is not None:
            normed, residual = add_norm(ops, out, residual, norm, eps)
        elif first_input is not None:
            normed = first_input
        else:
            normed = residual if norm is None else ops.rms_norm(residual, norm, eps)
        if place in capture.aux_layers:
            aux.append(residual)
        out, residual, experts = layer.after_attention(
            layer.mix(normed, attention, cos_sin), residual, attention.in_round
        )
        if experts is not None and capture.routed_experts:
            chosen.append(experts)
    assert out is not None, "a model without layers"
    hidden, residual = add_norm(ops, out, residual, final_norm, eps)
    if len(layers) in capture.aux_layers:
        aux.append(residual)
    return LayersOutput(
        hidden,
        residual,
        torch.cat(aux, -1) if aux else None,
        torch.stack(chosen, 1).to(torch.int32) if chosen else None,
    )
