"""ACCEPT-01 … ACCEPT-23: `rounds` judges verify trees and verdicts, `moves` what is moved and sampled behind them."""

from . import moves, rounds

__all__ = ["moves", "rounds"]
