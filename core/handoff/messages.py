"""The messages between a prefill worker and a decode worker.

```
prefill                                    decode
   │ Offer ──────────────────────────────────► │   reserves slots for the whole prompt (Renew while there is no room)
   │ ◄────────────────────────────────── Accept │   or Reject
   │ Page, Page, … ──────────────────────────► │   as chunks of the prompt are computed; each is verified on arrival
   │ Manifest ───────────────────────────────► │   first token, draft input, the seal of every page
   │ ◄───────────────────────────────────── Ack │   all verified: the request has joined the batch (or Nack: try again)
   │ Cancel ◄──────────────────────────────► Cancel, answered by CancelAck: no page of it is sent or written any more
```

Every message carries the key of one attempt: (request id, attempt, generation). `generation` is the prefill worker's incarnation,
`attempt` counts all attempts of that incarnation, so a key is never reused. `epoch` is the decode worker's incarnation. All of them are
integers of any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from ..algorithm.arrival import Arrival
from ..contract.request import Request


class TransferKey(NamedTuple):
    """Names one attempt of one transfer; never reused."""

    request_id: str
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The format of a page of KV, equal on both sides. `layout` names dtype, heads, layers: all that gives its bytes a meaning."""

    page_size: int  # tokens
    target_bytes: int  # of one page in the target pool, all layers
    draft_bytes: int = 0  # of one page in the draft pool; 0: there is none
    hidden_size: int = 0  # of the hidden state that a draft starts from; 0: none is sent
    layout: str = ""

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class PageSeal:
    """Size and CRC-32 of a page's bytes, in both pools. A simulated link, which carries no bytes, makes up checksums."""

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
    """Prefill: page `index` of the prompt, in both pools. Where the link carries no bytes, `target` and `draft` are empty."""

    key: TransferKey
    epoch: int
    index: int
    seal: PageSeal
    target: bytes = b""
    draft: bytes = b""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Prefill: everything is sent. `seals` are those of pages first_page, first_page + 1, …, which must have arrived."""

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
    """Decode: what arrived in this attempt is not what was sent."""

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
    """Either side: give this transfer up. `failed`: because of an error, else because the request is not wanted any more."""

    key: TransferKey
    first_attempt: int  # of this transfer; its earlier attempts are given up as well
    failed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CancelAck:
    """Either side: no page of this attempt is sent or written here any more."""

    key: TransferKey


Message = Offer | Accept | Reject | Page | Manifest | Ack | Nack | Renew | Cancel | CancelAck
