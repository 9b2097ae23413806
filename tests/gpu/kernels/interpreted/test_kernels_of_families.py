"""Sessions of every family with interpreted Triton kernels: the text is that of torch's operations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from family_shapes import SHAPES
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.session import devices
from foredraft.gpu.session.prompts import RequestDefaults, make_requests, read_prompts
from foredraft.gpu.session.session import DecodeSession, SessionOptions
from foredraft.gpu.session.text import Tokenizer
from foredraft.gpu.types.attention import Latent
from small_checkpoint import write_target

LINES = ['{"tokens": [7, 5, 6, 7, 9], "max_tokens": 6}', '{"tokens": [5, 6, 7], "max_tokens": 4}']
LATENT = replace(SHAPES["deepseek_v3"].rope, fraction=64 / 576)
WIDE = {
    "gemma4, heads of 512": replace(SHAPES["gemma4"], full_head_dim=512, num_layers=2, windowed_layers=(0,)),
    "deepseek_v3, keys of 576": replace(
        SHAPES["deepseek_v3"], head_dim=576, num_layers=2, rope=LATENT,
        latent=Latent(rank=512, rope_dim=64, nope_dim=6, value_dim=5, query_rank=16),
    ),
}  # fmt: skip


@pytest.mark.fast("deepseek_v3, keys of 576-fp8", ci="gemma4, heads of 512-auto")
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("label", [*SHAPES, *WIDE])
def test_kernels_decode_the_text_of_torch(label: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The draft is the target itself, as a tree: prefill, decode and verify over pages of 4 with branches."""
    target = write_target(tmp_path, (SHAPES | WIDE)[label])
    requests = make_requests(read_prompts(LINES, "f"), Tokenizer.load(target), RequestDefaults(), "f")
    options = SessionOptions(
        target, draft=target, steps=2, topk=2, num_draft_tokens=4, page_size=4, chunk_size=4, dtype="float32",
        kv_dtype=kv_dtype,
    )  # fmt: skip

    def run(ops: TorchOps | TritonOps) -> tuple[dict, float]:
        monkeypatch.setattr(devices, "ops_for", lambda device, name: ops)
        session = DecodeSession.open(options)
        return session.run(requests), session.stats().accept_length

    texts, accept_length = run(TritonOps())
    assert (texts, accept_length) == run(TorchOps())
    assert accept_length > 1.5
