"""The values that a prefill worker sends beside a request's KV: the first token, and the input of the first draft.

    prefill side   the row's FutureMap cell  ──►  DraftPayload  ──►  Arrival of one request
    decode side    Arrivals of a step  ──►  algorithm.build_disagg_draft_input  ──►  the rows' FutureMap cells

If an algorithm needs no hidden states, its payload cannot hold any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..contract.future_map import FutureMap
from ..contract.handoff_batch import HandoffBatch
from ..contract.hidden import ForwardPhase, MissingHiddenState, check_hidden
from ..contract.step import Arrivals, Join
from ..errors import InvariantViolation
from .algorithm import AlgorithmShape, SpecAlgorithm

BONUS, HIDDEN, PROBABILITIES, TOKEN_IDS = "bonus_tokens", "hidden_states", "topk_probabilities", "topk_ids"


@dataclass(frozen=True, slots=True, eq=False)
class DraftPayload:
    """The draft input of one request, as its prefill worker relays it.
    Raises ACCEPT-17 for hidden states that are not needed."""

    values: Mapping[str, np.ndarray] = field(default_factory=dict)  # per relay field its row, [*shape_suffix]
    hidden_states: np.ndarray | None = None  # float32 [H]; may be missing, which is that request's error
    needs_hidden_states: bool = False

    def __post_init__(self) -> None:
        if self.hidden_states is not None and not self.needs_hidden_states:
            message = f"a handoff with hidden states of shape {self.hidden_states.shape}, but none are needed"
            raise InvariantViolation("ACCEPT-17", message)

    @classmethod
    def of_cell(cls, algorithm: SpecAlgorithm, values: Mapping[str, Any]) -> DraftPayload:
        """Make the payload from the relay cell of one row, each value [1, *shape_suffix], as
        `FutureMap.resolve` returns them."""
        rows = {name: np.asarray(value)[0] for name, value in values.items() if name not in (BONUS, HIDDEN)}
        hidden = values.get(HIDDEN)
        return cls(rows, None if hidden is None else np.asarray(hidden)[0], algorithm.needs_hidden_states)

    def check(self, algorithm: SpecAlgorithm, where: str) -> None:
        """Raise InvariantViolation (ACCEPT-17) if the hidden state is not as `algorithm` relays it. `where` names it
        in the message. A missing hidden state that the algorithm needs is no violation: that request alone fails."""
        if self.hidden_states is not None or not algorithm.needs_hidden_states:
            check_hidden(self.hidden_states, algorithm.capture_hidden_mode(ForwardPhase.DRAFT), where)

    def problem(self, algorithm: SpecAlgorithm, shape: AlgorithmShape) -> str:
        """Say what is wrong with the payload for this algorithm; empty if nothing.
        The algorithm itself reports a missing hidden state."""
        if self.needs_hidden_states != algorithm.needs_hidden_states:
            return f"the handoff says that hidden states are {'' if self.needs_hidden_states else 'not '}needed"
        fields = {f.name: f for f in algorithm.relay_fields(shape) if f.name not in (BONUS, HIDDEN)}
        if fields.keys() != self.values.keys():
            return f"the handoff brings {sorted(self.values)}, {algorithm.name} relays {sorted(fields)}"
        for name, wanted in fields.items():
            value = self.values[name]
            if value.shape != wanted.shape_suffix or str(value.dtype) != wanted.dtype:
                found = f"{value.dtype}{list(value.shape)}"
                return f"the handoff's {name} is {found}, expected {wanted.dtype}{list(wanted.shape_suffix)}"
        if self.hidden_states is not None and self.hidden_states.shape != (shape.hidden_size,):
            return f"the handoff's hidden state has shape {self.hidden_states.shape}, expected [{shape.hidden_size}]"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request whose KV has arrived. Where the executor has no tokens, `first_token` and `draft` are None."""

    first_token: int | None = None
    draft: DraftPayload | None = None
    outputs: Mapping[str, Any] = field(default_factory=dict)  # of the first token, for what the request asked to see
    failure: str = ""  # why the request cannot go on although its KV is here


