"""Decode text with a trained pair: plainly, with each draft, with adaptive steps. Compare speed and check the text.

    foredraft tiny                      # trains the pair once, some minutes
    python examples/real_decode.py      # or with the pair's directory as its argument

Greedy decoding gives the same tokens with every draft. In float32 two nearly equal logits may change places when a pass
has another shape. The script therefore compares texts in float64 and measures speed in float32.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from foredraft.cli.decode.tiny import default_directory
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.gpu.session.plan import SessionOptions
from foredraft.gpu.session.session import DecodeSession
from rich.console import Console
from rich.table import Table

PROMPTS = (
    "import os\nimport sys\n\ndef main(argv):\n",
    "class Connection:\n    def __init__(self, host, port):\n",
    'def read(self, size=-1):\n    """Read and return up to size bytes.\n',
    "    try:\n        value = self._cache[key]\n    except KeyError:\n",
)
REPEATS = 3
MOST_REPEATS = 0.5


@dataclass(frozen=True)
class Way:
    """One way to decode: a name, and the options of its session."""

    name: str
    options: SessionOptions


def ways(pair: Path, context_len: int) -> list[Way]:
    plain = SessionOptions(model=pair / "target", device="cpu", context_len=context_len, prefix_cache=False)
    eagle3 = replace(plain, draft=pair / "eagle3", algorithm="EAGLE3")
    return [
        Way("plain", plain),
        Way("STANDALONE, chain of 3", replace(plain, draft=pair / "draft", algorithm="STANDALONE", steps=3)),
        Way("EAGLE-3, chain of 3", replace(eagle3, steps=3)),
        Way("EAGLE-3, tree of 8 (top-k 2)", replace(eagle3, steps=4, topk=2, num_draft_tokens=8)),
        Way("EAGLE-3, adaptive", replace(eagle3, adaptive="default")),
        Way(
            "multi-layer EAGLE, 2 heads",
            replace(plain, draft=pair / "multi_layer_eagle", algorithm="MULTI_LAYER_EAGLE", steps=2),
        ),
        Way("NGRAM", replace(plain, algorithm="NGRAM", steps=5)),
    ]


def share_of_repeats(texts: dict[str, str], session: DecodeSession) -> float:
    """Return how many of the texts' tokens are the one before once more."""
    rows = [session.tokenizer.encode(text) for text in texts.values()]
    pairs = [pair for row in rows for pair in pairwise(row)]
    return sum(before == after for before, after in pairs) / max(len(pairs), 1)


def decode(way: Way, dtype: str, max_tokens: int, repeats: int) -> tuple[dict[str, str], float, float, float]:
    """Return texts by prompt, tokens per second (median of the repeats), tokens per round and request, and the share of
    tokens that repeat the one before.

    The prompts are decoded one at a time.
    """
    session = DecodeSession.open(replace(way.options, dtype=dtype))
    texts: dict[str, str] = {}
    rates = []
    for repeat in range(repeats):
        before = session.stats()
        for i, prompt in enumerate(PROMPTS):
            tokens = session.tokenizer.encode(prompt)
            request = Request(f"{i}.{repeat}", Prompt.of_tokens(tokens), max_tokens)
            texts[prompt] = session.run([request])[request.request_id].text
        after = session.stats()
        rates.append((after.output_tokens - before.output_tokens) / (after.seconds - before.seconds))
    repeats = share_of_repeats(texts, session)
    return texts, statistics.median(rates), session.stats().accept_length or 1.0, repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pair", nargs="?", type=Path, default=default_directory("tiny", 0, None), help="made by `foredraft tiny`"
    )
    parser.add_argument("--max-tokens", type=int, default=120)
    options = parser.parse_args()
    out, progress = Console(), Console(stderr=True)
    all_ways = ways(options.pair, context_len=options.max_tokens + 128)

    table = Table(title=f"{options.pair}: float32, one request at a time, median of {REPEATS}")
    for column in ("way", "tokens/s", "speed-up", "tokens per round", "float64 text"):
        table.add_column(column, justify="left" if column == "way" else "right")
    plain_rate, plain_texts, repeats = 0.0, {}, 0.0
    for way in all_ways:
        with progress.status(f"{way.name}: decoding"):
            _, rate, accept_length, _ = decode(way, "float32", options.max_tokens, REPEATS)
            texts, _, _, share = decode(way, "float64", options.max_tokens, 1)
        if way is all_ways[0]:
            plain_rate, plain_texts, repeats = rate, texts, share
            out.print(f"[bold]{PROMPTS[0]}[/bold]{texts[PROMPTS[0]].rstrip()}", highlight=False)
        same = texts == plain_texts
        table.add_row(
            way.name,
            f"{rate:.0f}",
            f"{rate / plain_rate:.2f}",
            f"{accept_length:.2f}",
            "identical" if same else "DIFFERS",
        )
        if not same:
            out.print(table)
            raise SystemExit(f"{way.name}: the text differs from plain decoding")
    out.print(table)
    if repeats > MOST_REPEATS:
        out.print(
            f"{repeats:.0%} of these tokens repeat the one before, which every draft foresees: the model has learnt too "
            "little for its speed-ups to mean anything. A larger --time-budget-s of `foredraft tiny` trains a better one.",
            highlight=False,
        )


if __name__ == "__main__":
    main()
