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

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm.hybrid import HybridChoice, RoundChoice
from ...core.algorithm.suffix import NOTHING_FOUND, Lookup, SuffixDrafts
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
        self.most_waiting = MOST_WAITING
        self._head_runs = False  # in this round
        self._last_batch: RoundBatch | None = None

    @property
    def is_captured(self) -> bool:
        return False  # the rows of a round draft in several ways, and as many tokens as pays

    def waiting(self) -> dict[int, int]:
        """Return how many tokens of each row wait for the head."""
        return {row: text.num_waiting for row, text in self._rows.items()}

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
            self._choice.learn_model(text.num_drafts, right)
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
        choice, found = self._choose(rows, batch)
        by_head = self._head_runs = bool(choice.by_model.any())
        counts = np.where(choice.by_model, choice.model_steps, choice.look_ups)
        for row, own, count, each in zip(rows, choice.by_model.tolist(), counts.tolist(), found, strict=True):
            text = self._rows[row]
            text.in_round, text.num_drafts, text.found = True, count, None if own else each
        if not counts.any():
            return root_only(self._ops, batch)
        tree = self._by_the_head(batch, relayed, choice.model_steps) if by_head else None
        if tree is not None and choice.by_model.all():
            return tree
        drafts = np.zeros((len(rows), counts.max()), np.int64)
        for drafted, count, each in zip(drafts, choice.look_ups.tolist(), found, strict=True):
            drafted[:count] = each.tokens[:count]
        tokens = upload(batch.rows.device, drafts)
        if tree is not None:
            own = upload(batch.rows.device, choice.by_model)
            tokens[:, : choice.model_steps] = tokens[:, : choice.model_steps].where(~own[:, None], tree.tokens[:, 1:])
        tree = self._ops.build_chain(batch.roots, tokens, batch.lengths, batch.max_position)
        if counts.min() == counts.max():
            return tree
        nodes = upload(batch.rows.device, counts.astype(np.int64) + 1)
        return replace(tree, row_nodes=nodes, num_tokens=int(counts.sum()) + len(rows))

    def _choose(self, rows: list[int], batch: RoundBatch) -> tuple[RoundChoice, Sequence[Lookup]]:
        """Return what each row drafts. With a budget the device chooses by the head's confidences, for all rows."""
        most = batch.shape.steps
        if batch.budget is not None:
            none = np.zeros(len(rows), np.int64)
            return RoundChoice(most, np.ones(len(rows), bool), none), [NOTHING_FOUND] * len(rows)
        waiting = [self._rows[row].num_waiting for row in rows]
        if max(waiting) + most >= self.most_waiting:
            many = [row for row, n in zip(rows, waiting, strict=True) if n + most >= self.most_waiting]
            self._catch_up_late(many, but=1)
            waiting = [self._rows[row].num_waiting for row in rows]
        found = [self._look_ups.look_up(row, most) for row in rows]
        return self._choice.choose(rows, found, most, sum(waiting), batch.sampling is not None), found

    def _by_the_head(self, batch: RoundBatch, relayed: Mapping[str, Tensor], steps: int) -> DeviceTree:
        """Return the head's chains for all rows, after it has caught up with them."""
        rows = batch.row_numbers.tolist()
        behind = [i for i, row in enumerate(rows) if self._rows[row].num_waiting]
        if behind:
            late = self._catch_up_late([rows[i] for i in behind])
            at = upload(batch.rows.device, np.array(behind, np.int64))
            caught = {name: relayed[name].index_copy(0, at, x.to(relayed[name].dtype)) for name, x in late.items()}
            relayed = {**relayed, **caught}
        return self._head.propose(replace(batch, shape=RoundShape.chain(steps), row_nodes=None), relayed)

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
            row_nodes=None,
            budget=None,
            padded_rows=len(texts),
        )
        lens = upload(device, np.array(counts, np.int32))
        relayed = self._head.catch_up(batch, Accepted(upload(device, emitted), lens, captured, max(counts)), {})
        for text, states, n in zip(texts.values(), whole, counts, strict=True):
            text.caught, text.tail, text.hidden = text.caught + n, text.tail[n:], [states[n:].clone()] if but else []
        return relayed

    # -- after the target -----------------------------------------------------------------------------------------

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        if self._head_runs:
            return self._head.catch_up(batch, accepted, {})
        assert accepted.captured is not None, "a head drafts from hidden states"
        for row, states in zip(batch.row_numbers.tolist(), accepted.captured, strict=True):
            self._rows[row].waiting = states
        return zeros_of(self._fields, len(batch.row_numbers), batch.rows.device)
