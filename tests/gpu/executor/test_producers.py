"""Outputs of other producers, such as a sparse indexer's choices or a recurrent state, travel like all others: to their
own tokens.

The payloads are synthetic: functions of (request, position, token) and of the whole text. A payload at another token is
a wrong one.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from foredraft.checks.adapters.torch_models import RunningText, hashes_of
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.events import Planned
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.draws import request_key
from foredraft.core.handoff import HandoffTiming
from foredraft.core.handoff.messages import Page, decode, encode
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.engine import Engine
from foredraft.gpu.disaggregation.serving import News, Serving
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.executor.parts import ExecutorOptions
from foredraft.gpu.parallel.link import PageParcel
from foredraft.gpu.session.loop import DeliverySink
from hostile_driver import Disturbance
from matrix_cells import OPS, small_model
from serving import CONFIG, chain, count_retractions, serve, tree
from torch import Tensor

OUTPUTS = ("indexer_topk", "recurrent_state")


def choices(key, position, token):
    """What an indexer would choose for a token, [n, 2] of tensors or numbers."""
    first = (key * 7 + position * 31 + token * 3) % 4096
    return torch.stack([first, (first * 5 + position) % 4096], dim=-1).int()


class Indexer:
    """Stateless, but for whose row it is."""

    def __init__(self) -> None:
        self.keys = torch.zeros(CONFIG["max_running"] + 1, dtype=torch.int64)

    def open_row(self, join) -> None:
        self.keys[join.row] = request_key(join.request.request_id) % 10_000

    def prompt(self, chunks) -> Tensor:
        part, last = chunks.part, chunks.last
        ends = np.cumsum(part.lens)[last] - 1
        positions = torch.from_numpy((part.starts + part.lens)[last] - 1)
        return choices(self.keys[part.rows[last]], positions, torch.from_numpy(part.tokens[ends].astype(np.int64)))

    def nodes(self, batch, tree) -> Tensor:
        keys = self.keys[batch.rows].repeat_interleave(tree.num_nodes)
        positions = (batch.lengths[:, None] + tree.depths).view(-1)
        return choices(keys, positions, tree.tokens.view(-1))

    def keep(self, batch, values: Tensor) -> None:
        pass


def expected(request: Request, tokens: list[int]) -> dict[str, np.ndarray]:
    """The payloads of `tokens`: each belongs to the token before it."""
    prompt = request.prompt.materialize().tolist()
    text = prompt + tokens[:-1]
    n = len(prompt) - 1
    key = torch.tensor(request_key(request.request_id) % 10_000)
    found = choices(key.expand(len(text)), torch.arange(len(text)), torch.tensor(text))
    return {"indexer_topk": found[n:].numpy(), "recurrent_state": hashes_of(text)[n:]}


WAYS = {
    "chain": chain("STANDALONE", 3, prefix_cache=True),
    "tree": tree("STANDALONE", 3, 4, 12, page_size=4, num_pages=120),
    "EAGLE tree, overlap": tree("EAGLE", 2, 5, 9, overlap=True),
    "one at a time": chain("STANDALONE", 0, overlap=True),
}


def ask(temperature: float) -> list[Request]:
    return [
        Request(
            f"r{i}",
            Prompt.of_tokens([(5 * i + j * j) % 24 for j in range(3 + 4 * i)]),
            18,
            outputs=OUTPUTS if i % 3 else OUTPUTS[i % 2 :],
            sampling=SamplingParams(temperature, seed=i + 1),
        )
        for i in range(6)
    ]


@pytest.mark.fast("3.0-EAGLE tree, overlap", ci="3.0-tree")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_a_payload_stays_with_its_token(way, temperature):
    """After compaction, in batches that change, and where a retraction computes a text again."""
    requests = ask(temperature)
    producers = {"indexer_topk": Indexer(), "recurrent_state": RunningText(CONFIG["max_running"])}
    run = serve(WAYS[way], requests, producers=producers, disturbance=Disturbance(submit=50, retract=6))
    assert run.retractions > 1 and producers["recurrent_state"].kept > 10
    for request in requests:
        end = run.finished[request.request_id]
        wanted = expected(request, end.tokens.tolist())
        assert set(end.outputs) == set(request.outputs)
        for name in request.outputs:
            assert np.array_equal(np.stack(end.outputs[name]), wanted[name]), (request.request_id, name)


# -- over two workers --------------------------------------------------------------------------------------------------


class Link:
    """Carries parcels from one worker to another in memory; messages travel as bytes."""

    def __init__(self) -> None:
        self.parcels: deque[PageParcel] = deque()

    def send(self, parcel: PageParcel) -> None:
        messages = tuple(decode(encode(message)) for message in parcel.messages)
        self.parcels.append(PageParcel(parcel.session, messages, parcel.pages))


class Side:
    """A worker of a disaggregated session in this process, with producers."""

    def __init__(self, role: str, peer: str, way) -> None:
        self.events, self.said, self.link = [], [], Link()
        self.producers = {"indexer_topk": Indexer(), "recurrent_state": RunningText(CONFIG["max_running"])}
        deliveries = DeliverySink()
        sinks = [deliveries, self.events.append]
        engine = Engine(
            EngineConfig(**CONFIG | (way.config or {}), role=role),
            get_algorithm(way.algorithm),
            way.controller(),
            events=lambda event: [sink(event) for sink in sinks],
        )
        options = ExecutorOptions(debug=True, producers=self.producers)
        executor = build_executor(engine, small_model(0), way.draft, OPS, options)
        second = 1_000_000_000
        timing = HandoffTiming(600 * second, 1_300 * second, second)
        self.serving = Serving(1, engine, executor, deliveries, {peer: self.link}, News(self.said.append, 1), timing)
        sinks.append(self.serving.watch)

    def steps(self) -> list:
        return [event.step for event in self.events if isinstance(event, Planned) and event.step is not None]


def serve_apart(prefill: Side, decode: Side, requests: list[Request]) -> tuple[dict, dict, list[Page]]:
    """Return tokens and outputs by request, as the workers told of them, and the pages that travelled."""
    for request in requests:
        prefill.serving.submit(request, "decode")
    pages, sides, busy, turn = [], {"prefill": prefill, "decode": decode}, [True], 0
    while any(busy):
        turn += 1
        busy = [side.serving.turn(lambda: None) for side in sides.values()]
        decode.serving.engine.request_retraction(f"r{turn % 6}", turn)
        for sender, receiver in (("prefill", decode), ("decode", prefill)):
            while sides[sender].link.parcels:
                busy.append(True)
                parcel = sides[sender].link.parcels.popleft()
                pages += [message for message in parcel.messages if isinstance(message, Page)]
                receiver.serving.take(sender, parcel, 0)
    tokens, outputs = {r.request_id: [] for r in requests}, {r.request_id: {} for r in requests}
    for side in sides.values():
        assert side.serving.engine.is_idle and side.serving.side.is_idle
        for request_id, offset, values, shown in (item for said in side.said for item in said["tokens"]):
            assert offset == len(tokens[request_id])
            tokens[request_id] += values
            for name, entries in shown.items():
                outputs[request_id].setdefault(name, []).extend(entries)
    return tokens, outputs, pages


@pytest.mark.fast("tree", ci="EAGLE tree, overlap")
@pytest.mark.parametrize("way", WAYS)
def test_payloads_go_on_at_the_worker_that_takes_the_request_over(way):
    """The first token's payload travels with the request;
    the producers of the decode worker go on from the text that arrived."""
    prefill, decode = (Side(*names, WAYS[way]) for names in (("prefill", "decode"), ("decode", "prefill")))
    requests = ask(temperature=3.0)
    tokens, outputs, pages = serve_apart(prefill, decode, requests)
    joins = [join for step in decode.steps() for join in step.joins]
    assert pages and sum(join.num_received > 0 for join in joins) == len(requests)
    assert count_retractions(decode.events) > 1
    for request in requests:
        found = tokens[request.request_id]
        assert len(found) == request.max_tokens
        wanted = expected(request, found)
        assert set(outputs[request.request_id]) == set(request.outputs)
        for name in request.outputs:
            assert np.array_equal(np.stack(outputs[request.request_id][name]), wanted[name]), (request.request_id, name)


def test_what_no_producer_makes_is_named():
    run = serve(WAYS["chain"], [Request("r", Prompt.of_tokens([1, 2]), 4, outputs=("indexer_topk",))])
    assert "no output 'indexer_topk'" in run.finished["r"].message
