"""Letters, from which the swarm and Hypothesis draw the operations of a contract.

A letter is one kind of operation with the values that each of its arguments may have. The trial declares them once
(`operation.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np

from ...core.draws import Purpose, hash64
from .operation import Declared, Operation

T = TypeVar("T")
_MASK = (1 << 64) - 1


class Choices:
    """Choose one of several values at a time, and remember which: a configuration is a function of these choices.

    The choices come from random bits, or are `given` as indices, 0 where none is left. The simplest value stands first,
    so that smaller indices give simpler configurations; a value that stands there several times is chosen more often.
    """

    def __init__(self, bits: int | None = None, given: Sequence[int] = ()) -> None:
        self.bits = bits or 0
        self.taken: list[int] = []
        self._is_random = bits is not None
        self._given = given

    def __call__(self, values: Sequence[T]) -> T:
        number = len(self.taken)
        if self._is_random:
            mixed = (self.bits + (number + 1) * 0x9E3779B97F4A7C15) & _MASK  # splitmix64
            mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
            at = (mixed ^ mixed >> 27) % len(values)
        else:
            at = min(self._given[number], len(values) - 1) if number < len(self._given) else 0
        value = values[at]
        self.taken.append(values.index(value))
        return value


def simpler_choices(taken: Sequence[int]) -> list[list[int]]:
    """Return choices like these with one of them simpler, the simplest first."""
    return [
        [*taken[:number], smaller, *taken[number + 1 :]]
        for number, index in enumerate(taken)
        for smaller in sorted({0, index // 2, index - 1})
        if 0 <= smaller < index
    ]


class Letter:
    """`kind(*arguments)`, each argument one of its values. The simplest come first; repeated values are drawn more
    often.

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
        """Return one of the operations, by a number that is taken modulo `size`."""
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
"""Group -> its letters. "" has operations for every component, "hostile" those that no caller should use; the other
groups are capabilities."""


def vocabulary_of(declared: Sequence[Declared], config: Any, capabilities: Any) -> Vocabulary:
    """Return the letters of one configuration, for a component of these capabilities."""
    letters: dict[str, tuple[Letter, ...]] = {"": ()}
    for method in declared:
        for variant in method.variants:
            if not all(getattr(capabilities, name) for name in variant.needs):
                continue
            arguments = [
                values(config, capabilities) if callable(values) else values
                for values in (variant.values[name] for name in method.kind.__match_args__)
            ]
            if all(len(values) for values in arguments):
                letter = Letter(method.kind, variant.weight, *arguments)
                letters[variant.group] = (*letters.get(variant.group, ()), letter)
    return letters


def translated(operation: Operation, before: Vocabulary, after: Vocabulary) -> Operation:
    """Return the operation that has the same meaning under another configuration, for example two pages where pages are
    smaller.

    Returns the operation itself if its vocabulary does not know it.
    """
    for group, letters in before.items():
        for old, new in zip(letters, after.get(group, ()), strict=False):
            if old.kind is type(operation) is new.kind and all(
                value in values for value, values in zip(operation.arguments, old.arguments, strict=True)
            ):
                places = [values.index(v) for v, values in zip(operation.arguments, old.arguments, strict=True)]
                return new.kind(*(v[min(at, len(v) - 1)] for at, v in zip(places, new.arguments, strict=True)))
    return operation


def kept_features(vocabulary: Vocabulary, bits: int) -> tuple[str, ...]:
    """Return which groups of operations a run has:
    each but "" is left out in a quarter of the runs, by two of the random bits."""
    optional = [feature for feature in vocabulary if feature]
    assert len(optional) <= 16, "the swarm gives 32 random bits, two for each group"
    return ("", *(feature for number, feature in enumerate(optional) if (bits >> (2 * number)) & 3))


def weighted(
    vocabulary: Vocabulary, features: Iterable[str] | None = None, without: Sequence[type[Operation]] = ()
) -> list[Letter]:
    """Return the letters of these groups (all, if None), but for some kinds, each as often as it weighs."""
    return [
        letter
        for feature in (vocabulary if features is None else features)
        for letter in vocabulary[feature]
        if letter.kind not in without
        for _ in range(letter.weight)
    ]


def draw(
    vocabulary: Vocabulary,
    seed: int,
    run: int,
    count: int,
    features: Sequence[str],
    without: Sequence[type[Operation]] = (),
) -> list[Operation]:
    """Draw `count` operations of run number `run`, keyed by (seed, run)."""
    table = weighted(vocabulary, features, without)
    bits = hash64(seed, Purpose.SWARM, run, np.arange(count), lane=1).tolist()
    size = len(table)
    return [table[b % size].operation(b >> 16) for b in bits]
