"""Attention and the sampler's filter by FlashInfer, where it is installed (the extra `flashinfer`): a second
implementation, to be compared with the kernels of this package.

All three attentions are calls of `BatchPrefillWithPagedKVCacheWrapper` with its backend fa2, over the pool in pages of
one slot. The new tokens of a pass are not read from the pool, in which some have no slot of their own: a second call
reads them from k and v, and the two results are joined by the logarithms of their sums. A tree, and a window over a
prefix, is a custom mask. FlashInfer's planner reads lengths on the host, so these operations wait for the device, and
no round is captured. What FlashInfer lacks is computed by the operations beside it (`lacking`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import ConfigError
from ...observe.distribution.install_hint import install_command
from ..kernels.padded import LastValue
from ..models.config import ModelConfig
from ..types.attention import E4M3, PLAIN, Softmax
from ..types.ops import DecodeBatch, ExtendBatch, KVTensors, Ops, VerifyBatch

HEAD_DIMS = (64, 128, 256)
"""Channels of a head with which the backend fa2 is used; it has no others that the families here have, but for 512."""
DTYPES = (torch.float16, torch.bfloat16)
WORKSPACE_BYTES = 256 << 20
"""Of the one workspace that all calls share, in which the parts of a long KV are kept until they are joined."""
WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"
ATTENTION = {
    WRAPPER: ("float_workspace_buffer", "kv_layout", "backend"),
    f"{WRAPPER}.plan": (
        *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads"),
        *("head_dim_qk", "page_size", "custom_mask", "causal", "sm_scale", "window_left", "logits_soft_cap"),
        *("q_data_type", "kv_data_type"),
    ),
    f"{WRAPPER}.run": ("q", "paged_kv_cache", "k_scale", "return_lse", "lse_base"),
}
"""What attention calls, and the parameters that it gives."""
FILTERS = {
    "top_k_renorm_probs": ("probs", "top_k", "is_deterministic"),
    "top_p_renorm_probs": ("probs", "top_p", "is_deterministic"),
}
"""The same of the sampler's filter."""


def find_flashinfer() -> ModuleType:
    """Import FlashInfer. Raises ConfigError, with the command that installs it, where it is not there."""
    try:
        import flashinfer
    except ImportError as error:
        message = f"flashinfer cannot be imported ({error}): {install_command('flashinfer')}"
        raise ConfigError.of("<arguments>", "ops", message) from None
    found: ModuleType = flashinfer
    return found


def missing_calls(flashinfer: ModuleType, calls: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the functions of `calls` that this version of FlashInfer lacks, and the parameters that they lack."""
    missing = []
    for name, parameters in calls.items():
        function: Any = flashinfer
        for part in name.split("."):
            function = getattr(function, part, None)
        if function is None:
            missing.append(name)
            continue
        known = inspect.signature(function).parameters
        missing += [f"{name}({one}=…)" for one in parameters if one not in known]
    return missing


def lacking(flashinfer: ModuleType, models: Iterable[ModelConfig], dtype: torch.dtype) -> list[str]:
    """Return sentences about what FlashInfer does not compute for these models, with the reason."""
    version = getattr(flashinfer, "__version__", "of an unknown version")
    of_attention, of_filter = missing_calls(flashinfer, ATTENTION), missing_calls(flashinfer, FILTERS)
    shapes = {shape for model in models for shape in model.kv_shapes}
    dims = {shape.key_dim if shape.value_dim == shape.key_dim else 0 for shape in shapes}
    named = [f"heads of {dim} channels" if dim else "latent vectors" for dim in sorted(dims - {*HEAD_DIMS})]
    sentences = []
    if of_attention:
        sentences.append(f"attention is not FlashInfer's: flashinfer {version} lacks {', '.join(of_attention)}")
    elif dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        sentences.append(f"attention is not FlashInfer's: it has none in {name}, only in float16 and bfloat16")
    elif named:
        sentences.append(f"attention over {' and '.join(named)} is not FlashInfer's, which has none of that kind")
    if of_filter:
        sentences.append(f"top-k and top-p are not FlashInfer's: flashinfer {version} lacks {', '.join(of_filter)}")
    return sentences


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """Which keys the n queries of B rows read: row b's queries q_starts[b] … q_starts[b + 1] − 1 its keys k_starts[b] …
    k_starts[b + 1] − 1."""

    q_starts: Tensor  # int32 [B + 1]
    k_starts: Tensor  # int32 [B + 1]
    slots: Tensor  # int32 [keys]: where each key lies
    seeing: Tensor  # bool [n]: the queries that see a key
    mask: Tensor | None = None  # bool [sum of queries · keys of each row]: what a query sees; None: all keys
    causal: bool = False  # query i of a row sees its keys up to the i-th of as many; without a mask
    window: int = 0  # and so many of these at most; 0: all


def key_ranges(firsts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the starts of ranges that lie one behind the other, int64 [B + 1], and of each number in them its range
    and itself, int64 [keys] both. Waits for the device."""
    counts = (ends - firsts).clamp(min=0)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    total = int(starts[-1])
    owners = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=total)
    return starts, owners, firsts[owners] + torch.arange(total, device=counts.device) - starts[owners]


