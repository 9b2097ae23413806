"""Rotary position embeddings (Su et al., arXiv 2104.09864) as a table of cosines and sines, with the
published scalings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...core.parsing import ConfigReader

Scaling = Literal["default", "linear", "llama3", "yarn"]
SCALINGS: tuple[Scaling, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Base and scaling; fields that a scaling does not use stay at their defaults."""

    theta: float = 10000.0
    scaling: Scaling = "default"
    factor: float = 1.0  # how much longer the context has become
    original_max_position: int = 0  # the context of pre-training, tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations over the original context from which on a channel stays as it was
    beta_slow: float = 1.0  # yarn: rotations below which a channel is interpolated
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines
    truncate: bool = True  # yarn: round the borders of the ramp to whole channels

    def to_dict(self) -> dict[str, Any]:
        """Return the keys `rope_theta` and, if scaled, `rope_scaling` of a config.json."""
        if self.scaling == "default":
            return {"rope_theta": self.theta}
        scaling: dict[str, Any] = {"rope_type": self.scaling, "factor": self.factor}
        if self.scaling != "linear":
            scaling["original_max_position_embeddings"] = self.original_max_position
        if self.scaling == "llama3":
            scaling |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.scaling == "yarn":
            scaling |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
            scaling |= {"attention_factor": self.attention_factor, "truncate": self.truncate}
        return {"rope_theta": self.theta, "rope_scaling": scaling}


def read_ropes(reader: ConfigReader, max_position_embeddings: int) -> tuple[Rope, Rope | None]:
    """Return the rotation of the model's layers, and that of those with a window where the file has one for them (Gemma
    3).

    From `rope_parameters` (one object, or one for each kind of layer), or from `rope_theta` beside `rope_scaling`.
    Problems go to the reader.
    """
    inner = reader.under("rope_parameters")
    if inner.get("full_attention") is not None:
        whole, local = (inner.under(kind) for kind in ("full_attention", "sliding_attention"))
        return _read_rope(reader, whole, max_position_embeddings), _read_rope(reader, local, max_position_embeddings)
    if reader.get("rope_parameters") is None:
        inner = reader.under("rope_scaling")
    local_theta = reader.get("rope_local_base_freq")
    local = None if local_theta is None else Rope(reader.number("rope_local_base_freq"))
    return _read_rope(reader, inner, max_position_embeddings), local


def _read_rope(reader: ConfigReader, inner: ConfigReader, max_position_embeddings: int) -> Rope:
    theta = inner.number("rope_theta", reader.number("rope_theta", 10000.0))
    type_key = "rope_type" if inner.get("rope_type") is not None else "type"
    scaling = inner.get(type_key) or "default"
    for holder in (reader, inner):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            holder.problem("partial_rotary_factor", "only whole heads are rotated here (1.0)")
    if scaling not in SCALINGS:
        inner.problem(type_key, f"{scaling!r} is none of {', '.join(SCALINGS)}")
        return Rope(theta)
    if scaling == "default":
        return Rope(theta)
    original = inner.integer(
        "original_max_position_embeddings",
        reader.integer("original_max_position_embeddings", max_position_embeddings),
    )
    if scaling == "yarn" and inner.get("factor") is None:
        factor = max_position_embeddings / original
    else:
        factor = inner.number("factor")
    if scaling == "linear":
        return Rope(theta, "linear", factor)
    if scaling == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if high <= low and not reader.problems:
            inner.problem("high_freq_factor", f"must be greater than low_freq_factor ({low:g}), got {high:g}")
        return Rope(theta, "llama3", factor, original, low, high)
    return Rope(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        attention_factor=_attention_factor(inner, factor),
        truncate=inner.flag("truncate", True),
    )


def _attention_factor(reader: ConfigReader, factor: float) -> float:
    """Return the temperature of YaRN's attention, 0.1 ln(factor) + 1 unless the file says otherwise (arXiv
    2309.00071, eq. 22)."""

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = reader.get("mscale"), reader.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        default = temperature(reader.number("mscale")) / temperature(reader.number("mscale_all_dim"))
    else:
        default = temperature(1.0)
    return reader.number("attention_factor", default)


def cos_sin_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the table float32 [num_positions, head_dim]: head_dim / 2 cosines, then as many sines;
    computed in float64."""
    if torch.device(device).type == "meta":
        # A table without values: making it as below would have torch load its compiler first, which takes seconds.
        return torch.empty((num_positions, head_dim), dtype=torch.float32, device=device)
    frequencies = inverse_frequencies(rope, head_dim).to(device)
    positions = torch.arange(num_positions, dtype=torch.float64, device=device)
    angles = positions[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    return (table * rope.attention_factor).to(torch.float32)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the radians per position of each pair of channels, float64 [head_dim / 2]: theta^(−2i / d), scaled.

    linear: all are divided by the factor (position interpolation, arXiv 2306.15595).
    llama3: divided where the wavelength is longer than the original context / low_freq_factor, unchanged where it is
    shorter than the context / high_freq_factor, and between these linear in 1 / wavelength (Llama 3.1's reference
    code).
    yarn: a linear ramp over the channels whose rotations over the original context are between beta_slow and beta_fast
    (arXiv 2309.00071, section 3.2, "NTK-by-parts").
    """
    channels = torch.arange(0, head_dim, 2, dtype=torch.float64)
    frequencies = rope.theta ** -(channels / head_dim)
    if rope.scaling == "default":
        return frequencies
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        rotations = rope.original_max_position * frequencies / (2 * math.pi)
        kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:
        low, high = _channel_of(rope, head_dim, rope.beta_fast), _channel_of(rope, head_dim, rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        # An empty ramp is a step; the small width keeps the division defined.
        kept = 1 - (channels / 2 - low) / (high - low if high != low else 0.001)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _channel_of(rope: Rope, head_dim: int, rotations: float) -> float:
    """Return the channel pair that turns `rotations` times over the original context (the formula of the
    frequencies, inverted)."""
    return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
