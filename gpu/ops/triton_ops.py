"""The device operations as Triton kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..batch.states import FusedRecurrence, TreeStates
from ..kernels.layers.decode_attention import decode_attention_triton
from ..kernels.layers.delta_nodes import MAX_NODES, delta_keep_triton_, delta_nodes_triton
from ..kernels.layers.delta_rule import recur_torch
from ..kernels.layers.experts import combine_torch, combine_triton, route_torch, route_triton
from ..kernels.layers.extend_attention import extend_attention_triton
from ..kernels.layers.products import coded_product_triton, expert_product_torch, expert_product_triton
from ..kernels.layers.rms_norm import add_rms_norm_torch, add_rms_norm_triton, rms_norm_torch, rms_norm_triton
from ..kernels.layers.rope_write import rope_write_triton
from ..kernels.layers.silu_mul import (
    gelu_mul_torch,
    sigmoid_mul_torch,
    sigmoid_mul_triton,
    silu_mul_torch,
    silu_mul_triton,
)
from ..kernels.layers.verify_attention import verify_attention_triton
from ..kernels.rounds.best import best_drafts_triton, best_tokens_triton
from ..kernels.rounds.bonus import gather_emitted_triton
from ..kernels.rounds.build_tree import build_chain_triton, build_tree_triton
from ..kernels.rounds.coins import coins_triton
from ..kernels.rounds.compact import compact_triton
from ..kernels.rounds.duplicate_tails import duplicate_tails_triton_
from ..kernels.rounds.move_kv import move_accepted_triton_, move_slots_triton_
from ..kernels.rounds.relay import relay_gather_triton, relay_scatter_triton_
from ..kernels.rounds.shape_logits import count_tokens_triton_, shape_logits_triton
from ..kernels.rounds.target_probs import target_probs_triton
from ..kernels.rounds.verify_chains import verify_chains_torch
from ..kernels.rounds.verify_greedy import verify_greedy_triton
from ..kernels.rounds.verify_sampling import verify_sampling_triton
from ..kernels.rounds.window import window_triton
from ..models.layer import run_layers
from ..types.coded import CodedWeight
from ..types.experts import Router
from ..types.recurrence import PassStates, RecurrentWeights, StateShape
from .tilings import tiling_for

DELTA_RULE = FusedRecurrence(delta_nodes_triton, delta_keep_triton_)


class TritonOps:
    """`Ops` with Triton kernels, on CUDA tensors; every method may be captured in a CUDA graph.

    Where a gradient is wanted, norms and gate are the differentiable twins.
    """

    run_layers = staticmethod(run_layers)
    build_chain = staticmethod(build_chain_triton)
    build_tree = staticmethod(build_tree_triton)
    window: Callable[..., tuple[Tensor, Tensor]] = staticmethod(window_triton)
    best_tokens: Callable[[Tensor], Tensor] = staticmethod(best_tokens_triton)
    best_drafts: Callable[..., Tensor] = staticmethod(best_drafts_triton)
    target_probs = staticmethod(target_probs_triton)
    verify_greedy = staticmethod(verify_greedy_triton)
    verify_sampling = staticmethod(verify_sampling_triton)
    verify_chains = staticmethod(verify_chains_torch)
    coins = staticmethod(coins_triton)
    shape_logits = staticmethod(shape_logits_triton)
    count_tokens_ = staticmethod(count_tokens_triton_)
    gather_emitted = staticmethod(gather_emitted_triton)
    compact = staticmethod(compact_triton)
    move_accepted_ = staticmethod(move_accepted_triton_)
    move_slots_ = staticmethod(move_slots_triton_)
    duplicate_tails_ = staticmethod(duplicate_tails_triton_)
    relay_gather = staticmethod(relay_gather_triton)
    relay_scatter_ = staticmethod(relay_scatter_triton_)
    rope_write = staticmethod(rope_write_triton)
    decode_attention = staticmethod(decode_attention_triton)
    verify_attention = staticmethod(verify_attention_triton)
    extend_attention = staticmethod(extend_attention_triton)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = rms_norm_torch if _needs_gradient(x, weight) else rms_norm_triton
        return norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        norm = add_rms_norm_torch if _needs_gradient(x, residual, weight) else add_rms_norm_triton
        return norm(x, residual, weight, eps)

    def recur(
        self, states: PassStates, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape
    ) -> Tensor:
        if isinstance(states, TreeStates) and states.width <= MAX_NODES:
            return states.run_fused(DELTA_RULE, layer, projected, weights, shape)
        return recur_torch(states, layer, projected, weights, shape)

    def coded_product(self, x: Tensor, weight: CodedWeight) -> Tensor:
        return coded_product_triton(x, weight, tiling_for(weight, x.shape[0], x.dtype))

    def expert_product(self, x: Tensor, weight: Tensor | CodedWeight, experts: Tensor, gated: bool = False) -> Tensor:
        is_trained = isinstance(weight, Tensor) and _needs_gradient(x, weight)
        return (expert_product_torch if is_trained else expert_product_triton)(x, weight, experts, gated)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return (sigmoid_mul_torch if _needs_gradient(x, gate) else sigmoid_mul_triton)(x, gate)

    def route(self, logits: Tensor, router: Router, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (route_torch if _needs_gradient(logits) else route_triton)(logits, router, bias, dtype)

    def combine(
        self,
        out: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        x: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        combined = combine_torch if _needs_gradient(out, weights) else combine_triton
        return combined(out, weights, shared, x, gate)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul_torch(gate_up) if _needs_gradient(gate_up) else silu_mul_triton(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return gelu_mul_torch(gate_up) if _needs_gradient(gate_up) else silu_mul_triton(gate_up, gelu=True)


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
