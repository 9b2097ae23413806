"""Ways to draft against each other on a pair of `foredraft tiny`: look-up with a model against each alone, or the
policy confidence against fixed numbers of steps.

    python benchmarks/timing/hybrid.py [PAIR]
    python benchmarks/timing/hybrid.py [PAIR] --confidence

All sessions are in one process, on one thread, and take turns; tokens are counted per second of processor time, and
the median of the turns compares.

known     prompts whose output an earlier request got: greedy, so look-ups know the whole text
greedy    new prompts, greedy: the model's own text, which repeats itself in places
new       new prompts, sampled with another seed in every turn: hardly anything has occurred before
mixed     half of the rows are known, half are new
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from foredraft.cli.decode.tiny import default_directory
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.prompt import Prompt
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.tiny.corpus import HELD_OUT_EVERY, make_corpus
from foredraft.gpu.types.session_options import SessionOptions

PROMPT_TOKENS, MAX_TOKENS = 48, 64
WARM_UPS, TURNS = 1, 5
KINDS = ("known", "greedy", "new", "mixed")
ROWS = 2
WAYS = {
    "plain": {"algorithm": "NONE"},
    "SUFFIX": {"algorithm": "SUFFIX", "steps": 8},
    "EAGLE3": {"algorithm": "EAGLE3", "steps": 3, "draft": "eagle3"},
    "HYBRID": {"algorithm": "HYBRID", "steps": 8, "draft": "eagle3"},
}
BATCHES = (1, 8, 32)
POLICY_WARM_UPS, POLICY_TURNS = 6, 7  # the policy learns what is accepted
POLICIES = {
    **{f"fixed {steps}": {"algorithm": "EAGLE3", "steps": steps, "draft": "eagle3"} for steps in range(6)},
    "confidence": {"algorithm": "EAGLE3", "policy": "confidence", "draft": "eagle3"},
}


@dataclass(frozen=True)
class Texts:
    """The prompts of a benchmark, as tokens, and how many rows a batch has."""

    known: list[list[int]]
    fresh: list[list[int]]
    rows: int

    def requests(self, kind: str, turn: int) -> list[Request]:
        """Return the requests of one turn; every turn has fresh prompts of its own."""
        fresh = self.fresh[turn * self.rows : (turn + 1) * self.rows]
        found = []
        for row in range(self.rows):
            is_known = kind == "known" or (kind == "mixed" and row % 2 == 0)
            prompt = self.known[row] if is_known else fresh[row]
            sampled = kind in ("new", "mixed") and not is_known
            sampling = SamplingParams(temperature=1.0, seed=1 + turn * self.rows + row) if sampled else SamplingParams()
            found.append(Request(f"{kind} {turn} {row}", Prompt.of_tokens(prompt), MAX_TOKENS, sampling=sampling))
        return found


def sessions_of(pair: Path, ways: dict[str, dict[str, Any]], rows: int) -> dict[str, DecodeSession]:
    shared = {
        "model": pair / "target", "device": "cpu", "threads": 1, "dtype": "float32", "prefix_cache": False,
        "context_len": PROMPT_TOKENS + MAX_TOKENS + 16, "max_running": rows,
    }  # fmt: skip
    drafts = {name: {"draft": pair / way["draft"]} if "draft" in way else {} for name, way in ways.items()}
    return {name: DecodeSession.open(SessionOptions(**shared, **way | drafts[name])) for name, way in ways.items()}


def texts_for(session: DecodeSession, rows: int, turns: int) -> Texts:
    """Return prompts from modules that no training has seen."""
    sources = make_corpus(HELD_OUT_EVERY * rows * (turns + 1)).held_out
    prompts = [session.tokenizer.encode(source)[:PROMPT_TOKENS] for source in sources]
    return Texts(prompts[:rows], prompts[rows:], rows)


def rates_of(
    sessions: dict[str, DecodeSession], turns: Iterable[list[Request]], warm_ups: int
) -> dict[str, list[float]]:
    """Return the tokens per second of each session in each turn behind the first `warm_ups`. Each turn begins with
    another session."""
    rates: dict[str, list[float]] = {name: [] for name in sessions}
    names = list(sessions)
    for number, requests in enumerate(turns):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            session = sessions[name]
            before, begun_s = session.stats().output_tokens, time.process_time()
            session.run(requests)
            rates[name].append((session.stats().output_tokens - before) / (time.process_time() - begun_s))
    return {name: found[warm_ups:] for name, found in rates.items()}


def show_hybrid(pair: Path) -> None:
    sessions, num_turns = sessions_of(pair, WAYS, ROWS), WARM_UPS + TURNS
    texts = texts_for(sessions["plain"], ROWS, num_turns * len(KINDS))
    print("| text | plain | SUFFIX | EAGLE3 | HYBRID | HYBRID over the better |")
    print("| --- | --: | --: | --: | --: | --: |")
    for number, kind in enumerate(KINDS):
        turns = (texts.requests(kind, turn + number * num_turns) for turn in range(num_turns))
        rates = rates_of(sessions, turns, WARM_UPS)
        each = zip(*(rates[name] for name in ("SUFFIX", "EAGLE3", "HYBRID")), strict=True)
        ratio = median(hybrid / max(suffix, eagle3) for suffix, eagle3, hybrid in each)
        print(f"| {kind} | " + " | ".join(f"{median(found):.0f}" for found in rates.values()) + f" | {ratio:.2f} |")


def show_confidence(pair: Path) -> None:
    print("| batch | " + " | ".join(POLICIES) + " | over the best fixed | verified | accept length |")
    print("| --: | " + "--: | " * (len(POLICIES) + 3))
    for rows in BATCHES:
        sessions, num_turns = sessions_of(pair, POLICIES, rows), POLICY_WARM_UPS + POLICY_TURNS
        texts = texts_for(sessions["confidence"], rows, num_turns)
        turns = (texts.requests("greedy", turn) for turn in range(num_turns))
        rates = {name: median(found) for name, found in rates_of(sessions, turns, POLICY_WARM_UPS).items()}
        ratio = rates["confidence"] / max(rate for name, rate in rates.items() if name != "confidence")
        stats = sessions["confidence"].stats()
        shown = " | ".join(f"{rate:,.0f}" for rate in rates.values())
        verified = stats.drafted / stats.verified_rows
        print(f"| {rows} | {shown} | {ratio:.3f} | {verified:.2f} | {stats.accept_length:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", nargs="?", type=Path, default=default_directory("tiny"))
    parser.add_argument("--confidence", action="store_true", help="the policy confidence against fixed steps")
    given = parser.parse_args()
    (show_confidence if given.confidence else show_hybrid)(given.pair)


if __name__ == "__main__":
    main()
