"""Shadow KV: pools whose cells say who wrote what, and the device's own copy of the request table.

    cell    (stay, position, token, hash of the tokens up to and including it)      stay = one epoch of one row
    row     [0, adopted) the prefix cache's, read only · [adopted, …) this stay's own

A reader says what it expects; a cell that another stay wrote, that was never written, or that holds another prefix is a
violation on the spot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....core.contract.step import Step
from ....core.errors import InvariantViolation
from ....core.kv.moves import KVMovePlan, apply_moves
from ....core.tree.build import VerifyTree
from .language_model import extend_hash, prefix_hashes

NO_STAY = 0


def stay_of(rows: np.ndarray | int, epochs: np.ndarray | int) -> np.ndarray | int:
    """Return one number for (row, epoch): int64."""
    return (np.asarray(rows, dtype=np.int64) << 32) | np.asarray(epochs, dtype=np.int64)


class ShadowPool:
    """The cells of one KV pool of `num_slots` slots, slot 0 being the shared sink."""

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self.stays = np.zeros(num_slots, dtype=np.int64)
        self.positions = np.full(num_slots, -1, dtype=np.int64)
        self.tokens = np.full(num_slots, -1, dtype=np.int64)
        self.hashes = np.zeros(num_slots, dtype=np.uint64)

    def write(
        self, slots: np.ndarray, stays: np.ndarray, positions: np.ndarray, tokens: np.ndarray, hashes: np.ndarray
    ) -> None:
        """Write cells; all arrays have the shape of `slots`. No slot twice, none of them the sink."""
        if slots.size and (slots.min() < 1 or slots.max() >= self.num_slots or np.unique(slots).size != slots.size):
            message = f"{self.name} KV is written at {slots.ravel().tolist()}, not at distinct slots of the pool"
            raise InvariantViolation("ACCEPT-16", message)
        if tokens.size and tokens.min() < 0:
            raise InvariantViolation("RELAY-05", f"a placeholder reaches the {self.name} KV")
        self.stays[slots] = stays
        self.positions[slots] = positions
        self.tokens[slots] = tokens
        self.hashes[slots] = hashes

    def move(self, plan: KVMovePlan) -> None:
        for column in (self.stays, self.positions, self.tokens, self.hashes):
            apply_moves(column, plan)

    def same_content(self, first: np.ndarray, second: np.ndarray) -> bool:
        """Return whether two lists of slots hold the same prefixes, whichever request wrote them."""
        return bool(
            (self.positions[first] == self.positions[second]).all()
            and (self.tokens[first] == self.tokens[second]).all()
            and (self.hashes[first] == self.hashes[second]).all()
        )


@dataclass(slots=True)
class PrefixRead:
    """What a forward pass read of one row's target KV."""

    tokens: np.ndarray  # int64 [length]
    hashes: np.ndarray  # uint64 [length]; hash after each token


