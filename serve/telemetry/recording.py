"""The record of a server: the decision log of its engines, in a folder for each start."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.contract.events import EventSink
from ...core.errors import ConfigError
from ...observe.log import EventLog
from ..metrics import ServerMetrics

EVENTS = "events.jsonl"
PART_BYTES = 1 << 28
"""Of a file of the log; the next ones are `events.2.jsonl` and so on."""


class Recording:
    """The event sinks of a server's engines: its metrics, and with a directory the log.

    As a context manager it closes the log. `folder`: of this start, once there is one.
    """

    def __init__(self, directory: Path | None) -> None:
        """Raise ConfigError if the directory cannot be one."""
        self.metrics: ServerMetrics = ServerMetrics()
        self.folder: Path | None = None
        self._directory = directory
        self._log: EventLog | None = None
        if directory is not None and directory.exists() and not directory.is_dir():
            raise ConfigError.of("<arguments>", "--record", f"{directory} is a file; expected a directory")

    def sinks(self, header: Callable[[], Mapping[str, Any]]) -> Callable[[int], Sequence[EventSink]]:
        """Return the sinks of an engine by its number; the log begins with `header`."""

        def of(engine: int) -> Sequence[EventSink]:
            if self._directory is None:
                return (self.metrics.sink(engine),)
            if self._log is None:
                self.folder = _new_folder(self._directory)
                self._log = EventLog(self.folder / EVENTS, header(), part_bytes=PART_BYTES)
            return (self.metrics.sink(engine), self._log.sink(engine))

        return of

    def worker_logs(self, names: Sequence[str]) -> dict[str, Path] | None:
        """Return the file of the log of each worker, which writes it itself; None without a directory."""
        if self._directory is None:
            return None
        self.folder = _new_folder(self._directory)
        for name in names:
            (self.folder / name).mkdir()
        return {name: self.folder / name / EVENTS for name in names}

    def flush(self) -> None:
        """Hand what was written to the operating system: then a server that is killed does not lose it. Called on the
        thread that drives the engines."""
        if self._log is not None:
            self._log.flush()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._log is not None:
            self._log.close(complete=kind is None)


def _new_folder(directory: Path) -> Path:
    """Make the folder of this start, named by its time; another server may begin in the same second."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in _names():
            try:
                (directory / name).mkdir()
            except FileExistsError:
                continue
            return directory / name
    except OSError as error:
        message = f"{directory} cannot be written: {error.strerror or error}"
        raise ConfigError.of("<arguments>", "--record", message) from None
    raise AssertionError("there is always another name")


def _names() -> Iterator[str]:
    begin = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H-%M-%SZ}"
    yield begin
    number = 2
    while True:
        yield f"{begin}-{number}"
        number += 1
