"""What `plan`, `sweep` and `tune` have in common: their options, and a directory in which every run is kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...core.errors import count_of
from ..options import option
from ..simulation.simulate import termination_is_interruption

if TYPE_CHECKING:
    from ...planning.store import StoredWorkers, TrialStore
    from ...planning.workers import Workers

OutDirectory = Annotated[
    Path | None, option("--out", "Directory of the runs. Default: a new directory in runs/.", "DIR")
]
NumWorkers = Annotated[int | None, option("--workers", "Number of processes. Default: one per core.", min=1, max=1024)]
Cluster = Annotated[
    str | None, option("--cluster", "Run on Ray: ray (the cluster on this machine) or ray://HOST:PORT.", "ADDRESS")
]


def make_workers(tables: Mapping[str, Any], count: int | None, cluster: str | None) -> Workers:
    from ...core.errors import ConfigError
    from ...planning.workers import ANY_CLUSTER, CLIENT_SCHEME, LocalWorkers, RayWorkers

    if cluster is None:
        return LocalWorkers(tables, count or os.cpu_count() or 1)
    port = cluster.rpartition(":")[2].partition("/")[0]
    if cluster != ANY_CLUSTER and not (cluster.startswith(CLIENT_SCHEME) and port.isdecimal()):
        raise ConfigError.of("--cluster", "", f"{cluster!r} is neither ray nor ray://HOST:PORT")
    return RayWorkers(tables, count, cluster)


@contextmanager
def kept_runs(
    kind: str, tables: Mapping[str, Any], out: Path | None, count: int | None, cluster: str | None, **asked: Any
) -> Iterator[tuple[StoredWorkers, TrialStore]]:
    """Yield workers that simulate `tables` and keep every run, and the store of the runs; its table is written at the
    end.

    `asked` is what makes two questions of this kind the same; where the runs are made is no part of it. After Ctrl-C,
    or when a cluster goes away, the user is told how many runs are kept.
    """
    from ...planning.store import StoredWorkers, TrialStore, default_place, question
    from ...planning.workers import ClusterGone

    identity = question(kind, tables, **asked)
    place = out or default_place(identity)
    store = TrialStore(place, identity)
    with termination_is_interruption(), closing(StoredWorkers(make_workers(tables, count, cluster), store)) as pool:
        try:
            yield pool, store
        except KeyboardInterrupt:
            print(
                f"foredraft: kept {count_of(len(store), 'run')} in {place}; the same command continues from there",
                file=sys.stderr,
            )
            raise
        except ClusterGone as error:
            kept = f"kept {count_of(len(store), 'run')} in {place}; the same command continues from there"
            kept += ", without --cluster on this machine"
            raise ClusterGone(f"{error}\n{kept}") from None
        if len(store):
            store.write_table()
