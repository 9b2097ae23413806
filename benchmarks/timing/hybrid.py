"""Look-up with a model against each alone, on kinds of text that one of them foresees and on batches of both.

    python benchmarks/timing/hybrid.py [PAIR]

The pair is one of `foredraft tiny`. All sessions are in one process, on one thread, and take turns; tokens are counted
per second of processor time, and the median of the turns compares.

known     prompts whose output an earlier request got: greedy, so look-ups know the whole text
greedy    new prompts, greedy: the model's own text, which repeats itself in places
new       new prompts, sampled with another seed in every turn: hardly anything has occurred before
mixed     half of the rows are known, half are new
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from foredraft.cli.decode.tiny import default_directory
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.prompt import Prompt
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.tiny.corpus import HELD_OUT_EVERY, make_corpus
from foredraft.gpu.types.session_options import SessionOptions

ROWS, PROMPT_TOKENS, MAX_TOKENS = 2, 48, 64
WARM_UPS, TURNS = 1, 5
KINDS = ("known", "greedy", "new", "mixed")


@dataclass(frozen=True)
class Texts:
    """The prompts of a benchmark, as tokens."""

    known: list[list[int]]
    fresh: list[list[int]]

    def requests(self, kind: str, turn: int) -> list[Request]:
        """Return the requests of one turn; every turn has fresh prompts of its own."""
        fresh = self.fresh[turn * ROWS : (turn + 1) * ROWS]
        found = []
        for row in range(ROWS):
            is_known = kind == "known" or (kind == "mixed" and row % 2 == 0)
            prompt = self.known[row] if is_known else fresh[row]
            sampled = kind in ("new", "mixed") and not is_known
            sampling = SamplingParams(temperature=1.0, seed=1 + turn * ROWS + row) if sampled else SamplingParams()
            found.append(Request(f"{kind} {turn} {row}", Prompt.of_tokens(prompt), MAX_TOKENS, sampling=sampling))
        return found


def sessions_of(pair: Path) -> dict[str, DecodeSession]:
    shared = {
        "model": pair / "target", "device": "cpu", "threads": 1, "dtype": "float32", "prefix_cache": False,
        "context_len": PROMPT_TOKENS + MAX_TOKENS + 16, "max_running": ROWS,
    }  # fmt: skip
    ways = {
        "plain": {"algorithm": "NONE"},
        "SUFFIX": {"algorithm": "SUFFIX", "steps": 8},
        "EAGLE3": {"algorithm": "EAGLE3", "steps": 3, "draft": pair / "eagle3"},
        "HYBRID": {"algorithm": "HYBRID", "steps": 8, "draft": pair / "eagle3"},
    }
    return {name: DecodeSession.open(SessionOptions(**shared, **way)) for name, way in ways.items()}


def texts_for(session: DecodeSession, turns: int) -> Texts:
    """Return prompts from modules that no training has seen."""
    sources = make_corpus(HELD_OUT_EVERY * ROWS * (turns * len(KINDS) + 1)).held_out
    prompts = [session.tokenizer.encode(source)[:PROMPT_TOKENS] for source in sources]
    return Texts(prompts[:ROWS], prompts[ROWS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", nargs="?", type=Path, default=default_directory("tiny"))
    pair = parser.parse_args().pair
    sessions = sessions_of(pair)
    texts = texts_for(sessions["plain"], WARM_UPS + TURNS)
    rates: dict[tuple[str, str], list[float]] = {}
    for number, kind in enumerate(KINDS):
        for turn in range(WARM_UPS + TURNS):
            for name, session in sessions.items():
                requests = texts.requests(kind, turn + number * (WARM_UPS + TURNS))
                before, begun_s = session.stats().output_tokens, time.process_time()
                session.run(requests)
                rate = (session.stats().output_tokens - before) / (time.process_time() - begun_s)
                rates.setdefault((kind, name), []).append(rate)
    print("| text | plain | SUFFIX | EAGLE3 | HYBRID | HYBRID over the better |")
    print("| --- | --: | --: | --: | --: | --: |")
    for kind in KINDS:
        found = {name: median(rates[kind, name][WARM_UPS:]) for name in sessions}
        turns = zip(*(rates[kind, name][WARM_UPS:] for name in ("SUFFIX", "EAGLE3", "HYBRID")), strict=True)
        ratio = median(hybrid / max(suffix, eagle3) for suffix, eagle3, hybrid in turns)
        print(f"| {kind} | " + " | ".join(f"{rate:.0f}" for rate in found.values()) + f" | {ratio:.2f} |")


if __name__ == "__main__":
    main()
