"""The messages between a prefill worker and a decode worker, and their bytes.

```
prefill                                    decode
   │ Offer ──────────────────────────────────► │   reserves slots for the whole prompt (Renew while there is no room)
   │ ◄────────────────────────────────── Accept │   or Reject
   │ Page, Page, … ──────────────────────────► │   as chunks of the prompt are computed; each is verified on arrival
   │ Manifest ───────────────────────────────► │   first token, draft input, the seal of every page
   │ ◄───────────────────────────────────── Ack │   all verified: the request has joined the batch (or Nack: try again)
   │ Cancel ◄──────────────────────────────► Cancel, answered by CancelAck: no page of it is sent or written any more
```

Every message carries the key of one attempt: (request id, attempt, generation). `generation` is the prefill worker's
incarnation, `attempt` counts all attempts of that incarnation, so a key is never reused. `epoch` is the decode worker's
incarnation. All of them are integers of any size.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from ..algorithm.arrival import Arrival, DraftPayload
from ..contract.request import Request, SamplingParams
from ..errors import ForedraftError, InvariantViolation
from ..prompt import Prompt


class TransferKey(NamedTuple):
    """Names one attempt of one transfer; never reused."""

    request_id: str
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The format of a page of KV, equal on both sides. `layout` names dtype, heads and layers, which give the bytes
    their meaning."""

    page_size: int  # tokens
    target_bytes: int  # of one page in the target pool, all layers
    draft_bytes: int = 0  # of one page in the draft pool; 0: there is none
    hidden_size: int = 0  # of the hidden state that a draft starts from; 0: none is sent
    layout: str = ""

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class PageSeal:
    """Size and CRC-32 of a page's bytes, in both pools.
    A simulated link, which carries no bytes, makes up checksums."""

    target_bytes: int
    target_checksum: int
    draft_bytes: int = 0
    draft_checksum: int = 0

    @classmethod
    def of(cls, target: bytes, draft: bytes = b"") -> PageSeal:
        return cls(len(target), crc32(target), len(draft), crc32(draft) if draft else 0)

    def fits(self, page_format: PageFormat) -> bool:
        return (self.target_bytes, self.draft_bytes) == (page_format.target_bytes, page_format.draft_bytes)


@dataclass(frozen=True, slots=True)
class Offer:
    """Prefill: this request's KV will be sent. A retry offers it again under a new key."""

    key: TransferKey
    first_attempt: int  # of this transfer; a retry has a greater one in its key
    request: Request
    algorithm: str
    page_format: PageFormat
    lease_ns: int  # how long the prefill side waits for the next message


@dataclass(frozen=True, slots=True)
class Accept:
    """Decode: slots are reserved. Pages before `first_page` are in the prefix cache and need not be sent."""

    key: TransferKey
    epoch: int
    first_page: int
    hold_ns: int  # how long the slots wait for the next page


