"""Load on a simulated server: streams that are held for a minute, and what the server adds to the simulated times.

    python -m benchmarks.timing.serve_load --streams 256 --seconds 60
    python -m benchmarks.timing.serve_load --scenario examples/chat_on_h100.toml --set hardware.gpu=A100
    python -m benchmarks.timing.serve_load --write        # and puts the table into docs/serve.md

Starts `foredraft serve --simulate --stamp` and keeps so many streams open, each the next request of a client whose last
one has ended. Prints the table of docs/serve.md: requests that were lost (a stream without its end, or with another
number of tokens than it asked for), tokens per second, the time from a simulated round's end (the stamp of an event)
until the system has its text for this process, and the memory of the server. Server and client have a core each, where
the system lets them. Exit code 1 if a request was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..pages import write_block

ROOT = Path(__file__).resolve().parents[2]
LARGE = ("model.target='llama-3.1-70b'", "hardware.tensor_parallel=4")
"""Some thousand tokens per second for 256 streams."""
RAMP_S = 5.0
"""Over which streams begin, one by one; delays are counted from its end on."""
READ_EVERY_S = 0.004
"""Clients that slept until the next event would be woken by each, at the cost of the server."""
SO_TIMESTAMPNS = 35
"""Of Linux: `recvmsg` tells when the newest of its data came, as two int64, seconds and nanoseconds of Unix time."""
TIMESTAMP = struct.Struct("qq")
LAST_CHUNK = b"0\r\n\r\n"
STAMP = re.compile(rb"\n: (\d+)\n")


@dataclass
class LoadStream:
    """One connection, and what has come of the answer to its newest request: when it was there, and what."""

    socket: socket.socket
    dice: random.Random
    begins: float
    asked: int = 0
    parts: list[tuple[int, bytes]] = field(default_factory=list)

    def ask(self) -> None:
        """Send the next request."""
        asked = self.dice.randrange(50, 250)
        self.send(self.dice.random().hex() + " word" * self.dice.randrange(20, 200), asked)

    def send(self, prompt: str | list[int], num_tokens: int) -> None:
        """Send a request for so many tokens."""
        self.asked, self.parts = num_tokens, []
        body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def take(self) -> bytes:
        """Read what is there, at least a byte but at the end, and note when it came."""
        data, extra, _, _ = self.socket.recvmsg(1 << 14, socket.CMSG_SPACE(TIMESTAMP.size))
        for _, _, stamp in extra:
            seconds, ns = TIMESTAMP.unpack(stamp)
            self.parts.append((seconds * 10**9 + ns, data))
        return data


@dataclass
class Seen:
    """What the clients have seen: answers as they came, with the number of tokens that was asked for."""

    answers: list[tuple[int, list[tuple[int, bytes]]]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # of the server in bytes, every second

    def counts(self) -> tuple[int, int, int]:
        """Return requests that got all their tokens, those that did not, and tokens."""
        got = [num_received(parts) for _, parts in self.answers]
        whole = sum(count == asked for count, (asked, _) in zip(got, self.answers, strict=True))
        return whole, len(got) - whole, sum(got)

    def delays_ms(self, since_ns: int) -> np.ndarray:
        """Return how long after its stamp each event was there, float64 [events], of those that were
        stamped since then."""
        found = [
            (at_ns, int(stamp)) for _, parts in self.answers for at_ns, data in parts for stamp in STAMP.findall(data)
        ]
        at_ns, stamps = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return (at_ns - stamps)[stamps >= since_ns] / 1e6


def connect(port: int) -> socket.socket:
    """Return a connection whose data has times."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    return connection


def num_received(parts: list[tuple[int, bytes]]) -> int:
    """Return the tokens of an answer that came, as its usage has them; 0 without its end."""
    end = b"".join(data for _, data in parts[-3:])
    if b"data: [DONE]\n\n" not in end:
        return 0
    return int(end.rpartition(b'"completion_tokens":')[2].partition(b",")[0] or 0)


