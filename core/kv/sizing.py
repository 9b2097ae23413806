"""How much KV room speculative decoding needs: pure functions, all with the maximum over the adaptive candidates.

Letters: S draft steps, k top-k, nd nodes of a verify tree (root included), p page size, L slots per decode round, R the
reserve of one request.

    row   [0, committed) · [committed, committed + R) what launched and unseen rounds may write · aligned up to a page
"""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


@overload
def ceil_to_page(x: int, page_size: int) -> int: ...
@overload
def ceil_to_page(x: Lengths, page_size: int) -> Lengths: ...
def ceil_to_page(x, page_size):
    """Round `x` (≥ 0, an int or an integer array) up to a multiple of `page_size`; an array gives a new one."""
    if page_size & (page_size - 1) == 0:
        return (x + (page_size - 1)) & -page_size
    return (x + (page_size - 1)) // page_size * page_size


def get_alloc_len_per_decode(
    steps: int, topk: int, num_draft_tokens: int | None, page_size: int, has_draft_kv: bool = True
) -> int:
    """Return L, the most slots past the committed length that one decode round of one request writes.

    `steps` and `num_draft_tokens` are the maxima over all candidates; `num_draft_tokens` None is plain decoding (1
    slot). Draft branches and verify window start at the committed length both, so they overlay and the greater one
    counts. With pages and branches each branch fills whole pages of its own, its part of the tail page included.
    """
    assert steps >= 0, f"steps is {steps}, expected at least 0"
    assert topk >= 1, f"topk is {topk}, expected at least 1"
    if num_draft_tokens is None:
        return 1
    if page_size == 1 or topk == 1 or not has_draft_kv:
        return max(steps * topk, num_draft_tokens)
    return max(ceil_to_page(page_size - 1 + steps, page_size) * topk, num_draft_tokens)


def reserve_per_decode(alloc_len: int, overlap: bool) -> int:
    """Return R: what a request reserves past its committed length for a single round.

    In overlap mode the round before has not been seen yet and may still write L slots of its own.
    """
    return reserve_per_block(alloc_len, max_rounds=1, rounds_unseen=1 if overlap else 0)


def reserve_per_block(alloc_len: int, max_rounds: int, rounds_unseen: int) -> int:
    """Return what a block of `max_rounds` rounds reserves past the committed length while `rounds_unseen` are in flight.

    The caller caps it by the row.
    """
    assert max_rounds >= 1, f"max_rounds is {max_rounds}, expected at least 1"
    assert rounds_unseen >= 0, f"rounds_unseen is {rounds_unseen}, expected at least 0"
    return (max_rounds + rounds_unseen) * alloc_len


def request_table_width(context_len: int, reserve: int, page_size: int) -> int:
    """Return slots in a row of the request table: the context and the reserve R, page aligned."""
    return ceil_to_page(context_len + reserve, page_size)


def recurrent_state_slots(max_running_requests: int, max_draft_tokens: int | None) -> int:
    """Return the state slots of a hybrid model: per request its committed state, and one for each node that a round may verify."""
    return max_running_requests * (1 + (max_draft_tokens or 0))
