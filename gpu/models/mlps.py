"""The MLPs of layers: dense ones, and mixtures of experts in which each token goes to the top k of E experts.

There are two ways to the same sum. The first multiplies each token with the weights of its experts as it stands
(`Ops.expert_product`). On a GPU this is one kernel for all experts, which waits for nothing, so rounds take it, and
passes of few tokens. On a CPU it copies the weights of n · k experts, so it pays while 3 · n · k ≤ E. The second sorts
the tokens by expert and multiplies each expert's segment; long prompts take it, and on a CPU, where looking at the
segments' sizes is free, everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.model_shape import MoeConfig
from ..types.coded import CodedWeight
from ..types.experts import Router
from ..types.ops import Ops
from .config import ModelConfig
from .families import GELU_TANH, ExpertForm, Routing
from .projection import Projection
from .weights import NamedWeight, empty_matrix, empty_weight, rows_of

MAX_CHOICES = 2048  # of a pass outside of rounds on a GPU that goes to the experts as it stands
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
STACKED = "experts.gate_up_proj"  # the tensor of all experts' first projections, below a layer's MLP


class DenseMlp(nn.Module):
    """down(activation(gate(x)) · up(x)), gate and up in one projection."""

    def __init__(
        self, config: ModelConfig, ops: Ops, device: torch.device | str, dtype: torch.dtype, width: int | None = None
    ) -> None:
        """`width`: of an MLP beside experts, which exchanges its output together with them."""
        super().__init__()
        exchange = config.exchange if width is None else None
        self.activate = ops.gelu_mul if config.activation == GELU_TANH else ops.silu_mul
        self._is_published_fused = config.family.fused_gate_up
        width = width or config.intermediate_size
        matrix = partial(empty_matrix, device=device, dtype=dtype, kept=config.keeps_quantized)
        self.gate_up_weight: nn.Parameter = matrix(2 * width, config.hidden_size)
        self.down_weight: nn.Parameter = matrix(config.hidden_size, width)
        self.gate_up_bias = self.down_bias = None
        if config.mlp_bias:
            self.gate_up_bias = empty_weight(2 * width, device=device, dtype=dtype)
            self.down_bias = empty_weight(config.hidden_size, device=device, dtype=dtype)
        self.projections = (
            Projection(self.gate_up_weight, self.gate_up_bias, ops.coded_product),
            Projection(self.down_weight, self.down_bias, ops.coded_product, exchange),
        )

    def run(self, x: Tensor, in_round: bool = False) -> tuple[Tensor, None]:
        """Run the MLP: x [n, H] → [n, H], and no experts. It is the same in rounds and elsewhere."""
        gate_up, down = self.projections
        return down(self.activate(gate_up(x))), None

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        width = self.down_weight.shape[1]
        gate_up, fused = {"gate_proj": width, "up_proj": width}, None
        if self._is_published_fused:
            gate_up, fused = {"gate_up_proj": 2 * width}, (width, width)
        yield from rows_of(self.gate_up_weight, gate_up, "weight", fused=fused)
        yield NamedWeight("down_proj.weight", self.down_weight.detach())
        if self.gate_up_bias is not None and self.down_bias is not None:
            yield from rows_of(self.gate_up_bias, gate_up, "bias", fused=fused)
            yield NamedWeight("down_proj.bias", self.down_bias.detach())


@dataclass(frozen=True, slots=True)
class ExpertWays:
    """Which passes multiply tokens with their experts as these stand; all others sort the tokens first. A model has the
    one that suits its device."""

    max_choices: int  # experts of all tokens together, up to which a pass does
    in_rounds: bool  # rounds do, however many tokens they have

    @classmethod
    def on(cls, device: torch.device | str, num_experts: int) -> ExpertWays:
        """Return what suits `device`; "meta" stands for a GPU."""
        if torch.device(device).type == "cpu":
            return cls(num_experts // 3, in_rounds=False)
        # A grouped product may look at the groups' ends on the host, which no graph can hold.
        return cls(MAX_CHOICES, in_rounds=True)

    def as_they_stand(self, choices: int, in_round: bool) -> bool:
        return choices <= self.max_choices or (in_round and self.in_rounds)


class ExpertMlp(nn.Module):
    """Experts' gate and up projections in one tensor [E, 2 · I, H], down projections in another [E, H, I].

    gpt-oss has their rows in turns, gate, up, gate, …, biases of all, and a router with a bias. DeepSeek has an MLP for
    all tokens beside them, and V3 a bias of the choice alone.
    """

    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None
        self.ops, self.moe, self._form = ops, config.moe, config.family.experts or ExpertForm()
        self._is_stored_stacked = False
        num_experts, width, hidden = config.moe.num_experts, config.moe.intermediate_size, config.hidden_size
        self.ways: ExpertWays = ExpertWays.on(device, num_experts)
        self.router_weight: nn.Parameter = empty_weight(num_experts, hidden, device=device, dtype=dtype)
        matrix = partial(empty_matrix, device=device, dtype=dtype, kept=config.keeps_quantized)
        self.gate_up_weight: nn.Parameter = matrix(num_experts, 2 * width, hidden)
        self.down_weight: nn.Parameter = matrix(num_experts, hidden, width)
        self.router_bias = self.gate_up_bias = self.down_bias = None
        if self._form.packed:
            self.router_bias = empty_weight(num_experts, device=device, dtype=dtype)
            self.gate_up_bias = empty_weight(num_experts, 2 * width, device=device, dtype=dtype)
            self.down_bias = empty_weight(num_experts, hidden, device=device, dtype=dtype)
        self.choice_bias: nn.Parameter | None = None
        if self._form.routing is Routing.CORRECTED:
            wide = torch.promote_types(dtype, torch.float32)
            self.choice_bias = empty_weight(num_experts, device=device, dtype=wide)
        self.shared: DenseMlp | None = (
            DenseMlp(config, ops, device, dtype, config.moe.shared_size) if config.moe.shared_size else None
        )
        self.shared_gate: nn.Parameter | None = None
        if self.shared is not None and self._form.has_shared_gate:
            self.shared_gate = empty_weight(1, hidden, device=device, dtype=dtype)
        self._choice_bias, self._shared, self._shared_gate = self.choice_bias, self.shared, self.shared_gate
        self._router = (self.router_weight, self.router_bias)
        self._choice = _router_of(config.moe, self._form.routing)
        # Outputs of all ranks are added: one of them adds the bias.
        self.expert_projections = (
            ExpertProjection(self.gate_up_weight, self.gate_up_bias, ops),
            ExpertProjection(self.down_weight, self.down_bias if config.shard.rank == 0 else None, ops),
        )
        self._exchange = config.exchange
        self._activate = clamped_swiglu if self._form.packed else ops.silu_mul

    def run(self, x: Tensor, in_round: bool = False) -> tuple[Tensor, Tensor]:
        """Run the experts: x [n, H] → [n, H], and the chosen experts int64 [n, k], best first. `in_round`: see
        `Attention`."""
        weights, experts = self.route(x)
        if self.ways.as_they_stand(experts.numel(), in_round):
            out = self._as_they_stand(x, weights, experts, self._of_shared(x))
        else:
            out = self._sorted(x, weights, experts)
            if (shared := self._of_shared(x)) is not None:
                gate = self._shared_gate
                out = out + (shared if gate is None else shared * F.linear(x, gate).sigmoid())
        return out if self._exchange is None else self._exchange(out), experts

    def _of_shared(self, x: Tensor) -> Tensor | None:
        return None if self._shared is None else self._shared.run(x)[0]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (in x's dtype) and numbers of each token's experts, both [n, k]. Groups are chosen by scores
        in 32 bits at least, as DeepSeek V2 (arXiv 2405.04434, section 2.2.2) and V3 (arXiv 2412.19437, section 2.1.2)
        do."""
        weight, bias = self._router
        if self._form.routing is Routing.SOFTMAX:
            logits = F.linear(x, weight, bias)
        else:
            wide = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(wide), weight.to(wide))
        return self.ops.route(logits, self._choice, self._choice_bias, x.dtype)

    def _as_they_stand(self, x: Tensor, weights: Tensor, experts: Tensor, shared: Tensor | None = None) -> Tensor:
        gate_up, down = self.expert_projections
        inner = gate_up(x, experts)
        if self._form.packed:
            inner = clamped_swiglu(inner.flatten(0, 1)).unflatten(0, experts.shape)
        out = down(inner, experts, gated=not self._form.packed)
        return self.ops.combine(out, weights, shared, x, self._shared_gate)

    def _sorted(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        gate_up, down = self.expert_projections
        order = experts.flatten().argsort(stable=True)
        tokens = order // experts.shape[1]
        counts = torch.zeros(self.moe.num_experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, experts.flatten(), torch.ones_like(order))
        chosen = experts.flatten()[order]
        out = down.of_segments(self._activate(gate_up.of_segments(x[tokens], counts, chosen)), counts, chosen)
        out = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, tokens, out)

    def follow(self, names: Collection[str]) -> None:
        """Name the weights as a checkpoint with tensors of these names does."""
        self._is_stored_stacked = self._form.may_be_stacked and any(name.endswith(STACKED) for name in names)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        """Yield the weights with names below the layer's MLP:
        one tensor per expert and projection, or one for all experts."""
        if self.gate_up_bias is not None and self.down_bias is not None and self.router_bias is not None:
            yield NamedWeight("router.weight", self.router_weight.detach())
            yield NamedWeight("router.bias", self.router_bias.detach())
            yield NamedWeight(STACKED, self.gate_up_weight.detach().transpose(1, 2))
            yield NamedWeight("experts.gate_up_proj_bias", self.gate_up_bias.detach())
            yield NamedWeight("experts.down_proj", self.down_weight.detach().transpose(1, 2))
            yield NamedWeight("experts.down_proj_bias", self.down_bias.detach())
            return
        if self.choice_bias is not None:
            yield NamedWeight("gate.e_score_correction_bias", self.choice_bias.detach())
        if self.shared is not None:
            name = self._form.shared
            yield from (replace(w, name=f"{name}.{w.name}") for w in self.shared.checkpoint_weights())
        if self.shared_gate is not None:
            yield NamedWeight(f"{self._form.shared}_gate.weight", self.shared_gate.detach())
        gate, up, down = self._form.gate, self._form.up, self._form.down
        yield NamedWeight("gate.weight", self.router_weight.detach())
        if self._is_stored_stacked:
            yield NamedWeight(STACKED, self.gate_up_weight.detach())
            yield NamedWeight("experts.down_proj", self.down_weight.detach())
            return
        width = self.down_weight.shape[2]
        for i in range(self.moe.num_experts):
            gate_up = self.gate_up_weight.detach()[i]
            yield NamedWeight(f"experts.{i}.{gate}.weight", gate_up[:width])
            yield NamedWeight(f"experts.{i}.{up}.weight", gate_up[width:])
            yield NamedWeight(f"experts.{i}.{down}.weight", self.down_weight.detach()[i])


