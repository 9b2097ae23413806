"""SIM-12 in the simulator: a run in blocks of rounds equals the run in single rounds, in every time and every decision."""

import pytest
from foretoken.core.contract.events import Committed, Planned, Submitted
from foretoken.sim.run import Simulation
from foretoken.sim.scenario_file import scenario_from_dict


class Expanded:
    """What happened, with blocks taken apart into rounds."""

    def __init__(self) -> None:
        self.rounds: list[tuple] = []  # (end, requests, steps, kept per row); which row a request has may differ
        self._owner: dict[tuple[int, int], str] = {}  # (row, epoch) -> request
        self.finished: list[tuple] = []
        self.first_tokens: list[tuple] = []
        self.refused: list[tuple] = []
        self.retracted: list[str] = []
        self.num_steps = 0

    def __call__(self, event) -> None:
        if type(event) is Submitted and event.refusal:
            self.refused.append((event.now_ns, event.request.request_id))
        if type(event) is Planned:
            self.retracted += event.retracted
            for join in event.step.joins if event.step is not None else ():
                self._owner[join.row, join.epoch] = join.request.request_id
        if type(event) is not Committed:
            return
        self.num_steps += 1
        ends = event.result.round_end_ns.tolist()
        if event.step.decode is not None:
            decode = event.step.decode
            requests = [self._owner[key] for key in zip(decode.rows.tolist(), decode.epochs.tolist(), strict=True)]
            for end, kept in zip(ends, event.kept.tolist(), strict=True):
                self.rounds.append((end, tuple(requests), decode.steps, tuple(kept)))
        self.first_tokens += [(ends[-1], request_id) for request_id in event.first_tokens]
        self.finished += [(ends[-1], f.request_id, f.reason, f.num_output) for f in event.finished]


def run(scenario: dict, block_rounds: int) -> tuple[Expanded, int]:
    scenario = {**scenario, "engine": {**scenario["engine"], "block_rounds": block_rounds}}
    expanded = Expanded()
    report = Simulation(scenario_from_dict(scenario, "test"), sinks=lambda replica: [expanded]).run()
    return expanded, report.duration_ns


SPECULATION = {
    "none": {"algorithm": "NONE"},
    "chain": {"policy": "fixed", "steps": 3},
    "ema": {"policy": "ema"},
    "goodput": {"policy": "goodput", "adaptive": "with-zero"},
    "tree": {"policy": "fixed", "steps": 3, "topk": 4},
    "standalone": {"algorithm": "STANDALONE", "policy": "fixed", "steps": 2},
    "ngram": {"algorithm": "NGRAM", "policy": "fixed", "steps": 4},
}
PRESSURE = {"kv_slots": 1600, "page_size": 4, "watermark": 0.0}
LOADS = {
    "calm": {"rate": 6.0},
    "cancelled": {"rate": 30.0},
    "closed": {"concurrency": 12},
    "pressed": {"rate": 60.0},
    "urgent": {"rate": 40.0, "urgent_share": 0.3},
    "host_bound": {"rate": 30.0},
    "shared": {"rate": 30.0, "prefixes": {"groups": 3, "length": 64}},
}


@pytest.mark.parametrize("mode", ["synchronous", "overlap"])
@pytest.mark.parametrize("load", list(LOADS))
@pytest.mark.parametrize("speculation", list(SPECULATION))
def test_a_block_equals_its_rounds(speculation, load, mode):
    scenario = {
        "seed": 3,
        "speculation": SPECULATION[speculation],
        "workload": {
            "num_requests": 60,
            "prompt": {"kind": "lognormal", "mean": 200.0, "sigma": 0.8, "high": 900},
            "output": {"kind": "lognormal", "mean": 60.0, "sigma": 0.8, "high": 300},
            **LOADS[load],
        },
        "model": {"context_len": 2048},
        "engine": {"mode": mode, "max_running": 16, "chunk_size": 512, "mixed": speculation != "ema"},
    }
    if load == "pressed":
        scenario["engine"] |= PRESSURE
    if load == "urgent":
        scenario["engine"] |= {"kv_slots": 4000, "preempt": True}
    if load == "host_bound":
        scenario["hardware"] = {"gpu": "B200", "host": "vllm-0.10"}
        scenario["model"]["target"] = "llama-3.2-1b"
    if load == "cancelled":
        scenario["clients"] = {"cancel_share": 0.5, "cancel_mean_s": 0.4}
    single, single_end = run(scenario, 1)
    block, block_end = run(scenario, 32)
    assert block.rounds == single.rounds
    assert block.finished == single.finished
    assert block.first_tokens == single.first_tokens
    assert block.retracted == single.retracted
    assert block.refused == single.refused
    assert block_end == single_end
    assert len(single.finished) == 60 or load == "cancelled"
    if load in ("calm", "closed"):
        assert block.num_steps < single.num_steps  # there were blocks at all


def test_pressure_retracts():
    """The load above does what its name says, or the comparison would be about nothing."""
    base = {
        "seed": 3,
        "speculation": SPECULATION["chain"],
        "model": {"context_len": 2048},
        "workload": {
            "num_requests": 60,
            "rate": 60.0,
            "prompt": {"kind": "lognormal", "mean": 200.0, "sigma": 0.8, "high": 900},
            "output": {"kind": "lognormal", "mean": 60.0, "sigma": 0.8, "high": 300},
        },
        "engine": {"mode": "overlap", "max_running": 16, "chunk_size": 512, **PRESSURE},
    }
    pressed, _ = run(base, 32)
    assert pressed.retracted
