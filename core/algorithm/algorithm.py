"""What a speculative algorithm is: an object that scheduling code calls, never a flag that it tests.

The engine asks it for the width of `accept_index`, the fields to relay and the kind of prefix key. Executors ask it
which kind of drafter to build. A plugin overrides the same methods (see `plugin_check.py`); nothing else in the core
knows its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from ..contract.future_map import FutureMap, RelayField
from ..contract.handoff_batch import DraftInput, HandoffBatch
from ..contract.hidden import CaptureHiddenMode, ForwardPhase, capture_mode
from ..errors import Problem
from .proposer import Proposer


class Drafter(Enum):
    """What proposes the tokens; executors and cost models choose their draft by it."""

    NONE = "none"  # plain decoding
    MODEL = "model"  # a small language model with a KV cache of its own
    HEAD = "head"  # one draft layer on the target's hidden states, run once per step
    HEADS = "heads"  # one head per step
    BLOCK = "block"  # layers that draft a block at once, with KV made of the target's hidden states
    LOOKUP = "lookup"  # a proposer on the host, from the text so far (`make_proposer`); no device work


BONUS_TOKENS = RelayField("bonus_tokens", (), "int64")
"""The relay field that every algorithm has: the last accepted token, root of the next tree."""


class DraftKV(Enum):
    """What position j of the draft pool holds (F5)."""

    NONE = "none"
    UNSHIFTED = "unshifted"  # the KV of token j
    SHIFTED = "shifted"  # the KV of (hidden state j, token j + 1)


@dataclass(frozen=True, slots=True)
class AlgorithmShape:
    """The sizes that an algorithm's answers depend on; the maximum over all adaptive candidates."""

    steps: int
    topk: int = 1
    hidden_size: int = 0
    num_heads: int | None = None  # of a draft with one head per step, or the drafts of a whole block
    target_vocab_size: int | None = None
    draft_vocab_size: int | None = None


class SpecAlgorithm:
    """Base of all algorithms; its defaults describe plain decoding. Instances carry no state: one may serve many
    engines.

    `draft_form` is the form of the draft's checkpoint, named after the built-in algorithm that uses it ("" if there is
    none). `usual_acceptance` is the acceptance preset, or the kind of text, that a simulation takes by default.
    `draft_time_share` is the time of proposing on the host in a simulated round, as a share of the verify pass.
    `needs_hidden_states`: a round relays a hidden state, and a handoff has one. `reads_hidden_states`: the draft takes
    those of all committed tokens, of the passes that compute them, and none is relayed. `in_one_pass`: one pass over
    mask tokens drafts all tokens of a round.
    `looks_up_past_outputs`: rows draft by suffix decoding (`suffix.py`), so also from what earlier requests got; those
    of a draft with a network where that promises more.
    `captures_rounds`: CUDA graphs may hold its rounds.
    """

    name: str = "NONE"
    drafter: Drafter = Drafter.NONE
    draft_form: str = ""
    usual_acceptance: str = "chat"
    draft_time_share: float = 0.0
    draft_kv: DraftKV = DraftKV.NONE
    needs_hidden_states: bool = False
    supports_overlap: bool = True
    supports_trees: bool = False
    reads_hidden_states: bool = False
    in_one_pass: bool = False
    looks_up_past_outputs: bool = False
    captures_rounds: bool = True

    @property
    def is_speculative(self) -> bool:
        return self.drafter is not Drafter.NONE

    @property
    def has_look_ups(self) -> bool:
        """Return whether rows draft by look-ups, which are not drawn from a distribution."""
        return self.drafter is Drafter.LOOKUP or self.looks_up_past_outputs

    @property
    def looks_up_beside_a_draft(self) -> bool:
        """Return whether some rows of a round draft by look-ups and others with a network."""
        return self.has_look_ups and self.drafter is not Drafter.LOOKUP

    def capture_hidden_mode(self, phase: ForwardPhase) -> CaptureHiddenMode:
        """Return how much hidden state a forward pass of `phase` keeps for the draft;
        NULL everywhere if none is needed."""
        reads = self.reads_hidden_states and phase in (ForwardPhase.PREFILL, ForwardPhase.VERIFY)
        return capture_mode(phase, self.needs_hidden_states or reads)

    def prefix_key_kind(self) -> Literal["token", "bigram"]:
        """Return the kind of prefix key: bigrams if draft KV looks one token ahead and so depends on the next token
        too."""
        return "bigram" if self.draft_kv is DraftKV.SHIFTED else "token"

    def accept_width(self, steps: int, num_draft_tokens: int) -> int:
        """Return the columns of `accept_index`: the longest path with its bonus token."""
        return steps + 1

    def relay_fields(self, shape: AlgorithmShape) -> tuple[RelayField, ...]:
        """Return the fields that a step stashes for the next step, beside the length: first the bonus token, then the
        values that the draft starts from.

        Only algorithms with a proposer have fields of their own; the proposer gives their values
        (`Proposer.first_relay`, `Proposal.next_relay`).
        """
        return (BONUS_TOKENS,)

    def make_proposer(self, shape: AlgorithmShape) -> Proposer | None:
        """Make a fresh proposer for one executor. An algorithm has a proposer exactly if its drafter is LOOKUP. `shape`
        has the target's vocabulary."""
        return None

    def draft_network(self) -> type | None:
        """Return the class of a head's network, a `foredraft.gpu.models.eagle.DraftHead`; None: that of `draft_form`.
        Executors on a device call it; it may import torch."""
        return None

    def problems(self, shape: AlgorithmShape) -> list[Problem]:
        """Return the parts of `shape` that this algorithm cannot run, each with the reason; an empty list if it can run
        all of them."""
        if shape.topk > 1 and not self.supports_trees:
            return [Problem("topk", f"{self.name} drafts no trees, so topk must be 1, got {shape.topk}")]
        return []

    def build_disagg_draft_input(
        self, batch: HandoffBatch, last_tokens: np.ndarray, future_map: FutureMap | None
    ) -> DraftInput | None:
        """Rebuild the draft input on a decode worker; `last_tokens` int64 [bs] are the prompts' first output tokens.

        With a `future_map` (overlap mode) lengths are published and the input is stashed, before the first resolve. The
        default needs no draft input: it returns None and stashes the bonus token, with the algorithm's own fields as
        they were sent.
        """
        if future_map is not None and len(batch.rows):
            future_map.publish(batch.rows, batch.epochs, batch.seq_lens)
            values = {BONUS_TOKENS.name: np.asarray(last_tokens, np.int64), **batch.relayed}
            future_map.stash(batch.rows, batch.epochs, values)
        return None


NO_SPECULATION = SpecAlgorithm()
