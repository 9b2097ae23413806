"""How sure simulated drafts are of themselves.

A draft's confidence (the probability that it gives its own first choice) is a noisy view of the quality:

    signal(r, x)  = √c · quality(r, x) + √(1 − c) · n(r, x)          c = CONFIDENCE_SHARE, n standard normal
    p(d)          = P(quality > t(d)) / P(quality > t(d − 1)), given the signal
    confidence(d) = the number whose log-odds x satisfy  p(d) = sigmoid(CONFIDENCE_SLOPE · x + CONFIDENCE_BIAS)

So confidences correlate with acceptance and with each other as the quality does, and their calibration curve is known
exactly (without shifts). Share and curve are assumptions; drafts are known to be too sure, hence a slope below 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CONFIDENCE_SHARE = 0.5
CONFIDENCE_SLOPE, CONFIDENCE_BIAS = 0.7, -0.3


def confidence_of(quality: np.ndarray, noise: np.ndarray, thresholds: Sequence[float], steps: int) -> np.ndarray:
    """Return confidences, float32 [n, steps], of rounds with this quality; `noise` [n] is standard normal, and the
    drafts of depth d are accepted where the quality exceeds `thresholds[d − 1]`."""
    share = CONFIDENCE_SHARE
    signal = share**0.5 * quality + (1 - share) ** 0.5 * noise
    reached = np.full(steps, np.inf)
    reached[: len(thresholds)] = thresholds[:steps]
    survival = _upper_tail((reached - share**0.5 * signal[:, None]) / (1 - share) ** 0.5)
    before = np.concatenate([np.ones((len(quality), 1)), survival[:, :-1]], axis=1)
    accepted = np.clip(survival / np.maximum(before, 1e-300), 1e-9, 1 - 1e-9)
    odds = (np.log(accepted / (1 - accepted)) - CONFIDENCE_BIAS) / CONFIDENCE_SLOPE
    confidences: np.ndarray = (1 / (1 + np.exp(-odds))).astype(np.float32)
    return confidences


def _upper_tail(z: np.ndarray) -> np.ndarray:
    """Return the probability that a standard normal number exceeds z, within 1e-7 (Abramowitz and Stegun, 26.2.17)."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    with np.errstate(under="ignore"):
        tail = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi) * poly
    tail = np.where(np.isinf(z), 0.0, tail)
    upper: np.ndarray = np.where(z >= 0, tail, 1 - tail)
    return upper