def _greatest(counts: Tensor) -> int:
    return int(counts.max()) if len(counts) else 0


def masked(sees: Tensor, q_starts: Tensor, k_starts: Tensor, slots: Tensor) -> KeyLayout:
    """Return a layout with the mask `sees` bool [B, most queries, most keys], of which each row has its own part."""
    device = sees.device
    has_query, has_key = (
        torch.arange(size, device=device) < starts.diff().unsqueeze(1)
        for size, starts in ((sees.shape[1], q_starts), (sees.shape[2], k_starts))
    )
    sees = sees & has_key.unsqueeze(1)
    seeing, mask = sees.any(2)[has_query], sees[has_query.unsqueeze(2) & has_key.unsqueeze(1)]
    return KeyLayout(q_starts.int(), k_starts.int(), slots.int(), seeing, mask)


def unmasked(q_starts: Tensor, k_starts: Tensor, slots: Tensor) -> KeyLayout:
    """Return a layout in which a row's queries see all its keys."""
    seeing = (k_starts.diff() > 0).repeat_interleave(q_starts.diff())
    return KeyLayout(q_starts.int(), k_starts.int(), slots.int(), seeing)


def decode_layout(table: Tensor, rows: Tensor, bases: Tensor, tails: Tensor, lens: Tensor, window: int) -> KeyLayout:
    """Return what a `DecodeBatch` shows."""
    firsts = (lens - window).clamp(min=0) if window else torch.zeros_like(lens)
    starts, owners, places = key_ranges(firsts, lens)
    columns = torch.where(places < bases[owners], places, places + (tails - bases)[owners])
    return unmasked(torch.arange(len(rows) + 1, device=rows.device), starts, table[rows[owners], columns])


def prefix_layout(
    table: Tensor, rows: Tensor, prefix_lens: Tensor, q_starts: Tensor, depths: Tensor, window: int
) -> KeyLayout:
    """Return how new tokens see the prefixes of their rows. `depths` int64 [B, most new tokens of a row]: how far each
    is behind the prefix, 0 for the first."""
    firsts = (prefix_lens - (window - 1)).clamp(min=0) if window else torch.zeros_like(prefix_lens)
    starts, owners, columns = key_ranges(firsts, prefix_lens)
    slots = table[rows[owners], columns]
    if not window:
        return unmasked(q_starts, starts, slots)
    positions = firsts.unsqueeze(1) + torch.arange(_greatest(starts.diff()), device=rows.device)
    oldest = (prefix_lens - window).unsqueeze(1) + depths  # the last position that a token does not see
    return masked(positions.unsqueeze(1) > oldest.unsqueeze(2), q_starts, starts, slots)


