"""The part of a model that one of several ranks has (arXiv 1909.08053, section 3), and what ranks exchange.

    matrix                                   a rank has          its product
    q, k, v; gate, up; experts' gate, up;
      inputs of recurrent layers             rows of it          the rank's own heads or channels
    o; down; experts' down; their outputs    columns of it       summed over the ranks
    embeddings                               rows of it          summed: one rank has the token's row
    LM head                                  rows of it          gathered: every rank gets all logits
    norms, routers, MLA's first projections  all of it           computed by each rank

A layer is made of its rank's numbers of heads and channels (`sharded`), and its output projections exchange what they
compute (`Shard.total`). So the layers do not know whether they are parts. Where a model has fewer key-value heads than
there are ranks, several ranks have the same one.

Sums are those of all ranks' parts in the order of the ranks, on a CPU; on a GPU NCCL chooses the order. All ranks get
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import ConfigError, ForedraftError


class ExchangeFailed(ForedraftError):
    """An exchange has ended without a result, since another rank is gone. The parent knows which."""


SUM, GATHER = "sum", "gather"


class Exchanges:
    """Counts the exchanges that this process has begun. Of ranks that wait for each other, the one that has begun the
    fewest is the one that all others wait for."""

    def __init__(self) -> None:
        self.begun: int = 0
        self.group: dist.ProcessGroup | None = None  # of the ranks of this model; None: of all processes
        # Called with each one of a pass: its kind, and the bytes of the sum, or of what all ranks have gathered.
        self.on_exchange: Callable[[str, int], None] = lambda kind, num_bytes: None

    def begin(self, kind: str, num_bytes: int) -> None:
        self.begun += 1
        self.on_exchange(kind, num_bytes)


EXCHANGES: Exchanges = Exchanges()


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of a model's `size` parts. A model in one process is part 0 of 1."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, of one shape; on a GPU in place. On the device "meta", and alone, x."""
        if self.is_whole:
            return x
        EXCHANGES.begin(SUM, x.nbytes)
        if x.is_cuda:
            dist.all_reduce(x, group=EXCHANGES.group)
        if x.is_meta or x.is_cuda:
            return x
        parts = self._all_of(x)
        total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def gathered(self, x: Tensor, width: int) -> Tensor:
        """Return the columns of all ranks' x [n, c], the first `width` of size · c: [n, width]."""
        if self.is_whole:
            return x
        EXCHANGES.begin(GATHER, x.nbytes * self.size)
        parts = self._all_of(x)
        return parts.transpose(0, 1).flatten(1)[:, :width]

    def on_any(self, holds: bool) -> bool:
        """Return whether `holds` on any rank. Every rank must ask."""
        if self.is_whole:
            return holds
        EXCHANGES.begun += 1
        return bool(self._all_of(torch.tensor([int(holds)])).any())

    def _all_of(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape], in the order of the ranks."""
        parts = x.new_empty((self.size, *x.shape))
        if x.is_meta:
            return parts
        try:
            dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1), group=EXCHANGES.group)
        except RuntimeError as error:  # a rank is gone
            raise ExchangeFailed(str(error)) from error
        return parts


WHOLE: Shard = Shard()


def rank_devices(asked: str, size: int) -> tuple[str, ...]:
    """Return the device of each rank: all on the CPU, or a GPU of its own for each. Raises ConfigError."""
    num_gpus = torch.cuda.device_count() if asked in ("auto", "cuda") else 0
    if asked == "cpu" or (asked == "auto" and not num_gpus):
        return ("cpu",) * size
    if asked not in ("auto", "cuda"):
        message = f"{asked} is one device; {size} ranks need cuda, a GPU for each, or cpu"
        raise ConfigError.of("<arguments>", "device", message)
    if num_gpus < size:
        message = f"{size} ranks need {size} GPUs, torch finds {num_gpus}; --device cpu needs none"
        raise ConfigError.of("<arguments>", "tensor_parallel", message)
    return tuple(f"cuda:{rank}" for rank in range(size))


@dataclass(frozen=True, slots=True)
class ShardCut:
    """The part of a published tensor that a rank reads: ranges of one axis, in their order, and zeros behind them.

    A tensor of several fused ones has a range in each.
    """

    axis: int
    ranges: tuple[tuple[int, int], ...]
    num_zeros: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor, or of safetensors' slice of one, which reads nothing else."""
        before = (slice(None),) * self.axis
        parts = [tensor[(*before, slice(begin, end))] for begin, end in self.ranges]
        if self.num_zeros:
            shape = list(parts[0].shape)
            shape[self.axis] = self.num_zeros
            parts.append(parts[0].new_zeros(shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)


def cut_of(
    whole: Sequence[int], part: Sequence[int], shard: Shard, fused: tuple[Sequence[int], Sequence[int]] | None = None
) -> ShardCut | None:
    """Return which part of a tensor of shape `whole` a rank has in one of shape `part`; None: all of it.

    `fused`: the rows of the tensors that the first axis stacks, published and of a rank. The axis that differs is
    divided among the ranks; heads that are fewer than the ranks are copied, and rows that do not suffice are zeros.
    """
    axes = [axis for axis, (all_of, own) in enumerate(zip(whole, part, strict=True)) if all_of != own]
    if not axes:
        return None
    (axis,) = axes
    totals, own = fused if fused is not None else ([whole[axis]], [part[axis]])
    ranges, first, num_zeros = [], 0, 0
    for total, length in zip(totals, own, strict=True):
        begin = shard.rank * -(-total // length) // shard.size * length
        end = min(begin + length, total)
        ranges.append((first + min(begin, total), first + end))
        num_zeros += length - max(0, end - begin)
        first += total
    return ShardCut(axis, tuple(ranges), num_zeros)