class ShadowKV:
    """The device's request table over a target pool and, for algorithms with draft KV, a draft pool."""

    def __init__(self, num_rows: int, row_width: int, num_slots: int, draft_kv: str) -> None:
        self.draft_kv = draft_kv  # "none", "unshifted" or "shifted"
        self.table = np.zeros((num_rows + 1, row_width), dtype=np.int32)
        self.target = ShadowPool("target", num_slots)
        self.draft = ShadowPool("draft", num_slots) if draft_kv != "none" else None
        self.stays = np.zeros(num_rows + 1, dtype=np.int64)
        self.salts = np.zeros(num_rows + 1, dtype=np.uint64)
        self.adopted = np.zeros(num_rows + 1, dtype=np.int64)
        self.kv_lens = np.zeros(num_rows + 1, dtype=np.int64)  # positions with verified target KV
        self.slot_stays = np.zeros(num_slots, dtype=np.int64)  # to whom each slot was handed last

    def open_row(self, row: int, epoch: int, salt: int, num_cached: int) -> None:
        self.stays[row] = stay_of(row, epoch)
        self.salts[row] = salt
        self.adopted[row] = num_cached
        self.kv_lens[row] = num_cached

    def close_row(self, row: int, epoch: int) -> None:
        if self.stays[row] != stay_of(row, epoch):
            raise InvariantViolation("RELAY-03", f"row {row} of epoch {epoch} is released, but it is not that stay's")
        self.stays[row] = NO_STAY

    def write_table(self, rows: np.ndarray, columns: np.ndarray, slots: np.ndarray) -> None:
        """Follow the engine's request table. An entry of a position that is computed already may only be
        replaced by its equal."""
        if slots.size and (slots.min() < 1 or slots.max() >= self.target.num_slots):
            raise InvariantViolation("ALLOC-12", f"the request table gets slots {slots.min()} … {slots.max()}")
        replaced = (columns < self.kv_lens[rows]) & (columns >= self.adopted[rows])
        for i in np.flatnonzero(replaced).tolist():
            row, column = int(rows[i]), int(columns[i])
            old = self.table[row, column : column + 1]
            if old[0] != slots[i] and not self.target.same_content(old, slots[i : i + 1]):
                message = f"position {column} of row {row} moves to slot {slots[i]}, which holds another prefix"
                raise InvariantViolation("RADIX-10", message)
            self.adopted[row] = max(self.adopted[row], column + 1)
        fresh = columns >= self.kv_lens[rows]
        self.slot_stays[slots[fresh]] = self.stays[rows[fresh]]
        self.table[rows, columns] = slots

    def window(self, row: int, start: int, length: int) -> np.ndarray:
        """Return the slots int32 [length] of positions that `row` is about to write:
        its own, in bounds, not the cache's."""
        if start < self.adopted[row]:
            raise InvariantViolation("ALLOC-06", f"row {row} writes position {start} of a shared prefix")
        if start + length > self.table.shape[1]:
            raise InvariantViolation("ALLOC-07", f"row {row} writes past its {self.table.shape[1]} columns")
        slots = self.table[row, start : start + length]
        if (slots < 1).any() or (self.slot_stays[slots] != self.stays[row]).any():
            message = f"row {row} writes positions {start} … {start + length - 1}, of which it has no slots"
            raise InvariantViolation("RELAY-06", message)
        return slots.copy()

    def compute(self, row: int, start: int, tokens: np.ndarray) -> PrefixRead:
        """Write the target KV of a prompt's chunk. Returns the whole prefix up to its end."""
        if start != self.kv_lens[row]:
            message = f"row {row} computes from {start}, its KV ends at {self.kv_lens[row]}"
            raise InvariantViolation("ENGINE-14", message)
        before = self.read_target(row, start)
        salt = int(before.hashes[-1]) if start else int(self.salts[row])
        hashes = prefix_hashes(salt, tokens.tolist())
        slots, positions = self.window(row, start, len(tokens)), np.arange(start, start + len(tokens))
        self.target.write(slots, np.full(len(tokens), self.stays[row]), positions, tokens, hashes)
        self.kv_lens[row] = start + len(tokens)
        return PrefixRead(np.concatenate([before.tokens, tokens]), np.concatenate([before.hashes, hashes]))

    def write_draft(self, row: int, start: int, tokens: np.ndarray, hashes: np.ndarray, next_token: int) -> None:
        """Write the draft KV of positions from `start` on; `next_token` follows them (shifted drafts hold it)."""
        if self.draft_kv == "shifted":
            tokens = np.append(tokens[1:], next_token)
            hashes = extend_hash(hashes, tokens)
        slots, positions = self.window(row, start, len(tokens)), np.arange(start, start + len(tokens))
        self.draft.write(slots, np.full(len(tokens), self.stays[row]), positions, tokens, hashes)

    def write_tree(
        self, rows: np.ndarray, lengths: np.ndarray, root_hashes: np.ndarray, tree: VerifyTree, windows: np.ndarray
    ) -> np.ndarray:
        """Write the target KV of verify trees side by side. Returns the prefix hash of every node, uint64 [bs, nd]."""
        bs, nodes = tree.parents.shape
        tokens = tree.tokens.reshape(bs, nodes).astype(np.int64)
        hashes, depths = np.zeros((bs, nodes), dtype=np.uint64), np.zeros((bs, nodes), dtype=np.int64)
        hashes[:, 0] = root_hashes
        for node in range(1, nodes):
            parent = np.maximum(tree.parents[:, node], 0)  # padding nodes hang below the root, unreachable
            hashes[:, node] = extend_hash(hashes[np.arange(bs), parent], tokens[:, node])
            depths[:, node] = depths[np.arange(bs), parent] + 1
        stays = np.repeat(self.stays[rows][:, None], nodes, axis=1)
        self.target.write(windows, stays, lengths[:, None] + depths, tokens, hashes)
        return hashes

    def read_target(self, row: int, length: int) -> PrefixRead:
        """Attend to positions [0, length): every cell must be this row's and continue the prefix before it."""
        slots = self.table[row, :length]
        pool = self.target
        self._check_stays(pool, row, slots)
        hashes, tokens = pool.hashes[slots], pool.tokens[slots]
        before = np.concatenate([self.salts[row : row + 1], hashes[:-1]])
        wrong = (pool.positions[slots] != np.arange(length)) | (tokens < 0) | (extend_hash(before, tokens) != hashes)
        if wrong.any():
            position = int(wrong.argmax())
            message = f"slot {slots[position]} of row {row} does not hold position {position} of its prefix"
            raise InvariantViolation("ACCEPT-06", message)
        return PrefixRead(tokens, hashes)

    def read_draft(self, row: int, prefix: PrefixRead, next_token: int) -> None:
        """Check that the draft attends to as many positions as `prefix` has;
        `next_token` follows the prefix (shifted drafts hold it)."""
        length = len(prefix.tokens)
        slots = self.table[row, :length]
        pool = self.draft
        self._check_stays(pool, row, slots)
        tokens, hashes = prefix.tokens, prefix.hashes
        if self.draft_kv == "shifted":
            tokens = np.concatenate([tokens[1:], [next_token]])
            hashes = extend_hash(hashes, tokens)
        wrong = (pool.positions[slots] != np.arange(length)) | (pool.tokens[slots] != tokens)
        wrong |= pool.hashes[slots] != hashes
        if wrong.any():
            position = int(wrong.argmax())
            message = f"draft KV of row {row} at position {position} does not belong to its prefix"
            raise InvariantViolation("ACCEPT-06", message)

    def _check_stays(self, pool: ShadowPool, row: int, slots: np.ndarray) -> None:
        own = slots[self.adopted[row] :]
        if (slots < 1).any() or (pool.stays[own] != self.stays[row]).any():
            message = f"row {row} reads {pool.name} KV at slots {slots.tolist()}, which it did not all write"
            raise InvariantViolation("RELAY-03", message)


