"""What the tokens of a result must be: compared with the model's own distribution after the row's text, computed
plainly.

The subject says what its model gives after a text, token after token, without batch, tree or pages (`Executor.after`),
and what its draft proposes after one (`Executor.drafted`). Everything else is worked out here: which tokens sampling
may choose, how many drafts must be accepted, and whether sampled tokens have the distribution that they should have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from ...core.contract.request import SamplingParams
from ...core.draws import Purpose, uniform

SLACK = 2e-3
"""Logits closer than that count as equal: a batched pass sums in another order."""
TOLERANCE = 2e-3  # of outputs, relative to their size
MIN_DRAWS = 24
MIN_EDGES = 4.0
DEVIATION = 5.0  # of a sum of n terms, in standard deviations: a good sampler is that far off once in two million


MAX_MATCH, MAX_EXAMINED = 8, 32
"""Of look-up drafting: the longest suffix that is looked for, and how many occurrences are looked at
for each branch."""

Drafts = Set[tuple[int, ...]]
"""The drafts of a round, each as the tokens from behind the root to it."""


class LookedUp(frozenset[tuple[int, ...]]):
    """The drafts of a row that a look-up made, in a round where the draft model drafts for others, or for none."""


class After(NamedTuple):
    """What a model gives after each of n tokens of a text."""

    logits: np.ndarray  # [n, V]
    # [n, …] by name; of the token that follows, where an output belongs to one: [n, V, …] of each
    outputs: Mapping[str, np.ndarray]
    # What recurrent layers keep behind the whole text, in a form of the subject's; None without such layers.
    state: np.ndarray | None = None


class RecurrentState(NamedTuple):
    """What the recurrent layers have of a row: how many tokens the state has taken in, and its values in the form of
    `After.state`, None if the executor computes none."""

    length: int
    values: np.ndarray | None


def kept_tokens(logits: np.ndarray, sampling: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Return the tokens that temperature, top-k and top-p leave, best first. `slack` lets in those at an edge."""
    order = np.argsort(-logits, kind="stable")
    if sampling.is_greedy:
        return order[logits[order] >= logits[order[0]] - slack]
    if sampling.top_k:
        edge = logits[order[min(sampling.top_k, len(order)) - 1]]
        order = order[(np.arange(len(order)) < sampling.top_k) | (logits[order] >= edge - slack)]
    weights = np.exp((logits[order].astype(float) - logits[order[0]]) / sampling.temperature)
    before = np.cumsum(weights) - weights
    share = before / weights.sum()
    return order[(share < sampling.top_p + slack) | (sampling.top_p >= 1.0)] if slack else order[share < sampling.top_p]


def probabilities(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Return the distribution float64 [V] that a token is drawn from."""
    kept = kept_tokens(logits, sampling)
    found = np.zeros(len(logits))
    if sampling.is_greedy:
        found[kept[0]] = 1.0
    else:
        found[kept] = np.exp((logits[kept].astype(float) - logits[kept[0]]) / sampling.temperature)
    return found / found.sum()


def is_close(found: Any, wanted: Any) -> bool:
    """Return whether two values of an output are equal, or as near as two orders of summation."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape:
        return False
    if wanted.dtype.kind in "iub":
        return np.array_equal(found, wanted)
    return np.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, float(np.abs(wanted).max(initial=0))))


def accepted(drafts: Drafts, run: Sequence[int]) -> int:
    """Return how many tokens a round with these drafts emits, if a greedy target goes on as `run` does."""
    count = 1
    while count <= len(run) and tuple(run[:count]) in drafts:
        count += 1
    return count


def drafts_at_end(drafts: Drafts, run: Sequence[int]) -> list[int]:
    """Return the drafts that the last token of a run could have been accepted as: those behind all others."""
    return [path[-1] for path in drafts if path[:-1] == tuple(run[:-1])]


