"""FlashInfer's calls that `FlashInferOps` makes, computed plainly in torch with the parameters of FlashInfer 0.7.4.

`module()` is what `import flashinfer` finds in a test. As the library does, it keeps of each row's keys what a mask of
one bit per query and key shows, forgets a plan with the next one, and refuses tensors of other dtypes than those that
were planned. `tests/gpu/ops/test_flashinfer_ops.py` compares the parameters with those of the library's wheel.
"""

from __future__ import annotations

import math
from collections import Counter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CALLS: Counter[str] = Counter()
"""How often each call was made."""


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False,
        max_total_num_rows=None,
    ) -> None:  # fmt: skip
        assert kv_layout == "NHD" and not use_cuda_graph and float_workspace_buffer.dtype == torch.uint8
        self._planned: dict[str, Any] | None = None

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, uniform_q_len=None,
        use_token_head_sf=False,
    ) -> None:  # fmt: skip
        CALLS["plan"] += 1
        columns = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(column.dtype == torch.int32 and column.dim() == 1 for column in columns)
        assert page_size == 1 and (paged_kv_last_page_len == 1).all(), "a page of one slot is full"
        assert num_qo_heads % num_kv_heads == 0 and len(qo_indptr) == len(paged_kv_indptr) > 1
        assert window_left < 0 or causal, "a window ends at the diagonal"
        queries, keys = qo_indptr.diff().tolist(), paged_kv_indptr.diff().tolist()
        masks = [torch.ones(q, k, dtype=torch.bool) for q, k in zip(queries, keys, strict=True)]
        if custom_mask is not None:
            sizes = [q * k for q, k in zip(queries, keys, strict=True)]
            assert custom_mask.dtype == torch.bool and custom_mask.shape == (sum(sizes),)
            parts = custom_mask.split(sizes)
            masks = [part.view(q, k) for part, q, k in zip(parts, queries, keys, strict=True)]
        elif causal:
            masks = [mask.tril(mask.shape[1] - mask.shape[0]) for mask in masks]
            if window_left >= 0:
                masks = [mask.triu(mask.shape[1] - mask.shape[0] - window_left) for mask in masks]
        self._planned = {
            "queries": queries, "masks": masks, "slots": paged_kv_indices.long().split(keys), "sm_scale": sm_scale,
            "softcap": logits_soft_cap or 0.0, "dtypes": (q_data_type, kv_data_type or q_data_type),
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
        }  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None, sinks=None,
        kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None,
    ):  # fmt: skip
        CALLS["run"] += 1
        planned = self._planned
        assert planned is not None, "run without a plan"
        k_cache, v_cache = paged_kv_cache
        heads, kv_heads, d = planned["heads"]
        assert (q.dtype, k_cache.dtype) == planned["dtypes"] and v_cache.dtype == k_cache.dtype
        assert q.shape == (sum(planned["queries"]), heads, d) and q.is_contiguous()
        assert k_cache.shape[1:] == v_cache.shape[1:] == (1, kv_heads, d)
        wide = torch.promote_types(q.dtype, torch.float32)
        scale = (1 / math.sqrt(d) if planned["sm_scale"] is None else planned["sm_scale"]) * (k_scale or 1.0)
        found, lses = [], []
        rows = zip(q.to(wide).split(planned["queries"]), planned["slots"], planned["masks"], strict=True)
        for queries, slots, mask in rows:
            keys, values = (
                cache[slots, 0].to(wide).repeat_interleave(heads // kv_heads, 1) for cache in (k_cache, v_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
            if planned["softcap"]:
                scores = (scores / planned["softcap"]).tanh() * planned["softcap"]
            scores = scores.masked_fill(~mask, float("-inf"))
            lses.append(scores.logsumexp(2).T)
            # What a query without keys gets is not said anywhere: here it is no number.
            found.append(torch.einsum("hqk,khd->qhd", scores.softmax(2), values) * (v_scale or 1.0))
        sums = torch.cat(found).to(q.dtype)
        if not return_lse:
            return sums
        base = {"log2": math.log(2), "ln": 1.0}[lse_base]
        return sums, torch.cat(lses) / base


def top_k_renorm_probs(probs, top_k, is_deterministic=False):
    CALLS["top_k"] += 1
    assert probs.dtype == torch.float32 and bool(((top_k > 0) & (top_k < probs.shape[1])).all())
    last = probs.sort(1, descending=True).values.gather(1, top_k.long().unsqueeze(1) - 1)
    return _renormalised(probs, last)


def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    CALLS["top_p"] += 1
    assert probs.dtype == torch.float32 and bool(((top_p > 0) & (top_p < 1)).all())
    ordered = probs.sort(1, descending=True).values
    reached = ordered.cumsum(1, dtype=torch.float64)
    enough = (reached < top_p.double().unsqueeze(1)).sum(1, keepdim=True).clamp(max=probs.shape[1] - 1)
    return _renormalised(probs, ordered.gather(1, enough))


def _renormalised(probs: Tensor, last: Tensor) -> Tensor:
    """Keep what is at least as likely as the last token, equal ones included. What becomes of a row that is no
    distribution is not said anywhere."""
    assert probs.isfinite().all()
    kept = probs.where(probs >= last, 0.0)
    return kept / kept.sum(1, keepdim=True)


def module(**instead: Any) -> ModuleType:
    """Return the stand-in as a module; `instead`: names with other values, None for what a version lacks."""
    made = ModuleType("flashinfer")
    names = {
        "__version__": "0.7.4", "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
        "top_k_renorm_probs": top_k_renorm_probs, "top_p_renorm_probs": top_p_renorm_probs,
    }  # fmt: skip
    vars(made).update(names | instead)
    return made
