"""Debug mode: right index tensors pass and do what the operation does; each wrong one is named."""

from __future__ import annotations

import re

import pytest
import torch
from foredraft.core.errors import InvariantViolation
from foredraft.gpu.ops.debug import CheckedOps
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.types.ops import DecodeBatch, ExtendBatch, KVTensors, VerifyBatch

SLOTS, ROWS, WIDTH, HEADS, DIM = 13, 2, 6, 1, 4
OPS = CheckedOps(TorchOps(), SLOTS, ROWS)


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def table() -> torch.Tensor:
    return torch.tensor([[0] * 6, [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 0]], dtype=torch.int32)


def states(n: int, heads: int = HEADS) -> torch.Tensor:
    return torch.rand(n, heads, DIM, generator=torch.Generator().manual_seed(n))


def pools(layers: int | None = None) -> KVTensors:
    shape = (SLOTS, HEADS, DIM) if layers is None else (layers, SLOTS, HEADS, DIM)
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return KVTensors(numbers, numbers + 0.5)


def write(positions=(0, 1), slots=(1, 2), pool_slots=SLOTS, value_slots=None):
    k_pool, v_pool = (pool[:size] for pool, size in zip(pools(), (pool_slots, value_slots or pool_slots), strict=True))
    n = len(slots)
    OPS.rope_write(
        states(n), states(n), states(n), torch.ones(4, DIM), longs(*positions), longs(*slots), KVTensors(k_pool, v_pool)
    )


def decode(rows=(1, 0), bases=(4, 0), tails=(4, 0), lens=(6, 0), max_len=6, slots=None):
    slots = table() if slots is None else slots
    queries = DecodeBatch(slots, longs(*rows), longs(*bases), longs(*tails), longs(*lens).expand(2), max_len)
    return OPS.decode_attention(states(2), pools(), queries)


def verify(rows=(1, 2), lens=(3, 5), max_len=5, bits=((1, 3), (1, 3))):
    tokens = states(4)
    OPS.verify_attention(
        tokens, tokens, tokens, pools(), VerifyBatch(table(), longs(*rows), longs(*lens), max_len, torch.tensor(bits))
    )


def extend(starts=(0, 1, 3), max_new=2, lens=(3, 5)):
    tokens = states(3)
    OPS.extend_attention(
        tokens, tokens, tokens, pools(), ExtendBatch(table(), longs(1, 2), longs(*lens), longs(*starts), 5, max_new)
    )


def accept(windows=((1, 2, 3), (0, 0, 0)), index=((0, 2), (3, -1)), lens=(2, 1)):
    k, v = pools(2)
    before = k.clone()
    index, lens = (torch.tensor(x, dtype=torch.int32) for x in (index, lens))
    OPS.move_accepted_(KVTensors(k, v), torch.tensor(windows), index, lens)
    return before, k


def move(sources=(1, 2, 0), targets=(2, 3, 0)):
    k, v = pools(2)
    before = k.clone()
    OPS.move_slots_(KVTensors(k, v), longs(*sources), longs(*targets))
    return before, k


def duplicate(rows=(1,), lens=(1,), slots=None, page_size=2, topk=2):
    k, v = pools(2)
    before = k.clone()
    OPS.duplicate_tails_(
        KVTensors(k, v), table() if slots is None else slots, longs(*rows), longs(*lens), page_size, topk, 1
    )
    return before, k


def compact(index=((0, 2), (3, -1)), nodes=6):
    return OPS.compact(torch.arange(nodes), torch.tensor(index, dtype=torch.int32), 3)


def scatter(rows=(2, 0, 0), num_cells=ROWS + 1, values=3):
    buffer = torch.zeros(num_cells, 2)
    OPS.relay_scatter_([buffer], longs(*rows), [torch.ones(values, 2)])
    return buffer


def test_what_is_right_is_done():
    write()
    write(slots=(0, 0))  # padding lanes share the sink
    alone = TorchOps().decode_attention(
        states(2), pools(), DecodeBatch(table(), longs(1, 0), longs(4, 0), longs(4, 0), longs(6, 0), 6)
    )
    assert torch.equal(decode(), alone)
    verify()
    extend()
    before, k = accept()
    assert torch.equal(k[:, 2], before[:, 3])
    before, k = move()
    assert torch.equal(k[:, 2:4], before[:, 1:3])
    before, k = duplicate()
    assert torch.equal(k[:, 3], before[:, 1]) and not torch.equal(before, k)
    assert compact().tolist() == [0, 2, 2, 3, 4, 5]
    assert scatter()[2].tolist() == [1, 1] and not scatter()[0].any()
    assert OPS.relay_gather([scatter()], longs(2, 0))[0].tolist() == [[1, 1], [0, 0]]
    assert OPS.build_chain(longs(1), torch.zeros(1, 2, dtype=torch.int64), longs(3), 9).width == 3


def slots_with(row: int, column: int, slot: int) -> torch.Tensor:
    slots = table()
    slots[row, column] = slot
    return slots


