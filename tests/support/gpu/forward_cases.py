"""The results of the forward pass's operations, computed one query at a time."""

from __future__ import annotations

import torch
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.selftest.batches import PagedBatch
from foredraft.gpu.types.attention import PLAIN, Softmax
from foredraft.gpu.types.ops import DecodeBatch
from torch import Tensor

BOTH = TWINS, KERNELS = TorchOps(), TritonOps()
NAME = lambda ops: type(ops).__name__  # noqa: E731
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        actual, expected.to(actual.dtype), rtol=TOLERANCE[actual.dtype], atol=TOLERANCE[actual.dtype]
    )


def strided(x: Tensor) -> Tensor:
    """The same values as a slice of a wider tensor, as q, k and v are of one projection."""
    wide = torch.full((x.shape[0], x.shape[1] + 2, *x.shape[2:]), float("nan"), dtype=x.dtype)
    wide[:, 1:-1] = x
    return wide[:, 1:-1]


def attend_one(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, distances: list[int]) -> Tensor:
    """One query [Hq, d] over k, v [keys, Hk, d] that stand `distances` positions before it, in float64;
    0 without keys."""
    near = [i for i, distance in enumerate(distances) if not softmax.window or distance < softmax.window]
    if not near:
        return torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[0] // k.shape[1]
    k, v = k[near].double().repeat_interleave(group, 1), v[near].double().repeat_interleave(group, 1)
    scale = q.shape[1] ** -0.5 if softmax.scale is None else softmax.scale
    scores = torch.einsum("hd,jhd->hj", q.double(), k) * scale
    if softmax.softcap:
        scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
    if softmax.sinks is not None:
        scores = torch.cat((scores, softmax.sinks.double().unsqueeze(1)), 1)
    return torch.einsum("hj,jhd->hd", torch.softmax(scores, 1)[:, : len(near)], v)


def dense_decode(batch: PagedBatch, view: DecodeBatch, softmax: Softmax = PLAIN) -> Tensor:
    out = []
    for i, q in enumerate(batch.q):
        columns = [j if j < view.bases[i] else int(view.tails[i] + j - view.bases[i]) for j in range(int(view.lens[i]))]
        slots = batch.table[view.rows[i], columns].long()
        out.append(attend_one(q, batch.k_pool[slots], batch.v_pool[slots], softmax, [*range(len(slots))][::-1]))
    return torch.stack(out) if out else torch.zeros_like(batch.q)


def prefix_of(batch: PagedBatch, i: int) -> tuple[Tensor, Tensor]:
    slots = batch.table[batch.rows[i], : int(batch.prefix_lens[i])].long()
    return batch.k_pool[slots], batch.v_pool[slots]


def dense_verify(batch: PagedBatch, bits: Tensor, softmax: Softmax = PLAIN) -> Tensor:
    bs, nd = bits.shape
    out = torch.zeros_like(batch.q, dtype=torch.float64)
    for i in range(bs):
        k, v = prefix_of(batch, i)
        for node in range(nd):
            seen = [i * nd + j for j in range(nd) if int(bits[i, node]) >> j & 1]
            if seen:
                keys, values = torch.cat((k, batch.k[seen])), torch.cat((v, batch.v[seen]))
                # Siblings stand at one position: a node's ancestors count, not the nodes between them.
                distances = [*range(len(keys))][::-1]
                out[i * nd + node] = attend_one(batch.q[i * nd + node], keys, values, softmax, distances)
    return out


def dense_extend(batch: PagedBatch, softmax: Softmax = PLAIN) -> Tensor:
    out = torch.zeros_like(batch.q, dtype=torch.float64)
    for i in range(len(batch.rows)):
        k, v = prefix_of(batch, i)
        first = int(batch.starts[i])
        for token in range(first, int(batch.starts[i + 1])):
            keys = torch.cat((k, batch.k[first : token + 1]))
            values = torch.cat((v, batch.v[first : token + 1]))
            out[token] = attend_one(batch.q[token], keys, values, softmax, [*range(len(keys))][::-1])
    return out


def rotate_one(x: Tensor, table: Tensor, position: int) -> Tensor:
    """x [heads, d] turned by the angles of one position: pairs (c, c + d/2), as complex numbers."""
    half = x.shape[1] // 2
    turned = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.complex(
        table[position, :half].double(), table[position, half:].double()
    )
    return torch.cat((turned.real, turned.imag), 1)
