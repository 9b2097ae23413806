"""The operations of a device, as a port: one method per kernel. `TorchOps`, `HostOps` and `TritonOps` implement it.

Shapes: n tokens, bs rows of a batch, nd nodes per row, Hq and Hk query and key-value heads of d channels. Row numbers,
positions, slots and lengths are int64; the request table is int32 [num_rows + 1, row width]; row 0 and slot 0 are
padding, which every row may write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, Protocol, cast

import torch
from torch import Tensor

from ...core.tree.chains import AcceptRule
from .attention import PLAIN, UNSCALED, BatchAttention, KVScales, Packing, Softmax
from .coded import CodedWeight
from .experts import Router
from .recurrence import PassStates, RecurrentWeights, StateShape


@dataclass(frozen=True, slots=True)
class DeviceCandidates:
    """Candidates for the nodes of a verify batch's trees, n of each row, level by level."""

    tokens: Tensor  # int64 [bs, n]
    scores: Tensor  # float32 [bs, n]: products of probabilities from the root
    parents: Tensor  # int32 [bs, n]: candidate id, −1 for the root
    depths: tuple[int, ...]  # n, ascending from 1


@dataclass(frozen=True, slots=True)
class DrawnDrafts:
    """What the drafts of chains were drawn from: the distribution of each over K candidates."""

    ids: Tensor  # int64 [bs, nd − 1, K], no token twice
    probs: Tensor  # float [bs, nd − 1, K], up to its sum


@dataclass(frozen=True, slots=True)
class DeviceTree:
    """The trees of one verify batch, bs rows of nd nodes. A padding node has parent −1 and nothing points to it."""

    tokens: Tensor  # int64 [bs, nd]; column 0 is the root
    parents: Tensor  # int32 [bs, nd]; node number inside the row, −1 for the root and for padding
    positions: Tensor  # int64 [bs, nd]; seq_len + depth, clamped to the last position of the context
    depths: Tensor  # int64 [bs, nd]
    next_token: Tensor  # int32 [bs, nd]; first child, −1 if none
    next_sibling: Tensor  # int32 [bs, nd]; −1 if none
    ancestor_bits: Tensor  # int64 [bs, nd]; bit j: node j is the node itself or one of its ancestors
    width: int  # nodes on the longest possible path, root included: the columns of accept_index
    # [bs, nd, …] by relay field: what the next round starts from if that node is the last accepted (drafts from the
    # host).
    next_relay: Mapping[str, Tensor] = field(default_factory=dict)
    drawn: DrawnDrafts | None = None  # of chains whose drafts were drawn
    # float32 [bs, steps]: the probability that the draft gives each of its first choices, of chains in rounds with a
    # budget
    confidence: Tensor | None = None
    # int64 [bs]: the nodes that the draft has for each row, the first ones of its chain; None: all nodes
    row_nodes: Tensor | None = None
    num_tokens: int = 0  # the sum of `row_nodes`

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """nd, root included."""
        return self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class DeviceVerified:
    """What verification decides for bs rows."""

    accept_index: Tensor  # int32 [bs, width]; flat index of each accepted node, root first, −1 past the end
    accept_lens: Tensor  # int32 [bs]; accepted nodes = emitted tokens, bonus included: 1 … width
    predict: Tensor  # int64 [bs · nd]; the target's token after each node, −1 where the target failed
    failed: Tensor  # bool [bs]; the target gave no distribution on the accepted path


@dataclass(frozen=True, slots=True)
class LogitTables:
    """What changes the target's logits, by row of the request table. Row 0 changes nothing."""

    seen: Tensor  # int32 [num_rows + 1, V]: twice how often the output has the token, and 1 more if the prompt has it
    bias: Tensor  # float32 [num_rows + 1, V]
    # float64 [num_rows + 1, 5]: repetition, frequency and presence penalty, whether there are biases, and how far below
    # the greatest logit min-p cuts (−∞: nowhere).
    params: Tensor


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """The tokens that grammars allow at n nodes: bit t % 32 of word t // 32 is token t."""

    index: Tensor  # int32 [n]; the node's row of `bits`, −1 where all tokens are allowed
    bits: Tensor  # int32 [m, ⌈V / 32⌉]


