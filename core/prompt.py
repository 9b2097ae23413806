"""A short description of a prompt's content.

A recorded or synthetic workload rarely has the tokens of a prompt: it knows a length, or which blocks two prompts
share. `Prompt` keeps that description (a few words per request) and makes token ids only when they are asked for,
so that a million waiting requests cost no token arrays.

    tokens      the ids themselves
    blocks      one hash id per block of `block_size` tokens, the last may be partial (the form of the Mooncake traces)
    segments    one hash id per stretch of its own length (a system prompt, then a turn, then a turn, ...)
    length      a length alone: content unknown; two such prompts never share a prefix, none is ever cached

Token j of a block or segment is a pure function of (hash id, j). Two prompts whose first blocks carry equal ids
therefore have equal first tokens, also where one of them ends inside the block; unequal ids agree in one of 2**31
tokens by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRequest, nearest

MAX_TOKEN_ID = 2**31 - 1
MAX_HASH_ID = 2**63 - 1
MAX_PROMPT_LENGTH = 2**31 - 1
MAX_BLOCK_SIZE = 2**16

_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)
_MIX_1 = _U64(0xBF58476D1CE4E5B9)
_MIX_2 = _U64(0x94D049BB133111EB)
_LANE_SALT = _U64(0x632BE59BD9B4E019)
_OUTPUT_SALT = _U64(0x3C79AC492BA7B653)
_FOLD = _U64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A frozen description of a prompt. Make one with `of_tokens`, `of_blocks`, `of_segments` or `of_length`.

    length:       number of tokens, 0 or more (an engine refuses an empty prompt at its door, not here)
    tokens:       int32 [length], read-only, or None
    hash_ids:     0 <= id < 2**63, one per block or segment, or None
    block_size:   tokens per block, 0 if the description has no blocks
    segment_lens: tokens per segment, or None

    Equality and hash are those of the description: an unknown content of length n equals another of length n although
    the two prompts share no prefix. Errors: InvalidRequest names the value and what was expected.
    """

    length: int
    tokens: NDArray[np.int32] | None = None
    hash_ids: tuple[int, ...] | None = None
    block_size: int = 0
    segment_lens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.length <= MAX_PROMPT_LENGTH:
            raise InvalidRequest(f"prompt length {self.length}: expected 0 ... {MAX_PROMPT_LENGTH}")

    @classmethod
    def of_length(cls, length: int) -> Prompt:
        """Describe a prompt of which only the length is known."""
        return cls(int(length))

    @classmethod
    def of_tokens(cls, tokens: Sequence[int] | np.ndarray) -> Prompt:
        """Describe a prompt of given token ids, 0 <= id < 2**31 (copied)."""
        array = np.asarray(tokens)
        if array.ndim != 1:
            raise InvalidRequest(f"prompt tokens of shape {array.shape}: expected one dimension")
        if array.size == 0:
            array = array.astype(np.int32)
        if array.dtype.kind not in "iu":
            raise InvalidRequest(f"prompt tokens of type {array.dtype}: expected integers")
        # As an unsigned number a negative one is too great: one reduction instead of two.
        if array.size and np.maximum.reduce(array.astype(np.uint64)) > MAX_TOKEN_ID:
            raise InvalidRequest(f"prompt token ids {array.min()} ... {array.max()}: expected 0 ... {MAX_TOKEN_ID}")
        owned = array.astype(np.int32)
        owned.flags.writeable = False
        return cls(len(owned), tokens=owned)

    @classmethod
    def of_blocks(cls, hash_ids: Sequence[int], block_size: int, length: int) -> Prompt:
        """Describe a prompt of blocks of `block_size` tokens; `len(hash_ids) == ceil(length / block_size)`."""
        ids = tuple(map(int, hash_ids))
        length = int(length)
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise InvalidRequest(f"block size {block_size}: expected 1 ... {MAX_BLOCK_SIZE}")
        expected = -(-length // block_size)
        if len(ids) != expected:
            message = f"{len(ids)} block ids for {length} tokens: expected {expected} blocks of {block_size} tokens"
            raise InvalidRequest(message)
        _check_hash_ids(ids)
        return cls(length, hash_ids=ids, block_size=block_size)

    @classmethod
    def of_segments(cls, segments: Sequence[tuple[int, int]]) -> Prompt:
        """Describe a prompt of (hash id, length) stretches, each of at least one token."""
        ids = tuple(int(hash_id) for hash_id, _ in segments)
        lens = tuple(int(length) for _, length in segments)
        _check_hash_ids(ids)
        if lens and min(lens) < 1:
            raise InvalidRequest(f"a prompt segment of {min(lens)} tokens: expected at least 1")
        return cls(sum(lens), hash_ids=ids, segment_lens=lens)

    @property
    def content_is_known(self) -> bool:
        """Whether the prompt has tokens at all, so that it may be looked up in, and kept by, a prefix cache."""
        return self.tokens is not None or self.hash_ids is not None

    def materialize(self) -> NDArray[np.int64] | None:
        """Return the token ids, int64 [length], freshly made and the caller's own; None if only the length is known."""
        if self.tokens is not None:
            return self.tokens.astype(np.int64)
        if self.hash_ids is None:
            return None
        bases = _mix(np.array(self.hash_ids, dtype=np.uint64))
        if self.segment_lens is None:
            mixed = (bases[:, None] ^ _lanes(self.block_size)[None, :]).reshape(-1)[: self.length]
        else:
            lens = np.array(self.segment_lens, dtype=np.int64)
            mixed = np.repeat(bases, lens)
            starts = np.repeat(np.cumsum(lens) - lens, lens)
            mixed ^= _mix(
                np.arange(self.length, dtype=np.int64).astype(np.uint64) - starts.astype(np.uint64) + _LANE_SALT
            )
        # One multiplication folds the two independent 64-bit hashes; its upper 31 bits are the token id.
        mixed *= _FOLD
        mixed >>= _U64(33)
        return mixed.view(np.int64)

    def continued(self, length: int) -> Prompt:
        """Describe the first `length` tokens, at least as many as these, of this content and the output after it.

        Each request with the same content has the same output. Blocks and segments are continued by the ids that
        `following` gives. Raises ValueError unless the content is known by ids.
        """
        if self.hash_ids is None:
            raise ValueError("the content is not known by ids")
        ids = list(self.hash_ids)
        if self.segment_lens is not None:
            more = length - self.length
            pairs = list(zip(ids, self.segment_lens, strict=True))
            return Prompt.of_segments([*pairs, (following(ids[-1]), more)] if more else pairs)
        while len(ids) * self.block_size < length:
            ids.append(following(ids[-1]))
        return Prompt.of_blocks(ids, self.block_size, length)

    def to_json(self) -> dict[str, Any]:
        """Return a small JSON object that `from_json` reads back to an equal prompt."""
        if self.tokens is not None:
            return {"tokens": self.tokens.tolist()}
        if self.hash_ids is None:
            return {"length": self.length}
        if self.segment_lens is None:
            return {"length": self.length, "block_size": self.block_size, "hash_ids": list(self.hash_ids)}
        return {"segments": [list(pair) for pair in zip(self.hash_ids, self.segment_lens, strict=True)]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Prompt:
        """Read the prompt that `to_json` wrote. Raises InvalidRequest if the object has another form."""
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"a prompt is written as an object, not as {type(value).__name__}")
        keys = frozenset(value)
        try:
            if keys == {"tokens"}:
                return cls.of_tokens(value["tokens"])
            if keys == {"length"}:
                return cls.of_length(_integer(value["length"]))
            if keys == {"length", "block_size", "hash_ids"}:
                ids = [_integer(hash_id) for hash_id in value["hash_ids"]]
                return cls.of_blocks(ids, _integer(value["block_size"]), _integer(value["length"]))
            if keys == {"segments"}:
                return cls.of_segments([(_integer(hash_id), _integer(n)) for hash_id, n in value["segments"]])
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"a prompt that cannot be read: {error}") from error
        known = ("tokens", "length", "block_size", "hash_ids", "segments")
        odd = next((key for key in value if key not in known), None)
        hint = nearest(str(odd), known) if odd is not None else ""
        raise InvalidRequest(
            f"a prompt with the keys {', '.join(sorted(map(str, keys))) or '(none)'}{hint}: "
            "expected tokens, or length, or length + block_size + hash_ids, or segments"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prompt):
            return NotImplemented
        if self._description() != other._description():
            return False
        if self.tokens is None or other.tokens is None:
            return self.tokens is other.tokens
        return np.array_equal(self.tokens, other.tokens)

    def __hash__(self) -> int:
        return hash((self._description(), None if self.tokens is None else self.tokens.tobytes()))

    def __repr__(self) -> str:
        if self.tokens is not None:
            return f"Prompt(length={self.length}, tokens)"
        if self.hash_ids is None:
            return f"Prompt(length={self.length})"
        kind = "blocks" if self.segment_lens is None else "segments"
        return f"Prompt(length={self.length}, {len(self.hash_ids)} {kind})"

    def _description(self) -> tuple[Any, ...]:
        return (self.length, self.hash_ids, self.block_size, self.segment_lens)


