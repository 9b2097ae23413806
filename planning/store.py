"""Stores runs in a directory as they end, so that a stopped sweep or search can continue.

question.json    what is asked: the scenario, what is varied, the version
trials.jsonl     a line per run that is done, written when it ends; a last line that a kill has cut off is dropped, and
                 its run made again
trials.parquet   the same as one table, once all runs have ended
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..core.errors import ConfigError, ForedraftError
from ..core.parsing import ParseError, parse_json
from ..observe.children.cores import usable_cores
from ..observe.input_files import read_lines, read_text
from ..observe.output_files import UnwritableFile
from .trial import RunOutcome
from .workers import ANY_CLUSTER, CLIENT_SCHEME, Job, JobWorkers, LocalWorkers, RayWorkers

QUESTION = "question.json"
JOURNAL = "trials.jsonl"
TABLE = "trials.parquet"
FORM = "foredraft trials 1"


def question(kind: str, tables: Mapping[str, Any], **asked: Any) -> dict[str, Any]:
    """Return the identity of a sweep or search: its kind, version, scenario and question, and the contents of the named
    files."""
    whole = {"format": FORM, "kind": kind, "version": version("foredraft"), "scenario": tables, **asked}
    whole["kernels"] = [os.environ.get("FOREDRAFT_KERNELS"), _version_of("aiconfigurator-core")]
    whole["files"] = dict(sorted(_files_in(whole)))
    read_back: dict[str, Any] = json.loads(json.dumps(whole))  # tuples are lists then
    return read_back


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def default_place(asked: Mapping[str, Any]) -> Path:
    """Return the default directory of a question; equal questions have the same one."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return Path("runs") / f"{asked['kind']}-{digest[:8]}"


