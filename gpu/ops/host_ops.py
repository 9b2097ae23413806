"""The operations of a CPU: torch's, and the layers of a small dense model for a few tokens of one row on NumPy's
arrays.

At batch 1 the time of a pass over a small model is the overhead of its calls: some forty small operations in every
layer. NumPy's take a third to a half of the time of torch's, and so do its products of a few rows with a small matrix.
The same weights, the same pools, the same formulas as `models.layer.run_layers`, which stays the reference and does
everything else: prompts, batches, experts, narrow dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..batch.pools import PagedAttention
from ..models.layer import Layer, run_layers
from ..models.mixers import GroupedAttention
from ..models.mlps import DenseMlp
from ..types.attention import BatchAttention
from ..types.ops import NO_CAPTURE, Capture, DecodeBatch, DecoderLayer, ExtendBatch, LayersOutput, VerifyBatch
from .torch_ops import TorchOps

Slots = slice | np.ndarray
"""Places in a pool: neighbours as a slice, which is read where it lies, others int64 [n]."""


@dataclass(frozen=True, slots=True)
class HostKeys:
    """n new tokens of one row, behind their prefix.

    `read` are the pool slots of all keys, or with `own` those of the prefix, behind which the new tokens' own keys
    follow. `sees` bool [n, n]: which new tokens a new token sees; None: all (n is 1). Every token sees the prefix,
    `length` tokens, unless a window hides its begin.
    """

    read: Slots
    own: bool
    write: Slots
    positions: np.ndarray
    sees: np.ndarray | None
    length: int

    def hidden_by(self, window: int, group: int, dtype: str) -> np.ndarray | None:
        """Return the bias that a window adds to the scores [n · group, keys], 0 or −inf; None if the window hides
        nothing."""
        n = 1 if self.sees is None else len(self.sees)
        if not window or self.length + n <= window:
            return None
        return _outside(window, self.length, b"\1" if self.sees is None else self.sees.tobytes(), group, dtype)


class HostPass(NamedTuple):
    """One pass: its keys, and the keys' and values' pools of every layer, [slots, Hk, d] each."""

    keys: HostKeys
    pools: tuple[tuple[np.ndarray, np.ndarray], ...]


def host_pass_of(attention: PagedAttention) -> HostPass | None:
    """Return the pass if it is one of a single row over pools that NumPy can read, else None."""
    pools, batch = attention.pool.on_host, attention.batch
    if pools is None or isinstance(batch, ExtendBatch):
        return None
    if isinstance(batch, DecodeBatch):
        keys = view_keys(batch, attention.positions, attention.slots)
    else:
        keys = window_keys(batch, attention.positions, attention.slots)
    return None if keys is None else HostPass(keys, pools)


def window_keys(batch: VerifyBatch, positions: Tensor, slots: Tensor) -> HostKeys | None:
    """Return the keys of new tokens behind a row's prefix; None if this is not one row, or a token sees nothing."""
    table, rows, prefix_lens = batch.table, batch.rows, batch.prefix_lens
    if rows.shape[0] != 1:
        return None
    new, bits = slots.numpy(), batch.ancestor_bits.numpy()[0]
    visible, none_blind = _visible(bits.tobytes())
    if not none_blind:
        return None
    length = int(prefix_lens)
    prefix = table.numpy()[int(rows), :length]
    sees = visible if bits.size > 1 else None
    begin = int(new[0]) - length
    if _ascends(new, begin + length) and _ascends(prefix, begin):
        everything = slice(begin, begin + length + new.size)
        return HostKeys(everything, False, slice(begin + length, everything.stop), positions.numpy(), sees, length)
    return HostKeys(_compact(prefix), True, _compact(new), positions.numpy(), sees, length)


def view_keys(batch: DecodeBatch, positions: Tensor, slots: Tensor) -> HostKeys | None:
    """Return the keys of queries of one row without tails, each of which sees one key more than the one before;
    None for all others."""
    table, rows, lens = batch.table, batch.rows, batch.lens
    m = rows.shape[0]
    if batch.bases is not lens or not 0 < m <= 64:
        return None
    owners, ends = rows.numpy(), lens.numpy()
    if m > 1 and not ((owners == owners[0]).all() and _ascends(ends, int(ends[0]))):
        return None
    if ends[0] < 1:
        return None
    read = _compact(table.numpy()[owners[0], : int(ends[-1])])
    sees = None if m == 1 else _visible(_causal(m))[0]
    return HostKeys(read, False, _compact(slots.numpy()), positions.numpy(), sees, int(ends[0]) - 1)


def _compact(slots: np.ndarray) -> Slots:
    if not slots.size:
        return slice(0, 0)
    begin = int(slots[0])
    return slice(begin, begin + slots.size) if _ascends(slots, begin) else slots


