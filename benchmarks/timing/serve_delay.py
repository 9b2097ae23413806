"""What one request does to the others: the longest delay of an event beside a request that takes long to read.

    python -m benchmarks.timing.serve_delay --write        # and puts the table into docs/serve.md

Holds streams on `foredraft serve --simulate --stamp` and sends each of the requests several times, one after another.
The delay of an event is the time from the end of its simulated round until the system has its text for this process.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
from collections.abc import Callable

import numpy as np

from ..pages import write_block
from .serve_load import LARGE, RAMP_S, ROOT, Seen, load, started

REPEATS = 3
PAUSE_S = 0.4
WORDS = [f"{number:x}" for number in random.Random(1).sample(range(10**6), 20_000)]
REQUESTS: dict[str, Callable[[], dict]] = {
    "a prompt of 8 MB": lambda: {"prompt": " ".join(random.Random(2).choices(WORDS, k=1_400_000))},
    "a prompt of 400 kB": lambda: {"prompt": " ".join(random.Random(3).choices(WORDS, k=68_000)), "max_tokens": 1},
    "1.5 million prompts of one letter": lambda: {"prompt": ["x"] * 1_500_000},
    "a prompt of 2.5 million token ids": lambda: {"prompt": [7] * 2_500_000},
    "a list of 150,000 messages": lambda: {"messages": [{"role": "user", "content": "x"}] * 150_000},
    "500,000 unknown parameters": lambda: {f"k{number}": 0 for number in range(500_000)},
    "a text of 100 kB to be cut into tokens": lambda: {"tokenize": " ".join(WORDS[:16_000])},
}


def send(port: int, asked: dict) -> tuple[float, float]:
    """Send a request REPEATS times; return when that began and ended, in ns of Unix time."""
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    if "tokenize" in asked:
        path, asked = "/tokenize", {"prompt": asked["tokenize"]}
    data, begin = json.dumps(asked).encode(), time.time_ns()
    for _ in range(REPEATS):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        connection.getresponse().read()
        connection.close()
        time.sleep(PAUSE_S)
    return begin, time.time_ns()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--write", action="store_true", help="put the table into docs/serve.md")
    asked = parser.parse_args()
    bodies = {name: make() for name, make in REQUESTS.items()}
    spans: dict[str, tuple[float, float]] = {}
    with started(str(ROOT / "examples/chat_on_h100.toml"), LARGE) as (server, address):
        port = int(address.rpartition(":")[2])

        def abuse() -> None:
            time.sleep(RAMP_S + 1)
            begin = time.time_ns()
            time.sleep(REPEATS * PAUSE_S)
            spans["none"] = begin, time.time_ns()
            for name, body in bodies.items():
                spans[name] = send(port, body)

        abuser = threading.Thread(target=abuse)
        abuser.start()
        seen, _ = load(port, server.pid, asked.streams, 75.0)
        abuser.join()
    rows = {name: longest(seen, *span) for name, span in spans.items()}
    table = [f"| {name} | {p50:.1f} | {most:.1f} |" for name, (p50, most) in rows.items()]
    table = ["| requests beside the streams | median delay of an event, ms | longest |", "| --- | --- | --- |", *table]
    print(*table, sep="\n")
    if asked.write:
        write_block("serve.md", "delays", table)


def longest(seen: Seen, begin_ns: float, end_ns: float) -> tuple[float, float]:
    """Return the median and the longest delay, in ms, of events whose round ended in a span."""
    delays = seen.delays_ms(int(begin_ns), int(end_ns))
    return float(np.median(delays)), float(delays.max())


if __name__ == "__main__":
    main()
