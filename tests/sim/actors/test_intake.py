"""The way of a request to the scheduler: the front end takes them in turn, and the scheduler looks at its queue."""

from itertools import pairwise

import pytest
from foredraft.core.contract.events import Planned, Submitted
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict

SERVICE = {
    "model": {"target": "qwen3-0.6b", "context_len": 4096},
    "hardware": {"kernels": "roofline"},
    "speculation": {"algorithm": "NONE"},
    "engine": {"multi_step_rounds": 32},
}


def run(front_end, **tables):
    scenario = scenario_from_dict(SERVICE | {"front_end": front_end} | tables, "test")
    events, metrics = [], RunMetrics()
    simulation = Simulation(scenario, sinks=lambda replica: [events.append, metrics.sink(replica)])
    report = simulation.run()
    return events, metrics.summary(report.duration_ns)


def loop(clients, requests, prompt=64, output=200):
    lengths = {"prompt": {"kind": "fixed", "value": prompt}, "output": {"kind": "fixed", "value": output}}
    return {"concurrency": clients, "num_requests": requests} | lengths


class TestFrontEnd:
    def test_it_serves_requests_in_turn(self):
        events, _ = run({"request_us": 700.0, "prompt_token_us": 2.0}, workload=loop(4, 4))
        submitted = [event.now_ns for event in events if isinstance(event, Submitted)]
        service_ns = 700_000 + 64 * 2_000
        assert [after - before for before, after in pairwise(submitted)] == [service_ns] * 3

    def test_the_time_to_the_first_token_counts_it(self):
        workload = loop(None, 3) | {"rate": 0.1}
        (_, plain), (_, delayed) = run({}, workload=workload), run({"request_us": 5_000.0}, workload=workload)
        assert delayed["mean_ttft_ms"] == pytest.approx(plain["mean_ttft_ms"] + 5.0)
        assert delayed["mean_tpot_ms"] == plain["mean_tpot_ms"]


class TestLooks:
    @pytest.mark.parametrize("mode", ["overlap", "synchronous"])
    def test_a_busy_scheduler_looks_every_so_many_decode_steps(self, mode):
        engine = {
            "mode": mode,
            "multi_step_rounds": 1,
        }  # multi-steps say the same: test_multi_steps_say_what_single_rounds_say
        events, _ = run({"poll_steps": 8}, engine=engine, workload=loop(None, 12) | {"rate": 30.0})
        launched = 0  # decode steps since a step with prompts, after which the scheduler looked
        launched_at_looks = []
        for event in events:
            if isinstance(event, Submitted) and launched:
                launched_at_looks.append(launched)
            elif isinstance(event, Planned) and event.step is not None:
                launched = 0 if event.step.prefill is not None else launched + 1
        assert len(launched_at_looks) >= 5
        assert not any(steps % 8 for steps in launched_at_looks)

    def test_an_idle_scheduler_looks_at_once(self):
        slow, fast = (run({"poll_steps": n}, workload=loop(1, 4))[1]["mean_ttft_ms"] for n in (1000, 1))
        assert slow == pytest.approx(fast)

    def test_requests_wait_for_about_half_of_the_steps_between_two_looks(self):
        """As published for SGLang: the time to the first token grows by about half of that many steps."""
        workload = loop(None, 60, output=400) | {"rate": 4.0}
        (_, plain), (_, polled) = run({}, workload=workload), run({"poll_steps": 40}, workload=workload)
        waited_steps = (polled["mean_ttft_ms"] - plain["mean_ttft_ms"]) / plain["mean_tpot_ms"]
        assert 10 < waited_steps < 30
