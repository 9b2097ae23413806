"""Messages between workers as bytes: what goes in comes out, and damaged bytes are an error, never another message."""

import numpy as np
import pytest
from foredraft.core.algorithm.arrival import Arrival, DraftPayload
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.errors import InvariantViolation
from foredraft.core.handoff.messages import (
    Accept,
    Ack,
    Cancel,
    CancelAck,
    MalformedMessage,
    Manifest,
    Nack,
    Offer,
    Page,
    PageFormat,
    PageSeal,
    Reject,
    Renew,
    TransferKey,
    decode,
    encode,
)
from foredraft.core.prompt import Prompt

HUGE = 2**80 + 1
KEY = TransferKey('r "é" ' + "x" * 300, HUGE, 2**63 + 5)
REQUEST = Request(
    KEY.request_id,
    Prompt.of_tokens(np.arange(40_000) % (2**31 - 1)),
    2**40,
    priority=-(2**40),
    namespace="tenant",
    sampling=SamplingParams(0.7, 0.9, 40, 2**60),
    stop_tokens=(2**31 - 1, 0),
    stop_strings=("\n\n", "é"),
    outputs=("logprobs",),
    shown=Prompt.of_tokens([2**31 - 1, 0]),
)
DRAFT = DraftPayload(
    {
        "topk_ids": np.array([2**40, 7], np.int64),
        "topk_probabilities": np.array([0.5, 0.25], np.float32),
        "state": np.arange(6, dtype=np.int64).reshape(2, 3),
    },
    np.array([1.5, -0.0, 3.0e38], np.float32),
    True,
)
ARRIVAL = Arrival(2**31 + 9, DRAFT, {"logprobs": np.float64(-1.25), "hidden_states": np.ones(3, np.float32)})
SEAL = PageSeal.of(b"target!!", b"draft")
MESSAGES = [
    Offer(KEY, HUGE - 1, REQUEST, "EAGLE", PageFormat(16, 2**40, 2**33, 4096, "bf16, 32 layers"), 2**50),
    Accept(KEY, HUGE, 2**31, 5),
    Reject(KEY, 3, "no"),
    Page(KEY, HUGE, 2**33, SEAL, b"target!!", b"draft"),
    Page(KEY, 1, 0, SEAL),
    Manifest(KEY, 1, 4, (SEAL, PageSeal(1, 2)), ARRIVAL),
    Manifest(KEY, 1, 0, (), Arrival(None, None)),
    Ack(KEY, 2**70),
    Nack(KEY, 0, "page 3"),
    Renew(KEY, 1),
    Cancel(KEY, HUGE - 2, True, "é"),
    CancelAck(KEY),
]


def assert_equal(found, expected):
    if isinstance(expected, np.ndarray | np.generic):
        assert np.asarray(found).dtype == expected.dtype and np.array_equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_equal(found[name], expected[name])
    elif isinstance(expected, Arrival | DraftPayload | Manifest):
        for name in expected.__slots__:
            assert_equal(getattr(found, name), getattr(expected, name))
    else:
        assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_comes_back_as_it_was(message):
    found = decode(encode(message))
    assert type(found) is type(message)
    assert_equal(found, message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_frame_cut_or_lengthened_anywhere_is_refused(message):
    frame = encode(message)
    cuts = {0, 1, 10, 21, 22, 23, len(frame) // 2, len(frame) - 1}
    for cut in sorted(cut for cut in cuts if cut < len(frame)):
        with pytest.raises(MalformedMessage):
            decode(frame[:cut])
    with pytest.raises(MalformedMessage):
        decode(frame + b"\0")


@pytest.mark.parametrize("message", [MESSAGES[5], MESSAGES[7], MESSAGES[1]], ids=lambda m: type(m).__name__)
def test_a_changed_byte_anywhere_is_an_error_or_changes_nothing(message):
    frame = encode(message)
    for place in range(len(frame)):
        changed = bytearray(frame)
        changed[place] ^= 0x10
        with pytest.raises(MalformedMessage):
            decode(bytes(changed))


def test_the_bytes_of_a_page_are_for_its_seal_to_judge():
    frame = bytearray(encode(MESSAGES[3]))
    frame[-1] ^= 1
    page = decode(bytes(frame))
    assert PageSeal.of(page.target, page.draft) != page.seal


@pytest.mark.parametrize("what", ["object", "kind", "field"])
def test_what_is_json_and_no_message_is_refused(what):
    import json
    from zlib import crc32

    from foredraft.core.handoff.messages import _FRAME, MAGIC, VERSION

    header = {"message": "Ack", "fields": {"key": ["a", 1, 1], "epoch": 1}, "sizes": []}
    header |= {"object": {"fields": 3}, "kind": {"message": "Run"}, "field": {"fields": {"key": ["a", 1], "epoch": 1}}}[
        what
    ]
    text = json.dumps(header).encode()
    with pytest.raises(MalformedMessage):
        decode(_FRAME.pack(MAGIC, VERSION, len(text), 0, crc32(text)) + text)


def test_hidden_states_that_are_not_needed_cannot_be_sent():
    with pytest.raises(InvariantViolation, match="ACCEPT-17"):
        DraftPayload({}, np.zeros(4, np.float32), False)
    frame = encode(Manifest(KEY, 1, 0, (), Arrival(1, DRAFT)))
    smuggled = frame.replace(b'"needs_hidden_states":true', b'"needs_hidden_states":null')
    import struct
    from zlib import crc32

    size = struct.calcsize("<4sHIQI")
    magic, version, header_bytes, body_bytes, _ = struct.unpack_from("<4sHIQI", smuggled)
    header = smuggled[size : size + header_bytes]
    smuggled = struct.pack("<4sHIQI", magic, version, header_bytes, body_bytes, crc32(header)) + smuggled[size:]
    with pytest.raises(MalformedMessage, match="ACCEPT-17"):
        decode(smuggled)
