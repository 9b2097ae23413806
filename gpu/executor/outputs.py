"""Per-node outputs that a request may ask for beside its tokens. Entry of node i belongs to the token emitted after it.

logprobs           float32 [n]         of the emitted token, in the target's distribution before temperature and
                                       cut-offs
top_logprobs       float32 [n, 20]     of the twenty most likely tokens
top_logprob_ids    int64   [n, 20]     these tokens
hidden_states      float   [n, H]      the target's last hidden state
routed_experts     int32   [n, L, k]   experts chosen in each of L mixture layers; [n, 0, 0] of a model without any
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...core.contract.step import Join
from ..batch.pools import Chunks
from ..draft.port import RoundBatch
from ..models.decoder import DecoderOutput
from ..types.ops import DeviceTree

USER_OUTPUTS = ("logprobs", "top_logprobs", "top_logprob_ids", "hidden_states", "routed_experts")
NUM_TOP_LOGPROBS = 20


class NodeProducer(Protocol):
    """Makes an output that the target's pass does not give by itself: the choices of a sparse indexer, or a recurrent
    state.

    An executor calls its producers in every pass, even if no request has asked for their output. Their values are
    compacted like all others, and those of the last accepted node come back to them. All tensors are the device's.
    """

    def open_row(self, join: Join) -> None:
        """Give a request its row. `join.cached_tokens` are not prefilled:
        the producer computes its state for them here."""

    def prompt(self, chunks: Chunks) -> Tensor:
        """Take in prompt chunks; return the values [m, …] after the last token of each of the m prompts
        that end with them."""

    def nodes(self, batch: RoundBatch, tree: DeviceTree) -> Tensor:
        """Return the values [bs · nd, …] of all nodes. Parents come before their children."""

    def keep(self, batch: RoundBatch, values: Tensor) -> None:
        """Take values [bs, …] of each row's last accepted node, from which its next round goes on."""


def node_outputs(
    forward: DecoderOutput, logits: Tensor, emitted: Tensor, wanted: frozenset[str]
) -> dict[str, Tensor | None]:
    """Return the wanted entries for n nodes: logits [n, V], `emitted` int64 [n] the token after each node
    (−1 counts as 0)."""
    entries: dict[str, Tensor | None] = {}
    if wanted & {"logprobs", "top_logprobs", "top_logprob_ids"}:
        logprobs = logits.log_softmax(dim=-1)
        if "logprobs" in wanted:
            entries["logprobs"] = logprobs.gather(1, emitted.clamp(min=0)[:, None])[:, 0].float()
        if wanted & {"top_logprobs", "top_logprob_ids"}:
            values, ids = logprobs.topk(min(NUM_TOP_LOGPROBS, logprobs.shape[-1]), dim=-1)
            entries |= {"top_logprobs": values.float(), "top_logprob_ids": ids}
    if "hidden_states" in wanted:
        entries["hidden_states"] = forward.hidden
    if "routed_experts" in wanted:
        experts = forward.routed_experts
        entries["routed_experts"] = emitted.new_empty((len(emitted), 0, 0)).int() if experts is None else experts
    return {name: value for name, value in entries.items() if name in wanted}


def at_places(forward: DecoderOutput, places: Tensor) -> DecoderOutput:
    """Return the outputs of a forward pass that users may ask for, at int64 [m] of its tokens."""
    experts = forward.routed_experts
    return DecoderOutput(forward.hidden[places], None, None if experts is None else experts[places])
