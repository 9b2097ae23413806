"""Load on a simulated server: streams that are held for a minute, and what the server adds to the simulated times.

    python benchmarks/serve_load.py --streams 256 --seconds 60
    python benchmarks/serve_load.py --scenario examples/chat_on_h100.toml --set hardware.gpu=A100
    python benchmarks/serve_load.py --write        # and puts the table into docs/serve.md

Starts `foretoken serve --simulate` and keeps so many streams open, each the next request of a client whose last one has ended. Prints the
table of docs/serve.md: requests that were lost (a stream without its end, or with another number of tokens than it asked for), tokens per
second, the delay from a simulated round's end to its text at the socket, and the memory of the server. Exit code 1 if a request was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGE = (
    "model.target='llama-3.1-70b'",
    "hardware.tensor_parallel=4",
)  # some thousand tokens per second for 256 streams
DOCS = ROOT / "docs/serve.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
RAMP_S = 5.0
"""Over which streams begin, one by one; delays are counted from its end on."""
LAST = b"data: [DONE]\n\n"
BUCKET = 'foretoken:response_delay_seconds_bucket{le="'


@dataclass
class Counts:
    """What clients have seen."""

    completed: int = 0
    lost: int = 0
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)


async def client(port: int, number: int, until: float, counts: Counts) -> None:
    """Send one request after another on one connection."""
    dice = random.Random(number)
    await asyncio.sleep(dice.random() * RAMP_S)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    while time.monotonic() < until:
        asked = dice.randrange(50, 250)
        body = {
            "prompt": f"{number} " + "word " * dice.randrange(20, 200),
            "max_tokens": asked,
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        begin = time.monotonic()
        writer.write(head.encode() + data)
        await reader.readuntil(b"\r\n\r\n")
        counts.ttft_s.append(time.monotonic() - begin)
        answer = await _rest(reader)
        got = int(answer.rpartition(b'"completion_tokens":')[2].partition(b",")[0] or 0)
        counts.tokens += got
        counts.completed += got == asked
        counts.lost += got != asked
    writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Return the end of a stream, up to its last chunk."""
    tail = b""
    while not tail.endswith(b"0\r\n\r\n"):
        part = await reader.read(1 << 16)
        if not part:
            return b""
        tail = (tail + part)[-2000:]
    return tail if LAST in tail else b""


async def watch_memory(pid: int, until: float) -> list[int]:
    """Return the server's resident memory in bytes, every second."""
    found = []
    while time.monotonic() < until:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found.append(pages * 4096)
        await asyncio.sleep(1.0)
    return found


async def load(port: int, pid: int, streams: int, seconds: float) -> tuple[Counts, list[int], list[float]]:
    """Hold streams; return what clients saw, the memory, and the counts of delays (see `delay_counts`) at the end of the ramp."""
    counts, until = Counts(), time.monotonic() + RAMP_S + seconds
    memory = asyncio.create_task(watch_memory(pid, until))

    async def at_the_top() -> list[float]:
        await asyncio.sleep(RAMP_S)
        return await asyncio.to_thread(lambda: delay_counts(port)[1])

    top = asyncio.create_task(at_the_top())
    await asyncio.gather(*(client(port, number, until, counts) for number in range(streams)))
    return counts, await memory, await top


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def delay_counts(port: int) -> tuple[list[float], list[float]]:
    """Return the edges of the buckets of the delay, in seconds, and how many delays were at most so long."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    lines = [line for line in text.splitlines() if line.startswith(BUCKET)]
    return [float(line.split('"')[1]) for line in lines], [float(line.rpartition(" ")[2]) for line in lines]


def quantiles(port: int, before: list[float]) -> tuple[list[float], float]:
    """Return p50, p90 and p99 of the delays since `before`, each the upper edge of its bucket, in ms, and how many there were in all."""
    edges, counts = delay_counts(port)
    since = [now - then for now, then in zip(counts, before, strict=True)]
    found = [1000 * next(e for e, n in zip(edges, since, strict=True) if n >= q * since[-1]) for q in (0.5, 0.9, 0.99)]
    return found, counts[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default=str(ROOT / "examples/chat_on_h100.toml"))
    parser.add_argument("--set", action="append", default=None, metavar="KEY=VALUE")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--write", action="store_true", help="put the table into docs/serve.md")
    asked = parser.parse_args()
    settings = [part for item in asked.set or LARGE for part in ("--set", item)]
    command = [sys.executable, "-m", "foretoken.cli", "serve", "--simulate", asked.scenario, *settings, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        address = ""
        while not address and (line := server.stderr.readline()):
            print(line, end="", file=sys.stderr)
            address = line.partition(" is served on ")[2].strip()
        if not address:
            sys.exit(2)
        port = int(address.rpartition(":")[2])
        begin, cpu_before = time.monotonic(), cpu_s(server.pid)
        counts, memory, before = asyncio.run(load(port, server.pid, asked.streams, asked.seconds))
        took, used_s = time.monotonic() - begin, cpu_s(server.pid) - cpu_before
        late, num_events = quantiles(port, before)
        server.terminate()
    settled = memory[len(memory) // 3 :] or memory
    rows = {
        "streams held": f"{asked.streams} for {asked.seconds:g} s",
        "requests completed": f"{counts.completed:,}",
        "requests lost": f"{counts.lost:,}",
        "output tokens per second": f"{counts.tokens / took:,.0f}",
        "added latency p50, p90, p99": ", ".join(f"≤ {value:g}" for value in late) + " ms",
        "processor of the server": f"{used_s / took:.0%} of one core, {1e6 * used_s / num_events:.0f} µs per event",
        "memory after a third, at the end": f"{settled[0] / 2**20:,.0f}, {settled[-1] / 2**20:,.0f} MiB",
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in {"measured": "value", "---": "---", **rows}.items())
    print(table, end="")
    if asked.write:
        before, begin, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        assert begin and end, "docs/serve.md has no place for the table"
        DOCS.write_text(before + begin + table + end + after, encoding="utf-8")
    sys.exit(bool(counts.lost))


if __name__ == "__main__":
    main()
