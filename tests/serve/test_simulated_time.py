"""A simulated server answers at the times that `foredraft simulate` predicts:
the same requests at the same times bring the same events."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from foredraft import simulate
from foredraft.core.contract.events import Committed, Planned, Submitted
from foredraft.core.contract.request import GREEDY
from foredraft.core.prompt import Prompt
from foredraft.observe.encoding import LineEncoder
from foredraft.serve.base.limits import Limits
from foredraft.serve.base.port import Order, Piece
from foredraft.serve.bodies.filler import FillerTokenizer
from foredraft.serve.bodies.simulated import SimulatedBody
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import load_scenario
from foredraft.sim.workload.workload import SyntheticWorkload, TimedRequest
from http_server import Served, serving, simulated_body, sum_of_times
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/chat_on_h100.toml"
DISAGGREGATED = ("disaggregation.prefill=1", "disaggregation.decode=1")
SERVICES = [
    (),
    ("hardware.replicas=2", "router.policy='prefix_aware'"),
    DISAGGREGATED,
    ("speculation.topk=2", "engine.preempt=true"),
]


class _Clock:
    """A clock that stands still unless it is moved, in seconds."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Outlet:
    """Keeps the pieces that were told at their time.
    `num_ahead`: how many were prepared before; `begun`: requests whose first was."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.num_ahead = 0
        self.begun: set[str] = set()
        self._held: list[Piece] = []

    def deliver(self, pieces: list[Piece]) -> None:
        self.pieces += pieces

    def prepare(self, pieces: list[Piece]) -> None:
        assert len({piece.at_ns for piece in pieces}) == 1
        self._held += pieces
        self.num_ahead += len(pieces)
        told = {piece.request_id for piece in self.pieces}
        self.begun |= {piece.request_id for piece in pieces} - told

    def release(self, now_ns: int) -> None:
        self.pieces += [piece for piece in self._held if piece.at_ns <= now_ns]
        self._held = [piece for piece in self._held if piece.at_ns > now_ns]


class _Given:
    """Given arrivals instead of those of a workload."""

    def __init__(self, like: SyntheticWorkload, arrivals: list[TimedRequest]) -> None:
        self.prompt_len, self.output_len, self.arrivals = like.prompt_len, like.output_len, arrivals

    def __iter__(self):
        return iter(self.arrivals)


def _lines(events: dict[int, list]) -> dict[int, list[str]]:
    """Return the events of each engine as a log has them, without its configuration."""
    return {number: [LineEncoder(number).encode(event) for event in of[1:]] for number, of in events.items()}


@pytest.mark.fast("one", "trees", ci="*")
@pytest.mark.parametrize("keys", SERVICES, ids=["one", "replicas", "disaggregated", "trees"])
def test_a_clients_arrivals_bring_the_events_of_a_simulation(keys: tuple[str, ...]):
    served_events: dict[int, list] = {}
    clock = _Clock()
    body = simulated_body(*keys, speed=1.0, clock=clock, sinks=lambda i: [served_events.setdefault(i, []).append])
    body.caches_answers = False  # a simulation knows no words
    times_ns = np.cumsum(np.random.default_rng(7).integers(1, 60_000_000, 40)).tolist()
    prompts = [np.arange(number % 5 * 100, number % 5 * 100 + 150 + number) for number in range(40)]
    orders = [Order(i, prompt, 60, 0.0, GREEDY, priority=i % 7 == 0) for i, prompt in enumerate(prompts)]
    arrivals, outlet = _serve(body, clock, times_ns, orders)

    predicted: dict[int, list] = {}
    scenario = body.simulation.scenario
    workload = scenario.workload.model_copy(update={"max_tokens": 60})
    simulation = Simulation(
        scenario.model_copy(update={"workload": workload}), sinks=lambda i: [predicted.setdefault(i, []).append]
    )
    simulation.workload = _Given(
        simulation.workload,
        [
            TimedRequest(at_ns, _prompt_of(served_events, order), 40, None, order.priority, order.number)
            for at_ns, order in arrivals
        ],
    )
    simulation.run()
    assert _lines(served_events) == _lines(predicted)
    assert sum(piece.finished is not None for piece in outlet.pieces) == 40
    assert sum(len(piece.tokens) for piece in outlet.pieces) == 40 * 40
    assert [piece.at_ns for piece in outlet.pieces] == sorted(piece.at_ns for piece in outlet.pieces)
    assert outlet.num_ahead > 0.8 * len(outlet.pieces) and len(outlet.begun) > 30
    assert sum(isinstance(event, Planned | Committed) for of in served_events.values() for event in of) > 100


def _serve(
    body: SimulatedBody, clock: _Clock, times_ns: list[int], orders: list[Order]
) -> tuple[list[tuple[int, Order]], _Outlet]:
    """Play clients that send their orders at these times; return when each came, and what they got."""
    arrivals, outlet = [], _Outlet()
    for at_ns, order in zip(times_ns, orders, strict=True):
        while (wait_s := body.wait_s()) is not None and clock.now_s + wait_s < at_ns / 1e9:
            clock.now_s += wait_s + 1e-6
            body.turn(outlet)
        clock.now_s = max(clock.now_s, at_ns / 1e9)
        body.submit(replace(order, at_s=clock.now_s))
        arrivals.append((body.at_ns(clock.now_s), order))
    while (wait_s := body.wait_s()) is not None:
        clock.now_s += wait_s
        body.turn(outlet)
        clock.now_s += 1e-6
    return arrivals, outlet


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "num_requests"), [(3.0, 100), (25.0, 500), (40.0, 500)], ids=["light", "knee", "over"]
)
def test_clients_measure_the_times_of_a_simulation(rate: float, num_requests: int):
    """The first and the last token of each client come when `simulate` has them for the same arrivals. `python -m
    benchmarks.timing.serve_times` compares these loads in real time, over HTTP."""
    keys = ("hardware.kernels=roofline", f"workload.rate={rate}", f"workload.num_requests={num_requests}")
    scenario, _ = load_scenario(EXAMPLE, keys)
    clock = _Clock()
    body = SimulatedBody(scenario, clock=clock)
    asked = list(Simulation(scenario).workload)
    orders = [
        Order(one.row, np.r_[one.row + 1, np.ones(one.prompt.length - 1, int)], one.output_len, 0.0, GREEDY, (), True)
        for one in asked
    ]
    arrivals, outlet = _serve(body, clock, [one.time_ns for one in asked], orders)
    times: dict[str, list[int]] = {}
    for piece in outlet.pieces:
        times.setdefault(piece.request_id, []).append(piece.at_ns)
    seen = [(at_ns, times[order.request_id][0], times[order.request_id][-1]) for at_ns, order in arrivals]

    predicted = simulate(scenario).requests.sort_by("arrival_ns")
    came_ns, first_ns, finish_ns = (predicted[f"{name}_ns"].to_numpy() for name in ("arrival", "first_token", "finish"))
    assert len(predicted) == num_requests
    apart = np.array(seen).T - (came_ns, first_ns, finish_ns)
    assert np.abs(apart[1:]).max() <= 2000, "the clock goes in steps of a microsecond"
    assert (apart[0] > -200_000).all() and (apart[0] <= 2000).all(), "the simulator counts from behind the front end"


def _prompt_of(events: dict[int, list], order: Order) -> Prompt:
    return next(
        event.request.prompt
        for of in events.values()
        for event in of
        if isinstance(event, Submitted) and event.request.request_id == order.request_id
    )


def test_latencies_of_a_client_are_the_simulated_ones(simulated: Served):
    """In real time, ten times as fast: not before the simulated time, and what HTTP adds is small beside a minute."""
    before = sum_of_times(simulated.frontend.metrics)
    answer = simulated.post("/v1/completions", prompt="x" * 400, max_tokens=200, ignore_eos=True)
    simulated.wait_until_idle()
    predicted_s = (sum_of_times(simulated.frontend.metrics) - before) / 10
    assert predicted_s <= answer.elapsed.total_seconds() < predicted_s + 30


def test_a_queue_that_is_full_is_429():
    keys = ("engine.max_queue=1", "engine.max_running=1", "hardware.graph_sizes=[1]")

    async def three(served: Served) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60, verify=False) as client:
            asked = {"prompt": "x", "max_tokens": 30}
            first = asyncio.create_task(client.post("/v1/completions", json=asked))
            engine = served.frontend.body.engines[0]
            while not engine.requests.running:
                await asyncio.sleep(0.001)
            others = [asyncio.create_task(client.post("/v1/completions", json=asked)) for _ in range(3)]
            return [await task for task in (first, *others)]

    with serving(simulated_body(*keys, speed=0.1)) as served:
        answers = asyncio.run(three(served))
        served.wait_until_idle()
        metrics = served.frontend.metrics
        assert (metrics.num_queue_full, metrics.ended["error"], metrics.ended["length"]) == (2, 0, 2)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
    assert {answer.headers.get("Retry-After") for answer in answers} == {None, "1"}


def test_a_stream_that_waits_has_comments():
    """A client in the queue hears of the server before its first token, and gets its whole answer."""
    keys = ("engine.max_running=1", "hardware.graph_sizes=[1]")
    with serving(simulated_body(*keys, speed=0.1), Limits(quiet_s=0.1)) as served:
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "stream": True, "ignore_eos": True}

        async def two() -> list[str]:
            async with httpx.AsyncClient(base_url=served.url, timeout=60, verify=False) as client:
                posts = [client.post("/v1/chat/completions", json=asked) for _ in range(2)]
                return [answer.text for answer in await asyncio.gather(*posts)]

        texts = asyncio.run(two())
        served.wait_until_idle()
    for text in texts:
        parts = [part for part in text.split("\n\n") if part and part != ": waiting"]
        roles = ['"role":"assistant"' in part for part in parts]
        assert roles == [True] + [False] * (len(parts) - 1) and parts[-1] == "data: [DONE]"
        assert (
            sum(len(json.loads(part[6:])["choices"][0]["delta"].get("content", "").split()) for part in parts[:-1])
            == 20
        )
    first_events = [text.index('"role"') for text in texts]
    assert max(text[:first].count(": waiting") for text, first in zip(texts, first_events, strict=True)) >= 2


@settings(max_examples=25)
@given(st.text(max_size=200))
def test_filler_tokens_give_their_text_back(text: str):
    codec = FillerTokenizer()
    tokens = codec.encode(text)
    assert codec.decode(tokens) == text and len(tokens) <= len(text.encode())
    assert not len(tokens) or 0 < tokens.min() <= tokens.max() < 2**31
