"""What one request does to the others: the longest turn of a server's event loop while it is read.

    python -m benchmarks.timing.serve_delay --write        # and puts the table into docs/serve.md

Serves a small simulated deployment in this process. A process of its own sends each of the requests several times, one
after another. A turn is one call that the event loop makes; no event of another request is sent meanwhile. Turns are
counted in processor time, so what else the machine does matters little.
"""

from __future__ import annotations

import argparse
import asyncio.events
import http.client
import json
import multiprocessing
import random
import threading
import time
from collections.abc import Callable

from foredraft.serve.answers.frontend import Frontend
from foredraft.serve.app import make_app
from foredraft.serve.base.connections import bind
from foredraft.serve.base.limits import Limits
from foredraft.serve.bodies.simulated import SimulatedBody
from foredraft.serve.metrics import ServerMetrics
from foredraft.serve.server import HttpServer
from foredraft.sim.scenario_file import load_scenario

from ..pages import write_block

REPEATS = 5
WORDS = [f"{number:x}" for number in random.Random(1).sample(range(10**6), 20_000)]
REQUESTS: dict[str, Callable[[], dict]] = {
    "a prompt of 8 kB, tokenized in the event loop": lambda: {"prompt": " ".join(WORDS[:1200]), "max_tokens": 1},
    "a prompt of 8 MB": lambda: {"prompt": " ".join(random.Random(2).choices(WORDS, k=1_400_000))},
    "a prompt of 100 kB, which is served": lambda: {"prompt": " ".join(WORDS[:16_000]), "max_tokens": 1},
    "1.5 million prompts of one letter": lambda: {"prompt": ["x"] * 1_500_000},
    "2.5 million token ids": lambda: {"prompt": [7] * 2_500_000},
    "150,000 messages": lambda: {"messages": [{"role": "user", "content": "x"}] * 150_000},
    "500,000 unknown parameters": lambda: {f"k{number}": 0 for number in range(500_000)},
    "8 MB to `/tokenize`": lambda: {"tokenize": " ".join(random.Random(2).choices(WORDS, k=1_400_000))},
    "an answer of 16 times 500 tokens with log-probabilities": lambda: {
        "prompt": "x",
        "n": 16,
        "max_tokens": 500,
        "ignore_eos": True,
        "logprobs": 5,
    },
}


def send(port: int, name: str) -> None:
    """Send one of the requests REPEATS times."""
    asked = REQUESTS[name]()
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    if "tokenize" in asked:
        path, asked = "/tokenize", {"prompt": asked["tokenize"]}
    data = json.dumps(asked).encode()
    for _ in range(REPEATS):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        connection.getresponse().read()
        connection.close()


class Turns:
    """The turns of event loops in this process, from the creation of this object on: their processor times, in ms."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.events.Handle) -> None:
            begin = time.thread_time()
            run(handle)
            self.ms.append((time.thread_time() - begin) * 1e3)

        asyncio.events.Handle._run = timed  # type: ignore[method-assign]  # what an event loop calls for each turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/serve.md")
    asked = parser.parse_args()
    scenario, _ = load_scenario(None, ["engine.max_running=64", "engine.kv_slots=200000"])
    frontend = Frontend(SimulatedBody(scenario, speed=20.0), Limits(), ServerMetrics())
    app = make_app(frontend)
    app.state.reader.start()
    server = HttpServer(app, frontend, listeners=[bind("127.0.0.1", 0)], drain_s=5)
    turns = Turns()
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.address:
        time.sleep(0.01)
    port, rows, spawn = int(server.address.rpartition(":")[2]), {}, multiprocessing.get_context("spawn")
    for name in REQUESTS:
        turns.ms = []
        client = spawn.Process(target=send, args=(port, name))
        client.start()
        client.join()
        assert client.exitcode == 0, name
        rows[name] = max(turns.ms)
    server.should_exit = True
    thread.join()
    table = [f"| {name} | {most:.1f} |" for name, most in rows.items()]
    table = ["| request | longest turn of the event loop, ms of processor time |", "| --- | --- |", *table]
    print(*table, sep="\n")
    if asked.write:
        write_block("serve.md", "delays", table)


if __name__ == "__main__":
    main()
