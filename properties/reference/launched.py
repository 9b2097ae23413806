"""What a launched step must leave alone: everything that a step in flight may still write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...core.contract.step import Step
from ...core.errors import InvariantViolation
from .shadow import ShadowKV, stay_of


def check_launch(
    step: Step, earlier: Sequence[tuple[Step, int]], kv: ShadowKV, table: np.ndarray, alloc_len: int
) -> None:
    """Raise InvariantViolation if a step disturbs one in flight.

    `earlier` are the steps in flight, each with the rounds that it may still run; `table` is the request table as launched, and
    `alloc_len` the most slots that a round moves a row on by.
    """
    if step.prefill is None and step.decode is None:
        raise InvariantViolation("ENGINE-11", f"step {step.step_id} has nothing to do")
    if step.decode is not None and step.prefill is not None and step.decode.max_rounds != 1:
        raise InvariantViolation("SIM-12", f"step {step.step_id} mixes a prefill with a block of rounds")
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
                raise InvariantViolation(
                    "RELAY-01", f"slot {slot} is handed out while step {other.step_id} may write it for row {row}"
                )


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
