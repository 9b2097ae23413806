"""Llama, Qwen2, Qwen3 and Qwen3-MoE as one decoder: what differs between them is in the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..batch.host_keys import HostPass
from ..ops.port import Ops
from .attention import Attention
from .config import ModelConfig
from .host_layers import HostLayer, HostRows, array, quiet, rms_norm, runs_on_host
from .layer import Layer
from .projection import Projection
from .rope import cos_sin_table
from .weights import NamedWeight, empty_weight, weight_bytes


@dataclass(frozen=True, slots=True)
class Capture:
    """What a forward pass keeps beside its last hidden state."""

    aux_layers: tuple[
        int, ...
    ] = ()  # ascending; hidden states entering these layers, the number of layers being the last's output
    routed_experts: bool = False


NO_CAPTURE = Capture()


@dataclass(slots=True)
class DecoderOutput:
    """One forward pass over n tokens."""

    hidden: Tensor  # [n, H] after the final norm
    aux: Tensor | None  # [n, len(aux_layers) · H], residual added, before any norm
    routed_experts: (
        Tensor | None
    )  # int32 [n, MoE layers, k], best expert first; None if not asked for or if there are none


class Decoder(nn.Module):
    """Weights are uninitialised; `checkpoint` or `weights.initialize` fill them. Frozen unless `requires_grad_` is called."""

    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.device, self.dtype = torch.device(device), dtype
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed_weight = empty_weight(vocab, hidden, device=device, dtype=dtype)
        sparse = config.moe_layers
        self.layers = nn.ModuleList(
            Layer(config, i, ops, device, dtype, sparse=i in sparse) for i in range(config.num_layers)
        )
        self.norm_weight = empty_weight(hidden, device=device, dtype=dtype)
        self.lm_head_weight = (
            None if config.tied_embeddings else empty_weight(vocab, hidden, device=device, dtype=dtype)
        )
        self.cos_sin = cos_sin_table(config.rope, config.head_dim, config.max_position_embeddings, device)
        # Plain attributes: see `layer`.
        self._tables = (self.embed_weight, self.norm_weight)
        self.projections = (Projection(self.output_embedding),)
        self._layers = tuple(self.layers)
        self._host: tuple[HostRows, tuple[HostLayer, ...]] | None = None

    def forward(self, tokens: Tensor, attention: Attention, capture: Capture = NO_CAPTURE) -> DecoderOutput:
        """tokens int64 [n]; `attention` knows which sequences they belong to, and where."""
        host_pass = None if self._host is None else attention.host_pass()
        if host_pass is not None:
            return self._forward_on_host(tokens, host_pass, capture)
        embed, norm = self._tables
        ops, eps, cos_sin, aux_layers = self.ops, self.config.rms_norm_eps, self.cos_sin, capture.aux_layers
        out, residual = None, torch.embedding(embed, tokens)
        aux: list[Tensor] = []
        chosen: list[Tensor] = []
        for layer in self._layers:
            if out is None:
                normed = ops.rms_norm(residual, layer.norms[0], eps)
            else:
                normed, residual = ops.add_rms_norm(out, residual, layer.norms[0], eps)
            if layer.index in aux_layers:
                aux.append(residual)
            out, residual, experts = layer.after_attention(layer.attend(normed, attention, cos_sin), residual)
            if experts is not None and capture.routed_experts:
                chosen.append(experts)
        hidden, residual = ops.add_rms_norm(out, residual, norm, eps)
        if len(self._layers) in aux_layers:
            aux.append(residual)
        return DecoderOutput(
            hidden,
            torch.cat(aux, -1) if aux else None,
            torch.stack(chosen, 1).to(torch.int32) if chosen else None,
        )

    @quiet
    def _forward_on_host(self, tokens: Tensor, host_pass: HostPass, capture: Capture) -> DecoderOutput:
        rows, layers = self._host
        residual, rotation = rows.embedded(tokens), rows.rotation(host_pass)
        states = [residual]
        for layer in layers:
            states.append(layer.run(states[-1], host_pass, rotation))
        aux = [states[i] for i in capture.aux_layers]
        hidden = rms_norm(states[-1], array(self._tables[1]), self.config.rms_norm_eps)
        return DecoderOutput(
            torch.from_numpy(hidden), torch.from_numpy(np.concatenate(aux, axis=1)) if aux else None, None
        )

    def use_host(self) -> None:
        """Passes of one row run on the host from now on, if the host can do these layers. For inference, with weights that stay."""
        if self._host is None and runs_on_host(self._layers):
            self._host = HostRows(self._tables[0], self.cos_sin), tuple(map(HostLayer, self._layers))

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [n] → [n, H]."""
        return torch.embedding(self._tables[0], tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, H] → [m, V], in float32 at least."""
        return wide(self.projections[0](hidden))

    @property
    def output_embedding(self) -> Tensor:
        """[V, H]; the input embedding if they are tied."""
        return self.embed_weight if self.lm_head_weight is None else self.lm_head_weight

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        """All tensors of the checkpoint, under their published names, as views of the weights."""
        yield NamedWeight("model.embed_tokens.weight", self.embed_weight.detach())
        for layer in self._layers:
            for weight in layer.checkpoint_weights():
                yield NamedWeight(f"model.layers.{layer.index}.{weight.name}", weight.view)
        yield NamedWeight("model.norm.weight", self.norm_weight.detach())
        if self.lm_head_weight is not None:
            yield NamedWeight("lm_head.weight", self.lm_head_weight.detach())


def wide(logits: Tensor) -> Tensor:
    """float64 stays, narrower logits become float32."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
