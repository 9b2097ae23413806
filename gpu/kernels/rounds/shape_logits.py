"""Biases, penalties, masks of grammars and min-p, for the logits of all nodes of a batch of verify trees.

A node's text is its row's text and the node's path. The row's tokens are counted in `LogitTables`, and those of the
path are found by the tree's ancestor bits, so no text is read. Logits below 32 bits are computed in 32 bits and rounded
once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...types.ops import DeviceTree, LogitTables, NodeMasks
from ..constants import numbers
from ..jit import cdiv, jit, next_power_of_2, tl

BLOCK = 1024
"""Tokens of the vocabulary that one program changes."""
REPETITION, FREQUENCY, PRESENCE, BIASED, MIN_P = range(5)
"""Columns of `LogitTables.params`."""
NEUTRAL = (1.0, 0.0, 0.0, 0.0, float("-inf"))
"""The parameters of a row whose logits do not change."""


def shape_logits_torch(
    logits: Tensor, rows: Tensor, tables: LogitTables, tree: DeviceTree | None = None, masks: NodeMasks | None = None
) -> Tensor:
    """Change the rows one by one, each only where its text or its biases have tokens: a CPU pays for what is there."""
    out = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
    nodes = len(out) // max(len(rows), 1)
    params = tables.params[rows].tolist()
    for i, row in enumerate(rows.tolist()):
        block = out[i * nodes : (i + 1) * nodes]
        if params[i][BIASED]:
            biased = tables.bias[row].nonzero().squeeze(1)
            block[:, biased] += tables.bias[row, biased].to(out.dtype)
        if params[i][:BIASED] != list(NEUTRAL[:BIASED]):
            path = None if tree is None else (tree.tokens[i], tree.ancestor_bits[i])
            _penalise(block, tables.seen[row], params[i], path)
    if masks is not None:
        index = masks.index.tolist()
        for node, mask in enumerate(index):
            if mask >= 0:
                bits = masks.bits[mask].unsqueeze(1) >> numbers(32, out.device, torch.int32)
                out[node].masked_fill_((bits & 1).view(-1)[: out.shape[1]] == 0, -torch.inf)
    out = out.to(logits.dtype)
    for i, row_params in enumerate(params):
        if row_params[MIN_P] != -torch.inf:
            block = out[i * nodes : (i + 1) * nodes]
            values = block if out.dtype == torch.float64 else block.float()
            block.masked_fill_(values < values.amax(1, keepdim=True) + row_params[MIN_P], -torch.inf)
    return out


def _penalise(block: Tensor, seen: Tensor, params: list[float], tree: tuple[Tensor, Tensor] | None) -> None:
    """Penalise logits [nd, V] of one row in place: the tokens of its text at all nodes, then those of each path again,
    from their logits before."""
    fixes = None if tree is None or len(block) == 1 else _on_paths(block, seen, params, *tree)
    text = torch.from_numpy(seen.numpy().nonzero()[0])
    block[:, text] = _penalised(block[:, text], seen[text], params)
    if fixes is not None:
        nodes, tokens, values = fixes
        block[nodes, tokens] = values


def _on_paths(
    block: Tensor, seen: Tensor, params: list[float], tokens: Tensor, ancestor_bits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nodes int64 [m], tokens int64 [m] and penalised logits [m] of all tokens on the nodes' paths."""
    order = numbers(len(tokens), block.device)
    on_path = (ancestor_bits.unsqueeze(1) >> order & 1).bool()
    on_path &= (tokens >= 0) & (tokens < len(seen))
    on_path[:, 0] = False  # the root is in the text already
    times = on_path.int() @ (tokens.unsqueeze(1) == tokens).int()
    nodes, places = on_path.nonzero(as_tuple=True)
    found = tokens[places]
    return nodes, found, _penalised(block[nodes, found], seen[found] + 2 * times[nodes, places], params)


def _penalised(values: Tensor, seen: Tensor, params: list[float]) -> Tensor:
    """Return logits of tokens whose entries of `LogitTables.seen`, broadcast to the logits' shape, are given."""
    repetition, frequency, presence = params[:BIASED]
    if repetition != 1.0:
        changed = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(seen != 0, changed, values)
    if frequency or presence:
        times = seen >> 1
        values = values - torch.where(times > 0, times.to(values.dtype) * frequency + presence, 0.0)
    return values


