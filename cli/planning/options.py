"""What `plan`, `sweep` and `tune` have in common: their options, and a directory in which every run is kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..simulation.simulate import termination_is_interruption

if TYPE_CHECKING:
    from ...planning.store import StoredWorkers, TrialStore
    from ...planning.workers import Workers

OutDirectory = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", show_default=False, help="Keep the runs here; default: runs/ and a name."),
]
NumWorkers = Annotated[
    int | None,
    typer.Option("--workers", min=1, max=1024, show_default=False, help="Processes; default: one per core."),
]


def make_workers(tables: Mapping[str, Any], count: int | None) -> Workers:
    from ...planning.workers import LocalWorkers

    return LocalWorkers(tables, count or os.cpu_count() or 1)


@contextmanager
def kept_runs(
    kind: str, tables: Mapping[str, Any], out: Path | None, count: int | None, **asked: Any
) -> Iterator[tuple[StoredWorkers, TrialStore]]:
    """Yield workers that simulate `tables` and keep every run, and the store of the runs; its table is written at the end.

    `asked` is what makes two questions of this kind the same. Ctrl-C says how many runs are kept, and is raised again.
    """
    from ...planning.store import StoredWorkers, TrialStore, default_place, question

    identity = question(kind, tables, **asked)
    place = out or default_place(identity)
    store = TrialStore(place, identity)
    with termination_is_interruption(), closing(StoredWorkers(make_workers(tables, count), store)) as pool:
        try:
            yield pool, store
        except KeyboardInterrupt:
            print(f"foretoken: {len(store)} runs are kept; the same command goes on ({place})", file=sys.stderr)
            raise
        if len(store):
            store.write_table()
