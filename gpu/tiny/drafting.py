"""What each draft would propose at every place of a text, in one pass over the whole text.

A draft reaches step s at a position only if its earlier proposals agreed with the text. So the text itself stands in
for these proposals, and one pass over it yields the draft's exact logits of every step at every position where they
matter. Training and measuring use the same passes.

    texts     x₀ x₁ x₂ …                     int64 [b, t]
    slots     slot m holds (target's hidden state m, token x[m + 1]) and proposes x[m + 2]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..models.decoder import Decoder
from ..models.eagle import DraftHead, Eagle3Head, MultiLayerEagleHeads
from ..models.heads.block import BlockHead
from ..types.ops import Capture
from .dense import BlockAttention, DenseAttention, UnrolledAttention, shifted
from .training import fast_products

Draft = Decoder | DraftHead
BLOCK_EVERY = 4  # the places at which a block drafter learns: more steps at fewer places are worth more


@dataclass(frozen=True, slots=True)
class Proposals:
    """One step's logits for tokens `first` … t − 1 of each text, or for each `every`-th of them."""

    first: int
    logits: Tensor  # [b, (t − first) / every, draft vocabulary]
    every: int = 1


@torch.no_grad()
def teach(target: Decoder, texts: Tensor, aux_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Return the target's pass over texts: logits [b, t, V], and the states its heads take, [b, t, …]."""
    b, t = texts.shape
    out = target.forward(texts.reshape(-1), DenseAttention([t] * b, device=texts.device), Capture(aux_layers))
    captured = out.hidden if out.aux is None else out.aux
    return target.logits(out.hidden).view(b, t, -1), captured.view(b, t, -1)


def propose(draft: Draft, texts: Tensor, captured: Tensor, num_steps: int, every: int = 1) -> Iterator[Proposals]:
    """Run `num_steps` steps of the draft at every place; `captured` is `teach`'s (a language model ignores it). A block
    drafter, which has `num_steps` tokens more to run at each place, may run at each `every`-th alone."""
    if isinstance(draft, Decoder):
        return _propose_standalone(draft, texts, num_steps)
    if isinstance(draft, MultiLayerEagleHeads):
        return _propose_heads(draft, texts, captured, num_steps)
    if isinstance(draft, BlockHead):
        return _propose_blocks(draft, texts, captured, num_steps, every)
    assert isinstance(draft, Eagle3Head), type(draft)
    return _propose_unrolled(draft, texts, captured, num_steps)


def aux_layers_of(draft: Draft) -> tuple[int, ...]:
    """Return the target's layers whose states the draft takes; empty: the last hidden state, or nothing."""
    return () if isinstance(draft, Decoder) else draft.aux_layers


def _propose_standalone(draft: Decoder, texts: Tensor, num_steps: int) -> Iterator[Proposals]:
    """Run a language model once: its step s is its pass at the place before."""
    b, t = texts.shape
    hidden = draft.forward(texts.reshape(-1), DenseAttention([t] * b, device=texts.device)).hidden
    logits = draft.logits(hidden).view(b, t, -1)
    for step in range(num_steps):
        yield Proposals(step + 1, logits[:, step:-1])


def _propose_unrolled(head: Eagle3Head, texts: Tensor, captured: Tensor, num_steps: int) -> Iterator[Proposals]:
    """Run all steps: each takes the output of the one before, a slot earlier."""
    b, t = texts.shape
    slots = t - 2  # the last one that proposes a token of the text is slot t − 3
    tokens = texts[:, 1:-1].reshape(-1)
    hidden = head.prepare_hidden(captured[:, :slots].reshape(b * slots, -1))
    attention = UnrolledAttention(b, slots)
    for step in range(num_steps):
        out = head.forward(tokens, hidden, attention)
        yield Proposals(step + 2, _logits(head, out.logits_hidden, b, step))
        hidden = _one_slot_later(out.hidden, b)


def _propose_heads(heads: MultiLayerEagleHeads, texts: Tensor, captured: Tensor, num_steps: int) -> Iterator[Proposals]:
    """Run all heads: head s takes the output of head s − 1 a slot earlier, and has its own keys and values."""
    b, t = texts.shape
    assert num_steps <= heads.num_heads, f"{num_steps} steps of {heads.num_heads} heads"
    slots = t - 2
    tokens = texts[:, 1:-1].reshape(-1)
    hidden = heads.prepare_hidden(captured[:, :slots].reshape(b * slots, -1))
    attention = DenseAttention([slots] * b, device=texts.device)
    for step in range(num_steps):
        out = heads.forward(tokens, hidden, attention, step)
        yield Proposals(step + 2, _logits(heads, out.logits_hidden, b, step))
        hidden = _one_slot_later(out.hidden, b)


def _propose_blocks(
    head: BlockHead, texts: Tensor, captured: Tensor, num_steps: int, every: int
) -> Iterator[Proposals]:
    """Run blocks behind the tokens 1, 1 + every, …, whose places i propose the tokens i behind them."""
    b, t = texts.shape
    assert not head.parts.samples_anchor, "a place proposes its own token"
    anchors = torch.arange(1, t - 1, every, device=texts.device).expand(b, -1)
    tokens = texts[:, 1:-1:every].reshape(-1, 1)
    tokens = torch.cat((tokens, tokens.new_full((len(tokens), num_steps), head.mask_token)), 1)
    attention = BlockAttention(anchors, t, num_steps + 1, head.is_causal)
    head.keep_context(head.prepare_hidden(captured.reshape(b * t, -1)), attention)
    hidden = head.run_block(tokens, attention).view(*anchors.shape, num_steps + 1, -1)
    for step in range(1, num_steps + 1):
        within = hidden[:, : len(range(1, t - step, every)), step]
        yield Proposals(step + 1, head.logits(within.flatten(0, 1)).view(*within.shape[:2], -1), every)


def _logits(head: DraftHead, hidden: Tensor, batch_size: int, step: int) -> Tensor:
    """Step s exists from slot s on."""
    hidden = hidden.view(batch_size, -1, hidden.shape[-1])[:, step:]
    return head.logits(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:2], -1)


