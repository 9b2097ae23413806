"""The prompt chunks of a launched step: the target's pass, the first tokens behind finished prompts, and the draft's
pass, with which these rows begin to decode."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...core.contract.hidden import ForwardPhase, check_hidden
from ...core.contract.step import PrefillStep
from ..batch.pools import Chunks
from ..batch.uploads import upload
from ..draft.port import Draft
from ..models.decoder import DecoderOutput
from .outputs import NodeProducer, at_places, node_outputs
from .parts import ExecutorModels, RowParts
from .relay import publish_cells
from .round import PhaseClock, capture_for, draft_hidden, first_tokens
from .running import PendingRound, to_host


class PromptRunner:
    """Runs prompt chunks of one executor, whose parts these are."""

    def __init__(self, models: ExecutorModels, parts: RowParts, producers: Mapping[str, NodeProducer]) -> None:
        self._ops = models.ops
        self._target = models.target
        self._pool = models.pool
        self._draft = models.draft
        self._parked = models.parked
        self._producers = producers
        self._future_map = parts.future_map
        self._rows = parts.rows
        self._forced = parts.forced
        self._shaping = parts.shaping
        self._limits = parts.limits
        self._algorithm = parts.algorithm

    def enqueue(self, part: PrefillStep, clock: PhaseClock) -> PendingRound:
        """Put the chunks into the stream, and begin to copy the first tokens of finished prompts to the host, with the
        outputs that their requests want."""
        with clock.phase("prefill"):
            chunks = Chunks.lay_out(part, self._rows.table, self._limits.max_position)
            wanted = self._rows.wanted(part.rows[chunks.last])
            forward, captured = self._run_target(chunks, wanted)
            produced = {name: producer.prompt(chunks) for name, producer in self._producers.items()}
            lengths = sampled = torch.empty(0, dtype=torch.int64, device=self._target.device)
            outputs: dict[str, Tensor] = {}
            if len(chunks.last):
                lengths = upload(sampled.device, part.starts[chunks.last] + part.lens[chunks.last])
                sampled, outputs = self._first_tokens(chunks, forward, lengths, wanted)
                outputs |= {name: value for name, value in produced.items() if name in wanted}
            self._begin_to_decode(chunks, captured, lengths, sampled.clamp(min=0))
        # A prompt has no accept lengths; its tokens stand in for them and are not read as such.
        return to_host((sampled, chunks.any_token(~forward.hidden.isfinite().all(1)), sampled), outputs)

    def _draft_of(self, part: PrefillStep) -> Draft:
        """Return the draft that computes the chunks, too: none while it is parked."""
        return self._parked if part.is_parked else self._draft

    def _run_target(self, chunks: Chunks, wanted: frozenset[str]) -> tuple[DecoderOutput, Tensor | None]:
        """Return the target's pass over the chunks, and the hidden states that it captured for the draft."""
        assert chunks.part.tokens is not None, "an executor with tokens gets them"
        tokens = upload(self._target.device, chunks.part.tokens.astype(np.int64, copy=False))
        draft = self._draft_of(chunks.part)
        forward = self._target.forward(tokens, chunks.attention(self._ops, self._pool), capture_for(draft, wanted))
        captured = draft_hidden(draft, forward)
        if not chunks.part.is_parked:
            check_hidden(captured, self._algorithm.capture_hidden_mode(ForwardPhase.PREFILL), "capture")
        return forward, captured

    def _first_tokens(
        self, chunks: Chunks, forward: DecoderOutput, lengths: Tensor, wanted: frozenset[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the tokens behind finished prompts of `lengths` int64 [m], −1 where the target failed, and the wanted
        outputs there."""
        rows = chunks.part.rows[chunks.last]
        at_end = at_places(forward, chunks.last_places())
        shaped = logits = self._target.logits(at_end.hidden)
        changes, numbers = self._shaping.changes(rows), upload(logits.device, rows.astype(np.int64))
        if changes is not None:
            shaped = self._ops.shape_logits(logits, numbers, changes.tables, None, changes.masks)
        sampling = self._rows.on_device(self._rows.sampling(rows))
        known = chunks.part.tail_tokens[chunks.last]
        sampled = first_tokens(self._ops, shaped, sampling, lengths - 1, known)
        if changes is not None:
            ones = torch.ones(len(rows), dtype=torch.int32, device=sampled.device)
            self._ops.count_tokens_(changes.tables.seen, numbers, sampled.unsqueeze(1), ones)
        found = node_outputs(at_end, logits, sampled, wanted)
        return sampled, {name: value for name, value in found.items() if value is not None}

    def _begin_to_decode(self, chunks: Chunks, captured: Tensor | None, lengths: Tensor, bonus: Tensor) -> None:
        """Run the draft over the chunks, and publish what the first rounds of finished prompts start from."""
        relay = self._draft_of(chunks.part).prefill(chunks, captured, bonus)
        if not len(chunks.last):
            return
        part, last = chunks.part, chunks.last
        rows, epochs = part.rows[last], part.epochs[last]
        publish_cells(self._future_map, rows, epochs, lengths, {"bonus_tokens": bonus, **relay})
        self._forced.begin(rows, part.starts[last] + part.lens[last])
