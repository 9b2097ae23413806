"""The measuring loop: what is timed takes turns, and a record keeps the samples of a run that was stopped.

warm each up ─► turn 1: each once, in a drawn order ─► turn 2: each once, in another order ─► … ─► samples of each

Turns matter more than repeats: a change of clock speed, or of other load on the machine, slows all samples of a turn
alike. The order is drawn anew for each turn, so that nothing always finds the caches as the same other thing left them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

import numpy as np

from ...core.draws import Purpose, hash64
from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_lines

T = TypeVar("T")
OnSample = Callable[[int, int, str], None]
"""Called before each sample with how many are done, of how many, and what is timed next."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """One cell on one arm. `time` is given the number of the sample, from 0; `warm` runs once without counting."""

    name: str  # of the arm
    repeats: int
    time: Callable[[int], T]
    warm: Callable[[], object] = lambda: None


def take_turns(
    timed: Sequence[Timed[T]], seed: int = 0, on_sample: OnSample = lambda done, of, name: None
) -> list[list[T]]:
    """Warm each up, then time each as often as it asks for. Returns the samples of each."""
    for one in timed:
        one.warm()
    samples: list[list[T]] = [[] for _ in timed]
    total = sum(one.repeats for one in timed)
    for done, number in enumerate(drawn_order([one.repeats for one in timed], seed)):
        one = timed[number]
        on_sample(done, total, one.name)
        samples[number].append(one.time(len(samples[number])))
    return samples


def drawn_order(repeats: Sequence[int], seed: int = 0) -> Iterator[int]:
    """Yield the numbers of things that are timed so often each. There are as many turns as the most frequent has
    repeats; those of the others are spread evenly over the turns."""
    num_turns = max(repeats, default=0)
    for turn in range(num_turns):
        members = [i for i, count in enumerate(repeats) if count * (turn + 1) // num_turns > count * turn // num_turns]
        draws = hash64(seed, Purpose.TOKEN, np.uint64(turn), np.arange(len(members), dtype=np.uint64))
        yield from (members[i] for i in np.argsort(draws).tolist())


class TimingRecord:
    """Samples by key, line by line in a file, so that a run that was stopped goes on.

    Without a path they are kept in memory alone. The file begins with `about`; one that is about something else, or
    ends in the middle of a line, is begun anew or cut there.
    """

    def __init__(self, path: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        self.values: dict[str, list[float]] = {}
        self._path = path
        self._file: TextIO | None = None
        if path is None:
            return
        if path.is_file():
            self._read(path, about)
        lines = [{"about": about}, *({"key": key, "values": values} for key, values in self.values.items())]
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(path.name + ".new")
        written.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        written.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def sample(self, key: str, time: Callable[[], list[float]]) -> list[float]:
        """Return the sample of this key, which is timed if it is not there yet."""
        if key not in self.values:
            self.values[key] = values = time()
            if self._file is not None:
                self._file.write(json.dumps({"key": key, "values": values}) + "\n")
                self._file.flush()
        return self.values[key]

    def close(self, finished: bool) -> None:
        """Close the file, and delete it if the measurement is `finished`."""
        if self._file is not None and self._path is not None:
            self._file.close()
            if finished:
                self._path.unlink(missing_ok=True)

    def _read(self, path: Path, about: Mapping[str, Any] | None) -> None:
        lines = iter(read_lines(path))
        try:
            if parse_json(next(lines, "null")) != {"about": json.loads(json.dumps(about))}:
                return
            for line in lines:
                value = parse_json(line)
                self.values[value["key"]] = [float(number) for number in value["values"]]
        except (ParseError, LookupError, TypeError, ValueError):
            return  # the rest is measured again
