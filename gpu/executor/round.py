"""One decode round on the device: propose → verify → accept → compact → catch up. Nothing in it waits for the host.

relayed values ─► draft.propose ─► tree ─► target forward ─► accept ─► KV moves, outputs compacted ─► draft.catch_up ─►
relayed values
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.contract.step import RoundShape
from ...core.draws import Purpose
from ...core.tree.chains import AcceptRule
from ...core.tree.outputs import NodeOutputs
from ..batch.pools import KVPool, PagedAttention
from ..batch.states import TreeStates
from ..batch.uploads import upload
from ..draft.branches import at_column
from ..draft.port import Accepted, Draft, NoDraft, Relayed, RoundBatch, SamplingInputs, round_coins
from ..kernels.constants import numbers
from ..kernels.rounds.build_tree import shorten_rows
from ..kernels.rounds.verify_sampling import sample_torch
from ..kernels.rounds.window import choose_rows, pack_rows
from ..models.decoder import Decoder, DecoderOutput, wide
from ..types.attention import Packing
from ..types.ops import Capture, DeviceTree, DeviceVerified, Ops, VerifyBatch
from .outputs import NodeProducer, node_outputs
from .shaping import Changes

OnLap = Callable[[str, float], None]
"""Called with the name and the seconds of each phase when it ends; `PhaseClock.seconds` sums them as well."""


class PhaseClock:
    """Seconds per phase by `now_s`; right where device work is done when a call returns."""

    def __init__(self, on_lap: OnLap | None = None, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._on_lap = on_lap
        self._now_s = now_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self._now_s()
        try:
            yield
        finally:
            self._passed(name, self._now_s() - begin)

    def _passed(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if self._on_lap is not None:
            self._on_lap(name, seconds)

    def settle(self) -> None:
        """Do nothing: a CPU has no outstanding work."""


class EventPhaseClock(PhaseClock):
    """Seconds per phase on the device's stream. Recording an event does not wait;
    `settle` reads those that have passed."""

    def __init__(self, on_lap: OnLap | None = None) -> None:
        super().__init__(on_lap)
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._open.append((name, begin, end))

    def settle(self) -> None:
        waiting = []
        for name, begin, end in self._open:
            if end.query():
                self._passed(name, begin.elapsed_time(end) / 1e3)
            else:
                waiting.append((name, begin, end))
        self._open = waiting


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round leaves for bs rows, on the device."""

    accept_lens: Tensor  # int32 [bs]
    failed: Tensor  # bool [bs]
    emitted: Tensor  # int64 [bs, width], −1 past the end
    lengths: Tensor  # int64 [bs]: KV length after the round
    relay: Relayed  # the bonus token and what the draft relays
    outputs: dict[str, Tensor]  # what users asked for, [bs, width, …]
    chosen: tuple[Tensor, ...] = ()  # by a budget: nodes int32 [bs], confidences float32 [bs, steps]
    packed: Tensor | None = None  # `copied` as `running.pack` makes one of it, in a graph of a GPU

    @property
    def copied(self) -> tuple[Tensor, ...]:
        """What the host reads of every round."""
        return (self.accept_lens, self.failed, self.emitted, *self.chosen)


@dataclass(frozen=True, slots=True)
class Passed:
    """A round whose nodes have their logits; no token is chosen yet."""

    batch: RoundBatch
    relayed: Mapping[str, Tensor]
    tree: DeviceTree
    packing: Packing | None  # of the pass, if rows verify unequal numbers of nodes
    cells: Tensor | None  # int64 [bs, nd]: of the nodes in the request table, if the pool has rings
    slots: Tensor  # int64 [bs, nd]
    forward: DecoderOutput  # of all nodes
    logits: Tensor  # [n, V] of the pass's tokens, as the target's head gives them
    states: TreeStates | None = None  # of recurrent layers
    chosen: tuple[Tensor, ...] = ()  # see `RoundResult`


MakeChanges = Callable[[DeviceTree], Changes | None]
"""Says how the logits of a tree change; on the host, which no graph can hold."""
Phase = Callable[[str], AbstractContextManager[None]]
"""Measures a phase of a round, by its name: `PhaseClock.phase`, or `unmeasured`."""


