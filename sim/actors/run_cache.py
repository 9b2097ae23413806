"""Accept lengths of simulated rounds, each looked up with one gather: the longest runs are drawn ahead, a window per
row.

A process is a pure function of (request, output position). So the next few hundred answers of a request can be drawn in
one vectorised pass before they are needed, and dropped unread when it ends. A round then costs a few NumPy calls,
whatever the process is.

    row r:   [ start … start + width )  runs + 1 of request `key`            offset = position − start
             anchor[r] = hash(key) + start,  so that  hash(key) + position − anchor[r]  is the offset, or, if the row
             holds another request or another window, a number ≥ width: one subtraction checks both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...core.acceptance.process import AcceptanceProcess
from ...core.errors import InvariantViolation

_KEY_FACTOR = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
_EMPTY = 1 << 63
_ROUNDS_AT_ONCE = 8


class RunCache:
    """Windows of longest runs for the rows of a request table. The results equal those of the process.

    num_rows: rows 0 … `num_rows` may be asked for. window: output positions drawn at once (rounded up to the process's
    alignment); a round has fewer steps than that. Memory: 4 · window bytes per row that is in use.
    """

    def __init__(self, process: AcceptanceProcess, num_rows: int, window: int = 256, max_primed: int = 4096) -> None:
        assert num_rows >= 1 and window >= 1 and max_primed >= 0
        self.process = process
        self.width: int = -(-window // process.alignment) * process.alignment
        self.max_primed = max_primed
        self._lens = np.zeros((num_rows + 1, self.width), np.int32)
        self._flat = self._lens.reshape(-1)
        # Zero-dimensional arrays, which NumPy need not convert at every call.
        self._row_width = np.array(self.width, np.int64)
        self._caps = tuple(np.array(steps + 1, np.int32) for steps in range(self.width))
        self._anchors = np.full(num_rows + 1, _EMPTY, np.uint64)
        self._shifts = np.zeros(num_rows + 1)
        self._primed: dict[int, np.ndarray] = {}

    def accept_lens(self, rows: np.ndarray, request_keys: np.ndarray, positions: np.ndarray, steps: int) -> np.ndarray:
        """Return the accept lengths of one round, bonus included, int32 [bs], each 1 … steps + 1.

        rows: int [bs], distinct. request_keys: uint64 [bs]. positions: int64 [bs], the output position of each round.
        """
        if steps == 0:
            return np.ones(len(rows), np.int32)
        if len(rows) == 0:
            return np.empty(0, np.int32)
        rows = rows.astype(np.int64)
        where = self._offsets(rows, request_keys, positions, 0)
        rows *= self._row_width
        where += rows
        lens: NDArray[np.int32] = np.minimum(self._flat[where], self._caps[steps])
        return lens

    def accept_lens_of_rounds(
        self,
        rows: np.ndarray,
        request_keys: np.ndarray,
        positions: np.ndarray,
        steps: int,
        rounds: int,
        left: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the accept lengths of successive rounds of the same rows, int32 [rounds, bs]. Round i + 1 starts where
        round i ended.

        With `left` int64 [bs] the first round in which some row has emitted `left` tokens in all is the last: fewer
        rounds may come back.
        """
        batch = len(rows)
        if steps == 0 or batch == 0:
            if left is not None and batch:
                rounds = max(1, min(rounds, int(left[left.argmin()])))
            return np.ones((rounds, batch), np.int32)
        out = np.empty((rounds, batch), np.int32)
        most = self._caps[steps]
        # A batch seldom goes on for long without an end, and asking for few positions draws new windows later.
        few = rounds if left is None else _ROUNDS_AT_ONCE
        at_once = max(1, min(few, (self.width - self.process.alignment) // (steps + 1)))
        rows = rows.astype(np.int64)
        row_starts = rows * self.width
        done = 0
        while done < rounds:
            count = min(rounds - done, at_once)
            where = self._offsets(rows, request_keys, positions, (count - 1) * (steps + 1))
            where = where + row_starts
            start = where.copy()
            ends = None if left is None else where + left
            for i in range(done, done + count):
                where += np.minimum(self._flat.take(where), most, out=out[i])
                if ends is not None and np.count_nonzero(where >= ends):
                    return out[: i + 1]
            where -= start
            positions = positions + where
            left = None if left is None else left - where
            done += count
        return out

    def confidence(
        self, rows: np.ndarray, request_keys: np.ndarray, positions: np.ndarray, steps: int
    ) -> NDArray[np.float32]:
        """Return how sure the drafts of one round are, float32 [bs, steps]. Arguments as for `accept_lens`."""
        found: NDArray[np.float32] = self.process.confidence(request_keys, positions, steps, self._shifts[rows])
        return found

    def set_shifts(self, rows: np.ndarray, shifts: np.ndarray | float) -> None:
        """Move the quality of the requests in these rows (`DayCurve`), from now until the next call for the row."""
        self._shifts[rows] = shifts
        self._anchors[rows] = _EMPTY

    def prime(self, request_keys: np.ndarray) -> None:
        """Draw the first windows of requests that will soon join, all in one pass; without shifts.

        This saves time if requests are short: one window alone costs as much as eight in one pass. At most `max_primed`
        windows are kept, and the oldest are dropped first. A request without a window is drawn when it joins.
        """
        keys = np.asarray(request_keys, np.uint64)[-self.max_primed or len(request_keys) :]
        if len(keys) == 0:
            return
        runs = self.process.run_windows(keys, np.zeros(len(keys), np.int64), self.width)
        runs += 1
        self._primed.update(zip(keys.tolist(), runs, strict=True))
        for key in list(self._primed)[: len(self._primed) - self.max_primed]:
            del self._primed[key]

    def _offsets(self, rows: np.ndarray, keys: np.ndarray, positions: np.ndarray, reach: int) -> np.ndarray:
        """Return the columns of the positions, int64 [bs], after which at least `reach` more are in the window."""
        hashed = self._hashed(keys, positions)
        offsets = hashed - self._anchors[rows]
        # The largest element by argmax and a look: a third of the price of max() on arrays this small.
        if int(offsets[offsets.argmax()]) + reach >= self.width:
            self._fill(rows, keys, positions, offsets, reach)
            offsets = hashed - self._anchors[rows]
            if int(offsets[offsets.argmax()]) + reach >= self.width:
                raise InvariantViolation("ACCEPT-02", f"rows {rows} do not hold the windows that were just drawn")
        columns: NDArray[np.int64] = offsets.view(np.int64)
        return columns

    @staticmethod
    def _hashed(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        hashed = keys * _KEY_FACTOR
        hashed += positions.view(np.uint64)
        return hashed

    def _fill(self, rows: np.ndarray, keys: np.ndarray, positions: np.ndarray, offsets: np.ndarray, reach: int) -> None:
        """Draw new windows for the rows that need one and for those that soon will: few large passes, not many."""
        if self._primed:
            short = np.flatnonzero(offsets >= self.width - reach)
            if sum(self._take_primed(rows[i], keys[i], positions[i], reach) for i in short) == len(short):
                return  # no other row needs a window yet
            offsets = self._hashed(keys, positions) - self._anchors[rows]
        which = np.flatnonzero(offsets >= min(self.width - reach, self.width // 2))
        starts = positions[which]
        starts = starts - starts % self.process.alignment
        chosen = rows[which]
        runs = self.process.run_windows(keys[which], starts, self.width, self._shifts[chosen])
        runs += 1
        self._lens[chosen] = runs
        self._anchors[chosen] = keys[which] * _KEY_FACTOR + starts.view(np.uint64)

    def _take_primed(self, row: int, key: np.uint64, position: int, reach: int) -> bool:
        if position + reach >= self.width or self._shifts[row]:
            return False
        lens = self._primed.pop(int(key), None)
        if lens is None:
            return False
        self._lens[row] = lens
        self._anchors[row] = key * _KEY_FACTOR
        return True
