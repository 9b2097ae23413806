"""What the executor asks of a device, as a port: one method per kernel. `TorchOps` and `TritonOps` implement it.

Shapes: n tokens, bs rows of a batch, nd nodes per row, Hq and Hk query and key-value heads of d channels. Row numbers, positions, slots
and lengths are int64; the request table is int32 [num_rows + 1, row width]; row 0 and slot 0 are padding that anybody may write. The
pools are [slots, Hk, d] for one layer, [layers, slots, Hk, d] where a method moves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..batch.tree import DeviceTree, DeviceVerified


@dataclass(frozen=True, slots=True)
class KVView:
    """Which pool slots each of m queries reads: its row's columns [0, bases), then `tails` onward, `lens` in all.

    Query i sees position j < lens[i] in slot table[rows[i], j if j < bases[i] else tails[i] + j − bases[i]]. A plain decode has
    bases = lens. A draft branch has its shared prefix (whole pages) as base, and its own pages as tail.
    """

    rows: Tensor  # int64 [m]
    bases: Tensor  # int64 [m]
    tails: Tensor  # int64 [m]
    lens: Tensor  # int64 [m]; 0: the query reads nothing and its output is 0
    max_len: int  # host's bound of lens: sizes of temporary arrays and the split over the KV length


class Ops(Protocol):
    """Device operations without any host synchronisation. Tensors come back new unless the name says `_`."""

    layers_on_host: bool
    """Whether the layers of a small model may go past these operations where a CPU's arrays are faster."""

    # -- the forward pass -----------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [n, H] (or [n, heads, d], normed over the last axis) scaled to unit root mean square, times weight."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual): the sum is the next residual."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up, [n, 2 · I] → [n, I]; the gate is the first half."""

    def rope_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Rotate q [n, Hq, d] and k [n, Hk, d], write k and v to `slots` [n]; returns the rotated q and k.

        cos_sin float32 [positions, d]: d/2 cosines, then d/2 sines; halves are rotated against each other (the Hugging Face order).
        """

    def decode_attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, view: KVView, scale: float
    ) -> Tensor:
        """Every query [m, Hq, d] over what its view shows of the pool, its own key included. Split over the KV length."""

    def verify_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        table: Tensor,
        rows: Tensor,
        prefix_lens: Tensor,
        max_prefix_len: int,
        ancestor_bits: Tensor,
        scale: float,
    ) -> Tensor:
        """bs rows of nd ≤ 64 new tokens (q [bs · nd, Hq, d]; k, v of the new tokens): each sees its row's prefix in the pool, columns
        [0, prefix_lens), and the new tokens j of its row whose bit j is set in ancestor_bits int64 [bs, nd]. Bits 0: the output is 0."""

    def extend_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        table: Tensor,
        rows: Tensor,
        prefix_lens: Tensor,
        starts: Tensor,
        max_prefix_len: int,
        max_new_len: int,
        scale: float,
    ) -> Tensor:
        """Ragged prefill: row i has new tokens starts[i] … starts[i + 1] − 1 (int64 [rows + 1]); each sees the row's prefix in the pool and
        its own row's new tokens up to itself."""

    # -- trees ----------------------------------------------------------------------------------------------------

    def build_chain(self, roots: Tensor, drafts: Tensor, seq_lens: Tensor, max_position: int) -> DeviceTree:
        """A tree without branches: roots [bs], drafts int64 [bs, S], nd = S + 1."""

    def build_tree(
        self,
        roots: Tensor,
        tokens: Tensor,
        scores: Tensor,
        parents: Tensor,
        depths: Sequence[int],
        seq_lens: Tensor,
        num_draft_tokens: int,
        max_position: int,
    ) -> DeviceTree:
        """The best nd − 1 of n candidates (tokens int64, scores float32, parents int32 [bs, n]; depths: n ints, ascending from 1); see
        `core.tree.build.build_tree`: ties take the lowest id, no child counts as better than its parent, NaN is the worst."""

    def verify_greedy(self, tree: DeviceTree, target_ids: Tensor) -> DeviceVerified:
        """Accept while a child equals the target's choice; target_ids int64 [bs · nd], −1 where the target failed."""

    def verify_sampling(
        self, tree: DeviceTree, probs: Tensor, accept_coins: Tensor, bonus_coins: Tensor
    ) -> DeviceVerified:
        """Lossless tree sampling: probs float [bs · nd, V], coins float64 [bs, width]; see `core.tree.verify.verify_sampling`."""

    def coins(self, keys: Tensor, positions: Tensor, seed: int, purpose: int) -> Tensor:
        """`core.draws.uniform(seed, purpose, key, position)` bit for bit: keys int64 [bs] (the bits of a uint64), positions [bs, w]."""

    # -- after verification ---------------------------------------------------------------------------------------

    def gather_emitted(self, predict: Tensor, accept_index: Tensor, accept_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Emitted tokens int64 [bs, width], −1 past the end, and the bonus tokens int64 [bs] (0 where the target failed)."""

    def compact(self, values: Tensor, accept_index: Tensor, num_draft_tokens: int) -> Tensor:
        """values [bs · nd, …]: entry r · nd + j becomes that of row r's j-th accepted node; entries past the path keep their own."""

    def move_accepted_(
        self, k_pools: Tensor, v_pools: Tensor, node_slots: Tensor, accept_index: Tensor, accept_lens: Tensor
    ) -> None:
        """KV of each row's j-th accepted node to node_slots[row, j] (int64 [bs, nd]), all layers; every read before every write."""

    def move_slots_(self, k_pools: Tensor, v_pools: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy KV of all layers from slots `sources` to `targets`, int64 [n]; every read before every write; slot 0 is the sink."""

    def duplicate_tails_(
        self,
        k_pools: Tensor,
        v_pools: Tensor,
        table: Tensor,
        rows: Tensor,
        seq_lens: Tensor,
        page_size: int,
        topk: int,
        steps: int,
    ) -> None:
        """The prefix's tail page into the first page of draft branches 1 … k − 1 (`core.kv.moves.draft_branch_layout`)."""

    # -- the relay ------------------------------------------------------------------------------------------------

    def relay_gather(self, buffer: Tensor, rows: Tensor) -> Tensor:
        """buffer[rows], a new tensor [n, …]."""

    def relay_scatter_(self, buffer: Tensor, rows: Tensor, values: Tensor) -> None:
        """buffer[rows] = values; row 0 stays zero."""