def _router_of(moe: MoeConfig, routing: Routing) -> Router:
    if routing is Routing.SOFTMAX:
        return Router(moe.top_k, normalized=moe.norm_topk_prob)
    return Router(
        moe.top_k, routing is Routing.CORRECTED, moe.num_groups, moe.top_groups, moe.norm_topk_prob, 1e-20, moe.scale
    )


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """Map [n, 2 · I] with gate and up in turns → [n, I]:
    (up + 1) · gate · sigmoid(1.702 gate), clamped to 7 (gpt-oss's own code)."""
    gate, up = gate_up[..., ::2].clamp(max=SWIGLU_LIMIT), gate_up[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)


class ExpertProjection:
    """The products with one matrix of each expert, [E, out, in], and their biases [E, out]."""

    __slots__ = ("_bias", "_ops", "coded", "parameter")

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops) -> None:
        self.parameter, self._bias, self._ops = weight, bias, ops
        self.coded: CodedWeight | None = None

    @property
    def nbytes(self) -> int:
        return self.parameter.nbytes if self.coded is None else self.coded.nbytes

    def keep(self, coded: CodedWeight) -> None:
        self.coded = coded

    def __call__(self, x: Tensor, experts: Tensor, gated: bool = False) -> Tensor:
        """Return the products of chosen experts, [n, k, out]; see `Ops.expert_product`."""
        out = self._ops.expert_product(x, self.parameter if self.coded is None else self.coded, experts, gated)
        return out if self._bias is None else out + self._bias[experts]

    def of_segments(self, x: Tensor, counts: Tensor, chosen: Tensor) -> Tensor:
        """Multiply segment e of x [m, in], counts[e] rows, with expert e, which `chosen` [m] names again: [m, out]."""
        out = _grouped_linear(x, self.parameter if self.coded is None else self.coded.dense(x.dtype), counts)
        return out if self._bias is None else out + self._bias[chosen]


def _grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply segment e of x, counts[e] rows, by weight[e] [out, in] transposed."""
    if x.is_cuda and x.dtype is not torch.float64 and hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    segments = x.split(counts.tolist())
    return torch.cat([F.linear(segment, weight[e]) for e, segment in enumerate(segments) if len(segment)])
