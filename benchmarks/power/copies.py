"""Copies of the tree in which one defect is planted, and forks that import them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .defects import DrawnDefect
from .sites import ROOT

FOLDERS = ("core", "sim", "gpu", "properties", "checks", "observe", "planning", "twin", "cli", "serve", "ui")
LIBRARIES = ("numpy", "simpy", "pydantic", "pyarrow.parquet", "hypothesis", "scipy.stats", "torch")


@contextmanager
def planted(place: Path, defect: DrawnDefect | None) -> Iterator[Path]:
    """Yield the import path of a copy of the tree in `place` that has the defect; None: the tree as it is."""
    package = place / "foredraft"
    skip = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, package / folder, ignore=skip)
    for path in (ROOT / "api").glob("*.py"):
        shutil.copy(path, package)
    if defect is not None:
        path = package / defect.file
        path.write_text(defect.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
    try:
        yield place
    finally:
        shutil.rmtree(place)


def warm_up() -> None:
    """Import what every fork needs and no defect touches, on one thread."""
    os.environ |= {"OMP_NUM_THREADS": "1", "FOREDRAFT_KERNELS": "roofline"}
    for library in LIBRARIES:
        with suppress(ImportError):
            import_module(library)


def in_fork(place: Path, run: Callable[[], Any], limit_s: float) -> Any:
    """Run a function in a fork that imports the package of a copy. Returns what it returns, through JSON.

    An error comes back as {"error": its text}, as does the limit of processor time.
    """
    said = place / "said.json"
    child = os.fork()
    if child == 0:
        try:
            _import_from(place)
            signal.signal(signal.SIGPROF, _past_the_limit)
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            result = run()
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        said.write_text(json.dumps(result), encoding="utf-8")
        os._exit(0)
    os.waitpid(child, 0)
    return json.loads(said.read_text(encoding="utf-8")) if said.exists() else {"error": "the process died"}


def _import_from(place: Path) -> None:
    file = os.open(place / "printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(place)
    os.environ["PYTHONPATH"] = str(place)
    sys.path.insert(0, str(place))
    assert "foredraft" not in sys.modules, "a fork must import its own copy"


def _past_the_limit(number: int, frame: object) -> None:
    raise TimeoutError("past its limit of processor time")
