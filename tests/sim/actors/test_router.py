"""Routers: whom they choose, and that a load goes down again however a request ends."""

from pathlib import Path

import foredraft
import pytest
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.sim.actors.router import Balancer, SentBlocks
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict

POLICIES = ["round_robin", "least_loaded", "prefix_aware", "random"]
SERVICE = {
    "hardware": {"replicas": 3},
    "speculation": {"algorithm": "NONE"},
    "engine": {"page_size": 16},
    "workload": {
        "num_requests": 300,
        "rate": 18.0,
        "prompt": {"mean": 4000.0, "sigma": 1.2, "high": 30000},
        "output": {"kind": "fixed", "value": 60},
        "prefixes": {"groups": 12, "length": 1500, "zipf": 1.0},
    },
}
TRACE = Path(__file__).resolve().parents[3].parent / "shared" / "traces" / "mooncake_conversation_trace.jsonl"


def request(name: str, *segments: tuple[int, int]) -> Request:
    return Request(name, Prompt.of_segments(segments), 10)


def served(**tables: dict) -> Simulation:
    scenario = {name: SERVICE.get(name, {}) | tables.get(name, {}) for name in {**SERVICE, **tables}}
    simulation = Simulation(scenario_from_dict(scenario, "test"))
    simulation.report = simulation.run()
    return simulation


class TestPrefixAware:
    def test_cached_tokens_are_weighed_against_waiting_ones(self):
        balancer = Balancer("prefix_aware", 2, 0, cache_tokens=10**6)
        assert balancer.assign(request("a", (1, 1000), (2, 10)), (0, 1)) == 0
        balancer.computed(0, "a")
        assert balancer.assign(request("b", (1, 1000), (3, 10)), (0, 1)) == 0, "1,000 tokens are cached, nothing waits"
        balancer.computed(0, "b")
        assert balancer.assign(request("c", (1, 1000), (4, 5000)), (0, 1)) == 0
        assert balancer.assign(request("d", (1, 1000), (5, 10)), (0, 1)) == 1, (
            "5,000 tokens wait where 1,000 are cached"
        )
        assert balancer.waiting_tokens == [5000, 1010]
        balancer.ended(0, "c")
        balancer.ended(1, "d")
        assert balancer.waiting_tokens == [0, 0] and balancer.outstanding == [2, 0]

    def test_what_no_cache_can_hold_is_forgotten_from_the_end(self):
        sent = SentBlocks(capacity=1500)
        sent.remember(Prompt.of_segments([(1, 1000), (2, 400)]))
        sent.remember(Prompt.of_blocks([8, 9], 512, 600))
        assert sent.match(Prompt.of_blocks([8, 9], 512, 600)) == 600
        assert sent.match(Prompt.of_blocks([8, 9], 512, 700)) == 512, "the second block was sent in part"
        assert sent.match(Prompt.of_segments([(1, 1000), (2, 400)])) == 0, "2,000 tokens were sent"
        sent = SentBlocks(capacity=1500)
        sent.remember(Prompt.of_segments([(1, 1000), (2, 400)]))
        sent.remember(Prompt.of_segments([(3, 300)]))
        assert sent.match(Prompt.of_segments([(1, 1000), (2, 400)])) == 1000

    @pytest.mark.ci
    def test_first_tokens_come_sooner_than_by_counting_requests(self):
        """Prompts of very different lengths: the policy that counted requests and ignored tokens was slower
        than least_loaded."""
        ttft = {}
        for policy in ("least_loaded", "prefix_aware"):
            result = foredraft.simulate(SERVICE, {"router.policy": policy})
            ttft[policy] = result.summary["mean_ttft_ms"]
        assert ttft["prefix_aware"] < 0.85 * ttft["least_loaded"]  # 0.72 measured

    @pytest.mark.slow
    @pytest.mark.skipif(not TRACE.exists(), reason="real traces are not at hand")
    def test_first_tokens_come_sooner_on_a_real_trace(self):
        workload = {"trace": str(TRACE), "num_requests": 250}
        ttft = {}
        for policy in ("least_loaded", "prefix_aware"):
            scenario = {"hardware": {"replicas": 4}, "engine": {"page_size": 64}, "workload": workload}
            ttft[policy] = foredraft.simulate(scenario, {"router.policy": policy}).summary["mean_ttft_ms"]
        assert ttft["prefix_aware"] < 0.85 * ttft["least_loaded"]

    def test_it_says_where_it_cannot_work(self):
        def notices(**tables: dict) -> list[str]:
            scenario = {name: SERVICE[name] | tables.get(name, {}) for name in SERVICE} | {
                "router": {"policy": "prefix_aware"}
            }
            scenario["workload"] |= {"num_requests": 20}
            told = foredraft.simulate(scenario).summary["notices"]
            return [notice for notice in told if "prefix_aware" in notice]

        (notice,) = notices(workload={"prefixes": None})
        assert "prompts without block hashes" in notice
        (notice,) = notices(engine={"prefix_cache": False})
        assert "no prefix cache" in notice
        assert notices() == []


@pytest.mark.parametrize("policy", POLICIES)
def test_every_load_is_zero_after_the_drain(policy):
    """Requests that end, are cancelled in any state, run out of time, or are refused: each leaves its replica."""
    simulation = served(
        router={"policy": policy},
        workload={"num_requests": 150, "rate": 40.0},
        clients={"deadline_s": 1.5, "cancel_share": 0.3, "cancel_mean_s": 0.5},
        engine={"max_queue": 8},
    )
    assert simulation.report.num_ended == simulation.report.num_submitted == 150
    assert 0 < sum(simulation.report.refusals.values()) < 150
    (balancer,) = simulation.router.balancers.values()
    assert balancer.outstanding == balancer.waiting_tokens == [0, 0, 0]
    assert simulation.router.outstanding == [0, 0, 0]