def load(port: int, pid: int, num_streams: int, seconds: float) -> tuple[Seen, int]:
    """Hold streams; return what came, and when the ramp was over, in nanoseconds of Unix time."""
    seen, begin, begin_ns = Seen(), time.monotonic(), time.time_ns()
    until, poll, streams, waiting = begin + RAMP_S + seconds, select.epoll(), {}, []
    for number in range(num_streams):
        dice = random.Random(number)
        waiting.append(LoadStream(connect(port), dice, begin + dice.random() * RAMP_S))
    waiting.sort(key=lambda stream: -stream.begins)
    while streams or waiting:
        now = time.monotonic()
        while waiting and waiting[-1].begins <= now:
            stream = waiting.pop()
            streams[stream.socket.fileno()] = stream
            poll.register(stream.socket, select.EPOLLIN)
            stream.ask()
        if now >= begin + len(seen.memory):
            seen.memory.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096)
        time.sleep(READ_EVERY_S)
        for number, _ in poll.poll(0):
            stream = streams[number]
            data = stream.take()
            if data and not data.endswith(LAST_CHUNK):
                continue
            seen.answers.append((stream.asked, stream.parts))
            if data and time.monotonic() < until:
                stream.ask()
            else:
                stream.socket.close()
                del streams[number]
    return seen, begin_ns + int(RAMP_S * 1e9)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(scenario: str | Path, arguments: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Serve a scenario in a process of its own; yields its port and its id. Server and this process have a core each,
    where the system lets them."""
    command = [sys.executable, "-m", "foredraft.cli", "serve", "--simulate", str(scenario), *arguments]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # the server inherits it
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
        os.sched_setaffinity(0, cores[1:] or cores)
        try:
            address = ""
            while not address and (line := server.stderr.readline()):
                print(line, end="", file=sys.stderr)
                address = line.partition(" is served on ")[2].strip()
            if not address:
                sys.exit(2)
            yield int(address.rpartition(":")[2]), server.pid
        finally:
            server.terminate()
            os.sched_setaffinity(0, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default=str(ROOT / "examples/chat_on_h100.toml"))
    parser.add_argument("--set", action="append", default=None, metavar="KEY=VALUE")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--write", action="store_true", help="put the table into docs/serve.md")
    asked = parser.parse_args()
    settings = [part for item in asked.set or LARGE for part in ("--set", item)]
    settings += ["--max-streams", str(max(asked.streams, 512)), "--stamp"]
    with started(asked.scenario, settings) as (port, pid):
        begin, cpu_before = time.monotonic(), cpu_s(pid)
        seen, since_ns = load(port, pid, asked.streams, asked.seconds)
        took, used_s = time.monotonic() - begin, cpu_s(pid) - cpu_before
    (completed, lost, tokens), delays_ms = seen.counts(), seen.delays_ms(since_ns)
    settled = seen.memory[len(seen.memory) // 3 :]
    rows = {
        "streams held": f"{asked.streams} for {asked.seconds:g} s",
        "requests completed": f"{completed:,}",
        "requests lost": f"{lost:,}",
        "output tokens per second": f"{tokens / took:,.0f}",
        "added latency p50, p90, p99": ", ".join(f"{v:.1f}" for v in np.percentile(delays_ms, (50, 90, 99))) + " ms",
        "processor of the server": f"{used_s / took:.0%} of one core, {1e6 * used_s / len(delays_ms):.0f} µs per event",
        "output tokens per second of processor time": f"{tokens / used_s:,.0f}",
        "memory after a third, at the end": f"{settled[0] / 2**20:,.0f}, {settled[-1] / 2**20:,.0f} MiB",
    }
    table = [f"| {name} | {value} |" for name, value in {"measured": "value", "---": "---", **rows}.items()]
    print(*table, sep="\n")
    if asked.write:
        write_block("serve.md", "measured", table)
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
