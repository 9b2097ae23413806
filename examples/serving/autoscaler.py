"""Hold an SLO with as few servers as the load needs: an autoscaler that reads `/metrics`, on simulated servers.

    python examples/serving/autoscaler.py [--speed 4] [--minutes 4] [--out DIR]

The SLO: a request gets at least 10 tokens per second, counted from its sending to its end. The rate of requests rises
from 0.4 to 4 per second and falls again. `autoscale` is the loop. Each server is a process of `foredraft serve
--simulate`, which starts, gets requests in turn, drains and ends as a real one would. All times are simulated seconds:
`--speed` of them pass in a real one. Needs the extra `server`. Writes what each turn of the loop saw to DIR/turns.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

SERVICE = Path(__file__).with_name("autoscaled.toml")
LEAST_TOKENS_PER_S = 10.0
PER_SERVER = 16
"""Requests at once that a server is to have. `foredraft simulate` shows 13 tokens/s for each user at 16, 11 at 32."""
MOST_SERVERS = 6
EVERY_S = 5.0
"""Between two turns of the loop."""
PATIENCE_S = 45.0
"""A server is given up once the load has been small for so long."""
START_S = 20.0
"""Until a server is ready, beside the start of its process."""
LOW_RATE, HIGH_RATE = 0.4, 4.0
WORDS = 450
"""Of the longest prompt."""


def servers_for(requests: float) -> int:
    """Return how many servers so many requests at once need."""
    return min(max(math.ceil(requests / PER_SERVER), 1), MOST_SERVERS)


def autoscale(fleet: Fleet, until_s: float) -> None:
    """Read the metrics of every server, and start or stop servers, until the load is over."""
    wanted: deque[int] = deque(maxlen=round(PATIENCE_S / EVERY_S))
    while fleet.now_s() < until_s or fleet.num_open:
        fleet.refresh()
        requests = sum(
            server.metric("foredraft:num_requests_running") + server.metric("foredraft:num_requests_waiting")
            for server in fleet.ready
        )
        wanted.append(servers_for(requests))
        while len(fleet.servers) < wanted[-1]:  # grows at once
            fleet.start()
        while len(fleet.servers) > max(wanted):  # shrinks if no turn of the last PATIENCE_S wanted so many
            fleet.stop()
        fleet.note(requests)
        time.sleep(EVERY_S / fleet.speed)


class Server:
    """A process of `foredraft serve --simulate`."""

    def __init__(self, speed: float) -> None:
        command = [sys.executable, "-m", "foredraft.cli", "serve", "--simulate", str(SERVICE), "--port", "0"]
        command += ["--speed", f"{speed:g}", "--start-s", f"{START_S:g}"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.address = ""
        self.is_late = False  # this machine is too slow for the speed
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"is served on (\S+)", line):
                self.address = found[1]
            self.is_late = self.is_late or "behind real time" in line

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return bytes(answer.read())

    @property
    def is_ready(self) -> bool:
        try:
            return bool(self.address and self.get("/ready"))
        except OSError:  # 503, or no process
            return False

    def metric(self, name: str) -> float:
        """Return the sum of the samples of a series."""
        families = text_string_to_metric_families(self.get("/metrics").decode())
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def complete(self, body: dict[str, Any]) -> int:
        """Return how many tokens the answer has."""
        head = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.address}/v1/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(asked, timeout=600) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])


class Fleet:
    """The servers behind one address, as a gateway and a cluster would hold them, and what clients saw of them."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.servers: list[Server] = []  # that run or start, oldest first
        self.ready: list[Server] = []
        self.leaving: list[Server] = []
        self.num_open = 0
        self.is_late = False
        self.turns: list[dict[str, float]] = []
        self.rates: list[float] = []  # tokens per second of each request that has ended
        self._lock = threading.Lock()
        self._turn = 0
        self._begin_s = time.monotonic()

    def now_s(self) -> float:
        return (time.monotonic() - self._begin_s) * self.speed

    def begin(self) -> None:
        """Start the first server, and the clock when it is ready."""
        self.start()
        while not self.ready:
            time.sleep(0.05)
            self.refresh()
        self._begin_s = time.monotonic()

    def start(self) -> None:
        self.servers.append(Server(self.speed))

    def stop(self) -> None:
        """Send the youngest server SIGTERM: it answers the requests that it has, and ends."""
        leaving = self.servers.pop()
        self.ready = [server for server in self.ready if server is not leaving]
        leaving.process.terminate()
        self.leaving.append(leaving)

    def refresh(self) -> None:
        self.ready = [server for server in self.servers if server.is_ready]
        self.leaving = [server for server in self.leaving if server.process.poll() is None]
        self.is_late = self.is_late or any(server.is_late for server in self.servers)

    def send(self, body: dict[str, Any], clients: ThreadPoolExecutor) -> None:
        """Send a request, and do not wait for its answer."""
        with self._lock:
            self.num_open += 1
        clients.submit(self._ask, body)

    def _ask(self, body: dict[str, Any]) -> None:
        """Send a request to the servers in turn, until one takes it, and note how fast its answer was."""
        begin_s, tokens = self.now_s(), 0
        try:
            while not tokens:
                with self._lock:
                    self._turn += 1
                    server = self.ready[self._turn % len(self.ready)]
                try:
                    tokens = server.complete(body)
                except OSError as error:  # a server that drains refuses with 503; then it is gone
                    if getattr(error, "code", 503) != 503:
                        raise
                    time.sleep(0.05)
        finally:
            with self._lock:
                self.rates.append(tokens / (self.now_s() - begin_s))
                self.num_open -= 1

    @property
    def num_in_slo(self) -> int:
        return sum(rate >= LEAST_TOKENS_PER_S for rate in self.rates)

    def note(self, requests: float) -> None:
        """Note what a turn of the loop has seen, and print every fourth."""
        turn = {"at_s": round(self.now_s(), 1), "requests": requests, "ready": len(self.ready)}
        turn |= {"running": len(self.servers) + len(self.leaving), "ended": len(self.rates), "in_slo": self.num_in_slo}
        self.turns.append(turn)
        if len(self.turns) % 4 == 1:
            line = "{at_s:5.0f} s  {requests:3.0f} requests  {ready} of {running} servers ready  {in_slo} of {ended} in the SLO"
            print(line.format(**turn), flush=True)

    def end(self) -> None:
        for server in self.servers + self.leaving:
            server.process.terminate()
        for server in self.servers + self.leaving:
            server.process.wait()


