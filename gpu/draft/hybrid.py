"""HYBRID on a device: a head drafts for some rows of a round, a look-up on the host for others.

The head's KV of a row that drafts by look-up is not written at once. The hidden states of its accepted tokens wait, and
one pass computes them all when the row drafts by the head again, when many wait, or when the row is given up. So a text
that look-ups know costs hardly any pass of the head.

```
position   0 … caught − 1      caught … L − 1        L
head's KV  written             hidden states wait    the root, which has no KV yet
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm.hybrid import HybridChoice, RoundChoice
from ...core.algorithm.suffix import Lookup, SuffixDrafts
from ...core.contract.future_map import RelayField
from ...core.contract.step import RoundShape
from ...core.tree.build import MAX_TREE_NODES
from ..batch.pools import Chunks
from ..batch.uploads import upload
from ..types.ops import DeviceTree, Ops
from .branches import BranchDraft
from .port import Accepted, Draft, Relayed, RoundBatch, root_only, zeros_of

MOST_WAITING = MAX_TREE_NODES
"""Tokens of a row whose hidden states wait at most, as many as one pass takes; before there are more, all but the last
are caught up with."""


@dataclass(slots=True)
class _RowText:
    """What the host knows of a row."""

    caught: int  # positions with KV of the head
    tail: list[int] = field(default_factory=list)  # the tokens from there on; the last one is the root
    hidden: list[Tensor] = field(default_factory=list)  # [n, C] in pieces: of the positions of `tail` but the root
    # Of the round whose tokens are not known yet:
    in_round: bool = False
    num_drafts: int = 0
    found: Lookup | None = None  # None: the drafts are the head's
    waiting: Tensor | None = None  # [nd, C]: hidden states of the accepted path; None: the head was run over it

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.hidden))


class HybridDraft(Draft):
    """Drafts chains, by `head` and by `look_ups`. A row relays `fields`, of zeros where the head was not run.
    `keeps_closed`: the prefix cache may keep the KV of rows that are given up."""

    on_host = True
    wants_hidden = True

    def __init__(
        self,
        ops: Ops,
        head: BranchDraft,
        look_ups: SuffixDrafts,
        choice: HybridChoice,
        fields: Sequence[RelayField],
        keeps_closed: bool,
    ) -> None:
        self.aux_layers = head.aux_layers
        self._ops, self._head = ops, head
        self._look_ups, self._choice = look_ups, choice
        self._fields, self._keeps_closed = fields, keeps_closed
        self._rows: dict[int, _RowText] = {}
        self._by_head = np.zeros(0, np.int64)  # places of the rows of this round that the head drafts for
        self._last_batch: RoundBatch | None = None

    @property
    def is_captured(self) -> bool:
        return False  # the rows of a round draft in several ways, and as many tokens as pays

    # -- texts ----------------------------------------------------------------------------------------------------

    def open_row(self, row: int, cached: np.ndarray) -> None:
        self._head.open_row(row, cached)
        self._look_ups.open_row(row)
        self._look_ups.observe(row, cached)
        self._choice.open_row(row)
        self._rows[row] = _RowText(len(cached))

    def observe(self, row: int, tokens: np.ndarray) -> None:
        self._look_ups.observe(row, tokens)
        text = self._rows[row]
        if not text.in_round or not len(tokens):
            text.tail += tokens.tolist()
            return
        text.in_round = False
        right = min(len(tokens) - 1, text.num_drafts)
        if text.found is None:
            self._choice.learn_model(row, text.num_drafts, right)
        else:
            self._choice.learn_look_up(row, text.found, text.num_drafts, right)
        if text.waiting is None:
            text.caught += len(tokens)
            text.tail = tokens[-1:].tolist()
        else:
            text.hidden.append(text.waiting[: len(tokens)].clone())
            text.waiting = None
            text.tail += tokens.tolist()

    def close_rows(self, rows: Sequence[int] | None) -> None:
        if rows is None:
            self._rows.clear()
        elif self._keeps_closed:
            self._catch_up_late([row for row in rows if row in self._rows])
        for row in rows or ():
            self._rows.pop(row, None)

    # -- prompts --------------------------------------------------------------------------------------------------

    def prefill(self, chunks: Chunks, captured: Tensor | None, sampled: Tensor) -> Relayed:
        ends = chunks.part.starts + chunks.part.lens
        for row, end in zip(chunks.part.rows.tolist(), ends.tolist(), strict=True):
            self._rows[row] = _RowText(end)
        return self._head.prefill(chunks, captured, sampled)

    # -- proposals ------------------------------------------------------------------------------------------------

    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        self._last_batch = batch
        rows = batch.row_numbers.tolist()
        choice, found = self._choose(rows, batch.shape.steps, batch.budget is not None)
        self._by_head = np.flatnonzero(choice.by_model)
        counts = np.where(choice.by_model, choice.model_steps, choice.look_ups)
        drafts = np.zeros((len(rows), counts.max()), np.int64)
        for i, row in enumerate(rows):
            text = self._rows[row]
            text.in_round, text.num_drafts = True, int(counts[i])
            text.found = None if choice.by_model[i] else found[i]
            if text.found is not None:
                drafts[i, : counts[i]] = found[i].tokens[: counts[i]]
        if not counts.any():
            return root_only(self._ops, batch)
        device = batch.rows.device
        tokens = upload(device, drafts)
        if len(self._by_head):
            tree = self._by_the_head(batch, relayed, choice.model_steps)
            if batch.budget is not None:
                return tree
            tokens[upload(device, self._by_head), : choice.model_steps] = tree.tokens[:, 1:]
        tree = self._ops.build_chain(batch.roots, tokens, batch.lengths, batch.max_position)
        if counts.min() == counts.max():
            return tree
        nodes = upload(device, counts.astype(np.int64) + 1)
        return replace(tree, row_nodes=nodes, num_tokens=int(counts.sum()) + len(rows))

    def _choose(self, rows: list[int], most: int, has_budget: bool) -> tuple[RoundChoice, list[Lookup]]:
        """Return what each row drafts. With a budget the device chooses by the head's confidences, for all rows."""
        if has_budget:
            return RoundChoice(most, np.ones(len(rows), bool), np.zeros(len(rows), np.int64)), []
        self._catch_up_late([row for row in rows if self._rows[row].num_waiting + most >= MOST_WAITING], but=1)
        found = [self._look_ups.look_up(row, most) for row in rows]
        behind = np.array([self._rows[row].num_waiting for row in rows])
        return self._choice.choose(rows, found, most, behind), found

    def _by_the_head(self, batch: RoundBatch, relayed: Mapping[str, Tensor], steps: int) -> DeviceTree:
        """Return the head's chains for its rows, after it has caught up with them."""
        device, own_rows = batch.rows.device, batch.row_numbers[self._by_head].tolist()
        places = upload(device, self._by_head)
        start = {f.name: relayed[f.name][places] for f in self._fields}
        behind = np.flatnonzero([self._rows[row].num_waiting > 0 for row in own_rows])
        for name, values in self._catch_up_late([own_rows[i] for i in behind.tolist()]).items():
            start[name][upload(device, behind)] = values.to(start[name].dtype)
        part = _part_of(batch, self._by_head, places, RoundShape.chain(steps))
        return self._head.propose(replace(part, budget=batch.budget), start)

    def _catch_up_late(self, rows: Sequence[int], but: int = 0) -> Relayed:
        """Run the head over the tokens of `rows` that wait for it, `but` the last ones, and return what these rows
        relay, which counts if no token is left."""
        # While the draft was parked tokens came without hidden states: such a row begins anew.
        texts = {row: self._rows[row] for row in rows}
        texts = {row: text for row, text in texts.items() if but < text.num_waiting == len(text.tail) - 1}
        if not texts:
            return {}
        assert self._last_batch is not None, "tokens wait behind a round"
        device = self._last_batch.rows.device
        whole = [torch.cat(text.hidden) for text in texts.values()]
        counts = [len(states) - but for states in whole]
        emitted = np.full((len(texts), max(counts)), -1, np.int64)
        captured = whole[0].new_zeros((len(texts), max(counts), whole[0].shape[1]))
        for i, (text, n) in enumerate(zip(texts.values(), counts, strict=True)):
            emitted[i, :n], captured[i, :n] = text.tail[1 : n + 1], whole[i][:n]
        starts = np.array([text.caught for text in texts.values()], np.int64)
        roots = np.array([text.tail[0] for text in texts.values()], np.int64)
        row_numbers = np.array([*texts], np.int64)
        batch = replace(
            self._last_batch,
            row_numbers=row_numbers,
            rows=upload(device, row_numbers),
            lengths=upload(device, starts),
            roots=upload(device, roots),
            max_len=max(self._last_batch.max_len, int(starts.max())),
            max_nodes=max(self._last_batch.max_nodes, max(counts)),
            **_ALONE,
            padded_rows=len(texts),
        )
        lens = upload(device, np.array(counts, np.int32))
        relayed = self._head.catch_up(batch, Accepted(upload(device, emitted), lens, captured, max(counts)), {})
        for text, states, n in zip(texts.values(), whole, counts, strict=True):
            text.caught, text.tail, text.hidden = text.caught + n, text.tail[n:], [states[n:].clone()] if but else []
        return relayed

    # -- after the target -----------------------------------------------------------------------------------------

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        captured, by_head = accepted.captured, set(self._by_head.tolist())
        assert captured is not None, "a head drafts from hidden states"
        for i, row in enumerate(batch.row_numbers.tolist()):
            self._rows[row].waiting = None if i in by_head else captured[i]
        values = zeros_of(self._fields, len(batch.row_numbers), batch.rows.device)
        if by_head:
            places = upload(batch.rows.device, self._by_head)
            own = replace(
                accepted,
                emitted=accepted.emitted[places],
                accept_lens=accepted.accept_lens[places],
                captured=captured[places],
            )
            part = _part_of(batch, self._by_head, places, batch.shape)
            for name, found in self._head.catch_up(part, own, {}).items():
                values[name][places] = found.to(values[name].dtype)
        return values


_ALONE: Mapping[str, Any] = {"row_nodes": None, "budget": None}  # what is of the target's pass, not of the head's


def _part_of(batch: RoundBatch, at: np.ndarray, places: Tensor, shape: RoundShape) -> RoundBatch:
    """Return some rows of a batch, as a round of this shape."""
    return replace(
        batch,
        row_numbers=batch.row_numbers[at],
        rows=batch.rows[places],
        lengths=batch.lengths[places],
        roots=batch.roots[places],
        shape=shape,
        padded_rows=len(at),
        **_ALONE,
    )
