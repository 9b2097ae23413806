"""The link between two workers: parcels over `torch.distributed`, one thread that sends and one that receives per peer.

    header int64 [5] │ messages uint8: length u32, frame of `core.handoff.messages`, … │ pages uint8, page after page

Messages travel on the host (gloo). Pages travel as one tensor: over gloo from host to host, or over NCCL from GPU to
GPU where every worker has a GPU of its own. Whatever fails on one link, the other links of the process group go on.
"""

from __future__ import annotations

import os
import queue
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import ConfigError, ForedraftError, Problem, nearest
from ...core.handoff import Message
from ...core.handoff.messages import MalformedMessage, decode, encode
from ...core.parsing import ParseError, parse_json


@dataclass(frozen=True, slots=True, eq=False)
class PageParcel:
    """Messages that travel together, and the pages of its `Page` messages, in their order."""

    session: int  # parcels of another session than the receiver's are not looked at
    messages: tuple[Message, ...]
    pages: Tensor | None = None  # uint8 [bytes]
    number: int = 0  # by which ranks find the parcel with their parts of the pages of a message


_MAGIC = 0x46544B50
_HEADER_FIELDS = 6
_LENGTH = struct.Struct("<I")
MAX_PARCEL_BYTES = 1 << 34


@dataclass(frozen=True, slots=True)
class LinkNews:
    """An event of a link, for its worker."""

    peer: str
    parcel: PageParcel | None  # None: the link is broken, nothing comes any more
    num_malformed: int = 0
    why: str = ""


class PeerLink:
    """The link to the worker `name` of rank `rank`. `tell` is called by the receiving thread."""

    def __init__(
        self,
        rank: int,
        name: str,
        page_device: torch.device,
        faults: InjectedLinkFaults,
        tell: Callable[[LinkNews], None],
    ) -> None:
        self.name = name
        self._rank = rank
        self._page_device = page_device
        self._faults = faults
        self._tell = tell
        self._outgoing: queue.SimpleQueue[PageParcel] = queue.SimpleQueue()
        self._is_broken = False
        for work in (self._send_all, self._receive_all):
            # Daemons: they wait in the library for a peer that may never speak again.
            threading.Thread(target=work, name=f"{work.__name__} {name}", daemon=True).start()

    def send(self, parcel: PageParcel) -> None:
        """Queue a parcel to be sent, without waiting."""
        if not self._is_broken:
            self._outgoing.put(parcel)

    def _send_all(self) -> None:
        try:
            while True:
                for parcel, share in self._faults.disturb(self._outgoing.get()):
                    self._transmit(parcel, share)
        except RuntimeError as error:
            self._break(error)

    def _transmit(self, parcel: PageParcel, share: float) -> None:
        content = b"".join(map(_framed, parcel.messages))
        content = content[: int(len(content) * share)]
        pages = torch.empty(0, dtype=torch.uint8) if parcel.pages is None else parcel.pages.to(self._page_device)
        numbers = (_MAGIC, parcel.session, len(content), len(pages), len(parcel.messages), parcel.number)
        dist.send(torch.tensor(numbers, dtype=torch.int64), self._rank)
        if content:
            dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), self._rank)
        if len(pages):
            dist.send(pages, self._rank)

    def _receive_all(self) -> None:
        try:
            while True:
                self._tell(self._receive())
        except (RuntimeError, LinkError) as error:
            self._break(error)

    def _receive(self) -> LinkNews:
        header = torch.empty(_HEADER_FIELDS, dtype=torch.int64)
        dist.recv(header, self._rank)
        magic, session, content_bytes, page_bytes, num_messages, number = header.tolist()
        if magic != _MAGIC or not 0 <= content_bytes <= MAX_PARCEL_BYTES or not 0 <= page_bytes <= MAX_PARCEL_BYTES:
            raise LinkError(f"a parcel that begins with {header.tolist()}")
        content = torch.empty(content_bytes, dtype=torch.uint8)
        if content_bytes:
            dist.recv(content, self._rank)
        pages = None
        if page_bytes:
            pages = torch.empty(page_bytes, dtype=torch.uint8, device=self._page_device)
            dist.recv(pages, self._rank)
            if pages.is_cuda:
                torch.cuda.current_stream(pages.device).synchronize()
        messages = _messages_in(content.numpy().tobytes())
        return LinkNews(self.name, PageParcel(session, messages, pages, number), num_messages - len(messages))

    def _break(self, error: Exception) -> None:
        was_broken, self._is_broken = self._is_broken, True
        if not was_broken:
            self._tell(LinkNews(self.name, None, 0, str(error).partition("\n")[0] or type(error).__name__))


class LinkError(ForedraftError):
    """Bytes on a link that begin no parcel, so that nothing after them can be read."""


def _framed(message: Message) -> bytes:
    frame = encode(message)
    return _LENGTH.pack(len(frame)) + frame


