"""Decode rounds for all rows at once, as columns: a round costs a constant number of vector operations.

One column entry per request-table row. For a decoding request

    kv_len = prompt + emitted − 1        (the last emitted token, root of the next tree, has no KV yet)
    end_len = prompt + max_tokens − 1    so `end_len − kv_len` tokens may still be emitted
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from ..adaptive import AdaptiveController
from ..adaptive.lengths.confidence import RowBudgets
from ..contract.arrays import BoolArray, Int32Array, Int64Array, total_of
from ..contract.request import cut_runs
from ..contract.step import DecodeResult, DecodeStep, DraftBudget, RoundShape
from ..errors import InvariantViolation
from ..kv.request_table import ceil_to_page, reserve_per_multi_step
from ..kv.store import KVStore
from .config import VERIFY_ALL, VERIFY_REMAINING, EngineConfig, EngineSizes
from .flights import PlannedRounds, StepsInFlight

_NO_ROWS = np.empty(0, dtype=np.intp)
_NO_SLOTS = np.empty(0, dtype=np.int64)


RowLengths = Callable[[RoundShape, Int64Array], Int32Array | None]
"""A rule by which rows verify unequal numbers of nodes. It takes the shape of the round and the most tokens, int64
[bs], that each row may still emit, and returns `DecodeStep.row_nodes`."""


def all_nodes(shape: RoundShape, left: Int64Array) -> None:
    """Let all rows verify all nodes."""


def remaining_nodes(shape: RoundShape, left: Int64Array) -> Int32Array | None:
    """Let no row verify more nodes than tokens that it may still emit. The first nodes of a tree do not hold its
    longest path, so only chains are shortened."""
    if shape.topk > 1 or left.min() >= shape.nodes:
        return None
    return left.clip(1, shape.nodes).astype(np.int32)


BudgetRule = Callable[[RoundShape], DraftBudget | None]
"""A rule by which the device chooses the nodes of rows. It takes the shape of the round that is planned."""


def no_budget(shape: RoundShape) -> None:
    """Leave nothing to the device."""


ROW_LENGTHS: Mapping[str, RowLengths] = {VERIFY_ALL: all_nodes, VERIFY_REMAINING: remaining_nodes}


class Presence(NamedTuple):
    """Which rows of a batch belonged to their requests while its rounds ran."""

    last: BoolArray  # [bs]: in the last round
    before: BoolArray  # [bs]: in the rounds before it
    is_complete: bool  # all rows, in all rounds

    def by_round(self, rounds: int) -> BoolArray:
        """Return the rows of each of so many rounds, bool [rounds, bs]."""
        present = np.empty((rounds, len(self.last)), dtype=bool)
        present[:-1], present[-1] = self.before, self.last
        return present


class CountedRounds(NamedTuple):
    """The tokens and ends that the rounds of a decode result have brought."""

    kept: np.ndarray  # int64 [rounds, bs]: tokens delivered; 0 for departed rows
    present: Presence
    ended: np.ndarray  # int64 [n]: columns (indices into rows) of the requests that are over
    stopped: np.ndarray  # bool [bs]
    kv_before: np.ndarray  # int64 [bs]: KV length at the start of the first round
    kv_before_last: np.ndarray  # int64 [bs]: KV length at the start of the last round


class DecodeRounds:
    """Reserves and counts decode rounds."""

    def __init__(
        self, config: EngineConfig, sizes: EngineSizes, controller: AdaptiveController, store: KVStore
    ) -> None:
        self.config = config
        self.sizes = sizes
        self.controller = controller
        self.store = store
        self.row_lengths: RowLengths = ROW_LENGTHS[config.verify]
        self.budgets: RowBudgets = controller.budgets
        self.budget_for: BudgetRule = self.budgets.budget_for
        self.kv_len: Int64Array = np.zeros(config.num_rows + 1, dtype=np.int64)
        self.end_len: Int64Array = np.zeros(config.num_rows + 1, dtype=np.int64)
        self.live: BoolArray = np.zeros(config.num_rows + 1, dtype=bool)
        self.num_departed: int = 0  # rows removed so far; it has grown since a plan if a row of the plan was removed
        self.in_flight: StepsInFlight = StepsInFlight()
        self.padded: set[int] = set()  # rows whose last chunk is in flight and takes as much as a round
        self._members: list[int] = []
        self._resting: set[int] = set()  # rows that surely end with a step in flight: they take part in no later plan
        self._rows = np.empty(0, dtype=np.int32)
        self._index = np.empty(0, dtype=np.intp)
        self._everyone = np.ones(config.max_running, dtype=bool)
        self._all_present = Presence(self._everyone, self._everyone, True)  # of a batch as large as the last one
        self._epochs = np.empty(0, dtype=np.int64)
        self._stale = False
        self.num_with_stop_strings: int = 0  # rows whose end only the host can see; they cannot run in multi-steps
        self._has_stop_strings = np.zeros(config.num_rows + 1, dtype=bool)
        self._takes_what_is_launched = config.overlap and config.rules.has_launched_slots_alone
        self._slack_of_tokens = 0
        self._multi_step_slack = self._slots_of_a_plan() if config.overlap else 0

    # -- membership ---------------------------------------------------------------------------------------------------

    def add(self, row: int, kv_len: int, end_len: int, has_stop_strings: bool) -> None:
        """Add a row to the batch from the next step on, because its last chunk is launched or its KV has arrived."""
        self.kv_len[row] = kv_len
        self.end_len[row] = end_len
        self.live[row] = True
        self._members.append(row)
        self._stale = True
        self._has_stop_strings[row] = has_stop_strings
        self.num_with_stop_strings += has_stop_strings

    def remove(self, row: int) -> None:
        """Remove a row whose request has left it. Results of steps in flight for this row are dropped."""
        self.live[row] = False
        if row in self._resting:
            self._resting.remove(row)
        else:
            self._members.remove(row)
        self._stale = True
        self.num_departed += 1
        self.num_with_stop_strings -= int(self._has_stop_strings[row])

    def rest(self) -> None:
        """Let rows rest that surely end with the steps in flight, if the rules say so."""
        if not self.config.rules.rests_at_sure_end:
            return
        index = self.rows.astype(np.intp)
        ends = self.kv_len[index] + self.in_flight.decode_again(self.rows) >= self.end_len[index]
        for row in index[ends].tolist():
            self._members.remove(row)
            self._resting.add(row)
            self._stale = True

    @property
    def rows(self) -> np.ndarray:
        """The batch, int32 [bs], in the order of joining. It is never written in place: steps share it."""
        if self._stale:
            self._rows = np.array(self._members, dtype=np.int32)
            self._index = self._rows.astype(np.intp)
            self._epochs = self.store.table.epochs[self._index]
            self._stale = False
        return self._rows

    # -- plan ---------------------------------------------------------------------------------------------------------

    def reserve(self, rounds_in_flight: int, max_rounds: int) -> PlannedRounds | None:
        """Reserve slots for the next round, or for a multi-step of up to `max_rounds`. Returns None if not even one
        round fits.

        `rounds_in_flight`: launched and not committed. A single round may evict from the prefix cache.
        """
        rows, index = self.rows, self._index
        kv_len, allocated = self.kv_len[index], self.store.allocated[index]
        kv_tokens = total_of(kv_len)
        left = None if self.row_lengths is all_nodes else self.end_len[index] - kv_len
        self.budgets.look(index, self._epochs, kv_tokens, None if left is None else left - 1)
        steps = self.controller.activate_step_by_batch(len(rows), kv_tokens)
        if max_rounds > 1:
            max_rounds = self._rounds_of_a_multi_step(max_rounds, rounds_in_flight, kv_len, kv_tokens, allocated)
        if self.store.groups:
            self.store.groups.move(index, self._passed(kv_len))
        targets = self._targets_of_rounds(kv_len, rounds_in_flight, max_rounds)
        if not self.config.rules.grow(self.store, index, targets):
            return None
        shape = self.controller.round_shape(steps, len(rows))
        max_seq_lens = kv_len + rounds_in_flight * self.sizes.alloc_len if rounds_in_flight else kv_len
        row_nodes = None if left is None else self.row_lengths(shape, left)
        budget = self.budget_for(shape)
        step = DecodeStep(rows, self._epochs, kv_len, max_seq_lens, shape, max_rounds, row_nodes, budget)
        return PlannedRounds(step, index, allocated)

    def _rounds_of_a_multi_step(
        self, asked: int, rounds_in_flight: int, kv_len: Int64Array, kv_tokens: int, allocated: Int64Array
    ) -> int:
        """Return how many of the `asked` rounds, two or more, a multi-step may have: up to the controller's next
        decision, in the free slots, and in the width of the longest row. One it may have in any case.

        Each of the three bounds counts the rounds in flight, too.
        """
        most = asked + rounds_in_flight
        most = min(most, self.controller.rounds_to_next_decision(len(kv_len)))
        if most > rounds_in_flight + 1:
            most = min(most, self._rounds_in_free_slots(kv_tokens, allocated), self._rounds_in_width(kv_len))
        return max(most - rounds_in_flight, 1)

    def _rounds_in_width(self, kv_len: Int64Array) -> int:
        """Return how many rounds the longest row has room for in the request table."""
        return (self.sizes.row_width - int(kv_len[kv_len.argmax()])) // self.sizes.alloc_len

    def _rounds_in_free_slots(self, kv_tokens: int, allocated: Int64Array) -> int:
        """Return for how many rounds of the batch, those in flight included, there are free slots and those that its
        rows hold. In overlap mode the slots that the next plan may need are left free."""
        batch_size, page_size = len(allocated), self.config.page_size
        free = self.store.allocator.num_free_slots - self._multi_step_slack
        unaligned = batch_size * (page_size - 1)  # the last page of a row is taken whole
        if self.config.groups:
            free = self._tokens_in(free)
        held = total_of(allocated)
        return (free - kv_tokens + held - unaligned) // (batch_size * self.sizes.alloc_len)

    def _passed(self, kv_len: Int64Array) -> Int64Array:
        """Return the tokens of each row that are committed, and before which windows may be given back: fewer than
        `kv_len` where the last chunk of a prompt is in flight."""
        if self.store.at_once:
            return kv_len
        passed = kv_len.copy()
        for chunk in (chunk for flight in self.in_flight for chunk in flight.chunks):
            passed[self.rows == chunk.record.row] = chunk.start
        return passed

    def _tokens_in(self, free: int) -> int:
        """Return for how many tokens there are `free` slots and the units that they take of other groups of layers."""
        groups, size = self.store.groups, self.config.page_size
        tokens = int((free - len(groups.all) * size) / (1 + groups.sizes.per_slot))
        own = groups.num_free_pages
        return tokens if own is None else min(tokens, own * size - self._slack_of_tokens)

    def _targets_of_rounds(self, kv_len: Int64Array, rounds_in_flight: int, max_rounds: int) -> Int64Array:
        """Return the slots of each row, in whole pages, for up to `max_rounds` rounds behind those in flight."""
        sizes = self.sizes
        reserve = reserve_per_multi_step(sizes.alloc_len, max_rounds, rounds_in_flight) + sizes.lookahead
        if reserve <= sizes.reserve:
            return self._targets(kv_len, sizes.reserve, max_rounds == 1)
        targets = self._targets(kv_len, reserve, max_rounds == 1)
        if int(kv_len[kv_len.argmax()]) + reserve > sizes.row_width:
            # Beyond R the width of the row is the bound: a request ends within it, and one more round may follow before
            # the engine knows the end.
            targets = np.minimum(targets, sizes.row_width)
        return targets

    def targets_after(self, num_plans: int) -> Int64Array:
        """Return the slots, int64 [bs], that each row of the batch has at most once so many plans have each reserved a
        single round for it. The next of them is one of these plans."""
        kv_len = self.kv_len[self.rows]
        if not num_plans:
            return np.zeros_like(kv_len)
        reserve = self.sizes.reserve + (num_plans - 1) * self.sizes.alloc_len
        return np.minimum(self._targets(kv_len, reserve, num_plans == 1), self.sizes.row_width)

    def _targets(self, kv_len: Int64Array, reserve: int, is_next: bool) -> Int64Array:
        """Return the slots of each row, in whole pages, that go `reserve` beyond its committed length. `is_next`: they
        are for the next round alone."""
        targets = kv_len + reserve
        if self._takes_what_is_launched and is_next:
            targets -= np.where(self.in_flight.decode_again(self.rows), 0, self.sizes.alloc_len)
            if self.padded:
                targets += np.where(np.isin(self.rows, list(self.padded)), self.sizes.alloc_len - 1, 0)
        return targets if self.config.page_size == 1 else self._in_pages(targets)

    def _in_pages(self, slots: Int64Array) -> Int64Array:
        return ceil_to_page(slots, self.config.page_size) if self.config.page_size > 1 else slots

    def _slots_of_a_plan(self) -> int:
        """Return an upper bound of the slots that the plan after a multi-step could take: chunks, newcomers, and the
        reserves of all rows.
        """
        config, sizes = self.config, self.sizes
        newcomers = min(config.max_running, config.chunk_size)
        reserve = sizes.reserve + config.page_size
        of_tokens = config.chunk_size + (newcomers + 2 * config.max_running) * reserve
        slots = of_tokens + sizes.row_width + int(config.rules.watermark * self.store.allocator.num_total_slots)
        if not config.groups:
            return slots
        # What it takes beside them: units of the tokens, and states. A unit more of each may be rounded up. A row has
        # at most one unit of a window for each page.
        self._slack_of_tokens = min(of_tokens, (config.max_running - 1) * sizes.row_width) + sizes.row_width
        per_newcomer = config.group_sizes.of(0) + len(config.groups) * config.page_size
        return slots + newcomers * per_newcomer + math.ceil(config.group_sizes.per_slot * slots)

    # -- commit -------------------------------------------------------------------------------------------------------

    def count(
        self, planned: PlannedRounds, result: DecodeResult, num_departed_at_plan: int, leaving: Collection[int]
    ) -> CountedRounds:
        """Apply the finish rule and move the committed lengths of the live rows. Raises SIM-12 for a result of another
        shape.

        The requests of the rows in `leaving` left while the multi-step ran. For these rows only the rounds before the
        last one count.
        """
        step, rows = planned.decode, planned.index
        lens, rounds = result.accept_lens, result.rounds
        if not 1 <= rounds <= step.max_rounds or lens.shape != (rounds, len(step.rows)):
            message = f"{rounds} rounds of shape {lens.shape}, at most {step.max_rounds} planned"
            raise InvariantViolation("SIM-12", message)
        kv_before = kv_before_last = self.kv_len[rows]
        if rounds > 1:
            # A plain round emits one token: nothing has to be added up.
            plain = step.shape.steps == 0
            kv_before_last = kv_before + (rounds - 1 if plain else np.add.reduce(lens[:-1], axis=0, dtype=np.int64))
        self._check_nodes(step, result)
        stops = None if result.stop_index is None else result.stop_index[-1]
        runs = cut_runs(lens[-1], stops, self.end_len[rows] - kv_before_last)
        kept, ended = runs.kept[None, :], runs.ended
        if rounds > 1:
            kept = lens.astype(np.int64)
            kept[-1] = runs.kept
        present = self._presence(rows, num_departed_at_plan, leaving)
        if not present.is_complete:
            ended = ended & present.last
            kept = kept * present.by_round(rounds)
        kv_after = kv_before_last + kept[-1]
        emitted = kept[0] if rounds == 1 else kv_after - kv_before
        if not present.is_complete:
            emitted = emitted[present.last]
        if emitted.size and emitted[emitted.argmin()] < rounds:
            raise InvariantViolation("ACCEPT-02", f"a live row emitted fewer than {rounds} tokens")
        self.kv_len[rows] = kv_after if present.is_complete else np.where(present.before, kv_after, kv_before)
        return CountedRounds(kept, present, ended.nonzero()[0], runs.stopped, kv_before, kv_before_last)

    @staticmethod
    def _check_nodes(step: DecodeStep, result: DecodeResult) -> None:
        """Raise InvariantViolation if rows emit more tokens than they verify, or verify what they were not given."""
        nodes, lens = result.nodes_of(step), result.accept_lens
        if step.budget is not None:
            shape = (result.rounds, len(step.rows))
            if result.row_nodes is None or result.row_nodes.shape != shape or result.confidence is None:
                raise InvariantViolation("DRAFT-02", "a step with a budget has no chosen nodes and confidences")
            if result.confidence.shape != (*shape, step.shape.steps):
                message = f"confidences of shape {result.confidence.shape}; expected {(*shape, step.shape.steps)}"
                raise InvariantViolation("DRAFT-02", message)
            most = step.shape.nodes if step.row_nodes is None else step.row_nodes
            if (result.row_nodes < 1).any() or (result.row_nodes > most).any():
                message = f"rows verify {result.row_nodes.tolist()} nodes, at most {np.asarray(most).tolist()} reserved"
                raise InvariantViolation("DRAFT-03", message)
            spent = result.row_nodes.sum(axis=1, dtype=np.int64)
            if (spent > step.num_verify_tokens).any():
                message = f"{spent.max()} nodes are verified of {shape[1]} rows with {step.budget.drafts} drafts"
                raise InvariantViolation("DRAFT-02", message)
        if nodes is not None and (lens > nodes).any():
            message = f"accept lengths {lens.max(axis=0).tolist()} of rows that verify {nodes.tolist()} nodes"
            raise InvariantViolation("ACCEPT-02", message)

    def _presence(self, rows: np.ndarray, num_departed_at_plan: int, leaving: Collection[int]) -> Presence:
        if num_departed_at_plan != self.num_departed:
            last = self.live[rows]
            if np.count_nonzero(last) < len(rows):
                return Presence(last, last | np.isin(rows, list(leaving)) if leaving else last, False)
        if len(self._all_present.last) != len(rows):
            everyone = self._everyone[: len(rows)]
            self._all_present = Presence(everyone, everyone, True)
        return self._all_present

    def cut(self, planned: PlannedRounds, counted: CountedRounds, cuts: Mapping[int, int]) -> CountedRounds:
        """End rows at a stop string: keep the first `cuts[i]` tokens of column i. The step has one round."""
        for i, length in cuts.items():
            counted.kept[0, i] = length
            counted.stopped[i] = True
            self.kv_len[planned.index[i]] = counted.kv_before[i] + length
        return counted._replace(ended=np.union1d(counted.ended, list(cuts))) if cuts else counted

    def held_ahead(self) -> tuple[np.ndarray, Int64Array]:
        """Return the rows of a running multi-step, intp [n], and by how many slots, int64 [n], each holds more than its
        first round, planned alone, would hold.

        A plan during a multi-step takes these slots as free. The multi-step has left enough of them for what a plan
        takes.
        """
        for flight in self.in_flight:
            planned = flight.planned
            if planned is not None and planned.decode.max_rounds > 1:
                single = self._in_pages(planned.decode.seq_lens + self.sizes.reserve)
                held = self.store.allocated[planned.index] - np.maximum(single, planned.allocated)
                return planned.index, np.maximum(held, 0)
        return _NO_ROWS, _NO_SLOTS

    @property
    def num_ahead(self) -> int:
        """The slots that `held_ahead` counts, with those beside them."""
        _, ahead = self.held_ahead()
        num_slots = total_of(ahead)
        if not self.store.groups:
            return num_slots
        return num_slots + self.store.groups.slots_of_pages(num_slots // self.config.page_size)

    def release_unused(
        self, planned: PlannedRounds, result: DecodeResult, kv_before_last: Int64Array, in_later_step: BoolArray
    ) -> None:
        """Release a multi-step's surplus slots. Then each row holds as many slots as after rounds that were planned
        singly.

        That is R past the length that the row's newest single plan would have known. In synchronous mode this is the
        length before the last round, in overlap mode the length one round earlier. If a step in flight covers the row
        (`in_later_step`), the row was planned once more.
        """
        known = kv_before_last
        if self.config.overlap and np.count_nonzero(in_later_step) < len(in_later_step):
            earlier = planned.decode.seq_lens if result.rounds == 1 else kv_before_last - result.accept_lens[-2]
            known = np.where(in_later_step, kv_before_last, earlier)
        held = np.maximum(planned.allocated, self._in_pages(known + self.sizes.reserve))
        self.store.trim(planned.index, held)

    def teach_controller(self, step: DecodeStep, result: DecodeResult, present: Presence) -> None:
        """Tell the controller how many drafts each round accepted, without the rows that had left, and without those
        that did not verify all drafts."""
        correct = result.accept_lens - 1
        nodes = result.nodes_of(step)
        if result.row_nodes is not None:
            self.budgets.take(step, result, present.last)
            for counts, own, rows in zip(correct, result.row_nodes, present.by_round(result.rounds), strict=True):
                self.controller.on_chosen(counts[rows], own[rows], step.shape.steps)
            return
        if nodes is not None:
            is_whole = (nodes == step.shape.nodes).reshape(-1, len(step.rows))
            present = Presence(present.last & is_whole[-1], present.before & is_whole.all(axis=0), False)
        if present.is_complete:
            self.controller.on_verify_rounds(correct, len(step.rows), step.shape.steps)
            return
        for counts, rows in zip(correct, present.by_round(result.rounds), strict=True):
            self.controller.on_verify_complete(counts[rows], len(step.rows), step.shape.steps)

    def check(self, steps: list[DecodeStep]) -> None:
        """Raise InvariantViolation RELAY-06 unless every row has the slots that decode steps in flight may write."""
        rows = self.rows
        unseen = sum(
            (step.max_rounds * np.isin(rows, step.rows) for step in steps), np.zeros(len(rows), dtype=np.int64)
        )
        needed = self.kv_len[rows] + unseen * self.sizes.alloc_len
        short = self.store.allocated[rows] < np.minimum(needed, self.sizes.row_width)
        if short.any():
            message = f"row {rows[short.argmax()]} has fewer slots than launched rounds may write"
            raise InvariantViolation("RELAY-06", message)
