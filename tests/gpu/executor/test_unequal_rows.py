"""Rounds whose rows verify unequal numbers of nodes, planned or chosen on the device: captured or not, and lossless."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.core.adaptive import build_controller
from foredraft.core.adaptive.lengths.survival import acceptance_of, choose_nodes
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.events import Committed
from foredraft.core.contract.request import FinishedRequest, Request, SamplingParams
from foredraft.core.contract.step import DraftBudget, RoundShape
from foredraft.core.errors import ConfigError
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.driver import Driver
from foredraft.core.scheduler.engine import Engine
from foredraft.core.tree.chains import AcceptRule
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.executor.executor import TorchExecutor
from foredraft.gpu.executor.parts import ExecutorOptions
from foredraft.gpu.kernels.rounds.window import choose_rows
from kinds_of_drafts import unequal_rows
from matrix_cells import OPS, noisy_copy, small_head, small_model

DRAFTS = 3  # of the batch


def words_of(changes: dict) -> str:
    return "sampling" if "temperature" in changes else "penalties" if changes else "greedy"


def requests_of(**sampling) -> list[Request]:
    dice = np.random.Generator(np.random.PCG64(5))
    tokens = [Prompt.of_tokens(dice.integers(0, 24, 6 + i)) for i in range(4)]
    shown = ("logprobs", "hidden_states") if sampling else ()
    return [
        Request(f"r{i}", prompt, 20, sampling=SamplingParams(**sampling), outputs=shown if i == 1 else ())
        for i, prompt in enumerate(tokens)
    ]


def budget_for(shape: RoundShape) -> DraftBudget:
    return DraftBudget(DRAFTS, 0.5, (-0.2,) * shape.steps, tuple(0.2 + position for position in range(shape.steps)))


def serve(
    draft_name: str, requests: list[Request], graph_sizes=None, rule: str = "none", overlap: bool = False, **options
) -> tuple[dict[str, FinishedRequest], TorchExecutor, list]:
    """Serve with rows of equal lengths, with those of `unequal_rows`, or with those that the device chooses."""
    controller, events = build_controller("ema", {"1": {"candidate_steps": [3]}}), []
    config = EngineConfig(num_pages=400, context_len=96, max_running=4, track_tokens=True, overlap=overlap)
    engine = Engine(config, get_algorithm(draft_name), controller, events=events.append)
    if rule != "none":
        engine.rounds.row_lengths = unequal_rows if rule != "chosen" else engine.rounds.row_lengths
        engine.rounds.budget_for = budget_for if rule != "planned" else engine.rounds.budget_for
    draft = noisy_copy(0, 0.05) if draft_name == "STANDALONE" else small_head(0, draft_name)
    made = ExecutorOptions(graph_sizes=graph_sizes, seed=3, debug=True, **options)
    executor = build_executor(engine, small_model(0), draft, OPS, made)
    driver = Driver(engine, executor)
    for request in requests:
        driver.submit(request)
    return driver.run_until_idle(), executor, [event for event in events if isinstance(event, Committed)]


@pytest.mark.fast("STANDALONE-sampling-both", ci="*")
@pytest.mark.parametrize("rule", ["planned", "chosen", "both"])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.8, "top_p": 0.9}, {"frequency_penalty": 0.5}], ids=words_of)
@pytest.mark.parametrize("draft", ["STANDALONE", "EAGLE3", "MULTI_LAYER_EAGLE"])
def test_one_graph_of_so_many_tokens_serves_any_mix_of_row_lengths(draft, changes, rule):
    requests = requests_of(**changes)
    expected, *_ = serve(draft, requests, rule=rule)
    found, executor, _ = serve(draft, requests, (1, 4), rule)
    for name, end in expected.items():
        assert found[name].tokens.tolist() == end.tokens.tolist()
        for output, values in (end.outputs or {}).items():
            assert np.allclose(np.stack(found[name].outputs[output]), np.stack(values), rtol=0, atol=1e-9), output
    reports = executor.graphs.reports
    packed = Counter((r.batch_size, r.num_tokens, r.with_outputs) for r in reports if r.num_tokens is not None)
    assert packed and max(packed.values()) == 1, "each is captured once"
    assert {(size, tokens) for size, tokens, _ in packed} <= {(size, size * n) for size in (1, 4) for n in (1, 2, 3, 4)}
    assert not executor.graphs.num_missed
    if "temperature" not in changes:
        plain, *_ = serve(draft, requests)
        assert all(plain[name].tokens.tolist() == end.tokens.tolist() for name, end in found.items()), "lossless"


@pytest.mark.fast("planned-rejection", ci="*")
@pytest.mark.parametrize("accept_rule", [AcceptRule.REJECTION, AcceptRule.BLOCK])
@pytest.mark.parametrize("rule", ["planned", "both"])
def test_chains_of_drawn_drafts_are_shortened_too(rule, accept_rule):
    requests = requests_of(temperature=0.8)
    expected, _, committed = serve("STANDALONE", requests, rule=rule, accept_rule=accept_rule)
    found, *_ = serve("STANDALONE", requests, (1, 4), rule, accept_rule=accept_rule)
    assert all(found[name].tokens.tolist() == end.tokens.tolist() for name, end in expected.items())
    decoded = [event for event in committed if event.step.decode is not None]
    lens = np.concatenate([event.result.decode.accept_lens.ravel() for event in decoded])
    assert lens.max() > 1, "some drafts stay"
    for event in decoded:  # the engine refuses a row that accepts more than it verified
        assert (event.result.decode.accept_lens <= event.result.decode.nodes_of(event.step.decode)).all()


@pytest.mark.fast("True-STANDALONE", ci="*")
@pytest.mark.parametrize("draft", ["STANDALONE", "EAGLE3", "MULTI_LAYER_EAGLE"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_device_chooses_what_the_core_would(draft, overlap):
    _, _, committed = serve(draft, requests_of(), (1, 4), "both", overlap)
    chosen = [event for event in committed if event.step.decode is not None and event.step.decode.budget is not None]
    assert sum(event.result.decode.rounds for event in chosen) > 5
    for event in chosen:
        step, result = event.step.decode, event.result.decode
        most = np.full(len(step.rows), step.shape.nodes) if step.row_nodes is None else step.row_nodes
        for nodes, confidence in zip(result.row_nodes, result.confidence, strict=True):
            p = acceptance_of(confidence, step.budget.slopes, step.budget.biases)
            assert nodes.tolist() == choose_nodes(p.cumprod(axis=1), most, DRAFTS).tolist()
            assert ((confidence > 0) & (confidence <= 1)).all()


def test_rows_without_valid_confidences_come_first_and_ties_go_to_the_earlier_position_and_row():
    nan, inf = float("nan"), float("inf")
    rows = [
        [0.9, 0.9, 0.9],
        [0.5, nan, 0.5],
        [0.9, 0.9, 0.9],
        [1.5, 0.1, 0.1],
        [1.0, 0.0, 1.0],
        [0.2, inf, 0.1],
        [0.0] * 3,
    ]
    confidence, most = np.array(rows, np.float32), np.array([4, 3, 4, 4, 4, 2, 0])
    for drafts in range(20):
        for slope, bias in ((0.5, -0.2), (0.0, 0.3), (2.0, -4.0)):
            p = acceptance_of(confidence[:6], slope, (bias,) * 3)
            wanted = [*choose_nodes(p.cumprod(axis=1), most[:6], drafts).tolist(), 0]  # the last row is padding
            weights = torch.tensor([[slope] * 3, [bias] * 3], dtype=torch.float64)
            found = choose_rows(torch.from_numpy(confidence), torch.from_numpy(most), torch.tensor([drafts]), weights)
            assert found.tolist() == wanted, (drafts, slope)


def test_simulated_acceptance_has_no_confidences():
    process = GaussianAcceptance((0.5,) * 3)
    with pytest.raises(ConfigError, match="acceptance"):
        serve("STANDALONE", requests_of(), None, "chosen", acceptance=process)