def _messages_in(content: bytes) -> tuple[Message, ...]:
    """Return the messages up to the first that is damaged or cut off;
    the state machines know what to do without the others."""
    messages: list[Message] = []
    at = 0
    while at + _LENGTH.size <= len(content):
        (size,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        try:
            messages.append(decode(memoryview(content)[at : at + size]))
        except MalformedMessage:
            break
        at += size
    return tuple(messages)


FOR_EVER = timedelta(days=365)
"""A receive waits until a peer sends something. The parent watches which workers are alive."""


def connect(host: str, port: int, rank: int, world_size: int, backend: str, group: str = "foredraft") -> None:
    """Join the process group of this name through the parent's store."""
    store = dist.TCPStore(host, port, is_master=False, timeout=FOR_EVER)
    dist.init_process_group(
        backend, store=dist.PrefixStore(group, store), rank=rank, world_size=world_size, timeout=FOR_EVER
    )


def links(
    peers: Sequence[tuple[int, str]],
    page_device: torch.device,
    faults: InjectedLinkFaults,
    tell: Callable[[LinkNews], None],
) -> dict[str, PeerLink]:
    return {name: PeerLink(rank, name, page_device, faults, tell) for rank, name in peers}


FAULTS_VARIABLE = "FOREDRAFT_LINK_FAULTS"


@dataclass(frozen=True, slots=True)
class ParcelFaults:
    """Faults that a test injects where one worker sends parcels. The default: none.

    A plan names parcels by their number, counted from 1 over everything that a worker sends in a session; in
    `truncate_pages`, over those that have pages. {"prefill0": {"duplicate": [2], "truncate_messages": [3], "drop": [5],
    "delay_ms": 20, "die_before": 6}}
    """

    duplicate: tuple[int, ...] = ()  # sent twice
    drop: tuple[int, ...] = ()  # not sent
    truncate_messages: tuple[int, ...] = ()  # the second half of the messages' bytes is missing
    truncate_pages: tuple[int, ...] = ()  # the second half of the pages' bytes is missing
    delay_ms: float = 0.0  # before every parcel
    die_before: int = 0  # the worker is killed in front of this parcel

    @classmethod
    def from_json(cls, value: Any, source: str) -> ParcelFaults:
        known = tuple(f.name for f in fields(cls))
        if not isinstance(value, Mapping):
            raise ConfigError.of(source, "", f"is {value!r}; expected an object")
        problems = []
        for name, given in value.items():
            if name not in known:
                problems.append(
                    Problem(name, f"is no fault of a link{nearest(name, known)}; known: {', '.join(known)}")
                )
            elif isinstance(getattr(cls(), name), tuple):
                if not isinstance(given, list) or any(type(n) is not int or n < 1 for n in given):
                    problems.append(Problem(name, f"is {given!r}; expected a list of numbers from 1"))
            elif isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < float("inf"):
                problems.append(Problem(name, f"is {given!r}; expected a number"))
        if problems:
            raise ConfigError(source, problems)
        values: dict[str, Any] = {n: tuple(given) if isinstance(given, list) else given for n, given in value.items()}
        return cls(**values)


def plans_from_environment() -> dict[str, dict[str, Any]]:
    """Return the plans by worker that the environment asks for; ConfigError if they make no sense."""
    text = os.environ.get(FAULTS_VARIABLE, "")
    if not text:
        return {}
    try:
        plans = parse_json(text)
    except ParseError as error:
        raise ConfigError.of(FAULTS_VARIABLE, "", f"is not JSON: {error}") from None
    if not isinstance(plans, dict):
        raise ConfigError.of(FAULTS_VARIABLE, "", f"is {plans!r}; expected an object of workers")
    for name, plan in plans.items():
        ParcelFaults.from_json(plan, f"{FAULTS_VARIABLE}: {name}")
    return plans


class InjectedLinkFaults:
    """Applies a fault plan. All links of a worker share one, so that its numbers count all parcels of the worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(ParcelFaults())

    def begin(self, plan: ParcelFaults) -> None:
        """Begin a session: numbers count from the start again."""
        with self._lock:
            self._plan = plan
            self._num_sent = self._num_with_pages = 0

    def disturb(self, parcel: PageParcel) -> Iterator[tuple[PageParcel, float]]:
        """Yield the parcels to send instead of `parcel`, each with the share of its messages' bytes that is sent."""
        with self._lock:
            plan = self._plan
            self._num_sent += 1
            self._num_with_pages += parcel.pages is not None
            number, with_pages = self._num_sent, self._num_with_pages
        if plan.die_before == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if plan.delay_ms:
            time.sleep(plan.delay_ms / 1e3)
        if number in plan.drop:
            return
        if parcel.pages is not None and with_pages in plan.truncate_pages:
            parcel = replace(parcel, pages=parcel.pages[: len(parcel.pages) // 2])
        share = 0.5 if number in plan.truncate_messages else 1.0
        for _ in range(2 if number in plan.duplicate else 1):
            yield parcel, share