def send_load(fleet: Fleet, until_s: float) -> None:
    """Send requests, Poisson, at a rate that rises and falls once; the same ones in each run."""
    dice, at_s = random.Random(0), 0.0
    with ThreadPoolExecutor(MOST_SERVERS * 64) as clients:
        while (at_s := at_s + dice.expovariate(HIGH_RATE)) < until_s:
            rate = LOW_RATE + (HIGH_RATE - LOW_RATE) * math.sin(math.pi * at_s / until_s) ** 2
            if dice.random() < rate / HIGH_RATE:
                prompt = f"{dice.random()}" + " word" * dice.randrange(WORDS)
                time.sleep(max(at_s - fleet.now_s(), 0) / fleet.speed)
                fleet.send({"prompt": prompt, "max_tokens": 1024}, clients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", type=float, default=4.0)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    fleet, until_s = Fleet(given.speed), 60 * given.minutes
    try:
        fleet.begin()
        load = threading.Thread(target=send_load, args=(fleet, until_s))
        load.start()
        autoscale(fleet, until_s)
        load.join()
    finally:
        fleet.end()
    most = max(turn["running"] for turn in fleet.turns)
    used = sum(turn["running"] for turn in fleet.turns) / len(fleet.turns) / most
    held = fleet.num_in_slo / len(fleet.rates)
    print(f"{held:.1%} of {len(fleet.rates)} requests in the SLO, with {used:.0%} of the time of {most:.0f} servers")
    if fleet.is_late:
        print("This machine was too busy: servers have fallen behind. Choose a smaller --speed.", file=sys.stderr)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "turns.json").write_text(json.dumps(fleet.turns) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