def _one_slot_later(hidden: Tensor, batch_size: int) -> Tensor:
    return shifted(hidden.view(batch_size, -1, hidden.shape[-1]), 1).flatten(0, 1)


def next_token_loss(model: Decoder, texts: Tensor) -> Tensor:
    """Return the mean cross-entropy of each text's next tokens, nats."""
    b, t = texts.shape
    with fast_products():
        hidden = model.forward(texts.reshape(-1), DenseAttention([t] * b, device=texts.device)).hidden
        logits = model.logits(hidden.view(b, t, -1)[:, :-1].reshape(b * (t - 1), -1))
    return F.cross_entropy(logits, texts[:, 1:].reshape(-1))


def distillation_loss(target: Decoder, draft: Draft, texts: Tensor, num_steps: int, step_weight: float) -> Tensor:
    """Return how far proposals are from the target's distribution, nats per token: the mean over steps, later ones
    weighing less.

    Half is the cross-entropy with the target's distribution, which sampling accepts by, half that with its first
    choice, which greedy decoding accepts by. A draft with a vocabulary of its own learns where the target's first
    choice is in it.
    """
    with fast_products():
        logits, captured = teach(target, texts, aux_layers_of(draft))
    captured = captured.to(target.dtype)
    ids = None if isinstance(draft, Decoder) else draft.target_ids
    best = logits.argmax(-1)
    known = None
    if ids is not None:
        own = torch.full((target.vocab_size,), -1, dtype=torch.int64, device=texts.device)
        own[ids] = torch.arange(len(ids), device=texts.device)
        logits, best = logits[..., ids], own[best]
        known = best >= 0
        best = best.clamp(min=0)
    probabilities = logits.softmax(-1)
    total, weights, weight = texts.new_zeros((), dtype=logits.dtype), 0.0, 1.0
    for proposals in propose(draft, texts, captured, num_steps, BLOCK_EVERY):
        # The target's logits at place i − 1 are about token i.
        places = slice(proposals.first - 1, texts.shape[1] - 1, proposals.every)
        logs = proposals.logits.log_softmax(-1)
        soft = -(probabilities[:, places] * logs).sum(-1)
        hard = -logs.gather(-1, best[:, places, None])[..., 0]
        losses = 0.5 * (soft + hard)
        if known is None:
            mean = losses.mean()
        else:
            counted = known[:, places].to(losses.dtype)
            mean = (losses * counted).sum() / counted.sum().clamp(min=1)
        total = total + weight * mean
        weights += weight
        weight *= step_weight
    return total / weights


