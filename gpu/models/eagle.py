"""Draft heads on the target's hidden states, in the forms in which they are published.

    EAGLE        fc([embedding of token j + 1; hidden state j]) → decoder layers, the first without an input norm → the
                 target's LM head
    EAGLE-3      fc(hidden states of three target layers) once; then [norm(embedding); norm(hidden)] → one decoder layer
                 over twice the width → norm → an LM head over the draft's own, smaller vocabulary
    multi-layer  one EAGLE head per step; head s takes what head s − 1 gave at the slot before

(Li et al., arXiv 2401.15077, 2406.16858, 2503.01840.) Slot j of the draft pool holds the KV of (hidden state j, token j
+ 1), rotated to position j. A head shares the target's embeddings, and its LM head where it has none of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..types.attention import BatchAttention, KVScales
from ..types.ops import Ops
from .decoder import Decoder, wide
from .heads.config import HeadConfig
from .layer import Layer
from .mixers import norm_dtype
from .projection import Embedding, Projection
from .rope import cos_sin_table
from .weights import NamedWeight, empty_weight, weight_bytes


@dataclass(slots=True)
class HeadOutput:
    """One pass of a head over n tokens."""

    hidden: Tensor  # [n, H]: what the next step's pass takes
    logits_hidden: Tensor  # [n, H]: what `logits` takes


class DraftHead(nn.Module, ABC):
    """What all heads have in common: embeddings, LM head, vocabulary, sizes.
    Weights are frozen until `requires_grad_`."""

    # The target layers whose input states are captured; if empty, the target's last hidden state is captured.
    aux_layers: tuple[int, ...] = ()

    def __init__(self, config: HeadConfig, target: Decoder, own_embeddings: bool, own_lm_head: bool) -> None:
        super().__init__()
        self.config = config
        self.ops: Ops = target.ops
        self.device, self.dtype = target.device, target.dtype
        model = config.model
        # The layers of the draft KV pool, and the vocabulary of the draft.
        self.num_layers = model.num_layers
        self.kv_shapes = model.kv_shapes
        self.kv_scales: Sequence[KVScales] = ()
        self.hidden_size, self.vocab_size = model.hidden_size, config.draft_vocab_size
        if not own_embeddings:
            assert model.hidden_size == target.hidden_size, "the target's embeddings have another width"
        self.embed_weight = self._empty(model.vocab_size, model.hidden_size) if own_embeddings else None
        self.lm_head_weight = self._empty(config.draft_vocab_size, model.hidden_size) if own_lm_head else None
        if not own_lm_head:
            assert config.draft_vocab_size == target.vocab_size, "the target's LM head has another vocabulary"
            assert model.hidden_size == target.hidden_size, "the target's LM head has another width"
        # Published heads state a short context, but run over the target's.
        num_positions = max(model.max_position_embeddings, target.config.max_position_embeddings)
        self.cos_sin = cos_sin_table(model.rope, model.head_dim, num_positions, self.device)
        # In plain objects, so that the target's weights do not count as this module's own.
        self._embed = target.embedding if self.embed_weight is None else Embedding(self.embed_weight)
        own = self.lm_head_weight
        self._output = target.projections[0] if own is None else Projection(own)
        self.projections: tuple[Projection, ...] = () if own is None else (self._output,)
        self.target_ids: Tensor | None = None  # of each draft token; None if the vocabularies are the same

    @abstractmethod
    def forward(self, tokens: Tensor, hidden: Tensor, attention: BatchAttention, head: int = 0) -> HeadOutput:
        """Run the head over tokens int64 [n], one ahead of the slots;
        hidden [n, H] from `prepare_hidden` or from the step before."""

    def prepare_hidden(self, captured: Tensor) -> Tensor:
        """Return what `forward` takes, [n, H], of what was captured from the target, [n, …]."""
        return captured

    def logits(self, logits_hidden: Tensor, widen: bool = True) -> Tensor:
        """Return logits: [m, H] → [m, draft vocabulary], in float32 at least if `widen`."""
        logits = self._output(logits_hidden)
        return wide(logits) if widen else logits

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids of draft tokens int64, of the same shape."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Take `target_ids` int64 [draft vocabulary]: the target's id of each draft token, all different."""
        assert target_ids.shape == (self.vocab_size,), target_ids.shape
        assert target_ids.dtype is torch.int64, target_ids.dtype
        self.target_ids = target_ids.to(self.device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the head's own weights; those shared with the target are not counted."""
        return weight_bytes(self)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        """Yield all tensors of the checkpoint but the vocabulary's map, under their published names."""
        if self.embed_weight is not None:
            yield NamedWeight("embed_tokens.weight", self.embed_weight.detach())
        if self.lm_head_weight is not None:
            yield NamedWeight("lm_head.weight", self.lm_head_weight.detach())

    def canonical_name(self, name: str) -> str:
        """Return the name in `checkpoint_weights` of a tensor that a file calls `name`."""
        return unprefixed(name)

    def _empty(self, *shape: int) -> nn.Parameter:
        return empty_weight(*shape, device=self.device, dtype=self.dtype)


def unprefixed(name: str) -> str:
    """Return a tensor's name without the prefix `model.`; a name of the speculators format becomes SafeAILab's."""
    name = name.removeprefix("model.")
    for theirs, published in (("fusion_fc.", "fc."), ("transformer.", "layers.0.")):
        if name.startswith(theirs):
            return published + name.removeprefix(theirs)
    return name


class EagleLayers(nn.Module):
    """The body of one EAGLE head: fusion of token and hidden state, then `num_layers` layers from
    `first_layer` of the pool on."""

    def __init__(self, head: DraftHead, first_layer: int, num_layers: int, fc_bias: bool) -> None:
        super().__init__()
        model = head.config.model
        self.ops: Ops = head.ops
        self.eps = model.rms_norm_eps
        hidden = model.hidden_size
        self.fc_weight = empty_weight(hidden, 2 * hidden, device=head.device, dtype=head.dtype)
        self.fc_bias = empty_weight(hidden, device=head.device, dtype=head.dtype) if fc_bias else None
        layers = tuple(
            Layer(model, first_layer + i, head.ops, head.device, head.dtype, input_norm=i > 0)
            for i in range(num_layers)
        )
        self.layers = nn.ModuleList(layers)
        self.projections = (Projection(self.fc_weight, self.fc_bias),)
        self._layers = layers

    def run(self, embedded: Tensor, hidden: Tensor, attention: BatchAttention, cos_sin: Tensor) -> Tensor:
        """Run the layers: [n, H] and [n, H] → [n, H], without a final norm:
        the layer predicts the target's next state after its norm."""
        residual = self.projections[0](torch.cat((embedded, hidden), -1))
        return self.ops.run_layers(self._layers, residual, attention, cos_sin).hidden

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        yield NamedWeight("fc.weight", self.fc_weight.detach())
        if self.fc_bias is not None:
            yield NamedWeight("fc.bias", self.fc_bias.detach())
        for i, layer in enumerate(self._layers):
            yield from (replace(weight, name=f"layers.{i}.{weight.name}") for weight in layer.checkpoint_weights())


class BodiedHead(DraftHead):
    """Heads whose bodies are `EagleLayers`, one for all steps or one per step."""

    _bodies: tuple[EagleLayers, ...]

    def __init__(
        self,
        config: HeadConfig,
        target: Decoder,
        own_embeddings: bool = False,
        own_lm_head: bool = False,
        fc_bias: bool = False,
    ) -> None:
        super().__init__(config, target, own_embeddings, own_lm_head)
        self._add_bodies(fc_bias)

    @abstractmethod
    def _add_bodies(self, fc_bias: bool) -> None:
        """Set `_bodies`."""

    def forward(self, tokens: Tensor, hidden: Tensor, attention: BatchAttention, head: int = 0) -> HeadOutput:
        embedded = self._embed(tokens)
        out = self._bodies[head].run(embedded, hidden, attention, self.cos_sin)
        return HeadOutput(out, out)


class EagleHead(BodiedHead):
    """EAGLE and EAGLE-2 (which differ in the tree, not in the head)."""

    def _add_bodies(self, fc_bias: bool) -> None:
        self.body = EagleLayers(self, 0, self.num_layers, fc_bias)
        self._bodies = (self.body,)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        yield from super().checkpoint_weights()
        yield from self.body.checkpoint_weights()


class PredictionLayer(DraftHead):
    """The layer inside a model's own checkpoint that predicts the token after next, one for all steps (MiMo, arXiv
    2505.07608; DeepSeek-V3, arXiv 2412.19437, section 2.2).

    input([norm(hidden state j); norm(embedding of token j + 1)]) → decoder layer → norm, which gives both what the next
    step takes and what the target's LM head takes. Some families have the embedding first.
    """

    def __init__(self, config: HeadConfig, target: Decoder) -> None:
        super().__init__(config, target, False, False)
        form = config.model.family.prediction
        assert form is not None, f"{config.model.architecture} has no prediction layer"
        hidden = config.model.hidden_size
        self._form, self._behind = form, target.num_layers
        self.input_weight = self._empty(hidden, 2 * hidden)
        wide = norm_dtype(config.model, self.dtype)
        self.token_norm, self.hidden_norm, self.final_norm = (
            empty_weight(hidden, device=self.device, dtype=wide) for _ in range(3)
        )
        self.layer = Layer(config.model, 0, self.ops, self.device, self.dtype, sparse=bool(config.model.moe_layers))
        self.projections = (*self.projections, Projection(self.input_weight))
        self._layers = (self.layer,)
        self._norms = (self.token_norm, self.hidden_norm, self.final_norm)

    def forward(self, tokens: Tensor, hidden: Tensor, attention: BatchAttention, head: int = 0) -> HeadOutput:
        token_norm, hidden_norm, final_norm = self._norms
        eps = self._layers[0].eps
        embedded = self.ops.rms_norm(self._embed(tokens), token_norm, eps)
        normed = self.ops.rms_norm(hidden, hidden_norm, eps)
        inputs = (embedded, normed) if self._form.token_first else (normed, embedded)
        residual = self.projections[-1](torch.cat(inputs, -1))
        out = self.ops.run_layers(self._layers, residual, attention, self.cos_sin, final_norm=final_norm)
        return HeadOutput(out.hidden, out.hidden)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        form = self._form
        offset = self.config.model.family.norm_offset
        prefix = form.prefix.format(layers=self._behind)
        yield NamedWeight(f"{prefix}{form.input}.weight", self.input_weight.detach())
        for name, norm in zip((form.token_norm, form.hidden_norm, form.final_norm), self._norms, strict=True):
            yield NamedWeight(f"{prefix}{name}.weight", norm.detach(), offset)
        yield from (replace(w, name=f"{prefix}{form.layer}{w.name}") for w in self.layer.checkpoint_weights())


class MultiLayerEagleHeads(BodiedHead):
    """One EAGLE head per step; head s has layer s of the draft pool.

    In a checkpoint, `num_nextn_predict_layers` in config.json is the number of heads, and the tensors of head s are
    those of an EAGLE head behind `heads.<s>.`.
    """

    def _add_bodies(self, fc_bias: bool) -> None:
        self.num_heads = self.num_layers = self.config.num_heads  # as many steps it can draft
        self.kv_shapes = self.kv_shapes[:1] * self.num_layers
        self._bodies = tuple(EagleLayers(self, s, 1, fc_bias) for s in range(self.num_heads))
        self.heads = nn.ModuleList(self._bodies)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        yield from super().checkpoint_weights()
        for s, body in enumerate(self._bodies):
            yield from (replace(weight, name=f"heads.{s}.{weight.name}") for weight in body.checkpoint_weights())


class Eagle3Head(DraftHead):
    """EAGLE-3. The next step takes the layer's output before the norm, the LM head the normed one.

    EAGLE-3.1 has three switches: one norm of all that is fused (`input_norm`), a norm of each fused state (`fc_norm`),
    and the normed output for the next step, too.
    """

    def __init__(
        self,
        config: HeadConfig,
        target: Decoder,
        own_embeddings: bool = False,
        own_lm_head: bool = True,
        fc_bias: bool = False,
    ) -> None:
        super().__init__(config, target, own_embeddings, own_lm_head)
        self.aux_layers = config.aux_layers
        model = config.model
        self.fc_weight = self._empty(model.hidden_size, len(config.aux_layers) * config.target_hidden_size)
        self.fc_bias = self._empty(model.hidden_size) if fc_bias else None
        fused = len(config.aux_layers) * config.target_hidden_size
        self.input_norm = self._empty(fused) if config.norm_before_fc else None
        self.fc_norm = nn.ParameterList(
            self._empty(config.target_hidden_size) for _ in config.aux_layers * config.fc_norm
        )
        self.hidden_norm = self._empty(model.hidden_size)
        self.midlayer = Layer(model, 0, self.ops, self.device, self.dtype, input_size=2 * model.hidden_size)
        self.layers = nn.ModuleList(
            Layer(model, i, self.ops, self.device, self.dtype) for i in range(1, self.num_layers)
        )
        self.norm_weight = self._empty(model.hidden_size)
        self._fuse = Projection(self.fc_weight, self.fc_bias)
        self.projections = (*self.projections, self._fuse)
        self._layers: tuple[Layer, ...] = (self.midlayer, *self.layers)
        input_norm = self.midlayer.input_norm
        assert input_norm is not None, "the layer has a norm of its own"
        self._norms = (input_norm, self.hidden_norm, self.norm_weight)
        self._fc_norms = tuple(self.fc_norm)  # in plain objects, as graphs capture them

    def prepare_hidden(self, captured: Tensor) -> Tensor:
        """Return the target's hidden states entering `aux_layers`, concatenated, fused to [n, H]."""
        eps = self._layers[0].eps
        if self.input_norm is not None:
            captured = self.ops.rms_norm(captured, self.input_norm, eps)
        if self._fc_norms:
            states = captured.chunk(len(self._fc_norms), -1)
            normed = [self.ops.rms_norm(x.contiguous(), w, eps) for x, w in zip(states, self._fc_norms, strict=True)]
            captured = torch.cat(normed, -1)
        return self._fuse(captured)

    def forward(self, tokens: Tensor, hidden: Tensor, attention: BatchAttention, head: int = 0) -> HeadOutput:
        input_norm, hidden_norm, final_norm = self._norms
        eps = self._layers[0].eps
        embedded = self.ops.rms_norm(self._embed(tokens), input_norm, eps)
        normed = self.ops.rms_norm(hidden, hidden_norm, eps)
        residual = normed if self.config.norm_before_residual else hidden
        inputs = torch.cat((embedded, normed), -1)
        out = self.ops.run_layers(self._layers, residual, attention, self.cos_sin, inputs, final_norm)
        return HeadOutput(out.hidden if self.config.norm_output else out.residual, out.hidden)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        yield from super().checkpoint_weights()
        if self.input_norm is not None:
            yield NamedWeight("input_norm.weight", self.input_norm.detach())
        for place, weight in enumerate(self.fc_norm):
            yield NamedWeight(f"fc_norm.{place}.weight", weight.detach())
        yield NamedWeight("fc.weight", self.fc_weight.detach())
        if self.fc_bias is not None:
            yield NamedWeight("fc.bias", self.fc_bias.detach())
        yield NamedWeight("midlayer.hidden_norm.weight", self.hidden_norm.detach())
        for i, layer in enumerate(self._layers):
            name = f"layers.{i}" if i else "midlayer"
            yield from (replace(weight, name=f"{name}.{weight.name}") for weight in layer.checkpoint_weights())
        yield NamedWeight("norm.weight", self.norm_weight.detach())

    def canonical_name(self, name: str) -> str:
        """Return the name under which the head knows a tensor: some files call the one layer `layers.0`."""
        name = unprefixed(name)
        for place, former in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
            name = name.replace(f"{former}.", f"fc_norm.{place}.")
        return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


class ParallelEagleHead(Eagle3Head):
    """P-EAGLE: an EAGLE-3 head, of one layer or several, that drafts all tokens of a round in one pass. `mask_hidden`
    stands in for the fused states of a mask token, which the target has not seen."""

    def __init__(
        self,
        config: HeadConfig,
        target: Decoder,
        own_embeddings: bool = False,
        own_lm_head: bool = True,
        fc_bias: bool = False,
    ) -> None:
        super().__init__(config, target, own_embeddings, own_lm_head, fc_bias)
        self.mask_hidden: Tensor = self._empty(1, 1, len(config.aux_layers) * config.target_hidden_size)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        yield NamedWeight("mask_hidden", self.mask_hidden.detach())
        yield from super().checkpoint_weights()
