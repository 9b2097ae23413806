"""The mixer of recurrent layers: a gated delta net (Qwen3-Next, Qwen3.5) instead of attention over a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..types.attention import BatchAttention
from ..types.ops import Ops
from ..types.recurrence import RecurrentWeights
from .config import ModelConfig
from .projection import Projection
from .weights import NamedWeight, empty_weight, rows_of


class DeltaNet(nn.Module):
    """Projects its input to queries, keys, values, a gate of the output, and for each head how much the state decays
    and how much the token changes it. A short convolution and the state mix tokens (`kernels.layers.delta_rule`).

    `index` counts the model's recurrent layers. The rows of the one projection: q, k, v, gate, β, decay.
    """

    is_plain = False

    def __init__(
        self, config: ModelConfig, index: int, ops: Ops, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert config.state is not None
        self._index, self._shape = index, config.state
        self._is_published_fused = config.family.fused_states
        shape, wide = config.state, torch.promote_types(dtype, torch.float32)
        values = shape.heads * shape.value_dim
        self._parts = shape.projected
        self._input_weight = empty_weight(sum(self._parts), config.hidden_size, device=device, dtype=dtype)
        self._output_weight = empty_weight(config.hidden_size, values, device=device, dtype=dtype)
        self._conv_weight = empty_weight(shape.channels, shape.kernel, device=device, dtype=dtype)
        self._log_rate = empty_weight(shape.heads, device=device, dtype=wide)
        self._step_bias = empty_weight(shape.heads, device=device, dtype=wide)
        self._out_norm = empty_weight(shape.value_dim, device=device, dtype=dtype)
        # Plain attributes of the object, past the module's registry.
        self.projections: tuple[Projection, Projection] = (
            Projection(self._input_weight),
            Projection(self._output_weight, exchange=config.exchange),
        )
        self._small = RecurrentWeights(
            self._conv_weight, self._log_rate, self._step_bias, self._out_norm, config.rms_norm_eps
        )

    def run(self, x: Tensor, attention: BatchAttention, cos_sin: Tensor) -> Tensor:
        """Mix: x [n, H] → [n, H], without the residual."""
        project_input, project_output = self.projections
        mixed: Tensor = project_output(attention.recur(self._index, project_input(x), self._small, self._shape))
        return mixed

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        """Yield the weights with names below the layer's own prefix, as the family publishes them."""
        first, order = "linear_attn.", None
        if self._is_published_fused:
            rows = {"in_proj_qkvz": sum(self._parts[:2]), "in_proj_ba": sum(self._parts[2:])}
            order = self._fused_order()
        else:
            rows = dict(zip(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), self._parts, strict=True))
        rows = {first + name: size for name, size in rows.items()}
        keys = self._shape.key_heads * self._shape.key_dim
        channels = (keys, keys, self._parts[0] - 2 * keys)
        for weight in rows_of(self._input_weight, rows, "weight", order=order):
            is_stacked = weight.name == f"{first}in_proj_qkv.weight"
            yield replace(weight, fused=channels) if is_stacked else weight
        yield NamedWeight(f"{first}conv1d.weight", self._conv_weight.detach().unsqueeze(1), fused=channels)
        yield NamedWeight(f"{first}A_log", self._log_rate.detach())
        yield NamedWeight(f"{first}dt_bias", self._step_bias.detach())
        yield NamedWeight(f"{first}norm.weight", self._out_norm.detach())
        yield NamedWeight(f"{first}out_proj.weight", self._output_weight.detach())

    def _fused_order(self) -> Tensor:
        """Return which published row stands at each of ours. Published are, for each key head, its rows of q, k, v and
        gate, and behind all of them for each key head its rows of β and decay."""
        shape, group = self._shape, self._shape.heads // self._shape.key_heads
        wide = group * shape.value_dim
        first = torch.arange(sum(self._parts[:2])).view(shape.key_heads, -1)
        second = torch.arange(sum(self._parts[2:])).view(shape.key_heads, -1) + first.numel()
        parts = first.split_with_sizes((shape.key_dim, shape.key_dim, wide, wide), 1)
        return torch.cat([part.flatten() for part in (*parts, *second.split_with_sizes((group, group), 1))])
