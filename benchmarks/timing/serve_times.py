"""Times that clients of a simulated server measure, beside those of `foredraft simulate`.

    python -m benchmarks.timing.serve_times                # some minutes; Linux
    python -m benchmarks.timing.serve_times --write        # and puts the table into docs/serve.md

At light load, at the knee and in overload the arrivals of one workload go to the simulator, and as requests to a server
with the same scenario: in real time, and at the greatest speed that `/ready` has called possible. Compared are means
and medians of TTFT (from sending to the first event with text) and TPOT (from there to the last one, per token), in
simulated ms. A time is close if it is within 5 % of the simulated one, or within 3 ms of real time. The last column
is that speed beside the one at which the simulator itself runs, in simulated seconds per second of processor time.
Exit code 1 if a time is not close, or a request was lost.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from foredraft import simulate
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import load_scenario
from foredraft.sim.workload.workload import TimedRequest

from ..pages import write_block
from .serve_load import LAST_CHUNK, LoadStream, connect, num_received, started

SCENARIO = Path(__file__).resolve().parents[2] / "examples/chat_on_h100.toml"
SETTINGS = ("hardware.kernels=roofline",)
LOADS = {"light": (3.0, 60), "knee": (25.0, 40), "overload": (40.0, 20)}
"""Requests per second, and the seconds in which they come."""
TRIAL_SPEEDS = (1.0, 8.0, 64.0)
"""At light load `/ready` knows a possible speed only once the server has something to do."""
READ_EVERY_S = 0.001
QUANTITIES = ("mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms")
SHARE, REAL_MS = 0.05, 3.0
"""How far a client's time may be from the simulated one."""
TEXT, END = b'"text":"', b'"finish_reason":"length"'


class Sent(NamedTuple):
    """A request of a client, and its answer as it came."""

    sent_ns: int
    asked: int
    parts: Sequence[tuple[int, bytes]]

    @property
    def is_whole(self) -> bool:
        return num_received(self.parts) == self.asked

    @property
    def times_ns(self) -> tuple[int, float]:
        """TTFT, and TPOT if there are tokens after the first, in real nanoseconds."""
        first_ns = next(at_ns for at_ns, data in self.parts if TEXT in data)
        last_ns = next(at_ns for at_ns, data in reversed(self.parts) if END in data)
        return first_ns - self.sent_ns, (last_ns - first_ns) / max(self.asked - 1, 1)


@dataclass(frozen=True)
class ServedTimes:
    """A workload that clients have sent to a server at `speed`; times are simulated ms."""

    speed: float
    num_lost: int
    times_ms: Mapping[str, float]
    possible_speed: float | None  # as `/ready` has it when the last request was sent

    def is_close(self, name: str, simulated_ms: float) -> bool:
        """Return whether a time is as near to the simulated one as it should be."""
        return abs(self.times_ms[name] - simulated_ms) <= max(SHARE * simulated_ms, REAL_MS * self.speed)


def send_all(port: int, arrivals: Sequence[TimedRequest], speed: float) -> tuple[list[Sent], float | None]:
    """Send the arrivals at their times; return all answers, and the possible speed at the load of these requests."""
    poll, busy, idle, sent, possible = select.epoll(), {}, [], [], None
    waiting, begin_s = list(reversed(arrivals)), time.monotonic() + 0.1
    while waiting or busy:
        now_ns = (time.monotonic() - begin_s) * speed * 1e9
        while waiting and waiting[-1].time_ns <= now_ns:
            arrival = waiting.pop()
            stream = idle.pop() if idle else LoadStream(connect(port), None, 0.0)
            prompt = [arrival.row + 1, *[1] * (arrival.prompt.length - 1)]  # none is the beginning of another
            sent_ns = time.time_ns()
            stream.send(prompt, arrival.output_len)
            if stream.socket.fileno() not in busy:
                poll.register(stream.socket, select.EPOLLIN)
            busy[stream.socket.fileno()] = stream, sent_ns
            if not waiting:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as answer:
                    possible = json.load(answer)["possible_speed"]
        time.sleep(READ_EVERY_S)
        for number, _ in poll.poll(0):
            stream, sent_ns = busy[number]
            data = stream.take()
            if not data or data.endswith(LAST_CHUNK):
                sent.append(Sent(sent_ns, stream.asked, stream.parts))
                poll.unregister(stream.socket)
                del busy[number]
                if data:
                    idle.append(stream)
                else:
                    stream.socket.close()
    for stream in idle:
        stream.socket.close()
    return sent, possible


