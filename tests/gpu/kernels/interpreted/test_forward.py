"""The forward pass's Triton kernels and their torch twins against sums over one query at a time, every
memory access checked."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from foredraft.gpu.kernels.jit import cdiv
from foredraft.gpu.kernels.layers import flash
from foredraft.gpu.kernels.layers.decode_attention import decode_attention_triton
from foredraft.gpu.kernels.layers.extend_attention import extend_attention_triton
from foredraft.gpu.kernels.layers.flash import INTERPRETED, Channels, KeyCut, device_of, reading_tiles
from foredraft.gpu.kernels.layers.verify_attention import verify_attention_triton
from foredraft.gpu.kernels.rounds.build_tree import chain_links, shorten_rows
from foredraft.gpu.kernels.rounds.window import pack_rows
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.selftest.batches import (
    PagedBatch,
    decode_view,
    make_batch,
    random_tree_bits,
    rotary_table,
    softmaxes,
)
from foredraft.gpu.types.attention import Softmax
from foredraft.gpu.types.ops import KVTensors, VerifyBatch
from forward_cases import BOTH, DTYPES, NAME, TWINS, close, dense_decode, dense_extend, dense_verify, strided
from memory_checker import Checker, Ownership, checked_memory
from torch import Tensor

HEADS = [(1, 1), (4, 2), (8, 1), (6, 2)]
PAGE = 4


def owned(batch: PagedBatch, row_of) -> list[Ownership]:
    """Which row of the batch each slot belongs to, by its number in the table."""
    owners = [0] * batch.k_pool.shape[0]
    for row in range(1, len(batch.table)):
        for slot in batch.table[row].tolist():
            owners[slot] = row
    owners[0] = 0
    return [Ownership(pool, owners, row_of) for pool in (batch.k_pool, batch.v_pool)]


def forget_what_is_past(checker, batch: PagedBatch, lens: list[int]) -> None:
    """What lies behind a row's length was never written; nor was padding's page."""
    for row, length in zip(batch.rows.tolist(), lens, strict=True):
        for slot in batch.table[row, length:].tolist():
            checker.unwrite(batch.k_pool[slot])
            checker.unwrite(batch.v_pool[slot])
    for slot in range(PAGE):
        checker.unwrite(batch.k_pool[slot])
        checker.unwrite(batch.v_pool[slot])


LENS = [[1], [0], [3], [4], [5], [130], [7, 0, 64, 8]]
BLOCK = {torch.float32: 16, torch.float16: 64}  # keys of a block


def cut_of(dtype: torch.dtype, lens: list[int], most: int, programs: int | None = None) -> KeyCut:
    """Parts of at least one block, at most `most`;
    by default a program for every row (uncut) or for every part that there may be."""
    return KeyCut(BLOCK[dtype], most, programs or len(lens) * most)


def row_of_item(cut: KeyCut, dtype: torch.dtype, lens: list[int]) -> list[int]:
    """The row of each part of the work list, as the kernels should have it."""
    sizes = [max(cut.least, cdiv(cdiv(n, BLOCK[dtype]), cut.most) * BLOCK[dtype]) for n in lens]
    parts = [max(1, cdiv(n, size)) for n, size in zip(lens, sizes, strict=True)]
    items = [row for row, count in enumerate(parts) for _ in range(count)]
    return items if cut.most > 1 else [*range(len(lens))]


@pytest.mark.fast("[[]0]-4", "[[]5]-1", "[[]7, 0, 64, 8]-1", "[[]65, 128, 1]-4")
@pytest.mark.parametrize(("lens", "most"), [*zip(LENS, [1, 4] * 4, strict=False), ([65, 128, 1], 4)], ids=str)
def test_decode(lens: list[int], most: int):
    layouts = HEADS if most == 1 else HEADS[:2]
    for dtype, (heads, kv_heads) in zip(DTYPES * 2, layouts, strict=False):
        batch = make_batch(sum(lens), lens, [1] * len(lens), heads=heads, kv_heads=kv_heads, dtype=dtype)
        view, q = decode_view(batch, lens), strided(batch.q)
        expected = dense_decode(batch, view)
        close(TWINS.decode_attention(q, batch.kv, view), expected)
        cut = cut_of(dtype, lens, most)
        items = [int(batch.rows[row]) for row in row_of_item(cut, dtype, lens)]
        own = owned(batch, lambda x, y, z, items=items: items[x])
        with checked_memory(read_only=[q, batch.table, batch.rows, view.lens], ownership=own, shuffle=2) as checker:
            forget_what_is_past(checker, batch, lens)
            actual = decode_attention_triton(q, batch.kv, view, cut=cut)
        close(actual, expected)
        assert checker.launches == 1


@pytest.mark.ci
def test_the_order_in_which_parts_arrive_changes_no_bit():
    """The counters are 0 again after each launch, too."""
    batch = make_batch(3, [130, 65, 3], [1] * 3, dtype=torch.float32)
    view, found = decode_view(batch, [130, 65, 3]), []
    for seed in range(4):
        with checked_memory(shuffle=seed):
            found.append(decode_attention_triton(batch.q, batch.kv, view, cut=KeyCut(16, 8, 24)))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("most", [1, 2])
def test_decode_follows_base_and_tail(most: int):
    batch = make_batch(3, [80, 80, 20, 0], [1] * 4, dtype=torch.float32)
    view = decode_view(batch, lens=[71, 8, 3, 0], bases=[60, 8, 0, 0], tails=[68, 12, 4, 0])
    expected = dense_decode(batch, view)
    cut = cut_of(torch.float32, [71, 8, 3, 0], most, programs=4)
    own = owned(batch, lambda x, y, z: int(batch.rows[x])) if most == 1 else ()
    with checked_memory(ownership=own):
        actual = decode_attention_triton(batch.q, batch.kv, view, cut=cut)
    close(actual, expected)
    close(TWINS.decode_attention(batch.q, batch.kv, view), expected)


@pytest.mark.fast("[[]5]-1-1", "[[]0]-3-4")
@pytest.mark.parametrize(
    ("prefix_lens", "nd", "most"),
    [
        ([5], 1, 1),
        ([0], 3, 4),
        ([70], 64, 1),
        ([0, 8, 3], 1, 4),
        *(([4, 0, 133], 7, 4), ([3, 2], 33, 1), ([70], 64, 4), ([4, 0, 133], 7, 1), ([3, 2], 33, 4)),
        *(([64], 16, 1), ([64], 16, 4)),
    ],
    ids=str,
)
def test_verify(prefix_lens: list[int], nd: int, most: int):
    bs = len(prefix_lens)
    # Big trees with two of the four layouts of heads: interpreting takes its time.
    layouts = HEADS if nd * bs < 30 else HEADS[nd % 2 :: 2]
    for dtype, (heads, kv_heads) in zip(DTYPES * 2, layouts, strict=False):
        batch = make_batch(nd, prefix_lens, [nd] * bs, heads=heads, kv_heads=kv_heads, dtype=dtype)
        bits = random_tree_bits(nd, bs, nd, padding=True)
        q, k, v = strided(batch.q), strided(batch.k), strided(batch.v)
        expected, tree = dense_verify(batch, bits), batch.tree(bits, batch.max_prefix_len)
        twin = TWINS.verify_attention(q, k, v, batch.kv, tree)  # before what it multiplies by 0 is forgotten
        size = reading_tiles(nd * heads // kv_heads, Channels.of(q.shape[2]), dtype, device_of(q.device))
        assert size.block_n == BLOCK[dtype]
        cut = cut_of(dtype, prefix_lens, most)
        items = [int(batch.rows[row]) for row in row_of_item(cut, dtype, prefix_lens)]
        own = owned(batch, lambda x, y, z, items=items: items[x])
        with checked_memory(
            read_only=[q, k, v, bits, batch.table, batch.prefix_lens], ownership=own, shuffle=4
        ) as checker:
            forget_what_is_past(checker, batch, prefix_lens)
            actual = verify_attention_triton(q, k, v, batch.kv, tree, cut=cut)
        for found in (actual, twin):
            close(found, expected)
            assert not found[bits.flatten() == 0].any()


@pytest.mark.fast("0-1", ci="*")
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("window", [0, 6])
def test_verify_of_rows_of_unequal_lengths(window: int, most: int):
    """The pass has the tokens of the nodes that rows verify, and two others, which it fills up with."""
    nodes, prefix_lens = 7, [4, 0, 133, 20]
    for dtype in DTYPES:  # of 16 bits a tile is tall, and its parts are joined by a launch of their own
        batch = make_batch(nodes, prefix_lens, [nodes] * 4, heads=4, kv_heads=1, dtype=dtype)
        row_nodes, chain = torch.tensor([4, 1, 7, 0]), chain_links(4, nodes, batch.q.device)
        tree = shorten_rows(chain.tree(torch.zeros(4, nodes, dtype=torch.int64), chain.depths), row_nodes)
        packing = pack_rows(row_nodes, nodes, 14)
        assert packing.nodes.tolist() == [0, 1, 2, 3, 7, *range(14, 21), 4, 5]
        softmax = Softmax(window=window)
        expected = packing.pick(dense_verify(batch, tree.ancestor_bits, softmax))
        q, k, v = (strided(packing.pick(x)) for x in (batch.q, batch.k, batch.v))
        view = replace(batch.tree(tree.ancestor_bits, batch.max_prefix_len), packing=packing)
        close(TWINS.verify_attention(q, k, v, batch.kv, view, softmax), expected)
        with checked_memory(read_only=[q, k, v, packing.places], shuffle=most) as checker:
            forget_what_is_past(checker, batch, prefix_lens)
            cut = cut_of(dtype, prefix_lens, most)
            close(verify_attention_triton(q, k, v, batch.kv, view, softmax, cut), expected)


@pytest.mark.slow
def test_verify_of_a_full_tile_of_64_nodes_with_8_heads_each():
    """512 packed rows in several blocks, whose masks use all 64 bits, the sign bit too."""
    batch = make_batch(0, [37], [64], heads=8, kv_heads=1, dtype=torch.float32)
    bits = random_tree_bits(11, 1, 64)
    assert (bits < 0).any()
    with checked_memory():
        actual = TritonOps().verify_attention(batch.q, batch.k, batch.v, batch.kv, batch.tree(bits, 40))
    close(actual, dense_verify(batch, bits))


@pytest.mark.fast("[[]5, 0, 66, 3]-*")
@pytest.mark.parametrize(
    ("prefix_lens", "new_lens"),
    [([0], [9]), ([6], [5]), ([0, 0], [3, 70]), ([5, 0, 66, 3], [4, 37, 0, 1]), ([4], [0]), ([130], [33])],
    ids=str,
)
def test_extend(prefix_lens: list[int], new_lens: list[int]):
    for dtype, (heads, kv_heads) in zip(DTYPES * 2, HEADS, strict=True):
        batch = make_batch(5, prefix_lens, new_lens, heads=heads, kv_heads=kv_heads, dtype=dtype)
        q, k, v = strided(batch.q), strided(batch.k), strided(batch.v)
        expected = dense_extend(batch)
        chunks = batch.chunks(batch.max_prefix_len, batch.max_new_len)
        close(TWINS.extend_attention(q, k, v, batch.kv, chunks), expected)
        own = owned(batch, lambda x, y, z, rows=batch.rows: int(rows[z]))
        with checked_memory(
            read_only=[q, k, v, batch.table, batch.prefix_lens, batch.starts], ownership=own, shuffle=5
        ) as checker:
            forget_what_is_past(checker, batch, prefix_lens)
            actual = extend_attention_triton(q, k, v, batch.kv, batch.chunks(None, batch.max_new_len + 3))
        close(actual, expected)


@pytest.mark.parametrize("ops", BOTH, ids=NAME)
def test_extend_with_tokens_of_no_row_and_loose_bounds(ops: TorchOps):
    """A captured graph has more tokens than the batch, and bounds that hold for every batch."""
    batch = make_batch(6, [5, 2], [3, 4], dtype=torch.float32)
    expected = dense_extend(batch)
    batch.q, batch.k, batch.v = (torch.cat((x, torch.ones_like(x[:2]))) for x in (batch.q, batch.k, batch.v))
    with checked_memory():
        actual = ops.extend_attention(batch.q, batch.k, batch.v, batch.kv, batch.chunks(batch.table.shape[1], 9))
    close(actual[:7], expected)
    assert actual.isfinite().all() and (ops is TWINS or not actual[7:].any())


@pytest.mark.fast("24")
@pytest.mark.parametrize("d", [24, 32])
def test_head_sizes(d: int):
    """24 is no power of two: the tile's last channels are padding."""
    batch = make_batch(9, [40, 3], [2, 2], d=d, dtype=torch.float32)
    bits = random_tree_bits(1, 2, 2)
    tokens = (batch.q, batch.k, batch.v, batch.kv)
    with checked_memory():
        verified = verify_attention_triton(*tokens[:3], batch.kv, batch.tree(bits, 40), cut=KeyCut(16, 2, 3))
        extended = extend_attention_triton(*tokens[:3], batch.kv, batch.chunks(None, 2))
    close(verified, dense_verify(batch, bits))
    close(extended, dense_extend(batch))


