"""The words that a contract's operations are made of, and how the drivers speak them.

A letter is one kind of operation with the values that each of its arguments may have. The swarm draws from them, Hypothesis samples them:
both speak one language, and a contract writes it down once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from ..core.draws import Purpose, hash64
from .operations import Operation


class Letter:
    """`kind(*arguments)`, each argument one of its values. The simplest come first; what is repeated is drawn more often.

    Equal operations are one object: drawing makes no new ones for long.
    """

    def __init__(self, kind: type[Operation], weight: int, *arguments: Sequence[object]) -> None:
        assert weight > 0 and all(len(values) for values in arguments), f"{kind.__name__}: an argument without values"
        self.kind = kind
        self.weight = weight
        self.arguments = tuple(tuple(values) for values in arguments)
        self.size = prod(len(values) for values in self.arguments)
        self._made: dict[int, Operation] = {}

    def operation(self, number: int) -> Operation:
        """One of the operations, by a number that is taken modulo `size`."""
        number %= self.size
        made = self._made.get(number)
        if made is None:
            rest, chosen = number, []
            for values in self.arguments:
                rest, at = divmod(rest, len(values))
                chosen.append(values[at])
            made = self._made[number] = self.kind(*chosen)
        return made


Vocabulary = Mapping[str, tuple[Letter, ...]]
"""Capability -> its letters. "" is what can be done to every component, "hostile" what no caller should do."""


def kept_features(vocabulary: Vocabulary, bits: int) -> tuple[str, ...]:
    """Which capabilities a run speaks of: each but "" is left out in a quarter of the runs, by two of the random bits."""
    optional = [feature for feature in vocabulary if feature]
    return ("", *(feature for number, feature in enumerate(optional) if (bits >> (2 * number)) & 3))


def draw(
    vocabulary: Vocabulary,
    seed: int,
    run: int,
    count: int,
    features: Sequence[str],
    without: Sequence[type[Operation]] = (),
) -> list[Operation]:
    """`count` operations of run number `run`, from the draws keyed by (seed, run)."""
    table = [
        letter
        for feature in features
        for letter in vocabulary[feature]
        if letter.kind not in without
        for _ in range(letter.weight)
    ]
    bits = hash64(seed, Purpose.SWARM, run, np.arange(count), lane=1).tolist()
    size = len(table)
    return [table[b % size].operation(b >> 16) for b in bits]
