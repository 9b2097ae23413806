"""A sweep: every combination of some settings with several seeds, kept in a directory as it proceeds.

sweep.json       the scenario, the combinations, the seeds, the version: what the sweep is
trials.jsonl     a line per run, written when the run ends; a sweep that was stopped goes on behind the last whole line
trials.parquet   the same as one table, when all runs have ended
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, ForetokenError, Problem
from ..core.parsing import ParseError, parse_json
from ..observe.input_files import read_lines, read_text
from .trial import Trial
from .workers import Job, Workers

DESCRIPTION = "sweep.json"
JOURNAL = "trials.jsonl"
TABLE = "trials.parquet"
FORM = "foretoken sweep 1"


@dataclass(frozen=True)
class Sweep:
    """What to run.

    Attributes:
        tables: The scenario, as plain data.
        points: Per combination the dotted keys and the values that replace those of the scenario.
        seeds: The seeds of each combination. All combinations have the same ones: draws are keyed, so their arrivals, lengths and
            acceptance are the same, and differences between combinations are not chance.
    """

    tables: Mapping[str, Any]
    points: Sequence[Mapping[str, Any]]
    seeds: Sequence[int]

    def jobs(self) -> list[Job]:
        """Return all runs: every combination with the first seed, then with the second, …, so that a part shows the whole."""
        return [
            Job(point, seed, {**settings, "seed": seed})
            for seed in self.seeds
            for point, settings in enumerate(self.points)
        ]

    def description(self) -> dict[str, Any]:
        """Return what makes two sweeps the same: scenario, combinations, seeds, the version, and the contents of the files named."""
        return {
            "format": FORM,
            "version": version("foretoken"),
            "scenario": self.tables,
            "points": list(self.points),
            "seeds": list(self.seeds),
            "files": dict(sorted(_files_in(self.tables, *self.points))),
        }

    def fingerprint(self) -> str:
        """Return eight hexadecimal digits that differ between sweeps that differ."""
        text = json.dumps(self.description(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def _files_in(*values: Any) -> Iterator[tuple[str, str]]:
    """Yield (path, digest of the contents) of every file that is named in `values`."""
    for value in values:
        if isinstance(value, Mapping):
            yield from _files_in(*value.values())
        elif isinstance(value, str) and os.path.isfile(value):
            with open(value, "rb") as file:
                yield value, hashlib.file_digest(file, "sha256").hexdigest()


class SweepDirectory:
    """The files of a sweep. `trials` are those that have ended, by (combination, seed)."""

    def __init__(self, path: Path, sweep: Sweep) -> None:
        """Open the directory of a sweep, or make it.

        Raises ForetokenError if it holds another sweep, or cannot be written, ConfigError for a journal that is broken elsewhere than in
        its last line.
        """
        self.path = path
        self.sweep = sweep
        self.trials: dict[tuple[int, int], Trial] = {}
        description = json.dumps(sweep.description(), indent=1) + "\n"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / DESCRIPTION).exists():
                self._check_same(json.loads(description))
                self._read_journal()
            else:
                (path / DESCRIPTION).write_text(description, encoding="utf-8")
            self._journal = (path / JOURNAL).open("a", encoding="utf-8")
        except OSError as error:
            raise ForetokenError(f"{path}: cannot be used for a sweep: {error.strerror or error}") from None

    def _check_same(self, expected: Mapping[str, Any]) -> None:
        place = self.path / DESCRIPTION
        try:
            found = parse_json(read_text(place))
        except ParseError as error:
            raise ConfigError(str(place), [Problem("", f"is no JSON: {error}")]) from None
        if not isinstance(found, dict) or found.get("format") != FORM:
            raise ConfigError(str(place), [Problem("format", f"is not {FORM!r}")])
        differ = [key for key in expected if found.get(key) != expected[key]]
        if differ:
            raise ForetokenError(
                f"{self.path}: holds a sweep with other {', '.join(differ)}; give another --out, or remove the directory"
            )

    def _read_journal(self) -> None:
        place = self.path / JOURNAL
        if not place.exists():
            return
        whole_bytes = 0
        for number, line in enumerate(read_lines(place), 1):
            if not line.endswith("\n"):
                break  # the sweep was killed while it wrote this line: the run is made again
            whole_bytes += len(line.encode())
            try:
                entry = parse_json(line)
                key = (entry.pop("point"), entry.pop("seed"))
                self.trials[key] = Trial(**entry)
            except (ParseError, TypeError, KeyError, AttributeError):
                raise ConfigError(str(place), [Problem(f"line {number}", "is no run of a sweep")]) from None
        os.truncate(place, whole_bytes)

    def run(self, workers: Workers) -> Iterator[tuple[Job, Trial]]:
        """Run what has not run yet, and yield each run once it is on disk. A sweep that is left early can go on later."""
        missing = [job for job in self.sweep.jobs() if (job.point, job.seed) not in self.trials]
        for job in missing:
            workers.submit(job)
        for _ in missing:
            job, trial = workers.next_ended()
            line = json.dumps({"point": job.point, "seed": job.seed, **asdict(trial)}, allow_nan=False)
            self._journal.write(line + "\n")
            self._journal.flush()
            self.trials[job.point, job.seed] = trial
            yield job, trial

    def close(self) -> None:
        self._journal.close()

    def write_table(self) -> Path:
        """Write all runs as one Parquet table, a row per run in the order of the combinations, and return its path."""
        import pyarrow
        from pyarrow import parquet

        rows = []
        for (point, seed), trial in sorted(self.trials.items()):
            settings = self.sweep.points[point]
            rows.append(
                {"point": point, **settings, "seed": seed, "status": trial.status, "message": trial.message}
                | {"wall_s": trial.wall_s}
                | {key: value for key, value in trial.summary.items() if key not in ("seed", *settings)}
            )
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = pyarrow.table({name: _column([row.get(name) for row in rows]) for name in names})
        place = self.path / TABLE
        partial = place.with_suffix(".partial")
        parquet.write_table(table, partial, compression="zstd")
        partial.replace(place)
        return place


def _column(values: list[Any]) -> Any:
    """Return a column; values of several types, or tables, become their JSON text."""
    import pyarrow

    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and len(kinds) == 2:
        values = [None if value is None else float(value) for value in values]
    elif len(kinds) > 1 or kinds & {dict, list}:
        values = [None if value is None else json.dumps(value) for value in values]
    with suppress(pyarrow.ArrowInvalid):
        return pyarrow.array(values)
    return pyarrow.array([None if value is None else str(value) for value in values])
