"""Sessions on a GPU in debug mode and with log-probabilities;
`checks.selftest` has the others, which tests/gpu/selftest runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.gpu.session.plan import SessionOptions
from foredraft.gpu.session.session import DecodeSession
from small_checkpoint import VOCAB_SIZE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="decodes on the device: needs an NVIDIA GPU"),
]
DEVICE = "cuda"
NUM_REQUESTS = 5
WAYS = {
    "STANDALONE chain": ("STANDALONE", {"steps": 3}),
    "EAGLE3 tree": ("EAGLE3", {"steps": 3, "topk": 3, "num_draft_tokens": 9}),
    "MULTI_LAYER_EAGLE": ("MULTI_LAYER_EAGLE", {"steps": 2}),
}


def requests(outputs: tuple[str, ...] = ()) -> list[Request]:
    """Prompts of several lengths, longer than a chunk too, and outputs that end at different times."""
    draws = np.random.default_rng(3)
    return [
        Request(str(i), Prompt.of_tokens(draws.integers(3, VOCAB_SIZE, 4 + 9 * i)), 12 + 5 * i, outputs=outputs)
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


@pytest.mark.parametrize("way", WAYS)
def test_debug_mode_finds_nothing(models, expected, way):
    draft, options = WAYS[way]
    assert tokens_of(session_of(models, draft, debug=True, **options).run(requests())) == expected


def test_logprobs_are_the_cpus(models):
    asked = requests(outputs=("logprobs",))
    found = session_of(models, "EAGLE3", steps=2, topk=2, num_draft_tokens=5).run(asked)
    exact = session_of(models, None, device="cpu", dtype="float64").run(asked)
    for name, output in found.items():
        assert output.tokens == exact[name].tokens
        np.testing.assert_allclose(output.logprobs, exact[name].logprobs, atol=1e-3)
