"""The algorithm: drafts from each request's suffix automaton, in trees whose shape adapts to recent acceptance.

The algorithm relays its own field `trust`, the share of drafts that were accepted recently. The device knows first how
many drafts of a row were accepted, so the proposer returns a trust for every node. The executor relays the trust of the
last accepted node to the next round.
"""

from __future__ import annotations

import numpy as np
from foredraft.core.algorithm.algorithm import AlgorithmShape
from foredraft.core.algorithm.builtin import LookupDrafting
from foredraft.core.algorithm.proposer import Proposal, ProposalRequest
from foredraft.core.contract.future_map import FutureMap, RelayField
from foredraft.core.contract.handoff_batch import DraftInput, HandoffBatch
from foredraft.core.contract.hidden import ForwardPhase

from .automaton import DraftTree, SuffixAutomaton

TRUST = RelayField("trust", (), "float32")
FIRST_TRUST = 0.7
LEAST_TRUST, MOST_TRUST = 0.1, 0.98
FORGETTING = 0.3  # weight of the newest round in the moving average


class SuffixAutomatonDrafting(LookupDrafting):
    """Look-up drafting with trees that adapt to recent acceptance. The registry takes its name from the entry point."""

    draft_time_share = 0.01  # some microseconds of Python per draft, beside a verify pass of milliseconds

    def relay_fields(self, shape: AlgorithmShape) -> tuple[RelayField, ...]:
        return (*super().relay_fields(shape), TRUST)

    def make_proposer(self, shape: AlgorithmShape) -> SuffixProposer:
        return SuffixProposer()

    def build_disagg_draft_input(
        self, batch: HandoffBatch, last_tokens: np.ndarray, future_map: FutureMap | None
    ) -> DraftInput:
        """Take over the trust that the prefill side sent. A request without a valid trust begins with `FIRST_TRUST`."""
        sent = np.asarray(batch.relayed.get(TRUST.name, np.full(len(batch.rows), FIRST_TRUST)), np.float32)
        trust = np.where(np.isfinite(sent), sent, np.float32(FIRST_TRUST)).clip(LEAST_TRUST, MOST_TRUST)
        bonus_tokens = np.asarray(last_tokens, np.int64)
        if future_map is not None and len(batch.rows):
            future_map.publish(batch.rows, batch.epochs, batch.seq_lens)
            future_map.stash(batch.rows, batch.epochs, {"bonus_tokens": bonus_tokens, TRUST.name: trust})
        capture = self.capture_hidden_mode(ForwardPhase.DRAFT)
        return DraftInput(batch.rows, bonus_tokens, None, None, None, capture, relayed={TRUST.name: trust})


class SuffixProposer:
    """Proposes from one automaton per row."""

    def __init__(self) -> None:
        self._automata: dict[int, SuffixAutomaton] = {}

    def open_row(self, row: int) -> None:
        self._automata[row] = SuffixAutomaton()

    def observe(self, row: int, tokens: np.ndarray) -> None:
        self._automata[row].extend(tokens.tolist())

    def first_relay(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {TRUST.name: np.full(len(rows), FIRST_TRUST, np.float32)}

    def propose(self, request: ProposalRequest) -> Proposal:
        num_rows, nodes = len(request.rows), request.num_draft_tokens
        tokens = np.zeros((num_rows, nodes - 1), np.int64)
        parents = np.full((num_rows, nodes - 1), -1, np.int32)
        next_trust = np.empty((num_rows, nodes), np.float32)
        for i, (row, trust) in enumerate(zip(request.rows.tolist(), request.relayed[TRUST.name].tolist(), strict=True)):
            tree = self._automata[row].draft(nodes - 1, request.topk, trust)
            tokens[i, : len(tree.tokens)] = tree.tokens
            parents[i, : len(tree.parents)] = tree.parents
            next_trust[i] = trust
            next_trust[i, : len(tree.is_leaf)] = trust_after(trust, tree)
        return Proposal(tokens, parents, {TRUST.name: next_trust})


def trust_after(trust: float, tree: DraftTree) -> np.ndarray:
    """Return the trust after a round that accepted up to each node, float32 [nodes].

    If the accepted path ends at an inner node of depth d, the target chose none of its children: d of d + 1 drafts were
    accepted. If the path ends at a leaf, all its drafts were accepted. Without drafts the trust does not change.
    """
    depths = np.array([0, *tree.depths])
    passed = np.where(tree.is_leaf, 1.0, depths / (depths + 1))
    after = ((1 - FORGETTING) * trust + FORGETTING * passed).clip(LEAST_TRUST, MOST_TRUST)
    if not tree.tokens:
        after[0] = trust
    return after.astype(np.float32)