@pytest.mark.fast("272-8", ci="*")
@pytest.mark.parametrize("key_only", [0, 8])
@pytest.mark.parametrize("d", [272, 512, 576])
def test_wide_heads_sum_their_values_in_halves(d: int, key_only: int):
    """Of latent attention (`key_only`) the keys are the values, but for some channels, whose sums are not read."""
    nodes = 18 if d == 272 else 3
    batch = make_batch(9, [40, 3, 0], [nodes] * 3, heads=4, kv_heads=1 if key_only else 2, d=d, dtype=torch.float32)
    k, v, kv = batch.k, batch.v, batch.kv
    if key_only:
        batch = replace(batch, v=batch.k, v_pool=batch.k_pool)
        k, v, kv = batch.k, batch.k[..., :0], KVTensors(batch.k_pool, batch.k_pool[..., :0])
    softmax, bits = Softmax(0.05, key_only=key_only), random_tree_bits(1, 3, nodes, padding=True)
    channel = torch.arange(d)
    is_read = channel % (d // 2) >= key_only
    for most in (1, 2):
        with checked_memory(read_only=[batch.q, k, bits], shuffle=most):
            cut = KeyCut(16, most, 3 * most)
            verified = verify_attention_triton(batch.q, k, v, kv, batch.tree(bits, 40), softmax, cut)
        close(verified[..., is_read], dense_verify(batch, bits, softmax)[..., is_read])
        view, queries = decode_view(batch, [40, 3, 0]), replace(batch, q=batch.q[:3])
        with checked_memory():
            decoded = decode_attention_triton(queries.q, kv, view, softmax, cut)
        close(decoded[..., is_read], dense_decode(queries, view, softmax)[..., is_read])
    with checked_memory():
        extended = extend_attention_triton(batch.q, k, v, kv, batch.chunks(None, nodes), softmax)
    close(extended[..., is_read], dense_extend(batch, softmax)[..., is_read])


@pytest.mark.fast("TorchOps-*", "TritonOps-[34]")
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("ops", BOTH, ids=NAME)
def test_windows_caps_and_sinks(ops: TorchOps | TritonOps, number: int):
    """Rows shorter and longer than the window, and trees whose siblings stand at one position."""
    batch = make_batch(9, [40, 2, 0], [7] * 3, dtype=torch.float32)
    softmax = softmaxes(4, torch.float32)[number]
    bits = random_tree_bits(1, 3, 7, padding=True)
    own = owned(batch, lambda x, y, z: int(batch.rows[x]))
    with checked_memory(read_only=[bits, batch.table], ownership=own if isinstance(ops, TritonOps) else ()):
        verified = ops.verify_attention(batch.q, batch.k, batch.v, batch.kv, batch.tree(bits, 41), softmax)
    close(verified[bits.flatten() != 0], dense_verify(batch, bits, softmax)[bits.flatten() != 0])
    assert not verified[bits.flatten() == 0].any()
    with checked_memory():
        extended = ops.extend_attention(batch.q, batch.k, batch.v, batch.kv, batch.chunks(42, 8), softmax)
    close(extended, dense_extend(batch, softmax))
    queries = replace(batch, q=batch.q[:3])
    for view in (decode_view(batch, [41, 3, 0]), decode_view(batch, [22, 3, 1], bases=[16, 0, 0], tails=[20, 4, 1])):
        with checked_memory():
            decoded = ops.decode_attention(queries.q, batch.kv, view, softmax)
        close(decoded, dense_decode(queries, view, softmax))


@pytest.mark.parametrize("ops", BOTH, ids=NAME)
def test_an_empty_batch_launches_nothing(ops: TorchOps):
    batch = make_batch(0, [], [], dtype=torch.float32)
    view, bits = decode_view(batch, []), torch.zeros(0, 4, dtype=torch.int64)
    tokens = (batch.q, batch.k, batch.v, batch.kv)
    with checked_memory() as seen:
        decoded = ops.decode_attention(batch.q, batch.kv, view)
        verified = ops.verify_attention(*tokens, batch.tree(bits, 0))
        extended = ops.extend_attention(*tokens, batch.chunks(0, 0))
        q, k, _ = ops.rope_write(batch.q, batch.k, batch.v, rotary_table(16), batch.rows, batch.rows, batch.kv)
    assert seen.launches == 0
    assert decoded.shape == verified.shape == extended.shape == q.shape == (0, 4, 16) and k.shape == (0, 2, 16)


@pytest.mark.fast("5-16")
@pytest.mark.parametrize(("group", "most"), [(5, 16), (2, 48)])
def test_verify_sums_in_one_order_whatever_the_number_of_nodes(group: int, most: int):
    """A chain of one step, a root alone and the largest round of a session:
    what they share is equal to the last bit, padded or not."""
    prefix_lens = [132, 65]
    batch = make_batch(3, prefix_lens, [most] * 2, heads=group, kv_heads=1, dtype=torch.float32)
    chains = ((1 << torch.arange(1, most + 1)) - 1).expand(2, most)

    def outputs(nodes: int) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (2, most))[:, :nodes].flatten(0, 1) for x in (batch.q, batch.k, batch.v))
        view = replace(batch.tree(chains[:, :nodes], 1024), planned_rows=4, planned_nodes=most)
        return verify_attention_triton(q, k, v, batch.kv, view).unflatten(0, (2, nodes))

    largest = outputs(most)
    for nodes in (1, 2):
        assert torch.equal(outputs(nodes), largest[:, :nodes])
    close(largest.flatten(0, 1), dense_verify(batch, chains))


