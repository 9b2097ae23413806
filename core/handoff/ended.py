"""What each side remembers of ended transfers, and its answers to messages that come late."""

from __future__ import annotations

from dataclasses import dataclass

from .messages import Accept, Ack, Cancel, CancelAck, Manifest, Message, TransferKey
from .side import Deadlines, HandoffTiming

MAX_REMEMBERED = 1 << 12
"""Acknowledged attempts that a prefill side remembers."""

TransferName = tuple[str, str]
"""A peer and a request id: a decode side has at most one open transfer of a name."""


class AcknowledgedAttempts:
    """The newest attempts of a prefill side that were acknowledged."""

    def __init__(self) -> None:
        self._keys: dict[TransferKey, None] = {}

    def add(self, key: TransferKey) -> None:
        """Remember an attempt, and forget the oldest if there are more than `MAX_REMEMBERED`."""
        self._keys[key] = None
        if len(self._keys) > MAX_REMEMBERED:
            del self._keys[next(iter(self._keys))]

    def answer(self, message: Message, is_expected: bool) -> Message | None:
        """Return the answer to a message about no open transfer, or None. `is_expected`: an open transfer explains it.

        Slots that were accepted for an ended transfer are called back, but not those of an acknowledged one: its
        request may be running.
        """
        if isinstance(message, Cancel):
            return CancelAck(message.key)
        if isinstance(message, Accept) and not is_expected and message.key not in self._keys:
            return Cancel(message.key, message.key.attempt, False, "no such transfer")
        return None


@dataclass(frozen=True, slots=True)
class EndedTransfer:
    """What the decode side remembers of an ended transfer. `joined`: its request may be running here."""

    key: TransferKey
    joined: bool


class EndedTransfers:
    """The ended transfers of a decode side, each remembered for as long as the prefill side may send messages about
    it."""

    def __init__(self, timing: HandoffTiming) -> None:
        attempts_ns = timing.max_attempts * (timing.lease_ns + timing.hold_ns)
        self._remembered_ns = attempts_ns + timing.fence_ns
        self._transfers: dict[TransferName, EndedTransfer] = {}
        self._forgotten_at: Deadlines[TransferName] = Deadlines()
        self._joined_by: dict[str, TransferName] = {}  # request -> the transfer that brought it

    @property
    def next_ns(self) -> int | None:
        """When `forget_due` has something to do; None if nothing is remembered."""
        return self._forgotten_at.next_ns

    def get(self, name: TransferName) -> EndedTransfer | None:
        """Return the newest ended transfer of a name, or None."""
        return self._transfers.get(name)

    def has_brought(self, name: TransferName) -> bool:
        """Return whether the request of this id that joined last came by the transfer of this name."""
        return self._joined_by.get(name[1]) == name

    def note_join(self, name: TransferName) -> None:
        """Remember that the request of this transfer has joined."""
        self._joined_by[name[1]] = name

    def add(self, name: TransferName, key: TransferKey, joined: bool, now_ns: int) -> None:
        """Remember how a transfer ended."""
        self._transfers[name] = EndedTransfer(key, joined)
        self._forgotten_at.set(name, now_ns + self._remembered_ns)

    def answer(self, name: TransferName, message: Message) -> Message | None:
        """Return the answer to a late message, or None: a manifest whose request has joined is acknowledged again.

        The ack has the epoch of the manifest, as the first one had: the worker may have lost its KV since, and the
        prefill side takes no ack of another epoch.
        """
        ended = self._transfers.get(name)
        if isinstance(message, Manifest) and ended is not None and ended.joined and ended.key == message.key:
            return Ack(message.key, message.epoch)
        return None

    def forget_due(self, now_ns: int) -> None:
        """Forget the transfers whose time has passed."""
        while (name := self._forgotten_at.pop_due(now_ns)) is not None:
            self.forget(name)

    def forget(self, name: TransferName) -> None:
        """Forget what ended under a name, if anything did."""
        self._transfers.pop(name, None)
        self._forgotten_at.clear(name)
        if self.has_brought(name):
            del self._joined_by[name[1]]
