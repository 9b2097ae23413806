"""Text from tokens, and the stop strings in it: what is found, and how much work it is."""

from types import MappingProxyType

import numpy as np
import pytest
from foredraft.core.contract.text import StopStrings, StreamDecoder, TextDecoder, context_of
from hypothesis import given
from hypothesis import strategies as st


class Letters(TextDecoder):
    """Token n is the n-th letter; token 26 is special. It counts the tokens that it decodes."""

    special_ids = frozenset([26])

    def __init__(self):
        self.num_decoded = 0

    def decode(self, tokens):
        self.num_decoded += len(tokens)
        return "".join(chr(97 + int(token)) for token in tokens if token != 26)


def tokens_of(text):
    return [ord(letter) - 97 for letter in text]


def first_end(text, stops):
    """Return how many letters there are when the first stop string is complete; None if none ever is."""
    return next((n for n in range(1, len(text) + 1) if any(stop in text[:n] for stop in stops)), None)


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    special=st.integers(0, 30),
    min_tokens=st.integers(0, 6),
)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(text, stops, special, min_tokens):
    tokens, stream, shown = tokens_of(text), StreamDecoder(Letters(), stops, min_tokens=min_tokens), ""
    counted = [n for n in range(min_tokens + 1, len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    end = min(counted, default=None)
    for n, token in enumerate(tokens, 1):
        shown += stream.push([token])
        assert (stream.stop is not None) == stream.has_stop == (end == n)
        if end == n:
            break
    shown += stream.finish()
    if end is None:
        assert shown == text
    else:
        longest = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
        assert (shown, stream.stop) == (text[: end - len(longest)], longest)


@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    sizes=st.lists(st.integers(1, 6), min_size=40, max_size=40),
)
def test_in_a_piece_of_several_tokens_the_stop_string_that_begins_first_counts(text, stops, sizes):
    stream, shown, seen, tokens = StreamDecoder(Letters(), stops), "", "", tokens_of(text)
    for size in sizes:
        piece, tokens = tokens[:size], tokens[size:]
        seen += "".join(chr(97 + token) for token in piece)
        shown += stream.push(piece)
        places = [(seen.find(stop), stop) for stop in stops if stop in seen]
        assert seen.startswith(shown) and all(place >= len(shown) for place, _ in places)
        if places:
            assert (shown, stream.stop) == (seen[: min(places)[0]], min(places)[1])
            return
    assert shown + stream.finish() == text


def test_special_tokens_stand_in_no_text():
    stream = StreamDecoder(Letters(), ["ab"])
    assert [stream.push([token]) for token in (0, 26, 26, 1)] == ["", "", "", ""]
    assert stream.stop == "ab" and stream.num_tokens == 4


def test_the_context_is_the_shortest_end_of_a_prompt_with_text():
    assert context_of(Letters(), np.array([0, 1, 2])) == [2]
    assert context_of(Letters(), [0, 1, 26, 26]) == [0, 1, 26, 26]
    assert context_of(Letters(), [26, 26, 26]) == context_of(Letters(), []) == []
    letters = Letters()
    assert context_of(letters, [0] + [26] * 10_000) == [] and letters.num_decoded < 200


class Bytes(TextDecoder):
    """Token n below 256 is a byte of a run, as in Llama 2: a run that is no UTF-8 is shown as nothing but marks."""

    byte_ids = MappingProxyType({n: n for n in range(256)})

    def __init__(self):
        self.num_decoded = 0

    def decode(self, tokens):
        self.num_decoded += len(tokens)
        text, run = "", bytearray()
        for token in [*map(int, tokens), -1]:
            if 0 <= token < 256:
                run.append(token)
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            text, run = text + chr(token - 256 if token >= 256 else 0), bytearray()
        return text.rstrip("\0")


@pytest.mark.parametrize("stop", ["\n", "€", "b\n", "\n€"])
def test_a_stop_string_among_bytes_ends_the_request_at_its_last_byte(stop):
    tokens = [256 + ord("b"), *"\n€".encode()]
    stream = StreamDecoder(Bytes(), [stop])
    found = []
    for token in tokens:
        assert stream.push([token]) in ("", "b")
        found.append(stream.has_stop)
    text = "b\n€"
    assert found.index(True) + 1 == len((text[: text.index(stop)] + stop).encode())


def test_bytes_that_are_no_text_are_none_of_a_stop_string():
    stream = StreamDecoder(Bytes(), ["\n"])
    for token in (0xE2, 0x0A):
        stream.push([token])
        assert not stream.has_stop
    assert stream.push([256 + ord("a")]) == "\ufffd\ufffda"


# -- how much work it is ----------------------------------------------------------------------------------------------


class CountedStrings(StopStrings):
    """Counts the look-ups of its automaton."""

    def __init__(self, texts):
        self.num_lookups = 0
        super().__init__(texts)
        counted = self

        class Edges(dict):
            def __contains__(self, letter):
                counted.num_lookups += 1
                return dict.__contains__(self, letter)

        self._next = [Edges(edges) for edges in self._next]
        self.num_lookups = 0


def aab(length):
    return "a" * (length - 1) + "b"


@given(
    text=st.text("ab", max_size=200), stops=st.lists(st.text("ab", min_size=1, max_size=60), min_size=1, max_size=40)
)
def test_an_automaton_looks_at_a_character_twice_at_most(text, stops):
    """On average, whatever the strings are."""
    for strings, letters in ((CountedStrings(stops), text), (CountedStrings([aab(256)]), "a" * 2000 + "c")):
        state = 0
        for letter in letters:
            state = strings.step(state, letter)
        assert strings.num_lookups <= 2 * len(letters)


CASES = {
    "text that is held": (Letters(), [0], [aab(5000)]),
    "many strings": (Letters(), [0], [aab(n) for n in range(2, 200)]),
    "special tokens": (Letters(), [26], ["ab"]),
    "bytes": (Bytes(), [0x0A], ["\n" * 5000]),
    "bytes that are no text": (Bytes(), [0xFF], ["\n"]),
    "a mark as a token": (Bytes(), [256 + 0xFFFD], ["\n"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_work_of_a_token_does_not_grow_with_the_text(case):
    """No token is decoded more than a few times, and nothing that is held is read again."""
    decoder, tokens, stops = CASES[case]
    work = []
    for repeats in (500, 4000):
        stream, decoder.num_decoded = StreamDecoder(decoder, stops), 0
        read = []
        strings = stream._held.strings
        step = strings.step
        strings.step = lambda state, letter, step=step, read=read: (read.append(letter), step(state, letter))[1]
        for _ in range(repeats):
            for token in tokens:
                stream.push([token])
                assert not stream.has_stop
        stream.finish()
        del strings.step
        work.append((decoder.num_decoded / repeats, len(read) / repeats))
    assert work[1][0] <= work[0][0] * 1.1 + 1 and work[1][0] <= 40
    assert work[1][1] <= 3