def _ascends(slots: np.ndarray, begin: int) -> bool:
    """Return whether slots are begin, begin + 1, …: as bytes, which are compared in a quarter of the time."""
    end = begin + slots.size
    return begin >= 0 and slots.tobytes() == _numbers(end.bit_length(), slots.dtype)[begin:end].tobytes()


@lru_cache(maxsize=64)
def _numbers(bits: int, dtype: np.dtype) -> np.ndarray:
    return np.arange(1 << bits, dtype=dtype)


@lru_cache(maxsize=16)
def _outside(window: int, length: int, sees: bytes, group: int, dtype: str) -> np.ndarray:
    visible = np.frombuffer(sees, bool)
    n = int(visible.size**0.5)
    # A new token stands behind the prefix by the number of tokens between them that it sees.
    places = length - 1 + visible.reshape(n, n).sum(1)
    distance = places[:, None] - np.concatenate((np.arange(length), places))
    return np.where(distance < window, 0.0, -np.inf).repeat(group, 0).astype(dtype)


@lru_cache(maxsize=64)
def _causal(m: int) -> bytes:
    return np.array([(2 << i) - 1 for i in range(m)], np.uint64).tobytes()


@lru_cache(maxsize=256)
def _visible(packed: bytes) -> tuple[np.ndarray, bool]:
    """Return ancestor bits uint64 [n] as bool [n, n], and whether every token sees one."""
    bits = np.frombuffer(packed, np.uint64)
    sees = ((bits[:, None] >> np.arange(bits.size, dtype=np.uint64)) & np.uint64(1)).astype(bool)
    return sees, bool(sees.any(axis=1).all())


HOST_DTYPES = (torch.float32, torch.float64)
FEW_TOKENS = 8

Rotation = tuple[np.ndarray, np.ndarray]
"""Cosines and sines of n tokens, [n, 1, d] each, the sines of a head's first half negative."""

quiet = np.errstate(over="ignore")
"""A gate of −1,000 is 0 by way of an infinite exponential; that is meant."""


