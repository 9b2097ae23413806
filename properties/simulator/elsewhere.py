"""The same services in another process, whose strings have other hashes (SIM-01)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from hashlib import sha256
from typing import Any

from .contract import Service, SimulatorConfig

HASH_SEED = "4711"

CASES: tuple[tuple[SimulatorConfig, Service], ...] = (
    (SimulatorConfig(), Service(3, 24, "even", 10**6, (5,), (4, 9), replicas=3)),
    (SimulatorConfig(4, 3, True), Service(5, 24, "poisson", 10**6, (3, 17), (2, 20), replicas=2)),
    (SimulatorConfig(1, 1), Service(7, 16, "even", 10**6, (9,), (12,), pages=60, max_running=8)),
)
"""Small services in which much happens at one time."""

PROGRAM = """
import sys
sys.path[:] = eval(sys.argv[3])
from foredraft.properties.simulator.elsewhere import digests_of, find
print(" ".join(digests_of(find(sys.argv[1], sys.argv[2]))))
"""


def digest(answer: Any) -> str:
    """Return a hash of everything in an answer but its books."""
    if answer is None:
        return "refused"
    plain = {key: answer[key] for key in ("events", "times_ns", "arrivals", "requests", "summary")}
    return sha256(json.dumps(plain, default=str).encode()).hexdigest()


def digests_of(make: Any) -> list[str]:
    return [digest(make(config).run(service)) for config, service in CASES]


def find(module: str, name: str) -> Any:
    """Return what a module calls by this name."""
    return getattr(__import__(module, fromlist=[name]), name)


def is_importable(kind: type) -> bool:
    """Return whether another process can make the simulator by its name."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ != "__main__" and getattr(module, kind.__qualname__, None) is kind


@cache
def digests_elsewhere(kind: type) -> tuple[str, ...]:
    """Return the digests that another process has, which is started once per kind. Raises RuntimeError if it fails."""
    command = [sys.executable, "-P", "-c", PROGRAM, kind.__module__, kind.__qualname__, repr(sys.path)]
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=50)
    if done.returncode:
        raise RuntimeError(f"in another process: {done.stderr.strip().splitlines()[-1:]}")
    return tuple(done.stdout.split())
