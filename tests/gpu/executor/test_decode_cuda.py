"""Whole sessions on a GPU: streams, events, graphs and Triton kernels together give the CPU's tokens, and launching never waits."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from foretoken.core.contract.request import Request, SamplingParams
from foretoken.core.prompt import Prompt
from foretoken.gpu.session.plan import SessionOptions
from foretoken.gpu.session.session import DecodeSession
from small_checkpoint import VOCAB_SIZE, write_head, write_standalone, write_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="decodes on the device: needs an NVIDIA GPU"),
]
DEVICE = "cuda"
NUM_REQUESTS = 5
WAYS = {
    "plain": (None, {}),
    "STANDALONE chain": ("STANDALONE", {"steps": 3}),
    "STANDALONE tree, pages": ("STANDALONE", {"steps": 3, "topk": 2, "num_draft_tokens": 7, "page_size": 4}),
    "EAGLE chain": ("EAGLE", {"steps": 2}),
    "EAGLE3 tree": ("EAGLE3", {"steps": 3, "topk": 3, "num_draft_tokens": 9}),
    "EAGLE3 adaptive": ("EAGLE3", {"adaptive": '{"1": {"candidate_steps": [0, 1, 3]}}'}),
    "MULTI_LAYER_EAGLE": ("MULTI_LAYER_EAGLE", {"steps": 2}),
    "NGRAM": (None, {"algorithm": "NGRAM", "steps": 4}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories by name: the target, and a draft of each kind."""
    root = tmp_path_factory.mktemp("models")
    heads = {name: write_head(root / name, name) for name in ("EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE")}
    return {"target": write_target(root / "target"), "STANDALONE": write_standalone(root / "standalone"), **heads}


def requests(sampling: SamplingParams | None = None, outputs: tuple[str, ...] = ()) -> list[Request]:
    """Prompts of several lengths, longer than a chunk too, and outputs that end at different times."""
    draws = np.random.default_rng(3)
    return [
        Request(
            str(i),
            Prompt.of_tokens(draws.integers(3, VOCAB_SIZE, 4 + 9 * i)),
            12 + 5 * i,
            sampling=sampling or SamplingParams(),
            outputs=outputs,
        )
        for i in range(NUM_REQUESTS)
    ]


def session_of(models, draft: str | None, **options) -> DecodeSession:
    known = {"device": DEVICE, "dtype": "float32", "chunk_size": 16, "max_running": 4, **options}
    return DecodeSession.open(SessionOptions(models["target"], models[draft] if draft else None, **known))


@pytest.fixture(scope="module")
def expected(models):
    """What plain decoding gives in float64 on the CPU."""
    return tokens_of(session_of(models, None, device="cpu", dtype="float64").run(requests()))


def tokens_of(outputs) -> dict[str, tuple[int, ...]]:
    return {name: output.tokens for name, output in outputs.items()}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_are_the_cpus(models, expected, way, overlap, graphs):
    draft, options = WAYS[way]
    session = session_of(models, draft, overlap=overlap, graphs=graphs, **options)
    assert tokens_of(session.run(requests())) == expected
    again = session.run([Request(f"again {r.request_id}", r.prompt, r.max_tokens) for r in requests()])
    assert tokens_of(again) == {f"again {name}": tokens for name, tokens in expected.items()}  # from the prefix cache


@pytest.mark.parametrize("way", ["STANDALONE chain", "EAGLE3 tree", "MULTI_LAYER_EAGLE"])
def test_debug_mode_finds_nothing(models, expected, way):
    draft, options = WAYS[way]
    assert tokens_of(session_of(models, draft, debug=True, **options).run(requests())) == expected


def test_graphs_change_no_draw(models):
    draft, options = WAYS["EAGLE3 tree"]
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11)
    drawn = [
        tokens_of(session_of(models, draft, graphs=graphs, **options).run(requests(sampling)))
        for graphs in (True, False)
    ]
    assert drawn[0] == drawn[1]


def test_logprobs_are_the_cpus(models):
    asked = requests(outputs=("logprobs",))
    found = session_of(models, "EAGLE3", steps=2, topk=2, num_draft_tokens=5).run(asked)
    exact = session_of(models, None, device="cpu", dtype="float64").run(asked)
    for name, output in found.items():
        assert output.tokens == exact[name].tokens
        np.testing.assert_allclose(output.logprobs, exact[name].logprobs, atol=1e-3)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "NGRAM"])
def test_launching_never_waits_for_the_device(models, way, graphs, monkeypatch):
    """With every shape seen once, no launch may synchronise: torch raises where one does. NGRAM waits by its nature."""
    draft, options = WAYS[way]
    session = session_of(models, draft, overlap=True, graphs=graphs, prefix_cache=False, **options)
    session.run(requests())
    launch, launched = session.executor.launch, []

    def watched(step):
        with raising_on_synchronisation():
            launch(step)
        launched.append((step.prefill is not None, step.decode is not None))

    monkeypatch.setattr(session.executor, "launch", watched)
    session.run([Request(f"again {r.request_id}", r.prompt, r.max_tokens) for r in requests()])
    assert any(prefill for prefill, _ in launched) and any(decode for _, decode in launched)


@contextlib.contextmanager
def raising_on_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
