"""One decoder layer: attention and MLP over a ragged batch of n tokens, with fused projections.

The weights are also kept in plain tuples: looking a parameter up on an `nn.Module` costs as much as a small operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..ops.port import NO_CAPTURE, Capture, LayersOutput, Ops
from .attention import Attention
from .config import ModelConfig
from .moe import ExpertMlp
from .projection import Projection
from .weights import NamedWeight, empty_weight, rows_of


class Mlp(nn.Module):
    """down(silu(gate(x)) · up(x)), gate and up in one projection."""

    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.ops = ops
        width = config.intermediate_size
        self.gate_up_weight = empty_weight(2 * width, config.hidden_size, device=device, dtype=dtype)
        self.down_weight = empty_weight(config.hidden_size, width, device=device, dtype=dtype)
        self.gate_up_bias = self.down_bias = None
        if config.mlp_bias:
            self.gate_up_bias = empty_weight(2 * width, device=device, dtype=dtype)
            self.down_bias = empty_weight(config.hidden_size, device=device, dtype=dtype)
        self.projections = (
            Projection(self.gate_up_weight, self.gate_up_bias),
            Projection(self.down_weight, self.down_bias),
        )

    def run(self, x: Tensor) -> tuple[Tensor, None]:
        """x [n, H] → [n, H], and no experts."""
        gate_up, down = self.projections
        return down(self.ops.silu_mul(gate_up(x))), None

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        width = self.down_weight.shape[1]
        gate_up = {"gate_proj": width, "up_proj": width}
        yield from rows_of(self.gate_up_weight, gate_up, "weight")
        yield NamedWeight("down_proj.weight", self.down_weight.detach())
        if self.gate_up_bias is not None and self.down_bias is not None:
            yield from rows_of(self.gate_up_bias, gate_up, "bias")
            yield NamedWeight("down_proj.bias", self.down_bias.detach())


class Layer(nn.Module):
    """`index` counts the layers of the model's own KV pool. EAGLE-3's layer attends over an input of another width."""

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
    ) -> None:
        super().__init__()
        self.index, self.ops, self.eps = index, ops, config.rms_norm_eps
        hidden, d = config.hidden_size, config.head_dim
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = d
        self.input_norm = empty_weight(hidden, device=device, dtype=dtype) if input_norm else None
        self.post_attention_norm = empty_weight(hidden, device=device, dtype=dtype)
        total = sum(self.heads) * d
        self.qkv_weight = empty_weight(total, input_size or hidden, device=device, dtype=dtype)
        self.output_weight = empty_weight(hidden, config.num_heads * d, device=device, dtype=dtype)
        self.qkv_bias = empty_weight(total, device=device, dtype=dtype) if config.qkv_bias else None
        self.output_bias = empty_weight(hidden, device=device, dtype=dtype) if config.output_bias else None
        self.q_norm = empty_weight(d, device=device, dtype=dtype) if config.qk_norm else None
        self.k_norm = empty_weight(d, device=device, dtype=dtype) if config.qk_norm else None
        self.mlp: Mlp | ExpertMlp = (ExpertMlp if sparse else Mlp)(config, ops, device, dtype)
        # Plain attributes of the object, past the module's registry.
        self.projections = (
            Projection(self.qkv_weight, self.qkv_bias),
            Projection(self.output_weight, self.output_bias),
        )
        self._head_norms = None if self.q_norm is None else (self.q_norm, self.k_norm)
        self.norms = (self.input_norm, self.post_attention_norm)
        self.run_mlp = self.mlp.run

    def attend(self, x: Tensor, attention: Attention, cos_sin: Tensor) -> Tensor:
        """x [n, input size] → [n, H], without the residual. q, k and v are views of one tensor: only their last two axes are dense."""
        project_qkv, project_output = self.projections
        qkv = project_qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split_with_sizes(self.heads, 1)
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            q, k = self.ops.rms_norm(q, q_norm, self.eps), self.ops.rms_norm(k, k_norm, self.eps)
        out = attention.attend(self.index, q, k, v, cos_sin)
        return project_output(out.flatten(1))

    def after_attention(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the layer's second half: the MLP's output [n, H], the residual beside it, and the chosen experts if it has experts."""
        normed, residual = self.ops.add_rms_norm(out, residual, self.norms[1], self.eps)
        out, experts = self.run_mlp(normed)
        return out, residual, experts

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        """Names below the layer's own prefix, as Llama and Qwen publish them."""
        rows = {f"self_attn.{p}_proj": n * self.head_dim for p, n in zip("qkv", self.heads, strict=True)}
        yield from rows_of(self.qkv_weight, rows, "weight")
        if self.qkv_bias is not None:
            yield from rows_of(self.qkv_bias, rows, "bias")
        yield NamedWeight("self_attn.o_proj.weight", self.output_weight.detach())
        named = {
            "self_attn.o_proj.bias": self.output_bias,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_attention_norm,
        }
        yield from (NamedWeight(name, weight.detach()) for name, weight in named.items() if weight is not None)
        yield from (NamedWeight(f"mlp.{weight.name}", weight.view) for weight in self.mlp.checkpoint_weights())


def run_layers(
    layers: Sequence[Layer],
    residual: Tensor,
    attention: Attention,
    cos_sin: Tensor,
    first_input: Tensor | None = None,
    final_norm: Tensor | None = None,
    capture: Capture = NO_CAPTURE,
) -> LayersOutput:
    """`Ops.run_layers`, layer after layer."""
    ops, eps = layers[0].ops, layers[0].eps
    out: Tensor | None = None
    aux: list[Tensor] = []
    chosen: list[Tensor] = []
    for place, layer in enumerate(layers):
        norm = layer.norms[0]
        if out is not None:
            normed, residual = ops.add_rms_norm(out, residual, norm, eps)
        elif first_input is not None:
            normed = first_input
        else:
            normed = residual if norm is None else ops.rms_norm(residual, norm, eps)
        if place in capture.aux_layers:
            aux.append(residual)
        out, residual, experts = layer.after_attention(layer.attend(normed, attention, cos_sin), residual)
        if experts is not None and capture.routed_experts:
            chosen.append(experts)
    assert out is not None, "a model without layers"
    if final_norm is None:
        hidden = residual = out + residual
    else:
        hidden, residual = ops.add_rms_norm(out, residual, final_norm, eps)
    if len(layers) in capture.aux_layers:
        aux.append(residual)
    return LayersOutput(
        hidden,
        residual,
        torch.cat(aux, -1) if aux else None,
        torch.stack(chosen, 1).to(torch.int32) if chosen else None,
    )
