"""The second opinion on a simulated run agrees with it: every algorithm, pools, cancels, replicas."""

import pytest
from foredraft.observe.encoding import LineEncoder
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.properties.simulator.books import Books
from foredraft.properties.simulator.ledger import SimulatorLedger
from foredraft.sim.running.run import Simulation
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
    summary = summarize_run(scenario, report, metrics)
    busy_ns = dict.fromkeys(ledger.moments, (0, report.duration_ns))
    books = Books(ledger, summary, busy_ns, is_plain=not pools, has_faults=False)
    assert list(books.wrong()) == [] and len(ledger.completed) > 5
    assert {life.end for life in ledger.lives.values()} >= {"stop", "abort"}
