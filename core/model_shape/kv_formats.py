"""Formats of the KV cache: the bytes that a token's entry takes in a layer.

    bf16, fp16          16 bits
    fp8                 8 bits; scales of the whole layer do not count
    mxfp8               8 bits and an 8-bit scale for each 32 elements
    nvfp4               4 bits and an 8-bit scale for each 16 elements
    fp8_ds_mla          latents of DeepSeek's sparse attention: 8 bits with a 32-bit scale for each 128 elements, rotary
                        elements in 16 bits: 656 bytes for 512 + 64
    nvfp4_ds_mla        the same latents in nvfp4, rotary elements in 8 bits: 352 bytes
    turboquant_…        keys and values in 3, 4 or 8 bits; per head and token 2 bytes for a key that is not FP8, 4 for a
                        value, together an even number
    ultraquant_4bit     4 bits and an 8-bit scale for each 32 elements
    …_per_token_head    8 or 4 bits, and 4 bytes each for a key and a value of a head

The forms are those of vLLM 0.33 (v1/attention/backends/mla/flashmla_sparse.py, model_executor/layers/quantization/
turboquant/config.py, v1/attention/ops/ultraquant/format.py, v1/attention/backends/triton_attn.py); mxfp8 is SGLang's.
Of models without recurrent layers turboquant and ultraquant keep the first two and the last two layers in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .layers import Cache

END_LAYERS = 2


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Bits of an element of keys and of values, scales of groups included.

    Attributes:
        head_bytes: What a token of a head takes beside its elements.
        latent: Bits of an element of a latent, and of its rotary part, where these differ.
        has_wide_ends: The first and last layers have 16 bits.
    """

    key_bits: float
    value_bits: float
    head_bytes: int = 0
    latent: tuple[float, float] | None = None
    has_wide_ends: bool = False

    def entry_bytes(self, cache: Cache) -> float:
        """Return the bytes of one entry of one head."""
        if cache.element_bytes is not None:
            return cache.width * cache.element_bytes
        if cache.is_latent:
            plain, rotary = self.latent or (self.key_bits, self.key_bits)
            return (cache.value_dim * plain + (cache.width - cache.value_dim) * rotary) / 8
        elements = (cache.key_dim * self.key_bits + (cache.width - cache.key_dim) * self.value_bits) / 8
        if not self.head_bytes:
            return elements
        return 2 * math.ceil((math.ceil(elements) + self.head_bytes) / 2)


def _turboquant(key_bits: int, value_bits: int) -> KVFormat:
    return KVFormat(key_bits, value_bits, 4 + (2 if key_bits < 8 else 0), has_wide_ends=True)


KV_FORMATS: Mapping[str, KVFormat] = {
    "bf16": KVFormat(16, 16),
    "fp16": KVFormat(16, 16),
    "fp8": KVFormat(8, 8),
    "mxfp8": KVFormat(8 + 8 / 32, 8 + 8 / 32),
    "nvfp4": KVFormat(4 + 8 / 16, 4 + 8 / 16),
    "fp8_ds_mla": KVFormat(8, 8, latent=(8 + 32 / 128, 16)),
    "nvfp4_ds_mla": KVFormat(4 + 8 / 16, 4 + 8 / 16, latent=(4 + 8 / 16, 8)),
    "turboquant_k8v4": _turboquant(8, 4),
    "turboquant_4bit_nc": _turboquant(4, 4),
    "turboquant_k3v4_nc": _turboquant(3, 4),
    "turboquant_3bit_nc": _turboquant(3, 3),
    "ultraquant_4bit": KVFormat(4 + 8 / 32, 4 + 8 / 32, has_wide_ends=True),
    "fp8_per_token_head": KVFormat(8, 8, 8),
    "int8_per_token_head": KVFormat(8, 8, 8),
    "int4_per_token_head": KVFormat(4, 4, 8),
}
"""Formats of the KV cache by name."""
