"""The torch subject's models, plainly: a text as one sequence in one pass, without pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from ...gpu.executor.outputs import NUM_TOP_LOGPROBS
from ...gpu.models.decoder import Decoder
from ...gpu.ops.port import Capture
from ...gpu.tiny.dense import DenseAttention
from .oracle import After

MOST_TEXTS = 12


class PlainTexts:
    """Says what one model gives after each token of a text, and remembers a few of them."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._after = lru_cache(MOST_TEXTS)(self._pass)

    def after(self, text: Sequence[int], first: int) -> After:
        """Return what the model gives after tokens `first` … of `text`, int [n]."""
        known = self._after(tuple(text))
        return After(known.logits[first:], {name: values[first:] for name, values in known.outputs.items()})

    def _pass(self, text: tuple[int, ...]) -> After:
        with torch.no_grad():
            out = self._model.forward(torch.tensor(text), DenseAttention([len(text)]), Capture(routed_experts=True))
            logits = self._model.logits(out.hidden)
            logprobs = logits.log_softmax(-1)
            top, ids = logprobs.topk(NUM_TOP_LOGPROBS, dim=-1)
        no_experts = np.empty((len(text), 0, 0), np.int32)
        outputs = {
            "logprobs": logprobs.numpy(),
            "top_logprobs": top.numpy(),
            "top_logprob_ids": ids.numpy(),
            "hidden_states": out.hidden.numpy(),
            "routed_experts": no_experts if out.routed_experts is None else out.routed_experts.numpy(),
        }
        return After(logits.numpy(), outputs)