class HostLayer:
    """One `Layer` with a dense MLP. Arrays are [n, …] for the n new tokens."""

    def __init__(self, layer: Layer) -> None:
        assert isinstance(layer.mlp, DenseMlp), "experts are not done on the host"
        mixer = layer.mixer
        assert isinstance(mixer, GroupedAttention), "other mixers are not done on the host"
        self._qkv, self._output = mixer.projections
        self._gate_up, self._down = layer.mlp.projections
        self._hq, self._hk = mixer.heads[0], mixer.heads[1]
        self._d = mixer.head_dim
        self._scale = mixer.softmax.scale or mixer.head_dim**-0.5
        self._window = mixer.softmax.window
        self._is_rotated = mixer.rope is not None
        self._index = layer.index
        self._eps = layer.eps
        input_norm, mlp_norm = layer.norms
        assert mlp_norm is not None, "a layer without it is not plain"
        self._input_norm = None if input_norm is None else array(input_norm)
        self._post_norm = array(mlp_norm)
        self._head_norms = None
        if mixer.q_norm is not None and mixer.k_norm is not None:
            q_norm, k_norm = array(mixer.q_norm), array(mixer.k_norm)
            self._head_norms = np.concatenate([np.tile(q_norm, (self._hq, 1)), np.tile(k_norm, (self._hk, 1))])

    def run(self, residual: np.ndarray, host_pass: HostPass, rotation: Rotation) -> np.ndarray:
        """Run the layer: residual [n, H] → the next layer's."""
        norm = self._input_norm
        normed = residual if norm is None else rms_norm(residual, norm, self._eps)
        return self.after_attention(self.attend(normed, host_pass, rotation), residual)

    def attend(self, x: np.ndarray, host_pass: HostPass, rotation: Rotation) -> np.ndarray:
        """Attend: x [n, input size], normed → [n, H], without the residual."""
        keys = host_pass.keys
        n, hq, hk, d = x.shape[0], self._hq, self._hk, self._d
        qkv = self._qkv.on_host(x).reshape(n, -1, d)
        qk, v = qkv[:, : hq + hk], qkv[:, hq + hk :]
        if self._head_norms is not None:
            qk = rms_norm(qk, self._head_norms, self._eps)
        if self._is_rotated:
            qk = rotate(qk, rotation)
        k_pool, v_pool = host_pass.pools[self._index]
        new_k = qk[:, hq:]
        k_pool[keys.write], v_pool[keys.write] = new_k, v
        k, v_all = k_pool[keys.read], v_pool[keys.read]
        if keys.own:
            k, v_all = np.concatenate((k, new_k)), np.concatenate((v_all, v))
        group = hq // hk
        # The query heads that share a key head, and the tokens, are the rows of one matrix.
        q = qk[:, :hq].reshape(n, hk, group, d).transpose(1, 0, 2, 3).reshape(hk, n * group, d)
        q *= self._scale
        scores = np.matmul(q, k.transpose(1, 2, 0))
        if keys.sees is not None:
            scores[:, :, scores.shape[2] - n :] += hidden_from(keys.sees.tobytes(), group, scores.dtype.str)
        if (outside := keys.hidden_by(self._window, group, scores.dtype.str)) is not None:
            scores += outside
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        out = np.matmul(scores, v_all.transpose(1, 0, 2))
        out /= scores.sum(axis=2, keepdims=True)
        out = out.reshape(hk, n, group, d).transpose(1, 0, 2, 3).reshape(n, hq * d)
        return self._output.on_host(out)

    def after_attention(self, out: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Return the layer's second half: the residual [n, H] with everything added."""
        residual = residual + out
        gate_up = self._gate_up.on_host(rms_norm(residual, self._post_norm, self._eps))
        width = gate_up.shape[1] // 2
        gate = gate_up[:, :width]
        activated = np.negative(gate)  # dense, unlike a half of several rows
        np.exp(activated, out=activated)
        activated += 1.0
        np.divide(gate, activated, out=activated)
        activated *= gate_up[:, width:]
        residual += self._down.on_host(activated)
        return residual


class HostOps(TorchOps):
    """`Ops` of a CPU. Passes of one row go through NumPy where the layers can and `pack_projections` has laid them
    out for inference."""

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
        rotation = rotation_of(array(cos_sin)[host_pass.keys.positions], residual.numpy().dtype)
        states = _run_on_host(host_layers, array(residual), host_pass, rotation, first_input)
        last = torch.from_numpy(states[-1])
        hidden = (
            last if final_norm is None else torch.from_numpy(rms_norm(states[-1], array(final_norm), layers[0].eps))
        )
        aux = [states[i] for i in capture.aux_layers]
        return LayersOutput(hidden, last, torch.from_numpy(np.concatenate(aux, axis=1)) if aux else None, None)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not x.is_cpu or x.shape[0] > FEW_TOKENS or x.dtype not in HOST_DTYPES or torch.is_grad_enabled():
            return super().rms_norm(x, weight, eps)
        return torch.from_numpy(rms_norm(x.numpy(), array(weight), eps))

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


@quiet
def _run_on_host(
    layers: Sequence[HostLayer],
    state: np.ndarray,
    host_pass: HostPass,
    rotation: Rotation,
    first_input: Tensor | None,
) -> list[np.ndarray]:
    """Return the residual [n, H] before every layer, and behind the last."""
    states = [state]
    for layer in layers:
        if first_input is not None and layer is layers[0]:
            state = layer.after_attention(layer.attend(array(first_input), host_pass, rotation), state)
        else:
            state = layer.run(state, host_pass, rotation)
        states.append(state)
    return states


def can_run_on_host(layer: Layer) -> bool:
    """Return whether a layer is dense and plain, of a dtype that NumPy has, and laid out for inference."""
    if not (isinstance(layer.mlp, DenseMlp) and isinstance(layer.mixer, GroupedAttention) and layer.is_plain):
        return False
    return layer.mixer.output_weight.dtype in HOST_DTYPES and layer.mixer.projections[0].is_packed


def array(tensor: Tensor) -> np.ndarray:
    """Return the tensor's memory as an array."""
    return tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return x [n, H] or [n, heads, d] scaled to unit root mean square over its last axis, times weight
    (arXiv 1910.07467)."""
    square = np.matmul(x[..., None, :], x[..., None])[..., 0]
    square *= 1.0 / x.shape[-1]
    square += eps
    normed: np.ndarray = x / np.sqrt(square, out=square)
    normed *= weight
    return normed


def rotation_of(table: np.ndarray, dtype: np.dtype) -> Rotation:
    """Return a rotary table's rows [n, d], d/2 cosines and d/2 sines, as `rotate` takes them for all
    layers of a pass."""
    cos, sin = np.split(table.astype(dtype, copy=False)[:, None], 2, axis=2)
    return np.concatenate((cos, cos), axis=2), np.concatenate((-sin, sin), axis=2)


def rotate(x: np.ndarray, rotation: Rotation) -> np.ndarray:
    """Return x [n, heads, d], halves rotated against each other (arXiv 2104.09864)."""
    half = x.shape[2] // 2
    cos, sin = rotation
    out = np.empty(x.shape, x.dtype)
    out[..., :half], out[..., half:] = x[..., half:], x[..., :half]
    out *= sin
    out += x * cos
    return out


@lru_cache(maxsize=256)
def hidden_from(sees: bytes, group: int, dtype: str) -> np.ndarray:
    """Return the mask [n · group, n]: 0 where a token sees another one, −inf where it does not."""
    visible = np.frombuffer(sees, bool)
    n = int(visible.size**0.5)
    return np.where(visible.reshape(n, n), 0.0, -np.inf).repeat(group, 0).astype(dtype)
