"""Taking what an engine says: a step's view becomes a `Flight`, events become tokens and ends. What has another form is a misbehaviour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .contract import REASONS
from .model import WAITING, Chunk, Flight, Life, RoundRow
from .moment import End, Moment
from .rules import extent

if TYPE_CHECKING:
    from .trial import EngineTrial

_STRINGS = frozenset({str})
_KEYS = ("step", "enters", "prefill", "decode", "steps", "rounds")


def names(trial: EngineTrial, answer: object, what: str) -> tuple[str, ...]:
    """A sequence of requests' names."""
    if isinstance(answer, list | tuple) and _STRINGS.issuperset(map(type, answer)):
        return tuple(answer)
    raise trial.misbehaviour("TYPE", f"{what} is {_shown(answer)}", "a list of names")


def read_step(trial: EngineTrial, view: object) -> Flight:
    """The step as the model sees it; requests that enter with it are admitted. Raises a Violation (TYPE)."""
    if not isinstance(view, Mapping) or any(key not in view for key in _KEYS):
        raise trial.misbehaviour("TYPE", f"plan() is {_shown(view)}", f"None, or a mapping with {', '.join(_KEYS)}")
    number, steps, rounds = (trial.integer(view[key], key) for key in ("step", "steps", "rounds"))
    moment = trial.moment
    chunks: list[Chunk] = []
    enters = names(trial, view["enters"], "enters")
    for item in _sequence(trial, view["prefill"], "prefill"):
        chunks.append(_chunk(trial, moment, item, enters))
    rows: list[RoundRow] = []
    flight = Flight(number, chunks, rows, steps, rounds)
    decode = _sequence(trial, view["decode"], "decode")
    if decode and steps not in trial.ahead:
        raise trial.misbehaviour("TYPE", f"steps is {steps}", f"one of {sorted(trial.ahead)}")
    if decode and rounds < 1:
        raise trial.misbehaviour("TYPE", f"rounds is {rounds}", "at least 1")
    for item in decode:
        rows.append(_row(trial, item, flight))
    if not chunks and not rows:
        raise trial.misbehaviour("TYPE", "a step without chunks and rows", "None, if there is nothing to do")
    return flight


def _chunk(trial: EngineTrial, moment: Moment, item: object, enters: tuple[str, ...]) -> Chunk:
    try:
        name, start, tokens, tail, key = item
    except (TypeError, ValueError):
        raise trial.misbehaviour("TYPE", f"a chunk is {_shown(item)}", "(request, start, tokens, tail, key)") from None
    life = _life(trial, name)
    start, tail, key = trial.integer(start, "start"), trial.integer(tail, "tail"), trial.integer(key, "key")
    tokens = trial.integers(tokens, "the tokens of a chunk")
    if life.state is WAITING or life.name in enters:
        # Who enters and ran before has been retracted, though it was never seen waiting.
        if life.state is not WAITING:
            trial.retract(life)
        moment.admitted.append((life, start))
        trial.model.admit(life, start, key)
    stop = start + len(tokens)
    is_last = stop >= len(life.context)
    return Chunk(life, life.stay, life.row, start, life.launched, tokens, tail, key, is_last)


def _row(trial: EngineTrial, item: object, flight: Flight) -> RoundRow:
    try:
        name, length, root, key = item
    except (TypeError, ValueError):
        raise trial.misbehaviour("TYPE", f"a row is {_shown(item)}", "(request, length, root, key)") from None
    life = _life(trial, name)
    length, key = trial.integer(length, "length"), trial.integer(key, "key")
    if root is not None:
        root = trial.integer(root, "root")
    if life.row is None:
        raise trial.misbehaviour("TYPE", f"request {name} decodes", "a prefill first")
    is_known, latest, reach = extent(trial.model.flights, trial.ahead, life, life.stay, flight)
    return RoundRow(life, life.stay, life.row, length, is_known, root, key, latest, reach)


def _life(trial: EngineTrial, name: object) -> Life:
    life = trial.model.lives.get(name) if type(name) is str else None
    if life is None:
        ended = trial.model.ended.get(name) if type(name) is str else None
        was = f"the step has {name!r}, which {'has ended' if ended else 'nobody submitted'}"
        raise trial.misbehaviour("TYPE", was, "requests that live")
    return life


def read_events(trial: EngineTrial, events: object) -> int:
    """Book events in the moment and the model; returns how many there were."""
    items = _sequence(trial, events, "the events")
    moment, model = trial.moment, trial.model
    for item in items:
        kind = item[0] if isinstance(item, tuple | list) and item else None
        if kind == "tokens" and len(item) == 3:
            tokens = trial.integers(item[2], "delivered tokens")
            life = model.lives.get(item[1])
            if life is None:
                moment.stray += (f"{len(tokens)} tokens for {item[1]!r}",)
                continue
            life.delivered += tokens
            moment.delivered.setdefault(life.name, []).extend(tokens)
        elif kind == "end" and len(item) == 5 and item[2] in REASONS:
            marks = None if item[4] is None else trial.integers(item[4], "the marks")
            end = End(item[1], item[2], trial.integers(item[3], "the output"), marks)
            life = model.lives.get(end.request)
            if life is None:
                moment.stray += (f"an end ({end.reason}) of {end.request!r}",)
                continue
            moment.ends.append(end)
            moment.ended_lives[end.request] = life
            trial.depart(life, end.reason)
            model.end(life, end.reason)
        else:
            should = '("tokens", request, tokens) or ("end", request, reason, tokens, marks)'
            raise trial.misbehaviour("TYPE", f"an event is {_shown(item)}", should)
    return len(items)


def _sequence(trial: EngineTrial, answer: object, what: str) -> Sequence[Any]:
    if isinstance(answer, list | tuple):
        return answer
    raise trial.misbehaviour("TYPE", f"{what} is {_shown(answer)}", "a list")


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '…'}"