def looked_up(text: Sequence[int], num_nodes: int, num_branches: int) -> Drafts:
    """Return what followed the last tokens of a text where they occurred before: the longest match first, then the most
    recent.

    The branches share the nodes equally; what common beginnings save extends the best of them."""
    size, budget = len(text), num_nodes - 1
    found = []
    for end in range(1, size):
        length = 0
        while length < min(MAX_MATCH, end) and text[end - 1 - length] == text[size - 1 - length]:
            length += 1
        if length:
            found.append((-length, -end))
    paths: list[tuple[int, ...]] = []
    share = max(1, budget // num_branches)
    for _, minus_end in sorted(found)[: MAX_EXAMINED * num_branches]:
        period = size + minus_end
        path = tuple(text[at % period - minus_end] for at in range(budget))
        if path[:share] not in [other[:share] for other in paths] and len(paths) < min(num_branches, budget):
            paths.append(path)
    if not paths:
        return set()
    lengths = [budget // len(paths)] * len(paths)
    nodes = {path[:depth] for path, length in zip(paths, lengths, strict=True) for depth in range(1, length + 1)}
    for path, length in zip(paths, lengths, strict=True):
        depth = length + 1
        while depth <= budget and (path[:depth] in nodes or len(nodes) < budget):
            nodes.add(path[:depth])
            depth += 1
    return nodes


def is_allowed(output: Sequence[int], num_tokens: int) -> np.ndarray:
    """Return bool [V]: which tokens the suite's one grammar lets follow an output."""
    return (sum(output) + np.arange(num_tokens)) % 3 != 0


def shaped(logits: np.ndarray, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Return the logits [V] behind a prompt and an output as a request's biases, penalties and grammar change them."""
    if not sampling.is_shaped:
        return logits
    logits, seen = logits.copy(), np.unique([*prompt, *output])
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    logits[seen] *= np.where(logits[seen] > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
    times = np.bincount(output, minlength=len(logits))
    logits -= sampling.frequency_penalty * times + sampling.presence_penalty * (times > 0)
    if sampling.grammar is not None:
        logits[~is_allowed(output, len(logits))] = -np.inf
    return logits


# -- distributions ----------------------------------------------------------------------------------------------------


def edge_of(probs: np.ndarray, token: int) -> tuple[float, float]:
    """Return `Draw.edge` and its variance."""
    last = int(np.where(probs > 0, probs, np.inf).argmin())
    chance = float(probs[last])
    return float(token == last) - chance, chance * (1 - chance)


def place_of(probs: np.ndarray, token: int, number: int) -> float:
    """Return where in 0 … 1 a coin fell that drew `token`: uniform for a good sampler, and independent of all others.

    Within the token's own share the place is drawn by `number`.
    """
    below = float(probs[:token].sum())
    return below + float(probs[token]) * float(uniform(7, Purpose.SWARM, 0, number))


def beside_drafts(probs: np.ndarray, drafts: Sequence[int], token: int) -> tuple[float, float]:
    """Return how far from the middle the coin fell that drew `token` from what these drafts leave of a distribution,
    and the variance.

    Both count by the probability of the drafts: a coin that has rejected them would be at that distance from 0 if it
    were used once more.
    """
    left = probs.copy()
    left[list(drafts)] = 0.0
    weight = 1.0 - float(left.sum())
    left /= left.sum()
    middles = left.cumsum() - left / 2 - 0.5
    return weight * float(middles[token]), weight**2 * float(left @ middles**2)


class Draw(NamedTuple):
    """One sampled token: the request that it belongs to, how that samples, its number in the output, in its round, and
    its place.

    `edge` is 1 for the least probable token that could have been drawn, less the probability of that; `edge_variance`
    is its variance.
    """

    request: int
    sampling: str
    number: int
    depth: int
    place: float
    edge: float
    edge_variance: float


def unfairness(draws: Sequence[Draw], beside: np.ndarray) -> str | None:
    """Say how sampled tokens differ from independent draws of the exact distribution; None if they do not.

    `beside` [n, 2] are `beside_drafts` of tokens.

    Sums of n terms, each of known mean and variance, are compared with their standard deviation, so that a bound holds
    for any n.
    """
    by_place = {(draw.request, draw.number): draw.place for draw in draws}
    for name, steps, numbers in (
        ("consecutive tokens of a request", ((0, 1),), None),
        ("first two tokens of a request", ((0, 1),), (0,)),  # one is drawn behind the prompt, one in a round
        ("tokens of two requests at one position", ((1, 0), (2, 0), (3, 0)), None),
    ):
        pairs = [
            (place, by_place[request + step[0], number + step[1]])
            for (request, number), place in by_place.items()
            for step in steps
            if (request + step[0], number + step[1]) in by_place and (numbers is None or number in numbers)
        ]
        products = np.array([(a - 0.5) * (b - 0.5) for a, b in pairs])
        if len(pairs) >= MIN_DRAWS and abs(products.sum()) > DEVIATION / 12 * np.sqrt(len(pairs)):
            return f"{len(pairs)} pairs of {name}: their coins go together ({12 * products.mean():+.2f})"
    far, spread = beside.sum(axis=0)
    if len(beside) >= MIN_DRAWS and abs(far) > DEVIATION * np.sqrt(spread):
        return f"{len(beside)} tokens that were no draft: their coins are {far / len(beside):+.2f} from the middle on average"
    groups = {"all tokens": draws, "first tokens": [d for d in draws if d.number == 0]}
    for sampling in dict.fromkeys(draw.sampling for draw in draws):
        groups[f"tokens of {sampling}"] = [d for d in draws if d.sampling == sampling]
    for depth in sorted({draw.depth for draw in draws}):
        groups[f"tokens at place {depth + 1} of their round"] = [d for d in draws if d.number and d.depth == depth]
    for name, group in groups.items():
        places = np.array([draw.place for draw in group])
        for what, values, deviation in (
            ("mean place", places - 0.5, np.sqrt(1 / 12)),
            ("distance from the middle", np.abs(places - 0.5) - 0.25, np.sqrt(1 / 48)),
        ):
            if len(group) >= MIN_DRAWS and abs(values.sum()) > DEVIATION * deviation * np.sqrt(len(group)):
                return f"{len(group)} {name}: the {what} of their coins is {values.mean():+.2f} off"
        spread = sum(draw.edge_variance for draw in group)
        edge = sum(draw.edge for draw in group)
        if spread > MIN_EDGES and abs(edge) > DEVIATION * np.sqrt(spread):
            return f"{len(group)} {name}: the least probable token that is left was drawn {edge:+.1f} times too often"
    return None
