"""Rotary position embeddings (Su et al., arXiv 2104.09864) as a table of cosines and sines, with the
published scalings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...core.parsing import ConfigReader
    from .families import ModelFamily

Scaling = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
SCALINGS: tuple[Scaling, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


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
    attention_factor: float = 1.0  # yarn, longrope: multiplies cosines and sines
    truncate: bool = True  # yarn: round the borders of the ramp to whole channels
    short_factors: tuple[float, ...] = ()  # longrope: of each pair of channels, within the original context
    long_factors: tuple[float, ...] = ()  # longrope: beyond it
    # Of a head's channels, the first ones, which are rotated; proportional: of its pairs.
    fraction: float = 1.0
    neighbours: bool = False  # published channels 2 i and 2 i + 1 are a pair, not i and i + half of the rotated ones
    mscale_all_dim: float = 0.0  # yarn: what latent attention scales its scores by, see `score_factor`
    query_beta: float = 0.0  # b: a query at position p is multiplied by 1 + b · ln(1 + ⌊p / original context⌋)

    @property
    def score_factor(self) -> float:
        """The factor of latent attention's scores: the square of YaRN's temperature (DeepSeek-V2's own code)."""
        return _temperature(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def rotated(self, head_dim: int) -> int:
        """Return how many channels of a head are rotated, some of them by nothing if that is proportional."""
        return head_dim if self.scaling == "proportional" else int(head_dim * self.fraction + 1e-6)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys `rope_theta` and, if scaled, `rope_scaling` of a config.json."""
        data: dict[str, Any] = {"rope_theta": self.theta}
        if self.fraction != 1.0 and self.scaling != "proportional":
            data["partial_rotary_factor"] = self.fraction
        if self.scaling == "default" and not self.query_beta:
            return data
        scaling: dict[str, Any] = {"rope_type": self.scaling, "factor": self.factor}
        if self.scaling not in ("linear", "dynamic", "proportional"):
            scaling["original_max_position_embeddings"] = self.original_max_position
        if self.scaling == "proportional":
            scaling["partial_rotary_factor"] = self.fraction
        if self.query_beta:
            scaling["llama_4_scaling_beta"] = self.query_beta
        if self.scaling == "longrope":
            factors = {"short_factor": list(self.short_factors), "long_factor": list(self.long_factors)}
            scaling |= {**factors, "attention_factor": self.attention_factor}
            data["original_max_position_embeddings"] = self.original_max_position
        if self.scaling == "llama3":
            scaling |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.scaling == "yarn":
            scaling |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
            scaling |= {"attention_factor": self.attention_factor, "truncate": self.truncate}
            if self.mscale_all_dim:
                scaling["mscale_all_dim"] = self.mscale_all_dim
        return {**data, "rope_scaling": scaling}


def read_ropes(
    reader: ConfigReader, max_positions: int, head_dim: int, family: ModelFamily
) -> tuple[Rope, Rope | None]:
    """Return the rotation of the model's layers, and that of those with a window where they have one of their own.

    From `rope_parameters` (one object, or one for each kind of layer), or from `rope_theta` beside `rope_scaling`.
    Problems go to the reader.
    """
    inner = reader.under("rope_parameters")
    if inner.get("full_attention") is not None:
        whole, local = (inner.under(kind) for kind in ("full_attention", "sliding_attention"))
        ropes = [_read_rope(reader, part, max_positions, head_dim, family) for part in (whole, local)]
        return ropes[0], ropes[1]
    if reader.get("rope_parameters") is None:
        inner = reader.under("rope_scaling")
    rope, key = _read_rope(reader, inner, max_positions, head_dim, family), family.local_rope_key
    if key is not None and reader.get(key) is not None:
        return rope, Rope(reader.number(key))
    return rope, Rope(rope.theta) if family.unscaled_windows and rope.scaling != "default" else None


def _read_rope(
    reader: ConfigReader, inner: ConfigReader, max_positions: int, head_dim: int, family: ModelFamily
) -> Rope:
    """Return a rotation with what the family's own kinds of it need."""
    rope = _read_scaled(reader, inner, max_positions)
    if rope.scaling == "proportional":
        rope = replace(rope, fraction=inner.number("partial_rotary_factor", 1.0))
    elif family.rotated_fraction is None:
        for holder in (reader, inner):
            if holder.number("partial_rotary_factor", 1.0) != 1.0:
                holder.problem("partial_rotary_factor", "this family rotates whole heads only (1.0)")
    else:
        fraction = reader.number("partial_rotary_factor", family.rotated_fraction)
        fraction = inner.number("partial_rotary_factor", fraction)
        rope = replace(rope, fraction=fraction, neighbours=family.rotates_neighbours)
        if not 0 < fraction <= 1 or rope.rotated(head_dim) % 2 or not rope.rotated(head_dim):
            inner.problem("partial_rotary_factor", f"must leave an even part of {head_dim} channels, got {fraction:g}")
    if family.scales_queries:
        original = inner.integer("original_max_position_embeddings")
        rope = replace(rope, query_beta=inner.number("llama_4_scaling_beta"), original_max_position=original)
    elif inner.get("llama_4_scaling_beta"):
        inner.problem("llama_4_scaling_beta", "this family's queries do not grow with their position")
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if factors and len(factors) != rope.rotated(head_dim) // 2:
            pairs = f"each of {rope.rotated(head_dim) // 2} pairs of channels"
            inner.problem(name, f"expected a number for {pairs}, found {len(factors)}")
    return rope


def _read_scaled(reader: ConfigReader, inner: ConfigReader, max_positions: int) -> Rope:
    theta = inner.number("rope_theta", reader.number("rope_theta", 10000.0))
    type_key = "rope_type" if inner.get("rope_type") is not None else "type"
    scaling = inner.get(type_key) or "default"
    if scaling == "su":  # what the first files called it
        scaling = "longrope"
    if scaling not in SCALINGS:
        inner.problem(type_key, f"{scaling!r} is none of {', '.join(SCALINGS)}")
        return Rope(theta)
    if scaling == "default":
        return Rope(theta)
    original = inner.integer(
        "original_max_position_embeddings",
        reader.integer("original_max_position_embeddings", max_positions),
    )
    if scaling == "proportional":
        factor = inner.number("factor", 1.0)
    elif scaling in ("yarn", "longrope") and inner.get("factor") is None:
        factor = max_positions / original
    else:
        factor = inner.number("factor")
    if scaling in ("linear", "proportional"):
        return Rope(theta, scaling, factor)
    if scaling == "dynamic":
        return Rope(theta, "dynamic", factor, max_positions)
    if scaling == "longrope":
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return Rope(
            theta,
            "longrope",
            factor,
            original,
            attention_factor=inner.number("attention_factor", default),
            short_factors=_numbers(inner, "short_factor"),
            long_factors=_numbers(inner, "long_factor"),
        )
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
        mscale_all_dim=inner.number("mscale_all_dim", 0.0) if inner.get("mscale_all_dim") else 0.0,
    )


def _numbers(reader: ConfigReader, key: str) -> tuple[float, ...]:
    found = reader.get(key)
    if not isinstance(found, list) or not found or not all(type(x) in (int, float) and x > 0 for x in found):
        reader.problem(key, f"must be a list of numbers above 0, got {found!r}")
        return ()
    return tuple(map(float, found))


def _attention_factor(reader: ConfigReader, factor: float) -> float:
    """Return the temperature of YaRN's attention, 0.1 ln(factor) + 1 unless the file says otherwise (arXiv
    2309.00071, eq. 22)."""
    mscale, mscale_all_dim = reader.get("mscale"), reader.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        default = _temperature(factor, reader.number("mscale"))
        default /= _temperature(factor, reader.number("mscale_all_dim"))
    else:
        default = _temperature(factor, 1.0)
    return reader.number("attention_factor", default)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def cos_sin_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the table float32 [num_positions, head_dim]: head_dim / 2 cosines, then as many sines;
    computed in float64. Channels that are not rotated have a cosine of 1."""
    if torch.device(device).type == "meta":
        # A table without values: making it as below would have torch load its compiler first, which takes seconds.
        return torch.empty((num_positions, head_dim), dtype=torch.float32, device=device)
    frequencies = inverse_frequencies(rope, head_dim, num_positions).to(device)
    positions = torch.arange(num_positions, dtype=torch.float64, device=device)
    angles = positions[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor
    kept = head_dim // 2 - len(frequencies)
    if kept:
        cos, sin = table.chunk(2, 1)
        cos, sin = torch.nn.functional.pad(cos, (0, kept), value=1.0), torch.nn.functional.pad(sin, (0, kept))
        table = torch.cat([cos, sin], dim=1)
    return table.to(torch.float32)


def unrotated_table(head_dim: int, num_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the table that turns nothing: one row for all positions."""
    row = torch.zeros(1, head_dim, dtype=torch.float32, device=device)
    row[:, : head_dim // 2] = 1.0
    return row.expand(num_positions, head_dim)


def query_factors(rope: Rope, num_positions: int, device: torch.device | str = "cpu") -> Tensor | None:
    """Return the factor of a query at each position, float32 [num_positions]; None where they all are 1."""
    if not rope.query_beta or num_positions <= rope.original_max_position:
        return None
    if torch.device(device).type == "meta":
        return torch.empty(num_positions, dtype=torch.float32, device=device)
    contexts = torch.arange(num_positions, device=device) // rope.original_max_position
    return (1 + rope.query_beta * contexts.double().log1p()).float()


def channel_order(rope: Rope, head_dim: int) -> list[int] | None:
    """Return which published channel of a head stands at each place of ours; None if all stand where they are
    published.

    The kernels turn place i against place i + head_dim / 2. A pair of published channels is put there when the weights
    are loaded, and the channels that are not rotated fill the other places. Products of queries and keys are the same
    in any order that both have.
    """
    rotated, half = rope.rotated(head_dim), head_dim // 2
    if rotated == head_dim and not rope.neighbours:
        return None
    turned = rotated // 2
    first = [2 * i for i in range(turned)] if rope.neighbours else list(range(turned))
    second = [i + 1 for i in first] if rope.neighbours else [i + turned for i in first]
    kept = list(range(rotated, head_dim))
    return [*first, *kept[: half - turned], *second, *kept[half - turned :]]


def inverse_frequencies(rope: Rope, head_dim: int, num_positions: int = 0) -> Tensor:
    """Return the radians per position of each pair of the d rotated channels, float64 [d / 2]: theta^(−2i / d), scaled.

    linear: all are divided by the factor (position interpolation, arXiv 2306.15595).
    proportional: so are they, and the last pairs do not turn (Gemma 4).
    dynamic: a table of n positions beyond the c of training has the base theta · (factor · n / c − factor + 1)^(d / (d
    − 2)) (arXiv 2309.00071, section 3.1, "NTK-aware", and 3.3).
    longrope: each is divided by a factor of its own, in a table beyond the original context by another one than within
    it (arXiv 2402.13753).
    llama3: divided where the wavelength is longer than the original context / low_freq_factor, unchanged where it is
    shorter than the context / high_freq_factor, and between these linear in 1 / wavelength (Llama 3.1's reference
    code).
    yarn: a linear ramp over the channels whose rotations over the original context are between beta_slow and beta_fast
    (arXiv 2309.00071, section 3.2, "NTK-by-parts").
    """
    head_dim = rope.rotated(head_dim)
    channels = torch.arange(0, head_dim, 2, dtype=torch.float64)
    theta = rope.theta
    if rope.scaling == "dynamic" and num_positions > rope.original_max_position:
        growth = rope.factor * num_positions / rope.original_max_position - (rope.factor - 1)
        theta *= growth ** (head_dim / (head_dim - 2))
    frequencies = theta ** -(channels / head_dim)
    if rope.scaling in ("default", "dynamic"):
        return frequencies
    if rope.scaling in ("linear", "proportional"):
        turning = channels < 2 * int(rope.fraction * head_dim // 2)
        return turning * frequencies / rope.factor
    if rope.scaling == "longrope":
        is_long = num_positions > rope.original_max_position
        return frequencies / torch.tensor(rope.long_factors if is_long else rope.short_factors, dtype=torch.float64)
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
