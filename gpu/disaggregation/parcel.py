"""What a link carries from one worker to another at a time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...core.handoff import Message


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """Messages that travel together, and the pages of its `Page` messages, in their order."""

    session: int  # parcels of another session than the receiver's are not looked at
    messages: tuple[Message, ...]
    pages: Tensor | None = None  # uint8 [bytes]
