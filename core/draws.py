"""Keyed random draws: every draw is a pure function of (seed, purpose, lane, request, position).

There is no generator and no state. So a draw does not change with one more request, another batch order, a longer
multi-step or a repeated evaluation. The key is absorbed one component after the other into 64 bits,

    h = finalise(h XOR component · odd constant)        for lane, request, position, in this order,

with the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014; constants by David Stafford, "Mix13"). XOR, not a sum, joins the parts: with sums two requests' streams
would be shifted copies of one sequence. The position comes last because it usually has the most elements, so that the
earlier parts are hashed at their own, smaller shapes.

All arguments broadcast against each other. Integers of any kind are accepted, negative ones count modulo 2**64. A key
made of Python integers gives the same bits as the same key inside an array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]
Numbers = NDArray[np.float64]
Scalar = int | np.integer[Any]
Array = np.ndarray | Sequence[int]
Part = Scalar | Array
"""A part of a key: an integer, or an array of them."""

_MASK = (1 << 64) - 1
_SEED_STEP, _PURPOSE_STEP, _LANE_STEP, _REQUEST_STEP, _POSITION_STEP = (
    0x9E3779B97F4A7C15,
    0xD1B54A32D192ED03,
    0xABC98388FB8FAC03,
    0x8CB92BA72F3D8DD7,
    0xDB4F0B9175AE2165,
)
_MULTIPLIER_1, _MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# The same constants as zero-dimensional arrays: NumPy need not convert them at every call.
_REQUEST_ARRAY, _POSITION_ARRAY, _LANE_ARRAY, _M1, _M2 = (
    np.array(value, dtype=np.uint64)
    for value in (_REQUEST_STEP, _POSITION_STEP, _LANE_STEP, _MULTIPLIER_1, _MULTIPLIER_2)
)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_11, _SHIFT_32 = (np.array(n, dtype=np.uint64) for n in (30, 27, 31, 11, 32))
_LOW_HALF = np.array(0xFFFFFFFF, dtype=np.uint64)
_UNIT_53: Numbers = np.array(2.0**-53)
_UNIT_32: Numbers = np.array(2.0**-32)
_TURN_32: Numbers = np.array(2.0 * np.pi * 2.0**-32)


class Purpose(IntEnum):
    """What a draw is for; different purposes are independent. The numbers never change, because logs depend on them."""

    ACCEPT_COIN = 1
    BONUS_COIN = 2
    DRAFT = 3
    SAMPLE = 4
    DRAFT_COIN = 5
    CHAIN_COIN = 6
    ACCEPTANCE = 10
    ACCEPTANCE_REQUEST = 11
    ACCEPTANCE_FIELD = 12
    ACCEPTANCE_REGIME = 13
    CONFIDENCE = 14
    ARRIVAL = 20
    LENGTH = 21
    OUTPUT_LENGTH = 22
    PREFIX = 23
    TOKEN = 24
    PRIORITY = 27
    WINDOW = 28
    CLIENT = 30
    ROUTER = 31
    HOST_TIME = 32
    DEVICE_TIME = 33
    TRANSFER = 34
    FAULT = 40
    SWARM = 41
    MODEL = 50


def request_key(request_id: str) -> int:
    """Return a stable 64-bit key of a string id: the 8-byte BLAKE2b digest of its UTF-8 bytes, read
    as little-endian."""
    return int.from_bytes(hashlib.blake2b(request_id.encode("utf-8"), digest_size=8).digest(), "little")


@overload
def stream_keys(seed: int, purpose: int, request: Scalar, lane: Scalar = ...) -> np.uint64: ...
@overload
def stream_keys(seed: int, purpose: int, request: Array, lane: Part = ...) -> Bits: ...
@overload
def stream_keys(seed: int, purpose: int, request: Scalar, lane: Array) -> Bits: ...
def stream_keys(seed: int, purpose: int, request: Part, lane: Part = 0) -> np.uint64 | Bits:
    """Return the part of a key that does not change with the position, uint64 [broadcast of lane and request].

    A caller that draws for the same requests round after round keeps these and calls `uniform_at`, at half the cost.
    """
    return _as_uint64(_stream(seed, purpose, request, lane))


@overload
def hash64(seed: int, purpose: int, request: Scalar, position: Scalar, lane: Scalar = ...) -> np.uint64: ...
@overload
def hash64(seed: int, purpose: int, request: Array, position: Part, lane: Part = ...) -> Bits: ...
@overload
def hash64(seed: int, purpose: int, request: Scalar, position: Array, lane: Part = ...) -> Bits: ...
@overload
def hash64(seed: int, purpose: int, request: Scalar, position: Scalar, lane: Array) -> Bits: ...
def hash64(seed: int, purpose: int, request: Part, position: Part, lane: Part = 0) -> np.uint64 | Bits:
    """Return 64 well mixed bits of the key, uint64 [broadcast of request, position and lane]."""
    return _as_uint64(_absorb(_stream(seed, purpose, request, lane), position, _POSITION_STEP, _POSITION_ARRAY))


@overload
def uniform(seed: int, purpose: int, request: Scalar, position: Scalar, lane: Scalar = ...) -> np.float64: ...
@overload
def uniform(seed: int, purpose: int, request: Array, position: Part, lane: Part = ...) -> Numbers: ...
@overload
def uniform(seed: int, purpose: int, request: Scalar, position: Array, lane: Part = ...) -> Numbers: ...
@overload
def uniform(seed: int, purpose: int, request: Scalar, position: Scalar, lane: Array) -> Numbers: ...
def uniform(seed: int, purpose: int, request: Part, position: Part, lane: Part = 0) -> np.float64 | Numbers:
    """Draw a number in [0, 1) with 53 random bits, float64 [broadcast of request, position and lane]."""
    return _to_unit(_absorb(_stream(seed, purpose, request, lane), position, _POSITION_STEP, _POSITION_ARRAY))


@overload
def normal(seed: int, purpose: int, request: Scalar, position: Scalar, lane: Scalar = ...) -> np.float64: ...
@overload
def normal(seed: int, purpose: int, request: Array, position: Part, lane: Part = ...) -> Numbers: ...
@overload
def normal(seed: int, purpose: int, request: Scalar, position: Array, lane: Part = ...) -> Numbers: ...
@overload
def normal(seed: int, purpose: int, request: Scalar, position: Scalar, lane: Array) -> Numbers: ...
def normal(seed: int, purpose: int, request: Part, position: Part, lane: Part = 0) -> np.float64 | Numbers:
    """Draw a standard normal number, float64 [broadcast of request, position and lane]; never beyond ±6.8."""
    return _to_normal(_absorb(_stream(seed, purpose, request, lane), position, _POSITION_STEP, _POSITION_ARRAY))


@overload
def uniform_at(keys: Scalar, position: Scalar) -> np.float64: ...
@overload
def uniform_at(keys: Array, position: Part) -> Numbers: ...
@overload
def uniform_at(keys: Scalar, position: Array) -> Numbers: ...
def uniform_at(keys: Part, position: Part) -> np.float64 | Numbers:
    """Draw as `uniform` does, for keys made by `stream_keys`:
    uniform(s, p, r, x, l) == uniform_at(stream_keys(s, p, r, l), x)."""
    return _to_unit(_absorb(_component(keys), position, _POSITION_STEP, _POSITION_ARRAY))


@overload
def normal_at(keys: Scalar, position: Scalar) -> np.float64: ...
@overload
def normal_at(keys: Array, position: Part) -> Numbers: ...
@overload
def normal_at(keys: Scalar, position: Array) -> Numbers: ...
def normal_at(keys: Part, position: Part) -> np.float64 | Numbers:
    """Draw as `normal` does, for keys made by `stream_keys`."""
    return _to_normal(_absorb(_component(keys), position, _POSITION_STEP, _POSITION_ARRAY))


def _stream(seed: int, purpose: int, request: Part, lane: Part) -> int | Bits:
    state = _begin(int(seed), int(purpose))
    return _absorb(_absorb(state, lane, _LANE_STEP, _LANE_ARRAY), request, _REQUEST_STEP, _REQUEST_ARRAY)


@lru_cache(maxsize=256)
def _begin(seed: int, purpose: int) -> int:
    """Return the state behind seed and purpose: a run has few of them, and asks for each many times."""
    state = _finalise_int((seed * _SEED_STEP) & _MASK)
    return _finalise_int(state ^ ((purpose * _PURPOSE_STEP) & _MASK))


def _absorb(state: int | Bits, part: Part, step: int, step_array: Bits) -> int | Bits:
    """Add one part to the key. Integers stay Python integers, whose arithmetic cannot warn of an overflow."""
    component = _component(part)
    if isinstance(component, int):
        number = (component * step) & _MASK
        if isinstance(state, int):
            return _finalise_int(state ^ number)
        return _finalise_array(state ^ np.array(number, dtype=np.uint64))
    scaled = component * step_array
    if isinstance(state, int):
        scaled ^= np.array(state, dtype=np.uint64)
        return _finalise_array(scaled)
    return _finalise_array(state ^ scaled)


def _component(part: Part) -> int | Bits:
    """Return a key component as a Python integer, or as a uint64 array of at least one dimension."""
    if isinstance(part, int):
        return int(part)
    array = np.asarray(part)
    if array.dtype.kind not in "iub":
        if array.size:
            raise TypeError(f"a key component must be an integer, not {array.dtype}")
        return array.astype(np.uint64)
    if array.ndim == 0:
        return int(array)
    return array if array.dtype == np.uint64 else array.astype(np.uint64)


def _finalise_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & _MASK
    return x ^ (x >> 31)


def _finalise_array(x: Bits) -> Bits:
    """Mix the bits in place; `x` must be an array that the caller gives away."""
    x ^= x >> _SHIFT_30
    x *= _M1
    x ^= x >> _SHIFT_27
    x *= _M2
    x ^= x >> _SHIFT_31
    return x


def _as_uint64(bits: int | Bits) -> np.uint64 | Bits:
    return np.uint64(bits) if isinstance(bits, int) else bits


def _to_unit(bits: int | Bits) -> np.float64 | Numbers:
    if isinstance(bits, int):
        return np.float64((bits >> 11) * 2.0**-53)
    numbers: Numbers = (bits >> _SHIFT_11) * _UNIT_53
    return numbers


def _to_normal(bits: int | Bits) -> np.float64 | Numbers:
    """Transform bits by Box and Muller (1958): the radius from their high half, the angle from their low half."""
    if isinstance(bits, int):
        return np.float64(_normals(np.array([bits], dtype=np.uint64))[0])
    return _normals(bits)


def _normals(bits: Bits) -> Numbers:
    radius: Numbers = (bits >> _SHIFT_32) * _UNIT_32
    radius += 2.0**-33
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle = (bits & _LOW_HALF) * _TURN_32
    radius *= np.cos(angle, out=angle)
    return radius
