"""Block drafters: some layers that draft a block of tokens in one pass over mask tokens (DFlash, arXiv 2602.06036).

    context    hidden_norm(fc(hidden states of some target layers)) of every committed token → its keys and values in
               each layer
    block      the last token, masks behind it → layers that attend to the context and to the whole block → norm →
               the target's LM head

What chooses the tokens of a block is the head, a subclass each:

    BlockHead     the best token of each place (DFlash)
    WalkedHead    convolutions around each sublayer; one walk over the best candidates of each place (DFlash2)
    MarkovHead    the best token by a bias that depends on the token before, one place after another (DSpark, arXiv
                  2607.05147)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ....core.model_shape import BlockParts
from ...types.attention import BatchAttention, ContextAttention
from ..decoder import Decoder
from ..eagle import DraftHead, HeadOutput
from ..layer import Layer, add_norm
from ..mixers import GroupedAttention
from ..projection import Projection
from ..weights import NamedWeight, empty_weight
from .config import HeadConfig

_ENCODER = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


class BlockHead(DraftHead):
    """The layers that all block drafters have; by itself it chooses the best token of each place."""

    def __init__(
        self,
        config: HeadConfig,
        target: Decoder,
        own_embeddings: bool = False,
        own_lm_head: bool = False,
        fc_bias: bool = False,
    ) -> None:
        super().__init__(config, target, own_embeddings, own_lm_head)
        model, parts = config.model, config.block
        assert parts is not None and parts.mask_token is not None, "a block drafter has a block"
        assert not fc_bias, "a block drafter's fc has no bias"
        self.parts: BlockParts = parts
        self.mask_token: int = parts.mask_token
        self.aux_layers = config.aux_layers
        self.fc_weight = self._empty(model.hidden_size, len(config.aux_layers) * config.target_hidden_size)
        self.hidden_norm, self.norm_weight = self._empty(model.hidden_size), self._empty(model.hidden_size)
        layers = tuple(Layer(model, i, self.ops, self.device, self.dtype) for i in range(self.num_layers))
        self.layers = nn.ModuleList(layers)
        # In plain objects, as graphs capture them.
        self._fuse = Projection(self.fc_weight)
        self.projections = (*self.projections, self._fuse)
        self._layers, self._norms = layers, (self.hidden_norm, self.norm_weight)
        self.eps = model.rms_norm_eps

    def is_causal(self, layer: int) -> bool:
        """Return whether a place of a block sees, of the block, only itself and what stands before it."""
        if self.parts.is_causal is not None:
            return self.parts.is_causal
        return self.parts.windows_are_causal and layer in self.config.model.windowed_layers

    def prepare_hidden(self, captured: Tensor) -> Tensor:
        """Return what keys and values are made of, [n, H], of the target's hidden states entering `aux_layers`."""
        return self.ops.rms_norm(self._fuse(captured), self._norms[0], self.eps)

    def keep_context(self, context: Tensor, attention: ContextAttention) -> None:
        """Keep the KV of n committed tokens in every layer, made of `prepare_hidden`'s [n, H]."""
        for place, layer in enumerate(self._layers):
            assert isinstance(layer.mixer, GroupedAttention), "Qwen3's layers"
            k, v = layer.mixer.keys_and_values(context)
            attention.keep(place, k, v, self.cos_sin)

    def embed_block(self, tokens: Tensor) -> Tensor:
        """Embed tokens of blocks: int64 [n] → [n, H]."""
        embedded, scale = self._embed(tokens), self.parts.input_scale
        return embedded if scale == 1.0 else embedded * scale

    def run_block(self, tokens: Tensor, attention: BatchAttention) -> Tensor:
        """Run the layers over blocks: tokens int64 [bs, n], the last token of a row before its masks → what logits are
        made of, [bs, n, H]."""
        embedded = self.embed_block(tokens.reshape(-1))
        out = self.ops.run_layers(self._layers, embedded, attention, self.cos_sin, final_norm=self._norms[1])
        return out.hidden.view(*tokens.shape, -1)

    def forward(self, tokens: Tensor, hidden: Tensor, attention: BatchAttention, head: int = 0) -> HeadOutput:
        """Run one block of n tokens, see `run_block`; `hidden` [0, H]: the target's states are in the KV already."""
        out = self.run_block(tokens[None], attention)[0]
        return HeadOutput(out, out)

    def logits(self, logits_hidden: Tensor, widen: bool = True) -> Tensor:
        logits, parts = super().logits(logits_hidden, widen), self.parts
        if parts.logit_scale != 1.0:
            logits = logits * parts.logit_scale
        cap = parts.logit_softcap
        return (logits / cap).tanh() * cap if cap else logits

    def choose(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Return the drafts of places whose states are `hidden` [bs, S, H], behind the last tokens int64 [bs], as the
        target's ids int64 [bs, S]."""
        bs, steps, _ = hidden.shape
        logits = self.logits(hidden.reshape(bs * steps, -1), widen=False)
        return self.ops.best_drafts(logits, self.target_ids).view(bs, steps)

    def confidences(self, hidden: Tensor, roots: Tensor, drafts: Tensor) -> Tensor:
        """Return how sure the draft is of each place, [bs, S]: the greatest probability by the logits of the place
        alone, or how likely a confidence head takes the draft to be accepted if those before it are."""
        return self.logits(hidden.flatten(0, 1)).softmax(-1).amax(-1).view(hidden.shape[:2])

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        yield from super().checkpoint_weights()
        yield NamedWeight("fc.weight", self.fc_weight.detach())
        yield NamedWeight("hidden_norm.weight", self.hidden_norm.detach())
        yield NamedWeight("norm.weight", self.norm_weight.detach())
        for i, layer in enumerate(self._layers):
            yield from (replace(weight, name=f"layers.{i}.{weight.name}") for weight in layer.checkpoint_weights())

    def canonical_name(self, name: str) -> str:
        name = name.removeprefix("model.")
        return _ENCODER.get(name, name)


class GroupedConvolution(nn.Module):
    """Two convolutions over the last `taps` places of a block, before and after a sublayer. Their kernels are a
    constant for each channel plus what a projection of the sublayer's input adds to each group of channels."""

    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        parts, hidden = head.parts, head.hidden_size
        self._taps, self._groups = parts.conv_taps, hidden // parts.conv_group
        self.base_kernel = empty_weight(2, self._taps, hidden, device=head.device, dtype=head.dtype)
        columns = parts.conv_kernels(hidden)
        self.kernel_weight = empty_weight(columns, hidden, device=head.device, dtype=head.dtype)
        self.projections = (Projection(self.kernel_weight),)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kernels [n, taps, H] of both convolutions for the sublayer's input x [n, H]."""
        n, hidden = x.shape
        added = self.projections[0](x).view(n, 2, self._taps, self._groups, 1)
        base = self.base_kernel.view(2, self._taps, self._groups, -1)
        before, after = (added + base).view(n, 2, self._taps, hidden).unbind(1)
        return before, after

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        yield NamedWeight("base_kernel", self.base_kernel.detach())
        yield NamedWeight("kernel_projection.weight", self.kernel_weight.detach())


def convolve(x: Tensor, kernels: Tensor, block: int) -> Tensor:
    """Return Σ over taps t of kernels[:, t] · x at t places before, in blocks of `block` places: x [n, H], kernels
    [n, taps, H] → [n, H]."""
    places, weights = x.unflatten(0, (-1, block)), kernels.unflatten(0, (-1, block))
    total: Tensor = weights[:, :, 0] * places
    for tap in range(1, min(kernels.shape[1], block)):
        total[:, tap:] += weights[:, tap:, tap] * places[:, :-tap]
    return total.flatten(0, 1)


class WalkedHead(BlockHead):
    """DFlash2: a block's tokens are one walk over `selector_top_k` candidates of each place.

    A candidate c behind token p at a place with state h has the score ⟨A[p] ⊙ project(h), B[c]⟩ + its logit; the walk
    takes the best one, place after place.
    """

    def __init__(
        self,
        config: HeadConfig,
        target: Decoder,
        own_embeddings: bool = False,
        own_lm_head: bool = False,
        fc_bias: bool = False,
    ) -> None:
        super().__init__(config, target, own_embeddings, own_lm_head, fc_bias)
        assert self.vocab_size == target.vocab_size, "its codebooks have the target's vocabulary"
        self._convolutions = tuple(GroupedConvolution(self) for _ in range(2 * self.num_layers))
        self.convolutions = nn.ModuleList(self._convolutions)
        vocab, rank, hidden = target.vocab_size, self.parts.selector_rank, self.hidden_size
        self.predecessors, self.successors = self._empty(vocab, rank), self._empty(vocab, rank)
        self.selector_weight = self._empty(rank, hidden)
        self._codebooks = (self.predecessors, self.successors)
        self._project = Projection(self.selector_weight)
        self.projections = (*self.projections, self._project)

    def run_block(self, tokens: Tensor, attention: BatchAttention) -> Tensor:
        ops, block = self.ops, tokens.shape[1]
        residual, out = self.embed_block(tokens.reshape(-1)), None
        for place, layer in enumerate(self._layers):
            for half in range(2):
                norm = layer.norms[half]
                assert norm is not None, "Qwen3's layers"
                if out is None:
                    x = ops.rms_norm(residual, norm, self.eps)
                else:
                    x, residual = add_norm(ops, out, residual, norm, self.eps)
                before, after = self._convolutions[2 * place + half].kernels(x)
                x = convolve(x, before, block)
                out = layer.run_mlp(x, attention.in_round)[0] if half else layer.mix(x, attention, self.cos_sin)
                out = convolve(out, after, block)
        assert out is not None, "a draft without layers"
        return add_norm(ops, out, residual, self._norms[1], self.eps)[0].view(*tokens.shape, -1)

    def choose(self, hidden: Tensor, roots: Tensor) -> Tensor:
        bs, steps, _ = hidden.shape
        flat = hidden.reshape(bs * steps, -1)
        logits, candidates = self.logits(flat).topk(self.parts.selector_top_k, dim=-1)
        projected = self._project(flat).view(bs, steps, -1)
        candidates, logits = (x.view(bs, steps, -1) for x in (candidates, logits))
        predecessors, codebook = self._codebooks
        successors = codebook[candidates]
        token, drafts = roots, []
        for place in range(steps):
            edge = (predecessors[token] * projected[:, place]).unsqueeze(1) * successors[:, place]
            best = (edge.sum(-1) + logits[:, place]).argmax(-1, keepdim=True)
            token = candidates[:, place].gather(1, best)[:, 0]
            drafts.append(token)
        return torch.stack(drafts, 1)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        yield from super().checkpoint_weights()
        for number, part in enumerate(self._convolutions):
            name = f"layers.{number // 2}.{('attention_conv', 'mlp_conv')[number % 2]}"
            yield from (replace(weight, name=f"{name}.{weight.name}") for weight in part.checkpoint_weights())
        yield NamedWeight("candidate_selector.predecessor_codebook", self.predecessors.detach())
        yield NamedWeight("candidate_selector.successor_codebook", self.successors.detach())
        yield NamedWeight("candidate_selector.hidden_projection.weight", self.selector_weight.detach())


class MarkovHead(BlockHead):
    """DSpark: a bias of low rank, by the token before, is added to the logits of each place.

    vanilla   W₂ · W₁[p]
    gated     W₂ · (g ⊙ W₁[p]), g = σ(gate([h, W₁[p]]))
    rnn       W₂ · tanh(o), (g, c, o) = joint([s, W₁[p], h]), and the next place has s ← σ(g) ⊙ s + (1 − σ(g)) ⊙
              tanh(c)
    """

    def __init__(
        self,
        config: HeadConfig,
        target: Decoder,
        own_embeddings: bool = False,
        own_lm_head: bool = False,
        fc_bias: bool = False,
    ) -> None:
        super().__init__(config, target, own_embeddings, own_lm_head, fc_bias)
        parts, hidden = self.parts, self.hidden_size
        rank = parts.markov_rank
        self._inner: Projection | None = None
        self._tables: tuple[Tensor, Projection] | None = None
        self.inner_weight = self.inner_bias = self.confidence_weight = self.confidence_bias = None
        if rank:
            self.markov_embed = self._empty(target.vocab_size, rank)
            self.markov_output = self._empty(self.vocab_size, rank)
            self._tables = self.markov_embed, Projection(self.markov_output)
            self.projections = (*self.projections, self._tables[1])
        sizes = {"gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}.get(parts.markov_head)
        if rank and sizes is not None:
            self.inner_weight, self.inner_bias = self._empty(*sizes), self._empty(sizes[0])
            self._inner = Projection(self.inner_weight, self.inner_bias)
            self.projections = (*self.projections, self._inner)
        if parts.has_confidence:
            self.confidence_weight = self._empty(1, hidden + rank * parts.confidence_with_markov)
            self.confidence_bias = self._empty(1)

    def choose(self, hidden: Tensor, roots: Tensor) -> Tensor:
        if self._tables is None:
            return super().choose(hidden, roots)
        bs, steps, _ = hidden.shape
        logits = self.logits(hidden.reshape(bs * steps, -1)).view(bs, steps, -1)
        embed, output = self._tables
        token, drafts = roots, []
        state = hidden.new_zeros(bs, self.parts.markov_rank)
        for place in range(steps):
            latent, state = self._latent(embed[token], hidden[:, place], state)
            token = self.ops.best_drafts(logits[:, place] + output(latent), self.target_ids)
            drafts.append(token)
        return torch.stack(drafts, 1)

    def _latent(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the bias of a place is made of, [bs, rank], and the state of the next place."""
        if self._inner is None:
            return before, state
        if self.parts.markov_head == "gated":
            return torch.sigmoid(self._inner(torch.cat((hidden, before), -1))) * before, state
        gate, candidate, out = self._inner(torch.cat((state, before, hidden), -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1.0 - gate) * torch.tanh(candidate)

    def confidences(self, hidden: Tensor, roots: Tensor, drafts: Tensor) -> Tensor:
        if self.confidence_weight is None:
            return super().confidences(hidden, roots, drafts)
        if self.parts.confidence_with_markov:
            assert self._tables is not None, "its configuration says so only with a rank"
            before = torch.cat((roots[:, None], drafts[:, :-1]), 1)
            hidden = torch.cat((hidden, self._tables[0][before]), -1)
        return torch.sigmoid(nn.functional.linear(hidden, self.confidence_weight, self.confidence_bias).squeeze(-1))

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        yield from super().checkpoint_weights()
        if self._tables is not None:
            yield NamedWeight("markov_head.markov_w1.weight", self.markov_embed.detach())
            yield NamedWeight("markov_head.markov_w2.weight", self.markov_output.detach())
        name = "gate_proj" if self.parts.markov_head == "gated" else "joint_proj"
        optional = {
            f"markov_head.{name}.weight": self.inner_weight,
            f"markov_head.{name}.bias": self.inner_bias,
            "confidence_head.proj.weight": self.confidence_weight,
            "confidence_head.proj.bias": self.confidence_bias,
        }
        yield from (NamedWeight(name, weight.detach()) for name, weight in optional.items() if weight is not None)