@dataclass(frozen=True, slots=True)
class Reject:
    """Decode: the request can never run here."""

    key: TransferKey
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Page:
    """Prefill: page `index` of the prompt, in both pools.
    Where the link carries no bytes, `target` and `draft` are empty."""

    key: TransferKey
    epoch: int
    index: int
    seal: PageSeal
    target: bytes = b""
    draft: bytes = b""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Prefill: everything is sent. `seals` are those of pages first_page, first_page + 1, …, which
    must have arrived."""

    key: TransferKey
    epoch: int
    first_page: int
    seals: tuple[PageSeal, ...]
    arrival: Arrival  # the first token, the draft's input, and the outputs that the client asked for with that token


@dataclass(frozen=True, slots=True)
class Ack:
    """Decode: every page is verified and the request has joined; the prefill side may release it."""

    key: TransferKey
    epoch: int


@dataclass(frozen=True, slots=True)
class Nack:
    """Decode: the data that arrived in this attempt differs from the data that was sent."""

    key: TransferKey
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Either side: wait longer, I am waiting for room (decode) or computing (prefill)."""

    key: TransferKey
    epoch: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Either side: give this transfer up. `failed`:
    because of an error, else because the request is not wanted any more."""

    key: TransferKey
    first_attempt: int  # of this transfer; its earlier attempts are given up as well
    failed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CancelAck:
    """Either side: no page of this attempt is sent or written here any more."""

    key: TransferKey


Message = Offer | Accept | Reject | Page | Manifest | Ack | Nack | Renew | Cancel | CancelAck


# -- messages as bytes, and back --------------------------------------------------------------------------------------
#     "FTKH" │ version u16 │ header bytes u32 │ body bytes u64 │ CRC-32 of the header u32 │ header │ body
#
# The header is JSON: it names the message and describes each piece of the body (shape, dtype, size, CRC-32). A damaged
# piece, a frame of the wrong length, and a header that is no message raise `MalformedMessage`. The bytes of a `Page`
# are not checked here, because the decode side verifies them. Integers have any size.

MAGIC = b"FTKH"
VERSION = 2
MAX_HEADER_BYTES = 1 << 28  # a prompt of 2**24 tokens is about 2**27 bytes
_FRAME = struct.Struct("<4sHIQI")
_KINDS = {kind.__name__: kind for kind in (Offer, Accept, Reject, Page, Manifest, Ack, Nack, Renew, Cancel, CancelAck)}
_SIZED = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_DTYPES = _SIZED | {"bool", "float16", "float32", "float64"}


class MalformedMessage(ForedraftError):
    """Bytes that are not a message, or not a whole one."""


def encode(message: Message) -> bytes:
    """Encode a message as one frame."""
    pieces: list[bytes] = []
    header = json.dumps(
        {"message": type(message).__name__, "fields": plain(message, pieces), "sizes": [len(p) for p in pieces]},
        separators=(",", ":"),
        allow_nan=False,
    ).encode()
    body = b"".join(pieces)
    return _FRAME.pack(MAGIC, VERSION, len(header), len(body), crc32(header)) + header + body


def decode(frame: bytes | memoryview) -> Message:
    """Decode a frame. Raises MalformedMessage for anything that `encode` did not write."""
    frame = memoryview(frame)
    if len(frame) < _FRAME.size:
        raise MalformedMessage(f"a frame of {len(frame)} bytes, at least {_FRAME.size} are needed")
    magic, version, header_bytes, body_bytes, checksum = _FRAME.unpack_from(frame)
    if magic != MAGIC or version != VERSION:
        raise MalformedMessage(f"a frame that begins with {magic!r}, version {version}; expected {MAGIC!r}, {VERSION}")
    if header_bytes > MAX_HEADER_BYTES or len(frame) != _FRAME.size + header_bytes + body_bytes:
        raise MalformedMessage(f"a frame of {len(frame)} bytes that claims {header_bytes} + {body_bytes}")
    header = bytes(frame[_FRAME.size : _FRAME.size + header_bytes])
    if crc32(header) != checksum:
        raise MalformedMessage("a frame whose header is damaged")
    try:
        described = json.loads(header)
        pieces = _pieces(described["sizes"], frame[_FRAME.size + header_bytes :])
        return _message(_KINDS[described["message"]], described["fields"], pieces)
    except MalformedMessage:
        raise
    except (KeyError, TypeError, ValueError, IndexError, ForedraftError, InvariantViolation) as error:
        raise MalformedMessage(f"a message that cannot be read: {error!r}") from error


def _pieces(sizes: list[int], body: memoryview) -> list[bytes]:
    if any(type(size) is not int or size < 0 for size in sizes) or sum(sizes) != len(body):
        raise MalformedMessage(f"pieces of {sizes} bytes in a body of {len(body)}")
    ends = np.cumsum([0, *sizes]).tolist()
    return [bytes(body[start:end]) for start, end in pairwise(ends)]


# -- writing ----------------------------------------------------------------------------------------------------------


def plain(value: Any, pieces: list[bytes]) -> Any:
    """Return `value` as JSON; arrays and bytes become pieces of the body. `tree` reads it."""
    if isinstance(value, Request):
        return request_to_json(value)
    if isinstance(value, PageSeal):
        return [value.target_bytes, value.target_checksum, value.draft_bytes, value.draft_checksum]
    if isinstance(value, bytes):
        pieces.append(value)
        return {"bytes": len(pieces) - 1}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.name not in _DTYPES:
            raise TypeError(f"an array of {array.dtype} cannot be sent")
        content = array.tobytes()
        pieces.append(content)
        return {"array": len(pieces) - 1, "dtype": array.dtype.name, "shape": list(array.shape), "crc": crc32(content)}
    if isinstance(value, TransferKey):
        return list(value)
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name), pieces) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(item, pieces) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item, pieces) for item in value]
    return value


def request_to_json(request: Request) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "prompt": request.prompt.to_json(),
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "namespace": request.namespace,
        "sampling": request.sampling.to_json(),
        "stop_tokens": list(request.stop_tokens),
        "stop_strings": list(request.stop_strings),
        "outputs": list(request.outputs),
        "shown": request.shown.to_json(),
        **({"min_tokens": request.min_tokens} if request.min_tokens else {}),
    }


# -- reading ----------------------------------------------------------------------------------------------------------


def request_from_json(value: Mapping[str, Any]) -> Request:
    sampling = SamplingParams.from_json(value["sampling"])
    return Request(
        _text(value["id"]),
        Prompt.from_json(value["prompt"]),
        _integer(value["max_tokens"]),
        _integer(value["priority"]),
        _text(value["namespace"]),
        replace(sampling, top_k=_integer(sampling.top_k), seed=_integer(sampling.seed)),
        tuple(map(_integer, value["stop_tokens"])),
        tuple(map(_text, value["stop_strings"])),
        tuple(map(_text, value["outputs"])),
        Prompt.from_json(value["shown"]),
        min_tokens=_integer(value.get("min_tokens", 0)),
    )


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no integer")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no string")
    return value


def _key(value: Any) -> TransferKey:
    request_id, attempt, generation = value
    return TransferKey(_text(request_id), _integer(attempt), _integer(generation))


def _seal(value: Any) -> PageSeal:
    return PageSeal(*map(_integer, value))


def _bytes(value: Any, pieces: list[bytes]) -> bytes:
    return pieces[_integer(value["bytes"])]


def tree(value: Any, pieces: list[bytes]) -> Any:
    """Return JSON with its arrays put back."""
    if isinstance(value, dict) and "array" in value:
        content = pieces[_integer(value["array"])]
        if crc32(content) != value["crc"]:
            raise MalformedMessage("an array is damaged")
        shape = [_integer(n) for n in value["shape"]]
        if value["dtype"] not in _DTYPES or any(n < 0 for n in shape):
            raise MalformedMessage(f"an array of {value['dtype']}{shape}")
        dtype = np.dtype(value["dtype"])
        if math.prod(shape) * dtype.itemsize != len(content):
            raise MalformedMessage(f"{len(content)} bytes are no {dtype}{shape}")
        return np.frombuffer(content, dtype=dtype).reshape(shape)
    if isinstance(value, dict):
        return {name: tree(item, pieces) for name, item in value.items()}
    if isinstance(value, list):
        return [tree(item, pieces) for item in value]
    return value


def _arrival(value: Any, pieces: list[bytes]) -> Arrival:
    draft = None
    if value["draft"] is not None:
        found = tree(value["draft"], pieces)
        draft = DraftPayload(found["values"], found["hidden_states"], bool(found["needs_hidden_states"]))
    first = value["first_token"]
    outputs = {name: _number(item) for name, item in tree(value["outputs"], pieces).items()}
    return Arrival(None if first is None else _integer(first), draft, outputs, _text(value["failure"]))


def _number(value: Any) -> Any:
    return value[()] if isinstance(value, np.ndarray) and not value.shape else value


_FIELDS: dict[
    str, Callable[[Any, list[bytes]], Any]
] = {  # how each field of a message is read, from its JSON and the pieces of the body
    "key": lambda value, pieces: _key(value),
    "epoch": lambda value, pieces: _integer(value),
    "first_attempt": lambda value, pieces: _integer(value),
    "first_page": lambda value, pieces: _integer(value),
    "index": lambda value, pieces: _integer(value),
    "hold_ns": lambda value, pieces: _integer(value),
    "lease_ns": lambda value, pieces: _integer(value),
    "reason": lambda value, pieces: _text(value),
    "algorithm": lambda value, pieces: _text(value),
    "failed": lambda value, pieces: bool(value),
    "request": lambda value, pieces: request_from_json(value),
    "page_format": lambda value, pieces: PageFormat(**value),
    "seal": lambda value, pieces: _seal(value),
    "seals": lambda value, pieces: tuple(map(_seal, value)),
    "target": lambda value, pieces: _bytes(value, pieces),
    "draft": lambda value, pieces: _bytes(value, pieces),
    "arrival": lambda value, pieces: _arrival(value, pieces),
}


def _message(kind: type[Message], values: Any, pieces: list[bytes]) -> Message:
    return kind(*(_FIELDS[field.name](values[field.name], pieces) for field in fields(kind)))
