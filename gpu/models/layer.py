"""One decoder layer: attention and MLP over a ragged batch of n tokens, with fused projections.

The weights are also kept in plain tuples: looking a parameter up on an `nn.Module` costs as much as a small operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..ops.port import NO_CAPTURE, Capture, LayersOutput, Ops
from .attention import PLAIN, Attention, Softmax
from .config import GELU_TANH, MIXTRAL, PHI3, SILU, ModelConfig
from .moe import ExpertMlp
from .projection import Projection
from .weights import NamedWeight, empty_weight, rows_of


class Mlp(nn.Module):
    """down(activation(gate(x)) · up(x)), gate and up in one projection."""

    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.activate = None if ops is None else ops.gelu_mul if config.activation == GELU_TANH else ops.silu_mul
        self._is_published_fused = config.architecture == PHI3
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
        """Run the MLP: x [n, H] → [n, H], and no experts."""
        gate_up, down = self.projections
        return down(self.activate(gate_up(x))), None

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        width = self.down_weight.shape[1]
        gate_up = {"gate_up_proj": 2 * width} if self._is_published_fused else {"gate_proj": width, "up_proj": width}
        yield from rows_of(self.gate_up_weight, gate_up, "weight")
        yield NamedWeight("down_proj.weight", self.down_weight.detach())
        if self.gate_up_bias is not None and self.down_bias is not None:
            yield from rows_of(self.gate_up_bias, gate_up, "bias")
            yield NamedWeight("down_proj.bias", self.down_bias.detach())


class Layer(nn.Module):
    """`index` counts the layers of the model's own KV pool. EAGLE-3's layer attends over an input of another width.

    `local_table` is the rotary table of layers with a window, where it is another one than the model's.
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
        local_table: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.index, self.ops, self.eps = index, ops, config.rms_norm_eps
        hidden, d = config.hidden_size, config.head_dim
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = d
        self.config = config
        self.softmax = softmax_of(config, index)
        self._local_table = local_table if index in config.windowed_layers else None
        wide = torch.promote_types(dtype, torch.float32) if config.is_gemma else dtype
        self.input_norm = empty_weight(hidden, device=device, dtype=wide) if input_norm else None
        # before the MLP, in spite of its published name
        self.post_attention_norm = empty_weight(hidden, device=device, dtype=wide)
        self.behind_attention_norm = empty_weight(hidden, device=device, dtype=wide) if config.is_gemma else None
        self.behind_mlp_norm = empty_weight(hidden, device=device, dtype=wide) if config.is_gemma else None
        total = sum(self.heads) * d
        self.qkv_weight = empty_weight(total, input_size or hidden, device=device, dtype=dtype)
        self.output_weight = empty_weight(hidden, config.num_heads * d, device=device, dtype=dtype)
        self.qkv_bias = empty_weight(total, device=device, dtype=dtype) if config.qkv_bias else None
        self.output_bias = empty_weight(hidden, device=device, dtype=dtype) if config.output_bias else None
        self.q_norm = empty_weight(d, device=device, dtype=wide) if config.qk_norm else None
        self.k_norm = empty_weight(d, device=device, dtype=wide) if config.qk_norm else None
        if config.sinks:
            self.sinks = empty_weight(config.num_heads, device=device, dtype=dtype)
            self.softmax = replace(self.softmax, sinks=self.sinks)
        self.mlp: Mlp | ExpertMlp = (ExpertMlp if sparse else Mlp)(config, ops, device, dtype)
        # Plain attributes of the object, past the module's registry.
        self.projections = (
            Projection(self.qkv_weight, self.qkv_bias),
            Projection(self.output_weight, self.output_bias),
        )
        self._head_norms = None if self.q_norm is None else (self.q_norm, self.k_norm)
        self.norms = (self.input_norm, self.post_attention_norm)
        self._behind = (self.behind_attention_norm, self.behind_mlp_norm) if config.is_gemma else None
        self.run_mlp = self.mlp.run

    @property
    def is_plain(self) -> bool:
        """Whether it is a Llama's layer but for a window: scores, norms and activation."""
        return self._behind is None and self.softmax.is_plain and self.config.activation == SILU

    def attend(self, x: Tensor, attention: Attention, cos_sin: Tensor) -> Tensor:
        """Attend: x [n, input size] → [n, H], without the residual.
        q, k, v are views of one tensor: only their last two axes are dense."""
        project_qkv, project_output = self.projections
        qkv = project_qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split_with_sizes(self.heads, 1)
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            q, k = self.ops.rms_norm(q, q_norm, self.eps), self.ops.rms_norm(k, k_norm, self.eps)
        table = cos_sin if self._local_table is None else self._local_table
        out = attention.attend(self.index, q, k, v, table, self.softmax)
        return project_output(out.flatten(1))

    def after_attention(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the layer's second half: the MLP's output [n, H], the residual beside it, and the chosen experts
        if it has experts."""
        if self._behind is not None:
            out = self.ops.rms_norm(out, self._behind[0], self.eps)
        normed, residual = self.ops.add_rms_norm(out, residual, self.norms[1], self.eps)
        out, experts = self.run_mlp(normed)
        if self._behind is not None:
            out = self.ops.rms_norm(out, self._behind[1], self.eps)
        return out, residual, experts

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        """Yield the weights with names below the layer's own prefix, as the family publishes them."""
        config = self.config
        rows = {f"self_attn.{p}_proj": n * self.head_dim for p, n in zip("qkv", self.heads, strict=True)}
        if config.architecture == PHI3:
            rows = {"self_attn.qkv_proj": sum(rows.values())}
        yield from rows_of(self.qkv_weight, rows, "weight")
        if self.qkv_bias is not None:
            yield from rows_of(self.qkv_bias, rows, "bias")
        yield NamedWeight("self_attn.o_proj.weight", self.output_weight.detach())
        if self.output_bias is not None:
            yield NamedWeight("self_attn.o_proj.bias", self.output_bias.detach())
        if self.softmax.sinks is not None:
            yield NamedWeight("self_attn.sinks", self.softmax.sinks.detach())
        norms = {
            "self_attn.q_norm": self.q_norm,
            "self_attn.k_norm": self.k_norm,
            "input_layernorm": self.input_norm,
            "pre_feedforward_layernorm" if config.is_gemma else "post_attention_layernorm": self.post_attention_norm,
        }
        if self._behind is not None:
            norms |= dict(zip(("post_attention_layernorm", "post_feedforward_layernorm"), self._behind, strict=True))
        offset = config.norm_offset
        yield from (NamedWeight(f"{name}.weight", w.detach(), offset) for name, w in norms.items() if w is not None)
        prefix = "block_sparse_moe" if config.architecture == MIXTRAL else "mlp"
        yield from (NamedWeight(f"{prefix}.{weight.name}", weight.view) for weight in self.mlp.checkpoint_weights())


def softmax_of(config: ModelConfig, index: int) -> Softmax:
    """Return the softmax of layer `index`, without sinks."""
    window = config.window if index in config.windowed_layers else 0
    if window or config.attention_scale is not None or config.attention_softcap:
        return Softmax(config.attention_scale, window, config.attention_softcap)
    return PLAIN


def run_layers(
    layers: Sequence[Layer],
    residual: Tensor,
    attention: Attention,
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
