"""Fits the acceptance presets to published mean accept lengths, and prints them as `core/acceptance/presets.py` has
them.

    python benchmarks/acceptance_presets.py [--check]

The statistics are in published/acceptance.csv. Chains: two parameters, logit p(d) = a + b · log d (one if a single
chain was published: `FALLS`), by Gauss-Newton on simulated rounds. Trees: one parameter, the draft's confidence.
`--check` prints the error of each row instead.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from foredraft.core.acceptance.fit import simulate_rounds
from foredraft.core.acceptance.presets import PRESETS, AcceptancePreset
from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.core.contract.step import RoundShape
from points import read_rows

DEPTHS = 8
TAILS = {
    ("NGRAM", "edit"): (0.914, 0.946, 0.971, 0.971)
}  # after the first: published for the rounds that found something
SHARES = {"chat": (0.08, 0.28, 8), "code": (0.08, 0.43, 8), "math": (0.02, 0.10, 8)}
LOOKUP_SHARES = (0.10, 0.80, 16)
FALLS = {"MTP": -0.34}
"""How log-odds fall with log depth where a single chain was published. Assumption: as of Qwen3.5's layer on code."""
Row = tuple[int, int, int, float]  # steps, topk, nodes, accept length


def published() -> dict[tuple[str, str, str], list[Row]]:
    """Return the rows of each (algorithm, family, text)."""
    rows = defaultdict(list)
    for row in read_rows("acceptance.csv"):
        shape = int(row["steps"]), int(row["topk"]), int(row["num_draft_tokens"]), float(row["accept_length"])
        rows[row["algorithm"], row["family"], row["text"]].append(shape)
    return dict(rows)


def accept_length(process: GaussianAcceptance, steps: int, topk: int, nodes: int) -> float:
    """Return the mean over rounds of 512 requests of 300 tokens."""
    shaped = process if topk == 1 else process.for_tree(RoundShape(steps, topk, nodes))
    lens = simulate_rounds(shaped, steps, 512, 300)
    return float(lens.sum() / np.count_nonzero(lens))


def errors(process: GaussianAcceptance, rows: list[Row]) -> np.ndarray:
    """Return simulated over published length, less 1, per row."""
    return np.array([accept_length(process, *shape) / length - 1 for *shape, length in rows])


def fit(algorithm: str, text: str, rows: list[Row]) -> GaussianAcceptance:
    """Fit a process to the rows of one preset."""
    chains, trees = ([row for row in rows if (row[1] > 1) is tree] for tree in (False, True))
    tail = TAILS.get((algorithm, text), PRESETS["ngram-code"].conditional[1:]) if algorithm == "NGRAM" else None
    base = GaussianAcceptance((0.5,), 0, *(LOOKUP_SHARES if tail else SHARES[text]))

    def of(point: np.ndarray) -> GaussianAcceptance:
        if tail:
            return replace(base, conditional=(1 / (1 + np.exp(-point[0])), *tail))
        return replace(
            base, conditional=tuple(1 / (1 + np.exp(-point[0] - point[1] * np.log(np.arange(1, DEPTHS + 1)))))
        )

    free = 1 if tail or len(chains) == 1 else 2
    point = np.array([0.8, FALLS.get(algorithm, 0.0) if free == 1 else 0.0])
    for _ in range(8):
        now = errors(of(point), chains)
        slopes = np.stack([(errors(of(point + step), chains) - now) / 0.02 for step in np.eye(2)[:free] * 0.02], axis=1)
        point[:free] -= np.clip(np.linalg.lstsq(slopes, now, rcond=None)[0], -1, 1)
    process = replace(of(point), conditional=tuple(round(p, 4) for p in of(point).conditional))
    if trees:
        tried = [process, *(replace(process, draft_confidence=round(c, 2)) for c in np.arange(0.1, 0.91, 0.04))]
        process = min(tried, key=lambda one: float(np.square(errors(one, trees)).sum()))
    return process


def fitted() -> Iterator[tuple[tuple[str, str, str], GaussianAcceptance, np.ndarray]]:
    """Yield each preset that is fitted here, its process and the errors of its rows."""
    for key, rows in published().items():
        if key[0] != "EAGLE":
            process = fit(key[0], key[2], rows)
            yield key, process, errors(process, rows)


def main() -> None:
    if "--check" in sys.argv[1:]:
        by_key: dict[tuple[str, str, str], AcceptancePreset] = {
            (preset.algorithm, preset.family, preset.text): preset for preset in PRESETS.values()
        }
        for key, rows in published().items():
            print(*key, *(f"{100 * error:+.1f} %" for error in errors(by_key[key].process(), rows)))
        return
    for key, process, error in fitted():
        print(*key, process.conditional, process.draft_confidence, *(f"{100 * e:+.1f} %" for e in error), flush=True)


if __name__ == "__main__":
    main()