class KVTensors(NamedTuple):
    """Keys and values of a pool: of one layer [slots, Hk, d], or of all [layers, slots, Hk, d]."""

    keys: Tensor
    values: Tensor

    def with_values(self) -> KVTensors:
        """Return the same, with the keys as values if there are no others."""
        return self if self.values.shape[-1] else KVTensors(self.keys, self.keys)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """m queries that find all their keys in the pool: columns [0, bases) of their row, then `tails` onward, `lens` in
    all.

    Query i sees position j < lens[i] in slot table[rows[i], j if j < bases[i] else tails[i] + j − bases[i]]. A plain
    decode has bases = lens. A draft branch has its shared prefix (whole pages) as base, and its own pages as tail.
    """

    table: Tensor  # int32 [num_rows + 1, row width]
    rows: Tensor  # int64 [m]
    bases: Tensor  # int64 [m]
    tails: Tensor  # int64 [m]
    lens: Tensor  # int64 [m]; 0: the query reads nothing and its output is 0
    max_len: int  # host's bound of lens: sizes of temporary arrays and the split over the KV length
    planned_queries: int | None = None  # what the split is chosen for, m or more (`VerifyBatch.planned_rows`)


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """bs rows of nd ≤ 64 new tokens behind their prefixes: the nodes of a verify tree, or a window of the draft's
    catch-up.

    Each new token sees its row's columns [0, prefix_lens) and the new tokens j of its row whose bit j is set. Bits 0:
    the output is 0. With a `packing` queries, keys and values are those of its n tokens alone.

    A kernel chooses its blocks, and how it splits the KV length, for `planned_rows` rows of `planned_nodes` nodes. So
    the order in which it sums is the same for every number of steps, and for captured (padded) and eager rounds. None:
    for the batch as it is.
    """

    table: Tensor  # int32 [num_rows + 1, row width]
    rows: Tensor  # int64 [bs]
    prefix_lens: Tensor  # int64 [bs]
    max_prefix_len: int  # host's bound of prefix_lens
    ancestor_bits: Tensor  # int64 [bs, nd]
    planned_rows: int | None = None  # bs or more
    planned_nodes: int | None = None  # nd or more
    packing: Packing | None = None


@dataclass(frozen=True, slots=True)
class ExtendBatch:
    """Ragged prefill: row i has new tokens starts[i] … starts[i + 1] − 1;
    each sees the row's prefix and the new ones up to itself."""

    table: Tensor  # int32 [num_rows + 1, row width]
    rows: Tensor  # int64 [bs]
    prefix_lens: Tensor  # int64 [bs]
    starts: Tensor  # int64 [bs + 1]
    max_prefix_len: int  # host's bound of prefix_lens
    max_new_len: int  # host's bound of the new tokens of a row


AttentionBatch = DecodeBatch | VerifyBatch | ExtendBatch


@dataclass(frozen=True, slots=True)
class Capture:
    """What a forward pass keeps beside its last hidden state."""

    # Ascending; hidden states entering these layers, the number of layers being the last's output.
    aux_layers: tuple[int, ...] = ()
    routed_experts: bool = False


NO_CAPTURE = Capture()


class LayersOutput(NamedTuple):
    """What layers make of n tokens."""

    hidden: Tensor  # [n, H] after the final norm, or the residual where there is none
    residual: Tensor  # [n, H]
    aux: Tensor | None  # [n, len(aux_layers) · H], before any norm
    routed_experts: Tensor | None  # int32 [n, MoE layers, k], best first; None if not asked for or if there are none


class DecoderLayer(Protocol):
    """What `Ops.run_layers` needs of a decoder layer (`models.layer.Layer`)."""

    @property
    def ops(self) -> Ops: ...

    @property
    def eps(self) -> float: ...

    @property
    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the norms before the mixer and before the MLP; None where there is none."""

    def mix(self, x: Tensor, attention: BatchAttention, cos_sin: Tensor) -> Tensor:
        """Run the mixer: x [n, H], normed → [n, H], without the residual."""

    def after_attention(
        self, out: Tensor, residual: Tensor, in_round: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what the MLP adds to the residual, the residual beside it, and the chosen experts if there are
        some."""


