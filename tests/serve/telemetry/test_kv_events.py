"""KV events: what subscribers of vLLM's protocol learn of the prefix caches, and that it is what the caches hold."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.kv.radix import RadixCache
from foredraft.gpu.session.text import Tokenizer
from foredraft.serve.base.port import adapter_and_salt, namespace_of
from http_server import serving, simulated_body, wait_until

zmq = pytest.importorskip("zmq", reason="the extra kv-events is not installed")
msgspec = pytest.importorskip("msgspec", reason="the extra kv-events is not installed")

from foredraft.serve.telemetry.kv_events import LAST, KvPublisher, PageEvents  # noqa: E402

ANYWHERE = "tcp://127.0.0.1:0"
PAGES_OF_4 = ("engine.page_size=4", "engine.kv_slots=4000", "speculation.algorithm=NONE")


class Index:
    """What a router of prefixes keeps of an engine: blocks by their hash, with the hash before and their tokens. It
    checks what it is told against what it knows."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.num_cleared = 0

    def take(self, event: dict) -> None:
        match event["type"]:
            case "BlockStored":
                assert (event["medium"], event["lora_id"], event["lora_name"]) == ("GPU", None, None)
                before, size = event["parent_block_hash"], event["block_size"]
                assert before is None or before in self.blocks
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
                for i, block in enumerate(event["block_hashes"]):
                    assert block not in self.blocks
                    self.blocks[block] = (before, tuple(event["token_ids"][i * size : (i + 1) * size]))
                    before = block
            case "BlockRemoved":
                for block in event["block_hashes"]:
                    del self.blocks[block]
            case "AllBlocksCleared":
                self.blocks.clear()
                self.num_cleared += 1
            case other:
                raise AssertionError(other)

    def prefixes(self) -> set[tuple[int, ...]]:
        """Return the tokens up to the end of each block."""
        found: dict[int | None, tuple[int, ...]] = {None: ()}
        for block, (before, tokens) in self.blocks.items():
            found[block] = found[before] + tokens
        return set(found.values()) - {()}


def _batches(socket, patience_ms: int = 3000) -> Iterator[tuple[bytes, int, list]]:
    """Yield (topic, number, batch) until nothing comes for some time."""
    while socket.poll(patience_ms):
        topic, number, batch = socket.recv_multipart()
        yield topic, int.from_bytes(number, "big", signed=True), batch and msgspec.msgpack.decode(batch)


