"""Drafting and recurrent layers without a pool: every proposal recomputed from the row's whole text with dense
attention, on trees of `core.tree.build`.

A *frontier* is what one more pass of the draft needs of a branch: its tokens, and for heads the hidden states beside
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.tree.build import Candidates, VerifyTree, build_chain, build_tree, expand_topk, first_candidates
from ...gpu.draft.network import HeadNetwork, LanguageModelNetwork
from ...gpu.kernels.layers.delta_rule import L2_EPS, recur_torch
from ...gpu.models.decoder import Capture, Decoder
from ...gpu.models.eagle import DraftHead, MultiLayerEagleHeads
from ...gpu.models.heads.block import BlockHead
from ...gpu.tiny.dense import BlockAttention, DenseAttention
from ...gpu.types.recurrence import Inputs, RecurrentWeights, StateShape


@dataclass(frozen=True, slots=True)
class Shape:
    """What a round asks for."""

    steps: int
    topk: int
    num_draft_tokens: int
    max_position: int


@dataclass(frozen=True, slots=True)
class DenseRelay:
    """What a row's round should begin with."""

    topk_ids: np.ndarray  # int64 [n]
    topk_probabilities: np.ndarray  # float64 [n]
    hidden: np.ndarray | None  # float64 [H]


def best(logits: Tensor, topk: int, noise: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the best tokens and their probabilities; other ones among near equals for every `noise` but 0."""
    if noise:
        logits = logits + 2e-3 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(noise))
    probabilities = logits.softmax(-1)
    order = torch.argsort(probabilities, dim=-1, descending=True, stable=True)[..., :topk]
    return order.numpy(), probabilities.gather(-1, order).numpy()


def captured_states(target: Decoder, text: Sequence[int], aux_layers: tuple[int, ...]) -> Tensor:
    """Return what the target's pass over `text` captures for a head, [n, C]."""
    out = target.forward(torch.tensor(text), DenseAttention([len(text)]), Capture(aux_layers=aux_layers))
    return out.aux if aux_layers else out.hidden


class DenseModel:
    """STANDALONE: a branch is its text."""

    def __init__(self, model: Decoder, noise: int = 0) -> None:
        self._model, self._noise = model, noise

    def begin(self, text: Sequence[int], topk: int) -> tuple[DenseRelay, list[int]]:
        ids, probabilities = self._candidates([text], topk)
        return DenseRelay(ids[0], probabilities[0], None), list(text)

    def go_on(self, frontier: list[list[int]], tokens: Sequence[int], topk: int):
        frontier = [[*branch, token] for branch, token in zip(frontier, tokens, strict=True)]
        return frontier, *self._candidates(frontier, topk)

    def _candidates(self, texts, topk: int) -> tuple[np.ndarray, np.ndarray]:
        length = len(texts[0])
        out = self._model.forward(torch.tensor(texts).view(-1), DenseAttention([length] * len(texts)))
        return best(self._model.logits(out.hidden.view(len(texts), length, -1)[:, -1]), topk, self._noise)


@dataclass(frozen=True, slots=True)
class HeadBranch:
    """Slots 0 … m − 1 of a head: tokens one ahead, what stands beside them, and what the last slot said."""

    tokens: Tensor  # int64 [m]
    hidden: Tensor  # [m, H]
    last: Tensor  # [H]


class DenseHead:
    """EAGLE and EAGLE-3."""

    def __init__(self, head: DraftHead, target: Decoder, noise: int = 0) -> None:
        self._head, self._target, self._noise = head, target, noise

    def begin(self, text: Sequence[int], topk: int) -> tuple[DenseRelay, HeadBranch]:
        hidden = self._head.prepare_hidden(captured_states(self._target, text[:-1], self._head.aux_layers))
        branches, ids, probabilities = self._pass(torch.tensor(text[1:])[None], hidden[None], topk)
        return DenseRelay(ids[0], probabilities[0], branches[0].last.numpy()), branches[0]

    def go_on(self, frontier: list[HeadBranch], tokens: Sequence[int], topk: int):
        new = torch.tensor([int(token) for token in tokens])
        return self._pass(
            torch.cat([torch.stack([branch.tokens for branch in frontier]), new[:, None]], 1),
            torch.stack([torch.cat([branch.hidden, branch.last[None]]) for branch in frontier]),
            topk,
        )

    def _pass(self, tokens: Tensor, hidden: Tensor, topk: int):
        count, length = tokens.shape
        out = self._head.forward(tokens.view(-1), hidden.view(count * length, -1), DenseAttention([length] * count))
        said = out.hidden.view(count, length, -1)[:, -1]
        ids, probabilities = best(
            self._head.logits(out.logits_hidden.view(count, length, -1)[:, -1]), topk, self._noise
        )
        ids = self._head.to_target_ids(torch.from_numpy(ids)).numpy()
        return [HeadBranch(t, h, s) for t, h, s in zip(tokens, hidden, said, strict=True)], ids, probabilities


class DenseHeads:
    """MULTI_LAYER_EAGLE: head h begins each slot with what head h − 1 said at the slot before, and reads on over the
    guesses of the heads before it. A frontier is how many of the drafts it has taken, with the candidates of every
    head."""

    def __init__(self, heads: MultiLayerEagleHeads, target: Decoder, noise: int = 0) -> None:
        self._heads, self._target, self._noise = heads, target, noise

    def begin(self, text: Sequence[int], topk: int) -> tuple[DenseRelay, tuple[int, list]]:
        tokens = torch.tensor(text[1:])
        hidden = self._heads.prepare_hidden(captured_states(self._target, text[:-1], self._heads.aux_layers))
        said: list[tuple[np.ndarray, np.ndarray]] = []
        for head in range(self._heads.num_layers):
            if head:
                tokens = torch.cat([tokens, torch.from_numpy(said[-1][0][:1])])
                hidden = torch.cat([torch.zeros_like(hidden[:1]), hidden])  # in front of a text nothing was said
            out = self._heads.forward(tokens, hidden, DenseAttention([len(tokens)]), head)
            hidden = out.hidden
            ids, probabilities = best(self._heads.logits(out.logits_hidden[-1:]), topk, self._noise)
            said.append((self._heads.to_target_ids(torch.from_numpy(ids[0])).numpy(), probabilities[0]))
        return DenseRelay(*said[0], None), (0, said)

    def go_on(self, frontier: list[tuple[int, list]], tokens: Sequence[int], topk: int):
        depth, said = frontier[0][0] + 1, frontier[0][1]
        ids, probabilities = (np.tile(values[:topk], (len(tokens), 1)) for values in said[depth])
        return [(depth, said)] * len(tokens), ids, probabilities


@dataclass(frozen=True, slots=True)
class DenseProposal:
    """What a round should begin with, what it should draft step by step (empty without steps), and the tree
    that it makes of it."""

    relay: DenseRelay
    levels: list[Candidates]
    tree: VerifyTree


def dense_tree(drafter, text: Sequence[int], shape: Shape, relayed_topk: int) -> DenseProposal:
    """Draft the tree of a row whose text ends with the root."""
    relay, branch = drafter.begin(text, relayed_topk)
    root, lengths = np.array(text[-1:]), np.array([len(text) - 1])
    k = shape.topk
    if shape.steps == 0:
        return DenseProposal(relay, [], build_chain(root, np.zeros((1, 0), np.int32), lengths, shape.max_position))
    ids, probabilities = relay.topk_ids[:k], relay.topk_probabilities[:k]
    level, beam = first_candidates(ids[None], probabilities[None])
    levels, frontier = [level], [branch] * k
    for _ in range(1, shape.steps):
        frontier = [frontier[source] for source in beam.sources[0]]
        frontier, ids, probabilities = drafter.go_on(frontier, beam.tokens[0].tolist(), k)
        level, beam = expand_topk(beam, ids[None], probabilities[None])
        levels.append(level)
    if k == 1:
        drafts = np.concatenate([level.tokens for level in levels], 1)
        return DenseProposal(relay, levels, build_chain(root, drafts, lengths, shape.max_position))
    return DenseProposal(relay, levels, build_tree(root, levels, lengths, shape.num_draft_tokens, shape.max_position))


def dense_block(head: BlockHead, target: Decoder, text: Sequence[int], steps: int) -> list[int]:
    """Draft the block of a row whose text ends with the root."""
    length = len(text) - 1
    places = steps + (not head.parts.samples_anchor)
    attention = BlockAttention(torch.tensor([[length]]), length, places, head.is_causal)
    head.keep_context(head.prepare_hidden(captured_states(target, text[:-1], head.aux_layers)), attention)
    hidden = head.run_block(torch.tensor([[text[-1]] + [head.mask_token] * (places - 1)]), attention)
    return head.choose(hidden[:, -steps:], torch.tensor(text[-1:]))[0].tolist()


def dense_masked(draft: Decoder | DraftHead, target: Decoder, text: Sequence[int], steps: int) -> list[int]:
    """Draft the tokens of a row whose text ends with the root, in one pass with a mask for each but the first."""
    is_model = isinstance(draft, Decoder)
    network = LanguageModelNetwork(draft, target.vocab_size) if is_model else HeadNetwork(draft)
    tokens, hidden = [*text[1 - is_model :], *[network.mask_token] * (steps - 1)], None
    if not is_model:
        known = network.prepare(captured_states(target, text[:-1], draft.aux_layers))
        hidden = torch.cat([known, network.masked_hidden(steps - 1)])
    _, logits_hidden = network.run(torch.tensor(tokens), hidden, DenseAttention([len(tokens)]))
    return network.candidates(logits_hidden[-steps:], 1)[0][:, 0].tolist()


# -- recurrent layers -------------------------------------------------------------------------------------------------


class PlainRecurrence(DenseAttention):
    """Dense attention over one text of `length` tokens, and recurrent layers as their rule is written, one token after
    the other. `states` are the layers' behind the text."""

    def __init__(self, length: int) -> None:
        super().__init__([length])
        self.states: list[Tensor] = []  # per recurrent layer, see `flat_state`

    def recur(self, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape) -> Tensor:
        """See `Attention`."""
        return recur_torch(self, layer, projected, weights, shape)

    def run(self, layer: int, inputs: Inputs, kernel: Tensor, shape: StateShape) -> Tensor:
        """See `PassStates`."""
        mixed, size = inputs.mixed, shape.key_heads * shape.key_dim
        padded = torch.cat((mixed.new_zeros(shape.kernel - 1, mixed.shape[1]), mixed))
        convolved = F.silu((padded.unfold(0, shape.kernel, 1) * kernel).sum(-1))
        q, k, v = convolved.split_with_sizes((size, size, shape.heads * shape.value_dim), 1)
        q, k = (_by_heads(x, shape) for x in (q, k))
        v = v.unflatten(1, (shape.heads, shape.value_dim))
        state = mixed.new_zeros(shape.heads, shape.key_dim, shape.value_dim)
        outputs: list[Tensor] = []
        for i, (decay, beta) in enumerate(zip(inputs.log_decay.exp(), inputs.beta, strict=True)):
            state = state * decay.view(-1, 1, 1)
            update = (v[i] - (k[i].unsqueeze(1) @ state).squeeze(1)) * beta.unsqueeze(1)
            state = state + k[i].unsqueeze(2) * update.unsqueeze(1)
            outputs.append((q[i].unsqueeze(1) @ state).squeeze(1))
        self.states.append(flat_state(state, padded[len(mixed) :]))
        scaled: Tensor = torch.stack(outputs) * shape.key_dim**-0.5
        return scaled


def flat_state(matrices: Tensor, inputs: Tensor) -> Tensor:
    """Return what a layer keeps of a request as one vector: states [H, Dk, Dv] and inputs [K − 1, C]."""
    return torch.cat((matrices.flatten(), inputs.flatten()))


def _by_heads(x: Tensor, shape: StateShape) -> Tensor:
    """Return queries or keys [n, Hk · Dk] of length 1 for each head, [n, H, Dk]."""
    x = x.unflatten(1, (shape.key_heads, shape.key_dim))
    x = x / (x.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
    return x.repeat_interleave(shape.heads // shape.key_heads, 1)