def verify_layouts(
    table: Tensor, rows: Tensor, prefix_lens: Tensor, ancestor_bits: Tensor, window: int
) -> tuple[KeyLayout, KeyLayout]:
    """Return how the nodes of a `VerifyBatch` see the prefixes, and each other."""
    num_rows, num_nodes = ancestor_bits.shape
    sees = (ancestor_bits.unsqueeze(2) >> torch.arange(num_nodes, device=rows.device) & 1).bool()
    depths = sees.sum(2) - 1
    if window:
        sees &= depths.unsqueeze(2) - depths.unsqueeze(1) < window
    starts = torch.arange(num_rows + 1, device=rows.device) * num_nodes
    own = masked(sees, starts, starts, torch.arange(num_rows * num_nodes, device=rows.device))
    prefix = prefix_layout(table, rows, prefix_lens, starts, depths, window)
    return replace(prefix, seeing=prefix.seeing & (ancestor_bits != 0).flatten()), own


def extend_layouts(
    table: Tensor, rows: Tensor, prefix_lens: Tensor, starts: Tensor, window: int
) -> tuple[KeyLayout, KeyLayout]:
    """Return how the tokens of an `ExtendBatch` see the prefixes, and each other."""
    num_tokens, most = int(starts[-1]), _greatest(starts.diff())
    order = torch.arange(num_tokens, device=rows.device)
    depths = torch.arange(most, device=rows.device).expand(len(rows), -1)
    prefix = prefix_layout(table, rows, prefix_lens, starts, depths, window)
    seeing = torch.ones(num_tokens, dtype=torch.bool, device=rows.device)
    return prefix, KeyLayout(starts.int(), starts.int(), order.int(), seeing, causal=True, window=window)


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a call of FlashInfer is planned for, beside the keys that are read."""

    window: int
    softcap: float
    heads: tuple[int, int, int]  # of queries and of keys, and the channels of each
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


class PlannedCalls:
    """The calls of one attention, one for each of `forms`, planned for the batch that came last."""

    def __init__(self, forms: tuple[AttentionForm, ...], make_wrapper: Callable[[torch.device], Any]) -> None:
        self._forms, self._make_wrapper = forms, make_wrapper
        self._wrappers: dict[int, Any] = {}
        self._last = LastValue()
        self._layouts: tuple[KeyLayout, ...] = ()

    def plan(self, layouts_of: Callable[..., tuple[KeyLayout, ...]], tensors: tuple[Tensor, ...], window: int) -> None:
        """Plan for the layouts that `layouts_of` makes of a batch's tensors, unless that was done for another layer."""

        def planned(*given: Any) -> tuple[KeyLayout, ...]:
            layouts = layouts_of(*given)
            for place, keys in enumerate(layouts):
                if len(keys.slots):
                    self._plan_one(place, keys)
            return layouts

        self._layouts = self._last.of(planned, tensors, (window,))

    def _plan_one(self, place: int, keys: KeyLayout) -> None:
        """Plan one call. Its arrays are sent from memory that the next plan writes again, and by then they have been
        sent: making a layout waits for the device."""
        form, device = self._forms[place], keys.slots.device
        if place not in self._wrappers:
            self._wrappers[place] = self._make_wrapper(device)
        self._wrappers[place].plan(
            qo_indptr=keys.q_starts,
            paged_kv_indptr=keys.k_starts,
            paged_kv_indices=keys.slots,
            paged_kv_last_page_len=torch.ones(len(keys.k_starts) - 1, dtype=torch.int32, device=device),
            num_qo_heads=form.heads[0],
            num_kv_heads=form.heads[1],
            head_dim_qk=form.heads[2],
            page_size=1,
            custom_mask=keys.mask,
            causal=keys.causal,
            sm_scale=1.0,  # of layers whose KV has scales each has its own, see `run`
            window_left=keys.window - 1,  # −1: none
            logits_soft_cap=form.softcap,
            q_data_type=form.q_dtype,
            kv_data_type=form.kv_dtype,
        )

    def run(self, place: int, q: Tensor, kv: KVTensors, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """Return weighted sums of values [n, Hq, d] and the natural logarithms of the sums of weights [n, Hq]; 0 and −∞
        for a query that sees nothing, as those past the last row (padding)."""
        keys = self._layouts[place]
        if not len(keys.slots):
            return torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
        out, lse = self._wrappers[place].run(
            q=q[: len(keys.seeing)].contiguous(),
            paged_kv_cache=(kv.keys.unsqueeze(1), kv.values.unsqueeze(1)),
            k_scale=softmax.scale_of(q),
            return_lse=True,
            lse_base="ln",
        )
        seeing, more = keys.seeing.view(-1, 1), len(q) - len(keys.seeing)
        out, lse = torch.where(seeing.unsqueeze(2), out, 0.0), torch.where(seeing, lse, float("-inf"))
        return F.pad(out, (0, 0, 0, 0, 0, more)), F.pad(lse, (0, 0, 0, more), value=float("-inf"))


class FlashInferOps:
    """`Ops` of a device with attention and the sampler's filter by FlashInfer, and all else by the operations `own`.

    A plan is made once per forward pass and kept for its other layers.
    """

    def __init__(self, own: Ops, flashinfer: ModuleType) -> None:
        self._own = own
        self._flashinfer: Any = flashinfer
        self._has_attention = not missing_calls(flashinfer, ATTENTION)
        self._has_filters = not missing_calls(flashinfer, FILTERS)
        self._workspace: Tensor | None = None
        self._calls: dict[tuple[str, tuple[AttentionForm, ...]], PlannedCalls] = {}

    def __getattr__(self, name: str) -> Any:
        """Pass other operations through."""
        return getattr(self._own, name)

    # -- attention ------------------------------------------------------------------------------------------------

    def decode_attention(self, q: Tensor, kv: KVTensors, batch: DecodeBatch, softmax: Softmax = PLAIN) -> Tensor:
        if not self._attends(q, kv):
            return self._own.decode_attention(q, kv, batch, softmax)
        window = softmax.window_within(batch.max_len)
        calls = self._calls_of("decode", _form(q, kv, softmax, window))
        tensors = (batch.table, batch.rows, batch.bases, batch.tails, batch.lens)
        calls.plan(lambda *given: (decode_layout(*given),), tensors, window)
        return _joined(q, [calls.run(0, q, kv, softmax)], softmax)

    def verify_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: VerifyBatch, softmax: Softmax = PLAIN
    ) -> Tensor:
        if not self._attends(q, kv):
            return self._own.verify_attention(q, k, v, kv, batch, softmax)
        packing = batch.packing
        if packing is not None:
            q, k, v = map(packing.spread, (q, k, v))
        window = softmax.window_within(batch.max_prefix_len + batch.ancestor_bits.shape[1])
        tensors = (batch.table, batch.rows, batch.prefix_lens, batch.ancestor_bits)
        out = self._attend("verify", q, KVTensors(k, v), kv, softmax, window, verify_layouts, tensors)
        return out if packing is None else packing.pick(out)

    def extend_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: ExtendBatch, softmax: Softmax = PLAIN
    ) -> Tensor:
        if not self._attends(q, kv):
            return self._own.extend_attention(q, k, v, kv, batch, softmax)
        window = softmax.window_within(batch.max_prefix_len + batch.max_new_len)
        tensors = (batch.table, batch.rows, batch.prefix_lens, batch.starts)
        return self._attend("extend", q, KVTensors(k, v), kv, softmax, window, extend_layouts, tensors)

    def _attends(self, q: Tensor, kv: KVTensors) -> bool:
        """Return whether FlashInfer computes attention of these queries over such a pool."""
        head_dim, kv_dtype = q.shape[2], kv.keys.dtype
        is_known = q.dtype in DTYPES and kv_dtype in (q.dtype, E4M3) and head_dim in HEAD_DIMS
        return self._has_attention and is_known and kv.values.shape[-1] == head_dim and len(q) > 0

    def _attend(
        self,
        kind: str,
        q: Tensor,
        new: KVTensors,
        kv: KVTensors,
        softmax: Softmax,
        window: int,
        layouts_of: Callable[..., tuple[KeyLayout, KeyLayout]],
        tensors: tuple[Tensor, ...],
    ) -> Tensor:
        """Attend to the pool and to the `new` keys and values of the pass, and join both."""
        new = KVTensors(*(x.to(q.dtype).contiguous() for x in new))  # 8-bit numbers are exact in 16 bits
        calls = self._calls_of(kind, _form(q, kv, softmax, window), _form(q, new, softmax, window))
        calls.plan(layouts_of, tensors, window)
        return _joined(q, [calls.run(0, q, kv, softmax), calls.run(1, q, new, softmax)], softmax)

    def _calls_of(self, kind: str, *forms: AttentionForm) -> PlannedCalls:
        if (kind, forms) not in self._calls:
            self._calls[kind, forms] = PlannedCalls(forms, self._make_wrapper)
        return self._calls[kind, forms]

    def _make_wrapper(self, device: torch.device) -> Any:
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return getattr(self._flashinfer, WRAPPER)(self._workspace, kv_layout="NHD", backend="fa2")

    # -- the sampler's filter -------------------------------------------------------------------------------------

    def target_probs(
        self, logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool = True
    ) -> Tensor:
        """See `Ops`. FlashInfer keeps every token whose probability equals the last one that it keeps; of these the
        port keeps the first ones, so that the coin of a token points at the same one."""
        if not (filtered and self._has_filters) or logits.dtype == torch.float64:
            return self._own.target_probs(logits, temperature, top_p, top_k, filtered)
        probs = self._own.target_probs(logits, temperature, top_p, top_k, filtered=False)
        open_rows = (temperature > 0) & probs[:, 0].isfinite()
        rows = (open_rows & (top_k > 0) & (top_k < logits.shape[1])).nonzero().squeeze(1)
        if len(rows):
            most = top_k[rows]
            found = self._flashinfer.top_k_renorm_probs(probs=probs[rows], top_k=most.int(), is_deterministic=True)
            edge = _edge(found)
            probs[rows] = _trimmed(found, logits[rows], edge, most - ((found > 0) & ~edge).sum(1))
        rows = (open_rows & (top_p < 1.0)).nonzero().squeeze(1)
        if len(rows):
            before, share = probs[rows], top_p[rows].clamp(min=1e-6)
            found = self._flashinfer.top_p_renorm_probs(probs=before, top_p=share.float(), is_deterministic=True)
            edge = _edge(found)
            above = before.where((found > 0) & ~edge, 0.0).sum(1, dtype=torch.float64)
            each = before.where(edge, 0.0).amax(1).double()
            most = ((share * before.sum(1, dtype=torch.float64) - above) / each).ceil()
            probs[rows] = _trimmed(found, logits[rows], edge, most)
        return probs


