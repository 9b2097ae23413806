"""The table of a scenario that says what model runs: `[model]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from ...core.model_shape import KV_FORMATS
from ..cost.passes.tokens import EXPERT_INDEPENDENCE
from . import conditions as when
from .flags import (
    DTYPES,
    OTHER_DTYPE,
    OTHER_KV,
    OTHER_WEIGHTS,
    SGLANG_KV,
    SGLANG_WEIGHTS,
    STATES,
    TRTLLM_KV,
    VLLM_KV,
    VLLM_WEIGHTS,
    sglang,
    trtllm,
    vllm,
)
from .refusals import beyond_the_positions
from .table import Count, NoEffect, RefusedIf, ScenarioTable


class Model(ScenarioTable):
    target: Annotated[
        str,
        sglang("model-path|model N", by="model"),
        vllm("model N", by="model"),
        trtllm("model|model-path N", by="model"),
    ] = Field(
        default="llama-3.1-8b",
        description="built-in model, Hugging Face name or path of a config.json; the extra `measured` adds models",
    )
    weight_dtype: Annotated[
        str | None,
        sglang("quantization N", words=SGLANG_WEIGHTS, otherwise=OTHER_WEIGHTS, writes=False),
        sglang("dtype N", words=DTYPES, otherwise=OTHER_DTYPE, writes=False),
        vllm("quantization|q N", words=VLLM_WEIGHTS, otherwise=OTHER_WEIGHTS, writes=False),
        vllm("dtype N", words=DTYPES, otherwise=OTHER_DTYPE, writes=False),
        trtllm("dtype N", words=DTYPES, otherwise=OTHER_DTYPE, writes=False),
    ] = Field(
        default=None,
        description="bf16, fp16, fp8, int8, int4, nvfp4, mxfp4 or int4-g64 (bits, group size); default: the "
        "checkpoint's",
    )
    kv_dtype: Annotated[
        str | None,
        sglang("kv-cache-dtype N", words=SGLANG_KV, otherwise=OTHER_KV),
        vllm("kv-cache-dtype N", words=VLLM_KV, otherwise=OTHER_KV),
        trtllm("kv-cache-config.dtype N", words=TRTLLM_KV, otherwise=OTHER_KV),
    ] = Field(default=None, description=f"{', '.join(KV_FORMATS)}; default: the checkpoint's, else 16-bit")
    state_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        NoEffect(when.no_states),
        sglang("mamba-ssm-dtype N", words=STATES),
        vllm("mamba-ssm-cache-dtype N", "mamba-cache-dtype N", words=STATES),
        trtllm("kv-cache-config.mamba_ssm_cache_dtype N", words=STATES),
    ] = Field(
        default=None,
        description="format of recurrent states; default: as the model's files say, else the server's (vLLM bf16, others "
        "fp32)",
    )
    conv_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, NoEffect(when.no_states), vllm("mamba-cache-dtype N", words=STATES)
    ] = Field(default=None, description="format of the states of convolutions before recurrent layers; default: bf16")
    context_len: Annotated[
        Count | None,
        RefusedIf(beyond_the_positions, "target"),
        sglang("context-length N"),
        vllm("max-model-len N", form="integer", words={"auto": None, "-1": None}),
        trtllm("max-seq-len N", writes=False),
    ] = Field(default=None, description="context length in tokens; default: the model's own maximum")
    expert_independence: Annotated[float, Field(gt=0, le=1), NoEffect(when.experts_have_no_price)] = Field(
        default=EXPERT_INDEPENDENCE,
        description="experts that a further token of a request adds, as a share of those that an independent one adds",
    )
    draft: Annotated[
        str | None,
        NoEffect(when.no_draft_model),
        sglang("speculative-draft-model-path|speculative-draft-model|speculative-draft N", by="speculation"),
        vllm("speculative-config.model N", "spec-model N", by="speculation"),
        trtllm(
            "speculative-config.speculative_model N", "speculative-config.speculative_model_dir N", by="speculation"
        ),
    ] = Field(
        default=None,
        description="the draft: for STANDALONE a built-in model or a config.json, for heads their config.json",
    )
    draft_vocab: Annotated[Count, NoEffect(when.no_draft_vocabulary)] = Field(
        default=32_000, description="EAGLE-3: tokens in the head's reduced vocabulary, unless model.draft says"
    )

    @model_serializer(mode="wrap")
    def _without_states(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out formats of states that are not given, so that the headers of other logs stay what they are."""
        omitted = ("state_dtype", "conv_dtype")
        return {key: value for key, value in dump(self).items() if value is not None or key not in omitted}
