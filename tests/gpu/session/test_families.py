"""Sessions of every family in float64: speculation changes no text, and a draft that is the target itself
is always right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from foredraft.core.model_shape import MoeConfig
from foredraft.gpu.models import config as families
from foredraft.gpu.models.config import ModelConfig
from foredraft.gpu.models.rope import Rope
from foredraft.gpu.session.prompts import RequestDefaults, make_requests, read_prompts
from foredraft.gpu.session.session import DecodeSession, SessionOptions
from foredraft.gpu.session.text import Tokenizer
from small_checkpoint import SHAPE, write_target

WINDOWS = {"window": 6, "windowed_layers": (0, 2)}
GEMMA = {"activation": families.GELU_TANH, "attention_scale": 16**-0.5}
EXPERTS = MoeConfig(4, 2, 24, norm_topk_prob=True)
SHAPES: dict[str, dict] = {
    families.LLAMA: {},
    families.QWEN2: {"qkv_bias": True, "window": 6, "windowed_layers": (1, 2, 3)},
    families.QWEN3: {"qk_norm": True},
    families.QWEN3_MOE: {"qk_norm": True, "moe": EXPERTS},
    families.MISTRAL: {"window": 6, "windowed_layers": (0, 1, 2, 3)},
    families.MIXTRAL: {"moe": replace(EXPERTS, intermediate_size=64)},
    families.PHI3: {"window": 6, "windowed_layers": (0, 1, 2, 3)},
    families.GEMMA2: {**GEMMA, **WINDOWS, "attention_softcap": 3.0, "logit_softcap": 9.0, "tied_embeddings": True},
    families.GEMMA3: {**GEMMA, **WINDOWS, "local_rope": Rope(100.0), "qk_norm": True, "tied_embeddings": True},
    families.GPT_OSS: {
        **WINDOWS, "sinks": True, "moe": replace(EXPERTS, intermediate_size=64), "qkv_bias": True, "output_bias": True,
        "activation": families.CLAMPED_SWIGLU,
    },
    families.MIMO: {"qkv_bias": True},
}  # fmt: skip
LINES = ['{"prompt": "def add(a, b):", "max_tokens": 20}', '{"tokens": [5, 6, 7], "max_tokens": 12}']


def test_every_family_is_here():
    assert tuple(SHAPES) == families.ARCHITECTURES


# Whose layers compute what others' do not; the rest runs at night.
FAST = (families.MIXTRAL, families.GEMMA3, families.GPT_OSS)


@pytest.mark.parametrize(
    "architecture", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
def test_text_with_speculation_is_the_plain_text(architecture: str, tmp_path):
    shape: ModelConfig = replace(SHAPE, architecture=architecture, **SHAPES[architecture])
    target = write_target(tmp_path, shape)
    assert ModelConfig.from_directory(target) == shape, "the test runs another model than it writes"
    requests = make_requests(read_prompts(LINES, "f"), Tokenizer.load(target), RequestDefaults(), "f")

    def run(**options) -> tuple[list, float]:
        # One request alone goes through NumPy where the layers can, two through torch; chunks of 4 are shorter than the
        # windows.
        session = DecodeSession.open(SessionOptions(target, dtype="float64", chunk_size=4, **options))
        outputs = session.run(requests)
        alone = session.run([replace(requests[0], request_id="alone")])
        return [outputs, alone], session.stats().accept_length

    plain, _ = run()
    same, accept_length = run(draft=target, steps=3, topk=2, num_draft_tokens=8)
    assert same == plain
    assert accept_length > 3, "its own draft is always right, but for what a request's end cuts off"