ROWS_AT_ONCE = 4


SURE = 2.0  # standard deviations


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """Measured on the target's own greedy texts."""

    agreement: float  # how often the first proposal is the target's token
    untrained_agreement: float  # the same of the draft before its training
    has_learnt: bool  # whether the training surely raised it
    accept_lengths: dict[int, float]  # steps → tokens per round, the target's own included


@torch.no_grad()
def measure_drafts(
    target: Decoder,
    drafts: Mapping[str, tuple[Draft, Draft, tuple[int, ...]]],
    texts: Tensor,
    prompt_len: int,
) -> dict[str, DraftQuality]:
    """Measure drafts by name, each beside itself before its training, with its chain lengths.

    `texts` int64 [n, t] are prompts of `prompt_len` tokens with the target's greedy continuations.
    """
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in drafts}
    for rows in texts.split(ROWS_AT_ONCE):
        for name, (draft, untrained, chains) in drafts.items():
            _, captured = teach(target, rows, aux_layers_of(draft))
            pair = (_matches(draft, rows, captured, max(chains)), _matches(untrained, rows, captured, 1))
            found[name].append((pair[0][:, :, prompt_len:], pair[1][:, :, prompt_len:]))
    qualities = {}
    for name, (*_, chains) in drafts.items():
        matches, of_untrained = (np.concatenate(pieces, 1) for pieces in zip(*found[name], strict=True))
        qualities[name] = _quality(matches, of_untrained, chains)
    return qualities


def _quality(matches: np.ndarray, untrained: np.ndarray, chains: tuple[int, ...]) -> DraftQuality:
    """Return the quality of a draft from its matches bool [steps, n, t], and those of its untrained self [1, n, t]."""
    better, worse = (int(np.count_nonzero(ones)) for ones in (matches[0] & ~untrained[0], untrained[0] & ~matches[0]))
    has_learnt = better - worse > SURE * math.sqrt(better + worse)
    lengths = {steps: accept_length(matches[:steps]) for steps in chains}
    return DraftQuality(float(matches[0].mean()), float(untrained[0].mean()), has_learnt, lengths)


def _matches(draft: Draft, texts: Tensor, captured: Tensor, num_steps: int) -> np.ndarray:
    """Return whether step s, begun at the right place, proposes token i of each text: bool [steps, n, t]."""
    matches = torch.zeros(num_steps, *texts.shape, dtype=torch.bool, device=texts.device)
    for step, proposals in enumerate(propose(draft, texts, captured, num_steps)):
        best = proposals.logits.argmax(-1)
        if not isinstance(draft, Decoder):
            best = draft.to_target_ids(best)
        matches[step, :, proposals.first :] = best == texts[:, proposals.first :]
    return matches.cpu().numpy()


def accept_length(matches: np.ndarray) -> float:
    """Return the tokens per round of greedy chains; matches bool [steps, n, t], [s, i, j]: step s proposes token j of
    text i.

    A round that is to emit token j accepts as long as step s proposes token j + s, and emits one token more than it
    accepted. Texts end where a whole chain no longer fits.
    """
    num_steps, _, length = matches.shape
    whole = length - num_steps
    assert whole > 0, f"texts of {length} tokens are too short for chains of {num_steps}"
    alive = np.ones(matches[0, :, :whole].shape, bool)
    runs = np.zeros(alive.shape, np.int64)
    for step in range(num_steps):
        alive &= matches[step, :, step : step + whole]
        runs += alive
    rounds = tokens = 0
    for row in runs:
        place = 0
        while place < whole:
            rounds += 1
            tokens += int(row[place]) + 1
            place += int(row[place]) + 1
    return tokens / rounds
