"""Formats of the KV cache and of recurrent states: the bytes that each takes."""

from __future__ import annotations

import pytest
from foredraft.core.model_shape import (
    KV_FORMATS,
    LatentAttention,
    Recurrence,
    built_in_config,
    lookup_model,
    read_model_shape,
)


@pytest.mark.parametrize("form, each", [
    ("fp8", 8 * 256), ("nvfp4", 8 * (256 // 2 + 256 // 16)), ("mxfp8", 8 * (256 + 256 // 32)),
    ("int8_per_token_head", 8 * (256 + 8)), ("int4_per_token_head", 8 * (128 + 8)),
])  # fmt: skip
def test_kv_takes_the_bits_and_scales_of_its_format(form, each):
    """32 layers with 8 KV heads of 128."""
    assert lookup_model("llama-3.1-8b").with_dtypes(None, form).kv_bytes_per_token == 32 * each


@pytest.mark.parametrize("form, head", [
    ("turboquant_k8v4", 128 + 64 + 4), ("turboquant_4bit_nc", 64 + 2 + 64 + 4), ("turboquant_k3v4_nc", 48 + 2 + 64 + 4),
    ("turboquant_3bit_nc", 48 + 2 + 48 + 4), ("ultraquant_4bit", 2 * (64 + 4)),
])  # fmt: skip
def test_the_first_and_last_layers_of_rotated_formats_stay_wide(form, head):
    shape = lookup_model("llama-3.1-8b").with_dtypes(None, form)
    assert shape.kv_bytes_per_token == 28 * 8 * head + 4 * 8 * 256 * 2
    hybrid = lookup_model("qwen3-next-80b-a3b")  # 12 layers with 2 KV heads of 256
    assert hybrid.with_dtypes(None, "turboquant_4bit_nc").kv_bytes_per_token == 12 * 2 * (128 + 2 + 128 + 4)


@pytest.mark.parametrize("form, each", [
    ("bf16", 1152), ("fp8", 576), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352), ("nvfp4", 324),
])  # fmt: skip
def test_a_latent_takes_what_its_layout_says(form, each):
    latent = LatentAttention(128, 1536, 512, 128, 64, 128)
    (cache,) = latent.caches()
    assert KV_FORMATS[form].entry_bytes(cache) == each


def test_states_have_the_format_that_is_given_said_or_usual():
    shape = lookup_model("qwen3-next-80b-a3b")  # whose file does not say it
    elements = sum(n * one.state_elements for one, n in shape.mixers if isinstance(one, Recurrence))
    conv = shape.recurrent_state_bytes - 4 * elements
    assert shape.with_states(None, None, 2).recurrent_state_bytes == 2 * elements + conv
    assert shape.with_states(4, None, 2).recurrent_state_bytes == 4 * elements + conv
    assert shape.with_states(None, 4, 4).recurrent_state_bytes == 4 * elements + 2 * conv
    config = built_in_config("qwen3-next-80b-a3b")[1] | {"mamba_ssm_dtype": "float32"}
    said = read_model_shape(config, "config.json", "said")
    assert said.with_states(None, None, 2).recurrent_state_bytes == 4 * elements + conv
    assert said.with_states(2, None, 4).recurrent_state_bytes == 2 * elements + conv
