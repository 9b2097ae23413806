"""The two kinds of draft networks behind one interface:
a language model of its own, and a head on the target's hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..models.decoder import Decoder
from ..models.eagle import DraftHead, ParallelEagleHead
from ..types.attention import BatchAttention
from .port import top_candidates


class DraftNetwork(ABC):
    """A network that drafts: its input from the target, one pass, and the tokens from a pass."""

    shifted = False
    aux_layers: tuple[int, ...] = ()
    wants_hidden = False

    def __init__(self, model: Decoder | DraftHead) -> None:
        self._model = model
        self.dtype: torch.dtype = model.dtype

    def prepare(self, captured: Tensor) -> Tensor:
        """Map the target's hidden states [n, C] to the network's second input beside a token, [n, H]."""
        raise AssertionError("a language model drafts from tokens alone")

    @property
    def mask_token(self) -> int:
        """The token that stands for one to be drafted."""
        raise AssertionError("a network that drafts one token after another has no mask")

    def masked_hidden(self, count: int) -> Tensor:
        """Return what `prepare` would give for `count` masks, [count, H]."""
        raise AssertionError("a language model drafts from tokens alone")

    @abstractmethod
    def run(self, tokens: Tensor, hidden: Tensor | None, attention: BatchAttention) -> tuple[Tensor | None, Tensor]:
        """Run over tokens int64 [n]; return what the next pass takes (None if nothing) and what logits are made
        of, both [n, H]."""

    def candidates(self, logits_hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Return the best `topk` tokens after each of m states, as the target's ids int64 [m, k], and
        probabilities float32."""
        return top_candidates(self._logits(logits_hidden), topk, self._ids)

    def best(self, logits_hidden: Tensor) -> Tensor:
        """Return the best token alone, int64 [m, 1]: a chain without a budget asks for no probability."""
        return self._model.ops.best_drafts(self._logits(logits_hidden, widen=False), self._ids).unsqueeze(1)

    def _logits(self, logits_hidden: Tensor, widen: bool = True) -> Tensor:
        """Return the logits of the tokens that may be drafted."""
        return self._model.logits(logits_hidden, widen)

    @property
    def _ids(self) -> Tensor | None:
        """The target's id of each token that may be drafted; None if they are the same."""
        return None


class LanguageModelNetwork(DraftNetwork):
    """STANDALONE: a small model of the same tokenizer. It takes no hidden states and gives none on.

    Its vocabulary may be padded to another size than the target's `target_vocab`. It drafts only tokens that both have,
    and reads a token that only the target has as its own last one. With another tokenizer it has `twins`, which say
    what it drafts and how it reads.
    """

    def __init__(self, model: Decoder, target_vocab: int) -> None:
        super().__init__(model)
        self._decoder, self._twins = model, model.twins
        self._own, self._shared = model.vocab_size, min(model.vocab_size, target_vocab)
        self._may_lack_tokens = model.vocab_size < target_vocab

    @property
    def mask_token(self) -> int:
        mask = self._decoder.config.mask_token
        assert mask is not None, "its configuration names the mask"
        return mask

    def run(self, tokens: Tensor, hidden: Tensor | None, attention: BatchAttention) -> tuple[None, Tensor]:
        assert hidden is None, "a language model drafts from tokens alone"
        if self._twins is not None:
            tokens = self._twins.read_as[tokens]
        elif self._may_lack_tokens:
            tokens = tokens.clamp(max=self._own - 1)
        return None, self._decoder.forward(tokens, attention).hidden

    def _logits(self, logits_hidden: Tensor, widen: bool = True) -> Tensor:
        logits = self._decoder.logits(logits_hidden, widen)
        if self._twins is not None:
            return logits[:, self._twins.own_ids]
        return logits if self._shared == self._own else logits[:, : self._shared]

    @property
    def _ids(self) -> Tensor | None:
        return None if self._twins is None else self._twins.target_ids


class HeadNetwork(DraftNetwork):
    """EAGLE and EAGLE-3: position j runs on (hidden state j, token j + 1)."""

    shifted = True
    wants_hidden = True

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self._head = head
        self.aux_layers = head.aux_layers

    def prepare(self, captured: Tensor) -> Tensor:
        return self._head.prepare_hidden(captured)

    @property
    def mask_token(self) -> int:
        mask = self._head.config.mask_token
        assert mask is not None, "its configuration names the mask"
        return mask

    def masked_hidden(self, count: int) -> Tensor:
        assert isinstance(self._head, ParallelEagleHead), "a head with a state for masks"
        return self._head.prepare_hidden(self._head.mask_hidden.view(1, -1)).expand(count, -1)

    def run(self, tokens: Tensor, hidden: Tensor | None, attention: BatchAttention) -> tuple[Tensor, Tensor]:
        assert hidden is not None, "a head drafts from hidden states"
        out = self._head.forward(tokens, hidden, attention)
        return out.hidden, out.logits_hidden

    @property
    def _ids(self) -> Tensor | None:
        return self._head.target_ids
