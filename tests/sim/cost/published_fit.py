"""The published linear fit of one deployment as a profile of measured tables."""

import numpy as np
from foretoken.sim.cost.calibration import KV_TOKENS, Calibration, StepTable


def line_table(base_ns: float, per_token_ns: float, per_kv_token_ns: float) -> StepTable:
    """Return the table of a pass that takes `base_ns + per_token_ns · tokens + per_kv_token_ns · KV tokens`."""
    tokens, kv_tokens = np.array([0.0, 1024.0]), np.array([0.0, float(1 << 20)])
    ns = base_ns + per_token_ns * tokens[:, None] + per_kv_token_ns * kv_tokens
    return StepTable((("tokens", tokens), (KV_TOKENS, kv_tokens)), ns)


_DRAFT_PASSES = 3
VLLM_H100_LLAMA_8B = Calibration(
    name="vllm-0.10-h100-llama-3.1-8b",
    source="arXiv 2601.11580, fit for vLLM 0.10.1, one H100, Llama-3.1-8B bf16, EAGLE with 3 steps",
    gpu="H100",
    model="llama-3.1-8b",
    draft_algorithm="EAGLE",
    tables={
        "target": line_table(5_886_000.0, 21_010.0, 39.3),
        # The fit is for three drafting passes together.
        "draft_pass": line_table(2_135_000.0 / _DRAFT_PASSES, 840.0 / _DRAFT_PASSES, 2.4 / _DRAFT_PASSES),
    },
)
