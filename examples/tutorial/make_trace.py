"""Writes `requests.csv`, the trace of the tutorial: 30 minutes of an invented assistant's requests, with a burst in the
middle.

    python examples/tutorial/make_trace.py [FILE]

The columns are those of the Azure traces. Arrivals are Poisson at a rate that changes by the minute, lengths are
lognormal. The same seed writes the same bytes.
"""

from __future__ import annotations

import random
import sys
from datetime import datetime, timedelta
from pathlib import Path

SEED = 26
START = datetime(2026, 5, 4, 9, 0)
# Requests per second, one number for each minute.
RATES = [0.5] * 6 + [0.7] * 6 + [1.0, 1.8, 2.6, 2.6, 1.8, 1.0] + [0.8] * 6 + [0.6] * 6
PROMPT = (700, 0.9, 16, 6000)  # median, standard deviation of the logarithm, least, greatest
OUTPUT = (220, 0.7, 8, 1200)


def length(draws: random.Random, median: float, sigma: float, least: int, greatest: int) -> int:
    """Draw a number of tokens."""
    return min(max(round(draws.lognormvariate(0.0, sigma) * median), least), greatest)


def rows() -> list[str]:
    """Return the lines of the file, the heading first."""
    draws = random.Random(SEED)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for minute, rate in enumerate(RATES):
        second = draws.expovariate(rate)
        while second < 60.0:
            time = START + timedelta(minutes=minute, milliseconds=round(1000 * second))
            prompt, output = length(draws, *PROMPT), length(draws, *OUTPUT)
            lines.append(f"{time.isoformat(' ', 'milliseconds')},{prompt},{output}")
            second += draws.expovariate(rate)
    return lines


def main() -> None:
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("requests.csv")
    place.write_text("\n".join(rows()) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
