"""The host's time per round of real decoding at batch 32: what a GPU would wait for if it were the faster one.

    pytest benchmarks/timing/test_real_host_time.py -s

Plan, launch and commit of the engine and the executor; beside them the host's part of reading a round back (stop rules,
columns, what the requests got), which in overlap mode runs while the next round does. The model is as small as can be:
on a CPU its work is done inside `collect`, and what is left of `collect` beside the executor's own phases is the
host's. Nothing is asserted by the clock.
"""

from __future__ import annotations

import json
from statistics import median

import numpy as np
import pytest
import torch
from foredraft.gpu.measure.arm import Arm, BatchArm
from foredraft.gpu.measure.plan import BenchOptions, plan_bench
from foredraft.gpu.measure.served import StepLap
from foredraft.gpu.measure.shapes import random_draft
from foredraft.gpu.models.checkpoint import random_weights
from foredraft.gpu.session.devices import ops_for

BATCH_SIZE = 32
ROUNDS = 400
GOAL_US = 300
NO_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
}


def make_arm(tmp_path, algorithm: str, steps: int, overlap: bool, topk: int = 1) -> BatchArm:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(NO_MODEL))
    options = BenchOptions(
        random_weights=str(config),
        algorithm=algorithm,
        steps=str(steps),
        topk=topk,
        batch_sizes=str(BATCH_SIZE),
        context_lengths="64",
        output_tokens=ROUNDS * (steps + 1),
        acceptance="2.0" if steps else None,
        overlap=overlap,
        device="cpu",
    )
    plan = plan_bench(options)
    ops = ops_for("cpu")
    target = random_weights(plan.target, ops, "cpu", torch.float32, 0)
    draft = None if plan.draft is None else random_draft(plan.draft, target, 1)
    spec = plan.cells[0].arms[-1].spec
    arm = Arm(algorithm, spec, target, draft if steps else None, ops, plan.acceptance)
    return BatchArm(arm, [], plan.options.output_tokens)


class MeasuredHostTimes:
    """Per round, in ns."""

    def __init__(self) -> None:
        self.plan: list[int] = []
        self.launch: list[int] = []
        self.commit: list[int] = []
        self.collect_host: list[int] = []


def drive(arm: BatchArm, prompts: np.ndarray, max_tokens: int) -> MeasuredHostTimes:
    """Serve `prompts`; keeps the times of steps that are one round of the whole batch."""
    clock, times, spent = arm.own_executor.clock, MeasuredHostTimes(), [0.0]

    def note(lap: StepLap) -> bool:
        spent.append(sum(clock.seconds.values()))
        in_phases = (spent[-1] - spent[-2]) * 1e9
        rounds = len(lap.result.round_end_ns)
        if lap.decode_rows == BATCH_SIZE and rounds:
            times.plan.append(lap.plan_ns // rounds)
            times.launch.append(lap.launch_ns // rounds)
            times.commit.append(lap.commit_ns // rounds)
            times.collect_host.append((lap.run_ns - in_phases) / rounds)
        return True

    arm.decode(prompts, max_tokens, note)
    return times


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize(("algorithm", "steps", "topk"), [("NONE", 0, 1), ("EAGLE3", 3, 1), ("EAGLE3", 3, 4)])
def test_host_time(benchmark, tmp_path, algorithm, steps, topk, overlap):
    arm = make_arm(tmp_path, algorithm, steps, overlap, topk)
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 256, (BATCH_SIZE, 64))
    max_tokens = ROUNDS * (2 if steps else 1)
    times = benchmark.pedantic(drive, args=(arm, prompts, max_tokens), rounds=1)
    assert len(times.plan) > 20, "rounds of the whole batch"
    parts = {name: median(getattr(times, name)) / 1e3 for name in ("plan", "launch", "commit", "collect_host")}
    total = parts["plan"] + parts["launch"] + parts["commit"]
    benchmark.extra_info.update({f"{name}_us": value for name, value in parts.items()}, host_us=total, goal_us=GOAL_US)
    detail = ", ".join(f"{name} {parts[name]:.0f}" for name in ("plan", "launch", "commit"))
    print(
        f"\n{algorithm} S={steps} k={topk}, {'overlap' if overlap else 'synchronous'}, batch {BATCH_SIZE}: {total:.0f} µs per round "
        f"({detail}; goal {GOAL_US}), and {parts['collect_host']:.0f} in collect"
    )
