"""Prefill and decode on different workers: the handoff of a request as two state machines, and the messages between them.

The machines do no I/O: messages, local completions and the time come in, actions go out (see `actions.py`). A driver carries them out
in order: the simulator on a modelled link, the reference executor in memory, the real executor between processes.
"""

from .actions import DecodeAction, PrefillAction, Send, SendPages, TransferOutcome, WritePage
from .decode_side import DecodeSide
from .life import TransferCounts, TransferState
from .messages import Message, PageFormat, PageSeal, TransferKey
from .prefill_side import PrefillSide
from .timing import HandoffTiming

__all__ = [
    "DecodeAction",
    "DecodeSide",
    "HandoffTiming",
    "Message",
    "PageFormat",
    "PageSeal",
    "PrefillAction",
    "PrefillSide",
    "Send",
    "SendPages",
    "TransferCounts",
    "TransferKey",
    "TransferOutcome",
    "TransferState",
    "WritePage",
]