def serve(settings: Sequence[str], arrivals: Sequence[TimedRequest], speed: float) -> ServedTimes:
    """Serve the arrivals at a speed, and compare what clients see."""
    given = [part for item in settings for part in ("--set", item)]
    given += ["--max-streams", str(len(arrivals)), "--speed", f"{speed:g}"]
    with started(SCENARIO, given) as (port, _):
        sent, possible = send_all(port, arrivals, speed)
    whole = [one for one in sent if one.is_whole]
    ttft, tpot = np.array([one.times_ns for one in whole]).reshape(-1, 2).T * (speed / 1e6)
    tpot = tpot[[one.asked > 1 for one in whole]]
    times = (np.mean(ttft), np.median(ttft), np.mean(tpot), np.median(tpot))
    return ServedTimes(speed, len(sent) - len(whole), dict(zip(QUANTITIES, map(float, times), strict=True)), possible)


def serve_at_both_speeds(settings: Sequence[str], arrivals: Sequence[TimedRequest]) -> list[ServedTimes]:
    """Serve the arrivals in real time, and at the greatest speed that `/ready` calls possible."""
    found = []
    for speed in TRIAL_SPEEDS:
        found.append(serve(settings, arrivals, speed))
        if (possible := found[-1].possible_speed) is not None:
            return [found[0], serve(settings, arrivals, float(f"{possible:.2g}"))]
    sys.exit("/ready knows no possible speed")


def simulated_speed(scenario: Scenario) -> float:
    """Return how many simulated seconds the simulator takes in a second of processor time."""
    simulation = Simulation(scenario)
    begin_s = time.process_time()
    report = simulation.run()
    return report.duration_ns / 1e9 / (time.process_time() - begin_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", default=list(LOADS), help=f"some of {', '.join(LOADS)}; default: all")
    parser.add_argument("--write", action="store_true", help="put the table into docs/serve.md")
    asked = parser.parse_args()
    if unknown := set(asked.loads) - set(LOADS):
        parser.error(f"expected some of {', '.join(LOADS)}, not {', '.join(sorted(unknown))}")
    names = [name.removesuffix("_ms").replace("_", " ") for name in QUANTITIES]
    table = [f"| load | speed | {' | '.join(names)} | not close, lost | speed of `simulate` |"]
    table.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    num_wrong = 0
    for load in asked.loads:
        rate, seconds = LOADS[load]
        settings = [*SETTINGS, f"workload.rate={rate}", f"workload.num_requests={round(rate * seconds)}"]
        scenario, _ = load_scenario(SCENARIO, settings)
        predicted, alone = simulate(scenario).summary, simulated_speed(scenario)
        for served in serve_at_both_speeds(settings, list(Simulation(scenario).workload)):
            wrong = sum(not served.is_close(name, predicted[name]) for name in QUANTITIES)
            times = [f"{predicted[name]:,.1f}, {served.times_ms[name]:,.1f}" for name in QUANTITIES]
            row = [f"{load}, {rate:g} requests/s", f"{served.speed:g}", *times, f"{wrong}, {served.num_lost}"]
            table.append(f"| {' | '.join([*row, f'{alone:.0f}'])} |")
            print(table[-1], flush=True)
            num_wrong += wrong + served.num_lost
    print(*table, sep="\n")
    if asked.write:
        write_block("serve.md", "times", table)
    sys.exit(bool(num_wrong))


if __name__ == "__main__":
    main()
