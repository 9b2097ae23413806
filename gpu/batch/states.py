"""The pool of recurrent states on a device, and how each kind of pass reads and writes it.

The slot of a request is its row of the request table: `core` gives each running request a row, takes it back behind
the fence of the last step that may touch it, and lets requests wait while none is free. Row 0 is padding.

    prompt chunk     zero at position 0, else the row's state        the row's state after the chunk
    decode round     the row's state, for all nodes of the tree      after acceptance: the state after the accepted path
    draft's branch   a copy of the row's state per branch            the copy; the row's state stays

A round keeps a few vectors of each node instead of its state, and applies those of the accepted path when it is known
(`kernels/layers/delta_rule.py`). So nothing is rolled back: what is rejected was never in the row's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.errors import InvariantViolation
from ..kernels.constants import numbers
from ..kernels.layers.delta_rule import WINDOW, advanced, chain, run_tokens, tree_links
from ..types.attention import Packing
from ..types.ops import DeviceTree, DeviceVerified
from ..types.recurrence import Inputs, Links, Nodes, RecurrentWeights, States, StateShape
from .zeros import zeros


class StatePool:
    """The states of every recurrent layer by row, [num_rows + 1, …]. With `debug` it checks before each pass that a
    row's state is the one after as many tokens as the row has; that waits for the device."""

    def __init__(
        self, shapes: Sequence[StateShape], num_rows: int, dtype: torch.dtype, device: torch.device, debug: bool = False
    ) -> None:
        wide, (s, *others) = torch.promote_types(dtype, torch.float32), shapes
        assert all(other == s for other in others), "the recurrent layers of a model are alike"
        size = (len(shapes), num_rows + 1)
        self.all_layers: States = States(
            zeros((*size, s.heads, s.key_dim, s.value_dim), wide, device),
            zeros((*size, s.kernel - 1, s.channels), dtype, device),
        )
        both = zip(self.all_layers.matrices, self.all_layers.inputs, strict=True)
        self.layers: tuple[States, ...] = tuple(States(*layer) for layer in both)
        self.lengths: Tensor = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._debug = debug

    @property
    def num_bytes(self) -> int:
        return self.all_layers.matrices.nbytes + self.all_layers.inputs.nbytes

    def at(self, layer: int, rows: Tensor) -> States:
        """Return a copy of the states of int64 rows [B] in a layer."""
        states = self.layers[layer]
        return States(states.matrices[rows], states.inputs[rows])

    def write(self, layer: int, rows: Tensor, states: States) -> None:
        own = self.layers[layer]
        own.matrices[rows] = states.matrices
        own.inputs[rows] = states.inputs

    def check(self, rows: Tensor, lengths: Tensor) -> None:
        """Raise RELAY-03 if, debugging, the state of a row is not the one after its `lengths` int64 [B] tokens."""
        if self._debug and rows.device.type != "meta":
            found = self.lengths[rows]
            if bool(((found != lengths) & (rows > 0)).any()):
                message = (
                    f"rows {rows.tolist()} have states after {found.tolist()} tokens, and {lengths.tolist()} in KV"
                )
                raise InvariantViolation("RELAY-03", message)


class FusedRecurrence(NamedTuple):
    """Kernels for the new tokens of a round, and for those of them that stay."""

    run: Callable[[States, Tensor, Tensor, RecurrentWeights, StateShape, Links, Nodes, int], Tensor]
    keep: Callable[[States, Tensor, Nodes, Tensor, Tensor], None]


class ChunkStates:
    """Of prompt chunks: n tokens of B rows, row i's from starts[i] on. `kept` int64 [B] of each row's tokens enter its
    state; a draft's pass may have one more."""

    def __init__(
        self, pool: StatePool, rows: Tensor, prefix_lens: Tensor, starts: Tensor, kept: Tensor, max_len: int
    ) -> None:
        self._pool, self._rows, self._first = pool, rows, prefix_lens == 0
        self._starts, self._lens, self._kept, self._max_len = starts, starts.diff(), kept, max_len
        pool.check(rows, torch.where(self._first, pool.lengths[rows], prefix_lens))
        pool.lengths[rows] = prefix_lens + kept

    def run(self, layer: int, inputs: Inputs, kernel: Tensor, shape: StateShape) -> Tensor:
        """See `PassStates`."""
        pool, begins = self._pool, self._starts[:-1]
        found = pool.at(layer, self._rows)
        is_first = self._first.view(-1, 1, 1)
        states = States(
            found.matrices.masked_fill(is_first.unsqueeze(-1), 0.0), found.inputs.masked_fill(is_first, 0.0)
        )
        n, parts = len(inputs.mixed), []
        for begin in range(0, self._max_len, WINDOW):
            width = min(WINDOW, self._max_len - begin)
            order = numbers(width, begins.device)
            places = (begins.unsqueeze(1) + begin + order).clamp(max=n - 1)
            links = chain(len(begins), width, begins.device)
            out, nodes = run_tokens(shape, states, inputs.at(places), kernel, links)
            kept = (self._kept - begin).clamp(0, width)
            states = advanced(states, nodes, order.expand(len(begins), -1), kept)
            parts.append(out)
        pool.write(layer, self._rows, states)
        places = numbers(n, begins.device)
        owners = torch.searchsorted(self._starts, places, right=True) - 1
        return torch.cat(parts, 1)[owners, places - begins[owners]]