def _held(cache: RadixCache) -> set[tuple[int, ...]]:
    """Return the prefixes of whole pages that a cache holds."""
    found = set()
    waiting = [(node, ()) for node in cache.root.children.values()]
    while waiting:
        node, before = waiting.pop()
        whole = before + tuple(node.keys.tolist())
        found |= {whole[:end] for end in range(len(before) + cache.page_size, len(whole) + 1, cache.page_size)}
        waiting += [(child, whole) for child in node.children.values()]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_events_rebuild_the_cache(seed):
    """Also after splits, evictions of halves of nodes, and an emptying."""
    dice, cache, index = np.random.default_rng(seed), RadixCache(page_size=4), Index()
    cache.listener = events = PageEvents(4, "token")
    free, tokens = list(range(0, 8000, 4)), np.empty(0, dtype=np.int64)
    for turn in range(120):
        if turn == 80:
            free += cache.clear()[::4].tolist()
        elif dice.random() < 0.3:
            free += cache.evict(int(dice.integers(1, 30)))[::4].tolist()
        else:
            kept = tokens[: int(dice.integers(0, 60))] if dice.random() < 0.7 else tokens[:0]  # goes on behind a prefix
            tokens = np.concatenate((kept, dice.integers(0, 3, int(dice.integers(1, 40)))))
            pages = [free.pop(0) for _ in range(len(tokens) // 4)]
            slots = np.array([page + i for page in pages for i in range(4)], dtype=np.int32)
            done = cache.insert(tokens, slots)
            free += done.duplicates[::4].tolist()
        for event in events.take():
            index.take(event)
        assert index.prefixes() == _held(cache)
    assert index.num_cleared == 1 and len(index.blocks) > 10


def test_with_a_tokenizer_ids_are_those_of_its_model(models: dict[str, Path]):
    """A gateway that cuts prompts by the model's tokenizer finds the blocks of the events; answers are words and JSON
    of it, too."""
    tokenizer = Tokenizer.load(models["target"])
    body = simulated_body(*PAGES_OF_4, make_codec=partial(Tokenizer.load, models["target"]))
    body.engines[0].store.cache.listener = events = PageEvents(4, "token")
    prompt, schema = (
        "def add(a, b):\n    return a + b\n" * 4,
        {"required": ["a", "n"], "properties": {"n": {"const": 5}}},
    )
    tokens = tokenizer.encode(prompt).tolist()
    with serving(body) as served:
        asked = {"prompt": prompt, "max_tokens": 40, "logprobs": 1}
        answer = served.post("/v1/completions", **asked).json()
        assert served.post("/tokenize", prompt=prompt).json()["tokens"] == tokens
        assert answer["usage"]["prompt_tokens"] == len(tokens) and answer["choices"][0]["text"].split()
        shaped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        text = served.post("/v1/completions", **asked, response_format=shaped).json()["choices"][0]["text"]
        assert json.loads(text)["n"] == 5 and len(tokenizer.encode(text)) <= 42
        assert served.post("/v1/completions", prompt=[tokenizer.vocab_size]).status_code == 400
        served.wait_until_idle()
    stored = [event for event in events.take() if event["type"] == "BlockStored"]
    whole = len(tokens) // 4 * 4
    assert stored[0]["token_ids"][:whole] == tokens[:whole]


def test_adapters_have_prefixes_of_their_own_and_events_name_them():
    pages = PageEvents(2, "token")
    for slot, names in enumerate((("", ""), ("", "salt"), ("sql", ""), ("sql", "salt"), ("", "\0sql\0salt"))):
        pages.stored(np.array([1, 2, 3, 4]), np.arange(4) + 4 * slot, None, namespace_of(*names))
        assert adapter_and_salt(namespace_of(*names)) == names
    assert len({block for event in pages.pending for block in event["block_hashes"]}) == 10
    pages = PageEvents(2, "token")
    for slot, namespace in enumerate((namespace_of("sql", ""), namespace_of("sql", "salt"), "salt")):
        pages.stored(np.array([1, 2, 3, 4]), np.arange(4) + 4 * slot, None, namespace)
    assert [event["lora_name"] for event in pages.pending] == ["sql", "sql", None]
    assert [event["extra_keys"] for event in pages.pending] == [
        [("sql",), ("sql",)], [("sql", "salt"), ("sql",)], [("salt",), None]
    ]  # fmt: skip


def test_the_hash_of_a_block_covers_what_is_before_it_and_the_salt():
    def hashes(tokens: list[int], namespace: str = "") -> list[int]:
        cache = RadixCache(page_size=2)
        cache.listener = events = PageEvents(2, "token")
        cache.insert(tokens, np.arange(len(tokens), dtype=np.int32), namespace)
        (event,) = events.take()
        assert event.get("extra_keys") == ([(namespace,), None] if namespace else None)
        return event["block_hashes"]

    plain = hashes([1, 2, 3, 4])
    assert plain == hashes([1, 2, 3, 4]) and all(0 <= one < 2**64 for one in plain)
    assert plain[0] == hashes([1, 2, 3, 5])[0] and plain[1] != hashes([1, 2, 3, 5])[1]
    assert plain[1] != hashes([1, 1, 3, 4])[1] and not set(plain) & set(hashes([1, 2, 3, 4], "salt"))


def test_keys_of_two_tokens_are_published_as_tokens_with_the_next_one():
    cache = RadixCache(page_size=2, key_kind="bigram")
    cache.listener = events = PageEvents(2, "bigram")
    cache.insert([5, 6, 7, 8, 9], np.arange(4, dtype=np.int32))
    (event,) = events.take()
    assert (event["token_ids"], event["lookahead_token_ids"]) == ([5, 6, 7, 8], [[7], [9]])


def test_subscribers_learn_of_prompts_and_can_ask_for_what_they_missed():
    body = simulated_body(*PAGES_OF_4)
    publisher = KvPublisher(body.engines, ANYWHERE, ANYWHERE, "kv@pod@model")
    context = zmq.Context.instance()
    subscriber, late = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.subscribe("kv@")
    subscriber.connect(publisher.addresses[0])
    late.connect(publisher._channels[0].replay.getsockopt_string(zmq.LAST_ENDPOINT))
    time.sleep(0.3)  # ZeroMQ tells a publisher of its subscribers on its own time
    prompt = list(range(100, 122))
    begin = time.time()
    with serving(body, after_turn=publisher.publish) as served:
        for _ in range(3):
            served.post("/v1/completions", prompt=prompt, max_tokens=4, ignore_eos=True)
        served.wait_until_idle()
        index, numbers = Index(), []
        for topic, number, (at_s, events, rank) in _batches(subscriber, 500):
            assert (topic, rank) == (b"kv@pod@model", 0) and begin <= at_s <= time.time()
            numbers.append(number)
            for event in events:
                index.take(event)
        assert numbers == list(range(len(numbers))) and numbers
        assert tuple(prompt[:20]) in index.prefixes() == _held(body.engines[0].store.cache)
        late.send_multipart((b"", (0).to_bytes(8, "big")))
        again = _replay(late)
        assert [number for _, number, _ in again] == [*numbers, -1]
        late.send_multipart((b"", numbers[-1].to_bytes(8, "big")))
        assert [number for _, number, _ in _replay(late)] == [numbers[-1], -1]
    publisher.close()
    subscriber.close()
    late.close()


def _replay(socket) -> list[tuple[bytes, int, list]]:
    """Return the batches of a replay, up to the mark behind the last."""
    found = []
    while not found or found[-1][1] != -1:
        assert socket.poll(3000)
        _, topic, number, batch = socket.recv_multipart()
        found.append((topic, int.from_bytes(number, "big", signed=True), batch))
        assert number == LAST or msgspec.msgpack.decode(batch)[1]
    return found


def test_a_full_cache_tells_what_it_evicts():
    body = simulated_body("engine.page_size=4", "engine.kv_slots=400", "speculation.algorithm=NONE")
    publisher = KvPublisher(body.engines, ANYWHERE)
    taken: list[dict] = []
    publisher.close()
    (events,) = publisher._events

    def publish() -> None:
        taken.extend(events.take())

    with serving(body, after_turn=publish) as served:
        for i in range(8):
            prompt = list(range(1000 * i, 1000 * i + 100))
            assert served.post("/v1/completions", prompt=prompt, max_tokens=4).status_code == 200
        served.wait_until_idle()
        wait_until(lambda: not events.pending)
        index = Index()
        for event in taken:
            index.take(event)
        assert index.prefixes() == _held(body.engines[0].store.cache)
        assert sum(event["type"] == "BlockRemoved" for event in taken) >= 3


@pytest.mark.parametrize(
    ("settings", "endpoint", "told"),
    [
        (("engine.prefix_cache=false",), ANYWHERE, "there is no prefix cache"),
        ((), "5557", "'5557' is no address such as tcp://*:5557"),
        ((), "tcp://127.0.0.1:port", "is no address"),
        ((), "tcp://300.0.0.1:5557", "cannot listen on tcp://300.0.0.1:5557"),
    ],
)
def test_events_that_cannot_be_published_are_one_error(settings, endpoint, told):
    with pytest.raises(ConfigError, match=r"--kv-events: .*" + told.replace("*", r"\*")):
        KvPublisher(simulated_body(*settings).engines, endpoint)
