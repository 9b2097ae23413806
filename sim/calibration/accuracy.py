"""The errors of simulations against published measurements: the figures of docs/accuracy.md, as data of the package.

`accuracy.json` is made from the page's summary by `docs/refresh.py`, the page by `make accuracy`.
"""

from __future__ import annotations

from pathlib import Path

from ...core.parsing import read_json_object
from ...observe.input_files import read_text

FIGURES = Path(__file__).with_name("accuracy.json")
SPEED_UP, TIME_PER_TOKEN = "speculation: speed-up over plain", "plain: time per output token"
ROOFLINE, LEFT_OUT = "roofline", "left out"
SPEED_UP_BATCHES = (1, 8)
"""The requests at a time of the published speed-ups (benchmarks/published/rounds.csv)."""


def mean_error(of: str, column: str) -> float:
    """Return a mean absolute error as a share. `column`:
    ROOFLINE, "measured", or LEFT_OUT, fitted without the point's own model."""
    percent: float = read_json_object(str(FIGURES), read_text)["errors"][of][column]
    return percent / 100