class TreeStates:
    """Of the nodes of a decode round, or of the window of a draft's catch-up, until `keep` says which of them stay."""

    def __init__(
        self, pool: StatePool, rows: Tensor, lengths: Tensor, links: Links, packing: Packing | None = None
    ) -> None:
        pool.check(rows, lengths)
        self._pool, self._rows, self._lengths, self._links = pool, rows, lengths, links
        self._packing = packing
        self._nodes: list[Nodes] = []
        self._fused: tuple[Nodes, FusedRecurrence] | None = None  # nodes of all layers, and what keeps them

    @classmethod
    def of_tree(
        cls, pool: StatePool, rows: Tensor, lengths: Tensor, tree: DeviceTree, packing: Packing | None
    ) -> TreeStates:
        return cls(pool, rows, lengths, tree_links(tree.parents, tree.ancestor_bits), packing)

    @classmethod
    def of_window(cls, pool: StatePool, rows: Tensor, lengths: Tensor, columns: int) -> TreeStates:
        return cls(pool, rows, lengths, chain(len(rows), columns, rows.device))

    def run(self, layer: int, inputs: Inputs, kernel: Tensor, shape: StateShape) -> Tensor:
        """See `PassStates`."""
        assert layer == len(self._nodes), "a pass runs each layer once, in order"
        states, packing = self._pool.at(layer, self._rows), self._packing
        if packing is not None:
            inputs = inputs.at(packing.places)
        out, nodes = run_tokens(shape, states, inputs.unflattened(len(self._rows)), kernel, self._links)
        self._nodes.append(nodes)
        out = out.flatten(0, 1)
        return out if packing is None else packing.pick(out)

    @property
    def width(self) -> int:
        """New tokens of each row."""
        return self._links.parents.shape[1]

    def run_fused(
        self,
        recurrence: FusedRecurrence,
        layer: int,
        projected: Tensor,
        weights: RecurrentWeights,
        shape: StateShape,
    ) -> Tensor:
        """Do what `Ops.recur` says with kernels, which read the states in the pool."""
        if self._fused is None:
            num_layers = len(self._pool.layers)
            nodes = Nodes.empty(num_layers, self.width, self._rows, shape, projected.dtype)
            self._fused = nodes, recurrence
        nodes, _ = self._fused
        packing = self._packing
        if packing is not None:
            projected = packing.spread(projected)
        out = recurrence.run(self._pool.layers[layer], self._rows, projected, weights, shape, self._links, nodes, layer)
        return out if packing is None else packing.pick(out)

    def keep_verified(self, verified: DeviceVerified, num_nodes: int) -> None:
        """Put the states after the accepted paths into the rows."""
        firsts = numbers(len(self._rows), self._rows.device).unsqueeze(1) * num_nodes
        self.keep(verified.accept_index.long() - firsts, verified.accept_lens.long())

    def keep(self, path: Tensor, lens: Tensor) -> None:
        """Put the states after the first `lens` int64 [B] nodes of `path` int64 [B, P] into the rows."""
        if self._fused is not None:
            nodes, recurrence = self._fused
            recurrence.keep(self._pool.all_layers, self._rows, nodes, path, lens)
        for layer, nodes in enumerate(self._nodes):
            self._pool.write(layer, self._rows, advanced(self._pool.at(layer, self._rows), nodes, path, lens))
        self._pool.lengths[self._rows] = self._lengths + lens


class BranchStates:
    """Of a draft's branches, `branches` per row, for the passes of one proposal: copies that only these passes see."""

    def __init__(self, pool: StatePool, rows: Tensor, lengths: Tensor, branches: int) -> None:
        pool.check(rows, lengths)
        self._pool, rows = pool, rows.repeat_interleave(branches)
        self._branches = branches
        self._states = [pool.at(layer, rows) for layer in range(len(pool.layers))]

    def run(self, layer: int, inputs: Inputs, kernel: Tensor, shape: StateShape) -> Tensor:
        """See `PassStates`. A pass has the same number of tokens of each branch."""
        states = self._states[layer]
        inputs = inputs.unflattened(len(states.matrices))
        size, width = inputs.mixed.shape[:2]
        device = inputs.mixed.device
        out, nodes = run_tokens(shape, states, inputs, kernel, chain(size, width, device))
        order = numbers(width, device).expand(size, -1)
        self._states[layer] = advanced(states, nodes, order, order.new_full((size,), width))
        return out.flatten(0, 1)

    def follow(self, sources: Tensor) -> None:
        """Let each branch go on from that of its parent, whose number in the row is int64 sources [bs, branches]."""
        firsts = numbers(len(sources), sources.device).unsqueeze(1) * self._branches
        places = (firsts + sources).flatten()
        self._states = [States(s.matrices[places], s.inputs[places]) for s in self._states]
