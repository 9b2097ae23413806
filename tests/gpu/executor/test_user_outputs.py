"""What users see beside tokens belongs to these tokens: compared with one dense pass over prompt and output."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foredraft.core.contract.request import FinishReason, Request, SamplingParams
from foredraft.core.prompt import Prompt
from foredraft.gpu.executor.outputs import NUM_TOP_LOGPROBS, USER_OUTPUTS
from foredraft.gpu.models.config import QWEN3_MOE, MoeConfig
from foredraft.gpu.models.decoder import Capture, Decoder
from foredraft.gpu.tiny.dense import DenseAttention
from hostile_driver import Disturbance
from matrix_cells import noisy_copy, small_model
from serving import Served, Way, chain, serve, tree

MOE = {"architecture": QWEN3_MOE, "moe": MoeConfig(num_experts=6, top_k=2, intermediate_size=8, norm_topk_prob=True)}


def dense_outputs(target: Decoder, request: Request, tokens: list[int]) -> dict[str, np.ndarray]:
    """The outputs of `tokens`, from the places before them in one pass over the whole text."""
    prompt = request.prompt.materialize().tolist()
    text = torch.tensor(prompt + tokens[:-1])
    out = target.forward(text, DenseAttention([len(text)]), Capture(routed_experts=True))
    hidden = out.hidden[len(prompt) - 1 :]
    logprobs = target.logits(hidden).log_softmax(-1)
    best = logprobs.sort(dim=-1, descending=True, stable=True)
    experts = out.routed_experts
    return {
        "logprobs": logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy(),
        "top_logprobs": best.values[:, :NUM_TOP_LOGPROBS].numpy(),
        "top_logprob_ids": best.indices[:, :NUM_TOP_LOGPROBS].numpy(),
        "hidden_states": hidden.numpy(),
        "routed_experts": (
            np.zeros((len(tokens), 0, 0), np.int32) if experts is None else experts[len(prompt) - 1 :].numpy()
        ),
    }


def compare(target: Decoder, request: Request, run: Served) -> int:
    """Compare all that `request` asked for; returns the number of its tokens."""
    end = run.finished[request.request_id]
    tokens = end.tokens.tolist()
    wanted = dense_outputs(target, request, tokens)
    assert set(end.outputs or {}) == set(request.outputs)
    for name in request.outputs:
        got = np.stack(end.outputs[name])
        assert got.shape == wanted[name].shape, name
        if got.dtype.kind == "i":
            assert (got == wanted[name]).all(), name
        else:
            np.testing.assert_allclose(got, wanted[name], rtol=2e-6, atol=1e-9, err_msg=name)
    return len(tokens)


def ask(number: int, **fields) -> Request:
    """Prompts of all lengths around chunks and pages; greedy ones, and hot ones whose trees are accepted anywhere."""
    sampling = SamplingParams(3.0, top_p=0.95, seed=number) if number % 2 else SamplingParams()
    prompt = Prompt.of_tokens([(5 * number + j * j) % 24 for j in range(1 + 4 * number)])
    return Request(f"r{number}", prompt, 16 + number, sampling=sampling, **fields)


WAYS = {
    "plain": chain("NONE", 0, overlap=False, multi_step_rounds=1),
    "plain, overlap, chunks": chain("NONE", 0, chunk_size=3),
    "chain": chain("STANDALONE", 4),
    "chain, single rounds": chain("STANDALONE", 3, multi_step_rounds=1, overlap=False, page_size=4, num_pages=100),
    "tree": tree("STANDALONE", 3, 4, 14),
    "tree over pages": tree("EAGLE", 3, 4, 20, page_size=4, num_pages=200, chunk_size=5),
    "EAGLE-3 tree, not mixed": tree("EAGLE3", 4, 2, 9, mixed=False),
    "heads": tree("MULTI_LAYER_EAGLE", 3, 3, 12, chunk_size=3),
    "look-up": Way("NGRAM", None, {"steps": 5}),
}


@pytest.mark.fast("tree over pages", ci="heads")
@pytest.mark.parametrize("name", WAYS)
def test_outputs_belong_to_their_tokens(name):
    requests = [ask(n, outputs=USER_OUTPUTS if n != 2 else ()) for n in range(6)]
    run = serve(WAYS[name], requests)
    assert sum(compare(small_model(0), request, run) for request in requests) > 100


@pytest.mark.fast(ci="way1")
@pytest.mark.parametrize("way", [chain("STANDALONE", 3, chunk_size=5), tree("EAGLE", 3, 3, 12, chunk_size=5)])
def test_outputs_survive_retraction(way):
    requests = [ask(n, outputs=("logprobs", "hidden_states", "top_logprob_ids")) for n in range(6)]
    run = serve(way, requests, disturbance=Disturbance(submit=60, retract=8))
    assert run.retractions > 3
    assert sum(compare(small_model(0), request, run) for request in requests) > 100


def test_a_stop_inside_a_run_ends_the_outputs_too():
    way = Way("STANDALONE", noisy_copy(0, 0.0), {"steps": 5})
    plain = serve(Way(), [ask(n, outputs=("logprobs",)) for n in (0, 2, 4)])
    requests = []
    for n in (0, 2, 4):
        # The run that begins after the first token has six; its third or fourth is a stop.
        stop = plain.tokens[f"r{n}"][3]
        requests.append(ask(n, outputs=USER_OUTPUTS[:4], stop_tokens=(stop,)))
    run = serve(way, requests)
    for request in requests:
        end = run.finished[request.request_id]
        assert end.reason is FinishReason.STOP
        length = plain.tokens[request.request_id].index(request.stop_tokens[0]) + 1
        assert end.tokens.tolist() == plain.tokens[request.request_id][:length]
        assert compare(small_model(0), request, run) == length <= 4


@pytest.mark.fast("tree")
@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
def test_routed_experts_of_a_mixture(kind):
    target, draft = small_model(1, **MOE), small_model(9, hidden_size=8, head_dim=2, num_layers=1)
    shapes = {"chain": {"steps": 3}, "tree": {"steps": 3, "topk": 4, "num_draft_tokens": 14}}
    config = {"chunk_size": 5}
    way = Way(config=config) if kind == "plain" else Way("STANDALONE", draft, shapes[kind], config)
    requests = [ask(n, outputs=("routed_experts", "logprobs")) for n in range(5)]
    run = serve(way, requests, target=target, disturbance=Disturbance(submit=60, retract=5))
    tokens = sum(compare(target, request, run) for request in requests)
    chosen = np.stack(run.finished["r1"].outputs["routed_experts"])
    assert chosen.shape[1:] == (2, 2) and len(np.unique(chosen)) > 2 and tokens > 80
    assert run.retractions > 0 and (kind == "plain" or run.engine.controller.metrics().correct_drafts)


def test_who_asks_for_an_unknown_output_fails_alone():
    requests = [ask(0), ask(1, outputs=("logprob",)), ask(2, outputs=("logprobs",)), ask(3)]
    run = serve(chain("STANDALONE", 3, chunk_size=3), requests)
    end = run.finished["r1"]
    assert end.reason is FinishReason.ERROR and "'logprob'" in end.message and "logprobs" in end.message
    others = [request for request in requests if request.request_id != "r1"]
    alone = serve(chain("STANDALONE", 3, chunk_size=3), others)
    assert {name: tokens for name, tokens in run.tokens.items() if name != "r1"} == alone.tokens
    compare(small_model(0), requests[2], run)
