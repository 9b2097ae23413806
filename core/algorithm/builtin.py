"""The built-in algorithms. Each says only how it differs from plain decoding."""

from __future__ import annotations

import numpy as np

from ..contract.future_map import FutureMap, RelayField
from ..contract.handoff_batch import DraftInput, HandoffBatch
from ..contract.hidden import ForwardPhase, MissingHiddenState
from ..errors import Problem
from .algorithm import AlgorithmShape, Drafter, DraftKV, SpecAlgorithm
from .ngram import NgramProposer
from .suffix import SuffixDrafts


class TopKDrafting(SpecAlgorithm):
    """Algorithms whose next draft starts from the top-k of the last draft-extend pass."""

    supports_trees = True

    def num_relayed_candidates(self, shape: AlgorithmShape) -> int:
        return shape.topk

    def relay_fields(self, shape: AlgorithmShape) -> tuple[RelayField, ...]:
        n = self.num_relayed_candidates(shape)
        fields = (
            *super().relay_fields(shape),
            RelayField("topk_probabilities", (n,), "float32"),
            RelayField("topk_ids", (n,), "int64"),
        )
        if self.needs_hidden_states:
            fields += (RelayField("hidden_states", (shape.hidden_size,), "float32"),)
        return fields

    def build_disagg_draft_input(
        self, batch: HandoffBatch, last_tokens: np.ndarray, future_map: FutureMap | None
    ) -> DraftInput:
        served = np.arange(len(batch.rows))
        failures: list[tuple[int, MissingHiddenState]] = []
        hidden_states = None
        if self.needs_hidden_states:
            served, hidden_states = self._hidden_states_of(batch, failures)
        rows = batch.rows[served]
        probabilities = _columns(batch.probabilities, served, np.float32)
        token_ids = _columns(batch.token_ids, served, np.int64)
        bonus_tokens = np.asarray(last_tokens, np.int64)[served]
        if future_map is not None and len(rows):
            future_map.publish(rows, batch.epochs[served], batch.seq_lens[served])
            values = {name: value[served] for name, value in batch.relayed.items()}
            values |= {"bonus_tokens": bonus_tokens, "topk_probabilities": probabilities, "topk_ids": token_ids}
            if hidden_states is not None:
                values["hidden_states"] = hidden_states
            future_map.stash(rows, batch.epochs[served], values)
        capture = self.capture_hidden_mode(ForwardPhase.DRAFT)
        return DraftInput(rows, bonus_tokens, probabilities, token_ids, hidden_states, capture, tuple(failures))

    def _hidden_states_of(
        self, batch: HandoffBatch, failures: list[tuple[int, MissingHiddenState]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return indices of the rows that have a hidden state, and these states [n, H]; the others go to `failures`."""
        served, states = [], []
        for i, state in enumerate(batch.hidden_states):
            if state is None:
                failures.append((int(batch.rows[i]), MissingHiddenState.of(batch.request_ids[i], self.name)))
            else:
                served.append(i)
                states.append(state)
        stacked = np.stack(states) if states else np.empty((0, batch.hidden_size), np.float32)
        return np.array(served, dtype=np.int64), stacked.astype(np.float32)


def _columns(values: np.ndarray | None, served: np.ndarray, dtype: type) -> np.ndarray:
    if values is None:
        assert not len(served), "a handoff batch with rows has the draft's top-k"
        return np.empty((0, 0), dtype)
    columns: np.ndarray = np.asarray(values, dtype)[served]
    return columns


class Standalone(TopKDrafting):
    """Drafts with a small language model. It relays and hands over no hidden states."""

    name = "STANDALONE"
    drafter = Drafter.MODEL
    draft_form = "STANDALONE"
    draft_kv = DraftKV.UNSHIFTED

    def problems(self, shape: AlgorithmShape) -> list[Problem]:
        problems = super().problems(shape)
        sizes = (shape.target_vocab_size, shape.draft_vocab_size)
        if None not in sizes and sizes[0] != sizes[1]:
            problems.append(
                Problem("draft", f"the vocabularies must match: the target has {sizes[0]} tokens, the draft {sizes[1]}")
            )
        return problems


class Eagle(TopKDrafting):
    """EAGLE: a one-layer head on the target's last hidden state (Li et al., arXiv 2401.15077, 2406.16858)."""

    name = "EAGLE"
    drafter = Drafter.HEAD
    draft_form = "EAGLE"
    draft_kv = DraftKV.SHIFTED
    needs_hidden_states = True


class Eagle3(Eagle):
    """EAGLE-3: the head fuses hidden states of three target layers (Li et al., arXiv 2503.01840)."""

    name = "EAGLE3"
    draft_form = "EAGLE3"


def carried_hidden_size(hidden_size: int, num_heads: int) -> int:
    """Return how many values per row multi-layer EAGLE relays: one hidden state of each head but the last, from which
    the next head starts.

    With a single head nothing is relayed, but the relay still has room for one hidden state.
    """
    return max(num_heads - 1, 1) * hidden_size


class MultiLayerEagle(Eagle):
    """One EAGLE head per step, so no more steps than heads."""

    name = "MULTI_LAYER_EAGLE"
    drafter = Drafter.HEADS
    draft_form = "MULTI_LAYER_EAGLE"

    def num_relayed_candidates(self, shape: AlgorithmShape) -> int:
        return shape.topk * max(shape.steps, 1)

    def problems(self, shape: AlgorithmShape) -> list[Problem]:
        problems = super().problems(shape)
        if shape.num_heads is not None and shape.steps > shape.num_heads:
            problems.append(
                Problem("steps", f"{shape.steps} steps need {shape.steps} heads, the draft has {shape.num_heads}")
            )
        return problems


MOST_MASKED = 32  # a window of accepted tokens and masks has at most 64 places


class OnePassDrafting(TopKDrafting):
    """Algorithms that draft all tokens of a round in one pass, behind mask tokens: one candidate for each of them."""

    supports_trees = False
    in_one_pass = True

    def problems(self, shape: AlgorithmShape) -> list[Problem]:
        problems = super().problems(shape)
        if shape.steps > MOST_MASKED:
            problems.append(Problem("steps", f"{self.name} drafts at most {MOST_MASKED} tokens in a pass"))
        return problems

    def num_relayed_candidates(self, shape: AlgorithmShape) -> int:
        return max(shape.steps, 1)


class ParallelEagle(OnePassDrafting, Eagle3):
    """P-EAGLE: an EAGLE-3 head that drafts all tokens of a round in one pass, behind mask tokens (arXiv
    2602.01469)."""

    name = "P_EAGLE"
    draft_form = "P_EAGLE"
    needs_hidden_states = False
    reads_hidden_states = True
    usual_acceptance = "eagle3-llama-chat"


class ParallelDraft(OnePassDrafting, Standalone):
    """PARD: a small language model that drafts all tokens of a round in one pass, behind mask tokens (arXiv
    2504.18583)."""

    name = "PARD"
    draft_form = "PARD"
    usual_acceptance = "standalone-llama-chat"


class BlockDrafting(SpecAlgorithm):
    """DFlash: some layers that draft a block of mask tokens in one pass, with attention in both directions (arXiv
    2602.06036).

    The pass that verifies tokens also gives the hidden states from which their draft KV is made. So a round relays no
    hidden states, and the KV of a token does not depend on the next one.
    """

    name = "DFLASH"
    drafter = Drafter.BLOCK
    draft_form = "DFLASH"
    draft_kv = DraftKV.UNSHIFTED

    reads_hidden_states = True

    def problems(self, shape: AlgorithmShape) -> list[Problem]:
        problems = super().problems(shape)
        if shape.num_heads is not None and shape.steps > shape.num_heads:
            found = f"{shape.steps} steps, and a block of the draft has {shape.num_heads} drafts at most"
            problems.append(Problem("block_size", found))
        return problems


class SelectedBlockDrafting(BlockDrafting):
    """DFlash2: DFlash with convolutions, and a walk over the best candidates of each position."""

    name = "DFLASH2"
    draft_form = "DFLASH2"


class MarkovBlockDrafting(BlockDrafting):
    """DSpark: DFlash with a small head that chooses the tokens of a block one after the other (arXiv 2607.05147)."""

    name = "DSPARK"
    draft_form = "DSPARK"


LOOK_UP_TIME_SHARE = 0.006  # of the verify time, for n-gram drafting: arXiv 2601.11580


class LookupDrafting(SpecAlgorithm):
    """Algorithms that propose on the host, from the text so far. Each subclass makes a proposer of its own."""

    drafter = Drafter.LOOKUP
    supports_trees = True
    usual_acceptance = "ngram-code"
    draft_time_share: float = LOOK_UP_TIME_SHARE

    def accept_width(self, steps: int, num_draft_tokens: int) -> int:
        """Return the size of the tree: a proposed tree may be as deep as it has nodes."""
        return num_draft_tokens


class Ngram(LookupDrafting):
    """Look-up drafting: continuations of earlier occurrences of the last tokens (Saxena, prompt look-up decoding)."""

    name = "NGRAM"

    def make_proposer(self, shape: AlgorithmShape) -> NgramProposer:
        return NgramProposer()


class SuffixDrafting(LookupDrafting):
    """Suffix decoding: continuations of the longest suffix that also stands in the prompt, the output or past outputs
    (arXiv 2411.04975)."""

    name = "SUFFIX"
    supports_trees = False
    looks_up_past_outputs = True

    def make_proposer(self, shape: AlgorithmShape) -> SuffixDrafts:
        return SuffixDrafts()


class HybridDrafting(Eagle3):
    """Look-up with a model: a row drafts by suffix decoding where that promises more than its EAGLE-3 head, by the head
    otherwise, and not at all where neither pays (`hybrid.py`)."""

    name = "HYBRID"
    supports_trees = False
    looks_up_past_outputs = True
    captures_rounds = False  # rows draft in several ways, and as many tokens as pays
    draft_time_share: float = LOOK_UP_TIME_SHARE


BUILT_IN = (
    SpecAlgorithm, Standalone, Eagle, Eagle3, MultiLayerEagle, Ngram,
    ParallelEagle, ParallelDraft, BlockDrafting, SelectedBlockDrafting, MarkovBlockDrafting, SuffixDrafting,
    HybridDrafting,
)  # fmt: skip
