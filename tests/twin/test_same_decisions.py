"""The twin's claim: with the simulated clock, the real executor is asked for the same steps at the same times as
the simulated one."""

from dataclasses import fields

import numpy as np
import pytest
from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.core.contract.events import Committed, Planned, Submitted
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.gpu.measure.served import StepLap, TimedOrder
from foredraft.twin.comparison import simulate
from foredraft.twin.host_times import priced_ns
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from made_steps import made_steps

WAYS = {
    "plain": {},
    "chain": {"draft": "STANDALONE", "steps": 3},
    "head": {"draft": "EAGLE3", "steps": 1},
    "tree": {"draft": "EAGLE3", "steps": 3, "topk": 2, "num_draft_tokens": 8},
    "adaptive": {"draft": "EAGLE3", "adaptive": "default"},
}


class PricedClock:
    """Simulated time: it passes as the profile says, not while anything computes."""

    def __init__(self) -> None:
        self.ns = 0

    def start(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns

    def sleep_until(self, at_ns: int) -> None:
        self.ns = max(self.ns, at_ns)


class PricedExecutor:
    """The real executor; its moves take what the profile says."""

    def __init__(self, executor, cost, host, clock) -> None:
        self.executor, self.cost, self.host, self.clock = executor, cost, host, clock
        self.step = None

    def __getattr__(self, name):
        return getattr(self.executor, name)

    def launch(self, step):
        self.step = step
        rows = sum(len(part.rows) for part in (step.prefill, step.decode) if part is not None)
        self.clock.ns += self.host.plan_ns(rows) + self.host.launch_ns(rows)
        self.executor.launch(step)

    def collect(self):
        result, step = self.executor.collect(), self.step
        tokens = 0 if step.prefill is None else int(step.prefill.is_last.sum())
        rows = 0 if step.decode is None else len(step.decode.rows)
        tokens += 0 if step.decode is None else int(result.decode.accept_lens.sum())
        lap = StepLap(step, result, 0, 0, 0, 0, 0)
        self.clock.ns += priced_ns(lap, self.cost) + self.host.commit_ns(rows, tokens)
        return result


def decisions(events):
    """What was submitted, planned and accepted, with its time."""
    found = []
    for event in events:
        if isinstance(event, Submitted):
            found.append((event.now_ns, "submitted", event.request.request_id))
        elif isinstance(event, Planned):
            step = event.step
            parts = (None, None) if step is None else (step.prefill, step.decode)
            arrays = [
                tuple(getattr(part, name).tolist() for name in names)
                for part, names in zip(
                    parts, (("rows", "starts", "lens", "is_last"), ("rows", "seq_lens")), strict=True
                )
                if part is not None
            ]
            shape = None if parts[1] is None else (*parts[1].shape, parts[1].max_rounds)
            joins = (
                [] if step is None else [(join.row, join.request.request_id, join.num_emitted) for join in step.joins]
            )
            found.append((event.now_ns, "planned", arrays, shape, joins, event.retracted, event.num_waiting))
        elif isinstance(event, Committed) and event.result.decode is not None:
            found.append((event.now_ns, "committed", event.kept.tolist(), [end.request_id for end in event.finished]))
    return sorted(found, key=lambda item: (item[0], item[1] != "submitted"))


@st.composite
def workloads(draw):
    """Requests with their arrivals, in bursts and with gaps, or for a closed loop."""
    gaps = draw(st.lists(st.sampled_from([0, 1, 700_000, 3_000_000, 40_000_000]), min_size=1, max_size=12))
    sizes = [(draw(st.integers(1, 40)), draw(st.integers(1, 24)), draw(st.integers(0, 1))) for _ in gaps]
    return [
        TimedOrder(Request(f"r{i}", Prompt.of_tokens(np.arange(prompt) + 7 * i), output, priority), at)
        for i, ((prompt, output, priority), at) in enumerate(zip(sizes, np.cumsum(gaps).tolist(), strict=True))
    ]


CONFIGS = st.fixed_dictionaries(
    {
        "max_running": st.integers(1, 5),
        "chunk_size": st.sampled_from([4, 16, 256]),
        "kv_tokens": st.sampled_from([110, 200, 1000]),
        # The real engine's cache keeps outputs, which a simulation does not know.
        "prefix_cache": st.just(False),
    }
)


@pytest.mark.fast("plain", "tree", "adaptive", ci="*")
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=3, phases=(Phase.explicit, Phase.generate))
@given(asked=workloads(), config=CONFIGS, clients=st.none() | st.integers(1, 6), seed=st.integers(0, 5))
def test_a_real_and_a_simulated_run_decide_alike(make_arms, way, asked, config, clients, seed):
    (arm,) = make_arms(**{way: {**WAYS[way], **config, "context_len": 80}})
    steps = made_steps(arm.algorithm, topk=arm.spec.topk)
    cost, clock = steps.cost(arm.spec, "profile"), PricedClock()
    acceptance = GaussianAcceptance((0.8, 0.7, 0.6), seed, 0.1, 0.2)

    class Priced(type(arm)):
        def open(self, events):
            engine, executor = super().open(events)
            return engine, PricedExecutor(executor, cost, steps.host, clock)

    given = {field.name: getattr(arm, field.name) for field in fields(arm)}
    real = decisions(Priced(**given | {"acceptance": acceptance}).serve(asked, clock, clients).events)
    simulated = decisions(simulate(arm.simulated_spec, cost, steps.host, acceptance, asked, clients))
    assert [item[0] for item in real] and len(real) > len(asked)
    for ours, theirs in zip(simulated, real, strict=True):
        assert ours == theirs