def unmeasured(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class DecodeRound:
    """The device work of a round for one target and one draft; it has no state of its own but the pools."""

    def __init__(
        self,
        ops: Ops,
        target: Decoder,
        pool: KVPool,
        draft: Draft,
        producers: Mapping[str, NodeProducer] | None = None,
        *,
        parked: Draft | None = None,
        accept_rule: AcceptRule = AcceptRule.TARGET,
    ) -> None:
        self._producers = producers or {}
        self._accept_rule = accept_rule
        self._ops = ops
        self._target = target
        self._pool = pool
        self.draft = draft
        self._parked = parked or NoDraft(ops)

    def draft_of(self, shape: RoundShape) -> Draft:
        """Return the draft of a round: a parked one takes no part."""
        return self._parked if shape.is_parked else self.draft

    def run(
        self,
        batch: RoundBatch,
        relayed: Mapping[str, Tensor],
        sampling: SamplingInputs | None,
        wanted: frozenset[str],
        forced_runs: Tensor | None,
        longest: int | None,
        phase: Phase,
        changes: MakeChanges | None = None,
    ) -> RoundResult:
        """Run the round. `wanted` names user outputs; `forced_runs` int64 [bs] are the drafts to accept (simulated
        acceptance).

        `longest` bounds accept_lens; None lets the host look, which only a CPU may. Outputs are of the logits before
        `changes`.
        """
        passed = self.begin(replace(batch, sampling=sampling), relayed, wanted, phase)
        with phase("verify"):
            made = None if changes is None else changes(passed.tree)
        return self.finish(passed, made, sampling, wanted, forced_runs, longest, phase)

    def begin(self, batch: RoundBatch, relayed: Mapping[str, Tensor], wanted: frozenset[str], phase: Phase) -> Passed:
        """Draft, and run the target over the trees."""
        with phase("draft"):
            tree = self.draft_of(batch.shape).propose(batch, relayed)
        with phase("verify"):
            packing: Packing | None = None
            chosen: tuple[Tensor, ...] = ()
            row_nodes, num_tokens = nodes_of(batch, tree)
            if row_nodes is not None:
                if tree.confidence is not None and batch.budget is not None:
                    chosen = row_nodes.int(), tree.confidence
                tree = shorten_rows(tree, row_nodes)
                packing = pack_rows(row_nodes, tree.num_nodes, num_tokens)
            places, slots = self._ops.window(batch.table, batch.rows, batch.lengths, tree.num_nodes)
            cells: Tensor | None = None
            states: TreeStates | None = None
            if self._pool.rings is not None:
                cells = batch.rows[:, None] * batch.table.shape[1] + places
            if self._pool.states is not None:
                states = TreeStates.of_tree(self._pool.states, batch.rows, batch.lengths, tree, packing)
            forward = self._verify_forward(batch, tree, packing, cells, slots, wanted, states)
            logits = self._target.logits(forward.hidden, widen=False)
            if packing is not None and (wanted or self.draft_of(batch.shape).wants_hidden):
                forward = forward.map(packing.spread)
            return Passed(batch, relayed, tree, packing, cells, slots, forward, logits, states, chosen)

    def finish(
        self,
        passed: Passed,
        changes: Changes | None,
        sampling: SamplingInputs | None,
        wanted: frozenset[str],
        forced_runs: Tensor | None,
        longest: int | None,
        phase: Phase,
    ) -> RoundResult:
        """Choose tokens by the changed logits, keep what is accepted, and prepare the next round."""
        batch, relayed, tree, logits = passed.batch, passed.relayed, passed.tree, passed.logits
        packing = passed.packing
        with phase("verify"):
            if changes is not None or sampling is not None or wanted:  # the greatest alone is the same in 16 bits
                logits = wide(logits)
                if packing is not None and (changes is not None or wanted):
                    logits, packing = packing.spread(logits), None
                passed = replace(passed, logits=logits)
            if changes is not None:
                logits = self._ops.shape_logits(logits, batch.rows, changes.tables, tree, changes.masks)
            verified = self._accept(batch, tree, packing, logits, sampling, forced_runs)
            emitted, bonus = self._ops.gather_emitted(verified.predict, verified.accept_index, verified.accept_lens)
            if changes is not None:
                self._ops.count_tokens_(changes.tables.seen, batch.rows, emitted, verified.accept_lens)
            outputs = self._compacted(passed, verified, wanted)
            if passed.states is not None:
                passed.states.keep_verified(verified, tree.num_nodes)
        with phase("draft"):
            # A path has no more nodes than its tree, even if the steps would allow more.
            longest = min(longest or int(verified.accept_lens.max()), tree.num_nodes)
            self._keep_produced(batch, outputs, verified)
            next_relay = {name: of_last_accepted(values, verified) for name, values in outputs.next_relay.items()}
            accepted = Accepted(emitted, verified.accept_lens, outputs.draft_hidden, longest, next_relay)
            relay = self.draft_of(batch.shape).catch_up(batch, accepted, relayed)
        # A draft may propose shorter chains than were planned (HYBRID): results are as wide as the plan.
        width = tree.width if batch.shape.topk > 1 else max(tree.width, batch.shape.nodes)
        return RoundResult(
            accept_lens=verified.accept_lens,
            failed=verified.failed,
            emitted=emitted if width == tree.width else F.pad(emitted, (0, width - tree.width), value=-1),
            lengths=batch.lengths + verified.accept_lens,
            relay={"bonus_tokens": bonus, **relay},
            outputs={
                name: _columns(values, width)
                for name, values in outputs.entries.items()
                if values is not None and name in wanted
            },
            chosen=passed.chosen,
        )

    def _verify_forward(
        self,
        batch: RoundBatch,
        tree: DeviceTree,
        packing: Packing | None,
        cells: Tensor | None,
        slots: Tensor,
        wanted: frozenset[str],
        states: TreeStates | None,
    ) -> DecoderOutput:
        nodes = VerifyBatch(
            batch.table,
            batch.rows,
            batch.lengths,
            batch.max_len,
            tree.ancestor_bits,
            planned_rows=batch.padded_rows,
            planned_nodes=batch.max_nodes,
            packing=packing,
        )
        tokens, positions, slots = (x.view(-1) for x in (tree.tokens, tree.positions, slots))
        cells = None if cells is None else cells.view(-1)
        if packing is not None:
            tokens, positions, slots = map(packing.pick, (tokens, positions, slots))
            cells = None if cells is None else packing.pick(cells)
        attention = PagedAttention(self._ops, self._pool, nodes, positions, slots, states, cells)
        return self._target.forward(tokens, attention, capture_for(self.draft_of(batch.shape), wanted))

    def _accept(
        self,
        batch: RoundBatch,
        tree: DeviceTree,
        packing: Packing | None,
        logits: Tensor,
        sampling: SamplingInputs | None,
        forced_runs: Tensor | None,
    ) -> DeviceVerified:
        """Choose the path of each row, by logits of the pass's tokens (`packing`) or of all nodes."""
        if forced_runs is not None or sampling is None:
            best = self._ops.best_tokens(logits)
            best = best if packing is None else packing.spread(best)
            return (
                self._ops.verify_greedy(tree, best) if forced_runs is None else accept_forced(tree, best, forced_runs)
            )
        temperature, top_p, top_k = sampling.repeated(tree.num_nodes)
        if packing is not None:
            temperature, top_p, top_k = (packing.pick(one) for one in (temperature, top_p, top_k))
        probs = self._ops.target_probs(logits, temperature, top_p, top_k, filtered=sampling.filtered)
        probs = probs if packing is None else packing.spread(probs)
        positions = batch.lengths[:, None] + numbers(tree.width, logits.device)
        bonus = self._ops.coins(sampling.keys, positions, sampling.seed, Purpose.BONUS_COIN)
        if tree.drawn is not None:
            accept = round_coins(self._ops, batch, sampling, tree.width, Purpose.CHAIN_COIN)
            return self._ops.verify_chains(tree, probs, accept, bonus, self._accept_rule)
        accept = self._ops.coins(sampling.keys, positions, sampling.seed, Purpose.ACCEPT_COIN)
        return self._ops.verify_sampling(tree, probs, accept, bonus)

    def _compacted(self, passed: Passed, verified: DeviceVerified, wanted: frozenset[str]) -> NodeOutputs[Tensor]:
        """Return every per-node output as [bs, nd, …] with the accepted path in front; the target's KV likewise."""
        batch, tree = passed.batch, passed.tree
        entries = node_outputs(passed.forward, passed.logits, verified.predict, wanted)
        entries |= {name: producer.nodes(batch, tree) for name, producer in self._producers.items()}
        next_relay = {name: values.flatten(0, 1) for name, values in tree.next_relay.items()}
        hidden = draft_hidden(self.draft_of(batch.shape), passed.forward)
        outputs = NodeOutputs(entries, next_relay, hidden)
        if batch.shape.topk > 1 or self.draft.has_branches:
            # On a chain the accepted path stands in front already.
            pool, path = self._pool, (verified.accept_index, verified.accept_lens)
            self._ops.move_accepted_(pool.all_layers, passed.slots, *path)
            if pool.all_ringed is not None:
                assert passed.cells is not None, "a pass over a pool with rings knows its cells"
                self._ops.move_accepted_(pool.all_ringed, pool.ring_slots(passed.cells), *path)
            outputs = outputs.map(lambda values: self._ops.compact(values, verified.accept_index, tree.num_nodes))
        shape = (tree.batch_size, tree.num_nodes)
        return outputs.map(lambda values: values.unflatten(0, shape))

    def _keep_produced(self, batch: RoundBatch, outputs: NodeOutputs[Tensor], verified: DeviceVerified) -> None:
        """Give the values of each row's last accepted node back to their producers."""
        for name, producer in self._producers.items():
            values = outputs[name]
            assert values is not None, "a producer has values of every node"
            producer.keep(batch, of_last_accepted(values, verified))


def nodes_of(batch: RoundBatch, tree: DeviceTree) -> tuple[Tensor | None, int]:
    """Return the nodes that each row verifies, int64 [bs], None if all rows verify all nodes; and the tokens of the
    pass, which are as many or more."""
    if batch.budget is not None:
        assert batch.row_nodes is not None and tree.confidence is not None, "chains of a model may have a budget"
        chosen = choose_rows(tree.confidence, batch.row_nodes, batch.budget.drafts, batch.budget.weights)
        return chosen, batch.num_tokens
    if tree.row_nodes is None:
        return batch.row_nodes, batch.num_tokens
    own = tree.row_nodes if batch.row_nodes is None else torch.minimum(tree.row_nodes, batch.row_nodes)
    return own, tree.num_tokens


def capture_for(draft: Draft, wanted: frozenset[str]) -> Capture:
    return Capture(aux_layers=draft.aux_layers, routed_experts="routed_experts" in wanted)


def draft_hidden(draft: Draft, forward: DecoderOutput) -> Tensor | None:
    """Return the hidden states that the target's pass captured for the draft; None if the draft needs none."""
    if not draft.wants_hidden:
        return None
    return forward.aux if draft.aux_layers else forward.hidden


def of_last_accepted(values: Tensor, verified: DeviceVerified) -> Tensor:
    """Return the values [bs, …] of each row's last accepted node, from compacted ones [bs, nd, …]."""
    return at_column(values, verified.accept_lens.long() - 1)


def first_tokens(
    ops: Ops, logits: Tensor, sampling: SamplingInputs | None, positions: Tensor, known: np.ndarray
) -> Tensor:
    """Return the token after each prompt whose last token is at `positions` int64 [n]; −1 where the target failed.

    `known` int64 [n]: the token that a row's client has been shown there already, −1 where it is to be drawn.
    """
    if sampling is None:
        drawn = ops.best_tokens(logits)
    else:
        probs = ops.target_probs(logits, sampling.temperature, sampling.top_p, sampling.top_k, sampling.filtered)
        coins = ops.coins(sampling.keys, positions[:, None], sampling.seed, Purpose.BONUS_COIN)
        drawn = sample_torch(probs, coins[:, 0])
    if (known < 0).all():
        return drawn
    given = upload(drawn.device, known)
    return torch.where((given >= 0) & (drawn >= 0), given, drawn)


def accept_forced(tree: DeviceTree, target_ids: Tensor, runs: Tensor) -> DeviceVerified:
    """Accept exactly `runs` int64 [bs] drafts (fewer than there are nodes), as if the target had chosen them: simulated
    acceptance.

    They are first children from the root on. Where the tree has no such path of that length they are its first nodes,
    whatever these follow. The host counts on the lengths that it asked for and does not look.
    """
    bs, nodes = tree.tokens.shape
    rows, depths = numbers(bs, runs.device), numbers(tree.width, runs.device)
    current = torch.zeros_like(runs)
    walking = torch.ones_like(runs, dtype=torch.bool)
    columns = []
    for depth in range(tree.width):
        columns.append(torch.where(walking, current, -1))
        child = tree.next_token[rows, current].long()
        walking = walking & (child >= 0) & (runs > depth)
        current = torch.where(walking, child, current)
    path = torch.stack(columns, dim=1)
    accepted = depths <= runs[:, None]
    is_short = (path >= 0).sum(dim=1) <= runs
    path = torch.where(accepted & is_short[:, None], depths, path)
    # A node predicts the next one of the path; the last keeps the target's own choice, the bonus token. Lanes past it
    # write a column that is cut off.
    predict = F.pad(target_ids.clamp(min=0).view(bs, nodes), (0, 1))
    parents = torch.where(accepted[:, 1:], path[:, :-1], nodes)
    predict = predict.scatter(1, parents, tree.tokens.gather(1, path[:, 1:].clamp(min=0)))[:, :nodes]
    accept_index = torch.where(accepted, rows[:, None] * nodes + path, -1)
    return DeviceVerified(accept_index.int(), runs.int() + 1, predict.flatten(), torch.zeros_like(is_short))


def _columns(values: Tensor, width: int) -> Tensor:
    """Return [bs, nd, …] → [bs, width, …]; where the width exceeds nd the rest is zeros and is not read."""
    nodes = values.shape[1]
    if nodes >= width:
        return values[:, :width]
    return torch.cat([values, values.new_zeros((values.shape[0], width - nodes, *values.shape[2:]))], dim=1)
