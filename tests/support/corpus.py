"""The corpus: services whose event logs must stay what they are, byte for byte, while the code behind them is
rewritten.

    python tests/support/corpus.py            compare every service with its stored digest
    python tests/support/corpus.py --write    store new digests, after a change of behaviour that is meant

The services cover all algorithms, both modes, page sizes, blocks, preemption, mixed steps, prefix caches, faults, and
prefill and decode apart (`service_under_faults.py` draws them). A digest is the SHA-256 of `events.jsonl` without its
header line.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

from foredraft.observe.log import EventLog
from foredraft.sim.faults.plan import swarm_plan
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict
from service_under_faults import disaggregated_service, service

os.environ["FOREDRAFT_KERNELS"] = "roofline"  # as in `tests/conftest.py`: installed measurements decide nothing here

STORED = Path(__file__).with_name("corpus.json")
NUM_SERVICES = 48
NUM_DISAGGREGATED = 24
BUILT_IN = (
    {"algorithm": "MULTI_LAYER_EAGLE", "policy": "fixed", "steps": 3},
    {"algorithm": "EAGLE3", "policy": "goodput"},
    {"algorithm": "EAGLE3", "policy": "ema", "topk": 4},
    {"algorithm": "NGRAM", "policy": "fixed", "steps": 6},
)


def names() -> list[str]:
    """The names of all services of the corpus: what is served, its seed, whether faults are injected."""
    found = []
    for kind, count in (("service", NUM_SERVICES), ("disaggregated", NUM_DISAGGREGATED), ("builtin", len(BUILT_IN))):
        found += [f"{kind}-{seed}" for seed in range(count)]
        found += [f"{kind}-{seed}-faults" for seed in range(0, count, 2)]
    return found


def events_of(name: str, directory: Path) -> bytes:
    """Run a service of the corpus; returns its events, one JSON line each, without the log's header."""
    kind, seed, *faults = name.split("-")
    number = int(seed)
    plan = swarm_plan(number, transfers=kind == "disaggregated") if faults else None
    scenario = disaggregated_service(number) if kind == "disaggregated" else service(number)
    if kind == "builtin":
        scenario = scenario | {"speculation": BUILT_IN[number]}
    path = directory / f"{name}.jsonl"
    with EventLog(path, {}) as log:
        Simulation(scenario_from_dict(scenario, name), sinks=lambda replica: [log.sink(replica)], faults=plan).run()
        log.close(True)
    return path.read_bytes().partition(b"\n")[2]


def digest_of(name: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        return hashlib.sha256(events_of(name, Path(directory))).hexdigest()


def stored() -> dict[str, str]:
    return json.loads(STORED.read_text(encoding="utf-8"))


if __name__ == "__main__":
    if "--write" in sys.argv:
        STORED.write_text(json.dumps({name: digest_of(name) for name in names()}, indent=0) + "\n", encoding="utf-8")
    else:
        differing = [name for name, digest in stored().items() if digest_of(name) != digest]
        print(f"{len(names()) - len(differing)} of {len(names())} as stored", *differing, sep="\n")
        sys.exit(bool(differing))
