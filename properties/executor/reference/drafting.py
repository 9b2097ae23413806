"""The reference drafts: chains and trees from a hash draft over shadow KV, and proposals from the tokens that the KV
holds.

Where draft KV is written (positions of the row, S steps, branch starts as in `draft_branch_layout`):

    unshifted   start + 0: the root, start + s: the beam node of level s          s = 1 … S − 1
    shifted     start + s − 1: the pair (hidden state before, beam node of level s)

The leaves of the last level are never run. When a beam node's parent sits in another branch, that branch's KV is copied
over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ....core.algorithm.algorithm import AlgorithmShape, Drafter, DraftKV, SpecAlgorithm
from ....core.algorithm.host_drafts import HostDrafts
from ....core.contract.step import RoundShape
from ....core.errors import InvariantViolation
from ....core.kv.moves import KVMovePlan, draft_branch_layout
from ....core.tree.build import (
    Beam,
    VerifyTree,
    build_chain,
    build_lookup_tree,
    build_proposed_tree,
    build_tree,
    expand_topk,
    first_candidates,
)
from .language_model import HashDraft, extend_hash
from .shadow import PrefixRead, ShadowKV


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a draft pass starts from, for bs rows."""

    rows: np.ndarray  # int32 [bs]
    lengths: np.ndarray  # int64 [bs]; KV length of target and draft
    prefixes: list[PrefixRead]
    roots: np.ndarray  # int64 [bs]; the last emitted tokens, which have no KV yet
    root_hashes: np.ndarray  # uint64 [bs]; prefix hash after the root
    relayed: dict[str, np.ndarray]
    runs: np.ndarray | None  # int64 [bs]: how many drafts are to be accepted (simulated acceptance); None: the dial
    shape: RoundShape


@dataclass(frozen=True, slots=True)
class Drafted:
    """The verify trees of a round."""

    tree: VerifyTree
    # [bs, nd, …] by relay field: what the next round starts from if that node is the last accepted (drafts from the
    # host).
    next_relay: dict[str, np.ndarray] = field(default_factory=dict)
    confidence: np.ndarray | None = None  # float32 [bs, steps]: the draft's greatest probabilities; None for trees


