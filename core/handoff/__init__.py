"""The handoff of requests from prefill workers to decode workers: two state machines, and the messages between them.

The machines do no I/O: messages, local completions and the time come in, actions go out (`side.py`). A driver
(`PrefillDriver`, `DecodeDriver`) feeds a machine and carries out its actions over a transport: a modelled network,
memory, or links between processes.
"""

from .decode_side import DecodeSide
from .driver import DecodeDriver, HandoffDriver, PrefillDriver, Transport, make_driver
from .life import TransferCounts, TransferState
from .messages import Message, PageFormat, PageSeal, TransferKey
from .prefill_side import PrefillSide
from .side import HandoffTiming, Send, SendPages, TransferOutcome, WritePage

__all__ = [
    "DecodeDriver",
    "DecodeSide",
    "HandoffDriver",
    "HandoffTiming",
    "Message",
    "PageFormat",
    "PageSeal",
    "PrefillDriver",
    "PrefillSide",
    "Send",
    "SendPages",
    "TransferCounts",
    "TransferKey",
    "TransferOutcome",
    "TransferState",
    "Transport",
    "WritePage",
    "make_driver",
]
