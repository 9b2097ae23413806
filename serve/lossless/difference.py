"""Tells where two greedy answers to one prompt part, and whether float noise explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .endpoint import Completion


@dataclass(frozen=True, slots=True)
class Margin:
    """The distance of both candidates' log-probabilities on one side; `is_bound`:
    one is not listed, so it is at least this."""

    value: float
    is_bound: bool = False

    def __str__(self) -> str:
        return f"{'≥ ' if self.is_bound else ''}{self.value:.3g}"


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """The first place where two answers part: `position` in `unit`s (token or character) from 0. A candidate of None is
    an end.

    `margins`: of the plain and the speculative side, None where a side does not tell. `ends_early`: one answer is cut
    off by a length.
    """

    position: int
    unit: str
    plain: str | None
    speculative: str | None
    margins: tuple[Margin | None, Margin | None]
    num_shared_characters: int
    ends_early: bool = False

    def is_tie(self, tie_margin: float) -> bool:
        """Return whether some side tells its candidates' logits, and every one that does has both
        within `tie_margin`."""
        known = [margin.value for margin in self.margins if margin is not None]
        return bool(known) and not self.ends_early and max(known) <= tie_margin


def first_difference(plain: Completion, speculative: Completion) -> AnswerDifference | None:
    """Return the first difference of two answers, None if their texts are equal.
    Compares tokens where both sides show them."""
    if plain.text == speculative.text:
        return None
    sides = (plain, speculative)
    characters = _num_shared(plain.text, speculative.text)
    position, unit, places = characters, "character", [_token_at(side, characters) for side in sides]
    shared = _num_shared(plain.tokens, speculative.tokens)
    if all(side.tokens for side in sides) and plain.tokens != speculative.tokens:
        position, unit, places = shared, "token", [shared, shared]
    shown = [side.tokens if unit == "token" else side.text for side in sides]
    own = [candidates[position] if position < len(candidates) else None for candidates in shown]
    # Of a side that shows no tokens only the text is known.
    others = [candidate if candidate is None or unit == "token" else "" for candidate in own]
    margins = (
        _margin(plain, places[0], others[1], speculative.text),
        _margin(speculative, places[1], others[0], plain.text),
    )
    ends_early = any(one is None and side.finish == "length" for one, side in zip(own, sides, strict=True))
    return AnswerDifference(position, unit, own[0], own[1], margins, characters, ends_early)


def follows(answer: Completion, other: Completion, difference: AnswerDifference) -> bool:
    """Return whether `answer` agrees with `other` up to and including the place of `difference`, an
    end there included."""
    end = difference.position + 1
    return (
        answer.text[:end] == other.text[:end]
        if difference.unit == "character"
        else answer.tokens[:end] == other.tokens[:end]
    )


def greatest_shift(plain: Completion, speculative: Completion) -> float:
    """Return the greatest distance of the log-probabilities of a token that both sides begin with:
    the float noise between them."""
    shared = range(_num_shared(plain.tokens, speculative.tokens))
    return max(
        (abs(plain.rows[i][plain.tokens[i]] - speculative.rows[i][plain.tokens[i]]) for i in shared), default=0.0
    )


def num_unlikely(answer: Completion, tie_margin: float) -> int:
    """Count tokens that are further than `tie_margin` below the most likely candidate of their own row:
    not chosen greedily from it."""
    pairs = zip(answer.tokens, answer.rows, strict=True)
    return sum(max(row.values()) - row[token] > tie_margin for token, row in pairs)


def _num_shared(first: Sequence[str], second: Sequence[str]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _token_at(side: Completion, character: int) -> int:
    """Return the token that has a character of the text; the number of tokens if none has."""
    return sum(end <= character for end in accumulate(map(len, side.tokens)))


def _margin(side: Completion, place: int, other: str | None, other_text: str) -> Margin | None:
    """Return how far this side's token is from the other side's, by this side's row.

    `other` is None for an end, and "" where only the other side's text is known: then the longest candidate that it may
    begin with.
    """
    if place >= len(side.tokens):
        return None
    own = side.rows[place][side.tokens[place]]
    rest = {token: value for token, value in side.rows[place].items() if token != side.tokens[place]}
    if other == "" and "" not in rest:
        begin = len("".join(side.tokens[:place]))
        other = max((token for token in rest if other_text.startswith(token, begin)), key=len, default="")
    if other in rest:
        return Margin(abs(own - rest[other]))
    # No token stands for the end, which is at best the most likely of the rest; any other that is not listed is below
    # all of these.
    return Margin(abs(own - (max if other is None else min)(rest.values())), is_bound=True) if rest else None
