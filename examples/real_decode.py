"""Decode text with a trained pair: plainly, with each draft, with adaptive steps. Compare speed and check the text.

    foredraft tiny                      # trains the pair once, about a minute
    python examples/real_decode.py      # or with the pair's directory as its argument

Greedy decoding gives the same tokens with every draft. In float32 two nearly equal logits may change places when a pass
has another shape. The script therefore compares texts in float64. It measures speed in float32, on one thread and in
processor time.
"""

from __future__ import annotations

import argparse
import time
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
WARM_UPS, REPEATS = 1, 5  # turns
MOST_REPEATS = 0.5


@dataclass(frozen=True)
class DecodeWay:
    """One way to decode: a name, and the options of its session."""

    name: str
    options: SessionOptions


def ways(pair: Path, context_len: int) -> list[DecodeWay]:
    plain = SessionOptions(model=pair / "target", device="cpu", threads=1, context_len=context_len, prefix_cache=False)
    eagle3 = replace(plain, draft=pair / "eagle3", algorithm="EAGLE3")
    return [
        DecodeWay("plain", plain),
        DecodeWay("STANDALONE, chain of 3", replace(plain, draft=pair / "draft", algorithm="STANDALONE", steps=3)),
        DecodeWay("EAGLE-3, chain of 3", replace(eagle3, steps=3)),
        DecodeWay("EAGLE-3, tree of 8 (top-k 2)", replace(eagle3, steps=4, topk=2, num_draft_tokens=8)),
        DecodeWay("EAGLE-3, adaptive", replace(eagle3, adaptive="default")),
        DecodeWay(
            "multi-layer EAGLE, 2 heads",
            replace(plain, draft=pair / "multi_layer_eagle", algorithm="MULTI_LAYER_EAGLE", steps=2),
        ),
        DecodeWay("DFlash, block of 6", replace(plain, draft=pair / "dflash", algorithm="DFLASH")),
        DecodeWay("NGRAM", replace(plain, algorithm="NGRAM", steps=5)),
    ]


def share_of_repeats(texts: dict[str, str], session: DecodeSession) -> float:
    """Return how many of the texts' tokens are the one before once more."""
    rows = [session.tokenizer.encode(text) for text in texts.values()]
    pairs = [pair for row in rows for pair in pairwise(row)]
    return sum(before == after for before, after in pairs) / max(len(pairs), 1)


def run(session: DecodeSession, max_tokens: int) -> tuple[dict[str, str], float]:
    """Decode the prompts one at a time. Return texts by prompt, and output tokens per second of processor time, which
    other programs on the machine hardly change."""
    before, begun_s = session.stats().output_tokens, time.process_time()
    texts = {}
    for prompt in PROMPTS:
        request = Request(f"{before}: {prompt}", Prompt.of_tokens(session.tokenizer.encode(prompt)), max_tokens)
        texts[prompt] = session.run([request])[request.request_id].text
    return texts, (session.stats().output_tokens - before) / (time.process_time() - begun_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pair", nargs="?", type=Path, default=default_directory("tiny"), help="made by `foredraft tiny`"
    )
    parser.add_argument("--max-tokens", type=int, default=120)
    options = parser.parse_args()
    out, progress = Console(), Console(stderr=True)
    all_ways = ways(options.pair, context_len=options.max_tokens + 128)

    texts = {}
    for way in all_ways:
        with progress.status(f"{way.name}: the text in float64"):
            exact = DecodeSession.open(replace(way.options, dtype="float64"))
            texts[way.name], _ = run(exact, options.max_tokens)
    plain_texts = texts[all_ways[0].name]
    out.print(f"[bold]{PROMPTS[0]}[/bold]{plain_texts[PROMPTS[0]].rstrip()}", highlight=False)

    sessions = {way.name: DecodeSession.open(replace(way.options, dtype="float32")) for way in all_ways}
    rates: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(WARM_UPS + REPEATS):  # in turns: a change of the machine's speed is one of all ways
        for name, session in sessions.items():
            with progress.status(f"{name}: turn {turn + 1} of {WARM_UPS + REPEATS}"):
                rates[name].append(run(session, options.max_tokens)[1])
    table = Table(title=f"{options.pair}: float32, one request at a time, best of {REPEATS}")
    for column in ("way", "tokens per CPU second", "speed-up", "tokens per round", "float64 text"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, session in sessions.items():
        # What other programs take of caches and memory makes a turn slower, never faster: the best turns compare.
        rate, plain_rate = (max(rates[one][WARM_UPS:]) for one in (name, all_ways[0].name))
        same = "identical" if texts[name] == plain_texts else "DIFFERS"
        accept_length = session.stats().accept_length or 1.0
        table.add_row(name, f"{rate:.0f}", f"{rate / plain_rate:.2f}", f"{accept_length:.2f}", same)
    out.print(table)
    if different := [name for name in sessions if texts[name] != plain_texts]:
        raise SystemExit(f"{', '.join(different)}: the text differs from plain decoding")
    repeats = share_of_repeats(plain_texts, exact)
    if repeats > MOST_REPEATS:
        out.print(
            f"{repeats:.0%} of these tokens repeat the one before, which every draft foresees: the model has learnt too "
            "little for its speed-ups to mean anything.",
            highlight=False,
        )


if __name__ == "__main__":
    main()