class ShadowStates:
    """The recurrent states of rows. A state is the hash of the tokens that it has taken in."""

    def __init__(self, num_rows: int) -> None:
        self.hashes: np.ndarray = np.zeros(num_rows + 1, dtype=np.uint64)
        self.lengths: np.ndarray = np.zeros(num_rows + 1, dtype=np.int64)  # tokens that were taken in

    def run_chunk(self, row: int, empty: int, start: int, tokens: np.ndarray) -> np.ndarray:
        """Take in a prompt's chunk, at position 0 from the hash of the empty text on.
        Returns the hash after each token, uint64 [n]."""
        hashes = prefix_hashes(int(self.hashes[row]) if start else empty, tokens.tolist())
        self.hashes[row] = hashes[-1]
        self.lengths[row] = start + len(tokens)
        return hashes

    def keep(self, rows: np.ndarray, hashes: np.ndarray, accept_index: np.ndarray, accept_lens: np.ndarray) -> None:
        """Take in the accepted path of each row: `hashes` uint64 [bs, nd] are those after the nodes."""
        last = accept_index[np.arange(len(rows)), accept_lens - 1]
        self.hashes[rows] = hashes.ravel()[last]
        self.lengths[rows] += accept_lens


def check_launch(
    step: Step, earlier: Sequence[tuple[Step, int]], kv: ShadowKV, table: np.ndarray, alloc_len: int
) -> None:
    """Raise InvariantViolation if a step disturbs one in flight.

    `earlier` are the steps in flight, each with the rounds that it may still run. `table` is the request table as
    launched, `alloc_len` the most slots by which one round extends a row.
    """
    if step.prefill is None and step.decode is None:
        raise InvariantViolation("ENGINE-11", f"step {step.step_id} has nothing to do")
    if step.decode is not None and step.prefill is not None and step.decode.max_rounds != 1:
        raise InvariantViolation("SIM-12", f"step {step.step_id} mixes a prefill with a multi-step")
    joining = {join.row for join in step.joins} | {row for row, _ in step.released}
    rounds_ahead = 0
    for other, rounds in earlier:
        if other.max_rounds > 1 and step.max_rounds > 1:
            raise InvariantViolation("SIM-12", f"steps {other.step_id} and {step.step_id} are both blocks")
        rounds_ahead += rounds
        for row, slots in _write_windows(other, rounds_ahead * alloc_len, kv, table):
            if row in joining:
                raise InvariantViolation("RELAY-01", f"row {row} changes owner under step {other.step_id}")
            disturbed = np.isin(step.table_writes.slots, slots)
            if disturbed.any():
                slot = step.table_writes.slots[disturbed.argmax()]
                message = f"slot {slot} is handed out while step {other.step_id} may write it for row {row}"
                raise InvariantViolation("RELAY-01", message)


def _write_windows(step: Step, ahead: int, kv: ShadowKV, table: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (row, slots) that a launched step may write, up to `ahead` positions past the length of a row."""
    if step.prefill is not None:
        part = step.prefill
        for row, start, length in zip(part.rows.tolist(), part.starts.tolist(), part.lens.tolist(), strict=True):
            yield row, table[row, start : start + length]
    if step.decode is not None:
        part = step.decode
        stays = stay_of(part.rows, part.epochs)
        for row, stay, start in zip(part.rows.tolist(), stays.tolist(), part.seq_lens.tolist(), strict=True):
            # A row that has run is at its own length; one whose prefill is still to come begins where the plan says.
            known = kv.stays[row] == stay
            length = max(start, int(kv.kv_lens[row])) if known else start
            yield row, table[row, start : length + ahead]