def following(hash_id: int) -> int:
    """Return the hash id of what the model emits after a block or segment."""
    mixed = _mix(np.array([hash_id], dtype=np.uint64) ^ _OUTPUT_SALT)
    return int(mixed[0] >> _U64(1))


NO_TOKENS = Prompt.of_length(0)


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected an integer, found {value!r}")
    return value


def _check_hash_ids(ids: tuple[int, ...]) -> None:
    if ids and (min(ids) < 0 or max(ids) > MAX_HASH_ID):
        raise InvalidRequest(f"hash ids {min(ids)} ... {max(ids)}: expected 0 ... 2**63 - 1")


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the SplitMix64 output function (Steele, Lea, Flood, OOPSLA 2014), a bijection of 64 bits.
    The array is fresh."""
    mixed = values + _GOLDEN
    mixed ^= mixed >> _U64(30)
    mixed *= _MIX_1
    mixed ^= mixed >> _U64(27)
    mixed *= _MIX_2
    mixed ^= mixed >> _U64(31)
    return mixed


@lru_cache(maxsize=8)
def _lanes(block_size: int) -> NDArray[np.uint64]:
    """Return the hash of each offset in a block: uint64 [block_size], shared by all prompts, therefore read-only."""
    lanes = _mix(np.arange(block_size, dtype=np.uint64) + _LANE_SALT)
    lanes.flags.writeable = False
    return lanes
