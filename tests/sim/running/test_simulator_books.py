"""The second opinion on a simulated run agrees with it: every algorithm and machine, pools, cancels, replicas."""

from itertools import product

import pytest
from foredraft.checks.adapters.simulator import machine_of
from foredraft.observe.encoding import LineEncoder
from foredraft.observe.metrics import RunMetrics
from foredraft.properties.simulator.books import Books
from foredraft.properties.simulator.ledger import SimulatorLedger
from foredraft.properties.simulator.roofline import Clockwork, Decode, Roofline
from foredraft.sim.assembly import assemble
from foredraft.sim.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict
from foredraft.sim.summary.summary import summarize_run

SPECULATION = {
    "none": {"algorithm": "NONE", "policy": "fixed", "steps": 0},
    "chain": {"algorithm": "EAGLE3", "policy": "fixed", "steps": 3},
    "tree": {"algorithm": "EAGLE", "policy": "fixed", "steps": 3, "topk": 4, "num_draft_tokens": 8},
    "heads": {"algorithm": "MULTI_LAYER_EAGLE", "policy": "fixed", "steps": 3},
    "lookup": {"algorithm": "NGRAM", "policy": "fixed", "steps": 4},
    "model": {"algorithm": "STANDALONE", "policy": "fixed", "steps": 2},
}
HARDWARE = {
    "graphs": {"gpu": "H100"},
    "eager": {"gpu": "A100", "cuda_graphs": False},
    "by tokens": {"gpu": "H200", "graph_unit": "tokens", "graph_sizes": [3, 10, 90, 500]},
    "piecewise": {"gpu": "B200", "launch": "piecewise", "tensor_parallel": 4},
}
MODELS = {
    "dense": {"target": "llama-3.1-8b"},
    "sparse": {"target": "qwen3-30b-a3b"},
    "8-bit": {"target": "llama-3.1-70b", "weight_dtype": "fp8", "kv_dtype": "fp8"},
}
WORK = [
    *[((), (batch, kv)) for batch, kv in ((1, 40), (3, 4000), (30, 90_000), (200, 1000))],
    (((32, 0),), None),
    (((700, 64), (1, 0)), (7, 900)),
]


@pytest.mark.parametrize(
    ("hardware", "model", "way"),
    [way for way in product(HARDWARE, MODELS, SPECULATION) if way[1:] != ("sparse", "model")],  # of another vocabulary
)
def test_the_roofline_is_that_of_the_cost_model(hardware, model, way):
    tables = {"hardware": HARDWARE[hardware], "model": MODELS[model], "speculation": SPECULATION[way]}
    assembly = assemble(scenario_from_dict({**tables, "engine": {"kv_slots": 100_000}}, "test"))
    roofline, steps = Roofline(machine_of(assembly)), assembly.spec.max_steps
    nodes = SPECULATION[way].get("num_draft_tokens", steps + 1)
    for chunks, decode in WORK:
        work = (
            None if decode is None else Decode(decode[0], steps, assembly.spec.topk if steps else 1, nodes, decode[1])
        )
        took_ns = assembly.cost.step_ns(chunks, work)
        assert roofline.step_ns(chunks, work) == pytest.approx(took_ns, abs=3), (chunks, work)
        assert took_ns > roofline.target.least_ns


@pytest.mark.fast(
    "[nhm]*-whole-overlap", "[nhm]*-pools-sync*", "[ctl]*-whole-sync*", "[ctl]*-pools-overlap"
)  # every pair of choices
@pytest.mark.parametrize("mode", ["overlap", "synchronous"])
@pytest.mark.parametrize("pools", [{}, {"prefill": 1, "decode": 2, "bandwidth_gbps": 1.0}], ids=["whole", "pools"])
@pytest.mark.parametrize("way", SPECULATION)
def test_the_books_are_those_of_the_run(mode, pools, way):
    tables = {
        "seed": 3,
        "model": {"context_len": 2048},
        "hardware": {} if pools else {"replicas": 2},
        "engine": {"mode": mode, "page_size": 4, "kv_slots": 1024, "chunk_size": 32, "max_running": 4},
        "speculation": SPECULATION[way],
        "workload": {
            "num_requests": 20,
            "rate": 40.0,
            "prompt": {"values": [5, 40, 90]},
            "output": {"values": [1, 7, 60]},
        },
        "clients": {"cancel_share": 0.2, "cancel_mean_s": 0.2},
        "disaggregation": pools,
    }
    scenario, metrics, lines = scenario_from_dict(tables, "test"), RunMetrics(), []

    def sinks(replica):
        encode = LineEncoder(replica).encode
        return [metrics.sink(replica), lambda event: lines.append(encode(event))]

    simulation = Simulation(scenario, sinks=sinks)
    report = simulation.run()
    ledger = SimulatorLedger(lines)
    clockwork = Clockwork(ledger, Roofline(machine_of(simulation.assembly)))
    assert clockwork.late is None and clockwork.too_fast is None
    summary = summarize_run(scenario, report, metrics)
    busy_ns = {replica: (ns, ns) for replica, ns in clockwork.busy_ns.items()}
    books = Books(ledger, summary, busy_ns, is_plain=not pools, has_faults=False)
    assert list(books.wrong()) == [] and len(ledger.completed) > 5
    assert {life.end for life in ledger.lives.values()} >= {"stop", "abort"}
