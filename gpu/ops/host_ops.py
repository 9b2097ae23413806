"""The operations of a CPU: torch's, and the layers of a dense model for a few tokens in compiled kernels.

At batch 1 the time of a pass over a small model is the overhead of its calls: torch has some forty small operations in
every layer, `kernels.host` has five. The same weights, the same pools, the same formulas as `models.layer.run_layers`,
which does everything else: prompts, large batches, experts, narrow dtypes, several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..batch.pools import PagedAttention
from ..kernels import host
from ..models.layer import Layer, run_layers
from ..models.mixers import GroupedAttention
from ..models.mlps import DenseMlp
from ..types.attention import BatchAttention
from ..types.ops import NO_CAPTURE, Capture, DecodeBatch, DecoderLayer, ExtendBatch, LayersOutput
from .torch_ops import TorchOps


class HostPass(NamedTuple):
    """A pass over n tokens: what `kernels.host.attend` says of their keys, and the pools of every layer."""

    table: np.ndarray
    keys: np.ndarray
    nodes: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    pools: tuple[tuple[np.ndarray, np.ndarray], ...]


def host_pass_of(attention: PagedAttention) -> HostPass | None:
    """Return the pass if it is one of a few tokens of rounds over pools that NumPy can read, else None."""
    pools, batch, n = attention.pool.on_host, attention.batch, len(attention.positions)
    if not host.HAS_NUMBA or pools is None or isinstance(batch, ExtendBatch) or not 0 < n <= host.MAX_TOKENS:
        return None
    keys, nodes = np.zeros((n, 4), np.int64), np.zeros((n, 2), np.int64)
    if isinstance(batch, DecodeBatch):
        for column, values in enumerate((batch.rows, batch.bases, batch.tails, batch.lens)):
            keys[:, column] = values.numpy()
    else:
        bits, packing = batch.ancestor_bits.numpy(), batch.packing
        own = np.arange(n) if packing is None else packing.nodes.numpy()
        row, roots = own // bits.shape[1], own // bits.shape[1] * bits.shape[1]
        nodes[:, 0], nodes[:, 1] = roots, bits.ravel()[own]
        if packing is not None:
            nodes[:, 0] = packing.places.numpy()[roots]
            fills = np.flatnonzero(nodes[:, 0] + own - roots != np.arange(n))  # not verified: each sees itself
            nodes[fills, 0], nodes[fills, 1] = fills, 1
        keys[:, 0], keys[:, 1] = batch.rows.numpy()[row], batch.prefix_lens.numpy()[row]
        keys[:, 3] = keys[:, 1] * (nodes[:, 1] != 0)  # a node that sees not even itself is padding
    return HostPass(batch.table.numpy(), keys, nodes, attention.positions.numpy(), attention.slots.numpy(), pools)


class HostLayer:
    """One `Layer` with a dense MLP. Arrays are [n, …] for the n tokens of a pass."""

    def __init__(self, layer: Layer) -> None:
        mixer, mlp = layer.mixer, layer.mlp
        assert isinstance(mixer, GroupedAttention) and isinstance(mlp, DenseMlp), "other layers are not done here"
        products = [one.compiled for one in (*mixer.projections, *mlp.projections)]
        self._qkv, self._output, self._gate_up, self._down = [one for one in products if one is not None]
        self._hq, self._hk, self._d = mixer.heads[0], mixer.heads[1], mixer.head_dim
        self._scale = mixer.softmax.scale or mixer.head_dim**-0.5
        self._window, self._index, self._eps = mixer.softmax.window, layer.index, layer.eps
        self._is_rotated = mixer.rope is not None
        nothing = np.zeros(0, self._qkv.bias.dtype)
        norms = (*layer.norms, mixer.q_norm, mixer.k_norm)
        self._norms = [nothing if norm is None else array(norm) for norm in norms]

    def run(self, residual: np.ndarray, host_pass: HostPass, cos_sin: np.ndarray, given: np.ndarray | None) -> None:
        """Run the layer over residual [n, H], in place. `given` [n, input size] replaces the normed residual."""
        n, input_norm, mlp_norm, q_norm, k_norm = len(residual), *self._norms
        qkv = np.empty((n, self._hq + 2 * self._hk, self._d), residual.dtype)
        flat = qkv.reshape(n, -1)
        if given is not None or not input_norm.size:
            host.multiply(residual if given is None else given, *self._qkv, False, flat)
        else:
            host.norm_multiply(residual, input_norm, self._eps, *self._qkv, flat)
        table, keys, nodes, positions, slots, pools = host_pass
        heads, angles = (self._hq, self._hk), cos_sin if self._is_rotated else cos_sin[:0]
        host.prepare(qkv, *heads, q_norm, k_norm, self._eps, angles, positions, *pools[self._index], slots)
        attended = np.empty((n, self._hq * self._d), residual.dtype)
        host.attend(qkv, *heads, *pools[self._index], table, keys, nodes, self._window, self._scale, attended)
        host.multiply(attended, *self._output, True, residual)
        gate_up = np.empty((n, self._gate_up.num_outputs), residual.dtype)
        host.norm_multiply(residual, mlp_norm, self._eps, *self._gate_up, gate_up)
        host.gate_multiply(gate_up, *self._down, residual)


class HostOps(TorchOps):
    """`Ops` of a CPU. Passes of a few tokens go through compiled kernels where the layers can, and where
    `pack_projections` has laid them out for inference."""

    def __init__(self) -> None:
        super().__init__()
        # By the first layer.
        self._host_layers: dict[DecoderLayer, tuple[Sequence[DecoderLayer], tuple[HostLayer, ...]]] = {}

    def run_layers(
        self,
        layers: Sequence[DecoderLayer],
        residual: Tensor,
        attention: BatchAttention,
        cos_sin: Tensor,
        first_input: Tensor | None = None,
        final_norm: Tensor | None = None,
        capture: Capture = NO_CAPTURE,
    ) -> LayersOutput:
        host_pass = None
        if isinstance(attention, PagedAttention) and attention.ops is self:
            host_pass = host_pass_of(attention)
        host_layers = self._layers_on_host(layers) if host_pass is not None else ()
        if host_pass is None or not host_layers:
            return run_layers(layers, residual, attention, cos_sin, first_input, final_norm, capture)
        state, angles, aux = array(residual).copy(), array(cos_sin), []
        given = None if first_input is None else np.ascontiguousarray(array(first_input))
        for place, layer in enumerate(host_layers):
            if place in capture.aux_layers:
                aux.append(state.copy())
            layer.run(state, host_pass, angles, None if place else given)
        if len(layers) in capture.aux_layers:
            aux.append(state)
        last = torch.from_numpy(state)
        hidden = last if final_norm is None else self.rms_norm(last, final_norm, layers[0].eps)
        return LayersOutput(hidden, last, torch.from_numpy(np.concatenate(aux, axis=1)) if aux else None, None)

    def _layers_on_host(self, layers: Sequence[DecoderLayer]) -> tuple[HostLayer, ...]:
        """Return the layers as the host runs them; none if it cannot run all of them."""
        known = self._host_layers.get(layers[0])
        if known is not None and known[0] is layers:
            return known[1]
        able = [layer for layer in layers if isinstance(layer, Layer) and can_run_on_host(layer)]
        if len(able) < len(layers):
            return ()
        found = tuple(map(HostLayer, able))
        self._host_layers[layers[0]] = layers, found
        return found


def can_run_on_host(layer: Layer) -> bool:
    """Return whether a layer is dense and plain, with products that compiled kernels make whole."""
    if not (isinstance(layer.mlp, DenseMlp) and isinstance(layer.mixer, GroupedAttention) and layer.is_plain):
        return False
    products = (*layer.mixer.projections, *layer.mlp.projections)
    return all(one.compiled is not None and one.is_whole for one in products)


def array(tensor: Tensor) -> np.ndarray:
    """Return the tensor's memory as an array."""
    return tensor.detach().numpy()
