"""The two kinds of draft networks behind one protocol: a language model of its own, and a head on the target's hidden states."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..models.attention import Attention
from ..models.decoder import Decoder
from ..models.eagle import DraftHead
from .port import best_candidate, top_candidates


class DraftNetwork(Protocol):
    """One pass over n tokens gives what the next pass takes (None if nothing) and what logits are made of."""

    shifted: bool
    aux_layers: tuple[int, ...]
    wants_hidden: bool

    def prepare(self, captured: Tensor) -> Tensor:
        """Target hidden states [n, C] → what the network takes beside a token, [n, H]."""

    def run(self, tokens: Tensor, hidden: Tensor | None, attention: Attention) -> tuple[Tensor | None, Tensor]: ...

    def candidates(self, logits_hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Return the best `topk` tokens after each of m states, as the target's ids int64 [m, k], and probabilities float32."""

    def best(self, logits_hidden: Tensor) -> Tensor:
        """Return the best token alone, int64 [m, 1]: a chain asks for no probability."""


class LanguageModelNetwork:
    """STANDALONE: a small model of the same vocabulary. It takes no hidden states and gives none on."""

    shifted = False
    aux_layers: tuple[int, ...] = ()
    wants_hidden = False

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def prepare(self, captured: Tensor) -> Tensor:
        raise AssertionError("a language model drafts from tokens alone")

    def run(self, tokens: Tensor, hidden: Tensor | None, attention: Attention) -> tuple[None, Tensor]:
        assert hidden is None, "a language model drafts from tokens alone"
        return None, self._model.forward(tokens, attention).hidden

    def candidates(self, logits_hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        return top_candidates(self._model.logits(logits_hidden), topk)

    def best(self, logits_hidden: Tensor) -> Tensor:
        return best_candidate(self._model.logits(logits_hidden))


class HeadNetwork:
    """EAGLE and EAGLE-3: position j runs on (hidden state j, token j + 1)."""

    shifted = True
    wants_hidden = True

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self.aux_layers = head.aux_layers

    def prepare(self, captured: Tensor) -> Tensor:
        return self._head.prepare_hidden(captured)

    def run(self, tokens: Tensor, hidden: Tensor | None, attention: Attention) -> tuple[Tensor, Tensor]:
        out = self._head.forward(tokens, hidden, attention)
        return out.hidden, out.logits_hidden

    def candidates(self, logits_hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        ids, probabilities = top_candidates(self._head.logits(logits_hidden), topk)
        return self._head.to_target_ids(ids), probabilities

    def best(self, logits_hidden: Tensor) -> Tensor:
        return self._head.to_target_ids(best_candidate(self._head.logits(logits_hidden)))