def trips_of_programs(checker: Checker, pool: Tensor) -> Counter[tuple[int, int, int]]:
    """Count the loads of keys from a pool by program, while the checker runs."""
    trips: Counter[tuple[int, int, int]] = Counter()
    load, (begin, end) = checker.load, (pool.data_ptr(), pool.data_ptr() + pool.nbytes)

    def counting(pointers, mask, item):
        if begin <= int(pointers.flat[0]) < end:
            trips[checker.program] += 1
        load(pointers, mask, item)

    checker.load = counting
    return trips


@pytest.mark.fast("decode")
@pytest.mark.parametrize("kind", ["decode", "verify"])
def test_the_parts_of_a_long_row_are_shared_and_its_neighbours_change_no_bit(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    """A row of 1,152 keys among seven of 20: the busiest of 8 programs has its share of the blocks, and at
    most a part more."""
    monkeypatch.setattr(flash, "PROGRAMS_PER_PROCESSOR", 2)  # of the interpreter's 4 processors
    lens, blocks = [20] * 5 + [1152] + [20] * 2, 72 + 7 * 2

    def outputs(rows: slice, checker_needs=lambda checker, batch: None) -> Tensor:
        chosen = lens[rows]
        batch = make_batch(8, lens, [1] * 8, heads=2, kv_heads=1, dtype=torch.float32)
        view = decode_view(batch, lens)
        with checked_memory() as checker:
            checker_needs(checker, batch)
            if kind == "decode":
                parts = {n: getattr(view, n)[rows] for n in ("rows", "bases", "tails", "lens")}
                few = replace(view, **parts, max_len=1152, planned_queries=8)
                return decode_attention_triton(batch.q[rows], batch.kv, few)
            bits = torch.ones(len(chosen), 1, dtype=torch.int64)
            few = VerifyBatch(batch.table, batch.rows[rows], batch.prefix_lens[rows], 1152, bits, 8, 1)
            return verify_attention_triton(batch.q[rows], batch.k[rows], batch.v[rows], batch.kv, few)

    counted: list[Counter[tuple[int, int, int]]] = []
    together = outputs(slice(None), lambda checker, batch: counted.append(trips_of_programs(checker, batch.k_pool)))
    trips = counted[0]
    cut = KeyCut.choose(8, 8, 1152, 1, reading_tiles(2, Channels.of(16), torch.float32, INTERPRETED), 128, 4)
    assert 1 < cut.most <= 8 and cut.programs == 8
    assert sum(trips.values()) == blocks
    assert max(trips.values()) <= blocks / 8 + cut.least / 16, f"{trips}, {cut}"
    assert torch.equal(outputs(slice(5, 7)), together[5:7])
    batch = make_batch(8, lens, [1] * 8, heads=2, kv_heads=1, dtype=torch.float32)
    dense = dense_decode(batch, decode_view(batch, lens))
    if kind == "verify":
        dense = dense_verify(batch, torch.ones(8, 1, dtype=torch.int64))
    close(together, dense)


def test_what_a_batch_is_cut_into():
    """One row fills an H200; rows that fill it are cut where they are long; parts take a bounded memory."""
    size = reading_tiles(16, Channels.of(128), torch.bfloat16, INTERPRETED)
    alone = KeyCut.choose(1, 1, 131072, 8, size, 4 * 32 * 128 * 4, 132)
    assert alone.programs * 8 >= 132 * 2 and alone.least == 64
    many = KeyCut.choose(32, 32, 131072, 8, size, 4 * 32 * 128 * 4, 132)
    assert 640 <= many.least <= 1024 and many.most == many.programs == alone.programs
    assert KeyCut.choose(32, 32, 600, 8, size, 4 * 32 * 128 * 4, 132) == KeyCut(many.least, 1, 32)
    tall = reading_tiles(256, Channels.of(128), torch.bfloat16, INTERPRETED)
    assert KeyCut.choose(64, 64, 131072, 32, tall, 64 * 32 * 128 * 4, 132).most == flash.PARTS_BYTES >> 26
