"""Writes the trace of the tutorial, 30 minutes of an invented assistant's requests with a burst in the middle, or with
`--day` a day of the same assistant.

    python examples/tutorial/make_trace.py [FILE] [--day]

The columns are those of the Azure traces. Arrivals are Poisson at a rate that changes by the minute, lengths are
lognormal. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

SEED = 26
START = datetime(2026, 5, 4, 9, 0)
# Requests per second, one number for each minute.
RATES = [0.5] * 6 + [0.7] * 6 + [1.0, 1.8, 2.6, 2.6, 1.8, 1.0] + [0.8] * 6 + [0.6] * 6
RATES_OF_A_DAY = [
    rate
    for rate in (
        0.1,
        0.1,
        0.05,
        0.05,
        0.05,
        0.1,
        0.2,
        0.4,
        0.8,
        1.2,
        1.6,
        1.4,
        0.9,
        1.3,
        1.6,
        1.4,
        1.0,
        0.7,
        0.5,
        0.5,
        0.4,
        0.3,
        0.2,
        0.1,
    )
    for _ in range(60)
]
PROMPT = (700, 0.9, 16, 6000)  # median, standard deviation of the logarithm, least, greatest
OUTPUT = (220, 0.7, 8, 1200)


def length(draws: random.Random, median: float, sigma: float, least: int, greatest: int) -> int:
    """Draw a number of tokens."""
    return min(max(round(draws.lognormvariate(0.0, sigma) * median), least), greatest)


def rows(rates: Sequence[float]) -> list[str]:
    """Return the lines of the file, the heading first. `rates` has requests per second, one number for each minute."""
    draws = random.Random(SEED)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for minute, rate in enumerate(rates):
        second = draws.expovariate(rate)
        while second < 60.0:
            time = START + timedelta(minutes=minute, milliseconds=round(1000 * second))
            prompt, output = length(draws, *PROMPT), length(draws, *OUTPUT)
            lines.append(f"{time.isoformat(' ', 'milliseconds')},{prompt},{output}")
            second += draws.expovariate(rate)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path(__file__).with_name("requests.csv"))
    parser.add_argument("--day", action="store_true", help="24 hours instead of 30 minutes")
    given = parser.parse_args()
    text = "\n".join(rows(RATES_OF_A_DAY if given.day else RATES)) + "\n"
    given.file.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