@jit
def _shape_kernel(
    logits,
    out,
    rows,
    seen,
    bias,
    params,
    tokens,
    ancestor_bits,
    mask_index,
    masks,
    greatest,
    nodes,
    vocab,
    words,
    HAS_PATHS: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64)
    entry = node // nodes
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < vocab
    row = tl.load(rows + entry)
    kind = tl.float64 if IS_DOUBLE else tl.float32
    repetition = tl.load(params + row * 5).to(kind)
    frequency = tl.load(params + row * 5 + 1).to(kind)
    presence = tl.load(params + row * 5 + 2).to(kind)
    biased = tl.where(tl.load(params + row * 5 + 3) > 0, vocab, 0)
    is_penalised = (repetition != 1) | (frequency != 0) | (presence != 0)
    penalised = tl.where(is_penalised, vocab, 0)

    value = tl.load(logits + node * vocab + lane, mask=inside, other=float("-inf")).to(kind)
    value += tl.load(bias + row * vocab + lane, mask=lane < biased, other=0.0).to(kind)
    entries = tl.load(seen + row * vocab + lane, mask=lane < penalised, other=0)
    if HAS_PATHS:
        bits = tl.load(ancestor_bits + node)
        for other in range(1, nodes):  # the root is in the text already
            token = tl.load(tokens + entry * nodes + other)
            is_on_path = (bits >> tl.cast(other, tl.int64)) & 1
            entries += tl.where((lane == token) & (lane < penalised), 2 * is_on_path.to(tl.int32), 0)
    if IS_DOUBLE:
        divided = value / repetition
    else:
        divided = tl.div_rn(value, tl.full([BLOCK], 1, kind) * repetition)
    value = tl.where(entries != 0, tl.where(value > 0, divided, value * repetition), value)
    times = entries >> 1
    value -= tl.where(times > 0, times.to(kind) * frequency + presence, 0.0)
    if HAS_MASKS:
        mask = tl.load(mask_index + node).to(tl.int64)
        word = tl.load(masks + mask * words + lane // 32, mask=lane < tl.where(mask >= 0, vocab, 0), other=-1)
        value = tl.where(((word >> (lane % 32)) & 1) != 0, value, float("-inf"))
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + node * vocab + lane, rounded, mask=inside)
    tl.store(greatest + node * tl.num_programs(1) + tl.program_id(1), tl.max(rounded.to(kind), 0))


@jit
def _min_p_kernel(
    out,
    rows,
    params,
    greatest,
    nodes,
    vocab,
    blocks,
    IS_DOUBLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + node // nodes)
    cut = tl.load(params + row * 5 + 4)
    if cut != float("-inf"):
        kind = tl.float64 if IS_DOUBLE else tl.float32
        part = tl.arange(0, BLOCKS)
        best = tl.max(tl.load(greatest + node * blocks + part, mask=part < blocks, other=float("-inf")), 0)
        lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = lane < vocab
        value = tl.load(out + node * vocab + lane, mask=inside, other=0.0).to(kind)
        tl.store(out + node * vocab + lane, float("-inf"), mask=inside & (value < best + cut.to(kind)))


def shape_logits_triton(
    logits: Tensor, rows: Tensor, tables: LogitTables, tree: DeviceTree | None = None, masks: NodeMasks | None = None
) -> Tensor:
    logits = logits.contiguous()
    n, vocab = logits.shape
    out = torch.empty_like(logits)
    if not n:
        return out
    blocks, is_double = cdiv(vocab, BLOCK), logits.dtype == torch.float64
    greatest = torch.empty(n, blocks, dtype=torch.float64 if is_double else torch.float32, device=logits.device)
    nodes, path, ancestors = n // len(rows), rows, rows
    if has_paths := tree is not None and tree.num_nodes > 1:
        path, ancestors = tree.tokens, tree.ancestor_bits
    _shape_kernel[(n, blocks)](
        logits,
        out,
        rows,
        tables.seen,
        tables.bias,
        tables.params,
        path,
        ancestors,
        rows if masks is None else masks.index,
        rows if masks is None else masks.bits,
        greatest,
        nodes,
        vocab,
        1 if masks is None else masks.bits.shape[1],
        HAS_PATHS=has_paths,
        HAS_MASKS=masks is not None,
        IS_DOUBLE=is_double,
        BLOCK=BLOCK,
        enable_fp_fusion=False,  # each operation is rounded, as torch rounds it
    )
    _min_p_kernel[(n, blocks)](
        out,
        rows,
        tables.params,
        greatest,
        nodes,
        vocab,
        blocks,
        IS_DOUBLE=is_double,
        BLOCKS=next_power_of_2(blocks),
        BLOCK=BLOCK,
    )
    return out


def count_tokens_torch_(seen: Tensor, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
    counted = (numbers(tokens.shape[1], tokens.device) < lens.unsqueeze(1)) & (tokens >= 0) & (rows != 0).unsqueeze(1)
    places = rows.unsqueeze(1) * seen.shape[1] + tokens.clamp(min=0)
    seen.view(-1).scatter_add_(0, places.view(-1), (counted.view(-1) * 2).int())


@jit
def _count_kernel(seen, rows, tokens, lens, vocab, width, WIDTH: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    row = tl.load(rows + entry)
    token = tl.load(tokens + entry * width + lane, mask=lane < width, other=-1)
    counted = (token >= 0) & (lane < tl.where(row == 0, 0, tl.load(lens + entry)))
    tl.atomic_add(seen + row * vocab + token, tl.full([WIDTH], 2, tl.int32), mask=counted)


def count_tokens_triton_(seen: Tensor, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
    if tokens.numel():
        tokens, width = tokens.contiguous(), tokens.shape[1]
        _count_kernel[(len(rows),)](
            seen, rows, tokens, lens, seen.shape[1], width, WIDTH=next_power_of_2(width), num_warps=1
        )