WRONG = {
    "a position past the rotary table": ("STEPS-01", "position 4", lambda: write(positions=(0, 4))),
    "a negative position": ("STEPS-01", "position -1", lambda: write(positions=(-1, 1))),
    "a write outside the pool": ("ALLOC-11", "slot 13", lambda: write(slots=(1, 13))),
    "a negative slot": ("ALLOC-11", "slot -2", lambda: write(slots=(-2, 1))),
    "two writes of one slot": ("ALLOC-06", "slot 2 is written twice", lambda: write(slots=(2, 2))),
    "a pool of another size": ("ALLOC-11", "expected 13 slots", lambda: write(pool_slots=12)),
    "a row that is not there": ("ALLOC-07", "row 3", lambda: decode(rows=(1, 3))),
    "a length beyond the host's bound": ("ALLOC-07", "length 6", lambda: decode(max_len=5)),
    "a column past the row": ("ALLOC-07", "column 6", lambda: decode(tails=(6, 0))),
    "numbers that are one in memory": ("ALLOC-07", "stride [0]", lambda: decode(lens=(6,))),
    "a read of the sink": ("ALLOC-12", "row 2 reads the sink at column 5", lambda: decode(rows=(2, 0))),
    "a table that names no slot": (
        "ALLOC-11",
        "slot of the request table 13",
        lambda: decode(slots=slots_with(1, 0, 13)),
    ),
    "a padding row with a slot": ("ALLOC-12", "padding row has slot 4", lambda: decode(slots=slots_with(0, 3, 4))),
    "a table of another batch": ("ALLOC-07", "table of 2 rows", lambda: decode(slots=table()[:2])),
    "a prefix beyond the host's bound": ("ALLOC-07", "length 5", lambda: verify(max_len=4)),
    "keys and values of two sizes": ("ALLOC-11", "expected", lambda: write(value_slots=SLOTS - 1)),
    "a prefix in the sink": ("ALLOC-12", "row 2 reads the sink", lambda: verify(lens=(3, 6), max_len=6)),
    "an ancestor past the tree": ("ACCEPT-01", "past the 2", lambda: verify(bits=((1, 3), (1, 7)))),
    "a chunk longer than the host's bound": ("ENGINE-14", "at most 1", lambda: extend(max_new=1)),
    "chunks that go back": ("ENGINE-14", "[0, 2, 1]", lambda: extend(starts=(0, 2, 1))),
    "a negative prefix": ("ALLOC-07", "length -1", lambda: extend(lens=(-1, 2))),
    "an accepted node of another row": (
        "ACCEPT-16",
        "of row",
        lambda: accept(((1, 2, 3), (4, 5, 6)), ((0, 5), (3, -1))),
    ),
    "a path longer than its window": (
        "ACCEPT-16",
        "a path of 4",
        lambda: accept(index=((0, 1, 2, 2), (3, -1, -1, -1)), lens=(4, 1)),
    ),
    "an accepted node that is none": ("ACCEPT-16", "node -1", lambda: accept(lens=(2, 2))),
    "a window outside the pool": ("ACCEPT-16", "slot of a window 13", lambda: accept(((1, 2, 13), (0, 0, 0)))),
    "windows that overlap": ("ACCEPT-16", "slot 3 is written twice", lambda: accept(((1, 2, 3), (3, 5, 6)))),
    "a move outside the pool": ("ACCEPT-16", "target slot 13", lambda: move(targets=(2, 13, 0))),
    "a move from nowhere": ("ACCEPT-16", "source slot -1", lambda: move(sources=(-1, 2, 0))),
    "a move of two to one": ("ACCEPT-16", "slot 2 is written twice", lambda: move(targets=(2, 2, 0))),
    "a move out of the sink": ("ACCEPT-16", "slot 3 is overwritten from the sink", lambda: move(sources=(1, 0, 0))),
    "moves that do not pair up": ("ACCEPT-16", "sources for", lambda: move(sources=(1, 2))),
    "a branch past the row": ("ACCEPT-16", "column of a draft branch", lambda: duplicate(lens=(5,))),
    "branches that share a slot": (
        "ACCEPT-16",
        "slot 9 is written twice",
        lambda: duplicate(rows=(2,), topk=3, slots=slots_with(2, 4, 9)),
    ),
    "a tail of a row that is not there": ("ALLOC-07", "row -1", lambda: duplicate(rows=(-1,))),
    "a compaction across rows": ("ACCEPT-18", "row 1 accepts", lambda: compact(((0, 2), (2, -1)))),
    "outputs of another batch": ("ACCEPT-18", "9 nodes", lambda: compact(nodes=9)),
    "a relay row that is not there": (
        "RELAY-03",
        "relay row 3",
        lambda: OPS.relay_gather([torch.zeros(3, 2)], longs(3)),
    ),
    "a relay row written twice": ("RELAY-02", "row 2", lambda: scatter(rows=(2, 2, 0))),
    "a relay buffer of another size": ("RELAY-03", "buffer of 4 rows", lambda: scatter(num_cells=4)),
    "relay values of another batch": ("RELAY-03", "for 3 cells", lambda: scatter(values=1)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what):
    invariant, words, call = WRONG[what]
    with pytest.raises(InvariantViolation, match=re.escape(words)) as caught:
        call()
    assert caught.value.invariant == invariant
