"""What `plan`, `sweep` and `tune` have in common: their options, and a directory in which every run is kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...core.errors import count_of
from ..options import option
from ..simulation.simulate import termination_is_interruption

if TYPE_CHECKING:
    from ...planning.store import StoredWorkers, TrialStore

Requests = Annotated[
    int | None,
    option(
        "--requests",
        "Requests per run. Default: plan 600, or as many as a trace has; tune 100; sweep as the scenario says. A run of "
        "plan at a given rate has more where they last less than 60 s, so that a growing queue is seen.",
        min=10,
    ),
]
OutDirectory = Annotated[
    Path | None, option("--out", "Directory of the runs. Default: a new directory in runs/.", "DIR")
]
NumWorkers = Annotated[int | None, option("--workers", "Number of processes. Default: one per core.", min=1, max=1024)]
Cluster = Annotated[
    str | None, option("--cluster", "Run on Ray: ray (the cluster on this machine) or ray://HOST:PORT.", "ADDRESS")
]


@contextmanager
def kept_runs(
    kind: str, tables: Mapping[str, Any], out: Path | None, count: int | None, cluster: str | None, **asked: Any
) -> Iterator[tuple[StoredWorkers, TrialStore]]:
    """Yield what `planning.store.kept_runs` yields, by default of a directory in runs/. After Ctrl-C, or when a cluster
    goes away, a line says how many runs are kept."""
    from ...planning import store as runs
    from ...planning.workers import ClusterGone

    place = out or runs.default_place(runs.question(kind, tables, **asked))
    with termination_is_interruption(), runs.kept_runs(kind, tables, place, count, cluster, **asked) as (pool, store):
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
