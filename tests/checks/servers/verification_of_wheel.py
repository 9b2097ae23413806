"""vLLM's adaptive verification on random inputs, and ours on the same ones: `python verification_of_wheel.py WHEEL`.

Prints one JSON document: the coefficients of its estimator after each of some refits, how many budgets, choices and
times of passes were compared, and where they differ. Needs Triton's interpreter: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from foredraft.core.adaptive.lengths.confidence import AcceptanceCurve, ConfidencePolicy
from foredraft.core.adaptive.lengths.pass_costs import PassCosts
from foredraft.core.adaptive.lengths.survival import choose_nodes, log_odds
from foredraft.core.contract.step import DecodeResult, DecodeStep, MultiStepEnd, RoundShape

ROWS, DEPTH, REFITS = 8, 3, 4
BATCHES = 400


def graded_rounds() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield rounds of a batch: confidences [rows, depth], the nodes that each row verifies, its accept lengths."""
    draw = np.random.default_rng(1)
    for _ in range(100 * REFITS):
        confidence = draw.uniform(0.01, 0.999, (ROWS, DEPTH)).astype(np.float32)
        nodes = draw.integers(1, DEPTH + 2, ROWS)
        likely = 1 / (1 + np.exp(-(1.2 * log_odds(confidence) + np.array([0.5, -1.0, 0.2]))))
        run = (draw.uniform(size=likely.shape) < likely).cumprod(axis=1).sum(axis=1)
        yield confidence, nodes, 1 + np.minimum(run, nodes - 1)


def our_coefficients() -> list[list[float]]:
    """Return slope and biases of our curve after each refit."""
    curve, found = AcceptanceCurve(DEPTH), []
    for number, rounds in enumerate(graded_rounds(), start=1):
        curve.add(*rounds)
        if number % 100 == 0:
            found.append([curve.slope, *curve.biases])
    return found


def their_coefficients() -> list[list[float]]:
    """Return slope and intercepts of vLLM's estimator after each refit."""
    import torch
    from foredraft.checks.servers.vllm_verification import open_estimator

    estimator, found = open_estimator().OnlineAcceptanceEstimator(ROWS, DEPTH, torch.device("cpu")), []
    places = torch.arange(ROWS, dtype=torch.int32)
    for number, (confidence, nodes, lens) in enumerate(graded_rounds(), start=1):
        estimator.features[:] = torch.from_numpy(log_odds(confidence).astype(np.float32))
        estimator.predictions[:] = torch.sigmoid(estimator.slope * estimator.features + estimator.intercepts)
        estimator.step(places, torch.from_numpy(lens), torch.from_numpy(nodes - lens))
        if number % 100 == 0:
            found.append([estimator.slope.item(), *estimator.intercepts.tolist()])
    return found


def compared() -> dict[str, Any]:
    """Compare budgets, choices and times of random batches. Rows of ours and theirs have the same confidences, which
    are read as probabilities."""
    import torch
    from foredraft.checks.servers.vllm import Settings
    from foredraft.checks.servers.vllm_verification import RowStates, make_manager

    draw, differences, num_times = np.random.default_rng(2), [], 0
    for batch in range(BATCHES):
        bs, steps = int(draw.integers(1, 33)), int(draw.integers(1, 8))
        # Sizes up to the captured one, and some beyond it.
        sizes = np.unique(draw.integers(1, 300, 12))
        captured = int(sizes[draw.integers(1, len(sizes) - 2)])
        times = np.sort(draw.integers(1_000, 100_000, len(sizes)))
        drafting = int(draw.integers(0, 50_000))
        states = RowStates(bs, 400, steps)
        manager = make_manager(states)
        manager._cudagraph_limit = captured
        manager.set_cost_curves([(1, drafting)], list(zip(sizes.tolist(), times.tolist(), strict=True)))
        costs = PassCosts((steps,), (1,), ((drafting,),), tuple(sizes.tolist()), tuple(times.tolist()), (0,), captured)
        tokens = np.arange(1, 401)
        num_times += len(tokens)
        wrong = ~np.isclose(manager.cost_tables[1][tokens], costs.verify_times(tokens))
        if wrong.any():
            differences.append(f"batch {batch}: times of {tokens[wrong][:3].tolist()} tokens, captured {captured}")
            continue
        names = [f"r{i}" for i in range(bs)]
        places = torch.tensor([states.add(name) for name in names])
        for row in places.tolist():
            manager.add_request(row)
        values = draw.uniform(0.02, 0.98, (bs, steps)).astype(np.float32)
        for _ in range(2):  # a budget knows the confidences of the round before
            manager.record_confidences(torch.from_numpy(values), Settings(num_reqs=bs, idx_mapping=places))
        most = draw.integers(0, steps + 1, bs)
        drafts = {name: [1] * int(most[i]) for i, name in enumerate(names)}
        total = manager.get_num_tokens({name: 1 + len(drafts[name]) for name in names}, drafts)
        theirs = total - bs
        ours = our_budget(costs, steps, values, most)
        if theirs != ours:
            differences.append(f"batch {batch}: a budget of {ours} drafts, theirs {theirs}")
            continue
        ends = manager.reallocate_drafts(names, places)[1]
        lengths = np.diff(ends.numpy()[: bs + 1])
        nodes = choose_nodes(np.cumprod(values, axis=1), most + 1, ours)
        if lengths.tolist() != nodes.tolist():
            differences.append(f"batch {batch}: rows verify {nodes.tolist()} nodes, theirs {lengths.tolist()}")
    return {"batches": BATCHES, "times": num_times, "differences": differences}


def our_budget(costs: PassCosts, steps: int, values: np.ndarray, most: np.ndarray) -> int:
    """Return the budget of our policy for rows of which a result has had these confidences."""
    policy = ConfidencePolicy({"1": {"candidate_steps": [steps]}}, costs, None)
    policy.curve.slope, policy.curve.biases = 1.0, (0.0,) * steps
    bs = len(values)
    rows, epochs = np.arange(1, bs + 1, dtype=np.int32), np.ones(bs, dtype=np.int64)
    step = DecodeStep(rows, epochs, epochs, epochs, RoundShape.chain(steps), 1)
    nodes = np.full((1, bs), steps + 1, np.int32)
    ones, ended = np.ones((1, bs), np.int32), np.zeros(bs, dtype=bool)
    end = MultiStepEnd.MAX_ROUNDS
    policy.take(
        step, DecodeResult(1, ones, None, ended, end, row_nodes=nodes, confidence=values[None]), np.ones(bs, dtype=bool)
    )
    policy.look(rows, epochs, 0, most)
    budget = policy.budget_for(RoundShape.chain(steps))
    return budget.drafts if budget is not None else 0


if __name__ == "__main__":
    from foredraft.checks.servers.release import name_wheel

    name_wheel("vllm", Path(sys.argv[1]))
    print(json.dumps({"coefficients": their_coefficients(), **compared()}))