class Ops(Protocol):
    """The operations of a device; none waits for it. Results are new tensors.
    Names with `_`, rope_write and run_layers write in place."""

    # -- the forward pass -----------------------------------------------------------------------------------------

    def run_layers(
        self,
        layers: Sequence[DecoderLayer],
        residual: Tensor,
        attention: BatchAttention,
        cos_sin: Tensor,
        first_input: Tensor | None = None,
        final_norm: Tensor | None = None,
        capture: Capture = NO_CAPTURE,
    ) -> LayersOutput:
        """Run decoder layers over n tokens.
        `first_input` replaces the normed residual [n, H] in the first one."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x [n, H] (or [n, heads, d], normed over the last axis) scaled to unit root mean
        square, times weight."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual): the sum is the next residual."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) · up: [n, 2 · I] → [n, I]; the gate is the first half."""

    def coded_product(self, x: Tensor, weight: CodedWeight) -> Tensor:
        """Return x [n, in] · weightᵀ, [n, out], of weights in stored numbers."""

    def expert_product(self, x: Tensor, weight: Tensor | CodedWeight, experts: Tensor, gated: bool = False) -> Tensor:
        """Return the products with the weights of chosen experts, [n, k, out].

        experts int64 [n, k]; weight [E, out, in]; x [n, in], or [n, k, in] with a row for each choice. `gated`: x has
        twice the inputs, of which `silu_mul` is multiplied.
        """

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x · sigmoid(gate), both [n, heads, d]."""

    def route(self, logits: Tensor, router: Router, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the weights, in `dtype`, and the numbers, int64, of each token's experts, best first: logits [n, E] →
        [n, k] both. `bias` [E] is added to the scores that choose."""

    def combine(
        self,
        out: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        x: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sums of the experts' outputs [n, k, H] → [n, H], and `shared` [n, H] beside them, scaled
        by the sigmoid of x [n, hidden] · gateᵀ [1, hidden] if there is a gate."""

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) · up in the same way, GELU in its form with tanh."""

    def rope_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KVTensors,
        scales: KVScales = UNSCALED,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate q [n, Hq, d] and k [n, Hk, d] to `positions` [n], write k and v to `slots` [n]; return the rotated q,
        and k and v as they were written.

        A pool of 8-bit numbers keeps k and v divided by `scales`, rounded, at most ±448. What attends to them, in this
        pass or later, reads the same numbers (`Softmax.over`).

        cos_sin float32 [positions, d]: d/2 cosines, then d/2 sines; halves are rotated against each other (the Hugging
        Face order).
        """

    def decode_attention(self, q: Tensor, kv: KVTensors, batch: DecodeBatch, softmax: Softmax = PLAIN) -> Tensor:
        """Attend with every query [m, Hq, d] to its keys, its own included. Split over the KV length.

        A window counts positions in all three operations: a tree node's position follows from its depth, not from its
        column.
        """

    def verify_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: VerifyBatch, softmax: Softmax = PLAIN
    ) -> Tensor:
        """Attend with q [bs · nd, Hq, d] to the prefixes and to the new tokens' k and v [bs · nd, Hk, d]; [n, …] all
        three if the batch is packed."""

    def extend_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: ExtendBatch, softmax: Softmax = PLAIN
    ) -> Tensor:
        """Attend with q [n, Hq, d] to the prefixes and to the new tokens' k and v [n, Hk, d]."""

    def recur(
        self, states: PassStates, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape
    ) -> Tensor:
        """Run a recurrent layer over n tokens, see `BatchAttention.recur`. `states` keep what `keep` needs later."""

    # -- trees ----------------------------------------------------------------------------------------------------

    def build_chain(self, roots: Tensor, drafts: Tensor, seq_lens: Tensor, max_position: int) -> DeviceTree:
        """Return a tree without branches: roots [bs], drafts int64 [bs, S], nd = S + 1."""

    def build_tree(
        self, roots: Tensor, candidates: DeviceCandidates, seq_lens: Tensor, num_draft_tokens: int, max_position: int
    ) -> DeviceTree:
        """Choose the best nd − 1 of the candidates; see `core.tree.build.build_tree`. Ties take the lowest id, no child
        counts as better than its parent, NaN is the worst."""

    def window(
        self, table: Tensor, rows: Tensor, lengths: Tensor, columns: int, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the places lengths + 0 … columns − 1 of each row and their slots, int64 [bs, columns]; slot 0 from
        column `kept` int [bs] on. A place past the table has the slot of its last column."""

    def best_tokens(self, logits: Tensor) -> Tensor:
        """Return the lowest id of the greatest logit, int64 [n]; −1 where it is not finite, which is no answer."""

    def best_drafts(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the first choice of a draft's logits [n, V], int64 [n], as entries of `ids` int64 [V] if these are
        given. NaN gives some token."""

    def target_probs(
        self, logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool = True
    ) -> Tensor:
        """Return the distribution that sampling parameters, float64, float64 and int64 [n], make of logits [n, V];
        float64 for float64 logits, else float32.

        temperature 0 is greedy: all mass on the lowest id of the greatest logit. top_k ≤ 0 keeps all. Among equal
        logits at the edge the lowest ids stay. top_k is applied before top_p. top_p keeps the shortest prefix, in
        descending order, whose mass reaches top_p. A row with NaN, with +inf, or without a finite logit becomes NaN.
        `filtered=False` is the host's word that every row has top_p ≥ 1 and top_k ≤ 0.
        """

    def verify_greedy(self, tree: DeviceTree, target_ids: Tensor) -> DeviceVerified:
        """Accept while a child equals the target's choice; target_ids int64 [bs · nd], −1 where the target failed."""

    def verify_sampling(
        self, tree: DeviceTree, probs: Tensor, accept_coins: Tensor, bonus_coins: Tensor
    ) -> DeviceVerified:
        """Verify trees by lossless sampling: probs float [bs · nd, V], coins float64 [bs, width]; see
        `core.tree.verify.verify_sampling`."""

    def verify_chains(
        self, tree: DeviceTree, probs: Tensor, accept_coins: Tensor, bonus_coins: Tensor, rule: AcceptRule
    ) -> DeviceVerified:
        """Verify chains whose drafts were drawn (`tree.drawn`): probs float [bs · nd, V], coins float64 [bs, width];
        see `core.tree.chains.verify_chains`."""

    def coins(self, keys: Tensor, positions: Tensor, seed: int, purpose: int) -> Tensor:
        """Return `core.draws.uniform(seed, purpose, key, position)` bit by bit:
        keys int64 [bs] (uint64 bits), positions [bs, w]."""

    def shape_logits(
        self,
        logits: Tensor,
        rows: Tensor,
        tables: LogitTables,
        tree: DeviceTree | None = None,
        masks: NodeMasks | None = None,
    ) -> Tensor:
        """Return logits [bs · nd, V] behind the texts of `rows` int64 [bs] and each node's path, changed by biases,
        penalties, masks and min-p, in this order. Without a tree a row has one node, which ends its text."""

    def count_tokens_(self, seen: Tensor, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Count the first lens int32 [bs] of tokens int64 [bs, w] in `LogitTables.seen` as output of `rows`; −1 and
        row 0 count nowhere."""

    # -- after verification ---------------------------------------------------------------------------------------

    def gather_emitted(self, predict: Tensor, accept_index: Tensor, accept_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the emitted tokens int64 [bs, width], −1 past the end, and the bonus tokens int64 [bs] (0 where
        the target failed)."""

    def compact(self, values: Tensor, accept_index: Tensor, num_draft_tokens: int) -> Tensor:
        """Compact values [bs · nd, …]: entry r · nd + j becomes that of row r's j-th accepted node;
        those past the path stay."""

    def move_accepted_(self, kv: KVTensors, node_slots: Tensor, accept_index: Tensor, accept_lens: Tensor) -> None:
        """Move the KV of each row's j-th accepted node to node_slots[row, j] (int64 [bs, nd]), all layers;
        all reads before all writes."""

    def move_slots_(self, kv: KVTensors, sources: Tensor, targets: Tensor) -> None:
        """Copy KV of all layers from slots `sources` to `targets`, int64 [n]; every read before every write;
        slot 0 is the sink."""

    def duplicate_tails_(
        self, kv: KVTensors, table: Tensor, rows: Tensor, seq_lens: Tensor, page_size: int, topk: int, steps: int
    ) -> None:
        """Copy the prefix's tail page into the first page of draft branches 1 … k − 1
        (`core.kv.moves.draft_branch_layout`)."""

    # -- the relay ------------------------------------------------------------------------------------------------

    def relay_gather(self, buffers: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
        """Return buffer[rows] of each buffer, new tensors [n, …]."""

    def relay_scatter_(self, buffers: Sequence[Tensor], rows: Tensor, values: Sequence[Tensor]) -> None:
        """Set buffer[rows] = values of each buffer; row 0 stays zero."""


class _NoOps:
    """The operations of a model on the device "meta" that is asked for its names and shapes alone: none may run."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        def fail(*arguments: object, **named: object) -> NoReturn:
            raise AssertionError(f"{name}: a model without operations computes nothing")

        return fail


NO_OPS = cast(Ops, _NoOps())
"""See `_NoOps`. It answers to every method by `__getattr__`, which type checkers do not follow."""
