"""Lossless tree sampling: with any drafts, emitted tokens have the target's distribution (`core.tree.verify`).

Every node decides by itself which of its children follows it, because the coin of its depth is known; the accepted path
is then the chain of these decisions from the root. Only the last node's distribution is read as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...types.ops import DeviceTree, DeviceVerified
from ..constants import later, numbers
from ..jit import cdiv, jit, next_power_of_2, tl
from .build_tree import is_chain
from .verify_greedy import chain_path, last_nodes, store_path, tree_path


def verify_sampling_torch(tree: DeviceTree, probs: Tensor, accept_coins: Tensor, bonus_coins: Tensor) -> DeviceVerified:
    batch_size, nodes = tree.tokens.shape
    vocab, device = probs.shape[1], probs.device
    totals = probs.sum(1, dtype=torch.float64)
    usable = (totals > 0) & (totals < torch.inf) & (probs.amin(1) >= 0)
    greatest, predict = probs.max(1)
    predict.masked_fill_(~(greatest.abs() < torch.inf), -1)
    # An unusable node's masses count as 0: none of its children is possible.
    totals = totals.masked_fill(~usable, torch.inf).view(batch_size, nodes)
    mass_counts = probs.sign().sum(1, dtype=torch.float64).view(batch_size, nodes)
    decide = _chain_decisions if is_chain(tree) else _tree_decisions
    accept_index, accept_lens, last, taken = decide(tree, probs, totals, mass_counts, accept_coins)

    last_flat = (last + numbers(batch_size, device).unsqueeze(1) * nodes).squeeze(1)
    residual = torch.nn.functional.pad(probs.index_select(0, last_flat).double(), (0, 1))
    residual = residual.scatter_(1, taken, 0.0)[:, :vocab] / totals.gather(1, last)
    bonus = sample_torch(residual, bonus_coins.gather(1, accept_lens.long().unsqueeze(1) - 1).squeeze(1))
    failed = ~usable.index_select(0, last_flat)
    bonus = bonus.masked_fill_(failed, -1).unsqueeze(1)

    # On the path a node's token is the next node's; lanes past the end write the bonus once more where it is.
    path = torch.where(accept_index >= 0, accept_index, last_flat.unsqueeze(1))
    follows = numbers(tree.width, device) < accept_lens.unsqueeze(1) - 1
    emitted = torch.where(follows, tree.tokens.take(path).roll(-1, 1), bonus)
    predict.scatter_(0, path.view(-1), emitted.view(-1))
    return DeviceVerified(accept_index, accept_lens, predict, failed)


def _chain_decisions(
    tree: DeviceTree, probs: Tensor, totals: Tensor, mass_counts: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return accept_index, accept_lens, the last node int64 [bs, 1], and the ids [bs, n] that leave its
    distribution, `vocab`: none."""
    batch_size, nodes = tree.tokens.shape
    vocab = probs.shape[1]
    drafts = tree.tokens[:, 1:]
    known = (drafts >= 0) & (drafts < vocab)
    drafted = probs.view(batch_size, nodes, vocab)[:, :-1].gather(2, torch.where(known, drafts, 0).unsqueeze(2))
    masses = drafted.squeeze(2) / totals[:, :-1]
    # With all mass on the child the coin can only miss by rounding.
    reached = (coins[:, : nodes - 1] < masses) | (mass_counts[:, :-1] == 1)
    accept_index, accept_lens = chain_path(known & (masses > 0) & reached, nodes)
    last = accept_lens.long().unsqueeze(1) - 1
    children = torch.nn.functional.pad(torch.where(known, drafts, vocab), (0, 1), value=vocab)
    return accept_index, accept_lens, last, children.gather(1, last)