class ReferenceDrafter:
    """Drafts for one algorithm; the steps of `shape` are the greatest candidate:
    how many heads' candidates are relayed."""

    def __init__(
        self,
        algorithm: SpecAlgorithm,
        draft: HashDraft,
        kv: ShadowKV,
        page_size: int,
        shape: AlgorithmShape,
        max_position: int,
    ) -> None:
        self.algorithm = algorithm
        self.draft = draft
        self.kv = kv
        self.page_size = page_size
        self.max_steps = shape.steps
        self.topk = shape.topk
        self.max_position = max_position
        self.host = HostDrafts(algorithm, shape) if algorithm.drafter is Drafter.LOOKUP else None

    # -- what a round starts from ---------------------------------------------------------------------------------

    def relay(self, hashes: np.ndarray, tokens: np.ndarray, runs: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the draft-extend pass's top-k after prefixes uint64 [n] that end in `tokens`: ids int64, probabilities
        float32 [n, m].

        With one head per step, and in one pass, m = k · S: step s answers after the first choices of those before it.
        """
        at_once = self.algorithm.in_one_pass or self.algorithm.drafter is Drafter.HEADS
        heads = max(self.max_steps, 1) if at_once else 1
        ids, probabilities = [], []
        for head in range(heads):
            right = None if runs is None else head < runs
            found, likely = self.draft.top_k(hashes, tokens, self.topk, self._head(head), right)
            ids.append(found)
            probabilities.append(likely)
            hashes, tokens = extend_hash(hashes, found[:, 0]), found[:, 0]
        return np.concatenate(ids, axis=1), np.concatenate(probabilities, axis=1)

    def tree(self, request: DraftRequest) -> Drafted:
        if self.host is not None:
            return self._host_tree(request, self.host)
        if not request.shape.is_parked:
            self._check_relay(request)
        if request.shape.steps == 0 or not self.algorithm.is_speculative:
            none = np.zeros((len(request.rows), 0), np.int32)
            tree = build_chain(request.roots, none, request.lengths, self.max_position)
            return Drafted(tree, confidence=none.astype(np.float32))
        if self.algorithm.in_one_pass:
            drafts, confidence = (
                request.relayed[name][:, : request.shape.steps] for name in ("topk_ids", "topk_probabilities")
            )
            tree = build_chain(request.roots, drafts, request.lengths, self.max_position)
            return Drafted(tree, confidence=confidence)
        if self.algorithm.drafter is Drafter.BLOCK:
            drafts, confidence = self._path(request, request.shape.steps)
            tree = build_chain(request.roots, drafts, request.lengths, self.max_position)
            return Drafted(tree, confidence=confidence)
        return self._model_tree(request)

    def _check_relay(self, request: DraftRequest) -> None:
        if "topk_ids" not in request.relayed:
            return
        ids, probabilities = self.relay(request.root_hashes, request.roots, request.runs)
        wrong = (ids != request.relayed["topk_ids"]) | (probabilities != request.relayed["topk_probabilities"])
        if wrong.any():
            row = request.rows[wrong.any(axis=1).argmax()]
            raise InvariantViolation("RELAY-02", f"row {row} got draft candidates that do not follow its prefix")

    # -- from the host --------------------------------------------------------------------------------------------

    def first_relay(self, row: int, prefix: PrefixRead) -> dict[str, np.ndarray]:
        """Return what a proposer's first round after this prompt starts from, [1, …] by relay field."""
        if self.host is None:
            return {}
        self._show(self.host, row, prefix.tokens)
        return self.host.first_relay(np.array([row]))

    def _host_tree(self, request: DraftRequest, host: HostDrafts) -> Drafted:
        """Show the proposer the whole text that the KV holds in every round, as if the row were new:
        what it kept must not matter."""
        nodes = request.shape.nodes
        for row, prefix, root in zip(request.rows.tolist(), request.prefixes, request.roots.tolist(), strict=True):
            self._show(host, row, np.append(prefix.tokens, root))
        if request.runs is not None:
            # The drafts are those of a foreign proposer, so every round starts from the first relay values.
            paths = [[path] for path in self._path(request, nodes - 1)[0]]
            tree = build_lookup_tree(request.roots, paths, request.lengths, nodes, self.max_position)
            first = host.first_relay(request.rows)
            return Drafted(tree, {name: np.stack([values] * nodes, axis=1) for name, values in first.items()})
        proposal = host.propose(request.rows, request.shape, request.relayed)
        tree = build_proposed_tree(request.roots, proposal.tokens, proposal.parents, request.lengths, self.max_position)
        return Drafted(tree, dict(proposal.next_relay))

    @staticmethod
    def _show(host: HostDrafts, row: int, text: np.ndarray) -> None:
        host.open_row(row)
        host.observe(row, text)

    def _path(self, request: DraftRequest, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best tokens behind each row's text, one after another, int64 [bs, length], and the draft's
        probabilities of them, float32."""
        hashes, tokens = request.root_hashes, request.roots
        path = np.zeros((len(request.rows), length), np.int64)
        shares = np.zeros(path.shape, np.float32)
        for depth in range(length):
            right = None if request.runs is None else depth < request.runs
            found, likely = self.draft.top_k(hashes, tokens, 1, 0, right)
            tokens = path[:, depth] = found[:, 0]
            shares[:, depth] = likely[:, 0]
            hashes = extend_hash(hashes, tokens)
        return path, shares

    # -- a model, a head, or one head per step --------------------------------------------------------------------

    def _model_tree(self, request: DraftRequest) -> Drafted:
        topk, steps, vocab = request.shape.topk, request.shape.steps, self.draft.target.vocab_size
        branches = _Branches(self, request)
        candidates, beam = first_candidates(
            request.relayed["topk_ids"][:, :topk], request.relayed["topk_probabilities"][:, :topk], vocab
        )
        levels, greatest = [candidates], [request.relayed["topk_probabilities"][:, 0]]
        hashes = np.repeat(request.root_hashes[:, None], topk, axis=1)
        for level in range(1, steps):
            hashes = extend_hash(np.take_along_axis(hashes, beam.sources, axis=1), beam.tokens)
            branches.write(level, beam, hashes)
            right = None if request.runs is None else np.repeat(level < request.runs, topk)
            tokens, probabilities = self.draft.top_k(
                hashes.ravel(), beam.tokens.ravel(), topk, self._head(level), right
            )
            shape = (len(request.rows), topk, topk)
            candidates, beam = expand_topk(beam, tokens.reshape(shape), probabilities.reshape(shape), vocab)
            levels.append(candidates)
            greatest.append(probabilities.reshape(shape)[:, 0, 0])
        if topk == 1:
            drafts = np.concatenate([level.tokens for level in levels], axis=1)
            chain = build_chain(request.roots, drafts, request.lengths, self.max_position)
            return Drafted(chain, confidence=np.stack(greatest, axis=1).astype(np.float32))
        return Drafted(build_tree(request.roots, levels, request.lengths, request.shape.nodes, self.max_position))

    def _head(self, level: int) -> int:
        return level if self.algorithm.drafter is Drafter.HEADS else 0


class _Branches:
    """The draft KV of one round's branches: laid out, written level by level, and read back before
    every forward pass."""

    def __init__(self, drafter: ReferenceDrafter, request: DraftRequest) -> None:
        self._kv = drafter.kv
        self._request = request
        layout = draft_branch_layout(request.lengths, drafter.page_size, request.shape.topk, request.shape.steps)
        self._starts = layout.branch_starts
        rows = request.rows
        ends = self._starts[:, -1] + request.shape.steps
        self._windows = [
            self._kv.window(int(row), int(length), int(end - length))
            for row, length, end in zip(rows, request.lengths, ends, strict=True)
        ]
        self._first_level = 1
        self._tail = (layout, request.lengths % drafter.page_size)
        tail = layout.tail_moves(self._kv.table, rows)
        self._kv.draft.move(tail)
        self._hashes: list[np.ndarray] = []  # per written level: uint64 [bs, k]
        if self._kv.draft_kv == DraftKV.UNSHIFTED.value:
            self._first_level = 0
            shape = (len(rows), request.shape.topk)
            roots = np.broadcast_to(request.roots[:, None], shape)
            self._put(0, roots, np.broadcast_to(request.root_hashes[:, None], shape))
        self._check_tails()

    def write(self, level: int, beam: Beam, hashes: np.ndarray) -> None:
        """Run the draft on the beam of `level`: their branches' KV follows them, then their own is written
        and all is read."""
        written = len(self._hashes)
        if written > self._first_level_cells():
            self._follow(beam.sources, written)
        self._hashes = [np.take_along_axis(level_hashes, beam.sources, axis=1) for level_hashes in self._hashes]
        self._put(level, beam.tokens, hashes)
        self._check_branches()

    def _first_level_cells(self) -> int:
        return 1 - self._first_level  # the root stands in every branch alike

    def _slots(self, offset: int) -> np.ndarray:
        """Return where each branch's cell number `offset` lies, int32 [bs, k]."""
        places = self._starts + offset - self._request.lengths[:, None]
        return np.stack([window[place] for window, place in zip(self._windows, places, strict=True)])

    def _put(self, level: int, tokens: np.ndarray, hashes: np.ndarray) -> None:
        offset = level - self._first_level
        rows, topk = self._request.rows, self._request.shape.topk
        stays = np.repeat(self._kv.stays[rows][:, None], topk, axis=1)
        positions = np.repeat(self._request.lengths[:, None] + offset, topk, axis=1)
        self._kv.draft.write(self._slots(offset), stays, positions, tokens, hashes)
        self._hashes.append(np.array(hashes))

    def _follow(self, sources: np.ndarray, written: int) -> None:
        """Copy the KV of each beam node's parent branch into its own, all reads before all writes."""
        src, dst = [], []
        for offset in range(self._first_level_cells(), written):
            slots = self._slots(offset)
            src.append(np.take_along_axis(slots, sources, axis=1).ravel())
            dst.append(slots.ravel())
        plan = KVMovePlan(np.concatenate(src), np.concatenate(dst))
        width = max(len(window) for window in self._windows)
        padded = np.zeros((len(self._windows), width), dtype=np.int32)
        for i, window in enumerate(self._windows):
            padded[i, : len(window)] = window
        plan.check(self._kv.draft.num_slots, padded)
        self._kv.draft.move(plan)

    def _check_branches(self) -> None:
        for offset, hashes in enumerate(self._hashes):
            slots = self._slots(offset)
            if (self._kv.draft.hashes[slots] != hashes).any():
                raise InvariantViolation("ACCEPT-06", f"a draft branch does not hold its own path at step {offset}")

    def _check_tails(self) -> None:
        """Check that the head of every branch's first page repeats the tail of the prefix."""
        layout, tails = self._tail
        draft = self._kv.draft
        for i, row in enumerate(self._request.rows.tolist()):
            tail, length = int(tails[i]), int(self._request.lengths[i])
            original = self._kv.table[row, length - tail : length]
            for start in layout.branch_starts[i].tolist():
                copy = self._kv.table[row, start - tail : start]
                if not draft.same_content(original, copy):
                    message = f"row {row}: a draft branch at {start} lacks the prefix's tail"
                    raise InvariantViolation("ACCEPT-06", message)