def _form(q: Tensor, kv: KVTensors, softmax: Softmax, window: int) -> AttentionForm:
    heads = (q.shape[1], kv.keys.shape[1], q.shape[2])
    return AttentionForm(window, softmax.softcap, heads, q.dtype, kv.keys.dtype)


def _joined(q: Tensor, parts: list[tuple[Tensor, Tensor]], softmax: Softmax) -> Tensor:
    """Return the attention over the keys of all parts together, and over the sinks, which have no values."""
    lses = torch.stack([lse for _, lse in parts])
    peak = lses.amax(0).clamp(min=torch.finfo(lses.dtype).min)
    if softmax.sinks is not None:
        peak = torch.maximum(peak, softmax.sinks.to(peak.dtype))
    weights = (lses - peak).exp()
    total = weights.sum(0)
    if softmax.sinks is not None:
        total = total + (softmax.sinks.to(peak.dtype) - peak).exp()
    weights = weights / total.where(total > 0, 1.0)
    sums = sum(weight.unsqueeze(2) * out.to(weight.dtype) for weight, (out, _) in zip(weights, parts, strict=True))
    assert isinstance(sums, Tensor), "there is a part"
    return softmax.result(sums).to(q.dtype)


def _edge(found: Tensor) -> Tensor:
    """Return which tokens of filtered distributions [n, V] have the least probability of those that are kept."""
    least = found.where(found > 0, float("inf")).amin(1, keepdim=True)
    return found == least


def _trimmed(found: Tensor, logits: Tensor, edge: Tensor, most: Tensor) -> Tensor:
    """Return filtered distributions [n, V] with so many of the tokens at the `edge` as `most` [n] says: those with the
    greatest logits, of equal ones the lowest ids."""
    order = logits.masked_fill(~edge, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    kept = found.masked_fill(edge & (ranks >= most.unsqueeze(1)), 0.0)
    return kept / kept.sum(1, keepdim=True)