def _tree_decisions(
    tree: DeviceTree, probs: Tensor, totals: Tensor, mass_counts: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return accept_index, accept_lens, the last node int64 [bs, 1], and the ids [bs, n] that leave its
    distribution, `vocab`: none."""
    nodes, vocab, device = tree.num_nodes, probs.shape[1], probs.device
    tokens, parents, order = tree.tokens, tree.parents.long(), numbers(nodes, device)
    above = parents.clamp(min=0)
    known = (tokens >= 0) & (tokens < vocab) & (parents >= 0)
    cells = node_cells(above, torch.where(known, tokens, 0), nodes, vocab)
    # A repeated sibling counts once: the first one has the mass.
    alike = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (tokens.unsqueeze(2) == tokens.unsqueeze(1))
    first = ~(alike & later(nodes, device)).any(1)
    masses = probs.take(cells) / totals.gather(1, above)
    masses = masses.masked_fill(~(known & first), 0.0)

    children = (parents.unsqueeze(1) == order.unsqueeze(1)) & known.unsqueeze(1)  # [row, parent, child]
    possible = children & (masses > 0).unsqueeze(1)
    reach = torch.where(possible, masses.unsqueeze(1), 0.0).cumsum(2)
    hits = possible & (coins.gather(1, tree.depths).unsqueeze(2) < reach)
    none = nodes  # stands for no child, so that the least number wins
    child = torch.where(hits, order, none).amin(2)
    last_possible = torch.where(possible, order, -1).amax(2)
    # With all mass on the children the coin can only miss by rounding: the last possible child is meant.
    exhausted = (child == none) & (last_possible >= 0) & (possible.sum(2) == mass_counts)
    child = torch.where(exhausted, last_possible, child)
    accept_index, accept_lens = tree_path(tree, known & (child.gather(1, above) == order))
    last = last_nodes(accept_index, accept_lens, nodes)
    return accept_index, accept_lens, last, torch.where(known & (parents == last), tokens, vocab)


def node_cells(above: Tensor, tokens: Tensor, nodes: int, vocab: int) -> Tensor:
    """Return where the probability of each token after node `above` of its row stands in probs [bs · nd,
    V], int64 [bs, nd]."""
    rows = numbers(above.shape[0], above.device).unsqueeze(1) * nodes
    return (above + rows) * vocab + tokens


def sample_torch(probs: Tensor, coins: Tensor) -> Tensor:
    """Return the first id of probs [n, V] with mass whose cumulative mass exceeds coin · total, int64 [n]; −1 if there
    is no mass or a NaN."""
    cumulative = probs.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1]
    # coin · total can round up to total; then the last token with mass is meant, just below the end.
    threshold = torch.minimum(coins * total, torch.nextafter(total, numbers(1, total.device, torch.float64)))
    # A parallel sum need not be monotone to the last bit, so a token must have mass of its own.
    beyond = (cumulative > threshold.unsqueeze(1)) & (probs > 0)
    vocab = probs.shape[1]
    token = torch.where(beyond, numbers(vocab, probs.device), vocab).amin(1)
    return token.masked_fill_((token == vocab) | ~(total < torch.inf), -1)


MAX_CHUNKS = 64
"""A distribution is summed in at most so many parts; the second kernel holds them all at once."""
MIN_CHUNK = 1024
"""A chunk has at least so many tokens, and the second kernel looks at so many tokens at once."""
COLUMNS = 8  # chunks of every node that the second kernel looks at together; more do not fit into registers
MAX_REGISTERS = 255
"""Of a thread of the second kernel. Without a number of its own ptxas spills some to fit more programs on a processor,
and there are few."""


@jit
def _sum_kernel(probs, totals, counts, greatest, best, vocab, chunks, CHUNK: tl.constexpr):
    """Sum one part of one node's distribution: its mass (NaN if an entry is negative or NaN) and how many entries have
    mass. Find its greatest entry (NaN if there is a NaN), that with the lowest id."""
    node, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    p = tl.load(probs + node * vocab + token, mask=inside, other=0.0)
    number = p == p
    broken = tl.max((~(p >= 0)).to(tl.int32), 0)
    total = tl.sum(tl.where(number, p, 0.0).to(tl.float64), 0)
    high = tl.max(tl.where(inside & number, p, float("-inf")), 0)
    at = node * chunks + chunk
    tl.store(totals + at, tl.where(broken > 0, float("nan"), total))
    tl.store(counts + at, tl.sum((p > 0).to(tl.int32), 0))
    tl.store(greatest + at, tl.where(tl.min(number.to(tl.int32), 0) == 0, float("nan"), high))
    tl.store(best + at, tl.min(tl.where(inside & (p == high), token, vocab), 0))


@jit
def _residual(probs, tokens, next_token, next_sibling, first_node, last, first, vocab, BLOCK: tl.constexpr):
    """Return the last node's distribution from token `first` on, without its children's tokens:
    token ids int32, masses float64 [BLOCK]."""
    token = first + tl.arange(0, BLOCK)
    p = tl.load(probs + (first_node + last) * vocab + token, mask=token < vocab, other=0.0).to(tl.float64)
    child = tl.load(next_token + first_node + last)
    while child >= 0:
        p = tl.where(token == tl.load(tokens + first_node + child), 0.0, p)
        child = tl.load(next_sibling + first_node + child)
    return token, p


@jit
def _choose(
    probs,
    totals,
    counts,
    first_node,
    node,
    parent,
    token,
    coin,
    vocab,
    chunks,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return what each node's parent makes of it: whether the node's token leaves the parent's residual, and whether
    the node is the child that follows. A token counts once among siblings; a parent without a distribution is followed
    by no token."""
    above = first_node + parent
    known = (parent >= 0) & (token >= 0) & (token < vocab)
    total = tl.zeros([NODES], tl.float64)
    count = tl.zeros([NODES], tl.int32)
    for first in range(0, chunks, COLUMNS):
        part = first + tl.arange(0, COLUMNS)
        cells = above[:, None] * chunks + part[None, :]
        there = known[:, None] & (part < chunks)[None, :]
        total += tl.sum(tl.load(totals + cells, mask=there, other=0.0), 1)
        count += tl.sum(tl.load(counts + cells, mask=there, other=0), 1)
    usable = (total > 0) & (total < float("inf"))
    same_parent = parent[:, None] == parent[None, :]
    earlier = node[:, None] < node[None, :]  # [earlier node, node]
    repeated = same_parent & earlier & (token[:, None] == token[None, :])
    known = known & (tl.max(repeated.to(tl.int32), 0) == 0) & usable
    mass = tl.load(probs + above * vocab + token, mask=known, other=0.0).to(tl.float64)
    mass = mass / tl.where(usable, total, 1.0)
    possible = mass > 0
    siblings = same_parent & possible[:, None] & (parent >= 0)[None, :]
    reach = tl.sum(tl.where(siblings & (node[:, None] <= node[None, :]), mass[:, None], 0.0), 0)
    hit = possible & (coin < reach)
    # With all mass on the children the coin can only miss by rounding: the last possible child is meant.
    none_hit = tl.max((same_parent & hit[:, None]).to(tl.int32), 0) == 0
    is_last = tl.max((siblings & (node[:, None] > node[None, :])).to(tl.int32), 0) == 0
    exhausted = none_hit & (tl.sum(siblings.to(tl.int32), 0) == count)
    hit = hit | (possible & is_last & exhausted)
    rival = same_parent & hit[:, None] & earlier
    return known, hit & (tl.max(rival.to(tl.int32), 0) == 0)


@jit
def _sample(
    probs,
    tokens,
    next_token,
    next_sibling,
    totals,
    first_node,
    last,
    token,
    taken,
    coin,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the token of the last node's residual that its coin points at, −1 if it has no distribution; only one part
    of it is read.
    `taken`: the nodes whose tokens have left it."""
    part = tl.arange(0, CHUNKS)
    inside = part < chunks
    mass = tl.load(totals + (first_node + last) * chunks + part, mask=inside, other=0.0)
    total = tl.sum(mass, 0)
    usable = (total > 0) & (total < float("inf"))
    lost = tl.load(probs + (first_node + last) * vocab + token, mask=taken, other=0.0).to(tl.float64)
    gone = tl.sum(tl.where(taken[:, None] & ((token // CHUNK)[:, None] == part[None, :]), lost[:, None], 0.0), 0)
    mass = tl.maximum(mass - gone, 0.0)
    threshold = coin * tl.sum(mass, 0)
    chunk = tl.min(tl.where(inside & (tl.cumsum(mass, 0) > threshold), part, chunks - 1), 0)
    before = tl.sum(tl.where(part < chunk, mass, 0.0), 0)
    drawn = tl.full([], -1, tl.int64)
    first = chunk * CHUNK
    while usable & (drawn < 0) & (first < vocab):
        ids, p = _residual(probs, tokens, next_token, next_sibling, first_node, last, first, vocab, BLOCK)
        beyond = (before + tl.cumsum(p, 0) > threshold) & (p > 0)
        found = tl.min(tl.where(beyond, ids, vocab), 0)
        drawn = tl.where(found < vocab, found, -1).to(tl.int64)
        before += tl.sum(p, 0)
        first += BLOCK
    # The sums of parts can miss the threshold by rounding; then the last token with mass is meant.
    first = tl.zeros([], tl.int32) + (vocab - 1) // BLOCK * BLOCK
    while usable & (drawn < 0) & (first >= 0):
        ids, p = _residual(probs, tokens, next_token, next_sibling, first_node, last, first, vocab, BLOCK)
        drawn = tl.max(tl.where(p > 0, ids, -1), 0).to(tl.int64)
        first -= BLOCK
    return drawn


@jit
def _likeliest(greatest, best, at, inside, vocab, chunks, NODES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return each node's greatest entry: its lowest id int64 [NODES], −1 where there is a NaN, an
    infinity or nothing."""
    finite = tl.full([NODES], 1, tl.int32)
    top = tl.full([NODES], float("-inf"), greatest.dtype.element_ty)
    token = tl.zeros([NODES], tl.int32)
    for first in range(0, chunks, COLUMNS):
        part = first + tl.arange(0, COLUMNS)
        own = at[:, None] * chunks + part[None, :]
        there = inside[:, None] & (part < chunks)[None, :]
        high = tl.load(greatest + own, mask=there, other=float("-inf"))
        finite = tl.minimum(finite, tl.min((high < float("inf")).to(tl.int32), 1))
        highest = tl.max(tl.where(high == high, high, float("-inf")), 1)
        ids = tl.min(tl.load(best + own, mask=there & (high == highest[:, None]), other=vocab), 1)
        token = tl.where(highest > top, ids, token)
        top = tl.maximum(highest, top)
    return tl.where((finite > 0) & (top > float("-inf")), token, -1).to(tl.int64)


@jit
def _sampling_kernel(
    probs,
    tokens,
    parents,
    depths,
    ancestor_bits,
    next_token,
    next_sibling,
    totals,
    counts,
    greatest,
    best,
    accept_coins,
    bonus_coins,
    accept_index,
    accept_lens,
    predict,
    failed,
    width,
    vocab,
    chunks,
    NODE_COUNT: tl.constexpr,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < NODE_COUNT
    first_node = row * NODE_COUNT
    at = first_node + node
    parent = tl.load(parents + at, mask=inside, other=-1)
    token = tl.load(tokens + at, mask=inside, other=-1)
    depth = tl.load(depths + at, mask=inside, other=0)
    coin = tl.load(accept_coins + row * width + depth - 1, mask=(parent >= 0) & (depth > 0), other=1.0)
    known, chosen = _choose(probs, totals, counts, first_node, node, parent, token, coin, vocab, chunks, NODES, COLUMNS)
    one = tl.full([NODES], 1, tl.int64)
    chosen_bits = tl.sum(tl.where(chosen, one << node.to(tl.int64), 0), 0) | 1
    ancestors = tl.load(ancestor_bits + at, mask=inside, other=0)
    reached = inside & ((ancestors & ~chosen_bits) == 0)
    last = store_path(row, node, reached, depth, accept_index, accept_lens, NODE_COUNT, width, WIDTH)
    bonus_coin = tl.load(bonus_coins + row * width + tl.sum(reached.to(tl.int32), 0) - 1)
    taken = known & (parent == last)
    bonus = _sample(
        probs,
        tokens,
        next_token,
        next_sibling,
        totals,
        first_node,
        last,
        token,
        taken,
        bonus_coin,
        vocab,
        chunks,
        CHUNKS,
        CHUNK,
        BLOCK,
    )
    tl.store(failed + row, (bonus < 0).to(tl.int8))
    # On the path a node's token is the next node's; elsewhere it is the likeliest.
    follows = (parent[None, :] == node[:, None]) & reached[None, :]
    emitted = tl.max(tl.where(follows, token[None, :], -1), 1)
    emitted = tl.where(node == last, bonus, emitted)
    likeliest = _likeliest(greatest, best, at, inside, vocab, chunks, NODES, COLUMNS)
    tl.store(predict + at, tl.where(reached, emitted, likeliest), mask=inside)


def _warps(nodes: int) -> int:
    """Return so many warps that the tile of a large tree and a part of a distribution both fit into registers."""
    return 4 if nodes <= 32 else 8


def verify_sampling_triton(
    tree: DeviceTree, probs: Tensor, accept_coins: Tensor, bonus_coins: Tensor
) -> DeviceVerified:
    """Compute `verify_sampling_torch` in two launches.

    The first kernel sums every distribution in parts; the second, a program per row, reads only the part that it
    samples from.
    """
    batch_size, nodes = tree.tokens.shape
    n, vocab = probs.shape
    device, width = probs.device, tree.width
    accept_index = torch.empty(batch_size, width, dtype=torch.int32, device=device)
    accept_lens = torch.empty(batch_size, dtype=torch.int32, device=device)
    predict = torch.empty(n, dtype=torch.int64, device=device)
    failed = torch.empty(batch_size, dtype=torch.int8, device=device)
    if batch_size:
        probs = probs.contiguous()
        chunk = max(MIN_CHUNK, next_power_of_2(cdiv(vocab, MAX_CHUNKS)))
        chunks = cdiv(vocab, chunk)
        totals = torch.empty(n, chunks, dtype=torch.float64, device=device)
        greatest = torch.empty(n, chunks, dtype=probs.dtype, device=device)
        counts, best = (torch.empty(n, chunks, dtype=torch.int32, device=device) for _ in range(2))
        _sum_kernel[(n, chunks)](probs, totals, counts, greatest, best, vocab, chunks, CHUNK=chunk)
        _sampling_kernel[(batch_size,)](
            probs,
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.ancestor_bits,
            tree.next_token,
            tree.next_sibling,
            totals,
            counts,
            greatest,
            best,
            accept_coins.contiguous(),
            bonus_coins.contiguous(),
            accept_index,
            accept_lens,
            predict,
            failed,
            width,
            vocab,
            chunks,
            NODE_COUNT=nodes,
            NODES=next_power_of_2(nodes),
            WIDTH=next_power_of_2(width),
            CHUNKS=next_power_of_2(chunks),
            CHUNK=chunk,
            BLOCK=MIN_CHUNK,
            COLUMNS=min(COLUMNS, next_power_of_2(chunks)),
            num_warps=_warps(nodes),
            maxnreg=MAX_REGISTERS,
        )
    return DeviceVerified(accept_index, accept_lens, predict, failed.view(torch.bool))
