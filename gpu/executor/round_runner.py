"""The next round of a launched step: from a captured graph if there is one for its shape, otherwise operation by
operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...core.contract.hidden import ForwardPhase, check_hidden
from ...core.contract.step import DecodeStep
from ...core.errors import ConfigError, InvariantViolation
from ..batch.uploads import upload, uploads_to
from ..draft.port import BudgetInputs, RoundBatch
from .graphs import RoundGraphs, RoundKind
from .parts import RowParts
from .relay import publish_cells
from .round import DecodeRound, PhaseClock, RoundResult
from .rows import HostBudget, HostSampling
from .running import PendingRound, to_host
from .shaping import Changed


class RoundRunner:
    """Runs rounds of one executor, whose parts these are. `padded_sizes` are the batch sizes, ascending, by which
    kernels choose their blocks; `alloc_len` is the most KV slots that a round may write per row."""

    def __init__(
        self,
        round: DecodeRound,
        graphs: RoundGraphs,
        parts: RowParts,
        *,
        alloc_len: int,
        padded_sizes: Sequence[int],
        device: torch.device,
        debug: bool,
    ) -> None:
        self.round = round
        self.graphs = graphs
        self.future_map = parts.future_map
        self._rows = parts.rows
        self._forced = parts.forced
        self._shaping = parts.shaping
        self._limits = parts.limits
        self.algorithm = parts.algorithm
        self._alloc_len = alloc_len
        self._padded_sizes = padded_sizes
        self.device = device
        self._debug = debug

    def enqueue(self, part: DecodeStep, rounds_done: int, clock: PhaseClock) -> PendingRound:
        """Put the next round of a decode step into the stream, after `rounds_done` rounds of it, and begin to copy its
        results to the host. `clock` takes the time of each phase."""
        nodes, row_nodes = part.shape.nodes, unequal_nodes(part)
        width: int | np.ndarray = min(self.algorithm.accept_width(part.shape.steps, nodes), nodes)
        if row_nodes is not None:
            width = np.minimum(width, row_nodes)
        forced = self._forced.draw(part.rows, self._rows.requests_of(part.rows), width)
        sampling = self._rows.sampling(part.rows)
        wanted = self._rows.wanted(part.rows)
        changed = Changed.NOWHERE if forced is not None else self._shaping.changed(part.rows)
        variant = RoundKind.of(sampling), bool(wanted), changed
        num_tokens = None if row_nodes is None else part.num_verify_tokens
        budget = self._budget(part, forced)
        captured = self.graphs.find(part.shape, len(part.rows), *variant, num_tokens, budget is not None)
        if self.graphs.are_on:
            self.graphs.num_missed += captured is None
            if self.graphs.on_round is not None:
                self.graphs.on_round(captured is not None, len(part.rows))
        if captured is not None:
            self.future_map.pass_through(part.rows, part.epochs)
            if self._debug:
                self._check_lengths(part, rounds_done, self.future_map.buffers["lengths"][part.rows])
            with clock.phase("graph"):
                trees = self.round.draft.propose_on_host(part.rows, part.shape, captured.size)
                make_masks = partial(self._shaping.masks, part.rows)
                result = captured.run(part.rows, sampling, forced, wanted, trees, make_masks, row_nodes, budget)
        else:
            lengths = row_nodes, budget
            result = self._run_uncaptured(part, lengths, rounds_done, clock, sampling, forced, wanted, changed)
        with clock.phase("relay"):
            return to_host(result.copied, result.outputs, result.packed, len(part.rows))

    def _budget(self, part: DecodeStep, forced: np.ndarray | None) -> HostBudget | None:
        """Return the budget by which the device chooses the lengths of rows. Raises ConfigError where acceptance is
        simulated: its confidences would say nothing of it."""
        if part.budget is None:
            return None
        if forced is not None:
            raise ConfigError.of("<arguments>", "acceptance", "must be the target's where the device chooses lengths")
        return HostBudget.of(part.budget, part.shape.steps)

    def _run_uncaptured(
        self,
        part: DecodeStep,
        row_lengths: tuple[np.ndarray | None, HostBudget | None],
        rounds_done: int,
        clock: PhaseClock,
        sampling: HostSampling | None,
        forced: np.ndarray | None,
        wanted: frozenset[str],
        changed: Changed,
    ) -> RoundResult:
        capture_mode = self.algorithm.capture_hidden_mode(ForwardPhase.DRAFT)
        with clock.phase("relay"):
            lengths, relayed = self.future_map.resolve(part.rows, part.epochs)
            check_hidden(relayed.get("hidden_states"), capture_mode, "relay")
            batch = self._batch(part, rounds_done, lengths, relayed["bonus_tokens"])
            row_nodes, budget = row_lengths
            if row_nodes is not None:
                on_device = upload(self.device, row_nodes)
                batch = replace(batch, row_nodes=on_device, num_tokens=part.num_verify_tokens)
            if budget is not None:
                batch = replace(batch, budget=BudgetInputs(*uploads_to(self.device).send(*budget)))
            inputs, runs = self._rows.on_device(sampling), None if forced is None else upload(self.device, forced)
        longest = None if self.device.type == "cpu" else self.algorithm.accept_width(part.shape.steps, part.shape.nodes)
        changes = None if changed is Changed.NOWHERE else partial(self._shaping.changes, part.rows)
        result = self.round.run(batch, relayed, inputs, wanted, runs, longest, clock.phase, changes)
        with clock.phase("relay"):
            check_hidden(result.relay.get("hidden_states"), capture_mode, "stash")
            publish_cells(self.future_map, part.rows, part.epochs, result.lengths, result.relay)
        return result

    def _batch(self, part: DecodeStep, rounds_done: int, lengths: Tensor, roots: Tensor) -> RoundBatch:
        rows = upload(self.device, part.rows.astype(np.int64))
        batch = self._limits.batch(part.rows, rows, lengths, roots, part.shape)
        padded_rows = next((size for size in self._padded_sizes if size >= len(part.rows)), len(part.rows))
        # On a GPU as in a captured round: its kernels split the KV for the greatest length that can occur.
        max_len = batch.max_len
        if self.device.type == "cpu":
            max_len = int(lengths.max())
            if self._debug:
                self._check_lengths(part, rounds_done, lengths)
        return replace(batch, max_len=max_len, padded_rows=padded_rows)

    def _check_lengths(self, part: DecodeStep, rounds_done: int, on_device: Tensor) -> None:
        lengths = on_device.cpu().numpy()
        most = part.max_seq_lens + rounds_done * self._alloc_len
        if (lengths < part.seq_lens + rounds_done).any() or (lengths > most).any():
            message = f"lengths {lengths.tolist()} are outside {part.seq_lens.tolist()} … {most.tolist()}"
            raise InvariantViolation("RELAY-06", message)


def unequal_nodes(part: DecodeStep) -> np.ndarray | None:
    """Return how many nodes each row verifies, with a budget at most, int64 [bs]; None if all rows verify all nodes."""
    nodes = part.shape.nodes
    if part.budget is None and (part.row_nodes is None or int(part.row_nodes.min()) >= nodes):
        return None
    return np.full(len(part.rows), nodes, np.int64) if part.row_nodes is None else part.row_nodes.astype(np.int64)
