"""Acceptance processes to start from, each fitted to published statistics of real requests.

What was published, per preset, are probabilities of *rounds* of 5 steps, the correlation of successive rounds, the
spread of requests and mean accept lengths at several step counts (for n-gram drafting the first two). The shares
were chosen to meet correlation and spread, the probabilities of positions by `fit.calibrate` for outputs
of 300 tokens. The mean accept lengths at 1, 3 and 7 steps were not fitted; that they come out within 2 % is what
supports the mechanism.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError, Problem, nearest
from .process import GaussianAcceptance

_EAGLE_SOURCE = "statistics of published acceptance traces: 1,410 requests, EAGLE on Llama-3.1-8B, 5 steps; {}"
_NGRAM_SOURCE = "statistics of published acceptance traces: n-gram drafting on code for Llama-3.1-8B"


@dataclass(frozen=True, slots=True)
class AcceptancePreset:
    """A named process. `conditional` are averages over positions; `source` says which measurement it was fitted to."""

    name: str
    source: str
    conditional: tuple[float, ...]
    request_share: float
    field_share: float
    correlation_len: int

    def process(self, seed: int = 0) -> GaussianAcceptance:
        return GaussianAcceptance(self.conditional, seed, self.request_share, self.field_share, self.correlation_len)


PRESETS = {
    preset.name: preset
    for preset in (
        AcceptancePreset("chat", _EAGLE_SOURCE.format("chat"), (0.6829, 0.6467, 0.6849, 0.7210, 0.7496), 0.08, 0.28, 8),
        AcceptancePreset(
            "code", _EAGLE_SOURCE.format("code edits"), (0.7218, 0.7105, 0.7412, 0.7846, 0.7985), 0.08, 0.43, 8
        ),
        AcceptancePreset(
            "math", _EAGLE_SOURCE.format("mathematics"), (0.6756, 0.6639, 0.6622, 0.6610, 0.6582), 0.02, 0.10, 8
        ),
        AcceptancePreset("ngram-code", _NGRAM_SOURCE, (0.5936, 0.9440, 0.9411, 0.9372, 0.9308), 0.10, 0.80, 16),
    )
}


def acceptance_preset(name: str, seed: int = 0) -> GaussianAcceptance:
    """Return the process of this name. Raises ConfigError with the nearest known name."""
    if name not in PRESETS:
        message = f"{name!r}: expected {', '.join(PRESETS)}{nearest(name, PRESETS)}"
        raise ConfigError("<acceptance>", [Problem("preset", message)])
    return PRESETS[name].process(seed)
