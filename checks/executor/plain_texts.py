"""The torch subject's models, plainly: a text as one sequence, its prompt in one pass and then one token at a time, without pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...gpu.executor.outputs import NUM_TOP_LOGPROBS
from ...gpu.models.attention import PLAIN, Softmax
from ...gpu.models.decoder import Decoder
from ...gpu.ops.port import Capture
from ...gpu.tiny.dense import rotate
from .oracle import After

MOST_TEXTS = 12


class PlainTexts:
    """Remembers some texts of one model, so that a token costs one pass over one token."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._texts: list[_Text] = []  # the last used one at the end

    def after(self, text: Sequence[int], first: int) -> After:
        """Return what the model gives after tokens `first` … of `text`, int [n]."""
        known = max(self._texts, key=lambda item: item.common(text), default=None)
        if known is None or known.common(text) < min(len(text), len(known.tokens)):
            known = _Text(self._model)
            self._texts = [*self._texts[1 - MOST_TEXTS :], known]
        known.extend(text[len(known.tokens) :])
        return known.after(first, len(text))


class _Text:
    """One sequence: its keys and values, and what the model gave after each token."""

    def __init__(self, model: Decoder) -> None:
        self.tokens: list[int] = []
        self._model = model
        self._attention = CachedAttention()
        self._logits: list[np.ndarray] = []
        self._outputs: list[dict[str, np.ndarray]] = []

    def common(self, text: Sequence[int]) -> int:
        """Return how many tokens agree, from the begin on."""
        equal = (at for at, (mine, token) in enumerate(zip(self.tokens, text, strict=False)) if mine != token)
        return next(equal, min(len(self.tokens), len(text)))

    def extend(self, tokens: Sequence[int]) -> None:
        pieces = [[token] for token in tokens] if self.tokens else [tokens]
        for piece in pieces:
            if len(piece):
                self._pass(piece)

    def _pass(self, tokens: Sequence[int]) -> None:
        with torch.no_grad():
            out = self._model.forward(torch.tensor(tokens), self._attention, Capture(routed_experts=True))
            logits = self._model.logits(out.hidden)
            logprobs = logits.log_softmax(-1)
            top, ids = logprobs.topk(NUM_TOP_LOGPROBS, dim=-1)
        count = len(tokens)
        experts = np.empty((count, 0, 0), np.int32) if out.routed_experts is None else out.routed_experts.numpy()
        columns = {
            "logprobs": logprobs.numpy(),
            "top_logprobs": top.numpy(),
            "top_logprob_ids": ids.numpy(),
            "hidden_states": out.hidden.numpy(),
            "routed_experts": experts,
        }
        self.tokens += tokens
        self._logits += list(logits.numpy())
        self._outputs += [{name: column[i] for name, column in columns.items()} for i in range(count)]

    def after(self, first: int, end: int) -> After:
        outputs = self._outputs[first:end]
        return After(
            np.stack(self._logits[first:end]), {name: np.stack([o[name] for o in outputs]) for name in outputs[0]}
        )


class CachedAttention:
    """A slow attention that remembers: dense keys and values of one sequence, softmax written out.

    Each forward pass brings the tokens that follow those of the passes before.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        seen = len(self._keys[layer]) if layer in self._keys else 0
        rows = cos_sin[seen : seen + len(q)].to(q.dtype)
        q, k = rotate(q, rows), rotate(k, rows)
        if seen:
            k, v = torch.cat([self._keys[layer], k]), torch.cat([self._values[layer], v])
        self._keys[layer], self._values[layer] = k, v
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(group, 1)) * softmax.scale_of(q)
        if softmax.softcap:
            scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
        distance = torch.arange(seen, len(k))[:, None] - torch.arange(len(k))
        visible = (distance >= 0) & (distance < (softmax.window or len(k)))
        scores = scores.masked_fill(~visible, -torch.inf)
        if softmax.sinks is not None:  # one more key, without a value
            scores = torch.cat([softmax.sinks.view(-1, 1, 1).expand(-1, len(q), 1), scores], 2)
        weights = scores.softmax(-1)[:, :, -len(k) :]
        return torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(group, 1))
