"""One decoder for all families; their differences are in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..types.attention import BatchAttention, KVScales
from ..types.ops import NO_CAPTURE, Capture, Ops
from ..types.shards import WHOLE, Shard
from .config import ModelConfig
from .divided import sharded
from .layer import Layer
from .mixers import norm_dtype, rotations_of
from .projection import Embedding, Projection
from .weights import NamedWeight, empty_weight, weight_bytes


@dataclass(slots=True)
class DecoderOutput:
    """One forward pass over n tokens."""

    hidden: Tensor  # [n, H] after the final norm
    aux: Tensor | None  # [n, len(aux_layers) · H], residual added, before any norm
    routed_experts: Tensor | None  # int32 [n, MoE layers, k], best first; None if not asked for or if there are none

    def map(self, function: Callable[[Tensor], Tensor]) -> DecoderOutput:
        """Return `function` of each of these."""
        aux, experts = (None if values is None else function(values) for values in (self.aux, self.routed_experts))
        return DecoderOutput(function(self.hidden), aux, experts)


class TokenTwins(NamedTuple):
    """How a model that drafts for a target of another tokenizer reads and writes the target's tokens."""

    read_as: Tensor  # int64 [target's vocabulary]: the model's token that stands for each of the target's
    own_ids: Tensor  # int64 [n]: the tokens that it may draft
    target_ids: Tensor  # int64 [n]: the target's ids of these


class Decoder(nn.Module):
    """Weights are uninitialised; `checkpoint` or `weights.initialize` fill them. Frozen unless `requires_grad_` is
    called.

    `ops` are `NO_OPS` on the device "meta", for a model that is only asked for its names and shapes. `shard`: the part
    of the model that this is; `config`, the vocabulary and all that goes in and out stay those of the whole.
    `kv_dtype`: of the numbers that its KV is kept in (None: `dtype`), in 8 bits divided by the `kv_scales` of each
    attention layer (empty: all 1).
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        device: torch.device | str,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops: Ops = ops
        self.kv_dtype: torch.dtype = kv_dtype or dtype
        self.kv_scales: Sequence[KVScales] = ()
        self.twins: TokenTwins | None = None
        self.shard: Shard = shard
        config = sharded(config, shard)
        self.device, self.dtype = torch.device(device), dtype
        self.num_layers: int = config.num_layers
        self.kv_shapes, self.state_shapes = config.kv_shapes, config.state_shapes
        self.vocab_size: int = (vocab := config.vocab_size)
        self.hidden_size: int = (hidden := config.hidden_size)
        own_vocab = -(-vocab // shard.size)
        self.embed_weight = empty_weight(own_vocab, hidden, device=device, dtype=dtype)
        sparse = config.moe_layers
        self.cos_sin, rotations = rotations_of(config, device)
        layers = tuple(
            Layer(config, i, ops, device, dtype, sparse=i in sparse, rotation=rotation)
            for i, rotation in enumerate(rotations)
        )
        self.layers = nn.ModuleList(layers)
        wide_dtype = norm_dtype(config, dtype)
        self.norm_weight = empty_weight(hidden, device=device, dtype=wide_dtype)
        self.lm_head_weight = (
            None if config.tied_embeddings else empty_weight(own_vocab, hidden, device=device, dtype=dtype)
        )
        # Plain attributes: see `layer`.
        self._norms = (self.norm_weight,)
        self.embedding: Embedding = Embedding(self.embed_weight, shard)
        all_logits = None if shard.is_whole else partial(shard.gathered, width=vocab)
        self.projections = (Projection(self.output_embedding, exchange=all_logits),)
        self._layers = layers
        self._embedding_scale = config.embedding_multiplier if config.embedding_multiplier != 1.0 else None
        if config.family.scaled_embeddings:  # in the weights' dtype, in which Gemma was trained with it
            self._embedding_scale = float(torch.tensor(hidden**0.5, dtype=dtype))

    def forward(self, tokens: Tensor, attention: BatchAttention, capture: Capture = NO_CAPTURE) -> DecoderOutput:
        """Run the layers over tokens int64 [n]; `attention` knows which sequences they belong to, and where."""
        out = self.ops.run_layers(
            self._layers, self.embed(tokens), attention, self.cos_sin, final_norm=self._norms[0], capture=capture
        )
        return DecoderOutput(out.hidden, out.aux, out.routed_experts)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: int64 [n] → [n, H]."""
        embedded = self.embedding(tokens)
        return embedded if self._embedding_scale is None else embedded * self._embedding_scale

    def logits(self, hidden: Tensor, widen: bool = True) -> Tensor:
        """Return logits: [m, H] → [m, V], in float32 at least if `widen`, or if they are scaled or capped."""
        logits, cap, divisor = self.projections[0](hidden), self.config.logit_softcap, self.config.logit_divisor
        if widen or cap or divisor != 1.0:
            logits = wide(logits)
        if divisor != 1.0:
            logits = logits / divisor
        return (logits / cap).tanh_().mul_(cap) if cap else logits

    @property
    def output_embedding(self) -> Tensor:
        """[V, H], or a rank's rows of it; the input embedding if they are tied."""
        return self.embed_weight if self.lm_head_weight is None else self.lm_head_weight

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        """Yield all tensors of the checkpoint, under their published names, as views of the weights."""
        yield NamedWeight("model.embed_tokens.weight", self.embed_weight.detach())
        for layer in self._layers:
            for weight in layer.checkpoint_weights():
                yield replace(weight, name=f"model.layers.{layer.index}.{weight.name}")
        yield NamedWeight("model.norm.weight", self.norm_weight.detach(), self.config.family.norm_offset)
        if self.lm_head_weight is not None:
            yield NamedWeight("lm_head.weight", self.lm_head_weight.detach())


def wide(logits: Tensor) -> Tensor:
    """Return logits in float32 at least: float64 stays."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
