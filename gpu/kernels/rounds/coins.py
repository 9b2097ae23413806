"""Coins: `core.draws.uniform` on the device, bit for bit, so that a draw does not depend on where it is made.

The constants are those of `core.draws`, which never change. Signed 64-bit integers wrap like unsigned ones; only the
right shift differs, so its copies of the sign are masked away.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....core.draws import uniform
from ..jit import cdiv, jit, tl

_MASK = (1 << 64) - 1
_SEED_STEP, _PURPOSE_STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_REQUEST_STEP, _POSITION_STEP = 0x8CB92BA72F3D8DD7, 0xDB4F0B9175AE2165
_MULTIPLIER_1, _MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


_REQUEST_FACTOR, _POSITION_FACTOR, _FACTOR_1, _FACTOR_2 = (
    _signed(x) for x in (_REQUEST_STEP, _POSITION_STEP, _MULTIPLIER_1, _MULTIPLIER_2)
)


def stream_state(seed: int, purpose: int) -> int:
    """Return the hash of (seed, purpose, lane 0), before the request's key is absorbed, as a signed 64-bit integer."""
    state = _finalise((seed * _SEED_STEP) & _MASK)
    state = _finalise(state ^ ((purpose * _PURPOSE_STEP) & _MASK))
    return _signed(_finalise(state))


def coins_torch(keys: Tensor, positions: Tensor, seed: int, purpose: int) -> Tensor:
    if not positions.is_cpu:
        return hashed_coins(keys, positions, seed, purpose)
    # NumPy sees the same memory and needs a third of the time for arrays as small as these.
    requests = keys.numpy().view(np.uint64)[:, None]
    return torch.from_numpy(np.asarray(uniform(seed, purpose, requests, positions.numpy())))


def hashed_coins(keys: Tensor, positions: Tensor, seed: int, purpose: int) -> Tensor:
    """Return the coins with tensor operations alone, on any device."""
    stream = _finalise_((keys * _REQUEST_FACTOR).bitwise_xor_(stream_state(seed, purpose)))
    bits = _finalise_((positions * _POSITION_FACTOR).bitwise_xor_(stream.unsqueeze(1)))
    return _shift_right(bits, 11).double().mul_(2.0**-53)


def _finalise_(x: Tensor) -> Tensor:
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_FACTOR_1)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_FACTOR_2)
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, n: int) -> Tensor:
    return (x >> n).bitwise_and_((1 << (64 - n)) - 1)


def _finalise(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & _MASK
    return x ^ (x >> 31)


@jit
def _mixed(x, MULTIPLIER_1: tl.constexpr, MULTIPLIER_2: tl.constexpr):
    x = (x ^ (x >> 30)) * tl.full([], MULTIPLIER_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], MULTIPLIER_2, tl.uint64)
    return x ^ (x >> 31)


@jit
def _coins_kernel(
    keys,
    positions,
    coins,
    state,
    n,
    width,
    REQUEST_STEP: tl.constexpr,
    POSITION_STEP: tl.constexpr,
    MULTIPLIER_1: tl.constexpr,
    MULTIPLIER_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i // width, mask=i < n).to(tl.uint64)
    position = tl.load(positions + i, mask=i < n).to(tl.uint64)
    stream = _mixed(
        (key * tl.full([], REQUEST_STEP, tl.uint64)) ^ state.to(tl.int64).to(tl.uint64), MULTIPLIER_1, MULTIPLIER_2
    )
    bits = _mixed((position * tl.full([], POSITION_STEP, tl.uint64)) ^ stream, MULTIPLIER_1, MULTIPLIER_2)
    # 53 bits and a power of two: the product is exact.
    tl.store(coins + i, (bits >> 11).to(tl.float64) * 1.1102230246251565e-16, mask=i < n)


def coins_triton(keys: Tensor, positions: Tensor, seed: int, purpose: int) -> Tensor:
    coins = torch.empty(positions.shape, dtype=torch.float64, device=positions.device)
    n = coins.numel()
    if n:
        _coins_kernel[(cdiv(n, BLOCK),)](
            keys, positions.contiguous(), coins, stream_state(seed, purpose), n, coins.shape[1], **_CONSTANTS
        )
    return coins


BLOCK = 128
_CONSTANTS = {
    "REQUEST_STEP": _REQUEST_STEP,
    "POSITION_STEP": _POSITION_STEP,
    "MULTIPLIER_1": _MULTIPLIER_1,
    "MULTIPLIER_2": _MULTIPLIER_2,
    "BLOCK": BLOCK,
}
