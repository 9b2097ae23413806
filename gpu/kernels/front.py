"""Which tokens top-k and top-p keep, as a kernel of a CPU that Numba compiles (see `kernels.host`)."""

from __future__ import annotations

from functools import partial

import numpy as np

from .host import compiled

BUCKETS, BUCKETS_PER_UNIT = 2048, 64  # of logits, by how far they are below the greatest
SORTED = 4096  # tokens of a row, at most


@compiled
def keep_front(logits, masses, limits, shares, totals):
    """Set masses [n, V] to 0 behind the last token that top-k and top-p keep, in the order of `target_probs`.

    limits int64 [n]: the most tokens of a row; shares float64 [n]: of their mass, what is kept at least; totals float64
    [n]: the mass of all tokens. Of many kept tokens none is sorted but those of the bucket with the last one.
    """
    vocab, of = logits.shape[1], logits.dtype.type
    buckets = np.empty(vocab, np.int32)
    for r in range(len(limits)):
        row, mass, greatest = logits[r], masses[r], of(-np.inf)
        for i in range(vocab):
            greatest = max(greatest, row[i])
        for i in range(vocab):
            buckets[i] = np.int32(min((greatest - row[i]) * of(BUCKETS_PER_UNIT), of(BUCKETS - 1)))
        counts, sums, front = np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS, np.float64), totals[r]
        for i in range(vocab):
            counts[buckets[i]] += 1
            sums[buckets[i]] += mass[i]
        least, last = of(-np.inf), vocab
        if limits[r] < vocab:
            least, last, front = last_of_front(row, mass, buckets, counts, sums, limits[r], np.inf)
        if shares[r] < 1.0:
            wanted = shares[r] * front
            least, last, front = last_of_front(row, mass, buckets, counts, sums, limits[r], wanted)
        for i in range(vocab):
            mass[i] = mass[i] if row[i] >= least else of(0)
        for i in range(last + 1, vocab):
            mass[i] = of(0) if row[i] == least else mass[i]


@partial(compiled, formulas={"fastmath": False, "error_model": "numpy"})  # not its caller's: sums as written
def last_of_front(logits, masses, buckets, counts, sums, limit, wanted):
    """Return logit and id of the last token that is kept, and the mass up to it: the one with which there are `limit`,
    or the mass `wanted`, or no more mass. Up to `SORTED` tokens are added up one after another, as a sort would."""
    bucket, later, rank, front = 0, 0, 0, 0.0
    for later in range(1, BUCKETS):
        if counts[later]:
            if rank + counts[bucket] >= limit or front + sums[bucket] >= wanted:
                break
            rank, front, bucket = rank + counts[bucket], front + sums[bucket], later
    first, end = bucket, bucket
    if rank + counts[bucket] + counts[later] <= SORTED:  # with one bucket more, since sums are rounded
        first, end, rank, front = 0, later, 0, 0.0
    members = np.flatnonzero((buckets >= first) & (buckets <= end) & (masses > 0))
    order = np.argsort(-logits[members], kind="mergesort")  # equal ones stay in the order of their ids
    least, last = logits.dtype.type(-np.inf), len(logits)
    for place in order:
        mass = np.float64(masses[members[place]])
        if rank and (rank >= limit or front + mass - mass >= wanted):
            break
        last = members[place]
        least, rank, front = logits[last], rank + 1, front + mass
    return least, last, front
