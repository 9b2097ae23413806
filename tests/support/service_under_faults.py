"""Ten minutes of a small simulated service whose shape follows from a seed, under faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from foredraft.core.draws import Purpose, uniform
from foredraft.observe.log import EventLog
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.sim.assembly import assemble
from foredraft.sim.faults.plan import KINDS, FaultPlan, fault_plan, swarm_plan
from foredraft.sim.faults.promises import PROMISES
from foredraft.sim.faults.service import FaultReport
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict

SPECULATION = (
    {"algorithm": "NONE"},
    {"algorithm": "EAGLE3", "policy": "ema"},
    {"algorithm": "EAGLE3", "policy": "ema", "adaptive": "with-zero"},
    {"algorithm": "STANDALONE", "policy": "fixed", "steps": 3},
    {"algorithm": "EAGLE", "policy": "fixed", "steps": 3, "topk": 4, "num_draft_tokens": 8},
    {"algorithm": "NGRAM", "policy": "fixed", "steps": 4},
    {"algorithm": "EAGLE3", "policy": "goodput", "adaptive": "with-zero"},
)


def service(seed: int) -> dict:
    """A scenario with features drawn from `seed`: sizes near their limits, bursts of arrivals, some shared prefixes."""

    def draw(number: int, *choices):
        return choices[int(float(uniform(seed, Purpose.SWARM, 1000 + number, 0)) * len(choices))]

    return {
        "seed": seed,
        "model": {"context_len": 2048},
        "hardware": {"replicas": draw(0, 1, 1, 1, 2)},
        "speculation": draw(1, *SPECULATION),
        "engine": {
            "mode": draw(2, "overlap", "overlap", "synchronous"),
            "page_size": draw(3, 1, 1, 16),
            "kv_slots": draw(4, 2400, 4800, 9600),
            "max_running": draw(5, 3, 8, 24),
            "max_queue": draw(6, None, 6, 20),
            "chunk_size": draw(7, 64, 512, 2048),
            "mixed": draw(8, True, True, False),
            "prefix_cache": draw(9, True, False),
            "multi_step_rounds": draw(10, 1, 32, 32),
            "preempt": draw(11, False, True),
        },
        "workload": {
            "rate": 0.1,
            "stop_s": 600.0,
            "arrivals": "gamma",
            "burstiness": 3.0,
            "urgent_share": draw(12, 0.0, 0.3),
            "prompt": {"mean": 200.0, "high": 1400},
            "output": {"mean": 40.0, "high": 400},
            "prefixes": draw(13, None, {"groups": 3, "length": 100}),
        },
    }


def disaggregated_service(seed: int) -> dict:
    """The same service on engines of two roles, with pools, routers and a network drawn from `seed`."""

    def draw(number: int, *choices):
        return choices[int(float(uniform(seed, Purpose.SWARM, 2000 + number, 0)) * len(choices))]

    base = service(seed)
    engine = base["engine"] | {"page_size": draw(0, 1, 4, 16), "kv_slots": draw(1, 3200, 4800, 9600)}
    policies = ("round_robin", "least_loaded", "prefix_aware", "random")
    pools = {
        "prefill": draw(2, 1, 1, 2, 3),
        "decode": draw(3, 1, 2, 2),
        "prefill_policy": draw(4, *policies),
        "decode_policy": draw(5, *policies),
        "bandwidth_gbps": draw(6, 0.5, 10.0, 400.0),
        "layerwise": draw(7, True, False),
        "latency_us": draw(8, 0.0, 10.0, 20_000.0),
    }
    return base | {"hardware": {"replicas": 1}, "engine": engine, "disaggregation": pools}


def serve(scenario: dict, plan: FaultPlan | None, **options) -> tuple[Simulation, FaultReport | None]:
    simulation = Simulation(scenario_from_dict(scenario, "test"), faults=plan, **options)
    return simulation, simulation.run().faults


def serve_swarm(seed: int) -> FaultReport:
    """One seed of the soak; everything must be kept."""
    return _kept(seed, service(seed), swarm_plan(seed))


def serve_disaggregated_swarm(seed: int) -> FaultReport:
    """The same with prefill and decode engines, and faults between them."""
    metrics = RunMetrics()
    sinks = lambda replica: [metrics.sink(replica)]  # noqa: E731
    report = _kept(seed, disaggregated_service(seed), swarm_plan(seed, transfers=True), sinks=sinks)
    counts, summary = metrics.measured.counts, metrics.summary()
    ended = sum(counts.values()) - counts["transferred"]
    books = (summary["submitted"], summary["unfinished"], metrics.lives.running)
    assert books == (ended, 0, 0), f"seed {seed}: {books}, {counts}"
    return report


def _kept(seed: int, scenario: dict, plan: FaultPlan, **options) -> FaultReport:
    simulation, report = serve(scenario, plan, **options)
    assert report.kept, f"seed {seed}:\n" + "\n".join(map(str, report.broken))
    loads = [(key, b.outstanding, b.waiting_tokens) for key, b in simulation.router.balancers.items()]
    assert not any(sum(map(abs, load)) for _, *both in loads for load in both), f"seed {seed}: {loads}"
    return report


def faults_of(serve_seed: Callable[[int], FaultReport], seeds: Iterable[int]) -> Counter[str]:
    """How many faults of each kind were injected over all seeds."""
    return sum((Counter(serve_seed(seed).injected) for seed in seeds), Counter())


def only(kind: str, probability: float, **settings) -> FaultPlan:
    """The plan of one kind."""
    family, _, key = kind.partition(".")
    return fault_plan({family: {key: {"probability": probability, **settings}}})


def everything(probability: float) -> dict[str, dict[str, dict[str, float]]]:
    """The tables of a plan with every kind."""
    tables: dict = {}
    for kind in KINDS:
        family, _, key = kind.partition(".")
        tables.setdefault(family, {})[key] = {"probability": probability}
    return tables


def logged(scenario: dict, plan: FaultPlan | None, path: Path) -> bytes:
    """The log of a run, which stays at `path`."""
    with EventLog(path, {"scenario": scenario_from_dict(scenario, "test").model_dump(mode="json")}) as log:
        serve(scenario, plan, sinks=lambda replica: [log.sink(replica)])
    return path.read_bytes()


def engine_of_log(header: dict, replica: int, events):
    """A fresh engine of the scenario in a log's header."""
    return assemble(scenario_from_dict(header["scenario"], "log")).make_engine(events, replica)


def check_sabotage_is_reported(scenario: dict, plan: FaultPlan, promise: str, sabotage: Callable[[], None]) -> None:
    """Check that the promise, which is kept under every kind of fault, is reported as broken after the sabotage."""
    sabotage()
    _, report = serve(scenario, plan)
    assert promise in [broken.promise for broken in report.broken], report.broken
    assert PROMISES[promise] in str(next(broken for broken in report.broken if broken.promise == promise))