def _files_in(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (path, digest of the contents) of every file that is named in `value`."""
    if isinstance(value, Mapping | list | tuple):
        for below in value.values() if isinstance(value, Mapping) else value:
            yield from _files_in(below)
    elif isinstance(value, str) and os.path.isfile(value):
        with open(value, "rb") as file:
            yield value, hashlib.file_digest(file, "sha256").hexdigest()


class TrialStore:
    """The runs of one question, by their settings (the seed among them)."""

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        """Open the directory of a question, or make it.

        Raises ForedraftError if it holds another question, or cannot be written, ConfigError for a journal that is
        broken elsewhere than in its last line.
        """
        self.path = path
        self._trials: dict[str, tuple[Mapping[str, Any], RunOutcome]] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / QUESTION).exists():
                self._check_same(asked)
                self._read_journal()
            else:
                (path / QUESTION).write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
            self._journal = (path / JOURNAL).open("a", encoding="utf-8")
        except OSError as error:
            raise UnwritableFile(path, error, "used") from None

    def __len__(self) -> int:
        return len(self._trials)

    def get(self, settings: Mapping[str, Any]) -> RunOutcome | None:
        """Return the outcome of the run with these settings; None if it has not ended."""
        return self._trials.get(_key(settings), (None, None))[1]

    def add(self, settings: Mapping[str, Any], trial: RunOutcome) -> None:
        """Store a run that has ended. A run that is done goes into the journal; a refused or failed run is made again
        the next time."""
        if trial.status == "done":
            self._journal.write(json.dumps({"settings": dict(settings), **asdict(trial)}, allow_nan=False) + "\n")
            self._journal.flush()
        self._trials[_key(settings)] = (settings, trial)

    def close(self) -> None:
        self._journal.close()

    def write_table(self) -> Path:
        """Write all runs as one Parquet table, a row per run, and return its path."""
        import pyarrow
        from pyarrow import parquet

        rows = [
            {**settings, "status": trial.status, "message": trial.message, "wall_s": trial.wall_s}
            | {key: value for key, value in trial.summary.items() if key not in settings}
            for _, (settings, trial) in sorted(self._trials.items())
        ]
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = pyarrow.table({name: _column([row.get(name) for row in rows]) for name in names})
        place = self.path / TABLE
        partial = place.with_suffix(".partial")
        parquet.write_table(table, partial, compression="zstd")
        partial.replace(place)
        return place

    def _check_same(self, asked: Mapping[str, Any]) -> None:
        place = self.path / QUESTION
        try:
            found = parse_json(read_text(place))
        except ParseError as error:
            raise ConfigError.of(str(place), "", f"is no JSON: {error}") from None
        form = found.get("format") if isinstance(found, dict) else None
        if form != FORM:
            raise ConfigError.of(str(place), "format", f"is not {FORM!r}")
        differ = [key for key in asked if found.get(key) != asked[key]]
        if differ:
            raise ForedraftError(
                f"{self.path}: holds runs of another {', '.join(differ)}; give another --out, or remove the directory"
            )

    def _read_journal(self) -> None:
        place = self.path / JOURNAL
        if not place.exists():
            return
        whole_bytes = 0
        for number, line in enumerate(read_lines(place), 1):
            if not line.endswith("\n"):
                break
            whole_bytes += len(line.encode())
            try:
                entry = parse_json(line)
                settings = entry.pop("settings")
                self._trials[_key(settings)] = (settings, RunOutcome(**entry))
            except (ParseError, TypeError, KeyError, AttributeError, ValueError):
                raise ConfigError.of(str(place), f"line {number}", "is no run") from None
        os.truncate(place, whole_bytes)


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(dict(settings), sort_keys=True)


def _column(values: list[Any]) -> Any:
    """Return a column; values of several types, or tables, become their JSON text."""
    import pyarrow

    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        values = [None if value is None else float(value) for value in values]
    elif len(kinds) > 1 or kinds & {dict, list}:
        values = [None if value is None else json.dumps(value) for value in values]
    with suppress(pyarrow.ArrowInvalid):
        return pyarrow.array(values)
    return pyarrow.array([None if value is None else str(value) for value in values])


class StoredWorkers:
    """Workers that take stored outcomes from a store, and put new outcomes into it."""

    def __init__(self, workers: JobWorkers, store: TrialStore) -> None:
        self.count: int = workers.count
        self._workers = workers
        self._store = store
        self._found: deque[tuple[Job, RunOutcome]] = deque()

    def submit(self, job: Job) -> None:
        """See `Workers.submit`."""
        trial = self._store.get(job.settings)
        if trial is None:
            self._workers.submit(job)
        else:
            self._found.append((job, trial))

    def next_ended(self) -> tuple[Job, RunOutcome]:
        """See `Workers.next_ended`."""
        if self._found:
            return self._found.popleft()
        job, trial = self._workers.next_ended()
        self._store.add(job.settings, trial)
        return job, trial

    def close(self) -> None:
        self._workers.close()
        self._store.close()


def make_workers(tables: Mapping[str, Any], count: int | None, cluster: str | None) -> JobWorkers:
    """Return what makes the runs of a scenario: `count` processes of this machine (None: one per core), or the cluster
    at an address. Raises ConfigError for another address."""
    if cluster is None:
        return LocalWorkers(tables, count or usable_cores())
    port = cluster.rpartition(":")[2].partition("/")[0]
    if cluster != ANY_CLUSTER and not (cluster.startswith(CLIENT_SCHEME) and port.isdecimal()):
        raise ConfigError.of("--cluster", "", f"{cluster!r} is neither ray nor ray://HOST:PORT")
    return RayWorkers(tables, count, cluster)


@contextmanager
def kept_runs(
    kind: str, tables: Mapping[str, Any], place: Path | None, count: int | None, cluster: str | None, **asked: Any
) -> Iterator[tuple[StoredWorkers, TrialStore]]:
    """Yield workers that simulate `tables` and keep every run in `place`, and the store of the runs, whose table is
    written at the end.

    `asked` is what makes two questions of this kind the same; where the runs are made is no part of it. `place` None
    keeps the runs until the end of the context.
    """
    with ExitStack() as stack:
        if place is None:
            place = Path(stack.enter_context(TemporaryDirectory(prefix="foredraft-")))
        store = TrialStore(place, question(kind, tables, **asked))
        yield stack.enter_context(closing(StoredWorkers(make_workers(tables, count, cluster), store))), store
        if len(store):
            store.write_table()