def arrivals_of(joins: Sequence[Join], arrivals: Sequence[Arrival]) -> Arrivals | None:
    """Return the description of received rows that join with a step, for its executor; None if the executor has no
    tokens."""
    drafts = [arrival.draft for arrival in arrivals if arrival.draft is not None]
    if len(drafts) < len(arrivals):
        return None
    sizes = [len(draft.hidden_states) for draft in drafts if draft.hidden_states is not None]
    first_tokens = np.array([arrival.first_token for arrival in arrivals], dtype=np.int64)
    return Arrivals(_batch_of(joins, drafts, max(sizes, default=0)), first_tokens)


def arrival_failure(join: Join, arrival: Arrival, algorithm: SpecAlgorithm) -> str:
    """Say why this request alone cannot join; empty if it can."""
    if arrival.failure or arrival.draft is None:
        return arrival.failure
    if algorithm.needs_hidden_states and arrival.draft.hidden_states is None:
        return str(MissingHiddenState.of(join.request.request_id, algorithm.name))
    return ""


def fill_cells(algorithm: SpecAlgorithm, arrivals: Arrivals, future_map: FutureMap) -> tuple[tuple[int, str], ...]:
    """Let `algorithm` rebuild the draft input of the rows that arrive, once, into their cells of the relay.

    Returns (row, reason) of those that it cannot serve: they fail alone. Their cells hold what was sent, because the
    step that they arrive with reads them.
    """
    batch = arrivals.batch
    draft = algorithm.build_disagg_draft_input(batch, arrivals.first_tokens, future_map)
    if draft is None:
        return ()
    check_hidden(draft.hidden_states, algorithm.capture_hidden_mode(ForwardPhase.DRAFT), "handoff")
    failures = tuple((int(row), str(error)) for row, error in draft.failures)
    if failures:
        refused = np.flatnonzero(np.isin(batch.rows, [row for row, _ in failures]))
        sent: dict[str, Sequence[np.ndarray | None] | np.ndarray | None] = {
            BONUS: arrivals.first_tokens,
            PROBABILITIES: batch.probabilities,
            TOKEN_IDS: batch.token_ids,
            HIDDEN: batch.hidden_states,
            **batch.relayed,
        }
        cells = {f.name: np.zeros((len(refused), *f.shape_suffix), f.dtype) for f in future_map.fields}
        for name, cell in cells.items():
            values = sent.get(name)
            for place, i in enumerate(refused.tolist()):
                if values is not None and values[i] is not None:
                    cell[place] = values[i]
        future_map.publish(batch.rows[refused], batch.epochs[refused], batch.seq_lens[refused])
        future_map.stash(batch.rows[refused], batch.epochs[refused], cells)
    return failures


def _batch_of(joins: Sequence[Join], payloads: Sequence[DraftPayload], hidden_size: int) -> HandoffBatch:
    """Make the batch that an algorithm rebuilds its draft input from; all payloads have the same fields."""
    stacked: dict[str, np.ndarray] = {}
    if payloads:
        stacked = {name: np.stack([payload.values[name] for payload in payloads]) for name in payloads[0].values}
    return HandoffBatch(
        rows=np.array([join.row for join in joins], dtype=np.int32),
        epochs=np.array([join.epoch for join in joins], dtype=np.int64),
        request_ids=tuple(join.request.request_id for join in joins),
        seq_lens=np.array([join.num_received for join in joins], dtype=np.int64),
        probabilities=stacked.pop(PROBABILITIES, None),
        token_ids=stacked.pop(TOKEN_IDS, None),
        hidden_states=tuple(payload.hidden_states for payload in payloads),
        hidden_size=hidden_size,
        relayed=stacked,
    )
